"""One trial: prune one model by one configuration and measure what is left. The heart of the program, without Ray.

    importance      calibration windows -> Taylor importance of every group              (shared by trials)
    removal         calibration windows -> loss increase without each layer or block     (shared; layerwise, blockwise)
    pruning         method's scores + exact budget -> plan -> smaller model
    perplexity      on held-out text
    zero_shot       tasks in growing slices of their items; the last slice has them all

Whatever takes a pass over a model is cached by what it depends on: statistics by their samples, measurements by the
structure that was measured. Two configurations that keep the same groups are one model and are measured once; one that
removes nothing is the baseline; a trial that was interrupted goes on where it was.

`run_trial(config, context)` does it all; `Trial.stages()` does it a stage at a time, for schedulers that watch. Without a
configuration the dense model is measured: the baseline.
"""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tune_prune.core.config import PruningConfig
from tune_prune.core.files import to_json
from tune_prune.core.records import StageReport, Status, TrialRecord
from tune_prune.core.store import GRADIENTS, ITEMS, PLAN, PLAN_COMPARISON, FolderStore
from tune_prune.evaluation.item_scores import ItemScore, outcomes_by_task, summarize, to_parquet
from tune_prune.pruning.diagnostics import (
    extreme_pruning_layers,
    gradient_diagnosis,
    gradient_metrics,
    pruning_comparison,
)
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.methods import LOSS_FLOOR, Statistics, load_method
from tune_prune.pruning.selection import select
from tune_prune.pruning.statistics.taylor import Importance
from tune_prune.pruning.surgery import prune
from tune_prune.trial.context import TrialContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SharedStatistics:
    """What the trials at one seq_len need from the dense model: it is computed for all of them when the first one asks."""

    num_samples: tuple[int, ...]
    removals: dict[str, int]  # kind of removal -> samples

    @classmethod
    def of(cls, configs: Iterable[PruningConfig]) -> SharedStatistics:
        """For configurations of one seq_len."""
        configs = list(configs)
        removals: dict[str, int] = {}
        for config in configs:
            for kind in load_method(config.method).removals:
                removals[kind] = max(removals.get(kind, 0), config.num_removal_samples)
        return cls(tuple(sorted({config.taylor_num_samples for config in configs})), removals)


def by_seq_len(configs: Iterable[PruningConfig]) -> dict[int, SharedStatistics]:
    """What the configurations of each seq_len share, the longest first."""
    configs = list(configs)
    lengths = sorted({config.taylor_seq_len for config in configs}, reverse=True)
    return {
        length: SharedStatistics.of(config for config in configs if config.taylor_seq_len == length)
        for length in lengths
    }


