"""What a plan costs: passes, tokens, operations and seconds of every stage, the wall time and the GPU-hours.

    seconds of a stage = tokens x seconds per token as measured (device_speed.py) x (1 - removed share) where a model is pruned

Trials and preparation jobs are dealt out to the slots one after the other, as the search does. What was measured for a
second on one core is extrapolated to hours, so the wall time is a range: from what it takes on an idle machine to what it
takes if the machine stays as busy as it was (`slowdown`). The live line corrects itself by what was measured so far.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from tune_prune.core.config import Samples
from tune_prune.core.machine import Load
from tune_prune.core.records import MODEL_STAGES, RECIPE_STAGES, in_order
from tune_prune.evaluation.divergence import TASK_TOKENS, TEXT_TOKENS, compared_tokens
from tune_prune.models.runner.layer_runner import BLOCK_TOKENS
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.compensation import recovery, refit
from tune_prune.pruning.statistics import Need, PassWork, by_statistic, load_statistic
from tune_prune.trial.iteration import works_of
from tune_prune.tuning.device_speed import DeviceSpeed
from tune_prune.tuning.flops import Arithmetic
from tune_prune.tuning.tokens import ZeroShotTokens

# Measured on a two-core machine without a GPU, but for one.
WORKER_START_S = 10.0  # Ray, a worker's imports and its model's configuration
INLINE_START_S = 1.0  # without Ray: what the plan has not imported
DISK_BYTES_PER_S = 1e9  # weights and hidden states, from and to a local disk or its cache
# Gradients by layer over those of the whole model, as the forward pass is made twice: 1.21 to 1.36 where it was measured.
BY_LAYER = 1.3
HOST_BYTES_PER_S = 1e10  # hidden states, between a GPU and host memory
SUITE_S = 3.0  # importing lm-eval
SUITE_S_PER_ITEM = 0.8e-3  # rendering and tokenising
TRIAL_OVERHEAD_S = 0.15  # of each trial outside of its stages: Ray's scheduling, files, TensorBoard
PRUNING_S = 0.005  # the choice of what is kept
# Slicing the weights. Of a GPU it is computed: reading and writing them takes a tenth of its memory's 1 to 5 TB/s.
PRUNING_BYTES_PER_S = {"cpu": 5e8, "cuda": 1e11}

# Weights of the layers from which on one trial fills a GPU: several at once take turns. A model of 3B parameters has so many.
FILLS_GPU = 2.5e9

# What the rates and constants may be off by: searches of the embedded models on two-core machines took 0.65 to 1.47 of the
# predicted wall time.
FASTER, SLOWER = 0.65, 1.5

Seconds = dict[str, float]  # by stage


@dataclass(frozen=True)
class ModelWork:
    """What a plan still has to do for one model."""

    label: str
    arithmetic: Arithmetic
    device: str  # cpu or cuda
    weight_bytes: int
    speed: DeviceSpeed
    passes: Mapping[Samples, Sequence[Need]]  # what is not cached
    baseline: bool  # whether the dense model is still to be measured
    trials: int
    removed_params: int
    perplexity_tokens: int
    perplexity_window: int
    zero_shot: ZeroShotTokens
    way: Residency = RESIDENT
    state_bytes: int = 0  # of a token between two layers
    slices: int = 1  # of the zero-shot items
    # `workload.recipe_amounts` of each trial, or of those that an adaptive search may visit.
    recipes: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class StageCost:
    """One stage of one model, over all its runs."""

    stage: str
    runs: int  # passes, or times it is done
    tokens: int
    flops: float
    seconds: float  # of one worker


@dataclass(frozen=True)
class ModelCost:
    """The stages of one model, and the seconds by stage of each preparation job and of each trial."""

    label: str
    stages: tuple[StageCost, ...]
    jobs: Mapping[Samples | None, Seconds]  # None: the baseline
    trial: Seconds
    trials: int


@dataclass(frozen=True)
class CostEstimate:
    """The prediction for a plan."""

    models: tuple[ModelCost, ...]
    slots: int
    wall_seconds: float  # at the measured speed
    gpu_hours: float
    notes: tuple[str, ...] = ()
    load: Load | None = None  # of the machine when its speed was measured
    slowdown: tuple[float, float] = (1.0, 1.0)  # what the seconds are to be multiplied by, at least and at most
    start_s: float = WORKER_START_S  # before the first stage

    @property
    def wall_range(self) -> tuple[float, float]:
        """Seconds that the whole takes, at least and at most."""
        return self.wall_seconds * self.slowdown[0], self.wall_seconds * self.slowdown[1]

    def stages(self) -> tuple[StageCost, ...]:
        """Summed over models."""
        every = [stage for model in self.models for stage in model.stages]
        result = []
        for name in in_order(stage.stage for stage in every):
            parts = [stage for stage in every if stage.stage == name]
            result.append(
                StageCost(
                    name,
                    sum(part.runs for part in parts),
                    sum(part.tokens for part in parts),
                    sum(part.flops for part in parts),
                    sum(part.seconds for part in parts),
                )
            )
        return tuple(result)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for cost.json."""
        return {
            "stages": {stage.stage: _plain(stage) for stage in self.stages()},
            "models": {model.label: {s.stage: _plain(s) for s in model.stages} for model in self.models},
            "slots": self.slots,
            "wall_seconds": list(self.wall_range),
            "load": None if self.load is None else asdict(self.load),
            "gpu_hours": self.gpu_hours,
            "notes": list(self.notes),
        }


