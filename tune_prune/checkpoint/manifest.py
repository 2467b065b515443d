"""The manifest of a checkpoint, tune_prune.json: what was pruned, how, which weights came of it, and what was measured.

A manifest is read strictly, and `check` holds it against the config and the weight files beside it, so that no number is
printed for weights that it does not belong to. A checkpoint loads without one, too: config and weights say all that it
takes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PretrainedConfig

from tune_prune import __version__
from tune_prune.checkpoint.fields import Fields
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.models import loading, weight_files
from tune_prune.models.registration import PREFIX
from tune_prune.pruning.groups import PruningPlan

MANIFEST = "tune_prune.json"
SCHEMA_VERSION = 1
FORMATS = ("hf", "hf-padded", "gguf")

_BASE_TEXTS = ("model", "label", "fingerprint", "model_type")
_SIZES = ("params", "weight_bytes", "kv_bytes_per_token", "macs_per_token")
_AGAIN = f"copy the whole checkpoint again, or remove {MANIFEST} to use the files as they are"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What tune_prune.json says, as plain data. Layers are numbered as in the dense model."""

    format: str  # hf: the pruned layers as they are; hf-padded: widened with zeros to one width; gguf: for llama.cpp
    base: dict[str, Any]  # the dense model: model, label, revision, fingerprint, model_type, params, layers
    config: dict[str, Any]  # PruningConfig
    plan: dict[str, Any]  # PruningPlan.to_dict()
    dropped_layers: list[int]  # that lost both parts and are not in the checkpoint
    params: int  # of the model in this folder, padding included; tied embeddings count once
    files: dict[str, dict[str, Any]]  # weight file -> {bytes, sha256}
    sizes: dict[str, dict[str, int]]  # "dense", "pruned" -> checkpoint.sizes.Sizes
    versions: dict[str, str]  # package -> version
    created: str  # ISO date
    source: dict[str, Any] | None = None  # ModelRun of the search that measured `metrics`
    metrics: dict[str, float | None] | None = None  # as recorded by the search (records.py); None: not measured
    measured_on: dict[str, Any] | None = None  # what `metrics` were measured on, by content: context.measured_on
    baseline: dict[str, float | None] | None = None  # the same of the dense model
    speed: dict[str, Any] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)  # what whoever uses the files should know
    schema_version: int = SCHEMA_VERSION

    @cached_property
    def pruning_plan(self) -> PruningPlan:
        return PruningPlan.from_dict(self.plan)

    @property
    def pruning_config(self) -> PruningConfig:
        return PruningConfig.from_dict(self.config)

    @property
    def run(self) -> ModelRun | None:
        """What the search measured with; None where the numbers are not a search's."""
        return None if self.source is None else run_from_dict(self.source)

    @property
    def base_name(self) -> str:
        """The dense model as it was named on the command line: alias, hub id, embedded model or absolute folder."""
        return self.base["model"] if self.source is None else self.source["model"]

    @property
    def saved_layers(self) -> tuple[int, ...]:
        """The dense model's number of each layer of the checkpoint."""
        return tuple(layer for layer in range(self.base["layers"]) if layer not in self.dropped_layers)

    @property
    def removed_fraction(self) -> float:
        return self.pruning_plan.removed_fraction

    def to_dict(self) -> dict[str, Any]:
        """For `to_json`. `structure` is the plan's digest: a plan that was changed by hand is noticed by it."""
        return asdict(self) | {"structure": self.pruning_plan.structure}

    @classmethod
    def from_dict(cls, values: Any) -> Manifest:
        """The inverse of `to_dict`, also after `to_json`. Raises ValueError that names the field; unknown ones are ignored."""
        top = Fields(values)
        version = top.whole("schema_version", low=1)
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"schema_version is {version}; tune_prune {__version__} reads {SCHEMA_VERSION}, install a newer one"
            )
        if top.text("format") not in FORMATS:
            raise top.wrong("format", f"one of {', '.join(FORMATS)}")
        base = _base(top.object("base"))
        dropped = top.indices("dropped_layers", base["layers"])
        plan = _plan(top, base)
        for layer in dropped:
            if plan.kept_groups[layer] or plan.kept_channels[layer]:
                raise ValueError(f"dropped_layers names layer {layer}, of which plan.layers[{layer}] keeps a part")
        source, measured_on = top.object_or_none("source"), top.object_or_none("measured_on")
        if source is not None:
            run_from_dict(source.values)
        if measured_on is not None:
            measured_on.whole("protocol")
            measured_on.text("text")
            measured_on.object("tasks").texts()
        metrics, baseline, speed = (top.object_or_none(field) for field in ("metrics", "baseline", "speed"))
        return cls(
            format=top.text("format"),
            base=base,
            config=_config(top.object("config")),
            plan=plan.to_dict(),
            dropped_layers=list(dropped),
            params=top.whole("params", low=1),
            files=_files(top.object("files")),
            sizes=_sizes(top.object("sizes")),
            versions=top.object("versions").texts(),
            created=top.date("created"),
            source=None if source is None else dict(source.values),
            metrics=None if metrics is None else metrics.numbers(),
            measured_on=None if measured_on is None else dict(measured_on.values),
            baseline=None if baseline is None else baseline.numbers(),
            speed=None if speed is None else dict(speed.values),
            notes=top.sentences("notes"),
            schema_version=version,
        )


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `folder`, whole or not at all. Raises ValueError for one that `read` would refuse."""
    text = to_json(manifest.to_dict())
    Manifest.from_dict(json.loads(text))
    atomic_write_text(folder / MANIFEST, text)


def read(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint folder; None where there is none. Raises UserError for a damaged one, with file and
    field."""
    path = folder / MANIFEST
    try:
        return Manifest.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        cause = " ".join(str(error).split())
        raise UserError(
            f"{path} is damaged: {cause}; restore it from a copy, or remove it to use the files as they are"
        ) from error


