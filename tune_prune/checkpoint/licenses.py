"""What the licence of a base model asks of whoever publishes a model made of it, as far as the hub's licence ids tell.

Two things are known by an id alone: Creative Commons' licences without derivatives forbid it, and Meta's for Llama ask for a name,
a sentence on the card, a notice and the licence's own text. All else is for the user to read; nothing here is legal advice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tune_prune.core.errors import UserError


@dataclass(frozen=True)
class Terms:
    """Conditions for publishing a model that was made of one under that licence."""

    begins: str  # what its name begins with; empty: any name
    built_with: str  # the sentence on its card; empty: none
    notice: str  # the content of its file NOTICE


_META = "Copyright © Meta Platforms, Inc. All Rights Reserved."
TERMS = {  # sections 1.b of the agreements, at https://www.llama.com/
    "llama2": Terms("", "", f"Llama 2 is licensed under the LLAMA 2 Community License, {_META}"),
    "llama3": Terms(
        "Llama-3",
        "Built with Meta Llama 3",
        f"Meta Llama 3 is licensed under the Meta Llama 3 Community License, {_META}",
    ),
    **{
        f"llama{version}": Terms(
            "Llama",
            "Built with Llama",
            f"Llama {version} is licensed under the Llama {version} Community License, {_META}",
        )
        for version in ("3.1", "3.2", "3.3")
    },
}


def check_license(stated: Mapping[str, str], repo: str, public: bool) -> None:
    """Raise UserError where the licence that a model card states (license, license_name, license_link) forbids to publish a model
    made of its base as `repo` ("org/name"), or where nobody knows it and the repository is to be `public`."""
    name = stated.get("license", "unknown")
    if "-nd-" in name:
        raise UserError(
            f"the base model's licence, {name}, forbids to share what is made of it, so it is not uploaded; prune a model of "
            "another licence"
        )
    if public and (name == "unknown" or (name == "other" and "license_link" not in stated)):
        raise UserError(
            f"the base model's licence is {name}, so nobody knows whether {repo} may be public; leave --public out, or look it up, "
            "write license and license_link at the top of the folder's README.md and run `tune-prune upload --public` for it"
        )
    begins, (owner, _, label) = TERMS[name].begins if name in TERMS else "", repo.partition("/")
    if not _plain(label).startswith(_plain(begins)):
        raise UserError(
            f"the base model's licence, {name}, wants the name of a model made of it to begin with {begins}, and {repo} does not; "
            f"name it e.g. {owner}/{begins}-{label}"
        )


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()
