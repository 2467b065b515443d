"""The benchmarks of the cost model at their smallest setting: counts and ratios that hold on any machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # ten seconds each

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_flops(bench: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "--model",
        "tiny-llama",
        "--threads",
        "1",
        "--repeats",
        "1",
        "--limit",
        "2",
        "--seq-len",
        "32",
        "--samples",
        "5",
    )
    model = bench("flops", *argv)["models"]["tiny-llama"]
    layers, stages = model["sizes"]["layers"], model["stages"]
    assert stages["importance"]["tokens"] == 5 * 32
    assert stages["removal"]["tokens"] == 32 * (1 + 3 * layers)
    for stage in stages.values():
        assert stage["flops_per_second"] == pytest.approx(stage["flops"] / stage["seconds"])
        assert stage["of_peak"] == pytest.approx(stage["flops_per_second"] / model["peak_flops_per_second"])
        assert stage["of_peak"] > 0
    # Matrix products with the projections alone: two operations a weight and token, thrice in a gradient pass.
    assert stages["importance"]["flops"] > 6 * 5 * 32 * model["sizes"]["layer_params"]
    for operators in model["operators"].values():
        assert 0 < sum(operators.values()) <= 1
        assert len(operators) == 5
    assert "scaled_dot_product" in capsys.readouterr().out


def test_growth(bench: Callable[..., dict[str, Any]]) -> None:
    """Gradient and removal tokens are known beforehand to the token; every part grows where it should."""
    points = bench("growth", "--model", "tiny-llama", "--limit", "2,4", "--num-samples", "4,8")["points"]
    assert [(point["grows"], point["limit"], point["trials"]) for point in points] == [
        ("model", 2, 2), ("items", 2, 2), ("items", 4, 2), ("configurations", 2, 2), ("configurations", 2, 4),
    ]  # fmt: skip
    for point in points:
        measured, predicted = point["measured"], point["predicted"]
        for stage in ("importance", "removal"):
            assert predicted["tokens"][stage] == measured["tokens"][stage] > 0
        assert predicted["total_seconds"] > 0 and math.isfinite(predicted["total_seconds"])
        assert measured["total_seconds"] > 0
    items = {point["limit"]: point["measured"]["tokens"]["zero_shot"] for point in points if point["grows"] == "items"}
    assert items[4] > 1.5 * items[2]
    one = points[0]
    assert one["predicted"]["tokens"]["zero_shot"] == pytest.approx(one["measured"]["tokens"]["zero_shot"], rel=0.01)
