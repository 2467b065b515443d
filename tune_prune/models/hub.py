"""Ask the Hugging Face hub once whether it answers.

The hub client tries a file that it has not cached six times, which takes half a minute where there is no network; one
request with its normal time limit is enough to know.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import constants


def probe(repo: str, file: str, revision: str | None = None, repo_type: str = "model") -> None:
    """Raise the hub client's own error (no network, no licence, no such repository) unless the hub shows `file`.

    Nothing is asked about a file that is cached, or when HF_HUB_OFFLINE is set.
    """
    cached = huggingface_hub.try_to_load_from_cache(repo, file, revision=revision, repo_type=repo_type)
    if constants.HF_HUB_OFFLINE or isinstance(cached, str):
        return
    url = huggingface_hub.hf_hub_url(repo, file, revision=revision, repo_type=repo_type)
    huggingface_hub.get_hf_file_metadata(url)


def commit(repo: str, revision: str | None = None) -> str | None:
    """The commit that the cache holds of a model under `revision` (branch, tag or commit; None: main); None where its
    config.json was never fetched.

    From the cache's layout, snapshots/<commit>/: newer transformers no longer tell it."""
    cached = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(cached).parent.name if isinstance(cached, str) else None
