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
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tune_prune import calibration
from tune_prune.artifacts import ArtifactStore
from tune_prune.config import PROTOCOL_VERSION, ModelRun, PruningConfig, digest, trial_key
from tune_prune.evaluation import perplexity, shared_prefix, task_files
from tune_prune.evaluation.item_scores import ItemScore, outcomes_by_task, summarize, write_items
from tune_prune.evaluation.perplexity import PerplexityResult
from tune_prune.evaluation.suite import Outcomes, ZeroShotSuite
from tune_prune.ledger import atomic_write_text, to_json
from tune_prune.models import catalog, loading
from tune_prune.pruning.diagnostics import (
    extreme_pruning_layers,
    gradient_diagnosis,
    gradient_metrics,
    pruning_comparison,
)
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.importance import Importance, taylor
from tune_prune.pruning.methods import LOSS_FLOOR, Statistics, load_method
from tune_prune.pruning.removal_loss import RemovalLosses, removal_losses
from tune_prune.pruning.selection import select
from tune_prune.pruning.surgery import prune
from tune_prune.records import StageReport, Status, TrialRecord

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATISTICS_VERSION = 1  # raise when importance or removal losses change their meaning: cached ones are then not used
SUITE_VERSION = 1  # the same for the zero-shot requests, as tokens


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
            self.plan = select(scores, loaded.geometry, config.pruning_ratio)
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

    def write_files(self, folder: Path) -> None:
        """trials/<key>/: what each decision was made from, and every item's outcome."""
        folder.mkdir(parents=True, exist_ok=True)
        geometry = self.context.loaded.geometry
        if self.plan is not None:
            atomic_write_text(folder / "pruning_plan.json", to_json(self.plan.to_dict()))
            atomic_write_text(folder / "pruning_comparison.json", to_json(pruning_comparison(self.plan, geometry)))
        if self.importance is not None:
            atomic_write_text(
                folder / "gradient_diagnosis.json", to_json(gradient_diagnosis(self.importance.gradients))
            )
        if self.items:
            write_items(self.items, folder / "items.parquet")


def run_trial(config: PruningConfig | None, context: TrialContext, folder: Path | None = None) -> TrialRecord:
    """The whole trial at once; its files go to `folder`. Raises what its stages raise."""
    trial = Trial(config, context)
    for _ in trial.stages():
        pass
    if folder is not None:
        trial.write_files(folder)
    return trial.record()


