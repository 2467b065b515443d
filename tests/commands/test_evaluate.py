"""`evaluate`: the numbers of a dense model are those of a search's baseline, a checkpoint's those of its trial, to the last bit in
float32 on a CPU, with --kl, too; what it refuses is one sentence."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tune_prune
import tune_prune.__main__
from tests.pruned_checkpoints import (
    CONFIG,
    FLAGS,
    change_json,
    change_weights,
    measured_checkpoint,
    open_context,
    save,
)
from tests.search_folders import TINY_FOLDER, data_folder, model_folder
from tune_prune.checkpoint.manifest import MANIFEST, read
from tune_prune.commands import evaluate, prune
from tune_prune.commands import opened as models_opened
from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import EvaluationProtocol, ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.measures import wilson_stderr
from tune_prune.core.records import TrialRecord
from tune_prune.models import catalog
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.groups import PruningPlan
from tune_prune.trial import measurements
from tune_prune.trial.context import TrialContext
from tune_prune.trial.recipe import Recipe
from tune_prune.trial.trial import run_trial

TINY = ("--model", "tiny-llama")
STAGES = ("perplexity", "zero_shot")


def printed(value: float) -> str:
    """A fraction as the final table of a search has it."""
    return f"{value:.4f}".removeprefix("0")


@pytest.fixture
def sentence(refused: Callable[..., str]) -> Callable[..., str]:
    """A function (*argv) -> the one sentence with which the command refuses."""
    return partial(refused, evaluate.main)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What the command prints for tiny-llama on 20 items of two tasks, the record that it writes, and where."""
    path = tmp_path_factory.mktemp("evaluate") / "record.json"
    with pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        patch.setattr("builtins.print", lambda *args, **_: told.append(" ".join(map(str, args))))
        argv = [*TINY, "--tasks", "boolq,piqa", "--limit", "20", "--device", "cpu", "--output", str(path)]
        assert evaluate.main(argv) == 0
    return "\n".join(told), json.loads(path.read_text(encoding="utf-8")), path


def test_the_record_is_that_of_a_dense_trial(measured: tuple[str, dict[str, Any], Path], tmp_path: Path) -> None:
    _, values, _ = measured
    protocol = EvaluationProtocol(("boolq", "piqa"), limit=20, perplexity_window=128)
    run = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, protocol, 0, "float32")
    expected = run_trial(None, TrialContext.open(run, tmp_path, "cpu"))
    record = TrialRecord.read(values)
    assert isinstance(record, TrialRecord) and record.status == "complete"
    assert record.key == expected.key and record.metrics == expected.metrics
    assert values["run"] == json.loads(json.dumps(run.to_dict()))


def test_the_tables_say_what_the_record_holds(measured: tuple[str, dict[str, Any], Path]) -> None:
    text, values, _ = measured
    metrics = values["metrics"]
    for task, metric in (("boolq", "acc"), ("piqa", "acc_norm")):
        cells = re.search(rf"^{task} +(.*)$", text, re.MULTILINE)
        assert cells, text
        accuracy = metrics[f"acc_{task}"]
        stderr = wilson_stderr(20) if accuracy in (0, 1) else metrics[f"acc_{task}_stderr"]
        logprob, its_error = metrics[f"gold_logprob_{task}"], metrics[f"gold_logprob_{task}_stderr"]
        expected = f"{metric} {printed(accuracy)} ± {printed(stderr)} .5000 20 {logprob:.3f} ± {its_error:.3f}"
        assert cells.group(1).split() == expected.split()
    mean = re.search(r"^mean +(.*)$", text, re.MULTILINE)
    assert mean and mean.group(1).split()[0] == printed(metrics["acc_mean"])
    result = f"result       accuracy {printed(metrics['acc_mean'])} ± "
    assert f"\n{result}" in text and f", perplexity {metrics['ppl']:.2f}\n" in text.partition(result)[2]
    assert f"perplexity {metrics['ppl']:.2f} on the embedded text" in text
    assert f"{int(metrics['params_count']):,} parameters" in text and "float32 on cpu" in text
    tokens = {name: sum(stage["tokens"] for stage in values["stages"] if stage["stage"] == name) for name in STAGES}
    assert min(tokens.values()) > 0  # really measured: nothing came from a cache
    assert re.search(rf"^perplexity   .*\({tokens['perplexity']:,} tokens, [\d.]+ s\)$", text, re.MULTILINE), text
    assert len(re.findall(r"^accuracy     .* of 40 questions", text, re.MULTILINE)) == len(EvaluationProtocol().slices)


