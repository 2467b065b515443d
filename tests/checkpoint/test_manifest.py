"""tune_prune.json: read back exactly, refused where it is damaged, and held against the config and weights beside it."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.pruned_checkpoints import (
    TRIAL,
    change_json,
    change_weights,
    measured_checkpoint,
    open_context,
    plan_of,
    record_files,
    save,
)
from tests.search_folders import in_hub_cache
from tune_prune.checkpoint import manifest
from tune_prune.checkpoint.generation_speed import GenerationSpeed
from tune_prune.checkpoint.manifest import MANIFEST, Manifest
from tune_prune.core.config import EMBEDDED_DATA
from tune_prune.core.errors import UserError
from tune_prune.core.files import to_json
from tune_prune.evaluation.item_scores import to_parquet
from tune_prune.models import loading
from tune_prune.models.catalog import resolve
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import Trial

ALL_GROUPS, ALL_CHANNELS = tuple(range(4)), tuple(range(64))


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> TrialContext:
    return open_context(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def checkpoint(context: TrialContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", context)


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "small"))


def known(folder: Path) -> Manifest:
    found = manifest.read(folder)
    assert found is not None
    return found


def refused(folder: Path) -> str:
    """The sentence with which the files of a checkpoint are refused."""
    with pytest.raises(UserError) as error:
        manifest.verify(resolve(str(folder)), loading.load_config(resolve(str(folder))))
    text = str(error.value)
    assert "\n" not in text and not text.endswith(".") and len(text) < 500
    return text


# --- reading and writing


def test_it_comes_back_as_it_was_written(checkpoint: Path, tmp_path: Path) -> None:
    before = replace(
        known(checkpoint),
        metrics={"ppl": math.inf, "acc_mean": 0.1 + 0.2, "acc_mean_stderr": None},
        baseline={"ppl": 1e-300, "acc_mean_stderr": None},
        speed={"dense": GenerationSpeed(24_512.3, 61.5, 16_532, 512, 64, 1, 5, "bfloat16", "NVIDIA H200")},
    )
    manifest.write(tmp_path, before)
    after = known(tmp_path)
    assert after == before
    assert (tmp_path / MANIFEST).read_bytes() == to_json(after.to_dict()).encode()
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]
    assert manifest.read(tmp_path / "elsewhere") is None


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """An edit that sets the field at `path`; value ...: takes it out."""

    def change(values: Any) -> None:
        for name in path[:-1]:
            values = values[name]
        if value is ...:
            del values[path[-1]]
        else:
            values[path[-1]] = value

    return change


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "newer": (put("schema_version", value=2), "schema_version is 2"),
    "format": (put("format", value="pickle"), "format is 'pickle'; it must be 'hf', 'vllm', 'hf-padded' or 'gguf'"),
    "no parameters": (put("params", value=0), "params is 0; it must be greater than or equal to 1"),
    "other base size": (put("base", "params", value=7), "plan is not what a checkpoint has, or contradicts"),
    "a layer too many": (put("base", "layers", value=6), "plan is not what a checkpoint has, or contradicts"),
    "groups twice": (put("plan", "layers", 1, "kept_groups", value=[1, 1]), "plan.layers[1].kept_groups is [1, 1]"),
    "dropped but kept": (put("dropped_layers", value=[2]), "dropped_layers is not"),
    "file elsewhere": (put("files", value={"../x": {"bytes": 1, "sha256": "0"}}), "files is not"),
    "no seq_len": (put("config", "seq_len", value=...), "config.seq_len is missing"),
}


@pytest.mark.parametrize(("change", "expected"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_one_is_refused_by_file_and_field(
    folder: Path, change: Callable[[dict[str, Any]], None], expected: str
) -> None:
    change_json(folder / MANIFEST, change)
    text = refused(folder)
    assert expected in text and str(folder / MANIFEST) in text


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 100_000], ids=lambda content: repr(content[:3]))
def test_a_file_that_is_no_manifest_is_refused(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    assert str(folder / MANIFEST) in refused(folder)


def test_other_kept_groups_are_noticed(folder: Path) -> None:
    """As many groups stay as before, so that no shape tells."""
    groups = known(folder).plan.kept_groups
    layer = next(index for index, kept in enumerate(groups) if 0 < len(kept) < 4)
    others = sorted(set(ALL_GROUPS) - set(groups[layer]))[:1] + list(groups[layer][1:])
    change_json(folder / MANIFEST, put("plan", "layers", layer, "kept_groups", value=sorted(others)))
    assert "structure is not what" in refused(folder)


def test_every_item_of_the_trial_comes_back_exactly(checkpoint: Path, tmp_path: Path) -> None:
    again = Trial(None, open_context(tmp_path / "artifacts", str(checkpoint), EMBEDDED_DATA))
    for _ in again.stages():
        pass
    before = pyarrow.parquet.read_table(checkpoint.with_name(TRIAL) / "items.parquet")
    after = pyarrow.parquet.read_table(pyarrow.BufferReader(to_parquet(again.items)))
    assert after.num_rows == 40 and after.equals(before)  # log-likelihoods too, to the last bit


# --- against the files


def test_the_files_that_were_saved_are_accepted(checkpoint: Path) -> None:
    source = resolve(str(checkpoint))
    assert manifest.verify(source, loading.load_config(source)) == known(checkpoint)
    dense = resolve("tiny-llama")
    assert manifest.verify(dense, loading.load_config(dense)) is None


def flip_last_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def widen(folder: Path) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    change_weights(folder, lambda weights: weights.update({name: torch.cat([weights[name], weights[name][:1]])}))


def split(folder: Path) -> list[str]:
    """The weights in two shards, as large models have them; their names."""
    weights = load_file(folder / "model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    shard_of = {tensor: names[index % 2] for index, tensor in enumerate(sorted(weights))}
    for name in names:
        mine = {tensor: weights[tensor] for tensor in weights if shard_of[tensor] == name}
        save_file(mine, folder / name, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    (folder / "model.safetensors").unlink()
    record_files(folder)
    return names


def without_a_shard(folder: Path) -> None:
    _, second = split(folder)
    source = resolve(str(folder))
    assert manifest.verify(source, loading.load_config(source)) is not None
    (folder / second).unlink()


def another_file_first(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "another")
    split(folder)
    (folder / "another").rename(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flip_last_byte, "the content of model.safetensors has changed"),
        (widen, "the content of model.safetensors has changed"),
        (lambda folder: (folder / "model.safetensors").unlink(), "weight file model.safetensors is missing"),
        (without_a_shard, "weight file model-00002-of-00002.safetensors is missing"),
        (another_file_first, "model.safetensors would be loaded, which the manifest does not list"),
    ],
)
def test_other_weights_than_those_of_the_manifest_are_refused(
    folder: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(folder)
    assert re.search(says, refused(folder))


def per_layer(index: int, **sizes: int) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["per_layer_config"][str(index)].update(sizes)


OTHER_SIZES = "config.json states other layers, or other sizes"
OTHER_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another family": (put("model_type", value="tune_prune_qwen2"), "config.json is that of a tune_prune_qwen2 model"),
    "fewer layers": (
        lambda values: (values.update(num_hidden_layers=4), values["per_layer_config"].pop("4")),
        OTHER_SIZES,
    ),
    "another width": (per_layer(1, intermediate_size=63), OTHER_SIZES),
    "another vocabulary": (put("vocab_size", value=552), OTHER_SIZES),
}


@pytest.mark.parametrize(("change", "expected"), OTHER_CONFIGS.values(), ids=OTHER_CONFIGS)
def test_a_config_of_another_model(folder: Path, change: Callable[[dict[str, Any]], None], expected: str) -> None:
    change_json(folder / "config.json", change)
    text = refused(folder)
    assert expected in text and "is not the one that its tune_prune.json describes" in text


def test_dropped_layers_are_left_out_of_the_comparison(context: TrialContext, tmp_path: Path) -> None:
    groups = [(0, 2), (), ALL_GROUPS, (), (1, 2, 3)]
    channels = [ALL_CHANNELS, (), tuple(range(5, 50)), tuple(range(8)), ALL_CHANNELS]
    folder = save(tmp_path / "ck", context, plan_of(context, groups, channels))
    source = resolve(str(folder))
    about = manifest.verify(source, loading.load_config(source))
    assert about is not None and about.dropped_layers == (1,) and about.saved_layers == (0, 2, 3, 4)
    geometry = loading.load_model(source, torch.float32, "cpu").geometry
    assert geometry.kv_heads == (2, 4, 0, 3) and geometry.mlp_width == (64, 45, 8, 64)
    change_json(folder / "config.json", per_layer(2, intermediate_size=9))
    assert OTHER_SIZES in refused(folder)


def test_uniform_and_padded_checkpoints_are_ordinary_models(context: TrialContext, tmp_path: Path) -> None:
    uniform = plan_of(context, [(0, 3), (1, 2), (0, 1), (2, 3), (1, 3)], [tuple(range(i, i + 40)) for i in range(5)])
    uneven = plan_of(context, [(0, 3), (1,), (), (2, 3), (1, 3)], [tuple(range(8 * i)) for i in range(1, 6)])
    for name, fmt, plan, widths in (("u", "hf", uniform, (2, 40)), ("p", "hf-padded", uneven, (2, 40))):
        folder = save(tmp_path / name, context, plan, fmt)
        source = resolve(str(folder))
        config = loading.load_config(source)
        assert config.model_type == "llama"
        assert manifest.verify(source, config) == known(folder)
        geometry = loading.load_model(source, torch.float32, "cpu").geometry
        assert geometry.kv_heads == widths[:1] * 5 and geometry.mlp_width == widths[1:] * 5
        with pytest.raises(UserError, match="already pruned"):
            manifest.require_dense(source, config)
        change_json(folder / "config.json", put("intermediate_size", value=39))
        assert OTHER_SIZES in refused(folder)


def test_a_checkpoint_for_vllm_attends_in_every_layer_and_says_so(context: TrialContext, tmp_path: Path) -> None:
    groups, channels = [(0, 2), (), (1,), (), (1, 2, 3)], [ALL_CHANNELS, (), (), tuple(range(8)), ALL_CHANNELS]
    plan, logits = plan_of(context, groups, channels), {}
    for fmt in ("hf", "vllm"):
        source = resolve(str(save(tmp_path / fmt, context, plan, fmt)))
        loaded = loading.load_model(source, torch.float32, "cpu")
        logits[fmt] = loaded.model(torch.arange(20)[None]).logits
    folder, about = tmp_path / "vllm", known(tmp_path / "vllm")
    assert manifest.verify(source, loading.load_config(source)) == about and torch.equal(logits["hf"], logits["vllm"])
    assert loaded.geometry.kv_heads == (2, 1, 1, 3) and loaded.geometry.mlp_width == (64, 0, 8, 64)
    assert about.notes == [
        "layer 3 has a KV group of zeros in place of the lost attention, as vLLM needs one in every layer"
    ]
    added = about.sizes["padded"].params - about.sizes["pruned"].params
    assert added == context.loaded.geometry.group_cost[3] and about.params == about.sizes["padded"].params
    assert about.sizes["padded"].kv_bytes_per_token == 2 * 4 * 7 * context.loaded.geometry.head_dim
    card = (folder / "README.md").read_text("utf-8")
    assert "- Layer 3 has a KV group of zeros" in card and "fill every layer" not in card and "--format vllm" in card
    change_json(folder / "config.json", per_layer(2, num_attention_heads=4, num_key_value_heads=2))
    assert OTHER_SIZES in refused(folder)
    whole = plan_of(context, [(0,)] * 5, [ALL_CHANNELS] * 4 + [(1,)])
    about = known(save(tmp_path / "nothing lost", context, whole, "vllm"))
    assert about.notes == [] and "padded" not in about.sizes


# --- the hub


def test_a_checkpoint_of_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = in_hub_cache(folder, tmp_path / "hub", "someone/small")
    source = resolve("someone/small")
    config = loading.load_config(source)
    assert manifest.verify(source, config) == known(folder)
    assert loading.load_model(source, torch.float32, "cpu").geometry.total_params == known(folder).params
    flip_last_byte(snapshot)
    with pytest.raises(UserError, match=r"the content of model\.safetensors has changed"):
        manifest.verify(source, config)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(UserError, match="someone/small could not be downloaded from the Hugging Face hub"):
        manifest.verify(source, config)
    (snapshot / MANIFEST).unlink()
    assert manifest.verify(source, config) is None


# --- a search starts from a dense model


@pytest.mark.usefixtures("nothing_created")
def test_a_search_on_a_pruned_checkpoint_names_the_dense_model(folder: Path, refusal: Callable[..., str]) -> None:
    argv = ("--model", folder, "--search-space", "smoke", "--pruning-ratio", "0.2")
    removed = f"{known(folder).plan.removed_fraction:.1%} of tiny-llama"
    told = refusal(*argv)
    assert "small is already pruned" in told and removed in told and "--model tiny-llama" in told
    (folder / MANIFEST).unlink()
    told = refusal(*argv)
    assert "already pruned (model type tune_prune_llama)" in told
