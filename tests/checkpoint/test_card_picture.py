"""The picture of the model card: a bar for what every layer kept, readable for few layers and for many."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from tests.checkpoint.test_model_card import BASE, DENSE, GEOMETRY, card, geometry, manifest
from tune_prune.checkpoint.card import layers_figure, write_card
from tune_prune.pruning.groups import PruningPlan


@pytest.fixture(autouse=True)
def _the_users_style_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    for name, value in {"font.size": 30, "axes.facecolor": "grey", "savefig.dpi": 30}.items():
        monkeypatch.setitem(mpl.rcParams, name, value)


def bars(axes: Axes, label: str) -> dict[float, float]:
    """Height of each bar by its middle."""
    containers = [container for container in axes.containers if container.get_label() == label]
    return {
        round(bar.get_x() + bar.get_width() / 2, 6): bar.get_height()
        for container in containers
        for bar in container.patches
    }


def test_picture_has_a_bar_for_what_every_layer_kept(tmp_path: Path) -> None:
    figure = layers_figure(manifest(), GEOMETRY)
    upper, lower = figure.axes
    assert bars(upper, "kept") == dict(enumerate([1.0, 0.5, 0.0, 0.25, 0.0, 0.75]))
    assert bars(lower, "kept") == dict(enumerate([1.0, 0.3, 0.9, 0.0, 0.0, 0.1]))
    for axes in (upper, lower):
        assert axes.get_ylim() == (0, 1)
        assert bars(axes, "whole layer dropped") == {4.0: 1.0}
    assert [axes.get_title(loc="left") or axes.get_title() for axes in (upper, lower)] == [
        "KV groups: 41.7% kept",
        "MLP channels: 38.3% kept",
    ]
    legend = [text.get_text() for text in upper.get_legend().get_texts()]
    assert legend == ["removed", "whole layer dropped"]
    whole = layers_figure(manifest(dropped_layers=()), GEOMETRY)
    assert [text.get_text() for text in whole.axes[0].get_legend().get_texts()] == ["removed"]
    said = card(tmp_path)
    assert "KV groups kept: 41.7% in all, from 0.0% (layer 2) to 100.0% (layer 0)" in said
    assert "MLP channels kept: 38.3% in all, from 0.0% (layer 3) to 100.0% (layer 0)." in said


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "width"), [(6, 5.42), (80, 10.0)])
def test_picture_is_readable_for_few_and_many_layers(tmp_path: Path, layers: int, width: float) -> None:
    kept = tuple(tuple(range(1 + layer % 8)) for layer in range(layers))
    plan = PruningPlan(kept, kept, 1, 1, DENSE.params)
    about = manifest(plan=plan, base=replace(BASE, layers=layers), dropped_layers=())
    shape = geometry(layers, kv_heads=8, width=9)
    write_card(tmp_path, about, shape)
    pixels = imread(tmp_path / "layers.png")
    assert pixels.shape[:2] == (512, round(160 * width))
    assert len(np.unique(pixels.reshape(-1, 4), axis=0)) > 20
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (edge[:, :3] == 1).all(), "cut at its edge"
    figure = layers_figure(about, shape)
    figure.draw_without_rendering()
    shown = [label for label in figure.axes[1].get_xticklabels() if 0 <= label.get_position()[0] < layers]
    boxes = [label.get_window_extent() for label in shown]
    assert len(shown) >= min(layers, 10)
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