def _plain(stage: StageCost) -> dict[str, Any]:
    return {name: value for name, value in asdict(stage).items() if name != "stage"}


def estimate(
    works: Iterable[ModelWork],
    slots: int,
    gpus: float,
    statistics_in_trials: bool = False,
    notes: Sequence[str] = (),
    cpus: float = 1.0,
    start_s: float = WORKER_START_S,
) -> CostEstimate:
    """The cost of `works` on `slots` workers with `gpus` and `cpus` each, which take `start_s` to start. Workers that share a GPU
    run at full speed beside each other while one alone does not fill it (FILLS_GPU).
    `statistics_in_trials`: passes are made by the first trial that needs them instead of by jobs before."""
    sharing = min(slots, round(1 / gpus)) if 0 < gpus < 1 else 1
    works = [replace(work, speed=work.speed.shared_by(sharing)) if _fills_gpu(work) else work for work in works]
    models = tuple(_model(work, statistics_in_trials) for work in works)
    durations: list[float] = []
    for model in models:
        durations += [sum(job.values()) for job in model.jobs.values()]
        durations += [sum(model.trial.values()) + TRIAL_OVERHEAD_S] * model.trials
    wall = start_s + _dealt_out(durations, slots) if durations else 0.0
    work = sum(stage.seconds for model in models for stage in model.stages)
    load = max((work.speed.load for work in works), key=lambda load: load.average, default=None)
    most = max((_slowdown(work, slots, cpus, gpus) for work in works), default=1.0)
    return CostEstimate(models, slots, wall, work * gpus / 3600, tuple(notes), load, (FASTER, most), start_s)


def _fills_gpu(work: ModelWork) -> bool:
    return work.device == "cuda" and work.arithmetic.projection_weights >= FILLS_GPU


def _slowdown(work: ModelWork, slots: int, cpus: float, gpus: float) -> float:
    """How much longer than predicted a worker may take that shares its device with the others and with what else ran then."""
    speed = work.speed
    if _fills_gpu(work):
        shared = speed.spread  # they wait for each other, and that is predicted
    elif gpus > 0:
        shared = speed.spread * min(
            slots, round(1 / min(1.0, gpus))
        )  # the trials of one GPU may each wait for all others
    else:
        trials = min(slots, math.floor(speed.load.cpus / cpus))  # on the machine that was measured
        # What runs beside them is also why equal runs of the measurement differed: not counted twice.
        shared = max(speed.spread, (speed.load.average + trials * max(1, int(cpus))) / speed.load.cpus)
    return SLOWER * shared


