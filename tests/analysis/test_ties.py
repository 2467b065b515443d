"""Accuracies that are equal as fractions are equal, however their sums were rounded. The truth is counted in whole items."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import kendalltau

from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.optuna_study import export_study
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.core.config import ZERO_SHOT_TASKS

ITEMS = 60  # of each task
# Right answers by task of three real trials with 389 of 420 in all, and their perplexities
REAL = {
    ("blockwise", 64, 512): ((47, 58, 58, 60, 56, 52, 58), 2.671772558488015),
    ("taylor", 32, 512): ((56, 52, 57, 60, 57, 49, 58), 2.572559146366164),
    ("layerwise", 32, 128): ((54, 56, 56, 60, 57, 49, 57), 2.7043415922466774),
}


def written(path: Path, trials: dict[tuple[str, int, int], tuple[tuple[int, ...], float]]) -> pd.DataFrame:
    """A results file of such trials, whose acc_mean is summed as a trial sums it."""
    rows = []
    for (method, seq_len, num_samples), (right, ppl) in trials.items():
        tasks = {f"acc_{task}": count / ITEMS for task, count in zip(ZERO_SHOT_TASKS, right, strict=True)}
        about = {"method": method, "seq_len": seq_len, "num_samples": num_samples, "pruning_ratio": 0.2, "ppl": ppl}
        rows.append(about | {"acc_mean": sum(tasks.values()) / len(tasks)} | tasks | {"params_count": 100})
    frame = pd.DataFrame(rows)
    frame.to_csv(path, index=False)
    return frame


def name(trial: tuple[str, int, int]) -> str:
    return "{}-s{}-n{}".format(*trial)


def found(
    tmp_path: Path, trials: dict[tuple[str, int, int], tuple[tuple[int, ...], float]], count: int = 1
) -> Findings:
    paths = []
    for number in range(count):
        paths.append((f"M{number}", tmp_path / f"{number}.csv"))
        written(paths[-1][1], trials)
    return find(read_study([], paths))


@pytest.fixture
def many() -> dict[tuple[str, int, int], tuple[tuple[int, ...], float]]:
    """Trials whose totals are one of three; the order of the tasks' counts alone decides how their means are rounded."""
    generator, trials = np.random.default_rng(0), {}
    for trial in itertools.product(("taylor", "layerwise", "blockwise"), (16, 32, 64), (128, 256, 512)):
        right = generator.permutation([47, 52, 54, 55, 56, 58, 58 + generator.integers(3)])
        trials[trial] = tuple(map(int, right)), float(generator.uniform(2, 4))
    return trials


def test_the_lower_perplexity_decides_between_equal_accuracies(tmp_path: Path) -> None:
    means = written(tmp_path / "0.csv", REAL)["acc_mean"]
    assert means.nunique() == 2 and means.max() - means.min() < 1e-15  # what rounding has made of 389 / 420
    assert {sum(right) for right, _ in REAL.values()} == {389}
    model = found(tmp_path, REAL).models["M0"]
    assert model.best["name"] == "taylor-s32-n512" and model.best["acc_mean"] == means[1]  # as recorded
    assert model.eligible["name"].tolist() == ["taylor-s32-n512", "blockwise-s64-n512", "layerwise-s32-n128"]
    assert model.chosen["pareto"] == ["taylor-s32-n512"]
    assert model.eligible["difference_points"].abs().max() < 1e-12
    assert model.chosen["one-standard-error"] == ["layerwise-s32-n128"]  # the fewest tokens


def test_order_pareto_set_and_rank_correlation_are_those_of_whole_numbers(tmp_path: Path, many) -> None:
    written(tmp_path / "0.csv", many)
    model = found(tmp_path, many).models["M0"]
    truth = {trial: (-sum(right), ppl) for trial, (right, ppl) in many.items()}
    assert model.eligible["acc_mean"].nunique() > len({total for total, _ in truth.values()}) == 3
    assert model.eligible["name"].tolist() == [name(trial) for trial in sorted(truth, key=truth.__getitem__)]
    kept = {
        name(one)
        for one, (total, ppl) in truth.items()
        if not any(t <= total and p <= ppl and (t, p) != (total, ppl) for t, p in truth.values())
    }
    assert set(model.chosen["pareto"]) == kept
    tau = next(one.tau for one in model.correlations if one.measure == "ppl")
    totals, ppls = zip(*truth.values(), strict=True)
    assert tau == pytest.approx(kendalltau(ppls, [-total for total in totals]).statistic, abs=1e-12)


def test_methods_with_the_same_mean_share_it(tmp_path: Path) -> None:
    """Three trials each with 869 of 3 x 420 items, three fewer right in one and three more in another."""
    one = [[58, 27, 39, 21, 37, 57, 44], [33, 59, 44, 57, 20, 38, 53], [50, 36, 39, 36, 41, 29, 51]]
    other = [[55, *one[0][1:]], [*one[1][:2], 47, *one[1][3:]], one[2]]
    counts = {"layerwise": one, "taylor": other}
    trials = {(m, 16 * 2**i, 128): (tuple(c), 3.0) for m, rows in counts.items() for i, c in enumerate(rows)}
    assert written(tmp_path / "0.csv", trials).groupby("method")["acc_mean"].mean().nunique() == 2
    table = found(tmp_path, trials).models["M0"].methods
    assert table.index.tolist() == ["layerwise", "taylor"] and table["mean"].tolist() == pytest.approx([869 / 1260] * 2)


def test_the_best_for_several_models_is_by_whole_numbers_too(tmp_path: Path) -> None:
    best = found(tmp_path, REAL, count=3).transfer
    assert best is not None and best.best_for_all["config"] == "taylor-s32-n512"


def test_an_exported_study_has_one_value_for_equal_accuracies(tmp_path: Path) -> None:
    import optuna

    written(tmp_path / "0.csv", REAL)
    export_study(lambda: read_study([], [("M", tmp_path / "0.csv")]), tmp_path / "study.db")
    study = optuna.load_study(study_name="M", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert len({trial.value for trial in study.trials}) == 1 and len(study.trials) == 3
