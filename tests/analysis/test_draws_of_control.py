"""Draws of the random control are no part of how far draws of samples lie apart: against plain loops, and against no control."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.findings import simulated_study
from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.rows import typed
from tune_prune.analysis.input.study import Study
from tune_prune.analysis.render.files import markdown_table
from tune_prune.analysis.render.page import render
from tune_prune.analysis.render.paragraphs import paragraphs
from tune_prune.analysis.statistics.differences import difference
from tune_prune.analysis.statistics.draws import DrawItems
from tune_prune.analysis.statistics.findings import find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.configurations import accuracy_notes
from tune_prune.analysis.verdict import verdicts

TAKEN, CONTROL = "taylor-s16-n128", "random-s16-n128"  # the trials of the first are made those of the second
SAMPLED = ("blockwise-s64-n512", "blockwise-s64-n128", "layerwise-s64-n512")
ITEMS = 60


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Three configurations and the control on three draws each, and others on one."""
    path = simulated_study(
        tmp_path_factory.mktemp("control"), ("alpha",), ITEMS, draws=dict.fromkeys((*SAMPLED, TAKEN), 3), draw_sd=0.06
    )
    study = read_study([path], [])
    model = study.models["alpha"]
    rows = model.rows
    rows.loc[rows["name"].str.startswith(TAKEN), "method"] = "random"
    rows["name"] = rows["name"].str.replace(TAKEN, CONTROL)
    return replace(study, models={"alpha": replace(model, rows=typed(rows))})


def by_loops(study: Study, name: str) -> tuple[float, float, float]:
    """Of the three draws of a configuration: the sum of squares between them, that of the interaction, the variance of items."""
    rows = study.models["alpha"].rows
    folders = rows.loc[(rows["name"] == name) | rows["name"].str.startswith(f"{name}-r"), "output_dir"]
    scores = np.stack([DrawItems(read_items).draws(folder)[0].to_numpy(float) for folder in folders]).reshape(
        3, 7, ITEMS
    )
    accuracy = scores.mean(axis=(1, 2))
    squares, interaction = sum((value - accuracy.mean()) ** 2 for value in accuracy), 0.0
    for task in range(7):
        for draw in range(3):
            for item in range(ITEMS):
                rest = scores[draw, task, item] - scores[:, task, item].mean()
                rest -= scores[draw, task].mean() - scores[:, task].mean()
                interaction += rest**2 / (ITEMS - 1) / ITEMS / 49
    return squares, interaction, sum(one.var(ddof=1) for one in scores.mean(axis=0)) / ITEMS / 49


def test_each_has_the_spread_of_its_own_population(study: Study) -> None:
    findings = find(study)
    found = findings.models["alpha"]
    sums = [by_loops(study, name) for name in SAMPLED]
    between = max(0.0, sum(squares - interaction for squares, interaction, _ in sums) / 6)
    squares, interaction, of_items = by_loops(study, CONTROL)
    own = (squares - interaction) / 2
    assert own > 0 and abs(own - between) > 0.2 * between > 0  # else the two could not be told apart
    pool = found.draw_variances["acc_mean"]
    assert (pool.freedom, pool.variance) == (6, pytest.approx(between))
    for name, variance, items in (
        (CONTROL, own, of_items),
        *((n, between, s[2]) for n, s in zip(SAMPLED, sums, strict=True)),
    ):
        row = found.named(name)
        place = found.eligible.index.get_loc(row.name)
        assert row["draw_stderr"] ** 2 == pytest.approx(variance / 3)
        assert row["acc_mean_stderr"] ** 2 == pytest.approx(items + variance / 3)
        assert found.comparison.variances[place] == pytest.approx(items + variance / 3)
        fresh = replace(found)
        vars(fresh)["uninformative"] = ["another"]  # the mean over the informative tasks is acc_mean then
        assert fresh.informative(row)[1] == pytest.approx(row["acc_mean_stderr"])
    gap = difference(found.named(SAMPLED[0]), found.named(CONTROL), findings.items)
    assert gap.stderr_points**2 > 1e4 * (between + own) / 3
    # Two degrees of freedom: tails far longer than the normal ones, as Student's t has them
    place = found.eligible.index.get_loc(found.named(CONTROL).name)
    assert found.comparison.half_width(place) > 2.4 * math.sqrt(of_items + own / 3)
    assert f"{100 * math.sqrt(between):.2f} points" in markdown_table(all_tables(findings)["draws"])


def test_the_control_changes_nothing_for_the_others(study: Study) -> None:
    model = study.models["alpha"]
    without = replace(model, rows=model.rows[model.rows["method"] != "random"])
    found, alone = (find(one).models["alpha"] for one in (study, replace(study, models={"alpha": without})))
    columns = ["acc_mean_stderr", "acc_piqa_stderr", "draw_stderr"]
    rows = found.eligible.set_index("name")[columns]
    others = alone.eligible.set_index("name")[columns]
    assert len(others) == 17 and (rows.loc[others.index] == others).all(axis=None)
    assert alone.draw_variances == found.draw_variances and not alone.control_variances


def test_a_control_of_one_run_takes_what_is_known_of_the_others(study: Study) -> None:
    model = study.models["alpha"]
    once = replace(model, rows=model.rows[~model.rows["name"].str.startswith(f"{CONTROL}-r")])
    found = find(replace(study, models={"alpha": once})).models["alpha"]
    assert found.named(CONTROL)["draw_stderr"] == pytest.approx(math.sqrt(found.draw_variances["acc_mean"].variance))
    only = model.rows[~model.rows["name"].str.contains("-r[12]$") | model.rows["name"].str.startswith(CONTROL)]
    findings = find(replace(study, models={"alpha": replace(model, rows=only)}))
    found = findings.models["alpha"]
    assert found.draw_variance is None and found.named(CONTROL)["draw_stderr"] > 0
    assert (found.eligible.loc[found.eligible["name"] != CONTROL, "draw_stderr"] == 0).all()
    assert "seeds_one" not in {message.kind for message in found.warnings}
    assert [note.kind for note in accuracy_notes(findings)] == ["note_accuracy_experiment_draws"]
    assert "For means of several runs" in paragraphs(findings)[0]
    assert "mean of <b>1</b> run</span>" in render(findings, [])
    assert [row["name"] for row in all_tables(findings)["draws"].rows] == [CONTROL]
    assert verdicts(findings)["alpha"].rows is found.eligible