def test_a_local_folder_with_local_data_and_a_note(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = model_folder(tmp_path / "mine"), data_folder(tmp_path / "data")
    monkeypatch.setattr(TrialContext, "notes", ["scored one by one: it is Tuesday"])
    argv = ["--model", str(model), "--data-dir", str(data), "--tasks", "piqa", "--limit", "1", "--dtype", "bfloat16"]
    assert tune_prune.__main__.main(["evaluate", *argv, "--device", "cpu"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert (
        out.startswith("mine: ")
        and "bfloat16 on cpu" in out
        and "on the text in text/wikitext2-raw.test.txt (not recognised as WikiText-2)" in out
    )
    assert re.search(
        r"^piqa +acc_norm +[\d.]+ +\.5000 +1 +-[\d.]+$", out, re.MULTILINE
    )  # one item has no standard error
    assert "note: scored one by one: it is Tuesday\n" in out


def test_no_gpu(sentence: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device is cuda, but torch finds no GPU" in sentence(*TINY, "--device", "cuda")


@pytest.mark.parametrize(
    ("main", "argv"),
    [(evaluate.main, [*TINY, "--revision", "x"]), (prune.main, ["--config", "nope.json", "--output", "out"])],
)
def test_no_more_threads_than_cpus(
    main: Callable[..., int], argv: list[str], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that has the time of one CPU of many."""
    monkeypatch.setattr("tune_prune.core.machine.cpus", lambda: 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        refused(main, *argv)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_threads_sleep_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on the machine; unless the user has chosen."""
    for chosen, policy in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        if chosen is None:
            monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        else:
            monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
        show = "lambda: print('torch' in sys.modules, os.getenv('OMP_WAIT_POLICY'))"
        code = f"import os, sys; from tune_prune.commands.flags import run; run({show})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == f"False {policy}\n"  # read by OpenMP when torch is imported


def test_broken_models_and_data(sentence: Callable[..., str], tmp_path: Path) -> None:
    model, data = model_folder(tmp_path / "m"), data_folder(tmp_path / "data")
    (model / "model.safetensors").unlink()
    assert "no weights" in sentence("--model", model, "--data-dir", data)
    (data / "tasks" / "piqa" / "test.jsonl").unlink()
    assert "task files are missing" in sentence(*TINY, "--data-dir", data)
    small = model_folder(tmp_path / "small", vocab_size=10)
    assert "do not fit its config.json" in sentence("--model", small, "--data-dir", data, "--tasks", "boolq")

    strange = model_folder(tmp_path / "strange")
    text = (strange / "tokenizer.json").read_text(encoding="utf-8")
    (strange / "tokenizer.json").write_text(text.replace('".": 5', '".": 5000'), encoding="utf-8")
    told = sentence("--model", strange, "--data-dir", data_folder(tmp_path / "more"), begun=True)
    assert "gives the token id 5000" in told and "vocab_size" in told


# --- pruned checkpoints


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama pruned and measured as a search does it."""
    return measured_checkpoint(
        tmp_path_factory.mktemp("checkpoints") / "small", open_context(tmp_path_factory.mktemp("artifacts"))
    )


@pytest.fixture
def small(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "small"))


def test_a_pruned_checkpoint_gives_the_numbers_that_its_trial_recorded(
    small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in small.glob("*.py"):  # the classes are the package's: code from the folder is never run
        path.write_text("raise SystemExit('code of the checkpoint was run')\n", encoding="utf-8")
    before = read(small)
    assert before is not None and before.metrics is not None
    record = tmp_path / "record.json"
    assert evaluate.main(["--model", str(small), *FLAGS, "--output", str(record)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    removed = f"{before.plan.removed_fraction:.1%} of its parameters removed by layerwise on 8 samples of 16 tokens"
    assert f"checkpoint   tiny-llama, {removed}" in out and "on the embedded text" in out
    assert re.search(r"^result       accuracy .*, perplexity .*, both as recorded$", out, re.MULTILINE)
    after = json.loads(record.read_text(encoding="utf-8"))["metrics"]
    for name in ("ppl", "acc_boolq", "acc_piqa", "acc_mean", "acc_mean_stderr"):
        assert after[name] == before.metrics[name]  # float32: to the last bit
    assert f"recorded {before.metrics['ppl']:.2f}, difference 0\n" in out
    for row in ("boolq", "piqa", "mean"):
        accuracy = printed(after[f"acc_{row}"])
        cells = re.search(rf"^{row} +(?:acc\w* +)?(.*)$", out, re.MULTILINE)
        assert cells, out
        assert [cells.group(1).split()[i] for i in (0, 1, 3, 4)] == [accuracy, "±", accuracy, "0"]
    assert "note:" not in out


def test_differences_are_shown_and_what_differs_in_the_protocol_is_said(
    small: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change_json(small / MANIFEST, lambda values: values["metrics"].update(ppl=5.0, acc_boolq=0.25))
    assert evaluate.main(["--model", str(small), *FLAGS]) == 0
    out = capfd.readouterr().out
    ppl = re.search(r"^perplexity ([\d.]+) on .* recorded 5.00, difference (\S+)$", out, re.MULTILINE)
    assert ppl and float(ppl.group(2)) == pytest.approx(float(ppl.group(1)) - 5, abs=0.01)
    assert re.search(r"^result       accuracy .*, recorded otherwise", out, re.MULTILINE)
    row = re.search(r"^boolq +acc +([\d.]+) ± \S+ +\.2500 +(\S+) ", out, re.MULTILINE)
    assert row and float(row.group(2)) == pytest.approx(float(row.group(1)) - 0.25, abs=1e-4) and row.group(2)[0] == "+"
    argv = ["--tasks", "boolq", "--limit", "5", "--device", "cpu", "--perplexity-window", "512"]
    assert evaluate.main(["--model", str(small), *argv]) == 0
    out = capfd.readouterr().out
    assert "note: the recorded perplexity is not compared: perplexity_window was 128, and is 512\n" in out
    assert re.search(r"^boolq +acc +[\d.]+ ± [\d.]+ +– +– ", out, re.MULTILINE)
    assert "note: the recorded accuracies are not compared: limit was 20, and is 5\n" in out


def test_a_pruned_checkpoint_without_its_manifest(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (small / MANIFEST).unlink()
    data = data_folder(small.parent / "data")
    assert evaluate.main(["--model", str(small), *FLAGS, "--data-dir", str(data)]) == 0
    out = capfd.readouterr().out
    assert out.startswith("small: ") and "recorded" not in out


def cut_a_shard(small: Path) -> None:
    (small / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (small / "model.safetensors.index.json").write_text(json.dumps(index))


def other_family(small: Path) -> None:
    shutil.copy(TINY_FOLDER.with_name("tiny-qwen2") / "config.json", small / "config.json")


def without_manifest(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    def both(small: Path) -> None:
        (small / MANIFEST).unlink()
        change(small)

    return both


def widths_of_one_layer(small: Path) -> None:
    change_json(small / "config.json", lambda values: values["per_layer_config"]["1"].update(intermediate_size=1))


def odd_heads(small: Path) -> None:
    change_json(
        small / "config.json",
        lambda values: values["per_layer_config"]["1"].update(num_attention_heads=3, num_key_value_heads=2),
    )


def drop_a_tensor(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.layers.1.mlp.down_proj.weight"]


def revived_attention(weights: dict[str, torch.Tensor]) -> None:
    """A block that the config says is gone."""
    weights["model.layers.3.self_attn.o_proj.weight"] = torch.zeros(64, 64)


# What a manifest holds against its files is in tests/checkpoint/test_manifest.py.
BROKEN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "weights changed": (
        lambda small: change_weights(small, lambda weights: weights["model.norm.weight"].mul_(2)),
        ["content of model.safetensors has changed", "copy the whole checkpoint again"],
    ),
    "another family": (other_family, ["config.json is that of a qwen2 model", "pruned llama"]),
    "heads that do not share": (odd_heads, ["config.json", "heads must share evenly"]),
    "no manifest, missing shard": (without_manifest(cut_a_shard), ["lacks 1 of 1 weight files", "model-00001"]),
    "no manifest, missing tensor": (
        without_manifest(lambda small: change_weights(small, drop_a_tensor)),
        ["do not fit its config.json", "model.layers.1.mlp.down_proj.weight is missing"],
    ),
    "no manifest, another width": (
        without_manifest(widths_of_one_layer),
        ["do not fit its config.json", "model.layers.1.mlp."],
    ),
    "no manifest, another family": (without_manifest(other_family), ["do not fit its config.json"]),
    "no manifest, a block too many": (
        without_manifest(lambda small: change_weights(small, revived_attention)),
        ["do not fit its config.json", "model.layers.3.self_attn.o_proj.weight is not used"],
    ),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_is_refused(
    small: Path, tmp_path: Path, change: Callable[[Path], Any], words: list[str], sentence: Callable[..., str]
) -> None:
    change(small)
    told = sentence("--model", small, *FLAGS, "--data-dir", data_folder(tmp_path / "data"))
    assert [word for word in words if word not in told] == [], told


def test_checkpoints_of_other_tools_are_refused(sentence: Callable[..., str], tmp_path: Path) -> None:
    per_layer = {"1": {"intermediate_size": 32}}
    stock = model_folder(tmp_path / "stock", per_layer_config=per_layer)
    told = sentence("--model", stock)
    assert "per_layer_config" in told and "pruned by another tool" in told and "give the original model" in told
    unknown = model_folder(tmp_path / "unknown", model_type="deci", per_layer_config=per_layer)
    assert "model type 'deci' is not supported" in sentence("--model", unknown)

    data = data_folder(tmp_path / "data")
    pickled = model_folder(tmp_path / "pickled")  # LLM-Pruner saves whole objects
    (pickled / "model.safetensors").unlink()
    torch.save({"model": torch.nn.Linear(2, 2), "tokenizer": None}, pickled / "pytorch_model.bin")
    told = sentence("--model", pickled, "--data-dir", data)
    assert str(pickled) in told and "a pickle of Python objects" in told and "safetensors" in told
    (pickled / "config.json").unlink()
    assert "has no config.json" in sentence("--model", pickled)

    narrow = model_folder(tmp_path / "narrow")  # smaller matrices under a dense config
    name = "model.layers.1.mlp.gate_proj.weight"
    change_weights(narrow, lambda weights: weights.update({name: weights[name][:8].clone()}))
    assert f"{name} is [8, 64] instead of [64, 64]" in sentence("--model", narrow, "--data-dir", data)


def test_gguf_files_are_named_themselves(sentence: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    file = folder / "model.gguf"
    file.write_bytes(b"GGUF")
    assert f"name the GGUF file in it: --model {file}" in sentence("--model", folder)
    assert "no whole GGUF file" in sentence("--model", file, "--data-dir", data_folder(tmp_path / "texts"))
    dense = model_folder(tmp_path / "dense")
    (dense / "model.safetensors").rename(dense / "model.gguf")
    told = sentence("--model", dense, "--data-dir", data_folder(tmp_path / "data"))
    assert "no weights" in told and "only a GGUF file" in told


# --- KL to the dense model

METRICS = ("kl_text", "kl_text_stderr", "kl_tasks", "kl_tasks_stderr")
DENSE = catalog.resolve("tiny-llama")


@pytest.fixture(scope="module")
def recorded(checkpoint: Path) -> dict[str, float]:
    manifest = read(checkpoint)
    assert manifest is not None and manifest.metrics is not None
    found = {name: manifest.metrics[name] for name in METRICS}
    assert all(value is not None and value > 0 for value in found.values())
    return {name: float(value or 0) for name, value in found.items()}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of its dense model that a test may damage."""
    return Path(shutil.copytree(TINY_FOLDER, tmp_path / "base"))


def opened(checkpoint: Path, artifacts: Path, way: Residency | None = None, dtype: str = "float32") -> TrialContext:
    run = replace(open_context(artifacts).run, model=str(checkpoint), label=checkpoint.name, data_dir="embedded")
    run = replace(run, dtype=dtype)
    return TrialContext.open(run, artifacts, "cpu", **({} if way is None else {"residency": way}))


def divergences(context: TrialContext, name: str = "tiny-llama") -> dict[str, float]:
    keep_all = Recipe(PruningPlan.keep_all(context.loaded.geometry))
    found, tokens = measurements.measure_kl(context, keep_all, catalog.resolve(name))
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
    monkeypatch.setattr(measurements, "readable_in_place", lambda _: streamed)
    assert divergences(opened(checkpoint, tmp_path, Residency(from_files=streamed))) == recorded


def test_of_a_padded_checkpoint_to_rounding(checkpoint: Path, recorded: dict[str, float], tmp_path: Path) -> None:
    manifest = read(checkpoint)
    assert manifest is not None and manifest.config == CONFIG
    padded = save(tmp_path / "padded", open_context(tmp_path / "a"), manifest.plan, "hf-padded")
    assert divergences(opened(padded, tmp_path / "b")) == pytest.approx(recorded, abs=1e-6)


def test_of_weights_that_were_saved_as_bfloat16_in_bfloat16(small: Path, tmp_path: Path) -> None:
    """The head of one that was rounded is not the dense model's, unless that is rounded, too."""

    def as_bfloat16(weights: dict[str, torch.Tensor]) -> None:
        weights.update({name: value.bfloat16() for name, value in weights.items()})

    change_weights(small, as_bfloat16)
    with pytest.raises(UserError, match="in the data type that it was saved in with --dtype"):
        divergences(opened(small, tmp_path / "wide"))
    assert divergences(opened(small, tmp_path / "narrow", dtype="bfloat16"))["kl_text"] > 0


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
    monkeypatch.setattr(models_opened, "readable_in_place", lambda _: False)  # then it is loaded as a whole
    model.way_to_measure(run, kl=True)
    dense = tune_prune.open("tiny-llama").params
    assert stages[-1][-1].held == 4 * dense and stages[-1][-1].way == "resident"


def test_it_is_the_divergence_of_the_two_models_logits(checkpoint: Path, tmp_path: Path) -> None:
    """By a plain forward pass of each, on the windows of the text, in float64 behind the head."""
    own, dense = opened(checkpoint, tmp_path), open_context(tmp_path)
    windows = measurements._samples(own)["text"]
    nats = []
    for window in windows:
        p, q = (
            torch.log_softmax(context.loaded.model(window[None]).logits[0].double(), dim=-1) for context in (dense, own)
        )
        nats += (p.exp() * (p - q)).sum(dim=-1).tolist()
    assert divergences(own)["kl_text"] == pytest.approx(np.mean(nats), abs=1e-6)


def test_another_dense_model_is_another_measurement(small: Path, recorded: dict[str, float], tmp_path: Path) -> None:
    """What was measured to one is not given for another; a model does not diverge from itself."""
    context = opened(small, tmp_path / "artifacts")
    assert divergences(context) == recorded
    assert divergences(context, str(small)) == pytest.approx(dict.fromkeys(METRICS, 0.0), abs=1e-6)
    keep_all = Recipe(PruningPlan.keep_all(context.loaded.geometry))
    again, tokens = measurements.measure_kl(context, keep_all, DENSE)
    assert (again["text"].mean, tokens) == (recorded["kl_text"], 0)
    assert isinstance(context.artifacts, ArtifactStore)


def test_what_cannot_be_compared_is_refused_before_anything_is_measured(
    sentence: Callable[..., str], small: Path, base: Path, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--kl")
    change_weights(base, lambda weights: weights["model.norm.weight"].mul_(2))
    told = sentence("--model", small, *flags, "--base", base)
    assert f"{base} is not the model that small was pruned from" in told and "--base" in told
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
        divergences(context, str(base))
