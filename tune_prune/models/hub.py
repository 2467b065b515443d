"""Ask the Hugging Face hub once whether it answers, and which commit of a model or data set is used. The hub client asks six times
for a file that it has not cached, which takes half a minute where there is no network.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from tune_prune.core.errors import UserError

_CARD = "README.md"  # of a data set: the file of its repository that the datasets library reads first


def probe(repo: str, file: str, revision: str | None = None, repo_type: str = "model") -> None:
    """Raise the hub client's own error unless the hub shows `file`; one that is cached, or offline, is not asked about."""
    cached = huggingface_hub.try_to_load_from_cache(repo, file, revision=revision, repo_type=repo_type)
    if constants.HF_HUB_OFFLINE or isinstance(cached, str):
        return
    url = huggingface_hub.hf_hub_url(repo, file, revision=revision, repo_type=repo_type)
    huggingface_hub.get_hf_file_metadata(url)


def holds(repo: str, file: str, revision: str | None = None) -> bool:
    """Return whether model `repo` is known to have `file`, by the cache or by one request; False where the hub cannot be asked."""
    cached = huggingface_hub.try_to_load_from_cache(repo, file, revision=revision)
    if cached is not None or constants.HF_HUB_OFFLINE:
        return isinstance(cached, str)
    try:
        probe(repo, file, revision)
    except Exception:  # noqa: BLE001  # no such file, or no network, a proxy, a hub that is down, each of its own kind
        return False
    return True


@cache
def obstacle(repo: str) -> str:
    """Return why model `repo` cannot be had, neither from the hub's cache nor from the hub, in a clause; empty where it can. Asked
    once by a process: answers of the moment would let it use two models under one name."""
    cached = [huggingface_hub.try_to_load_from_cache(repo, name) for name in ("config.json", "model.safetensors")]
    if all(isinstance(path, str) for path in cached):
        return ""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(repo, "config.json"))
    except Exception as error:  # noqa: BLE001  # no network, a proxy, a hub that is down, each of its own kind; it is the answer
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def folder(repo: str, revision: str | None = None) -> Path | None:
    """Return where the cache holds files of a model (`revision` None: main); None where its config.json was never fetched."""
    cached = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def commit(repo: str, revision: str | None = None) -> str | None:
    """Return the commit of `folder`, from the cache's layout, snapshots/<commit>/: newer transformers no longer tell it."""
    cached = folder(repo, revision)
    return cached.name if cached else None


def fetch_weights(repo: str, revision: str | None = None) -> None:
    """Have the cache hold the weight files of model `repo`; nothing is done offline. Raises what the hub client raises."""
    from tune_prune.models import weight_files  # imports torch

    cached = folder(repo, revision)
    if constants.HF_HUB_OFFLINE or (cached is not None and weight_files.are_here(cached)):
        return
    for whole in (weight_files.SAFETENSORS, weight_files.PICKLED):
        index = f"{whole}.index.json"
        here = Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=[whole, index]))
        if (here / index).is_file():
            parts = [path.name for path in weight_files.named(here / whole)]
            huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=parts)
        if weight_files.are_here(here):
            return


def dataset_commit(repo: str) -> str | None:
    """Return the commit of data set `repo` that is read: the cache's main branch, else the newest one, which is then the cache's.
    None offline where the cache has no such repository. Raises UserError where the hub does not answer."""
    cached = huggingface_hub.try_to_load_from_cache(repo, _CARD, repo_type="dataset")
    if not isinstance(cached, str):
        if constants.HF_HUB_OFFLINE:
            return None
        try:
            probe(repo, _CARD, repo_type="dataset")
            cached = huggingface_hub.hf_hub_download(repo, _CARD, repo_type="dataset")
        except Exception as error:  # no network, a proxy, a hub that is down: each of its own kind
            raise UserError(
                f"data set {repo} of the Hugging Face hub cannot be reached ({' '.join(str(error).split())}); check the network, "
                "or use local files: --data-dir DIR (docs/data.md), --calibration FILE"
            ) from error
    return Path(cached).parent.name


def dataset_identity(name: str, repo: str) -> str:
    """Return what keys say of a data set: its name and, where that is known, its commit."""
    commit = dataset_commit(repo)
    return f"{name}@{commit}" if commit else name
