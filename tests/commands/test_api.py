"""The public API: what it gives is what the commands and a search's trials give; what is wrong is said in their sentences."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tune_prune
from tests.findings import simulated_study
from tests.trials import RUN
from tune_prune.checkpoint import manifest
from tune_prune.commands import api, flags, options, prune
from tune_prune.commands.opened import Model
from tune_prune.commands.options import CommandLine
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS, RECIPE
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import run_trial
from tune_prune.tuning.plan import SearchSettings

CONFIG = PruningConfig("layerwise", 16, 10, 0.3)
FLAGS = ("--method", "layerwise", "--pruning-ratio", "0.3", "--seq-len", "16", "--num-samples", "10")


@pytest.fixture(scope="module")
def model() -> Model:
    return tune_prune.open("tiny-llama", device="cpu")


@pytest.fixture(scope="module")
def pruned(model: Model) -> Any:
    return model.prune("layerwise", ratio=0.3, seq_len=16, num_samples=10)


def test_the_package_is_light_and_search_is_a_function_of_it(run_without: Callable[..., str], tmp_path: Path) -> None:
    """Nothing heavy can be imported, and the API is there; the name of a module of the command line is no trap."""
    code = """
import sys
import tune_prune
assert [name for name in sys.modules if name.startswith("tune_prune.")] == [], sys.modules
for statement in ("", "import tune_prune.commands.search", "from tune_prune import search"):
    exec(statement)
    try:
        tune_prune.search("tiny-llama", limit=0)
    except ValueError as error:
        print(error)
