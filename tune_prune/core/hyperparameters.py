"""The table of hyperparameters, a row for each: all that readers of search spaces, flags, keys, names, tables and figures know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tune_prune.core.kinds import (
    NORMALIZATIONS,
    Choice,
    Kind,
    MethodName,
    Ratio,
    Real,
    ShapeName,
    TextNames,
    Whole,
    share,
)

_RATIO = Ratio(0.0, math.nextafter(1.0, 0.0), "a number above 0 and below 1, e.g. 0.2 for 20% smaller")


@dataclass(frozen=True)
class Hyperparameter:
    """One row of the table: all that readers of search spaces, flags, keys, names, tables and figures know of it."""

    name: str  # everywhere: search spaces, flags (--seq-len), records, results tables; the field of PruningConfig
    label: str  # in figures and reports
    kind: Kind
    example: str  # a value, as a search space has it
    help: str  # of its flag
    read_by: Literal[
        "scores", "statistics", "selection", "recipe"
    ]  # the step; statistics say which of theirs they read
    default: Any = None  # None: unless it is required, that of the run (ModelRun has a field of its name)
    name_prefix: str | None = ""  # before its value in a configuration's name; None: names do not show it
    always_in_key: bool = False  # also at its default: the hyperparameters that the first keys had
    required: bool = False  # a search space must say it
    older: str = ""  # its name in the published search and in files of version 0.1, which are read; keys still hash it
    of: str = ""  # the hyperparameter that switches on what reads it: where that is none, nothing does
    later: bool = False  # it came after the first records, which do not have it: records have it off its default only

    @property
    def of_run(self) -> bool:
        """Says whether a configuration that does not state it has the run's."""
        return self.default is None and not self.required

    @property
    def switch(self) -> str:
        """The hyperparameter of the recipe that it is or belongs to; "" for those that every configuration has."""
        return self.of or (self.name if self.read_by == "recipe" else "")

    @property
    def usual(self) -> Any:
        """The default; where there is none, the example: what a configuration holds whose method does not read it."""
        return self.kind.read(self.example) if self.required else self.default

    def in_name(self, value: Any) -> str:
        """Return a value in a configuration's name."""
        return f"{self.name_prefix}{self.kind.short(value)}"

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


