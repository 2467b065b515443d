"""Write a pruned model into a folder that loads elsewhere, whole or not at all.

    hf         safetensors with the family's tensor names. Layers of one width: the family's own model type, no code needed.
               Else an own model type, per_layer_config and the class files of models/pruned.
    vllm       as hf, with a KV group of zeros where a layer has lost its attention: vLLM needs one in each
    hf-padded  the family's own model type, every layer padded with zeros to the widest
    gguf       one file for llama.cpp (gguf_file)

Beside the weights: tokenizer, generation config, licence texts, manifest and model card.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import yaml

from tune_prune import __version__
from tune_prune.checkpoint import card, generation_speed, layers, licenses, manifest, quantisation
from tune_prune.checkpoint.layers import sizes
from tune_prune.checkpoint.manifest import SCHEMA_VERSION, Base, Format, Manifest, Provenance, provenance
from tune_prune.core.errors import UserError
from tune_prune.core.files import check_writable
from tune_prune.core.kinds import plain
from tune_prune.core.temporary import clear_killed, is_mount_point, renamed_at_the_end
from tune_prune.models import fused, hub, loading, weight_files
from tune_prune.models.catalog import ModelSource
from tune_prune.models.runner.layer_weights import first_non_finite
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import Sketch
from tune_prune.trial.recipe import Recipe

# Of a model card's metadata (https://huggingface.co/docs/hub/model-cards); name and link describe a license "other".
LICENSE_KEYS = ("license", "license_name", "license_link")
LICENSE_FILES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
# By which AutoProcessor makes inputs of images and text.
PROCESSOR_FILES = ("*processor_config.json", "chat_template.json")
SHARD_BYTES = 5 * 10**9
# What may be in the folder of a checkpoint: nothing else is replaced together with it.
WRITTEN = (
    manifest.MANIFEST, "README.md", "layers.png", "config.json", "generation_config.json", "*_tune_prune.py",
    "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "*-pruned*.gguf", *LICENSE_FILES,
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model", "*.tiktoken",
    "chat_template.*", "additional_chat_templates", *PROCESSOR_FILES,
)  # fmt: skip
RECORDED_PACKAGES = ("torch", "transformers", "safetensors", "numpy")


def save_checkpoint(
    dense: loading.LoadedModel,
    recipe: Recipe,
    about: Provenance,
    folder: Path,
    fmt: Format = "hf",
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    measure_speed: bool = False,
    quantize: str | None = None,
) -> Manifest:
    """Prune `dense` by `recipe` and write the result to `folder` in the dtype of `dense`, one tensor in memory at a time; with
    `quantize` (a kind of checkpoint.quantisation) in fewer bits.

    Everything is written to a folder beside it, which is renamed at the end. Raises UserError where `folder` exists (with
    `overwrite`: unless it is a checkpoint of tune_prune), where the plan is for another model, or where the format cannot
    hold the model.
    """
    clear_killed(folder)
    check_folder(folder, overwrite)
    if dense.residency.weights is not None and measure_speed:
        raise UserError(
            f"speed is measured on a model that is in memory, but the weights of {dense.source.label} were left in their files; "
            "leave that out, or load the model"
        )
    plan, family = recipe.plan, dense.family
    layers.check_plan(plan, dense)
    with renamed_at_the_end(folder, overwrite) as work:
        whole = dense.around is not None and fmt != "gguf"  # which holds the language model alone
        copy_files(dense.source, work, LICENSE_FILES + PROCESSOR_FILES * whole)  # first, as a network may fail
        pruned, dropped = layers.compact(recipe.sketch(dense), family)
        _check_float16(dense, pruned)
        around = dense.geometry.around_params * whole
        rows = {"dense": sizes(dense.model, family, around), "pruned": sizes(pruned.model, family, around)}
        notes = recipe.notes(about.config)
        if fmt == "gguf":
            saved = pruned
            notes += _write_gguf(dense, saved, work, quantize)
        else:
            saved = layers.as_saved(pruned, dense.model, family, dense.geometry, fmt)
            write_hf(dense, saved, work, shard_bytes, quantize)
            stored = sizes(saved.model, family, around)
            if fmt == "hf-padded" or stored != rows["pruned"]:
                rows["padded"] = stored
            notes += _filled_blocks(plan, dropped, layers.least_widths(dense.model.config, dense.family, fmt))
            notes += quantisation.NOTES.get(quantize or "", ())
        models = {"dense": dense.model, [*rows][-1]: saved.in_memory()} if measure_speed else {}
        weight_paths = [path for path in sorted(work.iterdir()) if path.suffix in (".safetensors", ".gguf")]
        written = Manifest(
            **provenance(about),
            format=fmt,
            base=_base(dense),
            plan=plan,
            structure=plan.structure,
            dropped_layers=tuple(dropped),
            sizes=rows,
            params=rows.get("padded", rows["pruned"]).params,
            speed=generation_speed.measure(models) if models else None,
            quantization=quantisation.name_of(quantize),
            notes=notes,
            files={path.name: manifest.weight_file(path) for path in weight_paths},
            versions={"tune_prune": __version__}
            | {name: importlib.metadata.version(name) for name in RECORDED_PACKAGES},
            created=datetime.now(UTC).date().isoformat(),
            dtype=str(dense.model.dtype).removeprefix("torch."),
            shard_bytes=shard_bytes,
            schema_version=SCHEMA_VERSION,
        )
        if (terms := licenses.TERMS.get(written.base.license.get("license", ""))) and not any(work.glob("NOTICE*")):
            (work / "NOTICE").write_text(f"{terms.notice}\n", encoding="utf-8")
        manifest.write(work, written)
        card.write_card(work, written, dense.geometry)
        check_folder(folder, overwrite)  # what somebody has put there meanwhile
    return written


def _filled_blocks(plan: PruningPlan, dropped: Sequence[int], least: tuple[int, int]) -> tuple[str, ...]:
    """Return notes that name the layers, numbered as in the dense model, in which zeros stand in for a lost block."""
    notes = []
    blocks = (("a KV group", "attention", plan.kept_groups), ("an MLP channel", "MLP", plan.kept_channels))
    for (part, block, kept), count in zip(blocks, least, strict=True):
        filled = [str(layer) for layer, left in enumerate(kept) if count and not left and layer not in dropped]
        if filled:
            named = f"layer {filled[0]} has" if len(filled) == 1 else f"layers {', '.join(filled)} have"
            notes.append(f"{named} {part} of zeros in place of the lost {block}, as vLLM needs one in every layer")
    return tuple(notes)


def _check_float16(dense: loading.LoadedModel, pruned: Sketch) -> None:
    """Raise UserError where float16, which alone of the dtypes holds less than what the base model's files may, is too narrow."""
    if dense.model.dtype == torch.float16 and (name := first_non_finite(pruned.weights)):
        raise UserError(
            f"{name} has a weight that is NaN or above 65,504, the most of float16; save with --dtype bfloat16 or float32"
        )


