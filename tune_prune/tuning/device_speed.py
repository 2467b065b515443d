"""How fast a device works on models of given shapes: some layers of random weights are run for a second or two.

Small models are measured whole. Of a large one as many layers as are small; where not even one is (7B on a CPU), a layer
of the same proportions but fewer heads and channels. What was not built counts by its operations. Rates are those of one
process alone: on CPUs its own seconds count, not those that it waits while others run. That several trials on one machine
share its caches and its memory bandwidth is not measured; `spread` and `load` say how sure the rates are.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from tune_prune.core import machine
from tune_prune.core.machine import Load
from tune_prune.evaluation.engine.prefix_trees import Rows, score_planned
from tune_prune.evaluation.engine.rows import Row, default_batch_tokens, token_log_probs
from tune_prune.models import loading
from tune_prune.models.families import LAYER_LISTS, decoder_layers, family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.head import Head
from tune_prune.pruning.passes.batches import BATCH_TOKENS
from tune_prune.pruning.statistics import Need, load_statistic
from tune_prune.tuning.flops import Arithmetic
from tune_prune.tuning.gpus import Card

SHORT_ROW = 32  # tokens; attention's share is small
LONG_ROW = 512
CALL_S = 0.025  # batches grow until a call takes this long
LONGEST_CALL_S = 0.2  # what would take longer is not tried
IN_PROPORTION = 0.75  # of a batch's growth, by which a GPU's call grows once it waits for work and not for launches
HEAD_POSITIONS = 16  # at least at once: one alone reads all its weights for itself, as no pass does
ENGINE_S = 0.1  # of zero-shot rows, plain ones and trees each
BUILT_BYTES = {"cpu": 32 * 2**20, "cuda": 2**30}  # of layers
MEASURED_VOCABULARY = 32_768  # of a larger one this much; the head costs in proportion
# Of the peak of a GPU that is not here: an H100 reached 0.37 to 0.5 of its data sheet's at the widths of 7B (docs/gpu.md).
REACHED = 0.4
TREES = 1.1  # seconds of the zero-shot engine over those of plain passes, there


@dataclass(frozen=True)
class SpeedRequest:
    """What is to be measured; it can be pickled and sent to a worker."""

    config: PretrainedConfig
    dtype: str
    device: str  # cpu or cuda
    threads: int
    longest_row: int  # tokens of the longest rows in the plan
    rows: Rows | None = None  # of some zero-shot items
    statistics: tuple[str, ...] = ("taylor",)  # with gradient passes


@dataclass(frozen=True)
class Line:
    """Seconds per token as a function of the row's length: attention makes it grow."""

    at_zero: float
    slope: float  # seconds per token and token of the row

    def __call__(self, row_length: float) -> float:
        return self.at_zero + self.slope * row_length


@dataclass(frozen=True)
class DeviceSpeed:
    """Seconds per token on one device by one process."""

    forward: Line  # of all layers
    gradient: Line  # forward and backward of all layers
    head: float  # per scored position: logits and their log-softmax
    head_gradient: float  # forward and backward
    snapshots: Mapping[
        str, float
    ]  # by statistic with a gradient pass: seconds to read it out of the sums of gradients, once
    engine: float  # seconds of the zero-shot engine over those of plain forward passes
    forward_call: float = 0.0  # seconds of a call of all layers at least: on a GPU those of launching its kernels
    gradient_call: float = 0.0
    spread: float = 1.0  # of equal runs the slowest over the fastest, median of all measurements
    load: Load = field(default_factory=Load)  # of the machine meanwhile

    def shared_by(self, processes: int) -> DeviceSpeed:
        """Of each of so many processes that take turns on the device; kernels each of them launches by itself."""

        def line(of: Line) -> Line:
            return Line(of.at_zero * processes, of.slope * processes)

        return replace(
            self,
            forward=line(self.forward),
            gradient=line(self.gradient),
            head=self.head * processes,
            head_gradient=self.head_gradient * processes,
            snapshots={name: seconds * processes for name, seconds in self.snapshots.items()},
        )


def measure(request: SpeedRequest) -> DeviceSpeed:
    """Measure on this machine. Takes a second or two; a 7B layer on a CPU some seconds more.

    Several threads are measured beside one alone, and what is faster counts: while other programs run, threads mostly wait
    for each other's turn, which says nothing of a search of hours.
    """
    threads, load = torch.get_num_threads(), machine.load()
    speeds = []
    if request.device == "cuda":
        loading.set_up_gpu()
    try:
        for count in sorted({1 if request.device == "cpu" else request.threads, request.threads}):
            torch.set_num_threads(count)
            speeds.append(replace(_Bench(request).speed(), load=load))
    finally:
        torch.set_num_threads(threads)
    return min(speeds, key=lambda speed: speed.forward(SHORT_ROW))


