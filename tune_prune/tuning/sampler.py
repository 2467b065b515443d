"""Adaptive search: Optuna's TPE, one study per model, pruning ratio and recovery, over a finite set of configurations.

TPE (Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization") proposes points it has seen already when the
space is small; such a proposal is replaced by a seeded unseen point, so that no trial is spent twice. Studies live in
memory: the ledger's records rebuild them at every start.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from tune_prune.core.config import PruningConfig
from tune_prune.core.hashing import seed_for
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.measures import comparable, measured
from tune_prune.core.records import TrialRecord
from tune_prune.tuning.messages import TrialMessage
from tune_prune.tuning.work import TrialSpec, labels_of_groups

STARTUP_TRIALS = 5  # random points before TPE models anything; Optuna's 10 would be most of a 27-point space


class OptunaSearcher:
    """Proposes trials of `specs`, at most `num_trials` per model, pruning ratio and recovery, towards the best `objective` (one of
    MEASURES); one of these groups after the other.

    `known` are the ledger's records. Complete and early-stopped ones count as trials; failed ones are proposed first,
    as they are to run again. Proposals depend on `seed`, `specs`, `known` and the order of results only.
    """

    def __init__(
        self,
        specs: Sequence[TrialSpec],
        num_trials: int,
        seed: int,
        known: Iterable[TrialRecord] = (),
        objective: str = "accuracy",
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        known = list(known)
        self._specs = {spec.key: spec for spec in specs}
        self._groups = labels_of_groups(specs)
        members: dict[str, list[TrialSpec]] = {}
        for spec in specs:
            members.setdefault(self._groups[spec.key], []).append(spec)
        self._studies = {
            label: _Study(of_group, num_trials, seed_for(seed, f"optuna {label}"), known, objective)
            for label, of_group in members.items()
        }

    @property
    def remaining(self) -> int:
        """Count the trials that are still to be asked for."""
        return sum(study.remaining for study in self._studies.values())

    def ask(self) -> TrialSpec | None:
        """Return the next trial; None when all are asked for."""
        study = next((study for study in self._studies.values() if study.remaining), None)
        return None if study is None else self._specs[study.ask()]

    def tell(self, spec: TrialSpec, last: TrialMessage | None) -> None:
        """Take how a trial has ended: the message `last`, if it has sent any."""
        self._studies[self._groups[spec.key]].tell(spec.key, last)


class _Study:
    """The configurations of one model at one ratio, which of them were tried, and the Optuna study that proposes the next."""

    def __init__(
        self, specs: Sequence[TrialSpec], num_trials: int, seed: int, known: Iterable[TrialRecord], objective: str
    ) -> None:
        self._objective = objective
        self._known: set[str] = set()  # metrics that a trial has had
        self._keys = {spec.config: spec.key for spec in specs}
        ordered = sorted(self._keys, key=lambda config: config.order)
        values = [vars(config) for config in ordered]
        # The values that each hyperparameter takes, sorted, None first.
        self._levels = {
            name: sorted({row[name] for row in values}, key=lambda value: (value is not None, value))
            for name in values[0]
        }
        self._unread = _unread(ordered)
        self._random = random.Random(seed)
        self._live: dict[str, optuna.trial.Trial] = {}  # by trial key
        self._study = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
        )
        by_key = {record.key: record for record in known}
        records = [(config, by_key[key]) for config in ordered if (key := self._keys[config]) in by_key]
        done = {config for config, record in records if record.status != "failed"}
        self._again = [config for config, record in records if record.status == "failed"]
        self._unseen = [config for config in ordered if config not in done]
        self.remaining = max(0, min(num_trials - len(done), len(self._unseen)))
        for config, record in records:
            self._study.add_trial(self._finished_trial(config, record))

    def ask(self) -> str:
        """Return the key of an unseen configuration, which is seen from now on."""
        if self._again:
            config = self._again.pop(0)
            trial = self._enqueued(config)
        else:
            trial = self._study.ask(self._distributions())
            config = self._config(trial.params)
            if config not in self._unseen:
                self._study.tell(trial, state=TrialState.FAIL)
                meant = replace(config, **self._unread.get(_kind(config), {}))
                config = meant if meant in self._unseen else self._random.choice(self._unseen)
                trial = self._enqueued(config)
        self._unseen.remove(config)
        self._live[self._keys[config]] = trial
        self.remaining -= 1
        return self._keys[config]

    def _enqueued(self, config: PruningConfig) -> optuna.trial.Trial:
        self._study.enqueue_trial(self._params(config))
        return self._study.ask(self._distributions())

    def tell(self, key: str, last: TrialMessage | None) -> None:
        """Take how a trial has ended: complete, failed or, where it was still running, stopped.

        PRUNED keeps TPE from taking a partial value for a final one: of those it takes the last that was reported, so only that
        is. Of what was stopped before its items (step 0) only the KL can be known, which is final."""
        status = "failed" if last is None else last.record.status
        value = None if last is None else self._value(last.record.metrics)
        trial = self._live.pop(key)
        if status == "running" and last is not None:
            if last.stage is not None and value is not None:
                trial.report(value, last.stage.items_scored)
            self._study.tell(trial, state=TrialState.PRUNED)
        elif status == "complete" and value is not None:
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=TrialState.FAIL)

    def _value(self, metrics: Mapping[str, float]) -> float | None:
        """Return what Optuna maximises; None where it is not known, or no number."""
        self._known |= metrics.keys()
        value = measured(metrics, self._objective, self._known)
        value = comparable(value) if self._objective == "accuracy" else value
        return None if math.isnan(value) else value

    def _distributions(self) -> dict[str, BaseDistribution]:
        """Return where each hyperparameter may lie: numbers by their rank, so that 64 lies between 32 and 128 whatever the spacing;
        methods and shapes have no order."""
        return {
            name: CategoricalDistribution(levels) if _is_text(name) else IntDistribution(0, len(levels) - 1)
            for name, levels in self._levels.items()
        }

    def _config(self, params: Mapping[str, Any]) -> PruningConfig:
        values = {name: value if _is_text(name) else self._levels[name][value] for name, value in params.items()}
        return PruningConfig(**values)

    def _params(self, config: PruningConfig) -> dict[str, Any]:
        values = vars(config)
        return {
            name: values[name] if _is_text(name) else levels.index(values[name])
            for name, levels in self._levels.items()
        }

    def _finished_trial(self, config: PruningConfig, record: TrialRecord) -> optuna.trial.FrozenTrial:
        value = self._value(record.metrics)
        complete = record.status == "complete" and value is not None
        stopped = record.status == "stopped_early"
        steps = [stage.items_scored for stage in record.stages]
        return optuna.trial.create_trial(
            params=self._params(config),
            distributions=self._distributions(),
            state=TrialState.COMPLETE if complete else TrialState.PRUNED if stopped else TrialState.FAIL,
            value=value if complete else None,
            intermediate_values={max(steps, default=0): value} if stopped and value is not None else {},
        )


def _kind(config: PruningConfig) -> tuple[str, str, str]:
    """Return what decides which other hyperparameters a configuration reads."""
    return config.method, config.compensation, config.recovery


def _unread(configs: Iterable[PruningConfig]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return by kind the values that all configurations of the kind have.

    TPE does not know that damping means nothing without a refit, nor removal_power to taylor, and proposes them with any value.
    """
    common: dict[tuple[str, str, str], dict[str, Any]] = {}
    for config in configs:
        values = vars(config)
        rest = common.setdefault(_kind(config), dict(values))
        common[_kind(config)] = {name: value for name, value in rest.items() if values[name] == value}
    return common


def _is_text(name: str) -> bool:
    return HYPERPARAMETERS[name].kind.is_text
