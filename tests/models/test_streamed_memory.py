"""Memory of passes over a model in files does not depend on how many layers it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.streamed_stages import LAYER_BYTES

ROOT = Path(__file__).resolve().parents[2]


def growth(num_layers: int) -> dict[str, int]:
    """Bytes of every stage in a fresh process, in which the C library returns what is freed."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.streamed_stages", str(num_layers)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_layers():
    few, many = growth(4), growth(7)
    for stage, peak in few.items():
        assert 0.9 * peak <= many[stage] <= 1.1 * peak, stage
    assert max(many.values()) < 6 * LAYER_BYTES  # two layers, and one's sums and gradients
