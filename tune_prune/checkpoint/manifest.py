"""The manifest of a checkpoint, tune_prune.json: what was pruned, how, which weights came of it, and what was measured.

A manifest is read strictly, and `check_checkpoint` holds it against the config and the weight files beside it, so that no number is
printed for weights that it does not belong to. A checkpoint loads without one, too: config and weights say all that it
takes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, PlainValidator, TypeAdapter
from pydantic_core import PydanticCustomError
from transformers.configuration_utils import PretrainedConfig

from tune_prune import __version__
from tune_prune.checkpoint.generation_speed import GenerationSpeed
from tune_prune.checkpoint.sizes import Sizes
from tune_prune.core import terminal
from tune_prune.core.config import REFITTED, TRAINED, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.hyperparameters import renamed
from tune_prune.core.validation import Count, Indices, Number, Positive, Text, validated
from tune_prune.data.sources import MeasuredOn
from tune_prune.models import loading, weight_files
from tune_prune.models.gguf.files import GgufOrigin
from tune_prune.models.registration import PREFIX
from tune_prune.pruning.groups import PruningPlan

MANIFEST = "tune_prune.json"
SCHEMA_VERSION = 1
IDS_ALONE = "it takes and gives token ids, not text"  # the end of a note of a file without a tokenizer
_PIECE_BYTES = 2**20
Format = Literal["hf", "hf-padded", "gguf"]

_AGAIN = f"copy the whole checkpoint again, or remove {MANIFEST} to use the files as they are"


def _date(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise PydanticCustomError("date", "Input should be an ISO date such as 2025-01-31") from None
    return text


@dataclass(frozen=True)
class Base:
    """The dense model that was pruned."""

    model: Text  # hub id, name of a GGUF file or of its package, or label
    label: Text
    revision: Text | None  # commit of a hub model
    fingerprint: Text
    model_type: Text
    params: Positive
    layers: Positive
    license: dict[str, Text] = field(default_factory=dict)  # see checkpoint/license.py; empty: unknown
    gguf: GgufOrigin | None = None  # the file that its weights were read from, if it was one


@dataclass(frozen=True)
class WeightFile:
    bytes: Count
    sha256: Text


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What tune_prune.json says. Layers are numbered as in the dense model. Raises ValueError where its parts contradict."""

    format: Format  # hf: the pruned layers as they are; hf-padded: widened with zeros to one width; gguf: for llama.cpp
    base: Base
    config: Annotated[PruningConfig, BeforeValidator(renamed), PlainSerializer(PruningConfig.to_dict)]
    plan: Annotated[PruningPlan, PlainValidator(PruningPlan.from_dict), PlainSerializer(PruningPlan.to_dict)]
    structure: Text  # the plan's digest: a plan that was changed by hand is noticed by it
    dropped_layers: Indices  # that lost both parts and are not in the checkpoint
    params: Positive  # of the model in this folder, padding included; tied embeddings count once
    files: dict[str, WeightFile]
    sizes: dict[str, Sizes]  # "dense", "pruned" and, where zeros were added, "padded"
    versions: dict[str, Text]  # package -> version
    created: Annotated[str, AfterValidator(_date)]  # ISO date
    source: Annotated[ModelRun, PlainSerializer(ModelRun.to_dict)] | None = (
        None  # of the search that measured `metrics`
    )
    metrics: Mapping[str, Number | None] | None = None  # as recorded by the search (records.py); None: not measured
    measured_on: MeasuredOn | None = None  # what `metrics` were measured on
    baseline: Mapping[str, Number | None] | None = None  # the same of the dense model
    speed: dict[str, GenerationSpeed] | None = None
    notes: list[str] = field(default_factory=list)  # caveats for users of the files, in sentences
    schema_version: Positive

    def __post_init__(self) -> None:
        plan, base = self.plan, self.base
        if len(plan.kept_groups) != base.layers:
            raise ValueError(f"plan.layers has {len(plan.kept_groups)} layers, base.layers says {base.layers}")
        if plan.total_params != base.params or plan.removed_params >= plan.total_params:
            raise ValueError(
                f"plan removes {plan.removed_params:,} of {plan.total_params:,} parameters, base.params says {base.params:,}"
            )
        if plan.structure != self.structure:
            raise ValueError("structure is not the digest of the groups that plan.layers keeps")
        for layer in self.dropped_layers:
            if layer >= base.layers:
                raise ValueError(f"dropped_layers names layer {layer}, base.layers says {base.layers}")
            if plan.kept_groups[layer] or plan.kept_channels[layer]:
                raise ValueError(f"dropped_layers names layer {layer}, of which plan.layers[{layer}] keeps a part")
        for name in ("dense", "pruned"):
            if name not in self.sizes:
                raise ValueError(f"sizes.{name} is missing")
        for name in self.files:
            if Path(name).name != name or name.startswith("."):
                raise ValueError(f"files names {name!r}; it must be the plain name of a file of the checkpoint")
        if not self.files:
            raise ValueError("files is empty; it must name the weight files")

    @property
    def for_text(self) -> bool:
        """Whether programs can give the checkpoint text."""
        return not any(note.endswith(IDS_ALONE) for note in self.notes)

    @property
    def refitted(self) -> bool:
        return self._noted(REFITTED, "were refitted on calibration text")

    @property
    def trained(self) -> bool:
        return self._noted(TRAINED, "was trained towards the dense model's predictions")

    def _noted(self, *words: str) -> bool:
        """Whether a note has one of them: as it is written, or as older versions have."""
        return any(word in note for word in words for note in self.notes)

    @property
    def base_name(self) -> str:
        """The dense model as it was named on the command line: alias, hub id, embedded model or absolute folder."""
        return self.base.model if self.source is None else self.source.model

    @property
    def saved_layers(self) -> tuple[int, ...]:
        """The dense model's number of each layer of the checkpoint."""
        return tuple(layer for layer in range(self.base.layers) if layer not in self.dropped_layers)

    @property
    def saved_sizes(self) -> Sizes:
        """Of the model in this folder."""
        return self.sizes.get("padded", self.sizes["pruned"])

    def to_dict(self) -> dict[str, Any]:
        """For `to_json`."""
        return TypeAdapter(Manifest).dump_python(self)

    @classmethod
    def from_dict(cls, values: Any) -> Manifest:
        """The inverse of `to_dict`, also after `to_json`. Raises ValueError that names the field; unknown ones are ignored."""
        version = values.get("schema_version") if isinstance(values, Mapping) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise ValueError(
                f"schema_version is {version}; tune_prune {__version__} reads {SCHEMA_VERSION}, install a newer one"
            )
        return validated(cls, values)


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
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); make it readable") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        cause = " ".join(str(error).split())
        raise UserError(
            f"{path} is damaged: {cause}; restore it from a copy, or remove it to use the files as they are"
        ) from error


