"""The licence of a base model, as its own model card states it: a pruned model is published under it, too."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import yaml

from tune_prune.models.catalog import ModelSource

# Of a model card's metadata (https://huggingface.co/docs/hub/model-cards); name and link describe a license "other".
KEYS = ("license", "license_name", "license_link")
CARD = "README.md"
LICENSE_FILES = ("LICENSE*", "NOTICE*", "USE_POLICY*")


def base_license(source: ModelSource) -> dict[str, str]:
    """The KEYS that the model card of `source` states, e.g. {"license": "apache-2.0"}; empty where it is unknown: no card, none or
    several in the card, or a hub that cannot be reached and has not been before. A list of one text is that text. Links are
    absolute for models of the hub."""
    if source.kind == "embedded":
        return {"license": "apache-2.0"}  # tune_prune's own
    try:
        if source.kind == "hub":
            path = Path(huggingface_hub.hf_hub_download(source.location, CARD, revision=source.revision))
        else:
            path = Path(source.location) / CARD
        stated = (path.is_file() and huggingface_hub.metadata_load(path)) or {}
    except (OSError, ValueError, yaml.YAMLError):  # no such file, no network, no valid metadata
        return {}
    alone = {key: text[0] if isinstance(text, list) and len(text) == 1 else text for key, text in stated.items()}
    entries = {key: alone[key] for key in KEYS if isinstance(alone.get(key), str) and alone[key]}
    if source.kind == "hub" and "license_link" in entries and "://" not in entries["license_link"]:
        page = f"https://huggingface.co/{source.location}/blob/{source.revision or 'main'}"
        entries["license_link"] = f"{page}/{entries['license_link']}"
    return entries


def copy_license_files(source: ModelSource, folder: Path) -> None:
    """Copy the licence texts beside the weights of a local model into the checkpoint `folder`."""
    if source.kind == "folder":
        for pattern in LICENSE_FILES:
            for path in Path(source.location).glob(pattern):
                if path.is_file() and path.suffix != ".py":  # nor a folder LICENSES/, as some projects have it
                    shutil.copyfile(path, folder / path.name)
