"""What making a pruned model has taken, by the records of its search: seconds of statistics, pruning in steps, the cut, a refit and
a training. What measures the model is not in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import numpy as np

from tune_prune.core.config import PruningConfig
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.ledger import Ledger, read_about, read_passes
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import Location, location, open_store
from tune_prune.pruning.compensation import recovery
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import Need, by_statistic, load_statistic
from tune_prune.trial.iteration import steps_of, works_of

_OF_RECIPE = {row.name: row.default for row in HYPERPARAMETERS.values() if row.read_by == "recipe"}


class MakingSeconds:
    """Looks up what making the models of one experiment took.

    A stage that found its result in the cache, whole or in part, has forwarded fewer tokens than its work has. Its seconds say
    nothing then: those of a pass before the trials count or of another trial, that did all of the same work, or none are known. A
    pass that served other configurations too, with more samples or other kinds of a statistic, does not say what one of them takes.
    """

    def __init__(self, folder: Location) -> None:
        """Raises UserError where a record cannot be read."""
        store = open_store(folder)
        self._records = {record.key: record for record in Ledger(store).records()}
        self._passes = read_passes(store)
        models = (read_about(store) or {}).get("models", {})
        # Of block removal the tokens follow from them: where they are not known, none match.
        self._layers = {label: len(entry.get("geometry", {}).get("mlp_width", "?")) for label, entry in models.items()}
        self._in_trials: dict[tuple[object, ...], list[float]] = {}  # of whole stages that trials share
        for record in self._records.values():
            config = record.config
            assert config is not None
            for needs in _needs(config):
                stage = load_statistic(needs[0].statistic).stage
                self._note(record, stage, self._tokens(record, config, needs), (config.samples, needs))
            self._note(record, "steps", self._tokens_of_steps(record, config), replace(config, **_OF_RECIPE))

    def __call__(self, key: str) -> float:
        """Return the seconds of one trial by its key; NaN where no record has those of one of its stages."""
        record = self._records[key]
        config = record.config
        assert config is not None
        found = [_whole(record, "pruning")]
        found += [self._statistic(record, config, needs) for needs in _needs(config)]
        if steps_of(config) > 1:
            found.append(_median(self._in_trials.get((record.model, "steps", replace(config, **_OF_RECIPE)), ())))
        if config.compensation != "none":  # never cached
            found.append(_whole(record, "refit"))
        if config.recovery != "none":
            trained = recovery.work(config.recovery_steps, 1, config.recovery_rank)
            found.append(_whole(record, "recovery", sum(work.tokens for work in trained)))
        return sum(found)

    def _note(self, record: TrialRecord, stage: str, tokens: int, work: object) -> None:
        """The seconds of a stage that others have, too, where it did all of its `work`."""
        if not math.isnan(seconds := _whole(record, stage, tokens)):
            self._in_trials.setdefault((record.model, stage, work), []).append(seconds)

    def _statistic(self, record: TrialRecord, config: PruningConfig, needs: tuple[Need, ...]) -> float:
        """Return the seconds of the pass for `needs`, all of one statistic: of the preparation, or of trials."""
        statistic = load_statistic(needs[0].statistic)
        asked: dict[str, int | None] = dict.fromkeys(kind or "num_samples" for kind in statistic.kinds)
        asked |= {need.kind or "num_samples": need.num_samples for need in needs}
        wanted = {"model": record.model, "stage": statistic.stage, **asdict(config.samples), **asked}
        wanted["tokens"] = self._tokens(record, config, needs)
        alike = [one for one in self._passes if all(one.get(name) == value for name, value in wanted.items())]
        in_trials = self._in_trials.get((record.model, statistic.stage, (config.samples, needs)), ())
        return _median([*(one["duration_s"] for one in alike), *in_trials])

    def _tokens(self, record: TrialRecord, config: PruningConfig, needs: Sequence[Need]) -> int:
        """Return the tokens that a pass for `needs` forwards where none of it is cached."""
        statistic, layers = load_statistic(needs[0].statistic), self._layers.get(record.model, 1)
        return statistic.work(needs, config.seq_len, layers, "cpu").tokens

    def _tokens_of_steps(self, record: TrialRecord, config: PruningConfig) -> int:
        return sum(work.tokens for work in works_of(config, self._layers.get(record.model, 1), "cpu"))


def making_seconds(output_dirs: Iterable[str]) -> list[float]:
    """Return the seconds that made each trial of those folders; NaN where they are not known. Raises UserError."""
    folders: dict[Location, MakingSeconds] = {}
    found = []
    for output_dir in output_dirs:
        trial = location(output_dir)
        folder = trial.parent.parent
        if folder not in folders:
            folders[folder] = MakingSeconds(folder)
        found.append(folders[folder](trial.name))
    return found


def _needs(config: PruningConfig) -> list[tuple[Need, ...]]:
    return [tuple(needs) for needs in by_statistic(load_method(config.method).needs(config).values()).values()]


def _whole(record: TrialRecord, stage: str, tokens: int | None = None) -> float:
    """The seconds of a stage in a record; NaN where it is not there, or has not forwarded all of its `tokens`."""
    parts = [one for one in record.stages if one.stage == stage]
    if not parts or tokens not in (None, sum(one.tokens for one in parts)):
        return math.nan
    return sum(one.duration_s for one in parts)


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else math.nan
