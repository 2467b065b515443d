"""The search space reader: what comes with the project is valid, and a file gives the configurations it names."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.tuning import space as search_space

GOOD = {
    "search": "grid",
    "method": "[taylor, blockwise]",
    "seq_len": "[64, 16]",
    "num_samples": "[4, 8]",
}


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "space.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(folder: Path, text: str) -> list[tuple[int, str]]:
    """(line, problem) of every problem that the reader finds in `text`."""
    path = yaml_file(folder, text)
    with pytest.raises(UserError) as caught:
        search_space.load(path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{path} has {len(lines)} problem{'s' * (len(lines) > 1)}:"
    found = []
    for line in lines:
        assert line.startswith(f"{path}:")
        number, problem = line.removeprefix(f"{path}:").split(": ", 1)
        found.append((int(number), problem))
    return found


def with_value(**values: str) -> str:
    return "".join(f"{name}: {value}\n" for name, value in (GOOD | values).items())


@pytest.mark.parametrize(
    ("name", "size", "search", "num_trials"),
    [
        ("paper_grid", 45, "grid", None),
        ("adaptive", 297, "optuna", 20),
        ("minimal", 3, "grid", None),
        ("recommended", 12, "grid", None),
        ("extended", 450, "optuna", 60),
        ("smoke", 6, "grid", None),
    ],
)
def test_shipped_spaces(name: str, size: int, search: str, num_trials: int | None) -> None:
    space = search_space.load(name)
    assert (space.name, space.size, space.search, space.num_trials) == (name, size, search, num_trials)
    assert len(set(space.configs())) == size
    assert max(space.values["seq_len"]) <= 256


def test_every_shipped_space_is_tested() -> None:
    known = {"paper_grid", "recommended", "extended", "adaptive", "minimal", "smoke", "control"}
    assert set(search_space.names()) == known


def test_paper_grid_is_the_published_one() -> None:
    configs = {(c.method, c.seq_len, c.num_samples) for c in search_space.load("paper_grid").configs()}
    assert configs == {
        (m, s, n) for m in ("taylor", "layerwise", "blockwise") for s in (16, 32, 64, 128, 256) for n in (128, 256, 512)
    }


def test_configs_share_seq_len_between_neighbours(tmp_path: Path) -> None:
    text = with_value(removal_divisor="3", pruning_ratio="0.3")
    space = search_space.load(yaml_file(tmp_path, text))
    assert space.configs() == tuple(
        PruningConfig(method, seq_len, samples, 0.3, 3)
        for seq_len in (64, 16)
        for samples in (4, 8)
        for method in ("taylor", "blockwise")
    )


def test_comments_block_lists_and_byte_order_mark(tmp_path: Path) -> None:
    text = "\ufeff# why\nsearch: optuna\nnum_trials: 2\nmethod:\n  - taylor\n"
    text += "seq_len: [16]\ntaylor_num_samples:\n- 1\n- 2  # two\n"
    space = search_space.load(yaml_file(tmp_path, text))
    assert (space.num_trials, space.values["num_samples"]) == (2, (1, 2))
    assert space.values["pruning_ratio"] == (0.2,) and "pruning_ratio" not in space.given


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_a_value_a_list_of_one_and_a_list(name: str, tmp_path: Path) -> None:
    """Every row of the table reads the same way."""
    several = {
        "method": ("taylor", "layerwise"),
        "seq_len": (64, 2),
        "num_samples": (8, 1_000_000),
        "pruning_ratio": (0.1, 0.25),
        "removal_divisor": (5, 1),
        "shape": ("aligned", "aligned-128", "uniform", "free"),
        "seed": (3, 0, 4294967295),
        "calibration": ("c4", "wikitext2+c4"),
        "steps": (1, 4),
        "compensation": ("least_squares", "none"),
        "damping": (0.3, 0.1, 100),
        "refit_tokens": (1024, 16384),
        "recovery": ("lora", "none"),
        "recovery_steps": (1, 300),
        "recovery_rate": (0.0003, 1),
        "recovery_rank": (64, 1),
        "removal_power": (0.5, 1, 10),
        "normalization": ("kind", "layer", "none"),
        "layer_cap": (0.5, 1),
    }[name]
    switch = HYPERPARAMETERS[name].of
    more = {switch: HYPERPARAMETERS[switch].example} if switch else {}
    for text, values in (
        (str(several[0]), several[:1]),
        (f"[{several[0]}]", several[:1]),
        (f"[{', '.join(map(str, several))}]", several),
    ):
        space = search_space.load(yaml_file(tmp_path, with_value(**{name: text} | more)))
        assert space.values[name] == values
        assert name in space.given


def test_steps_are_for_methods_that_read_samples(tmp_path: Path) -> None:
    text = with_value(method="[taylor, random]", steps="[4, 1]")
    points = {(config.method, config.steps) for config in search_space.load(yaml_file(tmp_path, text)).configs()}
    assert points == {("taylor", 4), ("taylor", 1), ("random", 1)}
    assert problems(tmp_path, with_value(method="[taylor, magnitude]", steps="[2, 4]")) == [
        (
            len(GOOD) + 1,
            "steps lists no 1, but magnitude reads no calibration text, so it has nothing to score anew after a step; add 1, "
            "or remove magnitude",
        )
    ]


def test_a_normalization_that_cancels_what_a_method_does_is_refused(tmp_path: Path) -> None:
    text = with_value(method="[taylor, layerwise, block_influence]", normalization="[none, kind]")
    assert search_space.load(yaml_file(tmp_path, text)).size == 3 * 2 * 2 * 2
    assert problems(tmp_path, text.replace("kind", "layer")) == [
        (
            len(GOOD) + 1,
            f"{name} tells layers apart by one number for each, which normalization layer divides out again; use normalization "
            "none or kind, or another method",
        )
        for name in ("block_influence", "layerwise")
    ]


def test_a_grid_over_ratios_divisors_and_shapes(tmp_path: Path) -> None:
    text = with_value(pruning_ratio="[0.3, 0.1]", removal_divisor="[2, 5]", shape="[free, uniform]")
    space = search_space.load(yaml_file(tmp_path, text))
    expected = {
        PruningConfig(method, seq_len, samples, ratio, divisor, shape)
        for method in ("taylor", "blockwise")
        for seq_len in (64, 16)
        for samples in (4, 8)
        for ratio in (0.3, 0.1)
        for divisor in (2, 5)
        for shape in ("free", "uniform")
        if method == "blockwise" or divisor == 2  # taylor reads no removal losses: the first divisor stands for all
    }
    assert set(space.configs()) == expected and len(space.configs()) == len(expected)
    assert space.size == len(expected) / 2


def test_what_a_method_does_not_read_makes_no_configuration(tmp_path: Path) -> None:
    space = search_space.load(yaml_file(tmp_path, with_value(removal_divisor="[3, 5]")))
    nothing: dict[str, frozenset[str]] = {"taylor": frozenset(), "blockwise": frozenset({"seq_len", "removal_divisor"})}
    assert replace(space, reads=nothing).configs() == (
        PruningConfig("taylor", 64, 4, removal_divisor=3),
        *(PruningConfig("blockwise", s, 4, removal_divisor=d) for s, d in ((64, 3), (64, 5), (16, 3), (16, 5))),
    )


def test_methods_that_read_no_data_stand_once_where_an_old_grid_began(tmp_path: Path) -> None:
    text = with_value(
        method="[taylor, random, magnitude, wanda_sp]", removal_divisor="[2, 5]", pruning_ratio="[0.1, 0.2]"
    )
    found = search_space.load(yaml_file(tmp_path, text)).configs()
    count = Counter((config.method, config.pruning_ratio) for config in found)
    assert count == {
        (m, r): n for m, n in (("taylor", 4), ("random", 1), ("magnitude", 1), ("wanda_sp", 4)) for r in (0.1, 0.2)
    }
    assert PruningConfig("random", 64, 4, 0.1, 2) in found


def test_draws_make_configurations_of_the_methods_that_draw(tmp_path: Path) -> None:
    text = with_value(method="[taylor, random, magnitude]", seq_len=16, num_samples=4, seeds="[0, 2, 1]")
    found = search_space.load(yaml_file(tmp_path, text)).configs()
    drawn = {PruningConfig(method, 16, 4, seed=seed) for method in ("taylor", "random") for seed in (0, 1, 2)}
    assert set(found) == {*drawn, PruningConfig("magnitude", 16, 4)} and len(found) == 7
    [(_, problem)] = problems(tmp_path, with_value(seeds="[1, 2, 1]"))
    assert problem == "seed lists 1 twice; keep one"


def test_what_only_a_refit_reads_makes_no_configuration_without_one(tmp_path: Path) -> None:
    values = {"compensation": "[none, least_squares]", "damping": "[0.3, 0.1]", "refit_tokens": 2048, "seeds": "[0, 1]"}
    text = with_value(method="magnitude", seq_len="[16, 64]", num_samples=4, **values)
    found = search_space.load(yaml_file(tmp_path, text)).configs()
    refits = [
        PruningConfig("magnitude", 16, 4, seed=seed, compensation="least_squares", damping=damping, refit_tokens=2048)
        for seed in (0, 1)  # which the samples of a refit depend on, although the method reads none
        for damping in (0.3, 0.1)
    ]
    assert set(found) == {PruningConfig("magnitude", 16, 4), *refits} and len(found) == 5
    [(_, problem)] = problems(tmp_path, with_value(damping="0.3"))
    assert problem == "damping is read by no trial; add `compensation: least_squares`, or remove it"
    both = values | {"recovery": "[none, lora]", "recovery_steps": "[50, 100]"}
    found = search_space.load(
        yaml_file(tmp_path, with_value(method="magnitude", seq_len=16, num_samples=4, **both))
    ).configs()
    assert (
        len(found) == len(set(found)) == 1 + 2 * ((1 + 2) * (1 + 2) - 1)
    )  # two dampings, two numbers of steps; of two seeds, but without either
    assert len([one for one in found if one.recovery == one.compensation == "none"]) == 1
    [(_, problem)] = problems(tmp_path, with_value(recovery_steps="50"))
    assert problem == "recovery_steps is read by no trial; add `recovery: lora`, or remove it"


@pytest.mark.parametrize("ratio", ["0.2", "2e-1", ".2", "0.5"])
def test_pruning_ratio_as_python_reads_it(tmp_path: Path, ratio: str) -> None:
    space = search_space.load(yaml_file(tmp_path, with_value(pruning_ratio=ratio)))
    assert space.values["pruning_ratio"] == (float(ratio),)


@pytest.mark.parametrize("num_trials", [1, 8])
def test_num_trials_within_bounds(tmp_path: Path, num_trials: int) -> None:
    text = with_value(search="optuna", num_trials=str(num_trials))
    assert search_space.load(yaml_file(tmp_path, text)).num_trials == num_trials


def test_bounds_are_included(tmp_path: Path) -> None:
    text = with_value(seq_len="[2, 131072]", num_samples="[1, 1000000]")
    assert search_space.load(yaml_file(tmp_path, text)).size == 8


def test_a_search_space_is_found_from_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    yaml_file(tmp_path, "".join(f"{name}: {value}\n" for name, value in GOOD.items()))
    assert search_space.load("~/space.yaml").size == 8
