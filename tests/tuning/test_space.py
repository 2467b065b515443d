"""The search space reader: a file gives the configurations it names, and every problem of it is named with its line."""

from __future__ import annotations

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
        ("control", 1, "grid", None),
    ],
)
def test_shipped_spaces(name: str, size: int, search: str, num_trials: int | None) -> None:
    space = search_space.load(name)
    assert (space.name, space.size, space.search, space.num_trials) == (name, size, search, num_trials)
    assert len(set(space.configs())) == size
    assert max(space.values["seq_len"]) <= 256


def test_paper_grid_is_the_published_one() -> None:
    configs = {(c.method, c.seq_len, c.num_samples) for c in search_space.load("paper_grid").configs()}
    assert configs == {
        (m, s, n) for m in ("taylor", "layerwise", "blockwise") for s in (16, 32, 64, 128, 256) for n in (128, 256, 512)
    }


def test_comments_block_lists_and_byte_order_mark(tmp_path: Path) -> None:
    text = "\ufeff# why\nsearch: optuna\nnum_trials: 2\nmethod:\n  - taylor\n"
    text += "seq_len: [16]\ntaylor_num_samples:\n- 1\n- 2  # two\n"
    space = search_space.load(yaml_file(tmp_path, text))
    assert (space.num_trials, space.values["num_samples"]) == (2, (1, 2))
    assert space.values["pruning_ratio"] == (0.2,) and "pruning_ratio" not in space.given


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_a_value_and_a_list_of_one_read_the_same_way(name: str, tmp_path: Path) -> None:
    row = HYPERPARAMETERS[name]
    more = {row.of: HYPERPARAMETERS[row.of].example} if row.of else {}
    for text in (row.example, f"[{row.example}]"):
        space = search_space.load(yaml_file(tmp_path, with_value(**{name: text} | more)))
        assert space.values[name] == (row.kind.read(row.example),) and name in space.given


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


def test_draws_make_configurations_of_the_methods_that_draw(tmp_path: Path) -> None:
    text = with_value(method="[taylor, random, magnitude]", seq_len=16, num_samples=4, seeds="[0, 2, 1]")
    found = search_space.load(yaml_file(tmp_path, text)).configs()
    drawn = {PruningConfig(method, 16, 4, seed=seed) for method in ("taylor", "random") for seed in (0, 1, 2)}
    assert set(found) == {*drawn, PruningConfig("magnitude", 16, 4)} and len(found) == 7


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
    both = values | {"recovery": "[none, lora]", "recovery_steps": "[50, 100]"}
    found = search_space.load(
        yaml_file(tmp_path, with_value(method="magnitude", seq_len=16, num_samples=4, **both))
    ).configs()
    assert (
        len(found) == len(set(found)) == 1 + 2 * ((1 + 2) * (1 + 2) - 1)
    )  # two dampings, two numbers of steps; of two seeds, but without either
    assert len([one for one in found if one.recovery == one.compensation == "none"]) == 1


LINES = {name: line for line, name in enumerate(GOOD, 1)} | {"extra": len(GOOD) + 1}
RATIO = "it must be a number above 0 and below 1"
BAD = [
    ("search", "gird", "search is the text 'gird'; did you mean 'grid'?"),
    ("search", "[grid]", "search is a list; known: grid, optuna"),
    ("method", "{taylor: 1}", "method is a mapping; it must be the name of a pruning method"),
    ("method", "[]", "method is an empty list; give at least one value, e.g. `method: ["),
    (
        "method",
        "[blokwise]",
        "unknown method 'blokwise'; did you mean 'blockwise'? known: block_influence, blockwise, ",
    ),
    ("method", "[taylor, taylor]", "method lists 'taylor' twice"),
    ("method", "[true]", "method is true (true or false); it must be the name"),
    ("seq_len", "[1]", "seq_len is 1; it must be a whole number from 2 to 131072"),
    ("seq_len", "['64']", "seq_len is the text '64'; it must be a whole number"),
    ("seq_len", "[0100]", "seq_len is 0100; it must be"),
    ("pruning_ratio", "[0.2, 0.2000001]", "pruning_ratio lists 0.2000001 beside one that has the same six digits"),
    ("pruning_ratio", "[0.1, 1e-1]", "pruning_ratio lists 0.1 twice"),
    ("pruning_ratio", "1.0", f"pruning_ratio is 1.0; {RATIO}"),
    ("pruning_ratio", ".nan", f"pruning_ratio is .nan; {RATIO}"),
    ("shape", "aligned-0", "shape is the text 'aligned-0'; it must be free, "),
    ("taylor_seqlen", "3", "unknown key 'taylor_seqlen'; did you mean 'seq_len'?"),
    ("num_trials", "0", "num_trials is 0; it must be a whole number from 1 to 1000000000"),
    ("damping", "0.3", "damping is read by no trial; add `compensation: least_squares`, or remove it"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD)
def test_a_problem_is_named_with_its_line(tmp_path: Path, name: str, value: str, expected: str) -> None:
    [(line, problem)] = problems(tmp_path, with_value(**{name: value}))
    assert line == LINES.get(name, LINES["extra"])
    assert problem.startswith(expected)


def test_missing_key(tmp_path: Path) -> None:
    text = "".join(f"{name}: {value}\n" for name, value in GOOD.items() if name != "seq_len")
    [(_, problem)] = problems(tmp_path, text)
    assert problem.startswith("key 'seq_len' is missing; add it, e.g. `seq_len: ")


def test_duplicate_key_names_both_lines(tmp_path: Path) -> None:
    [(line, problem)] = problems(tmp_path, with_value() + "method: [layerwise]\n")
    assert (line, problem) == (5, "key 'method' is given twice (first in line 2); keep one")


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("search: grid\nmethod: [taylor\n", 3, "column 1: not valid YAML"),
        ("search: *nowhere\n", 1, "column 9: not valid YAML"),
        ("[" * 5000, 1, "not valid YAML"),
        ("# nothing\n", 1, "the file is empty"),
        ("- search\n", 1, "the file is not a mapping"),
    ],
)
def test_no_mapping_at_all(tmp_path: Path, text: str, line: int, expected: str) -> None:
    [(found, problem)] = problems(tmp_path, text)
    assert (found, problem[: len(expected)]) == (line, expected)


def test_all_problems_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
serach: grid
search: optuna
method: [blokwise, taylor, taylor]
seq_len: [1, yes, 64]
num_samples: []
num_trials: 0
pruning_ratio: 2
colour: blue
"""
    found = problems(tmp_path, text)
    assert [line for line, _ in found] == [1, 3, 3, 4, 4, 5, 6, 7, 8]
    assert "twice" in found[2][1]
    assert "is yes" in found[4][1]


def test_a_missing_file_suggests_a_name_and_what_is_no_file_of_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'no/such/paper_gird.yaml'.*did you mean 'paper_grid'") as caught:
        search_space.load("no/such/paper_gird.yaml")
    assert "\n" not in str(caught.value)
    (tmp_path / "space.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"space\.yaml cannot be read"):
        search_space.load(str(tmp_path / "space.yaml"))
    with pytest.raises(UserError, match=f"search space '{tmp_path}' is a folder; name a file in it"):
        search_space.load(str(tmp_path))
