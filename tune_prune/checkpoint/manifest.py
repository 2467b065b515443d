"""The manifest of a checkpoint, tune_prune.json: what was pruned, how, which weights came of it, and what was measured.

A manifest is read strictly, and `check_checkpoint` holds it against the config and the weight files beside it, so that no number is
printed for weights that it does not belong to. A checkpoint loads without one, too: config and weights say all that it
takes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError
from pydantic import BeforeValidator, PlainSerializer, PlainValidator, TypeAdapter
from transformers.configuration_utils import PretrainedConfig

from tune_prune import __version__
from tune_prune.checkpoint.generation_speed import GenerationSpeed
from tune_prune.checkpoint.layers import Sizes, least_widths
from tune_prune.core import terminal
from tune_prune.core.config import REFITTED, TRAINED, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.hyperparameters import renamed
from tune_prune.core.validation import Count, Indices, Number, Positive, Text, validated
from tune_prune.data.sources import MeasuredOn
from tune_prune.models import hub, loading, unsupported, weight_files
from tune_prune.models.catalog import ModelSource
from tune_prune.models.families import PRUNED_PREFIX
from tune_prune.models.gguf.files import GgufOrigin
from tune_prune.pruning.groups import PruningPlan

MANIFEST = "tune_prune.json"
SCHEMA_VERSION = 1
IDS_ALONE = "it takes and gives token ids, not text"  # the end of a note of a file without a tokenizer
_PIECE_BYTES = 2**20
Format = Literal["hf", "vllm", "hf-padded", "gguf"]

_AGAIN = f"copy the whole checkpoint again, or remove {MANIFEST} to use the files as they are"


@dataclass(frozen=True)
class Base:
    """A dense model that was pruned."""

    model: Text  # hub id, name of a GGUF file or of its package, or label
    label: Text
    revision: Text | None  # commit of a hub model
    fingerprint: Text
    model_type: Text
    params: Positive
    layers: Positive
    license: dict[str, Text] = field(default_factory=dict)  # see save.base_license; empty: unknown
    gguf: GgufOrigin | None = None  # the file that its weights were read from, if it was one


@dataclass(frozen=True)
class WeightFile:
    bytes: Count
    sha256: Text


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """A pruned model as it is known before it is made: its configuration and, where a search has tried that, what was measured."""

    config: Annotated[PruningConfig, BeforeValidator(renamed), PlainSerializer(PruningConfig.to_dict)]
    # The run of the search that measured `metrics`; metrics and baseline as recorded by it (records.py), None: not measured.
    source: Annotated[ModelRun, PlainSerializer(ModelRun.to_dict)] | None = None
    metrics: Mapping[str, Number | None] | None = None
    measured_on: MeasuredOn | None = None  # the data of `metrics`
    baseline: Mapping[str, Number | None] | None = None  # the dense model's metrics


def provenance(about: Provenance) -> dict[str, Any]:
    """Return the fields of Provenance alone, of what may know more."""
    return {field.name: getattr(about, field.name) for field in fields(Provenance)}


@dataclass(frozen=True, kw_only=True)
class Manifest(Provenance):
    """The content of tune_prune.json. Layers are numbered as in the dense model. Raises ValueError where its parts contradict."""

    # hf: the pruned layers as they are; vllm: with a KV group of zeros for lost attention; hf-padded: widened with zeros to one
    # width; gguf: for llama.cpp
    format: Format
    base: Base
    plan: Annotated[PruningPlan, PlainValidator(PruningPlan.from_dict), PlainSerializer(PruningPlan.to_dict)]
    structure: Text  # the plan's digest: a plan that was changed by hand is noticed by it
    dropped_layers: Indices  # that lost both parts and are not in the checkpoint
    params: Positive  # of the model in this folder, padding included; tied embeddings count once
    files: dict[str, WeightFile]
    sizes: dict[str, Sizes]  # "dense", "pruned" and, where zeros were added, "padded"
    versions: dict[str, Text]  # package -> version
    created: Text  # ISO date
    speed: dict[str, GenerationSpeed] | None = None  # before it was quantised, where it was
    quantization: Text | None = None  # what its matrices are quantised to, e.g. Q4_K_M; `metrics` were measured before
    dtype: Text | None = (
        None  # in which it was written or quantised; None, as for the next: not recorded by older versions
    )
    shard_bytes: Positive | None = None  # largest size of a weight file that was asked for
    notes: list[str] = field(default_factory=list)  # caveats for users of the files, in sentences
    schema_version: Positive

    def __post_init__(self) -> None:
        plan, base = self.plan, self.base
        empty = {at for at, kept in enumerate(plan.kept_groups) if not kept and not plan.kept_channels[at]}
        holds = {
            "plan": len(plan.kept_groups) == base.layers and plan.removed_params < plan.total_params == base.params,
            "structure": plan.structure == self.structure,
            "dropped_layers": set(self.dropped_layers) <= empty,
            "sizes": {"dense", "pruned"} <= self.sizes.keys(),
            "files": self.files and not any(Path(name).name != name or name.startswith(".") for name in self.files),
        }
        for name, consistent in holds.items():
            if not consistent:
                raise ValueError(f"{name} is not what a checkpoint has, or contradicts the other fields")

    @property
    def for_text(self) -> bool:
        """Return whether programs can give the checkpoint text."""
        return not any(note.endswith(IDS_ALONE) for note in self.notes)

    @property
    def refitted(self) -> bool:
        return any(REFITTED in note for note in self.notes)

    @property
    def trained(self) -> bool:
        return any(TRAINED in note for note in self.notes)

    @property
    def base_name(self) -> str:
        """Return the dense model as it was named on the command line: alias, hub id, embedded model or absolute folder."""
        return self.base.model if self.source is None else self.source.model

    @property
    def saved_layers(self) -> tuple[int, ...]:
        """Return the dense model's number of each layer of the checkpoint."""
        return tuple(layer for layer in range(self.base.layers) if layer not in self.dropped_layers)

    @property
    def saved_sizes(self) -> Sizes:
        """Return the sizes of the model in this folder."""
        return self.sizes.get("padded", self.sizes["pruned"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `to_json`."""
        return TypeAdapter(Manifest).dump_python(self)

    @classmethod
    def from_dict(cls, values: Any) -> Manifest:
        """Return the inverse of `to_dict`, also after `to_json`; skips unknown fields. Raises ValueError that names the field."""
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
    """Return the manifest of a checkpoint folder; None where there is none. Raises UserError for a damaged one, with file and
    field."""
    path = folder / MANIFEST
    return read_file(path) if path.exists() else None


def read_file(path: Path) -> Manifest:
    """Return the manifest in a file, whatever it is named. Raises UserError for a damaged one, with file and field."""
    try:
        return Manifest.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); make it readable") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        cause = " ".join(str(error).split())
        raise UserError(
            f"{path} is damaged: {cause}; restore it from a copy, or remove it to use the files as they are"
        ) from error


def weight_file(path: Path) -> WeightFile:
    """Return what `files` says of a weight file: its size, and the digest of all its bytes (about a second per GB)."""
    size, state = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file, terminal.step("checksum", lambda: size, "bytes") as advance:
        while piece := file.read(_PIECE_BYTES):
            state.update(piece)
            advance(len(piece))
    return WeightFile(size, state.hexdigest())


def check_checkpoint(folder: Path, manifest: Manifest, config: PretrainedConfig, source: ModelSource) -> None:
    """Raise UserError unless `config`, read from `source`, and the weight files of `folder`, hashed whole, are those that the
    manifest describes."""
    file = source.file
    if manifest.format == "gguf" and file is None:
        files = ", ".join(str(folder / name) for name in manifest.files)
        raise UserError(f"{folder} holds a checkpoint for llama.cpp; name its GGUF file itself: --model {files}")
    _check_config(folder, manifest, config, source)
    for path in weight_files.files(folder) if file is None else []:
        if path.name not in manifest.files:
            raise _differs(folder, f"{path.name} would be loaded, which the manifest does not list")
    check_files(folder, manifest)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise UserError unless the weight files of `folder`, hashed whole, are those that the manifest lists."""
    for name, recorded in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise _differs(folder, f"weight file {name} is missing")
        if path.stat().st_size != recorded.bytes or weight_file(path) != recorded:
            raise _differs(folder, f"the content of {name} has changed (its SHA-256 differs)")


def _check_config(folder: Path, manifest: Manifest, config: PretrainedConfig, source: ModelSource) -> None:
    dense, plan, where = manifest.base.model_type, manifest.plan, source.file.name if source.file else "config.json"
    padded = manifest.format == "hf-padded"
    known = (dense,) if padded else (PRUNED_PREFIX + dense, dense)
    if config.model_type not in known and manifest.format != "gguf":  # where Mistral models are llama's
        raise _differs(
            folder, f"{where} is that of a {config.model_type} model, the manifest that of a pruned {dense} model"
        )
    family, geometry = loading.config_geometry(config, source)
    sizes = list(zip(geometry.kv_heads, geometry.mlp_width, strict=True))
    groups, channels = least_widths(config, family, manifest.format)
    kept = [
        (max(groups, len(plan.kept_groups[layer])), max(channels, len(plan.kept_channels[layer])))
        for layer in manifest.saved_layers
    ]
    if (sizes != kept and not padded) or geometry.total_params != manifest.params:  # zeros count as parameters
        raise _differs(folder, f"{where} states other layers, or other sizes")


def _differs(folder: Path, what: str) -> UserError:
    return UserError(f"checkpoint {folder} is not the one that its {MANIFEST} describes: {what}; {_AGAIN}")


# The manifest of a model that a command names, in a folder or a repository of the hub.


def find(source: ModelSource, config: PretrainedConfig) -> tuple[Path, Manifest] | None:
    """Return the manifest of a model and the folder that it describes; None where there is none. Raises UserError.

    Hub models are asked for one only where `config` is of a pruned type, so that others cost no request. Their folder is
    that of the hub's cache; `verify` fills it.
    """
    if source.kind == "hub":
        if not config.model_type.startswith(PRUNED_PREFIX):
            return None
        try:
            hub.probe(source.location, MANIFEST, _revision(source))
            folder = _download(source, MANIFEST).parent
        except EntryNotFoundError:
            return None
        except Exception as error:  # the hub client and the network libraries each raise their own kinds
            raise unsupported.unavailable(source, error, MANIFEST) from error
    else:
        folder = Path(source.location)
    if source.file is not None:  # one that tune_prune has written has its manifest beside it
        beside = read(source.file.parent)
        return (source.file.parent, beside) if beside is not None and source.file.name in beside.files else None
    about = read(folder)
    return None if about is None else (folder, about)


def verify(source: ModelSource, config: PretrainedConfig) -> Manifest | None:
    """Return the manifest of a model, held against its files; None where there is none. Raises UserError."""
    place = find(source, config)
    if place is None:
        return None
    folder, about = place
    if source.kind == "hub":
        for name in about.files:  # as loading would; now they can be compared
            try:
                _download(source, name)
            except Exception as error:  # as above
                raise unsupported.unavailable(source, error, name) from error
    check_checkpoint(folder, about, config, source)
    return about


def require_dense(source: ModelSource, config: PretrainedConfig) -> None:
    """Raise UserError for a checkpoint that was pruned: searching and pruning start from the dense model."""
    place = find(source, config)
    if place is not None:
        about = place[1]
        raise UserError(
            f"{source.label} is already pruned, {about.plan.removed_fraction:.1%} of {about.base.label} are removed; start from "
            f"the original model instead: --model {about.base_name}"
        )
    if config.model_type.startswith(PRUNED_PREFIX):
        raise UserError(
            f"{source.label} is already pruned (model type {config.model_type}); start from the original model "
            "that it was made from"
        )


def _revision(source: ModelSource) -> str | None:
    return hub.commit(source.location, source.revision) or source.revision


def _download(source: ModelSource, name: str) -> Path:
    return Path(huggingface_hub.hf_hub_download(source.location, name, revision=_revision(source)))


# Recorded numbers that may stand beside newly measured ones: those that were measured in the same way.


@dataclass(frozen=True)
class Recorded:
    """Recorded numbers that can be compared; None or absent where they cannot, for the reasons in `notes`."""

    ppl: float | None
    accuracies: dict[str, float]  # by task
    acc_mean: float | None
    notes: tuple[str, ...]  # sentences
    kl: dict[str, float] = field(default_factory=dict)  # to the dense model, by "text" and "tasks"


def comparable(manifest: Manifest, run: ModelRun, measured_on: MeasuredOn) -> Recorded:
    """Return the recorded numbers that `run`, which measures on `measured_on`, can be compared with. The order of items and the
    slices do not count: the last slice has all items."""
    metrics, then, before = manifest.metrics, manifest.source, manifest.measured_on
    if metrics is None or then is None or before is None:
        what = (
            "the checkpoint has no recorded numbers" if metrics is None else "it is not recorded how they were measured"
        )
        return Recorded(None, {}, None, (f"nothing is compared with recorded numbers: {what}",))
    old, new = then.protocol, run.protocol
    notes: list[str] = []

    def alike(what: str, **settings: tuple[Any, Any]) -> bool:
        """Note which of the `settings` has changed; `what`: the numbers that are not compared then."""
        for name, (value, now) in settings.items():
            if value != now:
                was, is_now = ("all" if one is None else one for one in (value, now))
                notes.append(f"the recorded {what} not compared: {name} was {was}, and is {is_now}")
                return False
        return True

    protocol = alike("numbers are", protocol_version=(before.protocol, measured_on.protocol), bos=(old.bos, new.bos))
    same_text = protocol and alike(
        "perplexity is",
        text=(before.text, measured_on.text),
        perplexity_window=(old.perplexity_window, new.perplexity_window),
        perplexity_tokens=(old.perplexity_tokens, new.perplexity_tokens),
    )
    accuracies: dict[str, float] = {}
    if protocol and alike("accuracies are", limit=(old.limit, new.limit)):
        for task, content in measured_on.tasks.items():
            accuracy = metrics.get(f"acc_{task}")
            if before.tasks.get(task) == content and accuracy is not None:
                accuracies[task] = accuracy
            else:
                notes.append(
                    f"{task} is not compared: it, or its questions and the version of lm-eval, were not recorded"
                )
    same_tasks = set(accuracies) == set(measured_on.tasks) == set(before.tasks)
    if accuracies and not same_tasks:
        notes.append(f"the recorded mean is not compared: it is over {', '.join(before.tasks)}")
    if protocol and manifest.quantization is not None:
        notes.append(f"the recorded numbers are those before it was quantised to {manifest.quantization}")
    device = before.device or measured_on.device
    for word, was, now in (("in", then.dtype, run.dtype), ("on", device, measured_on.device)):
        if (same_text or accuracies) and was != now:
            notes.append(f"recorded {word} {was}, measured {word} {now}: differences by rounding are to be expected")
    # Of the tasks the KL reads items in turn, up to some tokens.
    kl = {
        "text": same_text and metrics.get("kl_text"),
        "tasks": same_tasks and old.tasks == new.tasks and metrics.get("kl_tasks"),
    }
    return Recorded(
        ppl=metrics.get("ppl") if same_text else None,
        accuracies=accuracies,
        acc_mean=metrics.get("acc_mean") if same_tasks else None,
        notes=tuple(notes),
        kl={name: value for name, value in kl.items() if value is not None and value is not False},
    )