def shard_bytes_of(gigabytes: float) -> int:
    """Return the bytes of the largest weight file. Raises UserError where that is no size of one."""
    gigabytes = plain(gigabytes)
    if type(gigabytes) not in (int, float) or not 0.0001 <= gigabytes <= 1e6:
        raise UserError(f"shard_gb is {gigabytes!r}; it must be a number of gigabytes from 0.0001 to 1e6, e.g. 5")
    return round(gigabytes * 1e9)


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise UserError unless a checkpoint may be written to `folder`; creates nothing."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"--output {folder} exists and is not a folder; name one that does not exist yet")
    if not folder.name or is_mount_point(folder):
        raise UserError(
            f"--output {folder} is a mount point, which cannot be replaced as a whole; name a folder in it, e.g. {folder / 'NAME'}"
        )
    try:
        check_writable(folder.parent)
    except OSError as error:
        raise UserError(f"--output {folder} cannot be made ({error.strerror or error}); name another place") from error
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise UserError(f"--output {folder} exists; name another folder, or replace it with --overwrite")
    if not (folder / manifest.MANIFEST).is_file():
        raise UserError(
            f"--output {folder} has no {manifest.MANIFEST}, so it is not a checkpoint of tune_prune and is not replaced; name "
            "another folder"
        )
    names = sorted(path.name for path in folder.iterdir())
    if others := [name for name in names if not any(fnmatch(name, pattern) for pattern in WRITTEN)]:
        raise UserError(
            f"--output {folder} holds {others[0]} beside the checkpoint, which would be gone with it; move that elsewhere, or name "
            "another folder"
        )