def weight_file(path: Path) -> WeightFile:
    """What `files` says of a weight file: its size, and the digest of all its bytes (about a second per GB)."""
    size, state = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file, terminal.step("checksum", lambda: size, "bytes") as advance:
        while piece := file.read(_PIECE_BYTES):
            state.update(piece)
            advance(len(piece))
    return WeightFile(size, state.hexdigest())


def check_checkpoint(folder: Path, manifest: Manifest, config: PretrainedConfig, file: Path | None = None) -> None:
    """Raise UserError unless `config` and the weight files of `folder` are those that the manifest describes. `file`: the GGUF file
    that `config` was made from, if it was one.

    Cheap comparisons come first. Weight files of every size are hashed whole: a measurement takes longer, and a changed byte
    in a large file is as wrong as in a small one.
    """
    if manifest.format == "gguf" and file is None:
        files = ", ".join(str(folder / name) for name in manifest.files)
        raise UserError(f"{folder} holds a checkpoint for llama.cpp; name its GGUF file itself: --model {files}")
    _check_config(folder, manifest, config, file.name if file else "config.json")
    for path in weight_files.files(folder) if file is None else []:
        if path.name not in manifest.files:
            raise _differs(folder, f"{path.name} would be loaded, which the manifest does not list")
    for name, recorded in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise _differs(folder, f"weight file {name} is missing")
        size = path.stat().st_size
        if size != recorded.bytes:
            raise _differs(folder, f"{name} has {size:,} bytes, {recorded.bytes:,} by the manifest")
    for name, recorded in manifest.files.items():
        if weight_file(folder / name) != recorded:
            raise _differs(folder, f"the content of {name} has changed (its SHA-256 differs)")


def _check_config(folder: Path, manifest: Manifest, config: PretrainedConfig, where: str) -> None:
    dense, plan = manifest.base.model_type, manifest.plan
    padded = manifest.format == "hf-padded"
    known = (dense,) if padded else (PREFIX + dense, dense)
    if config.model_type not in known and manifest.format != "gguf":  # where Mistral models are llama's
        raise _differs(
            folder, f"{where} is that of a {config.model_type} model, the manifest that of a pruned {dense} model"
        )
    _, geometry = loading.config_geometry(config)
    if geometry.num_layers != len(manifest.saved_layers):
        raise _differs(folder, f"{where} has {geometry.num_layers} layers, the manifest {len(manifest.saved_layers)}")
    widths = zip(manifest.saved_layers, geometry.kv_heads, geometry.mlp_width, strict=True)
    for index, (layer, heads, width) in enumerate(widths):
        kept = len(plan.kept_groups[layer]), len(plan.kept_channels[layer])
        if (heads, width) != kept and not (padded and heads >= kept[0] and width >= kept[1]):
            raise _differs(
                folder,
                f"layer {index} has {heads} KV heads and {width} MLP channels by {where}, {kept[0]} and {kept[1]} by the "
                "manifest",
            )
    if geometry.total_params != manifest.params:
        raise _differs(folder, f"{where} makes {geometry.total_params:,} parameters, the manifest {manifest.params:,}")


def _differs(folder: Path, what: str) -> UserError:
    return UserError(f"checkpoint {folder} is not the one that its {MANIFEST} describes: {what}; {_AGAIN}")
