"""What cheaper looks at a trial tell of its final accuracy: by scipy, by plain loops, and by the summaries that a search makes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import kendalltau

from tests.findings import simulated_study
from tune_prune.analysis.input.items import GoldReader
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics import fidelities as module
from tune_prune.analysis.statistics.fidelities import kendall
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.core.ledger import Ledger, put_sealed, write_about
from tune_prune.core.records import StageReport
from tune_prune.core.store import FolderStore
from tune_prune.evaluation.item_scores import ItemScore, summarize, to_parquet

SLICES = (0, 1, 1, 2, 2, 2, 2)  # of the items of a task, in order


def items(generator: np.random.Generator, skill: float) -> list[ItemScore]:
    """Of two tasks, and one whose items have no single right choice; in an order of their own."""
    found = []
    for task in ("boolq", "piqa", "unclear"):
        for doc, part in enumerate(SLICES * 8):
            values = generator.normal(-9, 1, 2)
            gold = -1 if task == "unclear" else doc % 2
            values[gold] += skill
            right = float(values.argmax() == max(gold, 0))
            found.append(ItemScore(task, doc, part, right, right, tuple(values.tolist()), gold))
    generator.shuffle(found)  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """18 configurations, of which the three best have a second draw; better ones have a lower KL, with noise."""
    draws = {name: 2 for name in ("blockwise-s64-n512", "blockwise-s64-n128", "layerwise-s64-n512")}
    folder = simulated_study(tmp_path_factory.mktemp("study"), models=("alpha",), items=5, draws=draws)
    ledger, generator = Ledger(FolderStore(folder)), np.random.default_rng(1)
    about = json.loads((folder / "experiment.json").read_text())
    about["models"]["alpha"]["run"]["protocol"]["tasks"] = ["boolq", "piqa", "unclear"]
    write_about(FolderStore(folder), about)
    for record in sorted(ledger.records(), key=lambda record: record.key):
        skill = float(generator.uniform(0, 2))
        scored = items(generator, skill)
        metrics = {"ppl": 30 - skill + float(generator.normal())} | summarize(scored)
        for name in ("kl_text", "kl_tasks"):
            metrics |= {name: 9 - skill + float(generator.normal()), f"{name}_stderr": 0.1}
        seconds = {"kl": 2.0 if record.config.method == "taylor" else 0.01, "perplexity": 1.0, "zero_shot": 8.0}
        stages = [StageReport(stage, s, tokens=1) for stage, s in seconds.items()]
        (folder / "trials" / record.key / "items.parquet").write_bytes(to_parquet(scored))
        record = replace(record, metrics=metrics, stages=stages, files={})
        put_sealed(FolderStore(folder), f"ledger/{record.key}.json", record.to_dict())
    return folder


@pytest.fixture
def found(folder: Path) -> Findings:
    return find(read_study([folder], []))


@pytest.mark.parametrize("levels", [3, 1000])
def test_tau_is_scipys_and_its_error_the_plain_jackknife(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 7)
    generator = np.random.default_rng(levels)
    first = generator.integers(0, levels, 40).astype(float)
    second = np.where(generator.random(40) < 0.5, first, generator.integers(0, levels, 40))
    first[3] = math.inf  # the perplexity of a broken model
    tau, stderr = kendall(first, second)
    assert tau == pytest.approx(kendalltau(first, second).statistic, abs=1e-12) and 0.2 < tau < 0.8
    without = np.array([kendalltau(np.delete(first, k), np.delete(second, k)).statistic for k in range(40)])
    assert stderr == pytest.approx(math.sqrt(39 / 40 * ((without - without.mean()) ** 2).sum()), rel=1e-9)
    assert np.isnan(kendall(np.ones(6), np.arange(6.0))).all()


def test_the_jackknifes_error_is_that_of_other_trials() -> None:
    generator = np.random.default_rng(5)

    def drawn() -> tuple[float, float]:
        truth = generator.normal(size=45)
        return kendall(truth + generator.normal(size=45), truth + generator.normal(size=45))

    taus, errors = np.array([drawn() for _ in range(400)]).T
    assert errors.mean() == pytest.approx(taus.std(ddof=1), rel=0.12)


def test_slices_are_what_a_search_would_have_seen(tmp_path: Path) -> None:
    scored = items(np.random.default_rng(2), 1.0)
    (tmp_path / "items.parquet").write_bytes(to_parquet(scored))
    means = GoldReader().slices(str(tmp_path))
    assert means is not None and means.items.tolist() == [24, 72, 168]
    for number in range(3):
        seen = summarize(item for item in scored if item.slice <= number)
        assert means.accuracy[number] == pytest.approx(seen["acc_mean"], rel=1e-12)
        assert means.gold_logprob[number] == pytest.approx(seen["gold_logprob_mean"], rel=1e-12)
    assert GoldReader().slices(str(tmp_path / "nowhere")) is None


def test_rungs_are_of_one_draw_and_in_the_order_of_a_trial(found: Findings) -> None:
    model = found.models["alpha"]
    rows = model.trials[model.trials["seed"].isna()]
    assert (len(model.trials), len(rows)) == (21, 18)
    by = {(one.measure, round(one.items, 3)): one for one in model.fidelities if not math.isnan(one.items)}
    before = [one for one in model.fidelities if math.isnan(one.items)]
    assert [one.measure for one in before] == ["kl_text", "kl_tasks", "kl", "ppl"]
    assert list(by) == [
        (measure, share)
        for share in (round(1 / 7, 3), round(3 / 7, 3), 1.0)
        for measure in ("gold_logprob_mean", "acc_mean")
        if (measure, share) != ("acc_mean", 1.0)
    ]
    values = {
        "kl_text": -rows["kl_text"],
        "kl_tasks": -rows["kl_tasks"],
        "kl": -rows["kl_text"] - rows["kl_tasks"],
        "ppl": -rows["ppl"],
    }
    for one in [*before, by["gold_logprob_mean", 1.0]]:
        own = values.get(one.measure, rows["gold_logprob_mean"])
        assert one.tau == pytest.approx(kendalltau(own, rows["acc_mean"].round(12)).statistic) and one.trials == 18
        assert one.rank == int((own >= own[rows["acc_mean"].idxmax()] - 1e-12).sum())
    assert [one.seconds for one in before] == [
        2.0,
        2.0,
        2.0,
        1.0,
    ]  # what was in the cache counts as no time of the stage
    assert by["acc_mean", round(3 / 7, 3)].seconds == pytest.approx(8 * 3 / 7)


def test_few_trials_and_missing_values_make_no_rung(folder: Path) -> None:
    study = read_study([folder], [])
    rows = study.models["alpha"].rows
    best = rows.loc[rows["seed"].isna(), "acc_mean"].idxmax()
    rows.loc[best, "kl_text"] = math.nan
    measured = rows.index[rows["kl_tasks"].notna()]
    rows.loc[measured[4:], "kl_tasks"] = math.nan
    found = {one.measure: one for one in find(study).models["alpha"].fidelities}
    assert "kl_tasks" not in found and "kl" not in found
    assert found["kl_text"].rank is None and found["kl_text"].trials == 17 and math.isnan(found["kl_text"].let_through)
    few = pd.Series(rows["seed"].isna()).cumsum() > 4
    rows.loc[few | rows["seed"].notna(), ["success", "acc_mean"]] = [False, math.nan]
    assert find(study).models["alpha"].fidelities == ()
    assert "fidelities" not in all_tables(find(study))
