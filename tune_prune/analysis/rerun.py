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
    file = shlex.quote(f"{config.name}.yaml")
    space = {"search": "grid"} | config.settings() | {"shape": config.shape}  # whose default goes by size
    lines = " ".join(shlex.quote(f"{name}: {value}") for name, value in space.items())
    protocol = source["protocol"]
    values = {**protocol, **source, "search_space": f"{config.name}.yaml", "tasks": ",".join(protocol["tasks"])}
    if config.calibration is not None:  # the space says it
        values["calibration"] = None
    names = (
        *("model", "revision", "search_space", "calibration", "data_dir", "tasks", "limit", "perplexity_window"),
        "perplexity_tokens",
        *("dtype", "seed"),
    )
    flags = " ".join(
        f"--{name.replace('_', '-')} {shlex.quote(str(values[name]))}" for name in names if values.get(name) is not None
    )
    return f"printf '%s\\n' {lines} > {file}\npython -m tune_prune.search {flags}"
