"""`evaluate --kl`: a checkpoint's KL to its dense model is that of the trial that it comes from, to the last bit in float32 on a
CPU; where there is nothing to compare with, one sentence."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tune_prune
from tests.pruned_checkpoints import (
    CONFIG,
    FLAGS,
    change_json,
    change_weights,
    measured_checkpoint,
    open_context,
    save,
)
from tests.search_folders import TINY_FOLDER, data_folder
from tune_prune.checkpoint.manifest import MANIFEST, read
from tune_prune.commands import evaluate, measuring
from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.errors import UserError
from tune_prune.models import catalog
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.groups import PruningPlan
from tune_prune.trial import kl
from tune_prune.trial.context import TrialContext
from tune_prune.trial.recipe import Recipe

METRICS = ("kl_text", "kl_text_stderr", "kl_tasks", "kl_tasks_stderr")
DENSE = catalog.resolve("tiny-llama")


@pytest.fixture
def sentence(refused: Callable[..., str]) -> Callable[..., str]:
    """A function (*argv) -> the one sentence with which the command refuses."""
    return partial(refused, evaluate.main)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama pruned and measured as a search does it."""
    return measured_checkpoint(
        tmp_path_factory.mktemp("checkpoints") / "small", open_context(tmp_path_factory.mktemp("artifacts"))
    )


@pytest.fixture(scope="module")
def recorded(checkpoint: Path) -> dict[str, float]:
    manifest = read(checkpoint)
    assert manifest is not None and manifest.metrics is not None
    found = {name: manifest.metrics[name] for name in METRICS}
    assert all(value is not None and value > 0 for value in found.values())
    return {name: float(value or 0) for name, value in found.items()}


