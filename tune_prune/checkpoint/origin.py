"""The manifest of a model that a command names, in a folder or a repository of the hub; an error for one that is already pruned."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError
from transformers.configuration_utils import PretrainedConfig

from tune_prune.checkpoint.manifest import MANIFEST, Manifest, check_checkpoint, read
from tune_prune.core.errors import UserError
from tune_prune.models import hub, unsupported
from tune_prune.models.catalog import ModelSource
from tune_prune.models.registration import PREFIX


def find(source: ModelSource, config: PretrainedConfig) -> tuple[Path, Manifest] | None:
    """The manifest of a model and the folder that it describes; None where there is none. Raises UserError.

    Hub models are asked for one only where `config` is of a pruned type, so that others cost no request. Their folder is
    that of the hub's cache; `verify` fills it.
    """
    if source.kind == "hub":
        if not config.model_type.startswith(PREFIX):
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
    manifest = read(folder)
    return None if manifest is None else (folder, manifest)


def verify(source: ModelSource, config: PretrainedConfig) -> Manifest | None:
    """The manifest of a model, held against its files; None where there is none. Raises UserError."""
    found = find(source, config)
    if found is None:
        return None
    folder, manifest = found
    if source.kind == "hub":
        for name in manifest.files:  # as loading would; now they can be compared
            try:
                _download(source, name)
            except Exception as error:  # as above
                raise unsupported.unavailable(source, error, name) from error
    check_checkpoint(folder, manifest, config, source.file)
    return manifest


def require_dense(source: ModelSource, config: PretrainedConfig) -> None:
    """Raise UserError for a checkpoint that was pruned: searching and pruning start from the dense model."""
    found = find(source, config)
    if found is not None:
        label, name = found[1].base.label, found[1].base_name
        raise UserError(
            f"{source.label} is already pruned, {found[1].plan.removed_fraction:.1%} of {label} are removed; start from the "
            f"original model instead: --model {name}"
        )
    if config.model_type.startswith(PREFIX):
        raise UserError(
            f"{source.label} is already pruned (model type {config.model_type}); start from the original model "
            "that it was made from"
        )


def _revision(source: ModelSource) -> str | None:
    return hub.commit(source.location, source.revision) or source.revision


def _download(source: ModelSource, name: str) -> Path:
    return Path(huggingface_hub.hf_hub_download(source.location, name, revision=_revision(source)))
