"""`evaluate`: the numbers of a dense model are those of a search's baseline, a checkpoint's those of its trial, KL included, to the
last bit in float32 on a CPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pruned_checkpoints import FLAGS, change_json, change_weights, measured_checkpoint, open_context, save
from tests.search_folders import TINY_FOLDER, data_folder
from tune_prune.checkpoint.manifest import MANIFEST, read
from tune_prune.commands import evaluate
from tune_prune.core.config import EvaluationProtocol, ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.measures import wilson_stderr
from tune_prune.core.records import TrialRecord
from tune_prune.models import catalog
from tune_prune.models.runner.devices import device_name
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.groups import PruningPlan
from tune_prune.trial import measurements
from tune_prune.trial.context import TrialContext
from tune_prune.trial.recipe import Recipe
from tune_prune.trial.trial import run_trial

METRICS = ("kl_text", "kl_text_stderr", "kl_tasks", "kl_tasks_stderr")


def shown(value: float) -> str:
    """A fraction as the final table of a search has it."""
    return f"{value:.4f}".removeprefix("0")


def test_a_dense_model_has_the_record_of_a_trial_and_the_tables_show_it(tmp_path, printed):
    path = tmp_path / "record.json"
    argv = ("--tasks", "boolq,piqa", "--limit", "20", "--device", "cpu", "--output", path)
    text = printed(evaluate.main, "--model", "tiny-llama", *argv)
    values = json.loads(path.read_text(encoding="utf-8"))
    protocol = EvaluationProtocol(("boolq", "piqa"), limit=20, perplexity_window=128)
    run = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, protocol, 0, "float32")
    expected, record = run_trial(None, TrialContext.open(run, tmp_path, "cpu")), TrialRecord.read(values)
    assert record.status == "complete" and record.key == expected.key and record.metrics == expected.metrics
    assert values["run"] == json.loads(json.dumps(run.to_dict()))
    metrics = values["metrics"]
    for task, metric in (("boolq", "acc"), ("piqa", "acc_norm")):
        accuracy = metrics[f"acc_{task}"]
        stderr = wilson_stderr(20) if accuracy in (0, 1) else metrics[f"acc_{task}_stderr"]
        gold, its_error = metrics[f"gold_logprob_{task}"], metrics[f"gold_logprob_{task}_stderr"]
        cells = f"{task} {metric} {shown(accuracy)} ± {shown(stderr)} .5000 20 {gold:.3f} ± {its_error:.3f}"
        assert cells in re.sub(" +", " ", text)
    assert f"result       accuracy {shown(metrics['acc_mean'])} ± " in text
    assert f"perplexity {metrics['ppl']:.2f} on the embedded text" in text
    assert min(stage["tokens"] for stage in values["stages"]) > 0  # really measured: nothing came from a cache


def test_no_gpu(refused, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "torch finds no GPU" in refused(evaluate.main, "--model", "tiny-llama", "--device", "cuda")


def test_no_more_threads_than_cpus(refused, monkeypatch):
    """A container may have the time of one CPU of many."""
    monkeypatch.setattr("tune_prune.core.machine.cpus", lambda: 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        refused(evaluate.main, "--model", "tiny-llama", "--revision", "x")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("chosen", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_sleep_while_they_wait_unless_the_user_has_chosen(chosen, policy):
    """OpenMP reads the variable when torch is imported."""
    show = "lambda _: print('torch' in sys.modules, os.getenv('OMP_WAIT_POLICY'))"
    code = f"import os, sys; from tune_prune.commands.flags import run; run('upload', ['x', 'a/b'], {show})"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | chosen
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"False {policy}\n"


# Pruned checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama pruned and measured as a search does it."""
    context = open_context(tmp_path_factory.mktemp("artifacts"))
    return measured_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", context)


@pytest.fixture(scope="module")
def recorded(checkpoint: Path) -> dict[str, Any]:
    manifest = read(checkpoint)
    assert manifest is not None and manifest.metrics is not None
    return dict(manifest.metrics)


