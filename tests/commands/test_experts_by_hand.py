"""A mixture of experts from its name to a checkpoint: what can be asked of it, and what is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tune_prune
from tune_prune.commands.opened import Model
from tune_prune.core.errors import UserError

IDS = torch.arange(40, 72)[None]


@pytest.fixture(scope="module")
def model() -> Model:
    return tune_prune.open("tiny-qwen3-moe", device="cpu")


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("reap", {}),
        ("taylor", {"whole_experts": 0.5}),
        ("gate_fisher", {"shape": "uniform"}),
        ("magnitude", {"steps": 1}),
    ],
)
def test_what_is_saved_gives_the_logits_of_what_was_made(
    model: Model, method: str, options: dict, tmp_path: Path
) -> None:
    small = model.prune(method, seq_len=16, num_samples=8, **options)
    small.save(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert sum(p.numel() for p in again.parameters()) == model.params - small.plan.removed_params
    assert again.config.model_type == "qwen3_moe" if options == {"shape": "uniform"} else "tune_prune_qwen3_moe"
    expected = small.model(IDS).logits
    assert torch.allclose(again(IDS).logits, expected, atol=1e-5)
    assert (model.model(IDS).logits - expected).abs().max() > 0.1
    opened = tune_prune.open(tmp_path / "small", device="cpu")
    assert torch.equal(opened.model(IDS).logits, expected)


@torch.no_grad()
def test_a_file_of_llama_cpp_is_read_again(model: Model, tmp_path: Path) -> None:
    small = model.prune("reap", seq_len=16, num_samples=8, shape="uniform")
    small.save(tmp_path / "small", format="gguf")
    (file,) = (tmp_path / "small").glob("*.gguf")
    assert torch.equal(tune_prune.open(file, device="cpu").model(IDS).logits, small.model(IDS).logits)


@torch.no_grad()
@pytest.mark.filterwarnings("error:The following")
def test_a_repair_and_a_training_leave_experts_as_they_are(model: Model) -> None:
    plain = model.prune("random", seq_len=16, num_samples=8)
    options = {"compensation": "least_squares", "refit_tokens": 2048, "recovery": "lora", "recovery_steps": 2}
    changed = dict(model.prune("random", seq_len=16, num_samples=8, **options).model.named_parameters())
    differ = {name for name, p in plain.model.named_parameters() if not torch.equal(p, changed[name])}
    assert differ and all(".self_attn." in name for name in differ)


def test_what_it_does_not_take_is_refused(model: Model, tmp_path: Path) -> None:
    for name in ("flap", "wanda_sp", "kfac"):
        with pytest.raises(UserError, match=f"{name} decides by the inputs of a layer's last projections, and experts"):
            model.prune(name, seq_len=16, num_samples=8)
    with pytest.raises(UserError, match="shape is aligned-8, which counts MLP channels"):
        model.prune("reap", seq_len=16, num_samples=8, shape="aligned", align=8)
    with pytest.raises(UserError, match="whole_experts is 0, but reap scores no channels inside of experts"):
        model.prune("reap", seq_len=16, num_samples=8, whole_experts=0.0)
    with pytest.raises(UserError, match="reap scores experts, and this model has none"):
        tune_prune.open("tiny-llama", device="cpu").prune("reap", seq_len=16, num_samples=8)
    small = model.prune("random", seq_len=16, num_samples=8)
    for fmt, says in (
        ("hf-padded", "a router would take experts of zeros"),
        ("gguf", "architecture qwen3moe has one width for all layers"),
    ):
        with pytest.raises(UserError, match=says):
            small.save(tmp_path / fmt, format=fmt)
