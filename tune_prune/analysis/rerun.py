"""The shell command that runs one configuration of a search again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from tune_prune.analysis.input.rows import config_of
from tune_prune.analysis.input.study import Model


def command(model: Model, row: Mapping[str, Any]) -> str | None:
    """Lines for a shell: write a search space of the one configuration of `row`, and search it on what its trial was run on.

    None where it is not known what that was (rows of a results file).
    """
    source = model.source
    if not source:
        return None
    config = config_of(row)
    space = {"search": "grid"} | config.identity()
    protocol = source["protocol"]
    options = {
        "--model": source["model"],
        "--revision": source["revision"],
        "--search-space": f"{config.name}.yaml",
        "--calibration": source["calibration"],
        "--data-dir": source["data_dir"],
        "--tasks": ",".join(protocol["tasks"]),
        "--limit": protocol["limit"],
        "--dtype": source["dtype"],
        "--seed": source["seed"],
    }
    file = shlex.quote(f"{config.name}.yaml")
    lines = " ".join(shlex.quote(f"{name}: {value}") for name, value in space.items())
    flags = " ".join(f"{flag} {shlex.quote(str(value))}" for flag, value in options.items() if value is not None)
    return f"printf '%s\\n' {lines} > {file}\npython -m tune_prune.search {flags}"
