"""Pictures of the best configuration of a model, from the files of its trial."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from tests.analysis.test_figures import marked
from tests.findings import simulated_findings
from tune_prune.analysis.figures import figure_style, figures
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.core.errors import UserError


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Two models of 18 configurations with items."""
    return simulated_findings(tmp_path_factory.mktemp("study"))


def layers_file(folder: Path, name: str, layers: list[Mapping[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"layers": layers}))


def test_best_of_a_model_is_pictured_from_its_trial_folder(simulated: Findings, tmp_path: Path) -> None:
    folder = Path(simulated.models["alpha"].best["output_dir"])
    paths = figures.draw_best(folder, tmp_path / "visualization")
    assert [path.name for path in paths] == ["gradient_analysis.png", "pruning_ratio.png", "retention_ratio.png"]
    assert all(len(np.unique(imread(path))) > 20 for path in paths)
    kept = figures.layer_shares(folder)
    assert kept is not None
    file = json.loads((folder / "pruning_comparison.json").read_text())["layers"]
    for part in ("kv_groups", "mlp_channels"):
        assert list(kept[part]) == [layer[f"{part}_kept"] / layer[f"{part}_before"] for layer in file]
    (axes,) = figures.retention_figure(kept).axes
    for line, part in zip((marked(axes, "s"), marked(axes, "o")), ("kv_groups", "mlp_channels"), strict=True):
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 1, 2, 3], list(kept[part]))
    (axes,) = figures.pruning_figure(kept).axes
    groups, channels, whole = axes.containers
    heights = [bar.get_height() for container in (groups, channels) for bar in container.patches]
    np.testing.assert_allclose(heights, [*(1 - kept["kv_groups"]), *(1 - kept["mlp_channels"])])
    segments = whole.lines[2][0].get_segments()
    np.testing.assert_allclose([segment[0, 1] for segment in segments], [layer["pruned_fraction"] for layer in file])


def test_gradients_that_are_zero_or_not_finite_are_counted(tmp_path: Path) -> None:
    values = [(1e-3, 2.0), (4e-3, "inf"), (2e-3, 0.0)]
    layers = [{"layer": i, "grad_mean": m, "grad_norm": n} for i, (m, n) in enumerate(values)]
    layers_file(tmp_path, "gradient_diagnosis.json", layers)
    table = figures.layer_table(tmp_path / "gradient_diagnosis.json", ["grad_mean", "grad_norm"])
    assert table is not None
    mean, norm = figures.gradient_figure(table).axes
    assert (mean.get_title("right"), norm.get_title("right")) == ("largest / smallest: 4", "2 zero or not finite")
    assert marked(norm, "s").get_ydata().tolist() == [2.0]


def test_what_is_missing_is_left_out_and_what_is_damaged_is_named(simulated: Findings, tmp_path: Path) -> None:
    model = simulated.models["alpha"]
    assert figures.draw_best(tmp_path / "nowhere", tmp_path / "out") == []
    for damage in ([{"layer": 0, "kv_groups_before": 4}], [{"layer": "first"}], []):
        layers_file(tmp_path, "pruning_comparison.json", damage)
        with pytest.raises(UserError, match=r"pruning_comparison.json has no layers with kv_groups_before"):
            figures.draw_best(tmp_path, tmp_path / "out")
    damaged = replace(model, eligible=model.eligible.assign(output_dir=str(tmp_path)))
    with pytest.raises(UserError, match="move it away"):
        figures.draw_all(replace(simulated, models={"alpha": damaged}), tmp_path / "out")


def test_a_deep_model_is_pictured(tmp_path: Path) -> None:
    deep = pd.DataFrame({"kv_groups": 1.0, "mlp_channels": np.linspace(0, 1, 126), "params": 0.5}, index=range(126))
    with figure_style.style():
        drawn = {"kept": figures.retention_figure(deep), "removed": figures.pruning_figure(deep)}
        for path in figure_style.save(drawn, tmp_path, ("png",)):
            assert len(drawn[path.stem].axes[0].get_xticks()) <= 12 and imread(path).shape[1] == round(200 * 6.9)
