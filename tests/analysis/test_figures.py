"""Figures: what is drawn is what the findings say, in percent where asked, and every file is one that a journal takes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from tests.findings import METHODS, SAMPLES, SEQ_LENS
from tune_prune.analysis import figures
from tune_prune.analysis.input.rows import typed
from tune_prune.analysis.input.study import Model, Study
from tune_prune.analysis.render.messages import accuracies_in_percent
from tune_prune.analysis.statistics.findings import Findings, ModelFindings, find
from tune_prune.analysis.tables.configurations import by_size

LOST = ("taylor-s16-n128", "layerwise-s64-n512")  # of `simulated`


@pytest.fixture(scope="module")
def drawn(simulated: Findings, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All figures of `simulated`, in a folder of their own."""
    return figures.draw_all(simulated, tmp_path_factory.mktemp("drawn") / "figures")


def searched(
    label: str, methods: Sequence[str], seq_lens: Sequence[int], samples: Sequence[int], every: int = 1, **columns: Any
) -> Model:
    """A model without items, of which every so-manieth combination was tried."""
    cells = list(itertools.product(methods, seq_lens, samples))[::every]
    rows = pd.DataFrame(cells, columns=["method", "seq_len", "num_samples"])
    known = {"acc_mean": np.random.default_rng(0).uniform(0.4, 0.6, len(rows)), "ppl": 10.0, "elapsed_time": 60.0}
    known |= {"model": label, "success": True, "status": "complete", "pruning_ratio": 0.2, "output_dir": "exp_001"}
    rows = typed(rows.assign(**{**known, **columns}))
    return Model(label, rows.assign(name=[config.name for config in rows["configuration"]]))


def findings_of(*models: Model) -> Findings:
    return find(Study({model.label: model for model in models}))


def points(axes: Axes, marker: str) -> set[tuple[float, float]]:
    """Return the places where the axes have that marker, filled or not; the ring around the best aside."""
    drawn = [line for line in axes.get_lines() if line.get_marker() == marker and line.get_markersize() < 8]
    places = [zip(*line.get_data(), line.get_markevery() or itertools.repeat(True), strict=False) for line in drawn]
    return {(float(x), float(y)) for x, y, shown in itertools.chain(*places) if shown}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


def cells(axes: Axes, width: float | None = None) -> dict[tuple[float, float], tuple[float, ...]]:
    """The colour of each cell of a heatmap's panel, by its lower left corner; of those with an outline of that width."""
    drawn = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return {cell.get_xy(): cell.get_facecolor() for cell in drawn if width in (None, cell.get_linewidth())}


@pytest.mark.slow
def test_every_figure_is_written_as_a_paper_needs_it(drawn: list[Path]) -> None:
    each = [f"{kind}_{label}" for kind in ("heatmap", "retention") for label in ("alpha", "beta")]
    names = {*each, "methods", "seq_len", "num_samples", "ppl_accuracy", "accuracy_cost"}
    assert sorted(path.name for path in drawn) == sorted(f"{name}.{kind}" for name in names for kind in ("pdf", "png"))
    assert sorted(drawn) == sorted(drawn[0].parent.iterdir())
    for path in drawn:
        if path.suffix == ".png":
            pixels = imread(path)
            assert pixels.shape[1] in (round(200 * 3.3), round(200 * 6.9)), path.name
            assert len(np.unique(pixels @ [1, 10, 100, 0])) > 20, f"{path.name} is blank"
            edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
            assert (edge[:, :3] == 1).all(), f"{path.name} is cut at its edge"
        else:
            content = path.read_bytes()
            fonts = re.findall(rb"/Subtype /(Type3|TrueType|CIDFontType2|Type1)\b", content)
            assert content.startswith(b"%PDF-") and b"/FontFile2" in content
            assert set(fonts) <= {b"TrueType", b"CIDFontType2"}, path.name
            assert b"/Subtype /Image" not in content, f"{path.name} is not drawn in vectors"


