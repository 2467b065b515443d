"""scripts/study_comparisons.py: differences of simulated configurations against plain means, with errors of items and draws."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import study_comparisons

from tests.findings import simulated_study
from tune_prune import load_results
from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.statistics.draws import draw_variance

GRID, DRAWN = "grid", {"taylor-s64-n128": 3, "layerwise-s64-n128": 3}
DENSE = "taylor-s16-n128"  # whose items stand for those of the dense model
# By the configuration's name, [draws, items]
Scores = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> tuple[dict[str, Path], pd.DataFrame]:
    """The folders of a study's steps, of which the last three are one experiment, and the rows of its differences."""
    place = tmp_path_factory.mktemp("study")
    grid = simulated_study(place, ("alpha",), items=40)
    key = json.loads((grid / "baseline.json").read_text())["alpha"]["key"]
    rows = load_results(grid).trials
    shutil.copytree(rows.loc[rows["name"] == DENSE, "output_dir"].item(), grid / "trials" / key)
    drawn = simulated_study(place / "drawn", ("alpha",), items=40, draws=DRAWN, draw_sd=0.1)
    trials = load_results(drawn).trials
    for other in trials.loc[~trials["name"].str.startswith(tuple(DRAWN)), "key"]:
        (drawn / "ledger" / f"{other}.json").unlink()
    folders = {"grid": grid} | dict.fromkeys(("contenders", "control", "ratios"), drawn)
    found = list(csv.DictReader(io.StringIO(study_comparisons.table(study_comparisons.compared(folders.__getitem__)))))
    return folders, pd.DataFrame(found)


def scores(folder: Path) -> Scores:
    trials = load_results(folder).trials
    found: dict[str, list[np.ndarray]] = {}
    for name, own in zip(trials["name"], trials["output_dir"], strict=True):
        items = read_items(own)
        assert items is not None
        found.setdefault(name.split("-r")[0], []).append(100 * items.to_numpy("float64"))
    return {name: np.stack(own) for name, own in found.items()}


def row(rows: pd.DataFrame, step: str, first: str, second: str, measure: str = "accuracy") -> pd.Series:
    named = rows[(rows["step"] == step) & (rows["first"] == first) & (rows["second"] == second)]
    return pd.to_numeric(
        named[named["measure"] == measure].iloc[0][["draws", "value", "stderr", "items", "draws_stderr"]]
    )


@pytest.mark.slow
def test_differences_of_one_draw(study) -> None:
    folders, rows = study
    own = scores(folders["grid"])
    for name in ("layerwise-s256-n512", "taylor-s64-n128"):
        found, gaps = row(rows, "grid", name, "dense"), own[name][0] - own[DENSE][0]
        assert found["value"] == pytest.approx(gaps.mean(), rel=1e-4)  # tasks of equal size
        # Tasks are independent samples; all of them have 40 items
        variances = [part.var(ddof=1) / 40 for part in np.split(gaps, 7)]
        assert found["items"] == found["stderr"] == pytest.approx(math.sqrt(sum(variances)) / 7, rel=1e-4)
        assert math.isnan(found["draws_stderr"]) and found["draws"] == 1


@pytest.mark.slow
def test_differences_of_methods_and_levels(study) -> None:
    folders, rows = study
    own = scores(folders["grid"])

    def mean(part: str) -> float:
        return float(np.mean([values.mean() for name, values in own.items() if part in name]))

    for first, second in (("blockwise", "taylor"), ("layerwise", "taylor"), ("blockwise", "layerwise")):
        assert row(rows, "grid", first, second)["value"] == pytest.approx(mean(first) - mean(second), abs=1e-3)
    assert row(rows, "grid", "taylor-s256", "taylor-s16")["value"] == pytest.approx(
        mean("taylor-s256") - mean("taylor-s16-"), abs=1e-3
    )
    several = np.mean([own[f"layerwise-s{s}-n512"] - own[f"layerwise-s{s}-n128"] for s in (16, 64, 256)])
    assert row(rows, "grid", "layerwise-n512", "layerwise-n128")["value"] == pytest.approx(several, abs=1e-3)


def test_differences_of_several_draws(study) -> None:
    folders, rows = study
    own, (first, second) = scores(folders["contenders"]), sorted(DRAWN)
    found = row(rows, "contenders", first, second)
    assert found["draws"] == 3 and found["value"] == pytest.approx(own[first].mean() - own[second].mean(), rel=1e-4)
    drawn = load_results(folders["contenders"]).findings.models["alpha"]
    own_draws = [draw_variance({i: own}, drawn.interactions, ["acc_mean"]) for i, own in drawn.draws.items()]
    between = sum(one.variance for one in own_draws if one is not None)
    assert found["draws_stderr"] == pytest.approx(100 * math.sqrt(between / 3), rel=1e-4)
    assert between > 0
    assert found["stderr"] == pytest.approx(math.hypot(found["items"], found["draws_stderr"]), rel=1e-4)
