"""`prune --quantize int8` and `int4`: what the files hold, against plain arithmetic, and what transformers makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import tune_prune
from tests.conftest import build_tiny
from tests.models.conftest import SIZES, tokenizer
from tests.pruning.test_surgery import tokens
from tests.search_folders import data_folder
from tune_prune.checkpoint import manifest
from tune_prune.checkpoint.quantised_folder import quantise
from tune_prune.commands import evaluate
from tune_prune.core.errors import UserError


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import pre_tokenizers

    folder = tmp_path_factory.mktemp("quantised") / "dense"
    sizes = SIZES | {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    build_tiny("llama-biases", torch.float32, **sizes, intermediate_size=160).save_pretrained(folder)
    words = tokenizer(folder.with_name("words"), pre_tokenizers.ByteLevel(add_prefix_space=False))
    PreTrainedTokenizerFast.from_pretrained(words).save_pretrained(folder)
    return folder


def codes_of(stored: dict[str, torch.Tensor], module: str, kind: str) -> torch.Tensor:
    """The whole numbers of a matrix [out, in]: of int4 eight in each int32, the first in its lowest bits, all plus 8."""
    if kind == "int8":
        return stored[f"{module}.weight"].int()
    packed, shape = stored[f"{module}.weight_packed"], stored[f"{module}.weight_shape"].tolist()
    nibbles = (packed[..., None] >> torch.arange(0, 32, 4)) & 15
    return nibbles.flatten(1)[:, : shape[1]] - 8


def dequantised(model: PreTrainedModel, folder: Path, kind: str) -> PreTrainedModel:
    """The model with what the files of `folder` say of its matrices, each of which must be within half a step."""
    stored = load_file(folder / "model.safetensors")
    count = 0
    for name, module in model.named_modules():
        if f"{name}.weight_scale" in stored:
            scale, codes = stored[f"{name}.weight_scale"], codes_of(stored, name, kind)
            step = scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)
            assert (codes.abs() <= (127 if kind == "int8" else 8) + 1).all()
            assert ((codes * step - module.weight).abs() <= step * 0.5001).all()
            module.weight.copy_(codes * step)
            count += 1
    assert (
        count == sum(isinstance(m, torch.nn.Linear) and m.weight.numel() > 0 for m in model.modules()) - 1
    )  # the head
    return model


@pytest.mark.parametrize(("kind", "shape"), [("int8", "free"), ("int8", "uniform"), ("int4", "aligned-32")])
def test_transformers_reads_what_is_within_half_a_step(kind: str, shape: str, dense: Path, tmp_path: Path) -> None:
    pruned = tune_prune.open(dense, calibration="embedded").prune("random", ratio=0.3, shape=shape)
    pruned.save(tmp_path / "whole")
    about = pruned.save(tmp_path / "small", quantize=kind)
    assert about.quantization == kind and any(f"in {kind[3]} bits" in note for note in about.notes)
    assert about == manifest.read(tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "lm_head" in config["quantization_config"]["ignore"]
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors")) for name in ("whole", "small")
    ]
    assert sizes[1] < sizes[0] * (0.5 if kind == "int8" else 0.45)

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval().requires_grad_(False)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32).eval().requires_grad_(False)
    before = whole(tokens()).logits
    wanted, logits = dequantised(whole, tmp_path / "small", kind)(tokens()).logits, small(tokens()).logits
    if kind == "int4":
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    else:  # what goes into a matrix is rounded, too
        assert 0 < (logits - wanted).abs().mean() < 0.1 * before.std()
    assert (wanted - before).abs().max() > 0


def test_int4_of_odd_widths_is_refused() -> None:
    model = build_tiny("llama")
    with pytest.raises(UserError, match=r"multiples of 32, and model.layers.0.self_attn.q_proj.weight is \[48, 32\]"):
        quantise(model, dict(model.named_parameters()), "int4")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_folder_is_measured_with_its_weights_dequantised(
    kind: str, dense: Path, tmp_path: Path, printed: Callable[..., str]
) -> None:
    data = data_folder(tmp_path / "data")
    pruned = tune_prune.open(dense, calibration="embedded").prune("random", ratio=0.3, shape="aligned-32")
    pruned.save(tmp_path / "whole")
    pruned.save(tmp_path / "small", quantize=kind)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval().requires_grad_(False)
    wanted = dequantised(whole, tmp_path / "small", kind)
    opened = tune_prune.open(tmp_path / "small", data_dir=data)
    torch.testing.assert_close(opened.model(tokens()).logits, wanted(tokens()).logits, rtol=1e-5, atol=1e-5)
    argv = ["--model", tmp_path / "small", "--kl", "--tasks", "piqa", "--limit", "2", "--data-dir", data]
    told = printed(evaluate.main, *argv)
    assert f"weights dequantised from {kind}, in float32" in told and "KL  " in told
    with pytest.raises(UserError, match="is already pruned"):
        opened.prune("random")
