"""A model with a weight that is no number is refused by name before it is measured, wherever its weights are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.search_folders import data_folder, model_folder
from tests.trials import RUN
from tune_prune import embedded
from tune_prune.commands import api, evaluate, prune, search
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import NotFinite, UserError
from tune_prune.data.perplexity_text import TEXT_FILE
from tune_prune.models.catalog import resolve
from tune_prune.models.loading import load_tokenizer, map_model
from tune_prune.models.runner import layer_weights
from tune_prune.models.runner.residency import Residency
from tune_prune.trial.context import ArtifactStore, TrialContext
from tune_prune.trial.trial import Trial, run_trial

RANDOM = PruningConfig("random", 16, 8)
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
    """One with NaN in the row of the embedding that is of </s>, which no text has; it is not tied to the logits."""
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


def test_weights_that_stay_in_their_files(tmp_path: Path) -> None:
    model = broken(tmp_path / "m", NAME, value(math.nan))
    run = replace(RUN, model=str(model), data_dir=str(data_folder(tmp_path / "data")))
    loaded = map_model(resolve(str(model)), torch.float32, "cpu", Residency(from_files=True))
    with pytest.raises(UserError, match=f"its weight {NAME} holds NaN"):
        run_trial(None, TrialContext(run, loaded, ArtifactStore(tmp_path / "cache")))


def test_a_token_that_only_items_have(tmp_path: Path) -> None:
    """The perplexity would be a number."""
    data = data_folder(tmp_path / "data")
    text = embedded.perplexity_text()[:300]
    (data / TEXT_FILE).write_text(text)
    items = [json.loads(line) for line in (data / "tasks" / "piqa" / "test.jsonl").read_text().splitlines()[:2]]
    read = partial(load_tokenizer(resolve("tiny-llama")), add_special_tokens=False)
    used = {token for item in items for word in item["goal"].split() for token in read(f" {word}").input_ids}
    token = min(used - set(read(text).input_ids))
    model = model_folder(tmp_path / "m", tie_word_embeddings=False)  # else a row is of the logits of every token, too
    tensors = load_file(model / "model.safetensors")
    tensors |= {"lm_head.weight": tensors[EMBEDDING].clone()}
    tensors[EMBEDDING][token] = math.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    stages = []
    with pytest.raises(UserError, match=f"its weight {EMBEDDING} holds NaN"):
        api.open(str(model), data_dir=str(data), device="cpu").evaluate(2, "piqa", stages.append)
    assert stages == []


def test_a_search_ends_with_the_baseline_however_often_it_is_started(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    """Also where no measurement would show it."""
    model = unused_row_broken(tmp_path / "m")
    argv = ["--model", model, "--search-space", "control", "--calibration", "embedded", "--inline", "--tasks", "piqa"]
    argv += ["--limit", "2", "--data-dir", data_folder(tmp_path / "data"), "--storage-path", tmp_path / "kept"]
    argv += ["--gpus-per-trial", "0"]
    for _ in range(2):
        sentence = refused(search.main, *argv, begun=True)
        assert f"m cannot be pruned or measured: its weight {EMBEDDING} holds NaN" in sentence
    assert not [*(tmp_path / "kept").glob("*/baseline.json"), *(tmp_path / "kept").glob("*/ledger/*")]


def test_a_trial_of_a_worker_that_has_not_measured_the_dense_model(tmp_path: Path) -> None:
    model = unused_row_broken(tmp_path / "m")
    run = replace(RUN, model=str(model), data_dir=str(data_folder(tmp_path / "data")))
    trial = Trial(RANDOM, TrialContext.open(run, tmp_path / "cache", "cpu"))
    with pytest.raises(NotFinite, match=f"its weight {EMBEDDING} holds NaN"):
        list(trial.stages())
    assert trial.record.stages == []


def test_it_is_not_pruned(refused: Callable[..., str], tmp_path: Path) -> None:
    """Though magnitudes of other weights, and no score, would show it."""
    model, out = unused_row_broken(tmp_path / "m"), tmp_path / "out"
    argv = ("--model", model, "--method", "magnitude", "--device", "cpu", "--output", out)
    sentence = refused(prune.main, *argv, begun=True)
    assert sentence.startswith(f"error: m cannot be pruned or measured: its weight {EMBEDDING} holds NaN")
    assert not out.exists()


def test_weights_are_looked_at_once_and_infinite_perplexity_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []
    find = layer_weights.first_non_finite
    monkeypatch.setattr("tune_prune.trial.context.first_non_finite", lambda weights: looked.append(1) or find(weights))
    data = data_folder(tmp_path / "data")
    huge = broken(tmp_path / "huge", "model.norm.weight", lambda tensor: tensor.mul_(1e6))
    found = api.open(str(huge), data_dir=str(data), device="cpu").evaluate(2, "piqa")
    assert found.ppl == math.inf and len(looked) == 1


def test_a_model_that_predicts_nan_with_finite_weights_has_no_accuracy(
    refused: Callable[..., str], tmp_path: Path
) -> None:
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
