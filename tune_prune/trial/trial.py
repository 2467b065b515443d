"""One trial: prune one model by one configuration and measure what is left. Without Ray.

    (statistics)    calibration windows -> what the method's scores need: a stage for each statistic, shared by trials
    steps           where it is pruned in several: part of the budget, statistics of what is left; a stage for each but the last
    pruning         method's scores + exact budget -> plan -> smaller model
    refit           of what is left of the cut blocks, where the configuration has a compensation
    recovery        training of what is left, where it has one
    kl              divergence from the dense model, on a little of that text and of the tasks
    perplexity      on held-out text
    zero_shot       tasks in growing slices of their items; the last slice has them all

Whatever takes a pass over a model is cached by what it depends on: statistics by their samples, measurements by the
structure that was measured. Two configurations that keep the same groups are one model and are measured once; one that
removes nothing is the baseline; a trial that was interrupted goes on where it was.

`run_trial(config, context)` does it all; `Trial.stages()` does it a stage at a time, for schedulers that watch. Without a
configuration the dense model is measured: the baseline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers

from tune_prune.core.config import PruningConfig, Samples
from tune_prune.core.errors import NotFinite
from tune_prune.core.files import to_json
from tune_prune.core.ledger import file_checksum
from tune_prune.core.records import Slice, StageReport, TrialRecord
from tune_prune.core.store import ITEMS, KL, PLAN, PLAN_COMPARISON, Store
from tune_prune.evaluation.divergence import Divergence
from tune_prune.evaluation.item_scores import ItemScore, gold_logprobs_by_task, outcomes_by_task, summarize, to_parquet
from tune_prune.evaluation.kept_suite import end_token
from tune_prune.models.catalog import ModelSource
from tune_prune.models.runner.devices import device_name, peak_memory, reset_peak
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.groups import PruningPlan, extreme_pruning_layers, pruning_comparison
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import Arrays, Need, by_statistic, load_statistic
from tune_prune.trial.context import TrialContext
from tune_prune.trial.iteration import first_step, next_step, steps_of
from tune_prune.trial.measurements import measure_items, measure_kl, measure_perplexity
from tune_prune.trial.recipe import Recipe
from tune_prune.trial.steps import recovered, refitted


class Trial:
    """One trial and what it has found so far, which is its `record`.

    config    None: the dense model
    shared    what trials beside it will need of the dense model, so that one pass serves them too
    record    as it was begun; None: it begins now, with the key of its model, configuration and data, which have to be there
    base      the model that a checkpoint was pruned from, to which its KL is measured
    """

    def __init__(
        self,
        config: PruningConfig | None,
        context: TrialContext,
        shared: Sequence[Need] = (),
        record: TrialRecord | None = None,
        base: ModelSource | None = None,
    ) -> None:
        self.config = config
        self.context = context
        self.record = replace(
            record or TrialRecord.begun(context.key(config), context.run.label, config),
            device_name=device_name(context.loaded.device),
            torch_version=str(torch.__version__),
            transformers_version=transformers.__version__,
        )
        self.items: list[ItemScore] = []
        self.plan: PruningPlan | None = None
        self.made: Recipe | None = None
        self._shared, self._base = shared, base
        self._caveats: tuple[str, ...] = ()  # of what was measured
        self._divergences: dict[str, Divergence] = {}  # of a pruned model
        self._files: dict[str, Any] = {}  # of the statistics, for the trial's folder

    def stages(self) -> Iterator[StageReport]:
        """Run the trial, one stage per report."""
        if self.config is None:
            yield from self.measure(Recipe(PruningPlan.keep_all(self.context.loaded.geometry)))
        else:
            yield from self.measure((yield from self.recipe(self.config)))

    def recipe(self, config: PruningConfig, plan: PruningPlan | None = None) -> Generator[StageReport, None, Recipe]:
        """Return the stages in which the pruned model is made, one per report; what they make is returned, and `made`.
        `plan`: what is known to be kept; None: it is found."""
        if plan is None:
            plan = yield from self._select(config)
        self.made = Recipe(plan)
        if config.compensation != "none":
            self._check_weights()
            with self._stage("refit", lambda: self.context.loaded.residency.forward_only) as report:
                self.made, refit, report.tokens = refitted(self.context, plan, config)
                used = sum(block.used for block in refit.blocks)
                report.metrics = {"refit_error": refit.error, "refit_blocks": float(used)}
            yield report
        if config.recovery != "none":
            self._check_weights()
            with self._stage("recovery", lambda: self.context.loaded.residency) as report:
                self.made, trained, report.tokens = recovered(self.context, self.made, config)
                report.metrics = {"recovery_error": trained.error}
            yield report
        return self.made

    def _select(self, config: PruningConfig) -> Generator[StageReport, None, PruningPlan]:
        context, geometry = self.context, self.context.loaded.geometry
        method = load_method(config.method)
        self.record = replace(self.record, method_code=method.code)
        collected: dict[Need, Arrays] = {}
        for name, wanted in by_statistic(method.needs(config).values()).items():
            statistic = load_statistic(name)
            with self._stage(statistic.stage, partial(context.residency_for, statistic)) as report:
                shared = [need for need in self._shared if need.statistic == name]
                arrays, report.tokens = context.collect(config.samples, wanted, shared)
                collected |= arrays
                report.metrics = statistic.metrics(arrays)
                self._files |= statistic.files(arrays)
            yield report

        self._check_weights()
        step = None
        for number in range(1, steps_of(config)):
            with self._stage("steps", lambda: context.loaded.residency) as report:
                before = step or context.fitted("steps", "forward", lambda _: first_step(context, config, collected))
                step, report.tokens = next_step(context, config, before.next(context, config, number))
            yield report
        with self._stage("pruning") as report:

            def choose() -> PruningPlan:
                return (step or first_step(context, config, collected)).next(context, config, steps_of(config))

            self.plan, params = context.cut(choose)
            report.metrics = {
                "params_count": float(params),
                "removed_fraction": self.plan.removed_fraction,
                "extreme_pruning_layers": float(extreme_pruning_layers(self.plan, geometry)),
            }
        yield report
        return self.plan

    def measure(self, recipe: Recipe) -> Iterator[StageReport]:
        """Return the stages after pruning, of the model that `recipe` makes."""
        try:
            yield from self._measure(recipe)
        finally:
            self.context.drop_copy()

    def _measure(self, recipe: Recipe) -> Iterator[StageReport]:
        context, plan = self.context, recipe.plan
        held = partial(context.residency_of, recipe)
        self._check_weights()
        if plan.removed_params or self._base:  # else it is the dense model, which diverges from itself by 0
            with self._stage("kl", held) as report:
                self._divergences, report.tokens = measure_kl(context, recipe, self._base)
                for name, kl in self._divergences.items():
                    report.metrics |= {f"kl_{name}": kl.mean, f"kl_{name}_stderr": kl.stderr}
            yield report
        with self._stage("perplexity", held) as report:
            result, report.tokens = measure_perplexity(context, recipe)
            if math.isnan(result.ppl) and not plan.removed_params:
                what = f"{context.run.label} predicts NaN on the perplexity text, though its weights are finite"
                raise NotFinite(f"{what}; correct its config.json, or compute with another --dtype")
            report.metrics = {"ppl": result.ppl}
            if "params_count" not in self.record.metrics:  # of the dense model, or of one that was pruned before
                removed = {"removed_fraction": plan.removed_fraction}
                report.metrics |= {"params_count": float(plan.total_params - plan.removed_params)} | removed
        yield report

        for index in range(len(context.run.protocol.slices)):
            with self._stage("zero_shot", held) as report:
                added, report.tokens = measure_items(context, recipe, index)
                self.items += added
                report.metrics = summarize(self.items)
                if index == 0 and (seen := self._items_in_calibration()):
                    report.metrics["items_in_calibration"] = float(seen)
                if end_token(context.loaded.tokenizer) is not None:
                    report.metrics["items_after_eos"] = float(len(self.items))
                report.slice = Slice(
                    index,
                    context.run.protocol.slices[index],
                    outcomes_by_task(added),
                    context.suite.items_per_task,
                    gold_logprobs_by_task(added),
                    context.suite.gold_items_per_task,
                )
                report.items_scored, report.items_total = len(self.items), context.suite.num_items
                self._caveats = context.notes
            yield report

    def _items_in_calibration(self) -> int:
        """Count the measured items that the calibration text holds; 0 where this trial reads none, as of a model that was
        made before."""
        config = self.config
        if config is None or self.made is None:
            return 0
        changed = {config.compensation, config.recovery} != {"none"}
        return self.context.items_in_calibration(config) if changed or load_method(config.method).needs(config) else 0

    def _check_weights(self) -> None:
        """Raise NotFinite where a weight of the dense model is not finite: neither scores nor what is measured may show it, as
        where it is of a token that no text has."""
        if (name := self.context.non_finite_weight) is not None:
            raise NotFinite(
                f"{self.context.run.label} cannot be pruned or measured: its weight {name} holds NaN or infinity; save or download "
                "the model again"
            )

    @contextmanager
    def _stage(self, name: str, held: Callable[[], Residency] = lambda: RESIDENT) -> Iterator[StageReport]:
        """Time what is done within, and add its report to the record; `held`: how the model is held in the end."""
        report = StageReport(name, 0.0)
        started = time.perf_counter()
        devices = self.context.loaded.devices
        reset_peak(devices)
        try:
            yield report
            report.way = self.context.way(name, held()) if report.tokens else ""
            for device in devices:
                # What was asked of it may not be done: the next stage must not pay for this one.
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            report.duration_s = time.perf_counter() - started
            report.peak_memory_bytes = peak_memory(devices)
            self.record = self.record.after(report)
        finally:  # what a failed stage has taken is recorded too
            peak = max(self.record.peak_memory_bytes, peak_memory(devices))
            notes = [*self._caveats, *self.context.fallback.notes]
            self.record = replace(self.record, peak_memory_bytes=peak, notes=notes)

    def write_files(self, store: Store) -> dict[str, str]:
        """Write the plan, what it removes, the statistics' files, divergences by blocks and every item's outcome to `store`, the
        trial's folder; gives their checksums by name, for the record."""
        plain = dict(self._files)
        if self.plan is not None:
            plain |= {
                PLAN: self.plan.to_dict(),
                PLAN_COMPARISON: pruning_comparison(self.plan, self.context.loaded.geometry),
            }
        if self._divergences:
            plain[KL] = {name: kl.to_dict() for name, kl in self._divergences.items()}
        contents = {name: to_json(values).encode() for name, values in plain.items()}
        if self.items:
            contents[ITEMS] = to_parquet(self.items)
        store.put_all(contents)
        return {name: file_checksum(content) for name, content in contents.items()}


