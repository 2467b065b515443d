"""A refit and a training that fit their calibration text and no other are found out by a whole search; innocent ones are not
accused."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from embedded_world import items

import tune_prune
from tune_prune.analysis.statistics.differences import Change
from tune_prune.commands.results import Results

WHOLE_TEXT = True
pytestmark = pytest.mark.slow  # four searches

SPACE = """
search: grid
method: [taylor]
seq_len: [128]
num_samples: [64]
"""
PARTS = {
    "refit": "compensation: [none, least_squares]\ndamping: [0.001, 0.1]\nrefit_tokens: [2048]\n",
    "training": "recovery: [none, lora]\nrecovery_steps: [120]\nrecovery_rate: [0.001, 0.01]\n",
}


def searched(folder: Path, kind: str, calibration: str) -> tuple[Results, list[Change]]:
    """A search over the kind's two strengths, and what these change."""
    space = folder / f"{kind}.yaml"
    space.write_text(SPACE + PARTS[kind], encoding="utf-8")
    results = tune_prune.search(
        "tiny-llama", space, calibration=calibration, limit=40, storage_path=folder, name=kind, inline=True
    )
    found = [change for model in results.findings.models.values() for change in model.changes]
    assert [change.kind for change in found] == [kind] * 2
    return results, found


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text of nothing but questions that are answered by yes or no."""
    rng, path = random.Random(9), tmp_path_factory.mktemp("narrow") / "boolq.txt"
    questions = (items.solved("boolq", items.MAKERS["boolq"](rng, False)) for _ in range(3000))
    path.write_text("\n".join(questions), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("kind", "strong"), [("refit", "l0.001"), ("training", "e0.01")])
def test_what_fits_a_narrow_text_alone_is_found_out(tmp_path: Path, narrow: str, kind: str, strong: str) -> None:
    results, found = searched(tmp_path, kind, narrow)
    planted, other = sorted(found, key=lambda change: strong not in change.after["name"])
    assert planted.own_text < 0.6  # by its own text it is a large gain
    assert "gold_logprob_mean" in planted.worse
    assert planted.shifts["kl_text"].change > 0 > other.shifts["kl_text"].change
    assert kind == "refit" or other.worse == ()  # a slow training does no harm elsewhere
    said = re.sub(r"\s+", " ", results.report())
    assert re.search(
        rf"Right answers are less likely than without its repair or training \(95%\): [^:.]*{planted.after['name']}",
        said,
    )


@pytest.mark.parametrize("kind", PARTS)
def test_what_is_fitted_to_the_whole_text_is_not_accused(tmp_path: Path, kind: str) -> None:
    for change in searched(tmp_path, kind, "embedded")[1]:
        assert change.own_text < 1 and change.worse == ()
        assert change.shifts["kl_text"].change < 0