@pytest.mark.slow
def test_the_same_bytes_twice_whatever_the_user_has_set(simulated: Findings, drawn: list[Path], tmp_path: Path) -> None:
    with mpl.rc_context({"font.size": 20, "pdf.fonttype": 3, "axes.facecolor": "grey", "savefig.dpi": 30}):
        before = dict(mpl.rcParams)
        again = figures.draw_all(simulated, tmp_path)
        assert dict(mpl.rcParams) == before
    for one, other in zip(drawn, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_heatmap_shows_every_accuracy_the_best_and_what_is_missing(simulated: Findings) -> None:
    model = simulated.models["alpha"]
    figure = figures.heatmap(model)
    assert list(panels(figure)) == list(METHODS)
    rows = model.eligible.set_index("name")
    low, high = rows["acc_mean"].min(), rows["acc_mean"].max()
    assert figure.axes[-1].get_ylim() == (low, high)  # of the colour bar
    for method, axes in panels(figure).items():
        places = {f"{method}-s{s}-n{n}": (c, r) for r, s in enumerate(SEQ_LENS) for c, n in enumerate(SAMPLES)}
        accuracy = {place: rows["acc_mean"][name] for name, place in places.items() if name not in LOST}
        shades = {place: mpl.colormaps["cividis"]((value - low) / (high - low)) for place, value in accuracy.items()}
        assert cells(axes) == shades and axes.patch.get_hatch()
        printed = {tuple(np.subtract(text.get_position(), 0.5)): text.get_text() for text in axes.texts}
        assert printed == {place: f"{value:.3f}"[1:] for place, value in accuracy.items()}
        best = {place for name, place in places.items() if name == model.best["name"]}
        tied = {place for name, place in places.items() if name not in LOST and rows["in_confidence_set"][name]}
        assert cells(axes, 2.0).keys() == best and cells(axes, 0.8).keys() == tied - best
    assert legend(figure) == ["best", "too close to call (95%)", "no complete trial (2)"]


def test_a_method_that_reads_no_data_is_one_cell_and_a_level_line_and_no_part_of_the_levels() -> None:
    """A grid holds it once, at the first of each list."""
    one = searched("m", ["taylor", "layerwise", "random"], SEQ_LENS, SAMPLES)
    rows = one.rows[(one.rows["method"] != "random") | (one.rows.groupby("method").cumcount() == 0)]
    collected = rows["method"].map({"taylor": 0.5, "layerwise": 0.5})  # random has no stage of a statistic
    rows = rows.assign(importance_duration_s=collected, pruning_duration_s=0.1)
    model = findings_of(replace(one, rows=rows.reset_index(drop=True))).models["m"]
    random = model.eligible.set_index("method").loc["random", "acc_mean"]
    others = model.eligible[model.eligible["method"] != "random"]
    axes = panels(figures.heatmap(model))["random"]
    (cell,), (text,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)], axes.texts
    assert (cell.get_xy(), cell.get_width(), cell.get_height()) == ((0, 0), len(SAMPLES), len(SEQ_LENS))
    assert text.get_text() == f"{random:.3f}"[1:]
    (axes,) = figures.curves({"m": model}, "seq_len").axes
    assert [list(line.get_ydata()) for line in axes.get_lines() if line.get_label() == "random"] == [[random, random]]
    expected = others.groupby("seq_len")["acc_mean"].mean()
    assert model.levels["seq_len"]["mean"].tolist() == pytest.approx(expected.tolist())
    assert model.effects is not None and model.effects.loc["method", "df"] == 1  # a full grid without it
    assert "missing_trials" not in {message.kind for message in model.warnings}


def test_accuracy_against_size_has_every_ratio_and_the_dense_model() -> None:
    def pruned(ratio: float) -> Model:
        model = searched(f"m@{ratio}", ["taylor"], [16, 64], [128], pruning_ratio=ratio, removed_fraction=ratio)
        return replace(model, base="m", baseline={"acc_mean": 0.7, "acc_mean_stderr": 0.01})

    found = findings_of(pruned(0.3), pruned(0.1))
    best = {label: model.best["acc_mean"] for label, model in found.models.items()}
    sizes = by_size(found)
    assert sizes is not None
    (axes,) = figures.accuracy_size(sizes).axes
    assert points(axes, "*") == {(100, 0.7)}
    assert points(axes, "o") == {(90, best["m@0.1"]), (70, best["m@0.3"])}


