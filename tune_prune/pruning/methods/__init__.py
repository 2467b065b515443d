"""Pruning methods, one module each; the module's name is the method's name. To add one, add a file here.

A method module has a docstring that names its source, and

    REMOVALS: tuple[str, ...]                    removal losses it needs: of ("layer", "attention", "mlp"), or ()
    def scores(statistics: Statistics) -> GroupScores     the lowest-scored groups are removed first

Names can be listed without torch, so that a search space is checked before anything heavy is imported.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tune_prune.core.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import numpy as np

    from tune_prune.models.geometry import Geometry
    from tune_prune.pruning.groups import GroupScores

# Below this a removal loss increase counts as this: ln(1 + D) of a block that helps nothing must not become 0 or
# negative, which would tie or reverse the order of its groups. In nats per token.
LOSS_FLOOR = 1e-6


@dataclass(frozen=True)
class Statistics:
    """What a method may decide by."""

    geometry: Geometry
    importance: GroupScores  # Taylor importance per parameter: I / cost
    loss_increase: dict[str, np.ndarray]  # kind -> D per layer [layers], clamped to LOSS_FLOOR; the kinds of REMOVALS
    seed: int


@dataclass(frozen=True)
class Method:
    name: str
    removals: tuple[str, ...]
    scores: Callable[[Statistics], GroupScores]
    description: str  # first line of the module's docstring

    @property
    def reads(self) -> frozenset[str]:
        """Hyperparameters of the calibration samples that its scores depend on."""
        return frozenset(("taylor_seq_len", "taylor_num_samples", *(["removal_divisor"] if self.removals else [])))


def method_names() -> tuple[str, ...]:
    """Every method there is, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load_method(name: str) -> Method:
    """The method of that name. Raises UserError for an unknown one."""
    if name not in method_names():
        raise UserError(f"unknown pruning method {name!r}; {did_you_mean(name, method_names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    return Method(name, tuple(module.REMOVALS), module.scores, (module.__doc__ or "").strip().splitlines()[0])
