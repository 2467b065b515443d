"""Log-probabilities of right choices and KL in the analysis: read from files of any age, paired, chosen by, correlated; and tasks
on which the dense model does not tell right from wrong."""

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

from tests.findings import simulated_study
from tune_prune.analysis.input.items import discrimination, gold_logprobs, kl_blocks
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render.page import render
from tune_prune.analysis.statistics import rules
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.core.ledger import Ledger, put_sealed, read_baselines, write_baselines
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
    """Of a search of one model: half of its records are as old ones, without the log-probabilities; the dense model's is old."""
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


def test_the_choice_by_log_probability_is_cross_fitted(found: Findings) -> None:
    again = find(found.study, "gold_logprob").models["alpha"]
    fit = again.cross_fit
    assert fit is not None and fit.naive == pytest.approx(again.best["acc_mean"])
    rows = again.eligible
    means = rows.set_index("name")["gold_logprob_mean"]
    assert max(fit.chosen, key=fit.chosen.__getitem__) in means.nlargest(3).index
    assert fit.corrected == pytest.approx(rows.set_index("name")["acc_mean"][list(fit.chosen)].mean(), abs=0.06)
    fixed = find(found.study, "kl").models["alpha"].cross_fit
    assert fixed is not None and fixed.corrected == pytest.approx(fixed.naive)


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


def test_kendall_stands_beside_pearson(found: Findings) -> None:
    rows = found.models["alpha"].eligible
    entry = next(one for one in found.models["alpha"].correlations if one.measure == "gold_logprob_mean")
    pairs = list(itertools.combinations(zip(rows["gold_logprob_mean"], rows["acc_mean"], strict=True), 2))
    signs = np.array([np.sign(a[0] - b[0]) * np.sign(a[1] - b[1]) for a, b in pairs])
    ties = [sum(a[k] == b[k] for a, b in pairs) for k in (0, 1)]
    expected = signs.sum() / math.sqrt((len(pairs) - ties[0]) * (len(pairs) - ties[1]))
    assert entry.tau == pytest.approx(expected)
