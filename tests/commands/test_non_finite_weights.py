"""A model with a weight that is no number is refused by name before it is measured, wherever its weights are."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.search_folders import data_folder, model_folder
from tune_prune.commands import api, evaluate, search
from tune_prune.models.runner import layer_weights

NAME = "model.layers.2.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def broken(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> Path:
    """A copy of tiny-llama with one changed tensor."""
    path = model_folder(folder) / "model.safetensors"
    tensors = load_file(path)
    change(tensors[name])
    save_file(tensors, path, {"format": "pt"})
    return folder


def unused_row_broken(folder: Path) -> Path:
    """Copy tiny-llama with NaN in the row of the embedding that is of </s>, which no text has; it is not tied to the logits."""
    path = model_folder(folder, tie_word_embeddings=False) / "model.safetensors"
    tensors = load_file(path)
    tensors |= {"lm_head.weight": tensors[EMBEDDING].clone()}
    tensors[EMBEDDING][2] = math.nan
    save_file(tensors, path, {"format": "pt"})
    return folder


def value(number: float) -> Callable[[torch.Tensor], object]:
    return lambda tensor: tensor.view(-1)[100].fill_(number)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_evaluate_names_the_weight(number: float, refused: Callable[..., str], tmp_path: Path) -> None:
    model, data = broken(tmp_path / "m", NAME, value(number)), data_folder(tmp_path / "data")
    argv = ("--model", model, "--data-dir", data, "--tasks", "piqa", "--limit", "2", "--device", "cpu")
    sentence = refused(evaluate.main, *argv, begun=True)
    assert (
        sentence
        == f"error: m cannot be pruned or measured: its weight {NAME} holds NaN or infinity; save or download the model again\n"
    )


def test_a_search_ends_with_the_baseline_however_often_it_is_started(refused, tmp_path):
    """No measurement would show it."""
    model = unused_row_broken(tmp_path / "m")
    argv = ["--model", model, "--search-space", "control", "--calibration", "embedded", "--inline", "--tasks", "piqa"]
    argv += ["--limit", "2", "--data-dir", data_folder(tmp_path / "data"), "--storage-path", tmp_path / "kept"]
    argv += ["--gpus-per-trial", "0"]
    for _ in range(2):
        sentence = refused(search.main, *argv, begun=True)
        assert f"m cannot be pruned or measured: its weight {EMBEDDING} holds NaN" in sentence
    assert not [*(tmp_path / "kept").glob("*/baseline.json"), *(tmp_path / "kept").glob("*/ledger/*")]


def test_weights_are_looked_at_once_and_infinite_perplexity_is_a_result(tmp_path, monkeypatch):
    looked: list[object] = []
    find = layer_weights.first_non_finite
    monkeypatch.setattr("tune_prune.trial.context.first_non_finite", lambda weights: looked.append(1) or find(weights))
    data = data_folder(tmp_path / "data")
    huge = broken(tmp_path / "huge", "model.norm.weight", lambda tensor: tensor.mul_(1e6))
    found = api.open(str(huge), data_dir=str(data), device="cpu").evaluate(2, "piqa")
    assert found.ppl == math.inf and len(looked) == 1


def test_a_model_that_predicts_nan_with_finite_weights_has_no_accuracy(refused, tmp_path):
    model, data = model_folder(tmp_path / "m", rms_norm_eps=math.nan), data_folder(tmp_path / "data")
    argv = ("--model", model, "--data-dir", data, "--tasks", "piqa", "--limit", "2", "--device", "cpu")
    said = refused(evaluate.main, *argv, begun=True)
    assert (
        "error: m predicts NaN on the perplexity text, though its weights are finite; correct its config.json" in said
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_place_of_a_weight_is_looked_at(dtype: torch.dtype) -> None:
    whole = torch.randn(7, 41).to(dtype)
    assert layer_weights.first_non_finite({"none": torch.empty(0, 3), "one": whole, "cut": whole.T[:5]}) is None
    for place in range(whole.numel()):
        for number in (math.nan, math.inf, -math.inf):
            changed = whole.clone()
            changed.view(-1)[place] = number
            assert layer_weights.first_non_finite({"one": whole, "two": changed}) == "two"
