"""An accuracy of 0 or 1 is not certain: the standard error of the mean says so, wherever trials are compared or reported."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from statsmodels.stats.proportion import proportion_confint

from tests import findings as simulated
from tests.findings import from_csv, simulated_study
from tune_prune.analysis.export import write_views
from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.rows import TASK_ITEMS
from tune_prune.analysis.layout import write_layout
from tune_prune.analysis.render.paragraphs import paragraphs
from tune_prune.analysis.statistics.comparison import PairedScores
from tune_prune.analysis.statistics.cross_fit import cross_fit
from tune_prune.analysis.statistics.findings import find
from tune_prune.commands.evaluation_text import result_text
from tune_prune.commands.prune_request import from_config
from tune_prune.core.config import EvaluationProtocol, ModelRun
from tune_prune.core.ledger import Ledger, read_baselines
from tune_prune.core.measures import wilson_interval, wilson_stderr
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import FolderStore
from tune_prune.evaluation.evaluation import Evaluation
from tune_prune.evaluation.item_scores import ItemScore, summarize

ITEMS, TASKS = 150, 7


@pytest.mark.parametrize("items", [1, 5, 240, 10042])
def test_error_and_interval_are_wilsons(items: int) -> None:
    for right in (0, items):
        low, high = proportion_confint(right, items, method="wilson")
        assert wilson_interval(right / items, items) == pytest.approx((low, high), abs=1e-6)
        assert wilson_stderr(items) == pytest.approx((high - low) / 2 / 1.959964, rel=1e-6)


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No configuration, nor the dense model, answers an item of boolq."""
    monkeypatch.setitem(simulated.TASK_LEVELS, "boolq", -math.inf)
    return simulated_study(tmp_path, models=("alpha",), items=ITEMS, failed=["taylor-s16-n128"])


def test_a_task_without_a_right_answer_adds_its_error_to_what_was_recorded(experiment: Path) -> None:
    found = find(read_study([experiment], [])).models["alpha"]
    rows, added = found.eligible.set_index("key"), wilson_stderr(ITEMS) ** 2 / TASKS**2
    records = [record for record in Ledger(FolderStore(experiment)).records() if record.status == "complete"]
    assert len(records) == len(rows) == 17
    for record in records:
        assert record.metrics["acc_boolq"] == record.metrics["acc_boolq_stderr"] == 0
        row = rows.loc[record.key]
        assert row["acc_boolq_stderr"] == wilson_stderr(ITEMS)
        assert row["acc_mean_stderr"] == pytest.approx(math.sqrt(record.metrics["acc_mean_stderr"] ** 2 + added))
        assert row["acc_piqa_stderr"] == record.metrics["acc_piqa_stderr"]
    dense, recorded = found.model.baseline, read_baselines(FolderStore(experiment))["alpha"].metrics
    assert dense["acc_mean_stderr"] == pytest.approx(math.sqrt(recorded["acc_mean_stderr"] ** 2 + added))
    assert {name for name in recorded if dense[name] != recorded[name]} == {"acc_mean_stderr", "acc_boolq_stderr"}


def test_cross_fitted_it_has_that_error_too(experiment: Path) -> None:
    """The bootstrap draws from items that are all wrong. With one configuration chosen everywhere it is the whole error."""
    found = find(read_study([experiment], []), "perplexity").models["alpha"]
    assert found.cross_fit is not None
    assert found.cross_fit.stderr == pytest.approx(found.best["acc_mean_stderr"], rel=0.3)  # 7% is the bootstrap's own
    everything = PairedScores({"one": np.ones((6, 2)), "two": np.ones((3, 2))}, np.arange(2))
    fit = cross_fit(everything, ["a", "b"], lambda accuracies: 0, np.random.default_rng(0))
    assert fit is not None and fit.stderr == pytest.approx(math.hypot(wilson_stderr(6), wilson_stderr(3)) / 2)


@pytest.mark.slow
def test_files_of_trials_hold_what_was_recorded_and_lead_to_the_same_errors(experiment: Path, tmp_path: Path) -> None:
    found = find(read_study([experiment], [])).models["alpha"]
    write_layout(find(read_study([experiment], [])), tmp_path / "results")
    folder = tmp_path / "results" / "consolidated_alpha_20"
    written = pd.read_csv(folder / "all_methods_results.csv").set_index("key")["acc_mean_stderr"].dropna()
    assert written.to_dict() == {
        record.key: record.metrics["acc_mean_stderr"]
        for record in Ledger(FolderStore(experiment)).records()
        if record.status == "complete"
    }
    again = find(read_study([folder], [])).models["alpha"]
    for name in ("acc_mean_stderr", "acc_boolq_stderr"):
        pd.testing.assert_series_equal(again.eligible[name], found.eligible[name])
    assert again.model.baseline["acc_mean_stderr"] == found.model.baseline["acc_mean_stderr"]
    shutil.rmtree(experiment)  # nobody knows how many items there were
    assert find(read_study([folder], [])).models["alpha"].eligible["acc_boolq_stderr"].eq(0).all()


