"""Measures beside accuracy: log-probabilities of right choices and KL, read from files of any age, paired and chosen by; tasks on
which the dense model does not tell right from wrong; what cheaper looks at a trial tell of its final accuracy."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
from scipy.stats import kendalltau

from tests.findings import simulated_study
from tune_prune.analysis.input.items import GoldReader, discrimination, gold_logprobs, kl_blocks
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render.page import render
from tune_prune.analysis.statistics import fidelities as module
from tune_prune.analysis.statistics import rules
from tune_prune.analysis.statistics.fidelities import kendall
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.core.ledger import Ledger, put_sealed, read_baselines, write_about, write_baselines
from tune_prune.core.records import StageReport
from tune_prune.core.store import FolderStore
from tune_prune.evaluation.item_scores import ItemScore, summarize, to_parquet

TASKS = {"boolq": 2, "piqa": 2, "arc_easy": 4}


def items(generator: np.random.Generator, told: dict[str, float], count: int = 60) -> list[ItemScore]:
    """`told`: how many nats the right choice is worth more than another, on average; the answers of boolq are mostly the second."""
    found = []
    for task, choices in TASKS.items():
        for doc in range(count):
            gold = int(generator.random() < 0.7) if task == "boolq" else doc % choices
            values = generator.normal(-9, 1, choices)
            values[gold] += told.get(task, 0.0)
            if task == "boolq":
                values[1] += 5.0  # it says yes, whatever is asked
            right = float(values.argmax() == gold)
            found.append(ItemScore(task, doc, 0, right, right, tuple(values.tolist()), gold))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Find a search of one model: half of its records are as old ones, without the log-probabilities; the dense model's is old."""
    folder = simulated_study(tmp_path_factory.mktemp("study"), models=("alpha",), items=5)
    ledger, generator = Ledger(FolderStore(folder)), np.random.default_rng(1)
    about = json.loads((folder / "experiment.json").read_text())
    protocol = about["models"]["alpha"]["run"]["protocol"]
    about["models"]["alpha"]["run"]["protocol"] = protocol | {"tasks": list(TASKS)}
    for index, record in enumerate(sorted(ledger.records(), key=lambda record: record.key)):
        scored = items(generator, {"piqa": 1 + index / 10, "arc_easy": 3 - index / 10})
        metrics = {name: value for name, value in record.metrics.items() if not name.startswith("acc_")} | summarize(
            scored
        )
        metrics = {name: value for name, value in metrics.items() if index % 2 or not name.startswith("gold")}
        (folder / "trials" / record.key / "items.parquet").write_bytes(to_parquet(scored))
        if index != 3:  # one that was measured before there was KL
            blocks = {"tokens": [128] * 8, "nats": (1 + index / 20 + generator.normal(0, 0.1, 8)).tolist()}
            metrics |= {"kl_text": float(np.mean(blocks["nats"])), "kl_text_stderr": 0.3}
            (folder / "trials" / record.key / "kl.json").write_text(json.dumps({"text": blocks}))
        record = replace(record, metrics=metrics, files={})
        put_sealed(FolderStore(folder), f"ledger/{record.key}.json", record.to_dict())
    scored = items(generator, {"piqa": 2.0, "arc_easy": 3.0})
    dense = read_baselines(FolderStore(folder))["alpha"]
    metrics = {n: v for n, v in dense.metrics.items() if not n.startswith("acc_")}
    metrics |= {n: v for n, v in summarize(scored).items() if not n.startswith("gold")}
    (folder / "trials" / dense.key).mkdir()
    (folder / "trials" / dense.key / "items.parquet").write_bytes(to_parquet(scored))
    write_baselines(FolderStore(folder), {"alpha": replace(dense, metrics=metrics)})
    return find(read_study([folder], []))


def test_older_records_get_their_log_probabilities_from_their_items(found: Findings) -> None:
    model = found.models["alpha"]
    assert len(model.eligible) == 18
    for _, row in model.eligible.iterrows():
        table = pyarrow.parquet.read_table(Path(row["output_dir"]) / "items.parquet").to_pylist()
        scored = [ItemScore(**{n: r[n] for n in ("task", "doc_id", "slice", "acc", "acc_norm", "gold")},
                            loglikelihoods=tuple(r["loglikelihoods"])) for r in table]  # fmt: skip
        for name, value in summarize(scored).items():
            if name.startswith("gold"):
                assert row[name] == pytest.approx(value, rel=1e-12), name
    assert model.model.baseline["gold_logprob_mean"] == pytest.approx(
        np.mean([model.model.baseline[f"gold_logprob_{task}"] for task in TASKS])
    )


