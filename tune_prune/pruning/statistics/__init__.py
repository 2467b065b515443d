"""Statistics: what methods decide by, taken from passes of the dense model over calibration samples. One module each.

The module's name is the statistic's name; it ends with `STATISTIC`, an object of its subclass of `Statistic`. To add one,
add a file here and name it in a method's STATISTICS. Preparation, cache, cost model, plan text and trials go by names:
nothing else has to know it. What follows from weights alone is no statistic: a method reads the weights themselves.

Names can be listed without torch.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.hashing import code_digest
from tune_prune.models.runner.residency import RESIDENT, Residency

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from tune_prune.models.families import Family

# The arrays of one need as the artifact cache keeps them, by names that the statistic chooses.
Arrays = Mapping[str, "np.ndarray"]


@dataclass(frozen=True, order=True)
class Need:
    """One statistic, of one kind if it has kinds, from the first `num_samples` calibration samples of some seq_len."""

    statistic: str
    kind: str  # "" where the statistic has none
    num_samples: int


Begun = Mapping[Need, Arrays]  # of every need, what there is already of a pass


@dataclass(frozen=True)
class PassWork:
    """Work of a pass, for the cost model; the sums count a token once for every time it is run."""

    tokens: int  # that records report as forwarded
    attention_tokens: int  # tokens times attention blocks that they pass
    mlp_tokens: int  # tokens times MLP blocks
    head_positions: int  # of which logits are made
    batch_tokens: int  # of the largest batch
    row_tokens: int  # of a sample
    carried: int = 1  # hidden states of each of its tokens that a forward pass has at once
    backward: bool = False  # whether gradients of the projections' weights are computed too
    snapshots: int = 0  # times that the sums over a model's weights are read out
    input_squares: bool = False  # whether squares of the inputs of each layer's last projections are summed up
    product_tokens: int = 0  # of which products of the inputs of each layer's last projections are summed up
    fitted_share: float = 0.0  # of these inputs, to which the projections are fitted by those products; 0: they are not
    held_tokens: int = 0  # on which that fit is tried
    product_sums: int = 0  # of gradients, how often the sums of those products are kept while it runs
    weight_sums: int = 0  # float32 numbers per weight of the projections that are kept while it runs
    adapter_rank: int = 0  # of adapters of a pruned copy, which are trained instead
    waiting_tokens: int = 0  # whose hidden states wait in host memory meanwhile
    of_copy: bool = False  # of a pruned copy, which is there beside the dense model


CALIBRATION = ("seq_len", "num_samples", "seed", "calibration")  # hyperparameters that say which samples there are


class Statistic(ABC):
    """Base class: a subclass sets version, stage and label, and implements collect, work and value; the rest has defaults.
    CONTRIBUTING.md has a recipe, tests/pruning/test_statistics.py the contract."""

    version: int  # raise when the numbers change by code outside of its module: those that are cached are then not used
    stage: str  # of a trial, in records; also what its files in the cache begin with
    label: str  # of its pass, in text: "gradient"
    backward: bool = False  # whether its pass computes gradients; else it runs forward only
    solves: bool = False  # whether its sums, once they are there, are solved for: that takes the cube of what a projection is given
    kinds: tuple[str, ...] = ("",)
    reads: tuple[str, ...] = CALIBRATION  # hyperparameters that it depends on

    @property
    def code(self) -> str:
        """Return a digest of its module's code: numbers that another code has computed are not used."""
        return code_digest(sys.modules[type(self).__module__])

    def num_samples(self, config: PruningConfig) -> int:
        """Return calibration samples that a configuration has it take."""
        return config.num_samples

    def key(self, need: Need) -> dict[str, Any]:
        """Return the statistic's part of the cache key, beside model, calibration text and seq_len. Needs of one key are served by
        the one with the most samples."""
        return {"num_samples": need.num_samples}

    def covers(self, arrays: Arrays, need: Need) -> bool:
        """Return whether what is stored under the key holds enough samples."""
        return True

    @abstractmethod
    def collect(
        self,
        model: PreTrainedModel,
        family: Family,
        windows: torch.Tensor,
        needs: Sequence[Need],
        residency: Residency = RESIDENT,
    ) -> dict[Need, dict[str, np.ndarray]]:
        """Return the arrays of every need by one pass over `windows`, token ids [samples, seq_len] of at least as many samples as
        the largest need. The model may be changed meanwhile, and is as it was at the end, also of a failure. `residency` says where
        weights and hidden states are; on a CPU no number depends on it."""

    @abstractmethod
    def work(self, needs: Sequence[Need], seq_len: int, num_layers: int, device: str) -> PassWork:
        """Return what `collect` computes for those needs on "cpu" or "cuda"."""

    def parts(self, needs: Sequence[Need], num_layers: int) -> int:
        """Return in how many parts its pass can be made, one after the other, with the same numbers (`Residency.at_once`)."""
        return 1

    @abstractmethod
    def value(self, arrays: Arrays, need: Need) -> Any:
        """Return what a method finds in `dense.statistics` for `need`."""

    def metrics(self, found: Mapping[Need, Arrays]) -> dict[str, float]:
        """Return metrics by name, for the record of a trial that uses what was `found`."""
        return {}

    def files(self, found: Mapping[Need, Arrays]) -> dict[str, Any]:
        """Return file name -> plain data, for the trial's folder."""
        return {}


