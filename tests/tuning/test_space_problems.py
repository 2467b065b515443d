"""The search space reader: every problem of a file is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tuning.test_search_space import GOOD, problems, with_value, yaml_file
from tune_prune.core.errors import UserError
from tune_prune.tuning import space

LINES = {name: line for line, name in enumerate(GOOD, 1)} | {"extra": len(GOOD) + 1}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("search", "gird", "search is the text 'gird'; did you mean 'grid'?"),
        ("search", "[grid]", "search is a list; known: grid, optuna"),
        ("method", "{taylor: 1}", "method is a mapping; it must be the name of a pruning method"),
        ("method", "", "method is empty; it must be the name of a pruning method"),
        ("method", "[]", "method is an empty list; give at least one value, e.g. `method: ["),
        (
            "method",
            "[blokwise]",
            "unknown method 'blokwise'; did you mean 'blockwise'? known: block_influence, blockwise, ",
        ),
        ("method", "[taylor, taylor]", "method lists 'taylor' twice"),
        ("method", "[true]", "method is true (true or false); it must be the name"),
        ("seq_len", "[1]", "seq_len is 1; it must be a whole number from 2 to 131072"),
        ("seq_len", "[131073]", "seq_len is 131073; it must be"),
        ("seq_len", "[64, 64]", "seq_len lists 64 twice"),
        ("seq_len", "[true]", "seq_len is true (true or false); it must be a whole number"),
        ("seq_len", "['64']", "seq_len is the text '64'; it must be a whole number"),
        ("seq_len", "[64.0]", "seq_len is 64.0; it must be a whole number"),
        ("seq_len", "[0x40]", "seq_len is 0x40; it must be"),
        ("seq_len", "[0100]", "seq_len is 0100; it must be"),
        ("seq_len", "[1:30]", "seq_len is 1:30; it must be"),
        ("seq_len", "[[64]]", "seq_len is a list; it must be a whole number"),
        ("num_samples", "[0]", "num_samples is 0; it must be a whole number from 1 to 1000000"),
        ("num_samples", "[1000001]", "num_samples is 1000001; it must be"),
        ("num_samples", "[]", "num_samples is an empty list"),
        ("pruning_ratio", "[0.2, 0.2000001]", "pruning_ratio lists 0.2000001 beside one that has the same six digits"),
        ("search", "x" * 9999, f"search is the text '{'x' * 59}; known"),
    ],
)
def test_bad_value(tmp_path: Path, name: str, value: str, expected: str) -> None:
    [(line, problem)] = problems(tmp_path, with_value(**{name: value}))
    assert line == LINES.get(name, LINES["extra"])
    assert problem.startswith(expected)


@pytest.mark.parametrize("search", ["grid", "optuna\nnum_trials: 2"])
def test_more_combinations_than_can_be_planned(tmp_path: Path, search: str) -> None:
    """At once: nobody waits for billions of them."""
    lists = {"seq_len": 100, "num_samples": 1000, "removal_divisor": 900}
    text = f"search: {search}\nmethod: [blockwise]\n"
    text += "".join(f"{name}: [{', '.join(map(str, range(2, count + 2)))}]\n" for name, count in lists.items())
    [(_, problem)] = problems(tmp_path, text)
    assert problem == (
        "its lists have 90,000,000 combinations, and 100,000 is the most that can be planned; shorten them, e.g. the 1,000 "
        "values of num_samples"
    )


def test_of_many_problems_the_first_are_told(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, with_value(seq_len=f"[{', '.join(['1'] * 500)}]"))
    with pytest.raises(UserError) as caught:
        space.load(path)
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("has 500 problems:") and len(lines) == 21 and lines[-1] == "and 480 more"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("pruning_ratio", "0", "pruning_ratio is 0; it must be a number above 0 and below 1"),
        ("pruning_ratio", "1.0", "pruning_ratio is 1.0; it must be"),
        ("pruning_ratio", ".nan", "pruning_ratio is .nan; it must be"),
        ("pruning_ratio", "nan", "pruning_ratio is the text 'nan'; it must be"),
        ("pruning_ratio", "true", "pruning_ratio is true (true or false); it must be"),
        ("pruning_ratio", "'0.2'", "pruning_ratio is the text '0.2'; it must be"),
        ("pruning_ratio", "[0.1, 0.2, 1.5]", "pruning_ratio is 1.5; it must be"),
        ("pruning_ratio", "[0.1, 1e-1]", "pruning_ratio lists 0.1 twice"),
        ("pruning_ratio", "0.1_5", "pruning_ratio is 0.1_5; it must be a number above 0 and below 1"),
        ("layer_cap", "0.1_5", "layer_cap is 0.1_5; it must be a number above 0, at most 1"),
        ("pruning_ratio", "[]", "pruning_ratio is an empty list"),
        ("removal_divisor", "0", "removal_divisor is 0; it must be a whole number from 1"),
        ("shape", "square", "shape is the text 'square'; it must be free, aligned or uniform"),
        ("shape", "aligned-0", "shape is the text 'aligned-0'; it must be free, "),
        ("shape", "64", "shape is 64; it must be free, "),
        ("num_trials", "3", "num_trials has no meaning for `search: grid`"),
        ("taylor_seqlen", "3", "unknown key 'taylor_seqlen'; did you mean 'seq_len'?"),
        ("[a, b]", "3", "unknown key '[...]'; known: calibration, compensation"),
        ("<<", "{search: grid}", "unknown key '<<'; known: calibration, compensation"),
    ],
)
def test_bad_extra_key(tmp_path: Path, name: str, value: str, expected: str) -> None:
    [(line, problem)] = problems(tmp_path, with_value(**{name: value}))
    assert line == LINES["extra"]
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("num_trials", "expected"),
    [
        ("0", "it must be a whole number from 1 to 1000000000"),
        ("9", "num_trials is 9; the space has 8 points: write at most 8"),
    ],
)
def test_num_trials_bounds(tmp_path: Path, num_trials: str, expected: str) -> None:
    [(line, problem)] = problems(tmp_path, with_value(search="optuna", num_trials=num_trials))
    assert line == LINES["extra"]
    assert expected in problem


def test_num_trials_is_not_held_against_a_list_that_is_wrong_itself(tmp_path: Path) -> None:
    text = with_value(search="optuna", seq_len="[64, 1]", num_trials="8")
    assert [line for line, _ in problems(tmp_path, text)] == [LINES["seq_len"]]


def test_optuna_needs_num_trials(tmp_path: Path) -> None:
    [(line, problem)] = problems(tmp_path, with_value(search="optuna"))
    assert (line, problem.split(";")[0]) == (1, "`search: optuna` needs num_trials")


@pytest.mark.parametrize("missing", GOOD)
def test_missing_key(tmp_path: Path, missing: str) -> None:
    text = "".join(f"{name}: {value}\n" for name, value in GOOD.items() if name != missing)
    [(_, problem)] = problems(tmp_path, text)
    assert problem.startswith(f"key {missing!r} is missing; add it, e.g. `{missing}: ")


def test_duplicate_key_names_both_lines(tmp_path: Path) -> None:
    [(line, problem)] = problems(tmp_path, with_value() + "method: [layerwise]\n")
    assert (line, problem) == (5, "key 'method' is given twice (first in line 2); keep one")


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("search: grid\nmethod: [taylor\n", 3, "column 1: not valid YAML"),
        ("search: grid\n\tmethod: 1\n", 2, "column 1: not valid YAML"),
        ("search: *nowhere\n", 1, "column 9: not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "column 1: not valid YAML"),
        ("search: \x07\n", 1, "not valid YAML"),
        ("[" * 5000, 1, "not valid YAML"),
        ("", 1, "the file is empty"),
        ("# nothing\n", 1, "the file is empty"),
        ("- search\n", 1, "the file is not a mapping"),
        ("grid\n", 1, "the file is not a mapping"),
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


@pytest.mark.parametrize("name", ["papergrid", "no/such/paper_gird.yaml", "paper_gird.yml"])
def test_missing_file_suggests_a_name(name: str) -> None:
    with pytest.raises(UserError, match="did you mean 'paper_grid'") as caught:
        space.load(name)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"space\.yaml cannot be read"):
        space.load(str(tmp_path / "space.yaml"))


def test_a_folder_is_no_search_space(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"search space '{tmp_path}' is a folder; name a file in it"):
        space.load(str(tmp_path))
