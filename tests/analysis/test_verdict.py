"""The verdict of a search and the first lines of an analysis: one configuration of each model, trained or not, what to quote
and what to keep; it is what `prune` makes without being told which."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.findings import from_csv, simulated_findings, simulated_study
from tune_prune.analysis.export import write_views
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics.findings import find
from tune_prune.analysis.verdict import close_calls, final_table, verdicts, winners
from tune_prune.commands import prune_request
from tune_prune.commands.results import Results
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger
from tune_prune.core.store import FolderStore

GAINS = {"blockwise-s64-n512": 0.10, "taylor-s64-n512": 0.05}
LOSSES = {"blockwise-s64-n512": -0.2}


def line(found) -> str:
    (verdict,) = verdicts(found).values()
    return " ".join(verdict.line.split())


@pytest.mark.parametrize(("gains", "winner"), [(GAINS, "alpha+lora"), (LOSSES, "alpha")])
def test_of_a_model_and_its_training_one_wins(gains: dict[str, float], winner: str, tmp_path: Path) -> None:
    folder = simulated_study(tmp_path, models=("alpha",), trained=gains)
    found = find(read_study([folder], []))
    assert winners(found) == {"alpha": winner}
    best = found.models[winner].best
    assert best["acc_mean"] == max(one.best["acc_mean"] for one in found.models.values())
    said = line(found)
    assert said.startswith(f"best alpha: {best['method']} on {best['num_samples']} samples of {best['seq_len']} tokens")
    assert ("trained for 100 steps" in said) == (winner == "alpha+lora")
    assert f"accuracy {best['acc_mean']:.4f} ± ".replace(" 0.", " .") in said and "% of the original's" in said

    store = FolderStore(folder)
    write_views(store, Ledger(store).records(), found)
    assert json.loads((folder / "global_best_config.json").read_text())["winners"] == {"alpha": winner}
    for label in (None, winner):  # `keep` says none
        assert prune_request.from_config(str(folder), label, base="tiny-llama").config.name == best["name"]


def test_all_of_a_model_are_compared_together(tmp_path: Path) -> None:
    """The training gains so much that nothing without it is near, and both of its own are too close to each other."""
    both = {"blockwise-s64-n512": 0.2, "blockwise-s64-n128": 0.2}
    found = simulated_findings(tmp_path, models=("alpha",), trained=both)
    (verdict,) = verdicts(found).values()
    assert len(verdict.rows) == 20 and verdict.rows["acc_mean"].is_monotonic_decreasing
    assert verdict.marked == {f"{name}-lora" for name in both} and line(found).endswith(
        "; 1 of 19 others is too close to call"
    )
    table = final_table(found)
    assert table.count("\n  original ") == 1 and table.startswith(
        "alpha: 18 trials (18 complete); trained: 2 trials (2 complete)"
    )
    assert " num_samples  Training " in table and "Accuracy lost" not in table
    marked = [row.split() for row in table.splitlines() if "* " in row and "±" in row]
    assert len(marked) == 2 and all(row[3] == "yes" for row in marked)


def test_several_models_have_a_line_and_are_named_to_prune(tmp_path: Path) -> None:
    folder = simulated_study(tmp_path, trained=GAINS)
    found = find(read_study([folder], []))
    said = str(Results(folder, found, {}))
    assert [row.split()[1] for row in said.splitlines() if row.startswith("best ")] == ["alpha:", "beta:"]
    assert said.index("best ") == 0 and said.count("\n  original ") == 2
    across = said.partition("Accuracy lost")[2]
    assert "alpha+lora" in across and "beta+lora" in across and "–: not tried" in across
    store = FolderStore(folder)
    write_views(store, Ledger(store).records(), found)
    with pytest.raises(
        UserError, match=r"holds 4 results; choose one with --model: alpha, alpha\+lora, beta, beta\+lora"
    ):
        prune_request.from_config(str(folder), None)


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([0.63], "no other configuration is complete"),
        ([0.63, 0.3], "clearly better than the other one"),
        ([0.63, 0.3, 0.3], "clearly better than all 2 others"),
        ([0.63, 0.629], "the other one is too close to call"),
        ([0.63, 0.629, 0.3], "1 of 2 others is too close to call"),
        ([0.63, 0.629, 0.628], "2 of 2 others are too close to call"),
    ],
)
def test_counts_have_one_form(tmp_path: Path, levels: list[float], said: str) -> None:
    of = dict(zip([("taylor", 32, 128), ("layerwise", 32, 128), ("blockwise", 32, 128)], levels, strict=False))
    found = from_csv(tmp_path, {"M": lambda *key: of.get(key, math.nan)}).models["M"]
    assert close_calls(found) == said
