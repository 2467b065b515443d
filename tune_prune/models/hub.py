"""Ask the Hugging Face hub once whether it answers, and which commit of a model or data set is used.

The hub client tries a file that it has not cached six times, which takes half a minute where there is no network; one
request with its normal time limit is enough to know.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import RemoteEntryNotFoundError

from tune_prune.core.errors import UserError

_CARD = "README.md"  # of a data set: the file of its repository that the datasets library reads first


def probe(repo: str, file: str, revision: str | None = None, repo_type: str = "model") -> None:
    """Raise the hub client's own error (no network, no licence, no such repository) unless the hub shows `file`.

    Nothing is asked about a file that is cached, or when HF_HUB_OFFLINE is set.
    """
    cached = huggingface_hub.try_to_load_from_cache(repo, file, revision=revision, repo_type=repo_type)
    if constants.HF_HUB_OFFLINE or isinstance(cached, str):
        return
    url = huggingface_hub.hf_hub_url(repo, file, revision=revision, repo_type=repo_type)
    huggingface_hub.get_hf_file_metadata(url)


@cache
def obstacle(repo: str) -> str:
    """Why model `repo` cannot be had, neither from the hub's cache nor from the hub, in a clause; empty where it can. Asked once by
    a process: answers of the moment would let it use two models under one name."""
    names = ("config.json", "model.safetensors")
    if all(isinstance(huggingface_hub.try_to_load_from_cache(repo, name), str) for name in names):
        return ""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(repo, names[0]))
    except Exception as error:  # noqa: BLE001  # no network, a proxy, a hub that is down, each of its own kind; it is the answer
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def commit(repo: str, revision: str | None = None) -> str | None:
    """The commit that the cache holds of a model under `revision` (branch, tag or commit; None: main); None where its
    config.json was never fetched.

    From the cache's layout, snapshots/<commit>/: newer transformers no longer tell it."""
    cached = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(cached).parent.name if isinstance(cached, str) else None


def fetch_weights(repo: str, revision: str | None = None) -> None:
    """Have the cache hold the weight files that transformers reads of model `repo`; nothing is done offline, or for a model
    that has only pickled weights. Raises what the hub client raises."""
    from tune_prune.models import weight_files  # imports torch

    whole, index = "model.safetensors", "model.safetensors.index.json"

    def cached(name: str) -> str | None:
        path = huggingface_hub.try_to_load_from_cache(repo, name, revision=revision)
        return path if isinstance(path, str) else None

    def fetched(name: str) -> str | None:
        try:
            return cached(name) or huggingface_hub.hf_hub_download(repo, name, revision=revision)
        except RemoteEntryNotFoundError:
            return None

    if constants.HF_HUB_OFFLINE or (cached(index) is None and fetched(whole) is not None):
        return
    path = fetched(index)
    for file in weight_files.files(Path(path).parent) if path is not None else []:
        fetched(file.name)


def dataset_commit(repo: str) -> str | None:
    """The commit of data set `repo` that is read: the cache's main branch, else the newest one, which is then the cache's. None
    offline where the cache has no such repository. Raises UserError where the hub does not answer."""
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
    """What keys say of a data set: its name and, where that is known, its commit."""
    commit = dataset_commit(repo)
    return f"{name}@{commit}" if commit else name
