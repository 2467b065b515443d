"""The shell commands that run one configuration of a search again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tune_prune.analysis.input.rows import config_of, plain_value
from tune_prune.analysis.input.study import Model
from tune_prune.analysis.statistics.model_findings import ModelFindings


def best_command(found: ModelFindings) -> str | None:
    """`command` of the best configuration, on each of the draws that its accuracy is the mean of."""
    source, draws = found.model.source, found.draws.get(found.best.name)
    if source is None or draws is None:
        return command(found.model, found.best)
    own = map(plain_value, draws["seed"])  # None: the run's
    return command(found.model, found.best, sorted(int(source["seed"] if seed is None else seed) for seed in own))


def command(model: Model, row: Mapping[str, Any], seeds: Sequence[int] = ()) -> str | None:
    """Lines for a shell: write a search space of the one configuration of `row`, and search it on what its trial was run on, or on
    the draws of several `seeds`.

    None where it is not known what that was (rows of a results file).
    """
    source = model.source
    if not source:
        return None
    config = config_of(row)
    file = shlex.quote(f"{config.name}.yaml")
    # A shape's default goes by the model's size.
    space = {"search": "grid"} | config.settings() | {"shape": config.shape} | ({"seeds": list(seeds)} if seeds else {})
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
    return f"printf '%s\\n' {lines} > {file}\ntune-prune search {flags}"
