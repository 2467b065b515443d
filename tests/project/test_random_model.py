"""Models of random weights in real shapes: the sizes are the published ones, the folder is a model that loads and runs."""

from __future__ import annotations

from pathlib import Path

import make_random_model
import pytest
import torch
from transformers import AutoModelForCausalLM

import tune_prune
from tune_prune.models import loading

# As the models' pages on the hub say.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "smollm3-3b": 3_075_098_624,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
}
SMALL = ("--like", "smollm2-135m", "--layers", "2", "--vocab", "600")


@pytest.mark.parametrize("name", make_random_model.SHAPES)
def test_a_shape_is_that_of_the_published_model(name: str) -> None:
    config = make_random_model.config_of(name)
    _, geometry = loading.config_geometry(config)
    assert geometry.total_params == PARAMETERS[name]
    parts = list(make_random_model._parts(config, loading.config_geometry(config)[0]))
    assert len(parts) == geometry.num_layers + 2
    assert sum(torch.Size(shape).numel() for part in parts for shape in part.values()) == PARAMETERS[name]


def test_the_folder_is_a_model_that_loads_and_runs(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    make_random_model.main([*SMALL, "--output", str(folder)])
    assert len(list(folder.glob("model-*-of-00004.safetensors"))) == 4  # embeddings, two layers, the last norm
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()) and model.dtype == torch.bfloat16
    std = model.model.layers[1].mlp.down_proj.weight.float().std().item()
    assert std == pytest.approx(model.config.initializer_range, rel=0.02)
    opened = tune_prune.open(folder, calibration="embedded", data_dir=None, dtype="bfloat16", device="cpu")
    assert opened.params == sum(p.numel() for p in model.parameters())
    text = "Structured pruning removes whole heads – déjà vu."
    ids = opened.tokenizer(text)["input_ids"]
    assert opened.tokenizer.decode(ids) == text and max(ids) < 600 == len(opened.tokenizer)
    losses = opened.model(torch.tensor([ids])).logits.float()
    assert losses.isfinite().all() and losses.std() > 0.1
    smaller = opened.prune("magnitude", ratio=0.2)
    assert smaller.params < 0.81 * opened.params
