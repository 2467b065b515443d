"""Measures beside accuracy: log-probabilities of right choices and KL; tasks on which the dense model only guesses."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.findings import simulated_study
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render.page import render
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.statistics.rules import RULES
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
    """Find a search of one model, of which one trial has no KL."""
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
    metrics |= summarize(scored)
    (folder / "trials" / dense.key).mkdir()
    (folder / "trials" / dense.key / "items.parquet").write_bytes(to_parquet(scored))
    write_baselines(FolderStore(folder), {"alpha": replace(dense, metrics=metrics)})
    return find(read_study([folder], []))


def test_rules_choose_by_them(found: Findings) -> None:
    model = found.models["alpha"]
    rows = model.eligible
    assert model.chosen["gold_logprob"] == [rows.loc[rows["gold_logprob_mean"].idxmax(), "name"]]
    assert model.chosen["kl"] == [rows.loc[rows["kl_text"].idxmin(), "name"]]
    both = pd.DataFrame({"name": ["a", "b", "c"], "kl_text": [1.0, 2.0, math.nan], "kl_tasks": [3.0, 1.5, 0.1]})
    kl = RULES["kl"]
    assert kl(both) == ["b"] and kl(both.drop(columns="kl_tasks")) == ["a"]
    assert kl(both[["name"]]) == RULES["gold_logprob"](both[["name"]]) == []


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
