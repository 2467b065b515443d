"""Findings that several files of tests read, made once in a test process. They are not changed."""

from __future__ import annotations

import pytest

from tests.findings import published_findings, simulated_findings
from tune_prune.analysis.statistics.findings import Findings


@pytest.fixture(scope="session")
def published() -> Findings:
    """The published grid of Llama, without items."""
    return published_findings()


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Two models with items and dense baselines, 18 configurations each, two of them failed or stopped."""
    folder = tmp_path_factory.mktemp("simulated")
    return simulated_findings(folder, failed=["taylor-s16-n128"], stopped=["layerwise-s64-n512"])
