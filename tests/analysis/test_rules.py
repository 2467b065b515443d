"""Selection rules: on rows made by hand, "smallest" over the ratios of a study, and by the measured speeds of an experiment."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.findings import simulated_study
from tune_prune.analysis.figures import accuracy_size, draw_all
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.rows import calibration_tokens, typed
from tune_prune.analysis.render.text import text_table
from tune_prune.analysis.statistics import rules
from tune_prune.analysis.statistics.differences import Difference
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.all_tables import all_tables, write_tables
from tune_prune.analysis.tables.configurations import by_size, is_within, smallest
from tune_prune.commands import analysis
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, put_sealed, read_baselines, write_baselines
from tune_prune.core.speed_records import Conditions, Rounds, SpeedRecord, write_speed
from tune_prune.core.store import FolderStore
from tune_prune.pruning.compensation import recovery


def rows(*values: tuple[Any, ...], **more: list[float]) -> pd.DataFrame:
    """Rows (name, acc_mean, ppl, tokens), the most accurate first; errors of a difference are 1 point if not given."""
    frame = pd.DataFrame(values, columns=["name", "acc_mean", "ppl", "tokens"])
    gaps = 100 * (frame["acc_mean"] - frame["acc_mean"].iloc[0])
    defaults = {
        "params_count": pd.array([800] * len(frame), dtype="Int64"),
        "gradient_pass_s": math.nan,
        "retained_per_second": math.nan,
        "difference_points": gaps,
        "difference_stderr_points": np.where(gaps == 0, 0.0, 1.0),
        "margin_points": 2 + 100 * (frame["acc_mean"] - 0.605),  # below a dense model of .605
    }
    return frame.assign(**(defaults | more))


ABC = (("a", 0.60, 12.0, 4096), ("b", 0.595, 11.0, 1024), ("c", 0.58, 10.0, 64))


def test_each_rule_chooses_what_it_says() -> None:
    assert {rule: choose(rows(*ABC)) for rule, choose in rules.RULES.items()} == {
        "accuracy": ["a"],
        "perplexity": ["c"],
        "gold_logprob": [],  # nobody has measured it
        "kl": [],
        "one-standard-error": ["b"],  # c is cheaper, but 2 points behind with an error of 1
        "pareto": ["a", "b", "c"],
        "smallest": ["a"],  # all are of one size
        "retained-per-second": [],  # no speed was measured
    }


@pytest.mark.parametrize(
    ("errors", "expected"),
    [([0, 0.4, 1.9], "a"), ([0, 0.5, 1.9], "b"), ([0, 0.4, 2.1], "c"), ([math.nan] * 3, "a")],
    ids=["none", "one", "the cheapest of all", "unknown"],
)
def test_one_standard_error_is_of_the_difference_to_the_best(errors: list[float], expected: str) -> None:
    frame = rows(*ABC, difference_stderr_points=[error + 1e-9 for error in errors])
    assert rules.one_standard_error(frame) == [expected]


def test_steps_refit_and_training_count_as_calibration_tokens() -> None:
    configs = [
        PruningConfig("taylor", 16, 8),
        PruningConfig("taylor", 16, 8, steps=4),
        PruningConfig("taylor", 16, 8, compensation="least_squares", refit_tokens=2048),
        PruningConfig(
            "taylor", 16, 8, compensation="least_squares", refit_tokens=2048, recovery="lora", recovery_steps=3
        ),
    ]
    tokens = calibration_tokens(typed(pd.DataFrame([config.to_dict() for config in configs])))
    assert tokens.tolist() == [128, 512, 128 + 2048, 128 + 2048 + 3 * recovery.ROWS * recovery.WINDOW]


def test_equal_tokens_are_told_apart_by_the_measured_pass_then_by_accuracy() -> None:
    same = (("a", 0.600, 12.0, 64), ("b", 0.599, 11.0, 64), ("c", 0.598, 10.0, 64))
    assert rules.one_standard_error(rows(*same)) == ["a"]
    assert rules.one_standard_error(rows(*same, gradient_pass_s=[math.nan, 2.0, 2.0])) == ["b"]
    assert rules.one_standard_error(rows(*same, gradient_pass_s=[3.0, 2.0, 1.0])) == ["c"]


@pytest.mark.parametrize(
    ("params", "margins", "expected"),
    [
        ([800, 700, 600], [1.5, 1.0, 0.0], ["c"]),
        ([800, 700, 600], [1.5, 1.0, -0.1], ["b"]),  # c is too far below the dense model
        ([800, 700, 699.9], [1.5, 1.0, 0.5], ["b"]),  # a channel is no smaller model
        ([math.nan] * 3, [1.5, 1.0, 0.5], ["a"]),
        ([800, 700, 600], [-0.1, -0.2, -0.3], []),
        ([800, 700, 600], [math.nan] * 3, []),  # the dense model is unknown
    ],
)
def test_smallest_is_the_smallest_within_the_bound(params: Any, margins: list[float], expected: list[str]) -> None:
    assert rules.smallest(rows(*ABC, params_count=params, margin_points=margins)) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.9, 1.0, 1.1], ["c"]),
        ([1.1, math.nan, 1.1], ["a"]),  # of equal ones the more accurate
    ],
)
def test_the_most_retained_per_second_is_of_those_that_were_measured(values: list[float], expected: list[str]) -> None:
    assert rules.retained_per_second(rows(*ABC, retained_per_second=values)) == expected


def test_perplexity_ignores_what_is_not_finite() -> None:
    frame = rows(("a", 0.6, math.nan, 1), ("b", 0.5, math.inf, 1), ("c", 0.4, 30.0, 1), ("d", 0.3, 30.0, 1))
    assert rules.RULES["perplexity"](frame) == ["c"]
    assert rules.RULES["perplexity"](frame.iloc[:2]) == []


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ["a", "b"]),  # c is worse than b in both
        ({"params_count": [800, 800, 799.9]}, ["a", "b"]),  # a channel is no smaller model
        ({"params_count": [800, 800, 700]}, ["a", "b", "c"]),
        ({"latency_s": [1.0, 1.0, 0.5]}, ["a", "b", "c"]),
        ({"latency_s": [1.0, 1.0, math.nan]}, ["a", "b"]),  # not measured is not fast
        ({"latency_s": [1.0] * 3, "latency_s_stderr": [3.0, 2.0, 1.0]}, ["a", "b"]),
    ],
)
def test_pareto_keeps_what_nothing_dominates(more: dict[str, list[float]], expected: list[str]) -> None:
    frame = rows(("a", 0.6, 12.0, 1), ("b", 0.5, 10.0, 1), ("c", 0.4, 11.0, 1), **more)
    assert rules.pareto(frame) == expected


def test_pareto_is_a_brute_force_search() -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(0, 12, (60, 3))
    frame = rows(
        *((str(i), a / 100, float(p), 1) for i, (a, p, _) in enumerate(values)), latency_s=values[:, 2].tolist()
    )
    costs = [(-a, p, s) for a, p, s in values.tolist()]
    expected = {
        str(i)
        for i, mine in enumerate(costs)
        if not any(other != mine and all(o <= m for o, m in zip(other, mine, strict=True)) for other in costs)
    }
    assert set(rules.pareto(frame)) == expected
    assert 1 < len(expected) < 30


@pytest.fixture(scope="module")
def two_ratios(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search at two ratios: 0.3 for the trials with 16 tokens, which lose 8 points more. The dense model is the best trial's
    twin, with its items."""
    two_ratios = simulated_study(tmp_path_factory.mktemp("study"), models=("alpha",), items=40)
    ledger = Ledger(FolderStore(two_ratios))
    records = {record.config.name: record for record in ledger.records()}
    for record in records.values():
        if record.config.seq_len == 16:
            metrics = record.metrics | {"params_count": 70_000.0, "removed_fraction": 0.3}
            smaller = replace(record, config=replace(record.config, pruning_ratio=0.3), metrics=metrics)
            put_sealed(FolderStore(two_ratios), f"ledger/{record.key}.json", smaller.to_dict())
    best = max(records.values(), key=lambda record: record.metrics["acc_mean"])
    dense = read_baselines(FolderStore(two_ratios))["alpha"]
    accuracies = {name: v for name, v in best.metrics.items() if name.startswith("acc_")}
    write_baselines(FolderStore(two_ratios), {"alpha": replace(dense, metrics=dense.metrics | accuracies)})
    twin = two_ratios / "trials" / dense.key
    twin.mkdir()
    shutil.copy(two_ratios / "trials" / best.key / "items.parquet", twin)
    return two_ratios


