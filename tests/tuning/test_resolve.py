"""Flags that do not fit the search space, or each other: each is refused with a sentence that names both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tune_prune.commands.flags import settings_from
from tune_prune.commands.options import CommandLine
from tune_prune.core.errors import UserError
from tune_prune.tuning import resolve

SPACE = "search: grid\nmethod: taylor\nseq_len: 16\nnum_samples: 8\n"
SPACES = {
    "lora": f"{SPACE}recovery: lora\n",
    "both": f"{SPACE}recovery: [none, lora]\nrecovery_steps: [5, 10]\n",
    "seeds": "search: optuna\nmethod: taylor\nseq_len: [16, 32]\nnum_samples: 8\nseeds: [0, 2]\nnum_trials: 2\n",
}


def space(folder: Path, line: str, space: str = "smoke") -> Any:
    if space in SPACES:
        (folder / f"{space}.yaml").write_text(SPACES[space])
        space = str(folder / f"{space}.yaml")
    argv = ["--model", "tiny-llama", "--search-space", space, *line.split()]
    return resolve.space(settings_from(vars(CommandLine("search").parse_args(argv))))


REFUSED = [
    ("--draws-by kl", "smoke", r"--draws-by kl says which .* add --draws 3"),
    ("--draws 3 --seeds 0,1", "smoke", "--seeds names others"),
    ("--draws 3 --search optuna", "smoke", "is for a grid"),
    (f"--draws 3 --seed {2**32 - 1}", "smoke", "above the largest"),
    ("--recover 2", "lora", r"says `recovery: lora`; write `recovery: \[none, lora\]`"),
    ("--recover 2 --search optuna", "smoke", "--recover 2 is for a grid"),
    ("--seeds 0,1 --scheduler race", "smoke", r"--scheduler race stops .* mean of 2 .*seeds 0, 1.*--draws 2 in place"),
    ("--seeds 0,1 --scheduler asha", "smoke", r"--scheduler asha stops .* mean of 2 .*seeds 0, 1.*--draws 2 in place"),
    ("--seeds 0,1 --kl-filter", "smoke", r"^--kl-filter stops single trials, .* mean of 2 .*--draws 2 in place"),
    ("", "seeds", r"2 seeds \(0, 2\) are for a grid.*name one seed, or use --search grid"),
    (
        "--search optuna --objective perplexity --scheduler asha",
        "smoke",
        r"^--scheduler asha stops trials by accuracy, .*by perplexity; .* out$",
    ),
    (
        "--search optuna --objective gold_logprob --scheduler race",
        "smoke",
        "^--scheduler race stops trials by accuracy, which may stop the best by gold_logprob",
    ),
    (
        "--draws 2 --draws-by kl --scheduler race",
        "smoke",
        "^--scheduler race stops trials by accuracy, which may stop the best by kl",
    ),
    (
        "--draws 2 --draws-by kl --scheduler race-gold",
        "smoke",
        "^--scheduler race-gold stops trials by gold_logprob, which may stop the best by kl",
    ),
    # It compares with five earlier trials of one draw: the sixth may be stopped.
    ("--kl-filter", "control", "at least 5 before it, but space control has 1 "),
    ("--kl-filter", "minimal", "has 3 "),
    ("--search optuna --num-trials 5 --kl-filter", "smoke", "has 5 "),
]


@pytest.mark.parametrize(("line", "name", "sentence"), REFUSED)
def test_what_does_not_fit_is_refused(tmp_path: Path, line: str, name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        space(tmp_path, line, name)


@pytest.mark.parametrize(
    ("line", "name", "key", "values"),
    [
        ("--draws 3 --seed 5", "smoke", "seed", (5, 6, 7)),
        ("--draws 2 --scheduler race", "smoke", "seed", (0, 1)),
        ("--draws 2 --kl-filter", "smoke", "seed", (0, 1)),
        ("--seeds 3 --scheduler asha", "smoke", "seed", (3,)),
        ("--seeds 3 --search optuna", "smoke", "seed", (3,)),
        ("--recover 2", "smoke", "recovery", ("none", "lora")),
        ("--search optuna --kl-filter", "smoke", "shape", ("by_size",)),
        ("--search optuna --objective gold_logprob --scheduler race-gold", "smoke", "seed", (None,)),
    ],
)
def test_flags_are_put_into_the_space(tmp_path: Path, line: str, name: str, key: str, values: tuple[Any, ...]) -> None:
    assert space(tmp_path, line, name).values[key] == values


def test_a_space_with_both_has_its_trained_configurations(tmp_path: Path) -> None:
    assert space(tmp_path, "--recover 2", "both").size == 3  # untrained, and both lengths of a training
