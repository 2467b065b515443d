"""Other people's tools take a pruned checkpoint as any other: PEFT's adapters and lm-eval's command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.checkpoints import FLOAT32_TOLERANCE, alone, write_case
from tests.pruned_checkpoints import measured_checkpoint, open_context
from tests.pruning.test_surgery import tokens
from tune_prune.commands import evaluate
from tune_prune.core.config import ZERO_SHOT_METRIC
from tune_prune.data.task_files import TaskSource

ADAPTED = [
    ("llama-biases", "both of a middle layer", ["q_proj", "v_proj", "down_proj"]),
    ("qwen3", "attention of a middle layer", ["q_proj", "o_proj"]),
    ("qwen2-sliding", "MLP of a middle layer", ["q_proj", "v_proj", "down_proj"]),
    ("mistral", "different in every layer", "all-linear"),
]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens()).logits


# An adapter on what has no inputs any more is empty, and PEFT wonders.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors", "ignore:Adapter 'default'. 1 LoRA tensor")
@pytest.mark.parametrize(("variant", "shape", "modules"), ADAPTED)
def test_an_adapter_is_trained_saved_loaded_and_merged(tmp_path, variant, shape, modules):
    base = tmp_path / "base"
    case = write_case(base, variant, shape)
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM")
    )
    assert (logits(model) - logits(case.truth)).abs().max() <= FLOAT32_TOLERANCE  # a new adapter does nothing
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    trained = logits(model.eval())
    assert (trained - logits(case.truth)).abs().max() > 0.1

    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    assert (logits(again) - trained).abs().max() <= FLOAT32_TOLERANCE
    merged = again.merge_and_unload()
    assert (logits(merged) - trained).abs().max() <= FLOAT32_TOLERANCE
    merged.save_pretrained(tmp_path / "merged")
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values())
    assert (logits(reloaded) - trained).abs().max() <= FLOAT32_TOLERANCE
    for name in ("modeling_tune_prune.py", json.loads((base / "config.json").read_text("utf-8"))["model_file"]):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.slow
def test_lm_evals_command_line_finds_the_same_accuracies(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    from bench_lm_eval import write_definitions

    checkpoint, tasks, limit = tmp_path / "checkpoint", ("boolq", "piqa"), 40
    measured_checkpoint(checkpoint, open_context(tmp_path / "artifacts"))
    write_definitions(TaskSource.of(None, embedded=True), tasks, tmp_path / "tasks")
    own = tmp_path / "own.json"
    how = ["--tasks", ",".join(tasks), "--limit", str(limit), "--device", "cpu", "--output", str(own)]
    assert evaluate.main(["--model", str(checkpoint), *how]) == 0

    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "8",
            "--model_args", f"pretrained={checkpoint},trust_remote_code=True,dtype=float32",
            "--tasks", ",".join(f"own_{task}" for task in tasks), "--include_path", str(tmp_path / "tasks"),
            "--limit", str(limit), "--output_path", str(tmp_path / "theirs"),
        ],
        env=alone(tmp_path / "modules"), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "theirs").rglob("results*.json")
    theirs = json.loads(results.read_text("utf-8"))["results"]
    metrics = json.loads(own.read_text("utf-8"))["metrics"]
    for task in tasks:
        metric, found = ZERO_SHOT_METRIC[task], theirs[f"own_{task}"]
        assert found["sample_len"] == limit
        assert found[f"{metric},none"] == pytest.approx(metrics[f"acc_{task}"], abs=1e-12), task
        assert found[f"{metric}_stderr,none"] == pytest.approx(metrics[f"acc_{task}_stderr"], abs=1e-12), task
        assert 0 < metrics[f"acc_{task}"] < 1
    assert list((tmp_path / "modules").rglob("modeling_tune_prune.py"))