def test_a_mean_of_draws_has_the_error_of_certainty_only_where_all_of_them_are_right(
    tmp_path: Path, monkeypatch
) -> None:
    """Else its error is that of the items' means, item by item; and what draws add."""
    monkeypatch.setitem(simulated.TASK_LEVELS, "boolq", 0.385)
    names = ("blockwise-s64-n512", "blockwise-s64-n128", "layerwise-s64-n512")
    study = simulated_study(tmp_path, models=("alpha",), items=30, draws=dict.fromkeys(names, 3), draw_sd=0.005)
    found, mixed, whole = find(read_study([study], [])).models["alpha"], 0, 0
    between = found.draw_variances["acc_boolq"].variance / 3
    for name in names:
        row = found.named(name)
        own = found.draws[row.name]["output_dir"]
        scores = np.mean([read_items(folder).loc["boolq"] for folder in own], axis=0)
        certain = scores.min() == scores.max() == 1
        error = wilson_stderr(30) if certain else scores.std(ddof=1) / math.sqrt(30)
        assert row["acc_boolq_stderr"] == pytest.approx(math.hypot(error, math.sqrt(between)))
        mixed += not certain and any(read_items(folder).loc["boolq"].all() for folder in own)
        whole += certain
    assert mixed and whole


def test_sizes_are_what_other_errors_of_the_task_tell(tmp_path: Path) -> None:
    rows = pd.DataFrame({"seq_len": 16, "num_samples": [4, 128, 512], "method": "taylor", "pruning_ratio": 0.2})
    rows["acc_mean"] = rows["acc_boolq"] = [1.0, 0.75, 0.0]
    rows["acc_mean_stderr"] = rows["acc_boolq_stderr"] = [0.0, math.sqrt(0.75 * 0.25 / 39), 0.0]
    rows.to_csv(tmp_path / "results.csv", index=False)
    found = find(read_study([], [("M", tmp_path / "results.csv")])).models["M"].eligible
    expected = [wilson_stderr(40), math.sqrt(0.75 * 0.25 / 39), wilson_stderr(40)]
    assert found["acc_boolq_stderr"].tolist() == found["acc_mean_stderr"].tolist() == expected


def test_other_accuracies_keep_their_errors_to_the_last_bit(tmp_path: Path) -> None:
    experiment = simulated_study(tmp_path, models=("alpha",))
    rows = find(read_study([experiment], [])).models["alpha"].eligible.set_index("key")
    for record in Ledger(FolderStore(experiment)).records():
        errors = {name: value for name, value in record.metrics.items() if name.endswith("_stderr")}
        assert {name: rows.loc[record.key, name] for name in errors} == errors


def test_published_results_have_the_sizes_of_the_tasks(tmp_path: Path) -> None:
    best = ("taylor", 16, 128)
    findings = from_csv(tmp_path, {"M": lambda *key: 1.0 if key == best else 0.5})
    expected = math.sqrt(sum(wilson_stderr(n) ** 2 for n in TASK_ITEMS.values())) / TASKS
    assert findings.models["M"].best["acc_mean_stderr"] == pytest.approx(expected)
    assert "Wilson's 95% interval [@wilson1927]" in paragraphs(findings)[0]
    assert "wilson" not in "".join(paragraphs(from_csv(tmp_path, {"M": lambda *_: 0.5})))


def test_a_checkpoint_has_the_errors_of_the_final_table(experiment: Path) -> None:
    findings, store = find(read_study([experiment], [])), FolderStore(experiment)
    write_views(store, Ledger(store).records(), findings)
    request, found = from_config(str(experiment), "alpha", base="tiny-llama"), findings.models["alpha"]
    for name in ("acc_mean_stderr", "acc_boolq_stderr", "acc_piqa_stderr"):
        assert request.metrics[name] == found.best[name] > 0
        assert request.baseline[name] == found.model.baseline[name] > 0


def test_an_evaluation_has_the_errors_of_the_final_table() -> None:
    """Of 40 items of boolq all are right, of 40 of piqa three quarters."""
    rights = {"boolq": [1.0] * 40, "piqa": [1.0] * 30 + [0.0] * 10}
    items = [
        ItemScore(task, number, 0, right, right, (-1.0, -2.0), 0)
        for task, scores in rights.items()
        for number, right in enumerate(scores)
    ]
    run = ModelRun("m", "m", None, "embedded", None, EvaluationProtocol(("boolq", "piqa")), 0, "float32")
    record = TrialRecord("k", "m", {}, "complete", metrics=summarize(items) | {"ppl": 3.0})
    found = Evaluation(run, record, tuple(items), 128)
    errors = [wilson_stderr(40), math.sqrt(0.75 * 0.25 / 39)]
    assert found.tasks["stderr"].tolist() == pytest.approx(errors)
    assert found.acc_mean_stderr == pytest.approx(math.hypot(*errors) / 2)
    assert record.metrics["acc_boolq_stderr"] == 0  # what is recorded stays lm-eval's
    rows = {line.split()[0]: line.split() for line in result_text(found, None).splitlines() if line}
    of_both = math.hypot(*errors) / 2
    assert (rows["boolq"][4], rows["mean"][3]) == (f"{errors[0]:.4f}"[1:], f"{of_both:.4f}"[1:])