def differences(two_ratios: Path, name: str) -> pd.Series:
    """Item by item, the scores of a trial minus those of the dense model."""
    dense = json.loads((two_ratios / "baseline.json").read_text())["alpha"]["key"]
    records = Ledger(FolderStore(two_ratios)).records()
    key = next(record.key for record in records if record.config.name == name)
    tables = [pd.read_parquet(two_ratios / "trials" / one / "items.parquet") for one in (key, dense)]
    own, other = (table.set_index(["task", "doc_id"])["score"].sort_index().astype("float64") for table in tables)
    return own - other


@pytest.mark.parametrize("model_ratio", [0.2, 0.3])
def test_over_all_ratios_the_smallest_within_the_bound_is_chosen(two_ratios: Path, model_ratio: float) -> None:
    rows = find(read_study([two_ratios], [])).models["alpha@0.3"].eligible
    gap = -(rows["margin_points"].max() - 2)  # of the nearest of 0.3
    assert 4 < gap < 14
    found = find(read_study([two_ratios], []), "smallest", within=gap + (0.1 if model_ratio == 0.3 else -0.1))
    chosen = found.smallest["alpha"]
    assert chosen.model.label == f"alpha@{model_ratio:g}"
    assert chosen.best["acc_mean"] == chosen.eligible["acc_mean"].max()
    table = smallest(found)
    assert table is not None
    assert [(row["model"], row["chosen"]) for row in table.rows] == [
        ("alpha@0.2", model_ratio == 0.2),
        ("alpha@0.3", model_ratio == 0.3),
    ]
    assert [row["within"].kind for row in table.rows] == [
        "within_surely",
        f"within_{'yes' if model_ratio > 0.2 else 'no'}",
    ]
    assert [row["kept"] for row in table.rows] == [pytest.approx(0.8), pytest.approx(0.7)]
    apart = differences(two_ratios, table.rows[1]["config"]).groupby("task")
    assert table.rows[1]["difference"] == pytest.approx(100 * apart.mean().mean())
    stderr = math.sqrt(np.sum(apart.var(ddof=1) / apart.count())) / len(apart)
    assert table.rows[1]["difference_stderr"] == pytest.approx(100 * stderr)
    assert table.rows[0]["difference"] == table.rows[0]["difference_stderr"] == 0  # the dense model's twin