class TrialContext:
    """What all trials of one model share: the dense model, texts, tasks and cached statistics. Loaded once per process;
    parts that a stage does not need are not loaded."""

    def __init__(self, run: ModelRun, loaded: loading.LoadedModel, artifacts: ArtifactStore) -> None:
        self.run = run
        self.loaded = loaded
        self.artifacts = artifacts

    @classmethod
    def open(cls, run: ModelRun, artifact_dir: str | Path, device: str = "auto") -> TrialContext:
        """Load the model of `run`. Raises UserError where it cannot be had."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        source = catalog.resolve(run.model, run.revision)
        loaded = loading.load_model(source, getattr(torch, run.dtype), device)
        return cls(run, loaded, ArtifactStore(artifact_dir))

    def key(self, config: PruningConfig | None) -> str:
        return trial_key(config, self.model_fingerprint, self.data_fingerprint, self.run)

    @cached_property
    def model_fingerprint(self) -> str:
        return loading.fingerprint(self.loaded.source, self.loaded.model.config)

    @cached_property
    def data_fingerprint(self) -> str:
        return data_fingerprint(self.run)

    @cached_property
    def calibration_tokens(self) -> torch.Tensor:
        return calibration.tokenize(self.loaded.tokenizer, calibration.load_text(self.run.calibration))

    @cached_property
    def perplexity_tokens(self) -> torch.Tensor:
        text = perplexity.load_text(self.run.data_dir, uses_embedded_data(self.run))
        return calibration.tokenize(self.loaded.tokenizer, text)

    @property
    def perplexity_window(self) -> int:
        return min(self.run.protocol.perplexity_window, self.loaded.max_length)

    @cached_property
    def suite(self) -> ZeroShotSuite:
        """The requests of all tasks as tokens: made by lm-eval once per model and task set, afterwards read."""
        protocol, source = self.run.protocol, task_source(self.run)
        key = {
            "version": SUITE_VERSION,
            "tokenizer": self.model_fingerprint,
            "tasks": self._task_fingerprint,
            "protocol": asdict(protocol) | {"perplexity_window": None},
            "max_length": self.loaded.max_length,
        }
        stored = self.artifacts.get("suite", key)
        if stored is not None:
            return ZeroShotSuite.from_arrays(stored, protocol)
        from tune_prune.evaluation.zero_shot import build_suite  # imports lm_eval: seconds, and not needed before

        suite = build_suite(self.loaded.tokenizer, protocol, source, self.loaded.max_length)
        arrays = suite.arrays()
        if arrays is not None:
            self.artifacts.put("suite", key, arrays)
        return suite

    @cached_property
    def _task_fingerprint(self) -> str:
        return task_files.fingerprint(task_source(self.run), self.run.protocol.tasks)

    @cached_property
    def _text_fingerprint(self) -> str:
        return perplexity.fingerprint(self.run.data_dir, uses_embedded_data(self.run))

    @cached_property
    def _sharing_refused(self) -> str | None:
        """Why the choices of an item are scored one by one on this model; None: they share their prefix."""
        return shared_prefix.refusal(self.loaded.model)

    @property
    def notes(self) -> list[str]:
        return [f"zero-shot choices are scored one by one: {self._sharing_refused}"] if self._sharing_refused else []

    def perplexity(self, model: PreTrainedModel, structure: str) -> tuple[PerplexityResult, int]:
        """The perplexity of `model`, which keeps `structure`, and the tokens forwarded to get it (0: it was cached)."""
        key = self._measurement(structure, text=self._text_fingerprint, window=self.perplexity_window)
        stored = self.artifacts.get("perplexity", key)
        if stored is not None:
            return PerplexityResult(float(stored["ppl"]), float(stored["mean_loss"]), int(stored["num_tokens"])), 0
        result = perplexity.perplexity(model, self.perplexity_tokens, self.perplexity_window)
        self.artifacts.put("perplexity", key, {name: np.array(value) for name, value in asdict(result).items()})
        return result, result.num_tokens

    def item_scores(self, model: PreTrainedModel, structure: str, index: int) -> tuple[list[ItemScore], int]:
        """The scores of the items that slice `index` adds, and the tokens forwarded to get them (0: they were cached)."""
        protocol = asdict(self.run.protocol) | {"perplexity_window": None}
        key = self._measurement(structure, tasks=self._task_fingerprint, protocol=protocol, slice=index)
        stored = self.artifacts.get("zero_shot", key)
        if stored is not None:
            return self.suite.judge(index, Outcomes(stored["loglikelihoods"], stored["greedy"])), 0
        share = self._sharing_refused is None
        outcomes = self.suite.outcomes(model, index, share=share)
        self.artifacts.put("zero_shot", key, {"loglikelihoods": outcomes.loglikelihoods, "greedy": outcomes.greedy})
        return self.suite.judge(index, outcomes), self.suite.tokens_in_slice(index, share)

    def windows(self, seq_len: int, count: int) -> torch.Tensor:
        return calibration.windows(self.calibration_tokens, seq_len, count, self.run.seed)

    def importance(self, seq_len: int, num_samples: int, also: Sequence[int] = ()) -> tuple[Importance, int]:
        """The importance from `num_samples` windows, and the tokens forwarded to get it (0: it was cached).

        Where it has to be computed, the same pass serves the sample counts of `also`.
        """
        stored = self.artifacts.get("importance", self._statistic(seq_len, num_samples=num_samples))
        if stored is not None:
            return Importance.from_arrays(num_samples, stored), 0
        wanted = {num_samples, *self._missing_importance(seq_len, also)}
        return self.compute_importance(seq_len, sorted(wanted))[num_samples], seq_len * max(wanted)

    def _missing_importance(self, seq_len: int, num_samples: Iterable[int]) -> list[int]:
        return [
            n for n in num_samples if self.artifacts.get("importance", self._statistic(seq_len, num_samples=n)) is None
        ]

    def compute_importance(self, seq_len: int, snapshots: list[int]) -> dict[int, Importance]:
        """One gradient pass for all `snapshots`; every result is cached."""
        loaded = self.loaded
        results = taylor(loaded.model, loaded.family, self.windows(seq_len, max(snapshots)), snapshots)
        for n, importance in results.items():
            self.artifacts.put("importance", self._statistic(seq_len, num_samples=n), importance.arrays())
        return results

    def removal(self, seq_len: int, num_samples: dict[str, int]) -> tuple[RemovalLosses, int]:
        """Losses without each block of the kinds in `num_samples`, each on at least that many windows, and the tokens
        forwarded to get them: one pass for all kinds that the cache lacks."""
        keys = {kind: self._statistic(seq_len, removal=kind) for kind in num_samples}
        found = {kind: self.artifacts.get("removal", key) for kind, key in keys.items()}
        missing = [kind for kind, stored in found.items() if stored is None or len(stored["dense"]) < num_samples[kind]]
        tokens = 0
        if missing:
            count = max(num_samples[kind] for kind in missing)
            losses = removal_losses(self.loaded.model, self.loaded.family, self.windows(seq_len, count), missing)
            tokens = seq_len * count * (1 + len(missing) * self.loaded.geometry.num_layers)
            for kind in missing:
                arrays = {"dense": losses.dense, "removed": losses.removed[kind]}
                self.artifacts.put("removal", keys[kind], arrays)
                found[kind] = arrays
        dense = max((stored["dense"] for stored in found.values() if stored is not None), key=len)
        return RemovalLosses(dense, {kind: stored["removed"] for kind, stored in found.items() if stored}), tokens

    def _statistic(self, seq_len: int, **more: Any) -> dict[str, Any]:
        return {
            "version": STATISTICS_VERSION,
            "model": self.model_fingerprint,
            "calibration": calibration.fingerprint(self.run.calibration),
            "seed": self.run.seed,
            "dtype": self.run.dtype,
            "device": self.loaded.device.type,
            "seq_len": seq_len,
            **more,
        }

    def _measurement(self, structure: str, **more: Any) -> dict[str, Any]:
        return {
            "version": PROTOCOL_VERSION,
            "model": self.model_fingerprint,
            "structure": structure,
            "dtype": self.run.dtype,
            "device": self.loaded.device.type,
            **more,
        }


def prepare(
    context: TrialContext, seq_len: int, shared: SharedStatistics
) -> Iterator[tuple[dict[str, Any], StageReport]]:
    """Compute, or find in the cache, what the trials at one seq_len share: one gradient pass and one removal pass at most.
    Gives every pass that was really made, when it is made: what for, and its cost."""
    about = {"model": context.run.label, "seq_len": seq_len}
    started = time.perf_counter()
    missing = context._missing_importance(seq_len, shared.num_samples)
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


def uses_embedded_data(run: ModelRun) -> bool:
    """Whether tasks and perplexity text are the embedded ones: for embedded models without a --data-dir."""
    return run.data_dir is None and catalog.resolve(run.model).kind == "embedded"


def task_source(run: ModelRun) -> task_files.TaskSource:
    return task_files.TaskSource.of(run.data_dir, uses_embedded_data(run))


def data_fingerprint(run: ModelRun) -> str:
    """What the trials of `run` are measured on, by content; needs neither lm_eval nor the model."""
    return digest(
        {
            "calibration": calibration.fingerprint(run.calibration),
            "perplexity": perplexity.fingerprint(run.data_dir, uses_embedded_data(run)),
            "tasks": task_files.fingerprint(task_source(run), run.protocol.tasks),
        }
    )


def peak_memory_bytes(device: torch.device) -> int:
    """GPU: the most torch has allocated in this trial; CPU: the process's peak resident set, which only grows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
