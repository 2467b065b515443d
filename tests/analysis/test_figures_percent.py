"""With --percent, figures say accuracies and shares in percent: at their ticks, in their cells and bars, and in their labels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.findings import simulated_findings
from tune_prune.analysis.figures import figure_style, figures
from tune_prune.analysis.render.messages import accuracies_in_percent
from tune_prune.analysis.statistics.findings import ModelFindings

KEPT = pd.DataFrame({"kv_groups": [1.0, 0.5], "mlp_channels": [0.25, 1.0], "params": [0.5, 0.8]})
SIZES = pd.DataFrame(
    {"model": "m", "ratio": [0.0, 0.2], "kept": [1.0, 0.8], "acc_mean": [0.7, 0.62], "acc_mean_stderr": [0.01, 0.02]}
    | {"acc_lowest": [math.nan, 0.62], "acc_highest": [math.nan, 0.62]}
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFindings]:
    return dict(simulated_findings(tmp_path_factory.mktemp("study")).models)


def drawn(models: dict[str, ModelFindings]) -> dict[str, Figure]:
    """Every figure whose vertical axis holds fractions, laid out."""
    with figure_style.style():
        made = {
            "heatmap": figures.heatmap(models["alpha"]),
            "methods": figures.methods(models),
            "curves": figures.curves(models, "seq_len"),
            "ppl": figures.ppl_accuracy(models),
            "cost": figures.accuracy_cost(models),
            "size": figures.accuracy_size(SIZES),
            "retention": figures.retention_figure(KEPT),
            "removal": figures.pruning_figure(KEPT),
        }
        for figure in made.values():
            figure.draw_without_rendering()
    return made


def fraction_axes(name: str, figure: Figure) -> tuple[str, list[Axes]]:
    """The label of the axes that hold fractions, and these: the colour bar of the heatmap, else all."""
    if name == "heatmap":
        return figure.axes[-1].get_ylabel(), [figure.axes[-1]]
    return figure.get_supylabel() or figure.axes[0].get_ylabel(), figure.axes


def ticks(axes: Axes) -> Iterator[tuple[float, float]]:
    """Each tick inside the axes: where it stands, and what is written there."""
    low, high = axes.get_ylim()
    for tick in axes.yaxis.get_major_ticks():
        for text in (
            tick.label1,
            tick.label2,
        ):  # on the left; of a colour bar on the right; of a panel beside another none
            if low <= tick.get_loc() <= high and text.get_visible():
                yield tick.get_loc(), float(text.get_text())


@pytest.mark.parametrize("percent", [False, True])
def test_ticks_labels_and_numbers_are_in_percent_where_asked(models: dict[str, ModelFindings], percent: bool) -> None:
    scale = 100 if percent else 1
    with accuracies_in_percent(percent):
        made = drawn(models)
    for name, figure in made.items():
        label, grid = fraction_axes(name, figure)
        assert label.endswith(" (%)") is percent and label.startswith(("Mean accuracy", "Share")), name
        for axes in grid:
            found = list(ticks(axes))
            assert len(found) > 2 or axes is not grid[0], name
            assert [written for _, written in found] == pytest.approx([scale * place for place, _ in found]), name
    eligible = models["alpha"].eligible
    cells = sorted(float(text.get_text()) for axes in made["heatmap"].axes[:-1] for text in axes.texts)
    assert cells == pytest.approx(sorted(scale * eligible["acc_mean"]), abs=0.000501 * scale)
    bars = [float(text.get_text()) for text in made["methods"].axes[0].texts]
    means = models["alpha"].methods["mean"].reindex(["taylor", "layerwise", "blockwise"])
    assert bars == pytest.approx(list(scale * means), abs=0.000501 * scale)


def test_what_is_no_fraction_stays_as_it_is(models: dict[str, ModelFindings], tmp_path: Path) -> None:
    with accuracies_in_percent():
        percent = drawn(models)
    plain = drawn(models)
    for name in ("curves", "ppl", "cost", "size", "retention"):
        across = [[axes.get_xlabel(), *(t.get_text() for t in axes.get_xticklabels())] for axes in percent[name].axes]
        assert across == [
            [axes.get_xlabel(), *(t.get_text() for t in axes.get_xticklabels())] for axes in plain[name].axes
        ]