def computed(card: Card, arithmetic: Arithmetic, dtype: str) -> DeviceSpeed | None:
    """Of a GPU that is not here, by its peak in `dtype`; None where that is not known. Small models, which wait for launches of
    kernels, are slower."""
    if dtype not in card.peaks:
        return None
    operations = card.peaks[dtype] * REACHED
    token, head = arithmetic.all_layers(1, 128) / operations, arithmetic.head(1) / operations
    return DeviceSpeed(Line(token, 0.0), Line(3 * token, 0.0), head, 2 * head, {}, engine=TREES)


class _Bench:
    def __init__(self, request: SpeedRequest) -> None:
        config = request.config
        self.request = request
        self.device = torch.device(request.device)
        self.family = family_of(config.model_type)
        self.model = _random_model(config, getattr(torch, request.dtype), self.device)
        # What was built, and how much more the model has of it.
        asked = Arithmetic.of(loading.config_geometry(config)[1], config.vocab_size)
        built = Arithmetic.of(read_geometry(self.model, self.family), self.model.config.vocab_size)
        self.weights = asked.projection_weights / built.projection_weights
        self.solves = asked.input_cubes / built.input_cubes
        self.queries = asked.query_width / built.query_width
        self.head_share = asked.head_weights / built.head_weights
        self.batch_tokens = default_batch_tokens(self.model.config, request.device)
        self.gradient_tokens = BATCH_TOKENS[request.device]
        self.generator = torch.Generator().manual_seed(0)
        self.spreads: list[float] = []

    def speed(self) -> DeviceSpeed:
        forward, forward_call = self._line(self._forward, self.batch_tokens), self._call(self._forward)
        for layer in decoder_layers(self.model, self.family):
            for linear in self.family.linears(layer).values():
                linear.requires_grad_(True)
        gradient, gradient_call = self._line(self._gradient, self.gradient_tokens), self._call(self._gradient)
        self.model.requires_grad_(False)
        head = self._steady(self._head, self.batch_tokens, HEAD_POSITIONS) * self.head_share
        head_gradient = self._steady(self._head_gradient, self.gradient_tokens, HEAD_POSITIONS) * self.head_share
        snapshots = {name: self._snapshot(name) for name in self.request.statistics}
        engine = self._engine(forward, head)
        spread = median(self.spreads or [1.0])
        return DeviceSpeed(
            forward, gradient, head, head_gradient, snapshots, engine, forward_call, gradient_call, spread
        )

    def _snapshot(self, name: str) -> float:
        """Of the statistic, with a pass over two tokens."""
        window, statistic = self._tokens(1, 2), load_statistic(name)
        needs = [Need(name, statistic.kinds[0], 1)]
        run = self._warm(lambda: statistic.collect(self.model, self.family, window, needs))
        return self._seconds(run) * (self.solves if statistic.solves else self.weights)

    def _line(self, run: Callable[[int, int], Callable[[], object]], batch_tokens: int) -> Line:
        """Seconds per token of all layers, from short and from long rows."""
        short = self._steady(lambda rows: run(rows, SHORT_ROW), batch_tokens // SHORT_ROW) / SHORT_ROW
        long_row = int(min(LONG_ROW, self.request.longest_row, LONGEST_CALL_S / short))
        slope = 0.0
        if long_row >= 4 * SHORT_ROW:
            long = self._steady(lambda rows: run(rows, long_row), batch_tokens // long_row) / long_row
            slope = max(0.0, long - short) / (long_row - SHORT_ROW)
            slope = min(slope, short / (2 * SHORT_ROW))  # on a starved machine the line could fall below zero
        return Line((short - slope * SHORT_ROW) * self.weights, slope * self.queries)

    def _call(self, run: Callable[[int, int], Callable[[], object]]) -> float:
        """Seconds of a call of all layers that has next to nothing to do; none on a CPU, which launches nothing."""
        return self._least(self._warm(run(1, SHORT_ROW))) * self.weights if self.device.type == "cuda" else 0.0

    def _warm(self, run: Callable[[], object]) -> Callable[[], object]:
        """`run`, on a GPU once done: its first call for each shape loads kernels, which takes up to seconds and is no speed."""
        if self.device.type == "cuda":
            run()
        return run

    def _steady(self, make: Callable[[int], Callable[[], object]], most: int, count: int = 1) -> float:
        """Seconds per unit of what `make(count)` runs, at the largest count from that up to `most` that stays short; on a GPU
        also where a small count is not short, as long as a larger one takes hardly longer."""
        count, before, smaller = min(count, most), math.inf, 0
        while True:
            run = self._warm(make(count))
            seconds = self._seconds(run)
            if CALL_S <= seconds <= LONGEST_CALL_S:  # a first call may wait for pages that later ones find
                seconds = min(seconds, self._seconds(run))
            in_proportion = bool(smaller) and seconds / before >= IN_PROPORTION * count / smaller
            launching = self.device.type == "cuda" and not in_proportion
            if count >= most or seconds > LONGEST_CALL_S or (seconds >= CALL_S and not launching):
                break
            before, smaller = seconds, count
            count = min(most, count * (4 if launching or seconds < CALL_S / 4 else 2))
        return (self._least(run) if seconds < 2 * CALL_S else seconds) / count

    def _least(self, run: Callable[[], object]) -> float:
        """Seconds of the fastest of three runs: other programs can only slow one down."""
        seconds = [self._seconds(run) for _ in range(3)]
        self.spreads.append(max(seconds) / min(seconds))
        return min(seconds)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Of one run; on CPUs, where one thread computes, without the time for which other programs had its CPU."""
        self._wait()
        started, used = time.perf_counter(), time.process_time()
        run()
        self._wait()
        seconds, used = time.perf_counter() - started, time.process_time() - used
        return min(seconds, used) if self.device.type == "cpu" else seconds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _tokens(self, rows: int, length: int) -> torch.Tensor:
        ids = torch.randint(self.model.config.vocab_size, (rows, length), generator=self.generator)
        return ids.to(self.device)

    def _forward(self, rows: int, length: int) -> Callable[[], object]:
        ids = self._tokens(rows, length)

        def run() -> None:
            with torch.inference_mode():
                self.model.base_model(input_ids=ids, use_cache=False)

        return run

    def _gradient(self, rows: int, length: int) -> Callable[[], object]:
        ids = self._tokens(rows, length)

        def run() -> None:
            self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
            self.model.zero_grad(set_to_none=True)

        return run

    def _head(self, positions: int) -> Callable[[], object]:
        head, hidden, targets = Head(self.model), self._hidden(positions), self._tokens(1, positions)[0]

        def run() -> None:
            with torch.inference_mode():
                token_log_probs(head(hidden), targets)

        return run

    def _head_gradient(self, positions: int) -> Callable[[], object]:
        head, targets = Head(self.model), self._tokens(1, positions)[0]
        hidden = self._hidden(positions).requires_grad_(True)

        def run() -> None:
            F.cross_entropy(head(hidden).float(), targets, reduction="sum").backward()

        return run

    def _hidden(self, positions: int) -> torch.Tensor:
        hidden = torch.randn(positions, self.model.config.hidden_size, generator=self.generator)
        return hidden.to(self.device, self.model.dtype)

    def _engine(self, forward: Line, head: float) -> float:
        """What padding, masks and laying out cost the zero-shot engine: its seconds over those of plain forward passes."""
        sample = self.request.rows
        if sample is None:
            return 1.0
        expected = measured = 0.0
        affordable = int(ENGINE_S * self.weights / forward.at_zero)
        for rows, trees in ((sample.plain, []), ([], sample.trees)):
            whole: list[Row] = [*rows, *trees]
            part = _part(whole, affordable, self.model.config.vocab_size)
            if not part:
                continue
            tokens = sum(len(row.tokens) for row in part)
            scored = sum(len(np.unique(row.scored)) for row in part)
            layers = forward.at_zero / self.weights + forward.slope / self.queries * tokens / len(part)
            planned = replace(sample, plain=part if rows else [], trees=part if trees else [])
            took = self._least(self._warm(partial(score_planned, self.model, planned)))
            share = sum(len(row.tokens) for row in whole) / tokens
            expected += share * (tokens * layers + scored * head / self.head_share)
            measured += share * took
        return measured / expected if expected else 1.0


def _part(rows: list[Any], most_tokens: int, vocab_size: int) -> list[Any]:
    """The rows, or if they are too many those of middling length; with tokens below `vocab_size`."""
    part = sorted(rows, key=lambda row: -len(row.tokens))
    while part and sum(len(row.tokens) for row in part) > most_tokens:
        part = part[len(part) // 4 + 1 : len(part) - len(part) // 4]
    return [replace(row, tokens=row.tokens % vocab_size, targets=row.targets % vocab_size) for row in part]


def _random_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of that config's shapes, reduced until its layers fit into BUILT_BYTES, with one matrix for embedding and
    head."""
    config = copy.deepcopy(config)
    room = BUILT_BYTES[device.type]
    while (layer_bytes := _layer_bytes(config, dtype)) > room and config.num_key_value_heads % 2 == 0:
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for name in ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size"):
            setattr(config, name, getattr(config, name) // 2)
    config.num_hidden_layers = min(config.num_hidden_layers, max(1, room // layer_bytes))
    for name in LAYER_LISTS:
        if (values := getattr(config, name, None)) is not None:
            setattr(config, name, values[: config.num_hidden_layers])
    config.vocab_size = min(config.vocab_size, MEASURED_VOCABULARY)
    config.pad_token_id = None
    config.tie_word_embeddings = True
    model: PreTrainedModel = loading.meta_model(config)
    model = model.to(dtype).to_empty(device=device)  # type: ignore[arg-type]  # transformers hides torch's signature
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.normal_(std=0.02)
    return model.eval().requires_grad_(False)


def _layer_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    layers = decoder_layers(loading.meta_model(config), family_of(config.model_type))
    return sum(p.numel() for p in layers[0].parameters()) * dtype.itemsize
