"""The cost of a plan: what is left of it, counted, at the speed of the machine that will run it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from statistics import mean
from typing import TYPE_CHECKING

import torch

from tune_prune.core import machine
from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import PruningConfig
from tune_prune.models.runner.devices import device_name
from tune_prune.tuning import gpus
from tune_prune.tuning.cost import (
    INLINE_START_S,
    WORKER_START_S,
    Arithmetic,
    CostEstimate,
    ModelWork,
    Speed,
    SpeedRequest,
    computed,
    estimate,
    measure,
    passes_to_make,
    recipe_amounts,
)

if TYPE_CHECKING:
    from tune_prune.tuning.plan import ModelPlan, Plan


def left(plan: Plan, model: ModelPlan, finished: Collection[str]) -> tuple[list[PruningConfig], int]:
    """Return the configurations of a model that the search may still run, and how many of them it runs at most: an adaptive one
    so many of each group that is compared in itself. `finished`: trial keys."""
    done = {spec.config for spec in model.trials if spec.key in finished}
    # Those that are done count first among those that the search runs at most.
    configs = plan.expected(sorted(model.configs, key=lambda one: one not in done))
    had, most = Counter(config.group("") for config in done), plan.space.num_trials or sys.maxsize
    pending = [one for one in configs if one not in done and had[one.group("")] < most]
    counts = Counter(config.group("") for config in pending)
    return pending, sum(min(count, most - had[group]) for group, count in counts.items())


def at_once(plan: Plan, finished: Collection[str]) -> int:
    """Count how much of the work that is left can run at once, at most: trials and dense models. A pass that trials share adds
    nothing, as they wait for it. At least 1."""
    measured = plan.held.baselines
    trials = sum(left(plan, model, finished)[1] for model in plan.models)
    return max(1, trials + sum(model.run.label not in measured for model in plan.models))


def cost_of(plan: Plan, finished: Collection[str], store: ArtifactStore) -> CostEstimate | None:
    """Estimate what the trials, baselines and passes that are still to be made will cost; `finished` trial keys are done.

    None where no worker of the cluster was free to measure its speed, or where that of a GPU that is not here is not known.
    """
    settings, device = plan.settings, plan.resources.device
    computed_on = plan.gpu_names[0] if plan.gpu_names else device  # as `devices.device_key` says it
    measured, works = plan.held.baselines, []
    for model in plan.models:
        configs = model.configs
        pending, trials = left(plan, model, finished)
        passes = passes_to_make(pending, model.run, model.model_fingerprint, computed_on, store)
        if not trials and model.run.label in measured:
            continue
        arithmetic = Arithmetic.of(model.geometry, model.workload.config.vocab_size)
        speed = computed(plan.card, model.run.dtype) if plan.card else _speed(plan, model, arithmetic)
        if speed is None:
            return None
        works.append(
            ModelWork(
                label=model.run.label,
                arithmetic=arithmetic,
                device=device,
                weight_bytes=model.geometry.language_params * getattr(torch, model.run.dtype).itemsize,
                speed=speed,
                passes=dict(list(passes.items())[:trials]),  # an adaptive trial visits one seq_len at most
                baseline=model.run.label not in measured,
                trials=trials,
                removed_params=round(mean(model.targets[config.pruning_ratio] for config in pending or configs)),
                perplexity_tokens=model.workload.perplexity_tokens,
                perplexity_window=model.workload.perplexity_window,
                zero_shot=model.workload.zero_shot,
                way=model.memory.way,
                recipes=recipe_amounts(pending),
                slices=len(model.run.protocol.slices),
                state_bytes=model.geometry.hidden_size * getattr(torch, model.run.dtype).itemsize,
            )
        )
    notes = []
    if len(plan.gpu_names) > 1:
        notes.append(
            f"measured on one of several kinds of GPU, whose kernels differ in the last bits: {', '.join(plan.gpu_names)}"
        )
    if any(not work.zero_shot.exact for work in works):
        notes.append("~ tokens of benchmarks are estimated: the hub's questions are read when the search starts")
    stops = ([] if settings.scheduler == "none" else [settings.scheduler]) + ["the KL filter"] * settings.kl_filter
    if stops:
        notes.append(f"an upper bound: {' and '.join(stops)} stop{'s' if len(stops) == 1 else ''} trials early")
    elif plan.space.search == "optuna":
        notes.append("an upper bound: trials of one seq_len share their work on the original model")
    if settings.draws is not None:
        notes.append("an upper bound: runs beyond the first are for configurations that could still be the best")
    if settings.recover is not None:
        notes.append(
            f"an upper bound: training is for at most {settings.recover} configurations that could still be the best"
        )
    adaptive = plan.space.search == "optuna"
    start_s = INLINE_START_S if settings.inline else WORKER_START_S
    return estimate(works, plan.slots, plan.resources.gpus, adaptive, notes, plan.resources.cpus, start_s)


def _speed(plan: Plan, model: ModelPlan, arithmetic: Arithmetic) -> Speed | None:
    """Find the rate at which the trials of `model` will run: that of its baseline or, before it is there, one that is measured
    now, here or by a worker of the cluster; None where no worker was free."""
    settings, resources = plan.settings, plan.resources
    if settings.address is None and (speed := _of_baseline(plan, model, arithmetic)):
        return speed
    threads = max(1, int(resources.cpus))
    request = SpeedRequest(model.workload.config, model.run.dtype, resources.device, threads)
    if settings.address is None:
        # In a process that ends the trials find its GPU's memory free.
        return gpus.call(measure, request) if request.device == "cuda" else measure(request)
    from tune_prune.tuning import nodes  # imports ray: not needed to plan a search on this machine

    measured: Speed | None = nodes.call(measure, request, resources)
    return measured


def _of_baseline(plan: Plan, model: ModelPlan, arithmetic: Arithmetic) -> Speed | None:
    """Take the rate that the dense model reached in its perplexity, if a device like the one planned for computed it with the
    whole model in memory."""
    record = plan.held.baselines.get(model.run.label)
    here = plan.gpu_names[0] if plan.gpu_names else device_name(torch.device("cpu"))
    if record is None or record.device_name != here:
        return None
    stage = next((stage for stage in record.stages if stage.stage == "perplexity"), None)
    if stage is None or not stage.tokens or stage.way:
        return None
    flops = arithmetic.forward(stage.tokens, min(model.workload.perplexity_window, stage.tokens))
    return Speed(flops / stage.duration_s, load=machine.load())
