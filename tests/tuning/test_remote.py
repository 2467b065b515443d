"""A function call on a worker of a running Ray."""

from __future__ import annotations

import tempfile

import pytest

from tune_prune.tuning.ray_cluster import cluster, remote
from tune_prune.tuning.ray_cluster.resources import TrialResources

pytestmark = pytest.mark.slow  # starts Ray


def half(number: int) -> int:
    if number % 2:
        raise ValueError("odd")
    return number // 2


def test_a_call_answers_raises_or_is_given_up(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        with cluster.connected(None, num_cpus=1):
            assert remote.call(half, 6, TrialResources(cpus=1)) == 3
            with pytest.raises(ValueError, match="odd"):
                remote.call(half, 7, TrialResources(cpus=1))
            monkeypatch.setattr(remote, "WAIT_S", 0.1)
            assert remote.call(half, 6, TrialResources(cpus=99)) is None  # no node is ever free for it
