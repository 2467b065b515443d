"""Figures: what is drawn is what the findings say, every file is one that a journal takes, and any shape of search is drawn."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from tests.findings import METHODS, SAMPLES, SEQ_LENS, from_csv, published_findings, simulated_findings
from tune_prune.analysis.figures import figure_style, figures
from tune_prune.analysis.input.rows import config_of, typed
from tune_prune.analysis.input.study import Model, Study
from tune_prune.analysis.statistics.findings import Findings, ModelFindings, find
from tune_prune.analysis.tables.configurations import by_size

LOST = "layerwise-s16-n128"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Two models of 18 configurations with items, one of which failed in each."""
    return simulated_findings(tmp_path_factory.mktemp("study"), failed=[LOST])


@pytest.fixture(scope="module")
def drawn(simulated: Findings, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All figures of `simulated`, in a folder of their own."""
    return figures.draw_all(simulated, tmp_path_factory.mktemp("drawn") / "figures")


@pytest.fixture(scope="module")
def llama() -> ModelFindings:
    return published_findings().models["Llama"]


def searched(
    label: str, methods: Sequence[str], seq_lens: Sequence[int], samples: Sequence[int], every: int = 1, **columns: Any
) -> Model:
    """A model without items, of which every so-manieth combination was tried."""
    cells = list(itertools.product(methods, seq_lens, samples))[::every]
    rows = pd.DataFrame(cells, columns=["method", "seq_len", "num_samples"])
    known = {"acc_mean": np.random.default_rng(0).uniform(0.4, 0.6, len(rows)), "ppl": 10.0, "elapsed_time": 60.0}
    known |= {"model": label, "success": True, "status": "complete", "pruning_ratio": 0.2, "output_dir": "exp_001"}
    rows = typed(rows.assign(**{**known, **columns}))
    return Model(label, rows.assign(name=[config_of(row).name for _, row in rows.iterrows()]))


def findings_of(*models: Model) -> Findings:
    return find(Study({model.label: model for model in models}))


def points(axes: Axes, marker: str) -> set[tuple[float, float]]:
    """Where the axes have that marker, filled or not; the ring around the best aside."""
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


def marked(axes: Axes, marker: str) -> Line2D:
    """The one line with that marker."""
    (line,) = [line for line in axes.get_lines() if line.get_marker() == marker]
    return line


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_logarithmic_axis_has_ticks_however_far_it_goes(count: int) -> None:
    for low, high in itertools.product((3e-4, 0.9, 1.0, 6.0, 99.0), (4.5, 7, 13, 60, 999, 7.5e3, 1e5, 8e6, 1e9)):
        _, (axes, *_) = figure_style.panels(count, 2, wide=True)
        axes.plot([low, low * high], [0, 1])
        figure_style.spread_axis(axes.xaxis)
        ticks = axes.xaxis.get_majorticklocs()
        assert 1 + (high > 10) <= len(ticks) <= min(6, 12 // count), (low, high, ticks)
        assert low <= ticks[0] and ticks[-1] <= low * high * (1 + 1e-9)


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
        accuracy = {place: rows["acc_mean"][name] for name, place in places.items() if name != LOST}
        shades = {place: mpl.colormaps["cividis"]((value - low) / (high - low)) for place, value in accuracy.items()}
        assert cells(axes) == shades and axes.patch.get_hatch()
        printed = {tuple(np.subtract(text.get_position(), 0.5)): text.get_text() for text in axes.texts}
        assert printed == {place: f"{value:.3f}"[1:] for place, value in accuracy.items()}
        best = {place for name, place in places.items() if name == model.best["name"]}
        tied = {place for name, place in places.items() if name != LOST and rows["in_confidence_set"][name]}
        assert cells(axes, 2.0).keys() == best and cells(axes, 0.8).keys() == tied - best
    assert legend(figure) == ["best", "too close to call (95%)", "no complete trial (1)"]


def test_a_method_that_reads_no_data_is_one_cell_and_a_level_line_and_no_part_of_the_levels() -> None:
    """As a grid holds it: once, at the first of each list."""
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


def test_a_method_that_reads_no_data_is_one_cell_however_often_it_was_tried() -> None:
    """Searches of several spaces hold it at the first length of each."""
    rows = searched("m", ["random"], SEQ_LENS, SAMPLES).rows.assign(pruning_duration_s=0.1)
    figure = figures.heatmap(findings_of(Model("m", rows)).models["m"])
    assert [text.get_text() for text in panels(figure)["random"].texts] == [f"{rows['acc_mean'].max():.3f}"[1:]]
    assert "no complete trial" not in " ".join(legend(figure))


def test_accuracy_against_size_has_every_ratio_and_the_dense_model(tmp_path: Path) -> None:
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
    assert "accuracy_size" in {path.stem for path in figures.draw_all(found, tmp_path)}


def test_bands_of_accuracy_against_size_go_over_the_draws_of_the_best() -> None:
    def pruned(ratio: float, accuracies: Sequence[float]) -> Model:
        seeds = {"seed": [math.nan, 1, 2][: len(accuracies)], "acc_mean": accuracies}
        samples = [128] * len(accuracies)
        model = searched(f"m@{ratio}", ["taylor"], [16], samples, pruning_ratio=ratio, removed_fraction=ratio, **seeds)
        return replace(model, base="m", baseline={"acc_mean": 0.7, "acc_mean_stderr": 0.01})

    def band(found: Findings) -> tuple[list[str], list[tuple[float, float]]]:
        sizes = by_size(found)
        assert sizes is not None
        figure = figures.accuracy_size(sizes)
        (area,) = [shape for shape in figure.axes[0].collections if isinstance(shape, FillBetweenPolyCollection)]
        corners = {(round(float(x)), round(float(y), 3)) for x, y in area.get_paths()[0].vertices}
        return legend(figure), sorted(corners)

    words, corners = band(findings_of(pruned(0.1, [0.60, 0.64, 0.65]), pruned(0.3, [0.5])))
    assert "lowest to highest run" in words
    assert corners == [(70, 0.5), (90, 0.6), (90, 0.65), (100, 0.7)]
    words, corners = band(findings_of(pruned(0.1, [0.63]), pruned(0.3, [0.5])))
    assert "lowest to highest run" not in words
    assert corners == [(70, 0.5), (90, 0.63), (100, 0.7)]


def test_numbers_in_cells_can_be_read_or_are_left_out() -> None:
    def luminance(colour: Any) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    model = searched("m", ["taylor"], range(8, 20), range(8, 16), acc_mean=np.linspace(0.4, 0.6, 96))
    (axes,) = panels(figures.heatmap(findings_of(model).models["m"])).values()
    for text in axes.texts:
        shade = cells(axes)[tuple(np.subtract(text.get_position(), 0.5))]
        dark, light = sorted([luminance(text.get_color()), luminance(shade)])
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2, AA
    assert len(axes.texts) == 96
    found = findings_of(searched("m", ["taylor"], range(8, 21), [128, 256])).models["m"]
    assert not panels(figures.heatmap(found))["taylor"].texts


def test_method_bars_are_means_with_every_configuration(llama: ModelFindings) -> None:
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


def test_curves_are_means_by_level(llama: ModelFindings) -> None:
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


def test_what_only_a_refit_reads_is_drawn_of_configurations_with_one(tmp_path: Path) -> None:
    refits = {
        "compensation": ["none", "least_squares", "least_squares"] * 12,
        "refit_tokens": [np.nan, 16384, 65536] * 12,
    }
    found = from_csv(
        tmp_path, {"m": lambda method, seq_len, samples: 0.5 + seq_len / 1000 + samples / 10_000}, **refits
    )
    (axes,) = figures.curves(found.models, "refit_tokens").axes
    rows = found.models["m"].trials
    for method, own in rows[rows["compensation"] == "least_squares"].groupby("method"):
        (line,) = [line for line in axes.lines if line.get_label() == method]
        assert dict(zip(*line.get_data(), strict=True)) == pytest.approx(
            own.groupby("refit_tokens")["acc_mean"].mean().to_dict()
        )


def test_perplexity_figure_has_every_configuration_the_best_and_the_dense_model(simulated: Findings) -> None:
    model = simulated.models["alpha"]
    figure = figures.ppl_accuracy({"alpha": model})
    (axes,) = figure.axes
    for method, marker in zip(METHODS, "os^", strict=True):
        rows = model.eligible[model.eligible["method"] == method]
        assert points(axes, marker) == set(zip(rows["ppl"], rows["acc_mean"], strict=True))
    (ring,) = [line for line in axes.get_lines() if line.get_markersize() == 8]
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (model.best["ppl"], model.best["acc_mean"])
    assert points(axes, "*") == {(15.0, model.model.baseline["acc_mean"])}
    assert "original model" in legend(figure)
    hollow = sum(len(line.get_xdata()) for line in axes.get_lines() if line.get_markerfacecolor() == "white")
    assert hollow == (~model.eligible["in_confidence_set"]).sum() > 0


def test_cost_is_time_where_known_else_tokens(simulated: Findings, llama: ModelFindings) -> None:
    first, second = figures.accuracy_cost({"alpha": simulated.models["alpha"], "Llama": llama}).axes
    assert (first.get_xlabel(), second.get_xlabel()) == ("Seconds of a trial on its machine", "Calibration tokens")
    rows = llama.eligible[llama.eligible["method"] == "taylor"]
    tokens = rows["seq_len"] * rows["num_samples"]
    assert points(second, "o") == set(zip(tokens, rows["acc_mean"], strict=True))
    (front,) = [line for line in second.get_lines() if line.get_drawstyle() == "steps-post"]
    accuracy, cost = llama.eligible["acc_mean"], llama.eligible["tokens"]
    for x, y in zip(front.get_xdata(), front.get_ydata(), strict=True):
        assert y == accuracy[cost <= x].max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "absent"),
    [
        (searched("one", ["taylor"], [64], [128], ppl=math.nan), {"seq_len", "num_samples", "ppl_accuracy"}),
        (
            searched("level", [*METHODS, "wanda", "x"], [64], [128, 256], acc_mean=0.5, elapsed_time=math.nan),
            {"seq_len"},
        ),
        (searched("wide", METHODS, range(8, 208, 8), range(32, 330, 64), every=3, ppl=math.inf), {"ppl_accuracy"}),
    ],
    ids=["one configuration", "five methods alike, one level", "many levels, sparse"],
)
def test_any_shape_of_search_is_drawn(model: Model, absent: set[str], tmp_path: Path) -> None:
    names = {path.stem for path in figures.draw_all(findings_of(model), tmp_path)}
    possible = {f"heatmap_{model.label}", "methods", "accuracy_cost", "seq_len", "num_samples", "ppl_accuracy"}
    assert names == possible - absent


def test_unknown_perplexities_are_counted_in_the_panel() -> None:
    found = findings_of(searched("m", ["taylor"], [16, 32], [128, 256], ppl=[10.0, 12.0, math.inf, math.nan])).models
    (axes,) = figures.ppl_accuracy(found).axes
    assert [text.get_text() for text in axes.texts] == ["2 of 4 not finite, not shown"]
    assert {x for x, _ in points(axes, "o")} == {10.0, 12.0}


def test_fourteen_models_have_a_panel_each_and_files_of_their_own(tmp_path: Path) -> None:
    labels = [rf"org/Model {number} $\x$" for number in range(12)] + [r"org_Model 0 $\x$", "../.."]
    models = findings_of(*(searched(label, ["taylor"], [16, 64], [128]) for label in labels)).models
    drawn = figures.curves(models, "seq_len")
    assert [axes.get_title().replace("\n", " ") for axes in drawn.axes] == labels
    stems = figure_style.file_stems(labels)
    assert len({stem.lower() for stem in stems.values()}) == 14
    for stem in stems.values():
        assert Path(tmp_path, f"{stem}.png").parent == tmp_path and re.fullmatch(r"[\w.+-]+", stem)
    with figure_style.style():
        alone = figures.methods({labels[0]: models[labels[0]]})
        (path,) = figure_style.save({"alone": alone}, tmp_path, ("png",))  # a dollar sign is no formula
    assert imread(path).shape[1] == round(200 * 3.3)


def test_methods_are_told_apart_without_colour() -> None:
    styles = figure_style.styles(["blockwise", "wanda", "taylor", "layerwise", "magnitude", "a", "b", "c"])
    assert list(styles)[:3] == list(METHODS)
    assert len({style["marker"] for style in styles.values()}) == 8
    assert figure_style.styles(["blockwise"])["blockwise"] == styles["blockwise"]