def write_hf(
    dense: loading.LoadedModel, saved: Sketch, folder: Path, shard_bytes: int, kind: str | None = None
) -> None:
    """Write config, class files, weights and tokenizer of a model (of layers.as_saved) to `folder`, inside the wrapper that the
    dense model came in; with `kind`, one of quantisation.FOLDER_KINDS, its matrices in fewer bits. `dense`: what it was made from,
    which need not have its weights."""
    saved = Sketch(*fused.put_together(saved.model, saved.weights, dense.family))
    language_model = saved.model
    called: Mapping[str, str] = {}
    if dense.around is not None:
        saved = layers.surrounded(saved, dense.around)
        if type(saved.model) is type(dense.around.model):  # else its names are those of its class
            called = dense.around.stored
    saved.model.save_pretrained(folder, state_dict={})  # takes the class files along where there are any
    if kind is None:
        weight_files.write_weights(folder, saved.model, saved.weights, shard_bytes, called=called)
    else:
        from tune_prune.checkpoint import quantised_folder  # its library is needed for these kinds only

        stored = quantised_folder.quantise(saved.model, saved.weights, kind)
        weight_files.write_weights(folder, saved.model, stored.weights, shard_bytes, stored.tensors)
        _change_json(folder / "config.json", {"quantization_config": stored.config})
    if type(language_model) is type(dense.model) and not dense.family.own_heads:  # Gemma 4 has no older names
        _add_older_names(folder / "config.json")
    if dense.family.model_type == "granitemoehybrid":
        older = {"linear_attention": "mamba", "full_attention": "attention"}  # before transformers 5.16, and on the hub
        kinds = [older.get(kind, kind) for kind in language_model.config.layer_types]
        _change_json(folder / "config.json", {"layer_types": kinds})
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / "config.json").stat().st_mode)  # safetensors writes them for their owner alone
    _write_tokenizer(dense, folder, stock="auto_map" not in saved.model.config.to_dict())
    again = loading.meta_model(saved.model.config)
    if kind is None:
        weight_files.check_weights(folder, again)


def _change_json(path: Path, changes: dict[str, Any]) -> None:
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _add_older_names(path: Path) -> None:
    """State what transformers 5 has renamed under its older names, too: whatever reads the family's configs without it would
    take rope_theta, or the part of a head that is rotated, for its default and go silently wrong. transformers 5 reads both."""
    values = json.loads(path.read_text(encoding="utf-8"))
    changes = {"torch_dtype": values["dtype"], **_older_rope(values)}
    if "text_config" in values:
        changes["text_config"] = values["text_config"] | _older_rope(values["text_config"])
    if "qwen3_moe" in values["model_type"]:
        changes["num_experts"] = values["num_local_experts"]
    if values["model_type"] == "lfm2":
        changes["block_ff_dim"] = values["intermediate_size"]
    _change_json(path, changes)