def test_gaps_are_paired(found: Findings) -> None:
    model = found.models["alpha"]
    gaps, rows = model.measure_gaps, model.eligible
    best = rows["gold_logprob_mean"].idxmax()
    other = rows.index[rows.index != best][0]
    one, two = (gold_logprobs(rows.loc[index, "output_dir"]) for index in (other, best))
    errors = [(one[task] - two[task]).std(ddof=1) / math.sqrt(60) for task in TASKS]
    assert gaps.loc[other, "gold_logprob_mean_gap_stderr"] == pytest.approx(math.hypot(*errors) / 3)
    assert gaps.loc[best, "gold_logprob_mean_gap"] == 0 == gaps.loc[best, "gold_logprob_mean_gap_stderr"]
    nearest = rows["kl_text"].idxmin()
    other = rows.index[(rows.index != nearest) & rows["kl_text"].notna()][0]
    blocks = [kl_blocks(rows.loc[index, "output_dir"])["kl_text"].to_numpy() for index in (other, nearest)]
    assert gaps.loc[other, "kl_text_gap_stderr"] == pytest.approx((blocks[0] - blocks[1]).std(ddof=1) / math.sqrt(8))
    assert gaps.loc[other, "kl_text_gap"] == pytest.approx(np.mean(blocks[0] - blocks[1]))
    assert "kl_tasks_gap" not in gaps and gaps["kl_text_gap"].isna().sum() == 1


def test_rules_choose_by_them(found: Findings) -> None:
    model = found.models["alpha"]
    rows = model.eligible
    assert model.chosen["gold_logprob"] == [rows.loc[rows["gold_logprob_mean"].idxmax(), "name"]]
    assert model.chosen["kl"] == [rows.loc[rows["kl_text"].idxmin(), "name"]]
    both = pd.DataFrame({"name": ["a", "b", "c"], "kl_text": [1.0, 2.0, math.nan], "kl_tasks": [3.0, 1.5, 0.1]})
    assert rules.kl(both) == ["b"] and rules.kl(both.drop(columns="kl_tasks")) == ["a"]
    assert rules.kl(both[["name"]]) == rules.gold_logprob(both[["name"]]) == []


def test_tasks_on_which_the_dense_model_tells_nothing_are_marked(found: Findings) -> None:
    model = found.models["alpha"]
    assert model.uninformative == ["boolq"]
    row = model.eligible.iloc[0]
    mean, error = model.informative(row)
    assert mean == pytest.approx((row["acc_piqa"] + row["acc_arc_easy"]) / 2)
    assert error == pytest.approx(math.hypot(row["acc_piqa_stderr"], row["acc_arc_easy_stderr"]) / 2)
    assert any(warning.kind == "tasks_at_chance" for warning in model.warnings)
    tables = all_tables(found)
    told = {row["task"]: row["informative"] for row in tables["task_accuracies"].rows}
    assert told == {"boolq": "no", "piqa": "yes", "arc_easy": "yes", "mean": ""}
    measures = tables["measures"]
    assert [row["name"] for row in measures.rows[:2]] == ["dense", model.eligible["name"].iloc[0]]
    assert measures.rows[0]["kl_text"] == 0.0 and len(measures.rows) == 19
    text = render(found, [])
    assert (
        "On boolq the original model itself does not tell right from wrong" in text
        and "Gold logprob" in text
        and "KL text" in text
    )


