"""One piece of work of a search, which one worker has at a time: a trial, or a job that makes what trials share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tune_prune.core.config import ModelRun, PruningConfig, Samples, group_labels
from tune_prune.pruning.statistics import Need


@dataclass(frozen=True)
class TrialSpec:
    """A trial: one configuration of one model; `key` names it in the ledger."""

    run: ModelRun
    config: PruningConfig
    key: str


@dataclass(frozen=True)
class PrepareJob:
    """A job: the statistics of one model on some samples or, without samples, the measurement of the dense model (its baseline)."""

    run: ModelRun
    samples: Samples | None = None
    needs: tuple[Need, ...] = ()

    @property
    def name(self) -> str:
        """A short name that no other job of the model has, e.g. "baseline"."""
        return self.samples.name if self.samples is not None else "baseline"

    def __str__(self) -> str:
        if self.samples is None:
            return f"baseline of {self.run.label}"
        return f"sample text at {self.samples} through {self.run.label}"


Work = TrialSpec | PrepareJob


def labels_of_groups(specs: Iterable[TrialSpec]) -> dict[str, str]:
    """Return by trial key the label of the group in which the trial is compared, e.g. "mistral@0.3"."""
    groups = {spec.key: spec.config.group(spec.run.label) for spec in specs}
    labels = group_labels(groups.values())
    return {key: labels[group] for key, group in groups.items()}


def groups_of_draws(specs: Iterable[TrialSpec]) -> dict[str, str]:
    """Return by trial key the group in which the trial may be stopped: its label of `labels_of_groups` and its draw of samples.

    Configurations race on one draw, where luck with the samples is no lead over another draw of the same configuration.
    """
    specs = list(specs)
    labels = labels_of_groups(specs)
    # None is the run's own draw: no configuration that a plan makes has the run's seed by its number.
    seeds = {spec.key: "" if spec.config.seed is None else spec.config.seed for spec in specs}
    return {key: f"{labels[key]} {seed}".strip() for key, seed in seeds.items()}
