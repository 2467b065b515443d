"""Which statistics of the dense model trials need, and their cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import ModelRun, PruningConfig, Samples
from tune_prune.data import calibration
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import Arrays, Begun, GrowingStatistic, Need, by_statistic, load_statistic

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tune_prune.models.loading import LoadedModel


def needs_of(configs: Iterable[PruningConfig]) -> tuple[Need, ...]:
    """Return the needs that the trials of `configs`, all on the same samples, share: computed for all of them when the
    first asks."""
    configs = list(configs)
    methods = {name: load_method(name) for name in {config.method for config in configs}}
    needs = {need for config in configs for need in methods[config.method].needs(config).values()}
    return tuple(need for needs_of_one in by_statistic(needs).values() for need in needs_of_one)


def by_samples(configs: Iterable[PruningConfig]) -> dict[Samples, tuple[Need, ...]]:
    """Return what the configurations of each seq_len and draw share, the longest first; no entry where they share nothing."""
    groups: dict[Samples, list[PruningConfig]] = {}
    for config in configs:
        groups.setdefault(config.samples, []).append(config)
    longest_first = sorted(groups, key=lambda samples: -samples.seq_len)
    return {samples: needs for samples in longest_first if (needs := needs_of(groups[samples]))}


@dataclass(frozen=True)
class StatisticCache:
    """The statistics of one model on one kind of device (`devices.device_key`) in the artifact store; of a pruned copy of it
    where there is a `structure` (PruningPlan.structure). `fingerprint`: of a calibration text."""

    run: ModelRun
    model_fingerprint: str
    device: str
    artifacts: ArtifactStore
    structure: str = ""
    fingerprint: Callable[[str], str] = calibration.calibration_fingerprint

    def key(self, samples: Samples, need: Need) -> dict[str, Any]:
        statistic, run = load_statistic(need.statistic), self.run.of(samples)
        return {
            "version": statistic.version,
            "code": statistic.code,
            "model": self.model_fingerprint,
            "calibration": self.fingerprint(run.calibration),
            "seed": run.seed,
            "dtype": run.dtype,
            "device": self.device,
            "seq_len": samples.seq_len,
            **statistic.key(need),
            **({"structure": self.structure} if self.structure else {}),
            **({"bos": True} if run.protocol.bos else {}),
        }

    def get(self, samples: Samples, need: Need) -> Arrays | None:
        """Return what is stored for the need; None where that is nothing, or of too few samples."""
        statistic = load_statistic(need.statistic)

        def read(arrays: dict[str, np.ndarray]) -> Arrays | None:
            if not statistic.covers(arrays, need):
                return None
            statistic.value(arrays, need)  # raises where they are not those of a statistic
            statistic.metrics({need: arrays})
            return arrays

        return self.artifacts.get(statistic.stage, self.key(samples, need), read)

    def put(self, samples: Samples, need: Need, arrays: Arrays) -> None:
        """Keep what was computed for the need, unless another process has stored as many samples or more meanwhile."""
        if self.get(samples, need) is None:
            self.artifacts.put(load_statistic(need.statistic).stage, self.key(samples, need), arrays)

    def collect(
        self, samples: Samples, needs: Sequence[Need], windows: torch.Tensor, dense: LoadedModel, residency: Residency
    ) -> tuple[Begun, int]:
        """Compute the arrays of `needs`, all of one statistic, by a pass over `windows`, and store them; these, and the tokens that
        were forwarded. What an interrupted pass, or one for fewer samples, has left is not computed again."""
        statistic, model, family = load_statistic(needs[0].statistic), dense.model, dense.family
        made: Begun
        done = 0  # samples that are there already
        if isinstance(statistic, GrowingStatistic):

            def keep(begun: Begun) -> None:
                for need, arrays in begun.items():
                    self.put(samples, replace(need, num_samples=statistic.samples(arrays)), arrays)

            stored = {need: self.get(samples, replace(need, num_samples=1)) for need in needs}
            begun: Begun | None = {need: arrays for need, arrays in stored.items() if arrays is not None}
            if begun is not None and len(begun) == len(needs):
                done = min(statistic.samples(arrays) for arrays in begun.values())
            else:
                begun = None
            made = statistic.collect(model, family, windows, needs, residency, begun, keep)
        else:
            made = statistic.collect(model, family, windows, needs, residency)
        for need, arrays in made.items():
            self.put(samples, need, arrays)
        work = statistic.work(needs, samples.seq_len, dense.geometry.num_layers, dense.device.type)
        return made, work.tokens // len(windows) * (len(windows) - done)

    def missing(self, samples: Samples, needs: Iterable[Need]) -> tuple[Need, ...]:
        return tuple(need for need in needs if self.get(samples, need) is None)