@pytest.fixture
def small(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "small"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of its dense model that a test may damage."""
    return Path(shutil.copytree(TINY_FOLDER, tmp_path / "base"))


def test_a_pruned_checkpoint_gives_the_numbers_that_its_trial_recorded(small, recorded, tmp_path, printed):
    for path in small.glob("*.py"):  # the classes are the package's: code from the folder is never run
        path.write_text("raise SystemExit('code of the checkpoint was run')\n", encoding="utf-8")
    record = tmp_path / "record.json"
    out = printed(evaluate.main, "--model", small, *FLAGS, "--kl", "--output", record)
    values = json.loads(record.read_text(encoding="utf-8"))
    for name in ("ppl", "acc_boolq", "acc_piqa", "acc_mean", "acc_mean_stderr", *METRICS):
        assert values["metrics"][name] == recorded[name]  # float32: to the last bit
    assert values["base"] == "tiny-llama" and [stage["stage"] for stage in values["stages"]][:2] == ["kl", "perplexity"]
    assert re.search(r"^result       accuracy .*, both as recorded$", out, re.MULTILINE)
    assert f"recorded {recorded['ppl']:.2f}, difference 0\n" in out
    for name in ("kl_text", "kl_tasks"):
        assert re.search(
            rf"^KL +{recorded[name]:.4f} ± .*; recorded {recorded[name]:.4f}, difference 0$", out, re.MULTILINE
        )


def test_differences_are_shown_and_what_differs_in_the_protocol_is_said(small, printed):
    change_json(small / MANIFEST, lambda values: values["metrics"].update(ppl=5.0, acc_boolq=0.25))
    change_json(small / MANIFEST, lambda values: values["measured_on"].update(device="an H100"))
    out = printed(evaluate.main, "--model", small, *FLAGS)
    here = device_name(torch.device("cpu"))
    assert f"note: recorded on an H100, measured on {here}: differences by rounding are to be expected\n" in out
    ppl = re.search(r"^perplexity ([\d.]+) on .* recorded 5.00, difference (\S+)$", out, re.MULTILINE)
    assert ppl and float(ppl.group(2)) == pytest.approx(float(ppl.group(1)) - 5, abs=0.01)
    row = re.search(r"^boolq +acc +([\d.]+) ± \S+ +\.2500 +(\S+) ", out, re.MULTILINE)
    assert row and float(row.group(2)) == pytest.approx(float(row.group(1)) - 0.25, abs=1e-4)
    argv = ("--tasks", "boolq", "--limit", "5", "--device", "cpu", "--perplexity-window", "512")
    out = printed(evaluate.main, "--model", small, *argv)
    assert "note: the recorded perplexity is not compared" in out
    assert "note: the recorded accuracies are not compared" in out


def without_manifest(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    def both(small: Path) -> None:
        (small / MANIFEST).unlink()
        change(small)

    return both


def other_family(small: Path) -> None:
    shutil.copy(TINY_FOLDER.with_name("tiny-qwen2") / "config.json", small / "config.json")


# What a manifest holds against its files is in tests/checkpoint/test_manifest.py.
BROKEN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "weights changed": (
        lambda small: change_weights(small, lambda weights: weights["model.norm.weight"].mul_(2)),
        ["content of model.safetensors has changed", "copy the whole checkpoint again"],
    ),
    "another family": (other_family, ["config.json is that of a qwen2 model", "pruned llama"]),
    "no manifest, another family": (without_manifest(other_family), ["do not fit its config.json"]),
    "no manifest, missing tensor": (
        without_manifest(
            lambda small: change_weights(small, lambda weights: weights.pop("model.layers.1.mlp.down_proj.weight"))
        ),
        ["do not fit its config.json", "model.layers.1.mlp.down_proj.weight is missing"],
    ),
    "no manifest, a block that the config says is gone": (
        without_manifest(
            lambda small: change_weights(
                small, lambda weights: weights.update({"model.layers.3.self_attn.o_proj.weight": torch.zeros(64, 64)})
            )
        ),
        ["do not fit its config.json", "model.layers.3.self_attn.o_proj.weight is not used"],
    ),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_is_refused(small, tmp_path, change, words, refused):
    change(small)
    told = refused(evaluate.main, "--model", small, *FLAGS, "--data-dir", data_folder(tmp_path / "data"))
    assert [word for word in words if word not in told] == [], told


# KL to the dense model


def opened(checkpoint: Path, artifacts: Path, way: Residency | None = None) -> TrialContext:
    run = replace(open_context(artifacts).run, model=str(checkpoint), label=checkpoint.name, data_dir="embedded")
    return TrialContext.open(run, artifacts, "cpu", **({} if way is None else {"residency": way}))


def divergences(context: TrialContext, name: str = "tiny-llama") -> dict[str, float]:
    keep_all = Recipe(PruningPlan.keep_all(context.loaded.geometry))
    found, _ = measurements.measure_kl(context, keep_all, catalog.resolve(name))
    return {
        f"kl_{part}{end}": value
        for part, divergence in found.items()
        for end, value in (("", divergence.mean), ("_stderr", divergence.stderr))
    }


@pytest.mark.parametrize("streamed", [False, True])
def test_however_the_two_models_are_held(streamed, checkpoint, recorded, tmp_path, monkeypatch):
    """The checkpoint in memory and the dense model, too, as where its weights are pickled; or both in their files."""
    monkeypatch.setattr(measurements, "readable_in_place", lambda _: streamed)
    found = divergences(opened(checkpoint, tmp_path, Residency(from_files=streamed)))
    assert found == {name: recorded[name] for name in METRICS}


def test_of_a_padded_checkpoint_to_rounding(checkpoint, recorded, tmp_path):
    manifest = read(checkpoint)
    padded = save(tmp_path / "padded", open_context(tmp_path / "a"), manifest.plan, "hf-padded")
    assert divergences(opened(padded, tmp_path / "b")) == pytest.approx({n: recorded[n] for n in METRICS}, abs=1e-6)


def test_it_is_the_divergence_of_the_two_models_logits(checkpoint, tmp_path):
    """A plain forward pass of each gives the same, on the windows of the text, in float64 behind the head."""
    own, dense = opened(checkpoint, tmp_path), open_context(tmp_path)
    nats = []
    for window in measurements._samples(own)["text"]:
        p, q = (
            torch.log_softmax(context.loaded.model(window[None]).logits[0].double(), dim=-1) for context in (dense, own)
        )
        nats += (p.exp() * (p - q)).sum(dim=-1).tolist()
    assert divergences(own)["kl_text"] == pytest.approx(np.mean(nats), abs=1e-6)


def test_another_dense_model_is_another_measurement(small, recorded, tmp_path):
    """A measurement to one is not given for another; a model does not diverge from itself."""
    context = opened(small, tmp_path / "artifacts")
    assert divergences(context)["kl_text"] == recorded["kl_text"]
    assert divergences(context, str(small)) == pytest.approx(dict.fromkeys(METRICS, 0.0), abs=1e-6)


def test_what_cannot_be_compared_is_refused_before_anything_is_measured(refused, small, base, tmp_path):
    def told(*argv: object) -> str:
        return refused(evaluate.main, "--model", small, *FLAGS, "--kl", *argv)

    change_weights(base, lambda weights: weights["model.norm.weight"].mul_(2))
    assert f"{base} is not the model that small was pruned from" in told("--base", base)
    change_json(small / MANIFEST, lambda values: values["source"].update(model=str(tmp_path / "gone")))
    assert f"model folder {tmp_path / 'gone'} does not exist" in (said := told()) and "with --base" in said
    (small / MANIFEST).unlink()
    assert "small has no tune_prune.json" in told("--data-dir", data_folder(tmp_path / "data"))


def other_words(base: Path) -> None:
    text = (base / "tokenizer.json").read_text(encoding="utf-8")
    (base / "tokenizer.json").write_text(text.replace('"the": ', '"thee": '), encoding="utf-8")


def other_head(base: Path) -> None:
    change_weights(base, lambda weights: weights["model.embed_tokens.weight"].mul_(1.001))  # the head's, too


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_words, "small cannot be compared with base, which has another tokenizer"),
        (other_head, "their output heads differ in float32"),
    ],
)
def test_models_that_do_not_belong_together(change, words, checkpoint, base, tmp_path):
    context = opened(checkpoint, tmp_path)
    change(base)
    with pytest.raises(UserError, match=words):
        divergences(context, str(base))
