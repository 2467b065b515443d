"""The plan in about ten lines, the answer first; its counts are those of the whole plan and of the trials."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.search_folders import TINY, data_folder, model_folder
from tune_prune.commands import plan_page, search
from tune_prune.tuning.plan import SearchSettings
from tune_prune.tuning.preflight import make_plan

pytestmark = pytest.mark.usefixtures("nothing_created")

ROWS = ["plan", "time", "memory", "model", "sample text", "tests", "results", "details"]


def rows(out: str) -> dict[str, str]:
    """name -> what it says, of a plan whose rows are lines."""
    found = [(line[:12].strip(), line[13:]) for line in out.partition("\n\ndry run")[0].splitlines()]
    assert all(name for name, _ in found), out
    return dict(found)


def test_ten_lines_answer_what_is_asked_first(plan_text: Callable[..., str]) -> None:
    found = rows(plan_text(*TINY, "--gpus-per-trial", "0", "--inline", verbose=False))
    assert list(found) == ROWS
    (model,) = make_plan(SearchSettings(("tiny-llama",), "smoke", gpus_per_trial=0, inline=True)).models
    count, total = len(model.trials), model.geometry.total_params
    assert found["plan"] == f"tiny-llama: {count} ways to prune it by 20%, each tested; one after the other"
    assert re.fullmatch(r"[\dhms.]+ to [\dhms.]+; by the speed measured here", found["time"])
    assert re.fullmatch(r"\d+ MiB a trial: fits \(\S+ [MGT]iB are free\)", found["memory"])
    assert found["model"] == f"{total:,} parameters, {int(0.2 * total):,} of them to go"
    assert found["tests"] == "perplexity on the embedded text; 7 toy benchmarks, all questions"
    assert found["results"] == "ray_results/tiny-llama-20-smoke" and found["details"].startswith("--verbose ")


def test_one_count_stands_everywhere(plan_text: Callable[..., str]) -> None:
    """12 ways of each of two models, and the training of two more of each: neither 24 nor 14."""
    argv = ("--model", "tiny-llama", "--model", "tiny-qwen2", "--search-space", "recommended", "--gpus-per-trial", "0")
    out = plan_text(*argv, "--recover", "2", verbose=False)
    says = "2 models: 12 ways to prune each by 20%, each tested; then the 2 most promising of each model get a short training"
    assert f"plan         {says}; at most 28 trials; " in out
    assert re.search(r"^time +\S+ to \S+, or less; ", out, re.MULTILINE)
    whole = plan_text(*argv, "--recover", "2")
    assert " = 12 configurations a model, at most 28 trials " in whole and "up to 2 of each model get" in whole
    table = re.search(r"^models .*\bto go, 20% +memory a trial +tiny-llama +158,848 +31,769 ", out, re.MULTILINE)
    assert table and " tiny-qwen2 " in out


@pytest.mark.parametrize(
    ("lines", "flags", "says"),
    [
        ("seeds: [0, 1]", (), "2 ways to prune it by 20%, each tested 2 times, with other sample text; 4 trials; "),
        (
            "",
            ("--draws", "3"),
            "2 ways to prune it by 20%, each tested once; those that could be the best up to 3 times, ",
        ),
        ("pruning_ratio: [0.1, 0.3]", (), "2 ways to prune it by 10% and 30%, each tested; 4 trials; "),
        ("", ("--search", "optuna", "--num-trials", "1"), "optuna tries 1 of 2 ways to prune it by 20%, each tested; "),
        ("", ("--recover", "1"), "each tested; then the most promising gets a short training; at most 3 trials; "),
    ],
)
def test_what_is_tested_how_often(lines: str, flags: tuple[str, ...], says: str, plan_text: Callable[..., str]) -> None:
    Path("mine.yaml").write_text(f"search: grid\nmethod: [taylor, random]\nseq_len: 16\nnum_samples: 8\n{lines}\n")
    out = plan_text("--model", "tiny-llama", "--search-space", "mine.yaml", "--tasks", "piqa", *flags, verbose=False)
    assert says in rows(out)["plan"]


@pytest.mark.parametrize("flag", [(), ("--verbose",)])
def test_no_line_is_wider_than_a_screen(
    flag: tuple[str, ...], printed: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, data = model_folder(tmp_path / "a-model-with-a-name-that-is-rather-long"), data_folder(tmp_path / "data")
    argv = ("--model", folder, "--data-dir", data, "--search-space", "extended", "--shape", "aligned", "--dry-run")
    out = printed(search.main, *argv, "--calibration", "embedded", *flag)
    assert max(map(len, out.splitlines())) <= plan_page.WIDTH, out