def file_entry(path: Path) -> dict[str, Any]:
    """What `files` says of a weight file: its size, and the digest of all its bytes (about a second per GB)."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def check(folder: Path, manifest: Manifest, config: PretrainedConfig) -> None:
    """Raise UserError unless `config` and the weight files of `folder` are those that the manifest describes.

    Cheap comparisons come first. Weight files of every size are hashed whole: a measurement takes longer, and a changed byte
    in a large file is as wrong as in a small one.
    """
    if manifest.format == "gguf":
        raise UserError(
            f"{folder} holds a checkpoint for llama.cpp (GGUF); give one in Hugging Face format (hf or hf-padded)"
        )
    _check_config(folder, manifest, config)
    for path in weight_files.files(folder):
        if path.name not in manifest.files:
            raise _differs(folder, f"{path.name} would be loaded, which the manifest does not list")
    for name, recorded in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise _differs(folder, f"weight file {name} is missing")
        size = path.stat().st_size
        if size != recorded["bytes"]:
            raise _differs(folder, f"{name} has {size:,} bytes, {recorded['bytes']:,} by the manifest")
    for name, recorded in manifest.files.items():
        if file_entry(folder / name) != recorded:
            raise _differs(folder, f"the content of {name} has changed (its SHA-256 is another one)")


def _check_config(folder: Path, manifest: Manifest, config: PretrainedConfig) -> None:
    dense, plan = manifest.base["model_type"], manifest.pruning_plan
    padded = manifest.format == "hf-padded"
    if config.model_type not in ((dense,) if padded else (PREFIX + dense, dense)):
        raise _differs(
            folder, f"config.json is that of a {config.model_type} model, the manifest that of a pruned {dense} model"
        )
    _, geometry = loading.config_geometry(config)
    if geometry.num_layers != len(manifest.saved_layers):
        raise _differs(
            folder, f"config.json has {geometry.num_layers} layers, the manifest {len(manifest.saved_layers)}"
        )
    widths = zip(manifest.saved_layers, geometry.kv_heads, geometry.mlp_width, strict=True)
    for index, (layer, heads, width) in enumerate(widths):
        kept = len(plan.kept_groups[layer]), len(plan.kept_channels[layer])
        if (heads, width) != kept and not (padded and heads >= kept[0] and width >= kept[1]):
            raise _differs(
                folder,
                f"layer {index} has {heads} KV heads and {width} MLP channels by config.json, {kept[0]} and {kept[1]} by the "
                "manifest",
            )
    if geometry.total_params != manifest.params:
        raise _differs(
            folder, f"config.json makes {geometry.total_params:,} parameters, the manifest {manifest.params:,}"
        )


def _differs(folder: Path, what: str) -> UserError:
    return UserError(f"checkpoint {folder} is not the one that its {MANIFEST} describes: {what}; {_AGAIN}")


def _base(base: Fields) -> dict[str, Any]:
    values: dict[str, Any] = {field: base.text(field) for field in _BASE_TEXTS}
    values["revision"] = base.text_or_none("revision")
    return values | {"params": base.whole("params", low=1), "layers": base.whole("layers", low=1)}


def _config(config: Fields) -> dict[str, Any]:
    config.text("method")
    for field in ("taylor_seq_len", "taylor_num_samples", "pruning_ratio"):
        config.any(field)
    PruningConfig.from_dict(dict(config.values))  # a UserError is a ValueError with the field's name
    return dict(config.values)


def _plan(top: Fields, base: dict[str, Any]) -> PruningPlan:
    """The plan, found to be one for the base model and to have the recorded structure."""
    plan = top.object("plan")
    layers = plan.items("layers")
    if len(layers) != base["layers"]:
        raise ValueError(f"plan.layers has {len(layers)} layers, base.layers says {base['layers']}")
    result = PruningPlan(
        kept_groups=tuple(layer.indices("kept_groups") for layer in layers),
        kept_channels=tuple(layer.indices("kept_channels") for layer in layers),
        target_params=plan.whole("target_params"),
        removed_params=plan.whole("removed_params"),
        total_params=plan.whole("total_params", low=1),
    )
    if result.total_params != base["params"] or result.removed_params >= result.total_params:
        raise ValueError(
            f"plan removes {result.removed_params:,} of {result.total_params:,} parameters, base.params says {base['params']:,}"
        )
    if result.structure != top.text("structure"):
        raise ValueError("plan.layers keeps other groups than those whose digest is in structure")
    return result


def _files(files: Fields) -> dict[str, dict[str, Any]]:
    entries = {}
    for name in files.values:
        entry = files.object(name)
        if Path(name).name != name or name.startswith("."):
            raise ValueError(f"files names {name!r}; it must be the plain name of a file of the checkpoint")
        entries[name] = {"bytes": entry.whole("bytes"), "sha256": entry.text("sha256")}
    if not entries:
        raise ValueError("files is empty; it must name the weight files")
    return entries


def _sizes(sizes: Fields) -> dict[str, dict[str, int]]:
    rows = {name: sizes.object(name) for name in {"dense", "pruned"} | set(sizes.values)}
    return {name: {field: row.whole(field) for field in _SIZES} for name, row in rows.items()}


def run_from_dict(values: Mapping[str, Any]) -> ModelRun:
    """The inverse of ModelRun.to_dict, also after `to_json`. Raises ValueError that names the field."""
    source = Fields(values, "source")
    protocol = source.object("protocol")
    tasks, slices = protocol.any("tasks"), protocol.any("slices")
    if not isinstance(tasks, (list, tuple)) or not all(isinstance(task, str) for task in tasks):
        raise protocol.wrong("tasks", "a list of texts")
    if (
        not isinstance(slices, (list, tuple))
        or not slices
        or not all(isinstance(part, (int, float)) for part in slices)
    ):
        raise protocol.wrong("slices", "a list of numbers")
    limit = None if protocol.any("limit") is None else protocol.whole("limit", low=1)
    return ModelRun(
        model=source.text("model"),
        label=source.text("label"),
        revision=source.text_or_none("revision"),
        calibration=source.text("calibration"),
        data_dir=source.text_or_none("data_dir"),
        protocol=EvaluationProtocol(
            tuple(tasks), limit, tuple(slices), protocol.whole("perplexity_window", low=2), protocol.whole("seed")
        ),
        seed=source.whole("seed"),
        dtype=source.text("dtype"),
    )