class Trial:
    """One trial and what it has found so far. `config` None: the dense model. `shared`: what trials beside it will need."""

    def __init__(
        self, config: PruningConfig | None, context: TrialContext, shared: SharedStatistics | None = None
    ) -> None:
        self.config = config
        self.context = context
        self._shared = shared
        self.reports: list[StageReport] = []
        self.items: list[ItemScore] = []
        self.plan: PruningPlan | None = None
        self.importance: Importance | None = None
        if context.loaded.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(context.loaded.device)
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")

    def stages(self) -> Iterator[StageReport]:
        """Run the trial, one stage per report."""
        if self.config is None:
            dense = PruningPlan.keep_all(self.context.loaded.geometry)
            yield from self._evaluate(self.context.loaded.model, dense.structure)
        else:
            model, plan = yield from self._prune(self.config)
            yield from self._evaluate(model, plan.structure)

    def _prune(self, config: PruningConfig) -> Generator[StageReport, None, tuple[PreTrainedModel, PruningPlan]]:
        context, loaded = self.context, self.context.loaded
        method = load_method(config.method)
        shared = self._shared or SharedStatistics.of([config])

        with self._stage("importance") as report:
            self.importance, report.tokens = context.importance(
                config.taylor_seq_len, config.taylor_num_samples, shared.num_samples
            )
            report.metrics = gradient_metrics(self.importance.gradients)
        yield report

        increase: dict[str, np.ndarray] = {}
        if method.removals:
            with self._stage("removal") as report:
                samples = {kind: shared.removals[kind] for kind in method.removals}
                losses, report.tokens = context.removal(config.taylor_seq_len, samples)
                raw = {kind: losses.increase(kind, config.num_removal_samples) for kind in method.removals}
                increase = {kind: np.maximum(values, LOSS_FLOOR) for kind, values in raw.items()}
                report.metrics = {"clamped_removal_losses": float(sum((v < LOSS_FLOOR).sum() for v in raw.values()))}
            yield report

        with self._stage("pruning") as report:
            importance = self.importance.groups.per_parameter(loaded.geometry)
            scores = method.scores(Statistics(loaded.geometry, importance, increase, context.run.seed))
            self.plan = select(scores, loaded.geometry, config.pruning_ratio, config.shape)
            model = prune(loaded.model, loaded.family, self.plan)
            report.metrics = {
                "params_count": float(sum(p.numel() for p in model.parameters())),
                "removed_fraction": self.plan.removed_fraction,
                "extreme_pruning_layers": float(extreme_pruning_layers(self.plan, loaded.geometry)),
            }
        yield report
        return model, self.plan

    def _evaluate(self, model: PreTrainedModel, structure: str) -> Iterator[StageReport]:
        context = self.context
        with self._stage("perplexity") as report:
            result, report.tokens = context.perplexity(model, structure)
            report.metrics = {"ppl": result.ppl}
            if self.config is None:
                report.metrics |= {"params_count": float(context.loaded.geometry.total_params), "removed_fraction": 0.0}
        yield report

        for index in range(len(context.run.protocol.slices)):
            with self._stage("zero_shot") as report:
                added, report.tokens = context.item_scores(model, structure, index)
                self.items += added
                report.metrics, report.outcomes = summarize(self.items), outcomes_by_task(added)
                report.items_scored, report.items_total = len(self.items), context.suite.num_items
            yield report

    @contextmanager
    def _stage(self, name: str) -> Iterator[StageReport]:
        report = StageReport(name, 0.0)
        started = time.perf_counter()
        yield report
        report.duration_s = time.perf_counter() - started
        self.reports.append(report)

    def record(self, status: Status = "complete", reason: str = "") -> TrialRecord:
        """What the ledger keeps of this trial as it stands."""
        metrics: dict[str, float] = {}
        for report in self.reports:
            metrics |= report.metrics
        return TrialRecord(
            key=self.context.key(self.config),
            model=self.context.run.label,
            config=asdict(self.config) if self.config else {},
            status=status,
            reason=reason,
            metrics=metrics,
            stages=[
                {name: value for name, value in asdict(report).items() if name not in ("metrics", "outcomes")}
                for report in self.reports
            ],
            started_at=self.started_at,
            elapsed_time_s=sum(report.duration_s for report in self.reports),
            peak_memory_bytes=peak_memory_bytes(self.context.loaded.device),
            host=platform.node(),
            notes=self.context.notes,
        )

    def write_files(self, store: FolderStore) -> None:
        """The trial's own files: what each decision was made from, and every item's outcome."""
        geometry = self.context.loaded.geometry
        if self.plan is not None:
            store.put(PLAN, to_json(self.plan.to_dict()))
            store.put(PLAN_COMPARISON, to_json(pruning_comparison(self.plan, geometry)))
        if self.importance is not None:
            store.put(GRADIENTS, to_json(gradient_diagnosis(self.importance.gradients)))
        if self.items:
            store.put(ITEMS, to_parquet(self.items))


def run_trial(config: PruningConfig | None, context: TrialContext, store: FolderStore | None = None) -> TrialRecord:
    """The whole trial at once; its files go to `store`. Raises what its stages raise."""
    trial = Trial(config, context)
    for _ in trial.stages():
        pass
    if store is not None:
        trial.write_files(store)
    return trial.record()


def prepare(
    context: TrialContext, seq_len: int, shared: SharedStatistics
) -> Iterator[tuple[dict[str, Any], StageReport]]:
    """Compute, or find in the cache, what the trials at one seq_len share: one gradient pass and one removal pass at most.
    Gives every pass that was really made, when it is made: what for, and its cost."""
    about = {"model": context.run.label, "seq_len": seq_len}
    started = time.perf_counter()
    missing = context.missing_importance(seq_len, shared.num_samples)
    if missing:
        context.compute_importance(seq_len, missing)
        seconds = time.perf_counter() - started
        yield about | {"num_samples": max(missing)}, StageReport("importance", seconds, tokens=seq_len * max(missing))
    if shared.removals:
        started = time.perf_counter()
        _, tokens = context.removal(seq_len, shared.removals)
        if tokens:
            seconds = time.perf_counter() - started
            yield about | shared.removals, StageReport("removal", seconds, tokens=tokens)


def peak_memory_bytes(device: torch.device) -> int:
    """GPU: the most torch has allocated in this trial; CPU: the process's peak resident set, which only grows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