class GrowingStatistic(Statistic):
    """One whose arrays of fewer samples are the beginning of those of more."""

    @abstractmethod
    def collect(
        self,
        model: PreTrainedModel,
        family: Family,
        windows: torch.Tensor,
        needs: Sequence[Need],
        residency: Residency = RESIDENT,
        begun: Begun | None = None,
        keep: Callable[[Begun], object] = id,
    ) -> dict[Need, dict[str, np.ndarray]]:
        """Collect as every statistic does. `keep` is given what there is every KEEP_EVERY_S seconds; such a part, or what fewer
        samples gave, is not computed again where it is given as `begun`."""

    @abstractmethod
    def samples(self, arrays: Arrays) -> int:
        """Return from how many samples they are."""

    def covers(self, arrays: Arrays, need: Need) -> bool:
        return self.samples(arrays) >= need.num_samples


def statistic_names() -> tuple[str, ...]:
    """Return every statistic there is, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def load_statistic(name: str) -> Statistic:
    """Return the statistic of that name. Raises UserError for an unknown one."""
    if name not in statistic_names():
        raise UserError(f"unknown statistic {name!r}; {did_you_mean(name, statistic_names())}")
    statistic: Statistic = importlib.import_module(f"{__name__}.{name}").STATISTIC
    return statistic


def parse(name: str) -> tuple[str, str]:
    """Return statistic and kind of what a method names: "taylor", or "block_removal:layer". Raises UserError for what there is
    not."""
    statistic, _, kind = name.partition(":")
    kinds = load_statistic(statistic).kinds
    if kind not in kinds:
        raise UserError(f"statistic {name!r} has an unknown kind; {did_you_mean(kind, kinds)}")
    return statistic, kind


def in_pass_order(names: Iterable[str]) -> list[str]:
    """Return statistics, each once, in the order in which a trial gets them: gradient passes first."""
    return sorted(set(names), key=lambda name: (not load_statistic(name).backward, name))


def by_statistic(needs: Iterable[Need]) -> dict[str, list[Need]]:
    """Return needs by their statistic, in pass order; of those of one key the one with the most samples only."""
    most: dict[str, dict[str, Need]] = {}
    for need in sorted(needs):  # a larger one comes later and replaces
        most.setdefault(need.statistic, {})[repr(load_statistic(need.statistic).key(need))] = need
    return {name: list(most[name].values()) for name in in_pass_order(most)}
