"""Checkpoints of models whose weights stay in their files: byte for byte those of loaded ones, a tensor at a time."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import tune_prune
from tests.conftest import VARIANTS, whole
from tests.limited_memory import LimitedMemory
from tests.pruning.test_surgery import ALL_CHANNELS, ALL_GROUPS, KEEP_SETS, LAYERS, plan_of
from tune_prune.checkpoint import card, layers
from tune_prune.checkpoint.manifest import Format, Manifest, Provenance
from tune_prune.checkpoint.save import check_folder, save_checkpoint
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.temporary import clear_killed, is_mount_point
from tune_prune.models import fused
from tune_prune.models.catalog import resolve
from tune_prune.models.geometry import Geometry
from tune_prune.models.loading import LoadedModel, load_model, map_model
from tune_prune.models.runner.out_of_memory import OutOfMemory
from tune_prune.pruning.surgery import Sketch, cut
from tune_prune.trial.recipe import Recipe

ABOUT = Provenance(config=PruningConfig("random", 16, 8, 0.2))
PLANS = {name: KEEP_SETS[name] for name in ("different in every layer", "both of a middle layer", "all but one group")}
PLANS |= {"alike": ((ALL_GROUPS,) * LAYERS, (ALL_CHANNELS[3:],) * LAYERS)}


@pytest.fixture(autouse=True, scope="module")
def pictures_drawn_once() -> Iterator[None]:
    """The picture of a card, which takes most of the time, is drawn once from the same numbers."""
    draw, drawn = card.picture, dict[str, bytes]()

    def picture(manifest: Manifest, geometry: Geometry) -> bytes:
        key = repr((manifest.plan, manifest.dropped_layers, geometry))
        return drawn[key] if key in drawn else drawn.setdefault(key, draw(manifest, geometry))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "picture", picture)
        yield


@pytest.fixture
def folder(tiny, variant, tmp_path) -> Path:
    whole(tiny(variant, torch.float32)).save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def written(dense: LoadedModel, keep: tuple, folder: Path, fmt: Format, shard_bytes: int) -> Mapping[str, bytes]:
    plan = plan_of(dense.model, dense.family, *keep)
    save_checkpoint(dense, Recipe(plan), ABOUT, folder, fmt, shard_bytes=shard_bytes)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("variant", "plan", "fmt", "dtype"),
    [(variant, "both of a middle layer", "hf", torch.bfloat16) for variant in VARIANTS]
    + [(variant, plan, "hf", torch.bfloat16) for variant in ("llama-tied", "qwen2-sliding") for plan in PLANS]
    + [
        ("smollm3", "different in every layer", "hf-padded", torch.float32),
        ("qwen3", "alike", "hf-padded", torch.float32),
    ],
)
def test_weight_files_are_those_that_transformers_writes(folder, plan, fmt, dtype, tmp_path):
    """Byte for byte, for weights in memory and for those that stay in their files, in one file and in many."""
    loaded, mapped = (make(resolve(str(folder)), dtype, "cpu") for make in (load_model, map_model))
    made = cut(loaded.model, loaded.family, plan_of(loaded.model, loaded.family, *PLANS[plan]))
    sketch, _ = layers.compact(made, loaded.family)
    saved = layers.as_saved(sketch, loaded.model, loaded.family, loaded.geometry, fmt)
    saved = Sketch(*fused.put_together(saved.model, saved.weights, loaded.family)).in_memory()
    for dense, shard_bytes in ((loaded, 8000), (mapped, 10**9), (mapped, 8000)):
        saved.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
        theirs = {path.name: path.read_bytes() for path in (tmp_path / "theirs").glob("*.safetensors*")}
        ours = written(dense, PLANS[plan], tmp_path / f"{dense.model.device}-{shard_bytes}", fmt, shard_bytes)
        assert {name: ours[name] for name in ours if "safetensors" in name} == theirs
        assert ("model.safetensors" in theirs) == (shard_bytes == 10**9)
        shutil.rmtree(tmp_path / "theirs")


@pytest.mark.parametrize("replaced", [True, False])
def test_what_a_killed_save_has_left_is_cleared(tmp_path: Path, replaced: bool) -> None:
    """A folder that it had moved away comes back unless the new one has taken its place; one that is being written stays."""
    with subprocess.Popen(["true"]) as ended:
        pass
    output = tmp_path / "small [1]"
    here, there = f"{platform.node()}-{ended.pid}", f"another-{platform.node()}-{ended.pid}"
    old, left, *written = (
        tmp_path / f".small [1].{end}"
        for end in (
            f"replaced-{here}",
            f"partial-{here}",
            f"partial-{platform.node()}-{os.getppid()}",
            f"partial-{there}",  # where that process may live
            f"replaced-{there}",
        )
    )
    for path in (old, left, *written, *([output] if replaced else [])):
        path.mkdir()
        (path / "name").write_text(path.name)
    clear_killed(output)
    assert sorted(tmp_path.iterdir()) == sorted([*written, output])
    assert (output / "name").read_text() == (output.name if replaced else old.name)


def test_a_mount_point_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--output /proc is a mount point, .*; name a folder in it, e\.g\. /proc/NAME"):
        check_folder(Path("/proc"), overwrite=True)
    assert not is_mount_point(tmp_path)
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    place = tmp_path / "a b"  # of the same device, where os.path.ismount sees nothing
    place.mkdir()
    asks = "import pathlib, sys; from tune_prune.core.temporary import *; "
    asks += "print(is_mount_point(pathlib.Path(sys.argv[1])))"
    line = f"mount --bind '{tmp_path}' '{place}' && '{sys.executable}' -c '{asks}' '{place}'"
    assert subprocess.check_output(["unshare", "-rm", "sh", "-c", line], text=True) == "True\n"


@pytest.mark.parametrize(("make", "fmt"), [(load_model, "hf"), (map_model, "hf-padded"), (load_model, "gguf")])
def test_a_weight_that_float16_does_not_hold_is_refused(tiny, tmp_path, make, fmt):
    model = tiny("llama", torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[-1, 0] = 1e6
    model.save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    dense = make(resolve(str(tmp_path / "model")), torch.float16, "cpu")
    with pytest.raises(
        UserError,
        match=r"layers\.1\.mlp\.up_proj\.weight has a weight that is NaN or above 65,504, .* bfloat16 or float32",
    ):
        written(dense, PLANS["alike"], tmp_path / "out", fmt, 10**9)


@pytest.mark.parametrize("variant", ["llama"])
def test_speed_of_a_model_that_is_not_in_memory_is_refused(folder, tmp_path):
    mapped = map_model(resolve(str(folder)), torch.float32, "cpu")
    plan = plan_of(mapped.model, mapped.family, *PLANS["alike"])
    with pytest.raises(UserError, match=r"speed.* weights of model were left in their files"):
        save_checkpoint(mapped, Recipe(plan), ABOUT, tmp_path / "small", measure_speed=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("fmt", ["hf", "hf-padded", "gguf"])
def test_a_model_in_memory_is_saved_without_a_copy_of_it(fmt, tmp_path):
    pruned = tune_prune.open("tiny-llama", device="cpu").prune("magnitude", ratio=0.2)
    model = pruned.dense.loaded().model  # as after a trial
    with LimitedMemory() as memory:
        pruned.save(tmp_path / "whole", fmt)
    assert pruned.dense._loaded.residency.weights is None
    assert memory.peak < 1.5 * sum(p.nbytes for p in model.parameters())
    pruned.dense._loaded = None
    pruned.save(tmp_path / "streamed", fmt)
    assert pruned.dense._loaded.residency.from_files
    whole, streamed = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "streamed")
    )
    assert streamed == whole
    with (
        pytest.raises(OutOfMemory, match="saving of tiny-llama does not fit into memory, even streamed"),
        LimitedMemory(9),
    ):
        pruned.save(tmp_path / "none", fmt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["streamed", "whole"]
