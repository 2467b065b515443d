"""scripts/study.py: every command that it runs is one that tune_prune takes, what it decides follows its results, and what judges
has not chosen."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import study

from tune_prune.analysis.input.items import GOLD
from tune_prune.commands.options import CommandLine
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.store import RESULTS
from tune_prune.tuning import space as search_space

# name, log-probability of right choices, KL
GRID = [("taylor-s256-n128", -39.6, 0.9), ("taylor-s256-n512", -39.2, 1.0), ("layerwise-s32-n256", -37.3, 1.2)]
RECOMMENDED = [("gate_fisher-s128-n512", -36.0, 0.5), ("taylor-s128-n512", -38.0, 0.7)]
TRAINED = [("gate_fisher-s128-n512", -34.0, 0.4)]


def rows(configurations: list[tuple[str, float, float]], **of_all: Any) -> SimpleNamespace:
    """Make a model's rows as the findings of a search have them."""
    made = []
    for name, gold, kl in configurations:
        method, seq_len, num_samples = name.split("-")
        values = {name: row.default for name, row in HYPERPARAMETERS.items() if not row.required} | {"calibration": ""}
        values |= {"method": method, "seq_len": int(seq_len[1:]), "num_samples": int(num_samples[1:])} | of_all
        suffix = "".join(f"-{value}" for value in of_all.values())
        made.append(values | {"name": name + suffix, "acc_mean": 0.4, GOLD: gold, "kl_text": kl, "kl_tasks": kl})
    return SimpleNamespace(eligible=pd.DataFrame(made).astype({"seed": "Int64"}), baseline={"acc_mean": 0.42})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "DATA"
    for name in ("tasks/piqa/validation.jsonl", "tasks/piqa/task.yaml", "text/wikitext2-raw.test.txt", "text/mine.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(f"{line}\n" for line in range(10)))
    return folder


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: Path) -> Any:
    """A function (*flags) -> the commands of a study whose searches find GRID, RECOMMENDED and TRAINED."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> list[tuple[str, ...]]:
        ran: list[tuple[str, ...]] = []

        def load_results(folder: Path) -> SimpleNamespace:
            if folder.name.endswith("-grid"):
                models = {"smollm2": rows(GRID)}
            else:
                recipe = {"compensation": "least_squares"}
                trained = rows(TRAINED, **recipe, recovery="lora")
                models = {"smollm2": rows(RECOMMENDED, **recipe), "smollm2 trained": trained}
            study_of = SimpleNamespace(models=dict(list(models.items())[:1]))
            return SimpleNamespace(findings=SimpleNamespace(models=models, study=study_of))

        def command(*words: str) -> None:
            ran.append(words)
            if words[0] == "analysis":
                Path(words[-1]).mkdir(parents=True)
            elif "--dry-run" not in words:
                folder = tmp_path / "ray_results" / words[-1]
                folder.mkdir(exist_ok=True)
                (folder / RESULTS).write_text(
                    "method,output_dir,host,acc_mean\ntaylor,/home/me/trials,box,0.46000000000000002\n"
                )

        monkeypatch.setattr(study, "command", command)
        monkeypatch.setattr(study, "load_results", load_results)
        monkeypatch.setattr(study, "rows_of", lambda folders, reference: [{"reference": reference, "of": len(folders)}])
        monkeypatch.setattr(study, "markdown", str)
        (tmp_path / "ray_results").mkdir()
        argv = ["smollm2", "--data-dir", str(data), "--limit", "3", *flags]
        study.Study(*study.parser().parse_known_args(argv)).run()
        return ran

    return run


def test_the_commands_of_the_study(commands: Any, tmp_path: Path, data: Path) -> None:
    *searches, analysis = commands("--inline", "--pruning-ratio", "0.1", "--judge", "blockwise-s16-n128")
    asked = [CommandLine("search").parse_args(words[1:]) for words in searches]
    assert [args.name.removeprefix("study-smollm2-") for args in asked] == [
        *("grid", "recommended"), *["judged"] * 6, *["ratios"] * 2,
    ]  # fmt: skip
    for args in asked:
        assert (args.limit, args.perplexity_tokens, args.inline, args.shape) == (3, 16384, True, "free")
        assert args.dtype == "bfloat16"
        assert args.draws is None and args.seeds is None
    chosen, judged = asked[:2], asked[2:]
    assert {args.data_dir for args in chosen} == {str(data)}
    assert {args.pruning_ratio for args in chosen} == {0.1}
    assert (chosen[1].recover, chosen[1].objective) == (2, "kl")
    spaces: list[dict[str, Any]] = [search_space.load(args.search_space).values for args in judged]
    assert all(space["seed"] == (1, 2, 3) for space in spaces)
    assert [(*space["method"], *space["seq_len"], *space["num_samples"]) for space in spaces] == [
        ("layerwise", 32, 256), ("taylor", 256, 128),  # by right answers and by KL
        ("gate_fisher", 128, 512), ("gate_fisher", 128, 512),
        ("random", 16, 128), ("blockwise", 16, 128),
        ("taylor", 256, 128), ("gate_fisher", 128, 512),
    ]  # fmt: skip
    assert [space["recovery"] for space in spaces[2:4]] == [("none",), ("lora",)]
    assert [space["pruning_ratio"] for space in spaces] == [(0.1,)] * 6 + [(0.05, 0.15)] * 2
    args = CommandLine("analysis").parse_args(analysis[1:])
    assert [Path(folder).name for folder in args.folders] == ["study-smollm2-judged", "study-smollm2-ratios"]
    output = tmp_path / "results" / "study-smollm2"
    for step in study.STEPS:  # as the search has written it, but for where it ran
        assert (output / f"{step}.csv").read_text() == "method,output_dir,host,acc_mean\ntaylor,,,0.46000000000000002\n"
    assert json.loads((output / "dense.json").read_text()) == {"acc_mean": 0.42}
    assert json.loads((output / "regained_kl.json").read_text()) == [{"reference": "taylor-s256-n128", "of": 2}]
    assert json.loads((output / "regained_gold_logprob.json").read_text()) == [
        {"reference": "layerwise-s32-n256", "of": 1}
    ]
    recipe = "gate_fisher-s128-n512-least_squares"
    assert json.loads((output / "chosen.json").read_text()) == {
        "grid": {"gold_logprob": "layerwise-s32-n256", "kl": "taylor-s256-n128"},
        "recommended": {"gold_logprob": recipe, "kl": recipe},
        "trained": {"gold_logprob": f"{recipe}-lora", "kl": f"{recipe}-lora"},
    }


def test_an_earlier_grid_is_taken_from_its_csv(commands: Any) -> None:
    earlier = Path(study.__file__).parents[1] / "docs" / "studies" / "smollm2-135m" / "grid.csv"
    ran = commands("--grid", str(earlier))
    searches = [CommandLine("search").parse_args(words[1:]) for words in ran if words[0] == "search"]
    assert [args.search_space.rpartition("study-smollm2-")[2] for args in searches][:3] == [
        *("recommended", "judged-layerwise-s32-n256.yaml", "judged-taylor-s256-n128.yaml"),
    ]
    published = pd.read_csv("results/study-smollm2/grid.csv", dtype=str, keep_default_na=False)
    assert len(published) == 45 and set(published["output_dir"]) == {""}


def test_what_judges_has_not_chosen(commands: Any, data: Path) -> None:
    searches = [CommandLine("search").parse_args(words[1:]) for words in commands() if words[0] == "search"]
    (judging,) = {Path(args.data_dir) for args in searches[2:]}
    read = {str(path.relative_to(judging)): path.read_text().split() for path in judging.rglob("*.*")}
    assert read == {
        "tasks/piqa/validation.jsonl": list("3456789"),
        "tasks/piqa/task.yaml": list("0123456789"),
        "text/wikitext2-raw.test.txt": list("56789"),
        "text/mine.txt": list("0123456789"),
    }


def test_the_plan_alone(commands: Any) -> None:
    assert [words[-1] for words in commands("--dry-run")] == ["study-smollm2-grid", "study-smollm2-recommended"]


def test_a_configuration_of_no_space_is_refused(commands: Any) -> None:
    with pytest.raises(UserError, match=r"--judge taylor-s1-n1: neither paper_grid nor recommended has it"):
        commands("--judge", "taylor-s1-n1")


def test_too_few_items_to_judge_by_are_refused_before_any_search(commands: Any) -> None:
    with pytest.raises(UserError, match=r"validation.jsonl has 10 items, half of which choose; lower --limit to 5"):
        commands("--limit", "6")