def test_method_bars_are_means_with_every_configuration(published: Findings) -> None:
    llama = published.models["Llama"]
    figure = figures.methods({"Llama": llama})
    (axes,) = figure.axes
    assert axes.get_ylim()[0] == 0
    expected = [llama.eligible.query("method == @m")["acc_mean"] for m in METHODS]
    bars = [container.patches[0] for container in axes.containers if isinstance(container, BarContainer)]
    np.testing.assert_allclose([bar.get_height() for bar in bars], [own.mean() for own in expected])
    errors = [container.lines[2][0] for container in axes.containers if isinstance(container, ErrorbarContainer)]
    spreads = [np.ptp(error.get_segments()[0][:, 1]) / 2 for error in errors]
    np.testing.assert_allclose(spreads, [own.std(ddof=1) for own in expected])
    for marker, own in zip("os^", expected, strict=True):
        assert {y for _, y in points(axes, marker)} == set(own)
    assert legend(figure) == [*METHODS, "mean ± std over configurations"]


def test_curves_are_means_by_level(published: Findings) -> None:
    llama = published.models["Llama"]
    for factor in ("seq_len", "num_samples"):
        (axes,) = figures.curves({"Llama": llama}, factor).axes
        drawn = {str(line.get_label()): line for line in axes.get_lines() if len(line.get_xdata())}
        assert drawn.keys() == {*METHODS, "all methods"}
        means = llama.eligible.groupby(factor)["acc_mean"].mean()
        np.testing.assert_allclose(drawn["all methods"].get_xydata(), list(means.items()))
        for method, band in zip(METHODS, axes.collections, strict=True):
            rows = llama.eligible[llama.eligible["method"] == method]
            groups = [rows["acc_mean"][rows[factor] == level].to_numpy() for level in means.index]
            np.testing.assert_allclose(drawn[method].get_ydata(), [group.mean() for group in groups])
            error = [group.std(ddof=1) / math.sqrt(len(group)) for group in groups]
            corners = band.get_paths()[0].vertices
            np.testing.assert_allclose([np.ptp(corners[corners[:, 0] == x, 1]) / 2 for x in means.index], error)


def test_cost_is_time_where_known_else_tokens(simulated: Findings, published: Findings) -> None:
    llama = published.models["Llama"]
    first, second = figures.accuracy_cost({"alpha": simulated.models["alpha"], "Llama": llama}).axes
    assert (first.get_xlabel(), second.get_xlabel()) == ("Seconds of a trial on its machine", "Calibration tokens")
    rows = llama.eligible[llama.eligible["method"] == "taylor"]
    tokens = rows["seq_len"] * rows["num_samples"]
    assert points(second, "o") == set(zip(tokens, rows["acc_mean"], strict=True))
    (front,) = [line for line in second.get_lines() if line.get_drawstyle() == "steps-post"]
    accuracy, cost = llama.eligible["acc_mean"], llama.eligible["tokens"]
    for x, y in zip(front.get_xdata(), front.get_ydata(), strict=True):
        assert y == accuracy[cost <= x].max()


KEPT = pd.DataFrame({"kv_groups": [1.0, 0.5], "mlp_channels": [0.25, 1.0], "params": [0.5, 0.8]})
SIZES = pd.DataFrame(
    {"model": "m", "ratio": [0.0, 0.2], "kept": [1.0, 0.8], "acc_mean": [0.7, 0.62], "acc_mean_stderr": [0.01, 0.02]}
    | {"acc_lowest": [math.nan, 0.62], "acc_highest": [math.nan, 0.62]}
)


def fraction_figures(models: dict[str, ModelFindings]) -> dict[str, Figure]:
    """Every figure whose vertical axis holds fractions, laid out."""
    with figures.paper_style():
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
def test_ticks_labels_and_numbers_are_in_percent_where_asked(simulated: Findings, percent: bool) -> None:
    models = dict(simulated.models)
    scale = 100 if percent else 1
    with accuracies_in_percent(percent):
        made = fraction_figures(models)
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
