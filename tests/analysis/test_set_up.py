"""What draft paragraphs say of how models were pruned and measured is so."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.findings import from_csv, published_findings, simulated_findings, simulated_study
from tune_prune.analysis.input.items import sizes_of
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.rows import TASK_ITEMS
from tune_prune.analysis.render import messages
from tune_prune.analysis.render.page import rank_plot, render
from tune_prune.analysis.render.paragraphs import paragraphs
from tune_prune.analysis.statistics.findings import find
from tune_prune.analysis.tables.all_tables import all_tables


def test_every_hyperparameter_that_is_not_at_its_default_is_named(tmp_path: Path) -> None:
    study = read_study([simulated_study(tmp_path, models=("alpha",), items=20)], [])
    model = study.models["alpha"]
    assert "Further settings" not in paragraphs(find(study))[0]
    refitted = np.where(model.rows["seq_len"] == 16, "none", "least_squares")
    rows = model.rows.assign(compensation=refitted, damping=0.1, refit_tokens=16_384, steps=2)
    found = find(replace(study, models={"alpha": replace(model, rows=rows)}))
    expected = "Further settings: compensation least_squares and none; damping 0.1; refit tokens 16384; steps 2."
    assert expected in paragraphs(found)[0]


def test_models_that_were_measured_otherwise_do_not_stand_side_by_side(tmp_path: Path) -> None:
    """As many tasks, but other items; and where all were measured alike one sentence says so."""
    folders = [simulated_study(tmp_path / name, models=(name,), items=n) for name, n in [("alpha", 40), ("beta", 20)]]
    findings = find(read_study(folders, []))
    text = paragraphs(findings)[0]
    assert [labels for _, labels in findings.protocols] == [["alpha"], ["beta"]]
    for label, items in [("alpha", 40), ("beta", 20)]:
        assert re.search(
            rf"Accuracy of {label} is the unweighted mean over 7 .*piqa[^,]*\(acc_norm, {items} questions\)", text
        )
    assert "do not stand side by side" in text and "best single configuration for all" not in text
    alike = paragraphs(simulated_findings(tmp_path / "alike", items=20))[0]
    assert "Accuracy is the unweighted mean" in alike and "side by side" not in alike
    assert "best single configuration for all" in alike


def test_errors_that_a_results_file_states_are_not_made_of_the_published_sizes(tmp_path: Path) -> None:
    """A file of 40 items a task, away from its trials."""
    experiment = simulated_study(tmp_path / "own", models=("alpha",), items=40)
    own = find(read_study([experiment], [])).models["alpha"]
    columns = ["method", "seq_len", "num_samples", "ppl", *(name for name in own.trials if name.startswith("acc_"))]
    path = tmp_path / "results.csv"
    own.trials[columns].to_csv(path, index=False)
    findings = find(read_study([], [("alpha", path)]))
    items = findings.models["alpha"].guessing["items"].drop("mean")
    assert items.tolist() == [40] * 7 and TASK_ITEMS["boolq"] != 40
    threshold = own.guessing.loc["piqa", "threshold"]
    assert findings.models["alpha"].guessing.loc["piqa", "threshold"] == pytest.approx(threshold)
    assert "Standard errors are those that the results file states." in paragraphs(findings)[0]
    own.trials[[name for name in columns if not name.endswith("_stderr")]].to_csv(path, index=False)
    findings = find(read_study([], [("alpha", path)]))
    assert findings.models["alpha"].guessing.loc["boolq", "items"] == TASK_ITEMS["boolq"]
    assert "Standard errors are binomial, from the sizes of the published tasks, as" in paragraphs(findings)[0]
    assert "published tasks" in paragraphs(published_findings())[0]


def test_what_is_not_known_of_a_model_is_no_difference(tmp_path: Path) -> None:
    """Items that were moved away, and numbers of items that rounded errors of a results file only imply."""
    folder = simulated_study(tmp_path / "one", items=20)
    study = read_study([folder], [])
    best = find(study).models["beta"].best
    (Path(best["output_dir"]) / "items.parquet").unlink()
    (one,) = find(read_study([folder], [])).protocols
    assert one[1] == ["alpha", "beta"] and one[0].items["boolq"] == 20
    rows = published_findings().models["Llama"].trials
    errors = {f"acc_{task}_stderr": rows[f"acc_{task}_stderr"].round(4) for task in TASK_ITEMS}
    rows = rows[
        ["method", "seq_len", "num_samples", "ppl", "acc_mean", *(f"acc_{task}" for task in TASK_ITEMS)]
    ].assign(**errors)
    for part, name in enumerate("ab"):
        rows.iloc[part::2].to_csv(tmp_path / f"{name}.csv", index=False)
    found = find(read_study([], [(name, tmp_path / f"{name}.csv") for name in "ab"]))
    assert len(found.protocols) == 1 and "side by side" not in paragraphs(found)[0]
    assert (
        found.models["a"].guessing["items"].drop("mean").to_dict() == TASK_ITEMS
    )  # to within what rounding leaves open


def test_an_accuracy_of_one_tells_no_number_of_items() -> None:
    rows = pd.DataFrame({"output_dir": ["", ""], "acc_own": [1.0, 0.9], "acc_own_stderr": [0.01, 0.0480384]})
    assert sizes_of(rows, ["own"]) == {"own": 40}
    assert sizes_of(rows[:1], ["own"]) == {}


def test_a_choice_by_text_needs_no_correction(tmp_path: Path) -> None:
    folder = simulated_study(tmp_path, models=("alpha",), items=30)
    for rule, corrected in [("perplexity", False), ("accuracy", True)]:
        text = paragraphs(find(read_study([folder], []), rule))[0]
        assert (f"Chosen by the rule {rule} on one part" in text) is corrected
        assert (f"No answer to a question has a part in the choice by {rule}" in text) is not corrected


def test_coefficients_stay_what_they_are_in_percent(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0.5, 0.02, (3, 36))
    accuracies = iter(noise[0])
    findings = from_csv(tmp_path, {"alpha": lambda *_: next(accuracies)}, ppl=20 * noise[1], removed_fraction=noise[2])
    with messages.accuracies_in_percent():
        text = paragraphs(findings)[0]
    coefficients = re.findall(r"r = (-?[\d.]+)|interval (-?[\d.]+) to (-?[\d.]+)", text)
    assert len(coefficients) > 2 and all(
        abs(float(number)) <= 1 for found in coefficients for number in found if number
    )
    assert "The intervals of these 2 correlations" in text


def test_the_auc_of_a_task_is_no_accuracy_in_percent(tmp_path: Path) -> None:
    table = all_tables(simulated_findings(tmp_path, models=("alpha",), items=30))["task_accuracies"]
    auc = next(column for column in table.columns if column.key == "auc")
    with messages.accuracies_in_percent():
        shown = [messages.cell_text(auc, row | {"auc": 0.9731}) for row in table.rows]
    assert set(shown) == {".973"}


def test_a_single_run_has_no_intervals(tmp_path: Path) -> None:
    findings = from_csv(tmp_path, {"M": lambda *key: 0.5 if key == ("taylor", 16, 128) else math.nan})
    assert findings.models["M"].correlations and "The intervals of these" not in paragraphs(findings)[0]


def test_the_drawing_holds_a_dense_model_below_its_configurations(tmp_path: Path) -> None:
    found = simulated_findings(tmp_path, models=("alpha",), items=30).models["alpha"]
    found.model.baseline["acc_mean"] = 0.1  # type: ignore[index]
    drawn = rank_plot(found)
    assert drawn["dense"] == 100 and all(0 <= point["y"] < 100 for point in drawn["points"])


def test_an_infinite_value_sorts_as_such(tmp_path: Path) -> None:
    study = read_study([simulated_study(tmp_path, models=("alpha",), items=20)], [])
    rows = study.models["alpha"].rows
    rows.loc[rows.index[0], "ppl"] = math.inf
    text = render(find(study), [])
    assert 'data-sort="Infinity"' in text and 'data-sort="inf"' not in text