def _older_rope(values: dict[str, Any]) -> dict[str, Any]:
    kinds = values.get("rope_parameters") or {}
    rope = dict(kinds.get("full_attention", kinds))  # Gemma 3 has two
    if "rope_theta" not in rope:
        return {}
    older = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    older["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    local = {"rope_local_base_freq": kinds["sliding_attention"]["rope_theta"]} if "sliding_attention" in kinds else {}
    return older | local


def _write_tokenizer(dense: loading.LoadedModel, folder: Path, stock: bool) -> None:
    """Write the base model's tokenizer as it came. An own model type drops a reference to code that it may carry: AutoTokenizer
    would look for that code here."""
    tokenizer = loading.original_tokenizer(dense.source)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    if not stock:
        values.pop("auto_map", None)
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"  # its name in transformers 4, which 5 knows, too
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    original, path = _own_tokenizer_file(dense.source), folder / "tokenizer.json"
    if original is None or not path.is_file():
        return
    # transformers 5 has written what it made of that file, for a class that may know none of its splits; whatever else reads the
    # checkpoint needs the file itself. Where 5 would make something else of it here, as the base states a part elsewhere, it stays.
    made = path.read_bytes()
    shutil.copyfile(original, path)
    again = loading.original_tokenizer(ModelSource(folder.name, str(folder), "folder"))
    if again.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        path.write_bytes(made)


def _own_tokenizer_file(source: ModelSource) -> Path | None:
    """Return the tokenizer.json that came with the model; None where none did: transformers has filled the folder of a GGUF
    file."""
    if source.kind == "hub":
        cached = huggingface_hub.try_to_load_from_cache(source.location, "tokenizer.json", revision=source.revision)
        return Path(cached) if isinstance(cached, str) else None
    path = Path(source.location) / "tokenizer.json"
    return path if source.kind != "gguf" and path.is_file() else None


def _write_gguf(dense: loading.LoadedModel, pruned: Sketch, folder: Path, quantize: str | None) -> tuple[str, ...]:
    from tune_prune.checkpoint.gguf import gguf_file  # its library is needed for this format only

    tokenizer = folder / "tokenizer"
    _write_tokenizer(dense, tokenizer, stock=True)
    name = f"{dense.source.label}-pruned"
    file = folder / (f"{name}.gguf" if quantize is None else f"{name}-{quantize.upper()}.gguf")
    try:
        return gguf_file.write_gguf(pruned, dense.family, tokenizer, file, dense.model.dtype, name, quantize)
    finally:
        shutil.rmtree(tokenizer)


def _base(dense: loading.LoadedModel) -> Base:
    source = dense.source
    name = source.label if source.file is None else Path(source.name).name
    return Base(
        model=source.location if source.kind == "hub" else name,
        label=source.label,
        revision=hub.commit(source.location, source.revision) if source.kind == "hub" else None,
        fingerprint=loading.model_fingerprint(source, dense.model.config),
        model_type=dense.family.model_type,
        params=dense.geometry.total_params,
        layers=dense.geometry.num_layers,
        license=base_license(source),
        gguf=source.gguf,
    )


def base_license(source: ModelSource) -> dict[str, str]:
    """Return the LICENSE_KEYS that the model card of `source` states, e.g. {"license": "apache-2.0"}: a pruned model is published
    under its base model's licence. Empty where that is unknown: no card, none or several in the card, or a hub that cannot be
    reached and has not been before. A list of one text is that text. Links are absolute for models of the hub."""
    if source.kind == "embedded":
        return {"license": "apache-2.0"}  # tune_prune's own
    try:
        if source.kind == "hub":
            path = Path(huggingface_hub.hf_hub_download(source.location, card.CARD, revision=source.revision))
        else:
            path = Path(source.location) / card.CARD
        stated = (path.is_file() and huggingface_hub.metadata_load(path)) or {}
    except (OSError, ValueError, yaml.YAMLError):  # no such file, no network, no valid metadata
        return {}
    alone = {key: text[0] if isinstance(text, list) and len(text) == 1 else text for key, text in stated.items()}
    entries = {key: alone[key] for key in LICENSE_KEYS if isinstance(alone.get(key), str) and alone[key]}
    if source.kind == "hub" and "license_link" in entries and "://" not in entries["license_link"]:
        page = f"https://huggingface.co/{source.location}/blob/{source.revision or 'main'}"
        entries["license_link"] = f"{page}/{entries['license_link']}"
    return entries


def copy_files(source: ModelSource, folder: Path, patterns: Sequence[str]) -> None:
    """Copy files beside the weights of a folder's or a hub's model, such as licence texts, into the checkpoint `folder`; those of
    the hub as far as it can be reached."""
    if source.kind == "hub":
        try:
            revision = (
                hub.commit(source.location, source.revision) or source.revision
            )  # else the cache's main branch moves
            place = huggingface_hub.snapshot_download(source.location, revision=revision, allow_patterns=list(patterns))
        except (OSError, ValueError):  # no network, and not cached before
            return
    elif source.kind == "folder":
        place = source.location
    else:
        return
    for pattern in patterns:
        for path in Path(place).glob(pattern):
            if path.is_file() and path.suffix != ".py":  # nor a folder LICENSES/, as some projects have it
                shutil.copyfile(path, folder / path.name)