def run_trial(
    config: PruningConfig | None,
    context: TrialContext,
    store: Store | None = None,
    on_stage: Callable[[TrialRecord], object] = id,
    record: TrialRecord | None = None,
) -> TrialRecord:
    """Run the whole trial at once and return its record: its files go to `store`, and the record after each stage to `on_stage`.
    `record`: as it was begun. Raises what its stages raise."""
    trial = Trial(config, context, record=record)
    for _ in trial.stages():
        on_stage(trial.record)
    return replace(trial.record, status="complete", files={} if store is None else trial.write_files(store))


def prepare(
    context: TrialContext, samples: Samples, needs: Sequence[Need]
) -> Iterator[tuple[dict[str, Any], StageReport]]:
    """Compute, or find in the cache, what the trials on the same samples share: one pass for each statistic at most. Gives every
    pass that was really made, when it is made: what for, and its cost."""
    for name, missing in by_statistic(context.cache.missing(samples, needs)).items():
        reset_peak(context.loaded.devices)
        started = time.perf_counter()
        _, tokens = context.collect(samples, missing)
        about = {"model": context.run.label, **samples.to_dict()}
        about |= {need.kind or "num_samples": need.num_samples for need in missing}
        statistic, duration_s = load_statistic(name), time.perf_counter() - started
        peak, way = peak_memory(context.loaded.devices), context.way(statistic.stage, context.residency_for(statistic))
        yield about, StageReport(statistic.stage, duration_s, tokens=tokens, peak_memory_bytes=peak, way=way)