def test_auc_is_that_of_all_pairs(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    scored = items(generator, {"boolq": 0.4, "piqa": 1.0, "arc_easy": 0.5}, 40)
    scored += [
        ItemScore("piqa", 99, 0, 1.0, 1.0, (-3.0, -3.0), 1),
        ItemScore("unclear", 0, 0, 1.0, None, (-1.0, -2.0), -1),
    ]
    (tmp_path / "items.parquet").write_bytes(to_parquet(scored))
    told = discrimination(str(tmp_path))
    assert list(told.index) == ["boolq", "piqa", "arc_easy"]
    for task in ("boolq", "piqa"):
        margins = [(i.loglikelihoods[1] - i.loglikelihoods[0], i.gold) for i in scored if i.task == task]
        pairs = [(high, low) for (high, a), (low, b) in itertools.product(margins, margins) if a > b]
        assert told.loc[task, "auc"] == pytest.approx(np.mean([(h > low) + (h == low) / 2 for h, low in pairs]))
    ranks = [np.mean([i.loglikelihoods[i.gold] > v for k, v in enumerate(i.loglikelihoods) if k != i.gold])
             for i in scored if i.task == "arc_easy"]  # fmt: skip
    assert told.loc["arc_easy", "auc"] == pytest.approx(np.mean(ranks))


@pytest.mark.slow
def test_a_model_that_tells_nothing_is_found_in_95_of_100(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    marked = []
    for number in range(300):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "items.parquet").write_bytes(to_parquet(items(generator, {}, 40)))
        marked.append((discrimination(str(folder))["p"] >= 0.05).tolist())
    assert (np.mean(marked, axis=0) > 0.91).all() and (np.mean(marked, axis=0) < 0.99).all()


SLICES = (0, 1, 1, 2, 2, 2, 2)  # of the items of a task, in order


def sliced_items(generator: np.random.Generator, skill: float) -> list[ItemScore]:
    """Make items of two tasks, and of one whose items have no single right choice; in an order of their own."""
    scored = []
    for task in ("boolq", "piqa", "unclear"):
        for doc, part in enumerate(SLICES * 8):
            values = generator.normal(-9, 1, 2)
            gold = -1 if task == "unclear" else doc % 2
            values[gold] += skill
            right = float(values.argmax() == max(gold, 0))
            scored.append(ItemScore(task, doc, part, right, right, tuple(values.tolist()), gold))
    generator.shuffle(scored)  # type: ignore[arg-type]
    return scored


@pytest.fixture(scope="module")
def sliced_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """18 configurations, of which the three best have a second draw; better ones have a lower KL, with noise."""
    draws = {name: 2 for name in ("blockwise-s64-n512", "blockwise-s64-n128", "layerwise-s64-n512")}
    sliced_folder = simulated_study(tmp_path_factory.mktemp("study"), models=("alpha",), items=5, draws=draws)
    ledger, generator = Ledger(FolderStore(sliced_folder)), np.random.default_rng(1)
    about = json.loads((sliced_folder / "experiment.json").read_text())
    about["models"]["alpha"]["run"]["protocol"]["tasks"] = ["boolq", "piqa", "unclear"]
    write_about(FolderStore(sliced_folder), about)
    for record in sorted(ledger.records(), key=lambda record: record.key):
        skill = float(generator.uniform(0, 2))
        scored = sliced_items(generator, skill)
        metrics = {"ppl": 30 - skill + float(generator.normal())} | summarize(scored)
        for name in ("kl_text", "kl_tasks"):
            metrics |= {name: 9 - skill + float(generator.normal()), f"{name}_stderr": 0.1}
        seconds = {"kl": 2.0 if record.config.method == "taylor" else 0.01, "perplexity": 1.0, "zero_shot": 8.0}
        stages = [StageReport(stage, s, tokens=1) for stage, s in seconds.items()]
        (sliced_folder / "trials" / record.key / "items.parquet").write_bytes(to_parquet(scored))
        record = replace(record, metrics=metrics, stages=stages, files={})
        put_sealed(FolderStore(sliced_folder), f"ledger/{record.key}.json", record.to_dict())
    return sliced_folder


@pytest.fixture
def fidelity_findings(sliced_folder: Path) -> Findings:
    return find(read_study([sliced_folder], []))


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
    scored = sliced_items(np.random.default_rng(2), 1.0)
    (tmp_path / "items.parquet").write_bytes(to_parquet(scored))
    means = GoldReader().slices(str(tmp_path))
    assert means is not None and means.items.tolist() == [24, 72, 168]
    for number in range(3):
        seen = summarize(item for item in scored if item.slice <= number)
        assert means.accuracy[number] == pytest.approx(seen["acc_mean"], rel=1e-12)
        assert means.gold_logprob[number] == pytest.approx(seen["gold_logprob_mean"], rel=1e-12)
    assert GoldReader().slices(str(tmp_path / "nowhere")) is None


def test_rungs_are_of_one_draw_and_in_the_order_of_a_trial(fidelity_findings: Findings) -> None:
    model = fidelity_findings.models["alpha"]
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