HYPERPARAMETERS = {
    row.name: row
    for row in (
        Hyperparameter(
            "method", "Method", MethodName(), "blockwise", "rule that scores each part", "scores", required=True
        ),
        Hyperparameter(
            "seq_len", "Tokens per sample", Whole(2, 131_072), "64",
            "tokens of each piece of sample text", "statistics", name_prefix="s", older="taylor_seq_len", required=True,
        ),
        Hyperparameter(
            "num_samples", "Calibration samples", Whole(1, 1_000_000), "128",
            "pieces of sample text", "statistics", name_prefix="n", older="taylor_num_samples", required=True,
        ),
        Hyperparameter(
            "pruning_ratio", "Pruning ratio", _RATIO, "0.2",
            "share of all parameters to remove", "selection", 0.2, name_prefix=None, always_in_key=True,
        ),
        Hyperparameter(
            "removal_divisor", "Removal divisor", Whole(1, 1_000_000), "5",
            "layerwise and blockwise only: their slow step takes num_samples // removal_divisor pieces",
            "statistics", 5, "d", always_in_key=True,
        ),
        Hyperparameter(
            "shape", "Shape", ShapeName(), "aligned",
            "where it will run\n"
            "free     transformers, vLLM, llama.cpp: any widths, can be slow on a GPU\n"
            "aligned  the same, fast on a GPU: MLP widths in multiples of --align\n"
            "uniform  everywhere: a plain model of its family, all layers alike", "selection", "free",
        ),
        Hyperparameter(
            "seed", "Seed", Whole(0, 2**32 - 1), "1",
            "decides which pieces of sample text are taken, and what the method random removes", "statistics", name_prefix="r",
        ),
        Hyperparameter(
            "calibration", "Calibration text", TextNames(), "wikitext2+c4",
            "sample text: embedded, wikitext2, c4 or a file, or several with + between them, in equal parts", "statistics",
            name_prefix="c",
        ),
        Hyperparameter(
            "compensation", "Compensation", Choice(("none", "least_squares")), "least_squares",
            "repair\n"
            "least_squares  adjust the remaining weights to make up for what is gone",
            "recipe", "none",
        ),
        Hyperparameter(
            "damping", "Damping", share(100.0), "0.1",
            "repair: how strongly it keeps to the old weights, in parts of the inputs' mean energy", "recipe", 0.1, "l",
            of="compensation",
        ),
        Hyperparameter(
            "refit_tokens", "Refit tokens", Whole(1024, 100_000_000), "16384",
            "repair: tokens of sample text", "recipe", 16_384, "t", of="compensation",
        ),
        Hyperparameter(
            "recovery", "Recovery", Choice(("none", "lora")), "lora",
            "short training\n"
            "lora  train adapters to imitate the original model, and merge them: slower",
            "recipe", "none",
        ),
        Hyperparameter(
            "recovery_steps", "Recovery steps", Whole(1, 1_000_000), "100",
            "training: steps, each on 4 pieces of sample text of 128 tokens", "recipe", 100, "i", of="recovery",
        ),
        Hyperparameter(
            "recovery_rate", "Recovery rate", share(1.0), "0.001",
            "training: largest learning rate", "recipe", 0.001, "e", of="recovery",
        ),
        Hyperparameter(
            "recovery_rank", "Recovery rank", Whole(1, 1024), "64",
            "training: rank of the adapters", "recipe", 8, "a", of="recovery", later=True,
        ),
        Hyperparameter(
            "steps", "Steps", Whole(1, 100), "4",
            "remove in N steps, and look at the sample text anew before each",
            "statistics", 1, "k", later=True,
        ),
        Hyperparameter(
            "removal_power", "Removal power", share(10.0), "0.5",
            "layerwise and blockwise only: power of the factor for a whole block; near 0 they are taylor",
            "statistics", 1.0, "p", later=True,
        ),
        Hyperparameter(
            "normalization", "Normalization", Choice(NORMALIZATIONS), "kind",
            "what scores are divided by before those of all layers are sorted\n"
            "none   nothing\n"
            "kind   the root mean square of all KV groups' scores, and of all MLP channels'\n"
            "layer  that of the layer's own", "selection", "none", "by_", later=True,
        ),
        Hyperparameter(
            "layer_cap", "Layer cap", share(1.0), "0.5",
            "largest share of a layer's KV groups, and of its MLP channels, that may be removed", "selection", 1.0, "x", later=True,
        ),
        Hyperparameter(
            "whole_experts", "Whole experts", Real(0.0, 1.0, "a number from 0 to 1"), "0.5",
            "mixtures of experts only: share of the removal that is whole experts and attention; the rest is channels inside of "
            "the experts that stay", "selection", 1.0, "w", later=True,
        ),
    )
}  # fmt: skip


TRAINING_STEP_TOKENS = 4 * 128  # that a step of a recovery reads
OF_RUN = tuple(name for name, row in HYPERPARAMETERS.items() if row.of_run)
RECIPE = {name: row for name, row in HYPERPARAMETERS.items() if row.switch}


def unread(values: Mapping[str, Any]) -> set[str]:
    """Return the hyperparameters in `values` that nothing reads: of a refit or a recovery that the configuration has not."""
    return {name for name, row in RECIPE.items() if row.of and values.get(row.of, "none") == "none"}


# Older name, or other name in a search space -> name. `method` is pruning_method in results tables only.
OLDER_NAMES = {row.older: row.name for row in HYPERPARAMETERS.values() if row.older}
OLDER_NAMES |= {"pruning_method": "method", "seeds": "seed"}


def renamed(values: Any) -> Any:
    """Return a mapping with older names of hyperparameters replaced; anything else as it is."""
    return {OLDER_NAMES.get(k, k): v for k, v in values.items()} if isinstance(values, Mapping) else values
