"""Pruning methods, one module each; the module's name is the method's name. To add one, add a file here or in a folder below.

A method module has a docstring that names its source, and

    STATISTICS: tuple[str, ...]            names of tune_prune/pruning/statistics that it decides by, with the kind where a
                                           statistic has kinds: ("taylor", "block_removal:layer"); () where it reads no data
    def scores(dense: Dense) -> GroupScores                per layer float64 [KV groups] and [MLP channels], finite, of any scale:
                                                           groups of all layers are sorted together, the lowest are removed first
                                                           (-inf: before all others)
    SHAPES: tuple[str, ...]                optional: the shapes that it is for, "free", "aligned", "uniform"; all where it has none
    NORMALIZATIONS: tuple[str, ...]        optional: what its scores may be divided by: "none", "kind", "layer"; else all
    ONLY_EXPERTS = True                    optional: it scores the experts of mixtures, and nothing else
    WHOLE_EXPERTS = True                   optional: it scores no channels inside of experts

Names can be listed without torch, so that a search space is checked before anything heavy is imported.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.hashing import code_digest, digest
from tune_prune.core.hyperparameters import HYPERPARAMETERS, RECIPE
from tune_prune.core.kinds import NORMALIZATIONS, SHAPES
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.statistics import Need, load_statistic, parse

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from tune_prune.models.families import Family
    from tune_prune.models.geometry import Geometry
    from tune_prune.pruning.groups import GroupScores


# Statistics of the inputs of o and down, which the stacked weights of a mixture do not have.
OF_PROJECTIONS = {"input_norms", "kfac"}
# Why a method without statistics is not pruned in steps.
NO_STEPS = "reads no calibration text, so it has nothing to score anew after a step"


@dataclass(frozen=True)
class Dense:
    """All that a method computes its scores from: the dense model and its statistics; where it is pruned in several steps, a copy
    that is pruned so far, and the copy's."""

    model: PreTrainedModel  # its weights are elsewhere where `residency` says so: take those of `layers()`
    family: Family
    geometry: Geometry
    seed: int  # of the configuration or, where it has none, of the search
    statistics: Mapping[str, Any]  # by the names in STATISTICS; what each is, its module says
    residency: Residency = RESIDENT
    removal_power: float = 1.0  # of removal losses' logarithms

    def layers(self) -> Iterator[nn.Module]:
        """Return the decoder layers with their weights, each until the next is asked for."""
        from tune_prune.models.runner.layer_runner import LayerRunner  # imports torch

        return (layer for _, layer in LayerRunner(self.model, self.family, self.residency).layers())


