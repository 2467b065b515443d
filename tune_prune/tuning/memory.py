"""Peak memory of a trial, stage by stage, from the shapes of its model and of its batches, and the way to hold the model that fits.

A worker holds the dense model all the time, unless its weights stay in their files. Beside it a stage takes:

    gradients       float32 sums of the projections' gradients, twice where a snapshot falls inside a batch; what every layer
                    saves for its backward pass; and a part of the logits with their gradient
      by layer      sums of one layer, what one layer saves, and, until the pass has come back to it, what every layer was
                    given: hidden states of all samples, in host memory or in a file
      kfac          in place of these sums products of the inputs of every layer's last projections; what solving by them takes
      steps, recovery   those of a pruned copy, which is beside the dense model, with its adapters
    other passes    one layer's activations and the hidden states that the pass carries (of all removed models at once)
      refit         beside these the sums of products of one layer's inputs, and what solving by them takes
    evaluation      the pruned projections (all else is shared with the dense model) and the largest batch of perplexity
                    windows (for KL too) or zero-shot rows
    streamed        the layer of the moment and the next, or what stands before or behind the layers; the hidden states that
                    wait between two layers, and the masks of zero-shot rows; or, of a pruned copy, all its weights

What a statistic adds it says itself (`PassWork`). The formulas were held to what an H100 took (docs/studies/h100) and to what torch
allocates on a CPU. Where they are wrong nevertheless, a stage is tried again with less (trial.fallback).

Saved per token and layer under sdpa attention, with H hidden size, Q width of the query heads, M channels: inputs of the
projections 2 H + Q + M, queries, keys, values and output of the kernel 4 Q, the MLP's inner products 3 M, and the float32
inputs of norms, of two 2 H (compare Korthikanti et al., arXiv:2205.05198, who count the layers of a GPT); in float32 on a GPU,
where query heads share keys, also scores of every head with the row's tokens: no fused kernel of torch's takes them. In a mixture
M are the channels of the experts that a token takes, and each of these keeps its input and its output, too, 2 H.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers.configuration_utils import PretrainedConfig

from tune_prune.core import machine
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.machine import TooLittleMemory, at_least, size
from tune_prune.evaluation.divergence import TASK_TOKENS, TEXT_TOKENS, compared_tokens
from tune_prune.evaluation.engine.rows import default_batch_tokens
from tune_prune.evaluation.perplexity import windows_at_once
from tune_prune.models.families import family_of
from tune_prune.models.geometry import Geometry
from tune_prune.models.head import positions_at_once, softmax_rows
from tune_prune.models.runner.layer_runner import BLOCK_TOKENS
from tune_prune.models.runner.residency import RESIDENT, WAYS, Place, Residency
from tune_prune.models.runner.spread import layers_on
from tune_prune.pruning.compensation import recovery, refit
from tune_prune.pruning.padding import most_bytes
from tune_prune.pruning.statistics import PassWork, by_statistic, load_statistic
from tune_prune.trial.iteration import works_of
from tune_prune.trial.statistics import by_samples
from tune_prune.tuning.cost import Workload

# A worker that has done a trial of a tiny model: Python, torch, transformers, lm-eval, Ray; on a GPU the CUDA context. On a CPU
# torch's build for CUDA takes more than its build for CPUs.
PROCESS_BYTES = {"cpu": (950 if torch.version.cuda else 550) * 2**20, "cuda": 600 * 2**20}
GRAPH_BYTES = {"cpu": 0, "cuda": 64 * 2**20}  # more of one that trains: cuBLAS's on the stream of CUDA graphs
INLINE_BYTES = {"cpu": 200 * 2**20, "cuda": 0}  # more of one that also plans and reports
SCORED_SHARE = 0.75  # of a zero-shot batch's positions, at most: piqa's
FLOAT32 = 4
# What an allocator holds over what is counted of a gradient pass through the whole model: on a CPU 0.97 to 1.26 (24 processes).
FRAGMENTATION = {"cpu": 1.35, "cuda": 1.2}
# Of all other stages, whose tensors come and go a layer or a part of the logits at a time: a share of them, up to so many bytes.
# C libraries keep small freed blocks: up to 1.9 times a small model's tensors (50 processes), of Llama-3-8B, streamed, 0.6 GiB.
KEPT = {"cpu": (2.0, 640 * 2**20), "cuda": (0.2, sys.maxsize)}
SOLVED_AT_ONCE = 256  # columns of an inverse, by kfac


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a stage takes beside the process and the dense weights."""

    stage: str  # as in records
    way: str  # in which the model is held
    held: int  # while it runs: sums of gradients and hidden states, the pruned projections with their padding, brought layers
    activations: int  # of a batch
    away: int = 0  # hidden states in host memory or in a file, of a trial on a GPU; those in a file on a CPU

    @property
    def total(self) -> int:
        return self.held + self.activations


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one trial that holds its model in one way."""

    way: Residency
    process: int  # without any model
    weights: int  # dense model; 0: they stay in their files
    stages: tuple[StageMemory, ...]

    @property
    def largest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def total(self) -> int:
        """Bytes of the peak, where the model is computed with."""
        return self.peak(self.largest)

    @property
    def away(self) -> int:
        """Bytes of hidden states that are elsewhere, at most."""
        return max(stage.away for stage in self.stages)

    def peak(self, stage: StageMemory) -> int:
        return self.process + self.weights + stage.total

    def fits(self, bounds: Bounds) -> bool:
        return self.total <= bounds.get("device", self.total) and self.away <= bounds.get(self.way.states, self.away)


# Bytes that a trial may take of what it computes on and of where hidden states can wait; no limit where none is named.
Bounds = Mapping[Place, int]


def on_this_machine(trials: int = 1) -> dict[Place, int]:
    """Return the bytes that each of so many trials may take where hidden states can wait; on CPUs "host" is the device, too."""
    folder = tempfile.gettempdir()
    room = 0 if machine.in_memory(folder) else shutil.disk_usage(folder).free
    return {"host": machine.memory().available // trials, "file": room // trials}


def choose(ways: Sequence[MemoryPlan], bounds: Bounds) -> MemoryPlan:
    """Choose the first of `ways` that fits, else the one that takes least where it computes."""
    leanest = min(reversed(ways), key=lambda plan: plan.total)  # of equal ones that with states in a file
    return next((plan for plan in ways if plan.fits(bounds)), leanest)


def choose_within(
    ways: Sequence[MemoryPlan], bounds: Bounds, limit: int | None, what: str, folder: str = ""
) -> MemoryPlan:
    """Choose one of `ways`; `limit`: bytes of the device that were allowed by hand. Raises UserError where `what` needs more than
    that, or has no place for its hidden states; `folder`: what holds them in a file."""
    if limit is not None:
        bounds = {**bounds, "device": min(limit, bounds.get("device", limit))}
    plan = choose(ways, bounds)
    if limit is not None and plan.total > limit:
        raise TooLittleMemory(
            f"--memory is {size(limit)}, but {what} needs {size(plan.total)} in its leanest way ({plan.way}; the most in its stage "
            f"{plan.largest.stage}); ",
            f"use --memory {at_least(plan.total)} or more, or a smaller model",
        )
    if plan.total <= bounds.get("device", plan.total) and not plan.fits(bounds):
        raise UserError(
            f"{what} fits into memory only layer by layer, with a file of {size(plan.away)} in "
            f"{folder or tempfile.gettempdir()}, where {size(bounds['file'])} are free: set TMPDIR to a folder with more room, or "
            "use fewer or shorter samples"
        )
    return plan


@contextmanager
def advising(step: str) -> Iterator[None]:
    """Begin the advice of an error of too little memory with `step`, which opens leaner ways; "": there are none."""
    try:
        yield
    except TooLittleMemory as error:
        if not step:
            raise
        raise UserError(f"{error.fact}{step}, or {error.step}") from None


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model and of its batches on `device` ("cpu" or "cuda"), in weights of `itemsize` bytes."""

    geometry: Geometry
    config: PretrainedConfig
    itemsize: int
    device: str
    gpus: int = 1  # over which the layers are spread; bytes are those of the fullest

    def ways(
        self,
        passes: Sequence[tuple[str, PassWork]],
        evaluation: Callable[[Residency], Sequence[StageMemory]] = lambda way: (),
        from_files: bool = True,
        removed_params: int | None = 0,
    ) -> list[MemoryPlan]:
        """Plan a trial of those `passes` (stage and work) and that `evaluation` in every way there is, the fastest first.

        `from_files`: whether weights can stay in their files; `removed_params`: of a copy that is made; None: there is none."""
        backward = any(work.backward for _, work in passes)
        process = PROCESS_BYTES[self.device] + any(work.adapter_rank for _, work in passes) * GRAPH_BYTES[self.device]
        # What stands outside the layers is on the first GPU and the last: counted as if one had it all.
        outside = self.geometry.language_params - sum(self.geometry.layer_params)
        weights = (outside + self._on_one(self.geometry.layer_params)) * self.itemsize
        plans = []
        for way in WAYS:
            possible = from_files and self.gpus == 1 if way.from_files else backward or way == RESIDENT
            if possible and not (way.pruned_whole and removed_params is None):
                stages = *self._passes(passes, way, removed_params or 0), *evaluation(way)
                held = 0 if way.from_files else weights
                plans.append(MemoryPlan(replace(way, gpus=self.gpus), process, held, stages))
        return plans

    def evaluation(
        self,
        removed_params: int | None,
        window: int,
        text_tokens: int,
        longest_row: int,
        row_tokens: int = sys.maxsize,
        way: Residency = RESIDENT,
    ) -> tuple[StageMemory, ...]:
        """Plan pruning and what follows; or, where `removed_params` is None, measuring the model itself.

        `window`: tokens of a perplexity window; `text_tokens`: of its text; `longest_row`: of the longest zero-shot item;
        `row_tokens`: of all of them."""
        config, device, item = self.config, self.device, self.itemsize
        # Bytes of each stage's batch in the layers, and behind them.
        positions = window * max(1, min(windows_at_once(window, config, device), text_tokens // window))
        perplexity = positions * self._inside(window), self._logits(positions) + self._head_inputs(positions)
        tokens = max(default_batch_tokens(config, device), longest_row)
        scored = int(SCORED_SHARE * tokens) if device == "cuda" else longest_row  # a CPU takes few logits at once
        masks = tokens * longest_row * (8 + 4 + item)  # made from distances in int64
        softmax = min(scored, softmax_rows(device, config.vocab_size))
        # Logits of all positions are there at once on a CPU only.
        scores = config.vocab_size * (FLOAT32 * softmax + item * (softmax if device == "cuda" else scored))
        zero_shot = tokens * self._inside(longest_row) + masks, scores + masks + self._head_inputs(tokens)
        compared = max(tokens, window)  # batches as large as zero-shot's, or one window
        row = max(longest_row, min(window, compared_tokens(text_tokens, TEXT_TOKENS)))
        kl = compared * self._inside(row), self._logits(compared, models=2) + self._head_inputs(2 * compared)
        cut = () if removed_params is None else (self.pruning(removed_params, way),)
        copy = sum(stage.held for stage in cut)
        # Tokens that go through brought layers together, and the bytes of their masks.
        block = min(max(BLOCK_TOKENS, tokens), row_tokens)
        blocks = {
            "kl": (kl, min(max(BLOCK_TOKENS, compared), TEXT_TOKENS + TASK_TOKENS), 0),
            "perplexity": (perplexity, min(max(BLOCK_TOKENS, positions), text_tokens), 0),
            "zero_shot": (zero_shot, block, block * longest_row * item),
        }
        return *cut, *(self._measuring(stage, *needs, copy, way) for stage, needs in blocks.items())

    def _measuring(
        self, stage: str, batch: tuple[int, int], block: int, masks: int, copy: int, way: Residency
    ) -> StageMemory:
        """Plan a stage of the evaluation; `copy`: bytes of the pruned copy."""
        whole = StageMemory(stage, str(RESIDENT), copy, self._allocated(max(batch)))
        if not way.from_files:
            return whole
        states = block * (self._between + self._given) * self.itemsize
        streamed = self._streamed(stage, masks, states, *batch, way.forward_only)
        # Of copies that are read as a whole, the dense model is the baseline's, which is not.
        return max(whole, streamed, key=lambda stage: stage.total) if way.pruned_whole else streamed

    def _streamed(self, stage: str, held: int, states: int, layers: int, head: int, way: Residency) -> StageMemory:
        """Plan a stage for which layers are brought, with `states`, bytes of hidden states that wait between them. `layers`,
        `head`: bytes of a batch there; beside the layers are two of them, beside the head its own weights."""
        away = self._away(states, way)
        weights, mapped = self._ends
        # The file is closed before anything goes through the head.
        ends = max(weights + mapped, self._allocated(head) + weights)
        activations = max(self._allocated(layers), ends - self._two_layers)
        return StageMemory(stage, str(way), held + states - away + self._two_layers, activations, away)

    def _away(self, states: int, way: Residency) -> int:
        """Return how many of these bytes of hidden states are not in the memory that is computed in."""
        return states if way.states == "file" or (way.states == "host" and self.device == "cuda") else 0

    def _allocated(self, tensors: int) -> int:
        """Return what an allocator takes for so many bytes of tensors, which come and go."""
        share, most = KEPT[self.device]
        return tensors + min(int(share * tensors), most)

    def pruning(self, removed_params: int, way: Residency = RESIDENT) -> StageMemory:
        """Plan the pruned model, which shares all but its projections with the dense one where that is there."""
        if way.from_files and not way.pruned_whole:
            return StageMemory("pruning", str(way.forward_only), self._two_layers, 0)
        every = zip(self.geometry.channel_cost, self.geometry.mixtures, strict=True)
        padding = most_bytes(tuple(cost for cost, mixture in every if not mixture), self.itemsize, self.device)
        # What is filled up is there twice, a weight at a time.
        filled = self.itemsize * self.geometry.hidden_size * self._m if padding else 0
        layers = self.geometry.layer_params
        if way.from_files:
            left, reading = self.geometry.language_params - removed_params, sum(self._ends)
        else:  # what is removed may all be on other GPUs
            left, reading = min(sum(layers) - removed_params, self._on_one(layers)), 0
        if self.geometry.experts_per_token:  # stacked weights, of which experts are taken, and then channels
            reading += self.geometry.largest_weight * self.itemsize
        return StageMemory("pruning", str(RESIDENT), left * self.itemsize + padding, max(filled, reading))

    @property
    def _two_layers(self) -> int:
        """Weights of two layers that were brought, and of the tensor that is just being read."""
        h = self.geometry.hidden_size
        largest = max(self.geometry.layer_params) + max(self.geometry.whole_attention, default=0)
        reading = self._stored * h * max(self._q, self._m)
        if self.geometry.experts_per_token:  # stacked of what was read, before it is cut
            reading = self.itemsize * self.geometry.largest_weight
        return self.itemsize * 2 * (largest + 4 * h) + reading

    @property
    def _stored(self) -> int:
        """Bytes of a weight in its file."""
        dtype = self.config.dtype
        return dtype.itemsize if isinstance(dtype, torch.dtype) else self.itemsize

    @property
    def _ends(self) -> tuple[int, int]:
        """Bytes of the embedding or the head, and what is mapped of its file while it is read, on a CPU."""
        weights = self.config.vocab_size * self.geometry.hidden_size
        further = self._given * getattr(self.config, "vocab_size_per_layer_input", 0)
        projection = self._given * self.geometry.hidden_size
        read = max(weights, further) * self._stored if self.device == "cpu" else 0
        return (weights + further + projection) * self.itemsize, read

    def _passes(self, passes: Iterable[tuple[str, PassWork]], way: Residency, removed_params: int) -> list[StageMemory]:
        """Plan the largest pass of each stage."""
        largest: dict[str, StageMemory] = {}
        for stage, work in passes:
            # A pruned copy from which statistics are taken is as large as the dense model, at most.
            removed = removed_params if work.adapter_rank else 0
            own, copy = way, 0
            if (work.adapter_rank or work.of_copy) and (way.pruned_whole or not way.from_files):
                copy = self.pruning(removed, way).held  # held as Recipe.to_train does
                own = replace(way, from_files=False, pruned_whole=False, gradients_by_layer=way.by_layer)
            one = self._gradients(stage, work, own) if work.backward else self._forward(stage, work, own)
            one = replace(one, held=one.held + copy + (self._adapters(work) if work.adapter_rank else 0))
            largest[stage] = max(one, largest.get(stage, one), key=lambda stage: (stage.total, stage.away))
        return list(largest.values())

    def _adapters(self, work: PassWork) -> int:
        """Bytes that AdamW keeps of the adapters (they, a gradient and two moments) and, on a CPU, of the hidden states of the
        dense model that they are trained towards."""
        h = self.geometry.hidden_size
        # Inputs and outputs; keys and values as if they were as wide as queries.
        widths = 4 * (h + self._q) + 3 * (h + self._m)
        waiting = work.waiting_tokens * h * self.itemsize if self.device == "cpu" else 0
        return 4 * FLOAT32 * work.adapter_rank * widths * self.geometry.num_layers + waiting

    def _forward(self, stage: str, work: PassWork, way: Residency) -> StageMemory:
        h, tokens, most = self.geometry.hidden_size, work.batch_tokens, max(self._q, self._m)
        head = (self._logits(tokens) + self._head_inputs(tokens)) * bool(work.head_positions)
        inside, carried, sums = self._inside(work.row_tokens), tokens * work.carried, 0
        if work.input_squares:
            # Inputs are copied in float64 to sum up their squares; a GPU does so in many parts, with 9.5 bytes more (measured).
            wide = self.itemsize + bool(self.itemsize % FLOAT32) * FLOAT32 + max(self.itemsize, FLOAT32)
            inside = max(inside, most * (wide + (8 if self.device == "cpu" else 18)) + 3 * h * self.itemsize)
        layers = tokens * inside
        if work.product_tokens:  # all tokens go through a layer before the next one
            carried = work.tokens
            sums, products = self._products(work)
            layers = max(layers, products)
        if way.from_files:
            run = max(work.tokens, work.head_positions, work.attention_tokens // self.geometry.num_layers)
            states = min(max(BLOCK_TOKENS, carried), run) * (self._between + self._given) * self.itemsize
            return self._streamed(stage, sums, states, layers, head, way.forward_only)
        if work.product_tokens and self.device == "cpu":  # where the weights that come out are kept
            sums += self.itemsize * h * self.geometry.num_layers * (self._q + self._m)
        activations = self._allocated(max(layers, head))
        waiting = (carried * self._between + tokens * self._given) * self.itemsize
        return StageMemory(stage, str(RESIDENT), sums + waiting, activations)

    def _products(self, work: PassWork) -> tuple[int, int]:
        """Return what a refit keeps of a layer, the sums of products of its last projections' inputs and the inputs that are held
        out; and the most that it takes besides: a batch's inputs, in order and scaled, and its residual stream; or what solving
        takes (a copy of the sums, their Cholesky factor, four matrices of the projection's size); or what trying does."""
        q, m, h = self._q, self._m, self.geometry.hidden_size
        item, most = max(FLOAT32, self.itemsize), max(q, m)
        sums = q**2 + m**2 + (q + m) * work.held_tokens
        batch = work.batch_tokens * (self.itemsize * (2 * most + 4 * h) + item * (2 * most + h))
        fit = max(most * (2 * most + 4 * h), work.held_tokens * (2 * most + 2 * h))
        return item * sums, max(batch, item * fit)

    def _gradients(self, stage: str, work: PassWork, way: Residency) -> StageMemory:
        h, q, m, item, tokens = self.geometry.hidden_size, self._q, self._m, self.itemsize, work.batch_tokens
        layers, heads = self.geometry.num_layers, self._scores(work.row_tokens)
        logits = self._logits(tokens, gradient=True) * bool(work.head_positions)
        family, of_weights = family_of(self.config.model_type), bool(work.weight_sums)
        normed = len(family.layer_norms) * h + bool(family.head_norms) * (q + q // self.geometry.queries_per_kv)
        saved = item * (2 * h + 5 * q + 4 * m + 2 * self._routed) + FLOAT32 * normed + heads  # of a token in a layer
        saved += self._state(22, 28)
        if not (of_weights or work.adapter_rank):  # no weight's gradient needs inputs of the first projections
            saved -= item * 2 * h
        if work.adapter_rank:
            saved += (
                FLOAT32 * bool(item % FLOAT32) * (5 * h + q + m)
            )  # adapters in float32 save their inputs in it, too
            logits = self._logits(tokens, models=2)
        most, wide = max(q, m), max(FLOAT32, item)
        weight = self.geometry.largest_weight if self.geometry.experts_per_token else h * most
        one = of_weights * 2 * weight * item  # its gradient
        # Read out in float64: a projection's mean gradient, its absolute values, and these again.
        results = of_weights * (2 * FLOAT32 + 8) * weight
        sums, products, squares = work.weight_sums * wide, 0, 0
        if work.product_sums:
            group = self.geometry.queries_per_kv * self.geometry.head_dim
            products = work.product_sums * wide * (q**2 + m**2 + q * group + m)  # of a layer
            saved -= item * m  # its inputs are added up at once
            squares = m * wide * (1 + bool(item % FLOAT32))  # their gradient in float32, and squared
            results = wide * most * (most + 4 * max(SOLVED_AT_ONCE, group))  # a Cholesky factor, columns of its inverse
        if not way.by_layer:
            here = layers_on(layers, self.gpus)
            inside = item * (3 * h + 4 * q + 4 * m + 4 * self._routed) + squares + 2 * heads
            # Logits, too; they are gone before the first layer's backward pass.
            need = here * tokens * saved + max(logits, tokens * inside) + one
            held = sums * self._on_one(self.geometry.layer_params) + here * products
            return StageMemory(stage, str(way), held, int(FRAGMENTATION[self.device] * max(need, results)))
        sums = sums * max(self.geometry.layer_params) + products
        states = work.attention_tokens // layers * item * (self._between * (layers + 1) + self._given)
        head = max(0, logits + tokens * h * (6 * item + 2 * FLOAT32) - sums)
        inside = (
            item * (2 * h + max(2 * m + 2 * self._routed, 4 * q)) + squares + 2 * heads
        )  # gradients, while saved goes
        # The largest gradient of experts comes when what the backward pass holds inside them is gone.
        beside = max(tokens * inside, one) if self.geometry.experts_per_token else tokens * inside + one
        inner = max(tokens * saved + beside, results)
        if way.from_files:
            return self._streamed(stage, sums, states, inner, head, way)
        away = self._away(states, way)
        return StageMemory(stage, str(way), sums + states - away, self._allocated(max(head, inner)), away)

    def _logits(self, positions: int, models: int = 1, gradient: bool = False) -> int:
        """Return the bytes of the part of the logits [positions, vocabulary] that is there at once, and of the softmaxes of a part
        of that, in float32. `models`: 2 for a divergence, which has the difference of both softmaxes besides, and whose gradient
        is written over the dense model's logits; `gradient`: of losses, which has a place of its own."""
        vocab = self.config.vocab_size
        logits = min(positions, positions_at_once(self.device, vocab, models))
        of_softmax = min(logits, softmax_rows(self.device, vocab))
        wide = 1 + bool(self.itemsize % FLOAT32)  # what is not in float32 is copied
        if models > 1 or (gradient and getattr(self.config, "final_logit_softcapping", None)):
            wide = 3  # with the slope of the cap
        return vocab * ((models + gradient) * self.itemsize * logits + wide * FLOAT32 * of_softmax)

    def _head_inputs(self, tokens: int) -> int:
        """Return the bytes of what goes into the head, and of its norm in float32."""
        return tokens * 2 * self.geometry.hidden_size * (self.itemsize + FLOAT32)

    def _inside(self, row: int) -> int:
        """Return the bytes of a token of a row inside one layer of a forward pass."""
        h, item = self.geometry.hidden_size, self.itemsize
        inside = max(item * (max(3 * self._m + 2 * self._routed, 6 * self._q) + 5 * h), item * 2 * h + FLOAT32 * 3 * h)
        return inside + 2 * self._scores(row) + self._state(17, 8) + self._given * (item + 2 * FLOAT32)

    def _state(self, chunked: int, gated: int) -> int:
        """Return the bytes that a token takes in a layer that carries a state, by what transformers does without kernels of its
        own: so many float32 numbers for each head and token of its chunk (Mamba-2), or for each of its values (gated delta rule).
        The factors are those of a layer of Falcon-H1 1.5B's and of Qwen3.5 4B's sizes, measured on a CPU."""
        config = self.config
        if set(getattr(config, "layer_types", None) or ("",)) <= {"attention", "full_attention"}:
            return 0  # Granite 4.0 micro has no Mamba layer, and states sizes of them
        chunk = getattr(config, "mamba_chunk_size", 0) * getattr(config, "mamba_n_heads", 0)
        values = getattr(config, "linear_num_value_heads", 0) * getattr(config, "linear_value_head_dim", 0)
        return FLOAT32 * (chunked * chunk + gated * values)

    def _scores(self, row: int) -> int:
        """Return the bytes of a token's scores of all heads with its row's, where the kernel keeps them."""
        whole = self.device == "cuda" and self.itemsize >= FLOAT32 and self.geometry.queries_per_kv > 1
        return whole * row * self.itemsize * (self._q // self.geometry.head_dim)

    def _on_one(self, of_layers: Sequence[int]) -> int:
        """Return the most that one GPU has of what layers have."""
        each = layers_on(len(of_layers), self.gpus)
        return max(sum(of_layers[start : start + each]) for start in range(0, len(of_layers), each))

    @property
    def _given(self) -> int:
        """Numbers of a token that all layers are given besides its hidden states, as Gemma 4's are."""
        return self.geometry.num_layers * getattr(self.config, "hidden_size_per_layer_input", 0)

    @property
    def _between(self) -> int:
        """Numbers of a token between two layers: its hidden states and, where the last layers attend to them, keys and values of
        others, in Gemma 4 E2B and E4B 1.0 and 1.2 times as many."""
        return self.geometry.hidden_size * (3 if getattr(self.config, "num_kv_shared_layers", 0) else 1)

    @property
    def _q(self) -> int:
        return max(self.geometry.query_widths)

    @property
    def _routed(self) -> int:
        """Numbers of a token that its experts are given in all."""
        return self.geometry.experts_per_token * self.geometry.hidden_size

    @property
    def _m(self) -> int:
        return max(self.geometry.channels_used)


def memory_of(
    work: Workload,
    geometry: Geometry,
    configs: Collection[PruningConfig],
    removed_params: int,
    itemsize: int,
    device: str,
    from_files: bool = True,
    gpus: int = 1,
) -> list[MemoryPlan]:
    """Plan the memory of the largest trial among `configs`, in every way to hold the model, the fastest first. `from_files`:
    whether weights can stay in their files; `gpus`: over which a trial is spread."""
    shapes = Shapes(geometry, work.config, itemsize, device, gpus)
    read = work.perplexity_window, work.perplexity_tokens, work.longest_row, work.zero_shot.tokens
    measured = partial(shapes.evaluation, removed_params, *read)
    passes = passes_of(configs, geometry.num_layers, device)
    return shapes.ways(passes, lambda way: measured(way=way), from_files, removed_params)


def passes_of(configs: Collection[PruningConfig], num_layers: int, device: str) -> list[tuple[str, PassWork]]:
    """List the passes that the statistics and the recipes of `configs` make: stage and work, for their memory."""
    later = [("steps", work) for config in configs for work in works_of(config, num_layers, device)]
    return [*recipe_passes(configs, num_layers, device), *dict.fromkeys(later)] + [
        (load_statistic(name).stage, load_statistic(name).work(needs, samples.seq_len, num_layers, device))
        for samples, shared in by_samples(configs).items()
        for name, needs in by_statistic(shared).items()
    ]


def recipe_passes(configs: Collection[PruningConfig], num_layers: int, device: str) -> list[tuple[str, PassWork]]:
    """List the passes that the recipes of `configs` make; of a recovery one step."""
    tokens = dict.fromkeys(one.refit_tokens for one in configs if one.compensation != "none")
    refits = [("refit", refit.work(amount, num_layers, device)) for amount in tokens]
    trained = dict.fromkeys((one.recovery_steps, one.recovery_rank) for one in configs if one.recovery != "none")
    return refits + [("recovery", recovery.step_work(steps, num_layers, rank)) for steps, rank in trained]