@pytest.fixture
def small(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "small"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of its dense model that a test may damage."""
    return Path(shutil.copytree(TINY_FOLDER, tmp_path / "base"))


def opened(checkpoint: Path, artifacts: Path, way: Residency | None = None, dtype: str = "float32") -> TrialContext:
    run = replace(open_context(artifacts).run, model=str(checkpoint), label=checkpoint.name, data_dir="embedded")
    run = replace(run, dtype=dtype)
    return TrialContext.open(run, artifacts, "cpu", **({} if way is None else {"residency": way}))


def measured(context: TrialContext, name: str = "tiny-llama") -> dict[str, float]:
    keep_all = Recipe(PruningPlan.keep_all(context.loaded.geometry))
    found, tokens = kl.measure_kl(context, keep_all, catalog.resolve(name))
    assert tokens > 0
    return {
        f"kl_{name}{end}": value
        for name, divergence in found.items()
        for end, value in (("", divergence.mean), ("_stderr", divergence.stderr))
    }


def test_the_command_gives_what_the_trial_recorded(
    checkpoint: Path, recorded: dict[str, float], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.json"
    assert evaluate.main(["--model", str(checkpoint), *FLAGS, "--kl", "--output", str(record)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    values = json.loads(record.read_text(encoding="utf-8"))
    assert {name: values["metrics"][name] for name in METRICS} == recorded  # float32 on a CPU: to the last bit
    assert values["base"] == "tiny-llama" and [stage["stage"] for stage in values["stages"]][:2] == ["kl", "perplexity"]
    for name, what in (("kl_text", "the perplexity text"), ("kl_tasks", "right answers")):
        number = f"{recorded[name]:.4f}"
        line = (
            f"KL +{number} ± {recorded[f'{name}_stderr']:.4f} nats per token on {what}; recorded {number}, difference 0"
        )
        assert re.search(f"^{line}$", out, re.MULTILINE), out
    assert "original     tiny-llama: KL is" in out and re.search(
        r"^KL .*\([\d,]+ tokens, [\d.]+ s\)$", out, re.MULTILINE
    )


def test_in_python(recorded: dict[str, float], small: Path, base: Path) -> None:
    """The dense model stands elsewhere than the manifest says; a measurement without `kl` has none."""
    model = tune_prune.open(small, device="cpu", base=base, perplexity_tokens=300)
    assert model.base.location == str(base)
    assert model.evaluate(limit=20, tasks="boolq,piqa").kl == {}
    found = model.evaluate(limit=20, tasks="boolq,piqa", kl=True).kl
    # Less text is batched otherwise with the items: the same to rounding
    assert found["tasks"] == pytest.approx((recorded["kl_tasks"], recorded["kl_tasks_stderr"]), abs=1e-6)
    assert set(found) == {"text", "tasks"}


@pytest.mark.parametrize("streamed", [False, True])
def test_however_the_two_models_are_held(
    streamed: bool, checkpoint: Path, recorded: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint in memory and the dense model, too, as where its weights are pickled; or both in their files."""
    monkeypatch.setattr(kl, "readable_in_place", lambda _: streamed)
    assert measured(opened(checkpoint, tmp_path, Residency(from_files=streamed))) == recorded


def test_of_a_padded_checkpoint_to_rounding(checkpoint: Path, recorded: dict[str, float], tmp_path: Path) -> None:
    manifest = read(checkpoint)
    assert manifest is not None and manifest.config == CONFIG
    padded = save(tmp_path / "padded", open_context(tmp_path / "a"), manifest.plan, "hf-padded")
    assert measured(opened(padded, tmp_path / "b")) == pytest.approx(recorded, abs=1e-6)


def test_of_weights_that_were_saved_as_bfloat16_in_bfloat16(small: Path, tmp_path: Path) -> None:
    """The head of one that was rounded is not the dense model's, unless that is rounded, too."""

    def as_bfloat16(weights: dict[str, torch.Tensor]) -> None:
        weights.update({name: value.bfloat16() for name, value in weights.items()})

    change_weights(small, as_bfloat16)
    with pytest.raises(UserError, match="in the data type that it was saved in with --dtype"):
        measured(opened(small, tmp_path / "wide"))
    assert measured(opened(small, tmp_path / "narrow", dtype="bfloat16"))["kl_text"] > 0


def test_the_dense_model_counts_in_the_plan_of_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tune_prune.open(checkpoint, device="cpu", base="tiny-llama")
    run = model.protocol(20, "boolq,piqa")
    stages = []
    monkeypatch.setattr(model, "_fastest", lambda passes, evaluation, *what: stages.append(evaluation(Residency())))
    model.way_to_measure(run)
    model.way_to_measure(run, kl=True)
    alone, beside = stages
    assert [(stage.stage, stage.held) for stage in alone] == [("kl", 0), ("perplexity", 0), ("zero_shot", 0)]  # no copy
    assert beside[:-1] == [*alone] and beside[-1].stage == "kl" and beside[-1].way == "streamed"
    monkeypatch.setattr(measuring, "readable_in_place", lambda _: False)  # then it is loaded as a whole
    model.way_to_measure(run, kl=True)
    dense = tune_prune.open("tiny-llama").params
    assert stages[-1][-1].held == 4 * dense and stages[-1][-1].way == "resident"


def test_it_is_the_divergence_of_the_two_models_logits(checkpoint: Path, tmp_path: Path) -> None:
    """By a plain forward pass of each, on the windows of the text, in float64 behind the head."""
    own, dense = opened(checkpoint, tmp_path), open_context(tmp_path)
    windows = kl._samples(own)["text"]
    nats = []
    for window in windows:
        p, q = (
            torch.log_softmax(context.loaded.model(window[None]).logits[0].double(), dim=-1) for context in (dense, own)
        )
        nats += (p.exp() * (p - q)).sum(dim=-1).tolist()
    assert measured(own)["kl_text"] == pytest.approx(np.mean(nats), abs=1e-6)


def test_another_dense_model_is_another_measurement(small: Path, recorded: dict[str, float], tmp_path: Path) -> None:
    """What was measured to one is not given for another; a model does not diverge from itself."""
    context = opened(small, tmp_path / "artifacts")
    assert measured(context) == recorded
    assert measured(context, str(small)) == pytest.approx(dict.fromkeys(METRICS, 0.0), abs=1e-6)
    keep_all = Recipe(PruningPlan.keep_all(context.loaded.geometry))
    again, tokens = kl.measure_kl(context, keep_all, DENSE)
    assert (again["text"].mean, tokens) == (recorded["kl_text"], 0)
    assert isinstance(context.artifacts, ArtifactStore)


def test_what_cannot_be_compared_is_refused_before_anything_is_measured(
    sentence: Callable[..., str], small: Path, base: Path, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--kl")
    change_weights(base, lambda weights: weights["model.norm.weight"].mul_(2))
    told = sentence("--model", small, *flags, "--base", base)
    assert f"{base} is not the model that small was pruned from" in told and "--base" in told
    assert "--base is read with --kl only" in sentence("--model", small, *FLAGS, "--base", base)
    assert "./nope does not exist" in sentence("--model", small, *flags, "--base", "./nope")
    change_json(small / MANIFEST, lambda values: values["source"].update(model=str(tmp_path / "gone")))
    told = sentence("--model", small, *flags)
    assert "the model that small was pruned from is not where tune_prune.json says" in told
    assert f"model folder {tmp_path / 'gone'} does not exist" in told and "with --base" in told
    (small / MANIFEST).unlink()
    told = sentence("--model", small, *flags, "--data-dir", data_folder(tmp_path / "data"))
    assert "small has no tune_prune.json" in told and "name that with --base to measure KL" in told


def other_words(base: Path) -> None:
    text = (base / "tokenizer.json").read_text(encoding="utf-8")
    (base / "tokenizer.json").write_text(text.replace('"the": ', '"thee": '), encoding="utf-8")


def other_head(base: Path) -> None:
    change_weights(base, lambda weights: weights["model.embed_tokens.weight"].mul_(1.001))  # the head's, too


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tokenizer": (other_words, "small cannot be compared with base, which has another tokenizer"),
    "head": (other_head, "their output heads differ in float32"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_models_that_do_not_belong_together(
    change: Callable[[Path], Any], words: str, checkpoint: Path, base: Path, tmp_path: Path
) -> None:
    context = opened(checkpoint, tmp_path)
    change(base)
    with pytest.raises(UserError, match=words):
        measured(context, str(base))