@dataclass(frozen=True)
class Method:
    name: str
    statistics: tuple[str, ...]
    scores: Callable[[Dense], GroupScores]
    description: str  # first line of the module's docstring
    own_code: str  # digest of the module's code
    own_reads: tuple[str, ...] = ()  # READS of its module: hyperparameters that it reads without a statistic
    shapes: tuple[str, ...] = SHAPES  # SHAPES of its module: those in which its scores decide something
    normalizations: tuple[str, ...] = NORMALIZATIONS  # those of its module, which leave something of its scores
    only_experts: bool = False  # ONLY_EXPERTS of its module
    whole_experts: bool = False  # WHOLE_EXPERTS of its module

    @property
    def code(self) -> str:
        """Return a digest of the code that its scores come from: of its module and of those of its statistics, as they were
        loaded."""
        statistics = sorted({parse(text)[0] for text in self.statistics})
        return digest([self.own_code, *(load_statistic(name).code for name in statistics)])

    @property
    def sources(self) -> frozenset[str]:
        """Return its statistics without their kinds."""
        return frozenset(parse(text)[0] for text in self.statistics)

    @property
    def reads(self) -> frozenset[str]:
        """Return hyperparameters that its scores depend on, of those that only some methods read."""
        statistics = (load_statistic(parse(text)[0]) for text in self.statistics)
        again = ("steps",) if self.statistics else ()  # what follows from weights alone is the same after every step
        return frozenset(self.own_reads).union(again, *(statistic.reads for statistic in statistics))

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Return all hyperparameters that its pruned models depend on, as the table has them."""
        return tuple(n for n, row in HYPERPARAMETERS.items() if row.read_by != "statistics" or n in self.reads)

    def needs(self, config: PruningConfig) -> dict[str, Need]:
        """Return the Need of each of its statistics for `config`, by the names in STATISTICS."""
        needs = {}
        for text in self.statistics:
            statistic, kind = parse(text)
            needs[text] = Need(statistic, kind, load_statistic(statistic).num_samples(config))
        return needs

    def check_shape(self, shape: str) -> None:
        """Raise UserError where its scores decide nothing in that shape, which may be none."""
        if shape.partition("-")[0] in set(SHAPES) - set(self.shapes):
            raise UserError(
                f"{self.name} chooses among layers, and shape {shape} keeps the same of every layer; use shape "
                f"{' or '.join(self.shapes)}, or another method"
            )

    def check_experts(self, mixtures: Sequence[bool], model: str) -> None:
        """Raise UserError where it cannot score a model in which those layers are mixtures of experts."""

        def can(method: Method) -> bool:
            if not any(mixtures):
                return not method.only_experts
            return not OF_PROJECTIONS & method.sources

        if not can(self):
            others = ", ".join(name for name in method_names() if can(load_method(name)))
            why = "decides by the inputs of a layer's last projections, and experts have none of their own"
            why = why if any(mixtures) else "scores experts, and this model has none"
            raise UserError(f"{self.name} {why}; for {model} use one of {others}")

    def check_whole_experts(self, config: PruningConfig, mixtures: Sequence[bool], model: str) -> None:
        """Raise UserError where `config` asks for channels inside of experts that are not there, or that it cannot score."""
        asked = f"whole_experts is {config.whole_experts:g}, but"
        if config.whole_experts == 1:
            return
        if not any(mixtures):
            raise UserError(f"{asked} no layer of {model} has experts; leave it out")
        if self.whole_experts:
            others = (load_method(name) for name in method_names() if name != self.name)
            fits = ", ".join(m.name for m in others if not m.whole_experts and not OF_PROJECTIONS & m.sources)
            raise UserError(f"{asked} {self.name} scores no channels inside of experts; leave it out, or use {fits}")
        if config.steps > 1:
            raise UserError(
                f"{asked} steps is {config.steps}, and channels inside of experts go in one; leave one of them out"
            )

    def check_normalization(self, by: str) -> None:
        """Raise UserError where that normalization cancels what its scores say."""
        if by in set(NORMALIZATIONS) - set(self.normalizations):
            raise UserError(
                f"{self.name} tells layers apart by one number for each, which normalization {by} divides out again; use "
                f"normalization {' or '.join(self.normalizations)}, or another method"
            )


def method_names() -> tuple[str, ...]:
    """Return every method there is, sorted."""
    return tuple(sorted(_modules()))


def _modules() -> dict[str, str]:
    """Return where each method is, by its name."""
    modules = pkgutil.walk_packages(__path__, f"{__name__}.")
    return {module.name.rpartition(".")[2]: module.name for module in modules if not module.ispkg}


def load_method(name: str) -> Method:
    """Return the method of that name. Raises UserError for an unknown one."""
    modules = _modules()
    if name not in modules:
        raise UserError(f"unknown pruning method {name!r}; {did_you_mean(name, sorted(modules))}")
    module = importlib.import_module(modules[name])
    description = (module.__doc__ or "").strip().splitlines()[0]
    read, shapes = getattr(module, "READS", ()), getattr(module, "SHAPES", SHAPES)
    normalizations = getattr(module, "NORMALIZATIONS", NORMALIZATIONS)
    own_code, statistics = code_digest(module), tuple(module.STATISTICS)
    experts = (getattr(module, name, False) for name in ("ONLY_EXPERTS", "WHOLE_EXPERTS"))
    return Method(name, statistics, module.scores, description, own_code, read, shapes, normalizations, *experts)


def read_by(config: PruningConfig) -> frozenset[str]:
    """Return names of the hyperparameters that make the model of this configuration what it is: those of its method and, with a
    repair or a training, which read a text, too, those of these. All of them where the method is not installed here."""
    try:
        names = frozenset(load_method(config.method).hyperparameters)
    except UserError:
        return frozenset(HYPERPARAMETERS)
    if not config.changes_weights:
        return names
    return names | {"calibration", "seed", *RECIPE, *(row.switch for row in RECIPE.values())}