print(tune_prune.open, tune_prune.load_results, [name for name in hidden if name in sys.modules])
"""
    hidden = ("torch", "transformers", "ray", "pandas", "numpy", "lm_eval", "optuna", "datasets", "matplotlib")
    *sentences, last = run_without(hidden, code).splitlines()
    assert len(sentences) == 3 and set(sentences) == {sentences[0]} and "limit is 0" in sentences[0]
    assert last.endswith("[]")


FUNCTIONS: dict[str, tuple[Callable[..., object], set[str]]] = {
    "search": (tune_prune.search, set()),
    "open": (tune_prune.open, set()),
    "evaluate": (Model.evaluate, {"self", "on_stage"}),
    "prune": (Model.prune, {"self", "ratio", "on_stage"}),
}


@pytest.mark.parametrize("command", FUNCTIONS)
def test_keywords_are_options_with_their_defaults_and_help(command: str) -> None:
    function, others = FUNCTIONS[command]
    for name, keyword in inspect.signature(function).parameters.items():
        if name in others:
            continue
        option = options.OPTIONS[command][name]
        usual = HYPERPARAMETERS[name].default if name in RECIPE and not RECIPE[name].of else option.default
        assert keyword.default in (inspect.Parameter.empty, usual), name
        assert re.search(f"^ +{name}  ", function.__doc__ or "", re.MULTILINE), name
    if command == "search":
        keywords = {name for name, option in options.OPTIONS["search"].items() if option.keyword}
        assert set(inspect.signature(function).parameters) == keywords


def test_a_search_that_names_nothing_has_the_settings_of_the_command() -> None:
    """Each description of a default says the same."""
    asked = flags.settings_from(vars(CommandLine("search").parse_args(["--model", "tiny-llama"])))
    assert asked == SearchSettings(("tiny-llama",))
    named = {name: option.default for name, option in options.OPTIONS["search"].items() if option.keyword}
    assert flags.settings_from(options.checked("search", named | {"model": "tiny-llama"})) == asked


# A keyword, its value and what becomes of it.
VALUES: list[tuple[str, Any, Any]] = [
    ("track", [], ()),
    ("kl_filter", np.True_, True),
    ("memory", 3 * 2**31 + 2**19, 3 * 2**31 + 2**19),
    ("seeds", np.array([0, 2]), (0, 2)),
    ("limit", np.int64(5), 5),
    ("tasks", ["boolq", "piqa"], ("boolq", "piqa")),
    ("model", [Path("a"), "b", "a"], ("a", "b")),
    ("gpus_per_trial", 0.33, 0.3333),
    ("gpus_per_trial", "auto", None),
    ("storage_path", Path("results"), "results"),
]


@pytest.mark.parametrize(("name", "value", "expected"), VALUES)
def test_a_python_value_goes_straight_to_the_settings(name: str, value: Any, expected: Any) -> None:
    """The command line that is recorded asks for the same."""
    asked = options.checked("search", {name: value})[name]
    assert asked == expected and type(asked) is type(expected)
    model = [] if name == "model" else ["--model", "tiny-llama"]
    args = CommandLine("search").parse_args([*model, *options.arguments("search", {name: value})])
    assert (
        tuple(dict.fromkeys(getattr(args, name))) == asked if isinstance(asked, tuple) else getattr(args, name) == asked
    )


REFUSED: list[tuple[str, Any, str]] = [
    ("limit", True, "limit is True; it must be a whole number from 1 to"),
    ("kl_filter", "yes", "kl_filter is 'yes'; it must be True or False"),
    ("track", ["mlfow"], "track is"),
    ("tasks", [], "tasks: \\[\\] names none; name at least one"),
    ("memory", 20, "memory is 20; it must be a whole number of bytes from 1048576 to"),
    ("seed", None, "seed is None"),
    ("seed", np.array([1, 2]), r"seed is array\(\[1, 2\]\); it must be a whole number"),
    ("pruning_ratio", 0, "pruning_ratio is 0; it must be a number above 0"),
    ("scheduler", "racing", "scheduler is 'racing'; did you mean 'race'"),
    ("gpus_per_trial", 0.3, "gpus_per_trial is 0.3, by which part of a device"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), REFUSED)
def test_a_python_value_has_the_bounds_of_the_command_line(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        tune_prune.search(**{"model": "tiny-llama", name: value})


def test_a_pruned_model_has_the_numbers_of_its_trial_and_generates(pruned: Any, tmp_path: Path) -> None:
    expected = run_trial(CONFIG, TrialContext.open(RUN, tmp_path, "cpu"))
    found = pruned.evaluate(limit=5)
    assert pruned.config == CONFIG and found.record.key == expected.key
    assert {name: expected.metrics[name] for name in found.record.metrics} == found.record.metrics
    assert pruned.params == expected.metrics["params_count"] == sum(p.numel() for p in pruned.model.parameters())
    assert pruned.plan.removed_params == 158_848 - pruned.params
    tokens = pruned.tokenizer("the", return_tensors="pt")
    with torch.no_grad():
        first = pruned.model(**tokens).logits[0, -1].argmax()
    assert pruned.model.generate(**tokens, max_new_tokens=4, do_sample=False)[0, tokens["input_ids"].shape[1]] == first


def test_save_writes_what_the_command_writes(pruned: Any, tmp_path: Path, printed: Callable[..., str]) -> None:
    saved = pruned.save(tmp_path / "api", dtype="float32")
    argv = ("--model", "tiny-llama", *FLAGS, "--device", "cpu", "--dtype", "float32")
    printed(prune.main, *argv, "--output", tmp_path / "command")
    assert saved == manifest.read(tmp_path / "command") and saved.params == pruned.params
    again = tune_prune.open(tmp_path / "api", device="cpu")
    assert again.params == pruned.params and again.manifest == saved
    tasks: dict[str, Any] = {"limit": 5, "tasks": "boolq,piqa"}
    before = pruned.evaluate(**tasks).record.metrics
    before = {
        name: value for name, value in before.items() if not name.startswith("kl_")
    }  # the dense model is not there
    assert again.evaluate(**tasks).record.metrics == before | {"removed_fraction": 0.0}  # of itself
    with pytest.raises(UserError, match="already pruned"):
        again.prune("random")


def test_results_of_a_folder(tmp_path: Path) -> None:
    folder = simulated_study(tmp_path, failed=["taylor-s16-n128"])
    results = tune_prune.load_results(str(folder))
    assert len(results.trials) == 36 and (results.trials["status"] == "failed").sum() == 2
    assert list(results.best.index) == ["alpha", "beta"]
    for label, best in results.best.iterrows():
        complete = results.trials[(results.trials["model"] == label) & results.trials["success"]]
        top = complete.loc[complete["acc_mean"].idxmax()]
        assert (best["method"], best["seq_len"], best["num_samples"]) == tuple(
            top[["method", "seq_len", "num_samples"]]
        )
        assert best["acc_mean"] == complete["acc_mean"].max()
        dense = json.loads((folder / "baseline.json").read_text())[label]["metrics"]["acc_mean"]
        assert best["retained"] == pytest.approx(best["acc_mean"] / dense)
        assert str(label) in results.report() and str(label) in str(results)
    assert "17 of 18" in repr(results) and results.cost["trials"] == 36
    with pytest.raises(UserError, match="is an experiment, whose own files a search writes"):
        results.report(folder)


WRONG: dict[str, tuple[Callable[[Model, Any], object], list[str]]] = {
    "unknown alias": (lambda *_: api.open("mistrall"), ["'mistrall'", "did you mean 'mistral'?"]),
    "no name": (lambda *_: api.open(None), ["name is None", "a text or a path"]),  # type: ignore[arg-type]
    "missing folder": (lambda *_: api.open(Path("./a/b/nope")), ["a/b/nope does not exist"]),
    "unknown dtype": (lambda *_: api.open("tiny-llama", dtype="float16"), ["dtype is 'float16'", "bfloat16"]),
    "missing data": (lambda *_: api.open("tiny-llama", data_dir="nope"), ["nope is not a folder", "tasks/"]),
    "unknown method": (lambda model, _: model.prune("tailor"), ["'tailor'", "did you mean 'taylor'?"]),
    "no samples": (
        lambda model, _: model.prune("taylor", seq_len=16),
        ["num_samples must be given", "num_samples=128"],
    ),
    "ratio": (lambda model, _: model.prune("random", 1.5), ["pruning_ratio is 1.5", "below 1"]),
    "long": (lambda model, _: model.prune("taylor", 0.2, 10**5, 8), ["seq_len 100000", "512 tokens"]),
    "unknown task": (lambda _, pruned: pruned.evaluate(tasks="piqa,bolq"), ["'bolq'", "did you mean 'boolq'?"]),
    "unknown format": (lambda _, pruned: pruned.save("x", "safetensor"), ["format is 'safetensor'", "hf-padded"]),
    "existing folder": (lambda _, pruned: pruned.save(Path(__file__).parent), ["exists", "another folder"]),
    "unknown space": (lambda *_: api.search("tiny-llama", "smokee"), ["'smokee'", "did you mean 'smoke'?"]),
    "no folder": (lambda *_: api.load_results("nope"), ["nope is not a folder", "ray_results/NAME"]),
}


@pytest.mark.usefixtures("nothing_created")
@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(call, words, model, pruned):
    with pytest.raises(UserError) as error:
        call(model, pruned)
    sentence = str(error.value)
    assert [word for word in words if word not in sentence] == [] and "\n" not in sentence, sentence
