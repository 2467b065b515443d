"""The three methods and the control against their formulas; and that a file in the package is a method."""

from __future__ import annotations

import filecmp
import importlib
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from tune_prune.commands import prune
from tune_prune.models.geometry import Geometry
from tune_prune.pruning import methods
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense, load_method, method_names
from tune_prune.pruning.statistics import parse
from tune_prune.pruning.statistics.block_removal import LOSS_FLOOR

GEOMETRY = Geometry(
    total_params=10_000,
    hidden_size=4,
    head_dim=2,
    queries_per_kv=2,
    kv_heads=(2, 1),
    mlp_width=(3, 2),
    group_cost=(100, 50),
    channel_cost=(10, 20),
    last_group_extra=(0, 0),
    cache_layers=(0,),
)
SALIENCE = GroupScores(  # I(group), before the division by cost
    (np.array([200.0, 50.0]), np.array([5.0])), (np.array([10.0, 1.0, 2.0]), np.array([4.0, 40.0]))
)


def dense(increase: dict[str, list[float]], seed: int = 0, geometry: Geometry = GEOMETRY) -> Dense:
    """Make the numbers by which methods that read no weights decide."""
    losses = {f"block_removal:{kind}": np.array(values) for kind, values in increase.items()}
    return Dense(None, None, geometry, seed, {"taylor": SALIENCE} | losses)


def flat(scores: GroupScores) -> list[float]:
    return [float(value) for part in (*scores.attention, *scores.mlp) for value in part]


PER_PARAMETER = np.array([200 / 100, 50 / 100, 5 / 50, 10 / 10, 1 / 10, 2 / 10, 4 / 20, 40 / 20])
# What the groups and channels of PER_PARAMETER are multiplied by, from the losses of each kind of removal.
FORMULAS: dict[str, tuple[tuple[str, ...], dict[str, list[float]], list[float]]] = {
    "taylor": (("taylor",), {}, [0, 0, 0, 0, 0, 0, 0, 0]),
    "layerwise": (("taylor", "block_removal:layer"), {"layer": [0.5, 3]}, [0.5, 0.5, 3, 0.5, 0.5, 0.5, 3, 3]),
    "blockwise": (
        ("taylor", "block_removal:attention", "block_removal:mlp"),
        {"attention": [0.1, 0.2], "mlp": [0.3, 4]},
        [0.1, 0.1, 0.2, 0.3, 0.3, 0.3, 4, 4],
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_it_is_the_formula(name):
    statistics, increase, losses = FORMULAS[name]
    method = load_method(name)
    assert method.statistics == statistics
    factors = np.log1p(losses) if increase else np.ones(8)
    np.testing.assert_allclose(flat(method.scores(dense(increase))), PER_PARAMETER * factors)


@pytest.mark.parametrize("name", ["layerwise", "blockwise"])
def test_a_layer_that_helps_nothing_keeps_the_order_of_its_groups(name):
    method = load_method(name)
    scores = method.scores(dense({kind: [LOSS_FLOOR, 1.0] for kind in ("layer", "attention", "mlp")}))
    base = SALIENCE.per_parameter(GEOMETRY)
    for part, of in ((scores.attention[0], base.attention[0]), (scores.mlp[0], base.mlp[0])):
        assert np.array_equal(np.argsort(part), np.argsort(of)) and (part > 0).all()


def test_random_depends_on_the_seed_alone():
    scores = load_method("random").scores
    one = flat(scores(dense({}, seed=1)))
    assert one == flat(scores(dense({"layer": [1.0, 1.0]}, seed=1)))
    assert one != flat(scores(dense({}, seed=2)))
    assert len(set(one)) == 8 and all(0 <= value < 1 for value in one)


def test_every_listed_method_loads_and_says_what_it_is():
    assert {"taylor", "layerwise", "blockwise", "random"} <= set(method_names())
    assert list(method_names()) == sorted(method_names())
    for name in method_names():
        method = load_method(name)
        assert method.name == name and len(method.description) > 20
        assert all(parse(name) for name in method.statistics)


def test_a_file_in_the_package_is_a_method(tmp_path, monkeypatch):
    (tmp_path / "by_size.py").write_text(
        '"""Keeps what is large (made up)."""\n'
        "import numpy as np\n"
        "from tune_prune.pruning.groups import GroupScores\n"
        'STATISTICS = ("block_removal:mlp",)\n'
        "def scores(dense):\n"
        "    g = dense.geometry\n"
        "    return GroupScores(tuple(np.full(k, c) for k, c in zip(g.kv_heads, g.group_cost)),\n"
        "                       tuple(np.full(m, c) for m, c in zip(g.mlp_width, g.channel_cost)))\n"
    )
    assert "by_size" not in method_names()
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    try:
        assert "by_size" in method_names()
        method = load_method("by_size")
        assert method.statistics == ("block_removal:mlp",) and method.description == "Keeps what is large (made up)."
        assert flat(method.scores(dense({}))) == [100, 100, 50, 10, 10, 10, 20, 20]
    finally:
        sys.modules.pop("tune_prune.pruning.methods.by_size", None)
        vars(methods).pop("by_size", None)


def test_a_method_without_data_is_asked_for_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither by `prune` nor by the command that the model card gives, which makes the same files again."""
    argv = ["--model", "tiny-llama", "--method", "magnitude", "--shape", "aligned-16", "--removal-divisor", "3"]
    assert prune.main([*argv, "--output", str(tmp_path / "first")]) == 0
    card = (tmp_path / "first" / "README.md").read_text(encoding="utf-8")
    assert "| Sample text | none: the method reads no text |" in card
    command = card.partition("tune-prune prune")[2].partition("```")[0].replace("\\\n", " ")
    assert "samples" not in command and "aligned-16" in command
    again = command.replace("DIR", str(tmp_path / "again"))
    assert prune.main(shlex.split(again)) == 0, capfd.readouterr().err
    assert filecmp.cmp(
        tmp_path / "first" / "model.safetensors", tmp_path / "again" / "model.safetensors", shallow=False
    )