def _dealt_out(durations: Iterable[float], slots: int) -> float:
    """When the last of `slots` workers is done, each taking the next piece as soon as it is free."""
    free = [0.0] * slots
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def _model(work: ModelWork, statistics_in_trials: bool) -> ModelCost:
    passes = {samples: _passes(work, samples.seq_len, shared) for samples, shared in work.passes.items()}
    dense = {stage.stage: stage for stage in _evaluation(work, 0)}
    states = dense.pop("kl")
    pruned = {stage.stage: stage for stage in _evaluation(work, work.removed_params)}
    loading = 0.0 if work.way.streamed else work.weight_bytes / DISK_BYTES_PER_S
    # Requests that have been counted are in the cache.
    suite = 0.0 if work.zero_shot.exact else SUITE_S + SUITE_S_PER_ITEM * work.zero_shot.items
    jobs: dict[Samples | None, Seconds] = {}
    if work.baseline:
        jobs[None] = {name: stage.seconds for name, stage in dense.items()}
        jobs[None]["zero_shot"] += suite + loading
    trial = {name: stage.seconds for name, stage in pruned.items()}
    trial["pruning"] = PRUNING_S
    if work.way.pruned_whole:
        trial["pruning"] += work.weight_bytes / DISK_BYTES_PER_S
    elif not work.way.streamed:
        trial["pruning"] += work.weight_bytes / PRUNING_BYTES_PER_S[work.device]
    for samples, parts in passes.items():
        if not statistics_in_trials:
            jobs[samples] = {stage.stage: stage.seconds for stage in parts}
        elif work.trials:
            for stage in parts:
                trial[stage.stage] = trial.get(stage.stage, 0.0) + stage.seconds / work.trials
    if work.baseline and work.trials:  # nothing was measured yet: the first trial makes them
        trial["kl"] += states.seconds / work.trials
    made = [stage for parts in passes.values() for stage in parts]
    for name, amounts in work.recipes.items():
        if any(amounts) and work.trials:
            made.append(step := _step(work, name, amounts))
            trial[name] = step.seconds / work.trials
    made += [states] * (work.baseline and work.trials > 0)
    runs = [*[pruned] * work.trials, *[dense] * work.baseline]
    stages = []
    for name in in_order([*(stage.stage for stage in made), *MODEL_STAGES]):
        parts = [stage for stage in made if stage.stage == name] + [run[name] for run in runs if name in run]
        if name in RECIPE_STAGES and not parts:
            continue
        seconds = sum(part.seconds for part in parts)
        count = sum(part.runs for part in parts)
        if name == "pruning":
            count, seconds = work.trials, trial["pruning"] * work.trials
        if name == "zero_shot" and work.baseline:
            seconds += suite + loading
        stages.append(StageCost(name, count, sum(p.tokens for p in parts), sum(p.flops for p in parts), seconds))
    return ModelCost(work.label, tuple(stages), jobs, trial, work.trials)


def _passes(work: ModelWork, seq_len: int, needs: Sequence[Need]) -> list[StageCost]:
    """The pass of each statistic at one seq_len."""
    stages = []
    for name, wanted in by_statistic(needs).items():
        statistic = load_statistic(name)
        todo = statistic.work(wanted, seq_len, work.arithmetic.layers, work.device)
        stages.append(_pass(work, statistic.stage, todo, seq_len, work.speed.snapshots.get(name, 0.0)))
    return stages


def _pass(work: ModelWork, stage: str, todo: PassWork, seq_len: int, snapshot: float = 0.0) -> StageCost:
    """One pass; `snapshot`: seconds in which its sums are read out once."""
    if (todo.of_copy or todo.adapter_rank) and work.way.pruned_whole:  # the copy is there (Recipe.to_train)
        work = replace(work, way=replace(work.way, from_files=False, pruned_whole=False, gradients_by_layer=True))
    speed, arithmetic = work.speed, work.arithmetic
    tokens = arithmetic.layers_of_pass(todo, seq_len) / arithmetic.all_layers(1, seq_len)
    rate, head, call = speed.forward, speed.head, speed.forward_call
    if todo.backward:
        rate, head, call = speed.gradient, speed.head_gradient, speed.gradient_call
        if todo.adapter_rank and not work.way.by_layer:
            call = 0.0  # a step of a training is launched as one
    calls = (todo.attention_tokens + todo.mlp_tokens) / (2 * arithmetic.layers * todo.batch_tokens)
    seconds = max(tokens * rate(seq_len), calls * call)
    seconds += todo.head_positions * head + todo.snapshots * snapshot
    if todo.backward and work.way.by_layer:
        seconds = BY_LAYER * seconds + _waiting_s(work, todo)
    if work.way.streamed:
        seconds += 2 * _reading_s(work) if todo.backward else _reading_s(work, todo.tokens)
    return StageCost(stage, 1, todo.tokens, arithmetic.of_pass(todo, seq_len), seconds)