def test_with_confidence_it_holds_above_1_64_standard_errors(two_ratios: Path) -> None:
    study = read_study([two_ratios], [])
    gap = find(study, "smallest").models["alpha@0.3"].against_dense
    assert gap is not None and gap.stderr_points > 0
    for errors, expected in ((1.6, "within_yes"), (1.7, "within_surely")):
        table = smallest(find(study, "smallest", within=-gap.points + errors * gap.stderr_points))
        assert table is not None and table.rows[1]["within"].kind == expected


def test_none_within_is_said_with_the_nearest(two_ratios: Path) -> None:
    study = read_study([two_ratios], [])
    only = type(study)({"alpha": study.models["alpha@0.3"]})
    with pytest.raises(
        UserError, match=r"no configuration of alpha is within 1 points of the original model: the nearest, "
    ) as told:
        find(only, "smallest", within=1)
    (name, ratio, points) = re.findall(
        r"nearest, (\S+) with (\d+)% removed, differs by (-[\d.]+) ± [\d.]+ points", str(told.value)
    )[0]
    assert (ratio, name) == ("30", find(only).models["alpha"].best["name"])
    assert float(points) == pytest.approx(100 * differences(two_ratios, name).groupby("task").mean().mean(), abs=0.006)


def test_without_a_dense_model_nothing_is_within(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("method,seq_len,num_samples,acc_mean,success\ntaylor,16,8,.5,True\n")
    with pytest.raises(
        UserError, match="needs the original model's accuracy, which is not known of M; give --baseline M=ACCURACY"
    ):
        find(read_study([], [("M", path)]), "smallest")
    path.write_text(
        "method,seq_len,num_samples,acc_mean,success,pruning_ratio\ntaylor,16,8,.5,True,.2\ntaylor,16,8,.4,True,.3\n"
    )
    found = find(read_study([], [("M", path)], [("M", 0.51)]), "smallest")
    assert found.smallest["M"].model.label == "M@0.2"
    table, sizes = smallest(found), by_size(found)
    assert table is not None and sizes is not None
    assert [row["within"].kind for row in table.rows] == ["within_yes", "within_no"]  # nobody knows how surely
    assert "-1.00" in text_table(table) and "±" not in text_table(table)
    assert accuracy_size(sizes).axes  # which has no error bars


FINISHED = Path(__file__).parents[1] / "finished"
DENSE = Rounds([2.0, 2.0, 2.0], [6.0, 6.0, 6.0])


def conditions(repeats: int = 3) -> Conditions:
    return Conditions(512, 64, 1, repeats, "float32", "CPU, 2 threads", "2.13.0")


def speed_record(key: str, prefill: list[float], decode: list[float], at: str = "2026-01-02") -> SpeedRecord:
    dense = Rounds(DENSE.prefill_s[: len(prefill)], DENSE.decode_s[: len(decode)])
    return SpeedRecord(key, conditions(len(prefill)), dense, Rounds(prefill, decode), 1024, 1280, False, at)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    name = "tiny-llama-20-smoke-limit5"
    return Path(shutil.copytree(FINISHED / "storage" / name, tmp_path / name))


def keys(findings: Findings) -> list[str]:
    """Return the keys of the trials, the most accurate first."""
    return findings.models["tiny-llama"].eligible["key"].tolist()


@pytest.fixture
def measured(experiment: Path) -> Path:
    """With speeds of the three most accurate: the third is twice as fast in all, the others as fast as the dense model; and an
    older one of the fourth, under other conditions, of ten times the speed."""
    first, second, third, fourth = keys(find(read_study([experiment], [])))[:4]
    store = FolderStore(experiment)
    write_speed(store, speed_record(first, [2.0, 2.0, 2.0], [6.0, 6.0, 6.0]))
    write_speed(store, speed_record(second, [1.0, 2.0, 4.0], [6.0, 6.0, 6.0]))
    write_speed(store, speed_record(third, [1.0, 1.0, 0.5], [3.0, 3.0, 2.0]))
    write_speed(store, speed_record(fourth, [0.2], [0.6], at="2026-01-01"))
    return experiment


def test_the_rule_weighs_what_is_retained_with_seconds(measured: Path) -> None:
    found = find(read_study([measured], []), "retained-per-second").models["tiny-llama"]
    rows = found.eligible
    retained = rows["acc_mean"] / found.model.baseline["acc_mean"]
    assert rows["retained_per_second"].iloc[:3].tolist() == pytest.approx([*retained[:2], 2 * retained.iloc[2]])
    assert rows["retained_per_second"].iloc[3:].isna().all()
    assert found.best["name"] == rows["name"].iloc[2] and rows["acc_mean"].iloc[2] > rows["acc_mean"].iloc[0] / 2
    assert found.cross_fit is not None and set(found.cross_fit.chosen) <= set(rows["name"].iloc[:3])


@pytest.mark.slow
def test_the_table_has_what_was_measured_beside_the_dense_model(measured: Path, tmp_path: Path) -> None:
    findings = find(read_study([measured], []))
    found = findings.models["tiny-llama"]
    table = all_tables(findings)["pareto"]
    dense, first, second, third = table.rows
    assert [row["config"] for row in table.rows] == ["dense", *found.eligible["name"].iloc[:3]]
    assert (dense["prefill"], dense["decode"], dense["kv_bytes_per_token"], dense["pareto"]) == (1, 1, 1280, None)
    assert (second["prefill"], second["prefill_lowest"], second["prefill_highest"]) == (1.0, 0.5, 2.0)
    assert (third["prefill"], third["decode"], third["decode_highest"]) == (2.0, 2.0, 3.0)
    assert third["retained_per_second"] == pytest.approx(2 * third["retained"]) and first["kv_bytes_per_token"] == 1024
    yes = [row["pareto"].kind == "within_yes" for row in (first, second, third)]
    assert yes == [name in found.chosen["pareto"] for name in found.eligible["name"].iloc[:3]]
    texts = {
        path.suffix: path.read_text(encoding="utf-8")
        for path in write_tables(findings, tmp_path)
        if path.stem == "pareto"
    }
    assert "512" in texts[".md"] and "CPU, 2 threads" in texts[".md"]
    assert pd.read_csv(tmp_path / "pareto.csv")["prefill_highest"].tolist()[2:] == [2.0, 4.0]
    assert {path.name for path in draw_all(findings, tmp_path / "figures")} >= {"pareto.png", "pareto.pdf"}


def test_without_speeds_there_is_neither(experiment: Path, refused: Callable[..., str], tmp_path: Path) -> None:
    findings = find(read_study([experiment], []))
    assert "pareto" not in all_tables(findings)
    told = refused(analysis.main, experiment, "--rule", "retained-per-second", "--output", tmp_path / "out")
    assert "needs a speed, as tune-prune speed --config FOLDER measures it" in told
    assert "use --rule accuracy" in told


def test_equal_answers_to_a_few_items_are_no_proof(two_ratios: Path) -> None:
    """The best trial is the dense model's twin: 0 points apart, item by item, which 280 items do not prove to within 0.1."""
    for within, said in [(0.0, "yes"), (0.1, "yes"), (5.0, "surely")]:
        findings = find(read_study([two_ratios], []), "smallest", within=within)
        (found,) = (
            one for one in findings.models.values() if one.best["difference_points"] == 0 and one.model.ratio == 0.2
        )
        assert found.against_dense == Difference(0.0, 0.0, "paired") and is_within(found) == said