def _step(work: ModelWork, stage: str, amounts: Sequence[Any]) -> StageCost:
    """A step of the recipes of all trials; of a search that visits only some configurations as many as fall on them on average."""
    layers, share = work.arithmetic.layers, work.trials / len(amounts)

    def passes(amount: Any) -> Sequence[PassWork]:
        if stage == "steps":
            return works_of(amount, layers, work.device)
        kept = 1 - work.removed_params / work.arithmetic.projection_weights
        if stage == "refit":
            return [refit.work(amount, layers, work.device, kept)]
        return recovery.work(amount.recovery_steps, layers, amount.recovery_rank)

    # Of the same length for a refit and a recovery, which reads weights that are brought once for every step.
    each = [
        [_pass(work, stage, todo, amount.seq_len if stage == "steps" else refit.WINDOW) for todo in passes(amount)]
        for amount in amounts
        if amount
    ]
    tokens, flops, seconds = (
        share * sum(getattr(one, of) for parts in each for one in parts) for of in ("tokens", "flops", "seconds")
    )
    if work.way.pruned_whole and stage != "refit":  # each copy is brought once
        seconds += share * sum(one.steps - 1 if stage == "steps" else 1 for one in amounts if one) * _reading_s(work)
    elif stage == "recovery" and work.way.streamed:
        again = sum(one.recovery_steps - 1 for one in amounts if one)  # after the first step, which is in the pass
        seconds += share * again * 2 * _reading_s(work)
    return StageCost(stage, round(share * len(each)), round(tokens), flops, seconds)


def _waiting_s(work: ModelWork, todo: PassWork) -> float:
    """Seconds in which hidden states that are not on the device come and go: for every layer a token's are read and written
    forward; backward they are read again, and their gradient is read and written."""
    rates = {"device": math.inf, "host": HOST_BYTES_PER_S, "file": DISK_BYTES_PER_S}
    return 5 * todo.attention_tokens * work.state_bytes / rates[work.way.states]


def _reading_s(work: ModelWork, tokens: int = 0, parts: int = 1, block_tokens: int = BLOCK_TOKENS) -> float:
    """Seconds in which weights come from their files for a pass over so many tokens, which go through the layers in blocks, no
    fewer than `parts`."""
    return max(parts, math.ceil(tokens / block_tokens)) * work.weight_bytes / DISK_BYTES_PER_S


def _evaluation(work: ModelWork, removed_params: int) -> list[StageCost]:
    """KL, perplexity and zero-shot of one model of which `removed_params` are gone; of the dense one KL is the pass for the hidden
    states that every trial's KL reads."""
    arithmetic = work.arithmetic.pruned(removed_params)
    brought = work.way.streamed and not (work.way.pruned_whole and removed_params)
    tokens, window = work.perplexity_tokens, min(work.perplexity_window, work.perplexity_tokens)
    zero_shot, speed = work.zero_shot, work.speed

    def seconds(count: int, row_length: float, scored: int) -> float:
        share = arithmetic.all_layers(count, row_length) / work.arithmetic.all_layers(count, row_length)
        return count * share * speed.forward(row_length) + scored * speed.head

    compared = compared_tokens(tokens, TEXT_TOKENS) + compared_tokens(zero_shot.tokens, TASK_TOKENS)
    heads = 2 * compared if removed_params else 0
    reading = [0.0, 0.0, 0.0]
    if brought:
        read = partial(_reading_s, work, block_tokens=work.way.at_once(BLOCK_TOKENS))
        reading = [read(tokens), read(zero_shot.tokens, work.slices), read(compared)]
    layers = arithmetic.all_layers(compared, window)
    return [
        StageCost("kl", 1, compared, layers + arithmetic.head(heads), reading[2] + seconds(compared, window, heads)),
        StageCost(
            "perplexity", 1, tokens, arithmetic.forward(tokens, window), reading[0] + seconds(tokens, window, tokens)
        ),
        StageCost(
            "zero_shot",
            1,
            zero_shot.tokens,
            arithmetic.forward(zero_shot.tokens, zero_shot.row_length, zero_shot.scored),
            reading[1] + speed.engine * seconds(zero_shot.tokens, zero_shot.row_length, zero_shot.scored),
        ),
    ]
