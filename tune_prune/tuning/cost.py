"""Floating-point operations of every stage, from a model's shapes.

A multiplication and an addition are two operations. Per token, with N the weights of the projections, V x H the head, Q
the width of all query heads and T the length of a row (Kaplan et al. 2020, arXiv:2001.08361; PaLM, arXiv:2204.02311,
appendix B):

    forward     2 N  +  4 Q C per layer  +  2 V H where a position is scored
    backward    4 N  +  8 Q C per layer  +  2 V H      gradients of activations everywhere, of weights in projections only

C = (T + 1) / 2 is the mean number of tokens that a token sees. Passes over calibration samples make no logits at a sample's
last position; zero-shot rows leave out the last layer's output projection and MLP where no position is scored. Norms,
rotations, softmax and biases are left out: below 1% at the sizes in use. A sliding window shorter than the rows is counted as
if it were not there.

A refit keeps K = share x n of the n inputs of each layer's last projections, o and down, and computes per projection, with P tokens
that it is fitted to and T held out:

    2 n K P  +  2 H n T  +  2 H (n - K) K  +  K^3 / 3  +  2 H K^2      products, two errors, right sides, Cholesky, both triangles

How many tokens the zero-shot items and the perplexity text are, before a model is loaded. Hub data counts by a table.

What a plan has to forward for one model: its texts and items in tokens, and the passes that no cache holds yet.

How fast a device works on models of given shapes: some layers of random weights are run for a second or two.

Small models are measured whole. Of a large one as many layers as are small; where not even one is (7B on a CPU), a layer
of the same proportions but fewer heads and channels. What was not built counts by its operations. Rates are those of one
process alone: on CPUs its own seconds count, not those that it waits while others run. That several trials on one machine
share its caches and its memory bandwidth is not measured; `spread` and `load` say how sure the rates are.

What a plan costs: passes, tokens, operations and seconds of every stage, the wall time and the GPU-hours.

    seconds of a stage = tokens x seconds per token as measured (device_speed.py) x (1 - removed share) where a model is pruned

Trials and preparation jobs are dealt out to the slots one after the other, as the search does. What was measured for a
second on one core is extrapolated to hours, so the wall time is a range: from what it takes on an idle machine to what it
takes if the machine stays as busy as it was (`slowdown`). The live line corrects itself by what was measured so far.
"""

from __future__ import annotations

import copy
import heapq
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig

from tune_prune.core import machine
from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig, Samples
from tune_prune.core.machine import Load
from tune_prune.core.records import MODEL_STAGES, RECIPE_STAGES, in_order
from tune_prune.data.sources import Contents, task_source
from tune_prune.evaluation.divergence import TASK_TOKENS, TEXT_TOKENS, compared_tokens
from tune_prune.evaluation.engine.prefix_trees import Rows, plan_rows, score_planned
from tune_prune.evaluation.engine.rows import Row, default_batch_tokens, token_log_probs
from tune_prune.evaluation.kept_suite import KeptSuite, caveats, ends_texts
from tune_prune.models import loading
from tune_prune.models.families import LAYER_LISTS, decoder_layers, family_of
from tune_prune.models.geometry import Geometry, read_geometry
from tune_prune.models.head import Head
from tune_prune.models.runner.layer_runner import BLOCK_TOKENS
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.compensation import recovery, refit
from tune_prune.pruning.passes.batches import BATCH_TOKENS
from tune_prune.pruning.statistics import Need, PassWork, by_statistic, load_statistic
from tune_prune.trial.iteration import steps_of, works_of
from tune_prune.trial.statistics import StatisticCache, by_samples
from tune_prune.tuning.gpus import Card

if TYPE_CHECKING:
    from tune_prune.evaluation.suite import Item, ZeroShotSuite


@dataclass(frozen=True)
class Arithmetic:
    """The shapes of a model that its operations follow from; all layers together."""

    layers: int
    attention_weights: int  # N, of the attention blocks
    mlp_weights: int  # N, of the MLP blocks
    query_width: int  # Q, summed over layers
    head_weights: int  # V x H, also where the head is the embedding
    output_weights: int  # of the attention's output projections, which are part of the attention weights
    input_squares: int = 0  # widths of what goes into the last projection of each block, squared, all layers together
    group_squares: int = 0  # and those of what one KV group has of it
    input_widths: int = 0  # as they are
    input_cubes: int = 0
    hidden_size: int = 0

    @classmethod
    def of(cls, geometry: Geometry, vocab_size: int) -> Arithmetic:
        widths = [k * geometry.queries_per_kv * geometry.head_dim for k in geometry.kv_heads] + list(geometry.mlp_width)
        return cls(
            layers=geometry.num_layers,
            attention_weights=sum(k * c for k, c in zip(geometry.kv_heads, geometry.group_cost, strict=True)),
            mlp_weights=sum(m * c for m, c in zip(geometry.mlp_width, geometry.channel_cost, strict=True)),
            query_width=sum(geometry.kv_heads) * geometry.queries_per_kv * geometry.head_dim,
            head_weights=vocab_size * geometry.hidden_size,
            output_weights=sum(geometry.kv_heads) * geometry.queries_per_kv * geometry.head_dim * geometry.hidden_size,
            input_squares=sum(n**2 for n in widths),
            group_squares=sum(k * (geometry.queries_per_kv * geometry.head_dim) ** 2 for k in geometry.kv_heads),
            input_widths=sum(widths),
            input_cubes=sum(n**3 for n in widths),
            hidden_size=geometry.hidden_size,
        )

    @property
    def projection_weights(self) -> int:
        return self.attention_weights + self.mlp_weights

    def pruned(self, removed_params: int) -> Arithmetic:
        """Without `removed_params` of the projections, taken evenly from attention and MLPs."""
        kept = 1 - removed_params / self.projection_weights
        names = ("attention_weights", "mlp_weights", "query_width", "output_weights")
        return replace(self, **{name: round(getattr(self, name) * kept) for name in names})

    def forward(self, tokens: float, row_length: float, scored: float | None = None) -> float:
        """`tokens` in rows of `row_length`, logits at `scored` positions (None: at all), and of the last layer what they need."""
        if scored is None:
            return self.all_layers(tokens, row_length) + self.head(tokens)
        spared = 2 * (self.mlp_weights + self.output_weights) / self.layers * (tokens - scored)
        return self.all_layers(tokens, row_length) - spared + self.head(scored)

    def of_pass(self, work: PassWork, row_length: int) -> float:
        """A statistic's pass over rows of `row_length`; where it runs backwards, gradients of activations, and of the projections'
        weights where it sums any. Those of adapters, a few in a hundred, are left out."""
        layers, head = self.layers_of_pass(work, row_length), self.head(work.head_positions)
        return 3 * layers + 2 * head if work.backward else layers + head

    def layers_of_pass(self, work: PassWork, row_length: int) -> float:
        """Operations of the layers in it, with the products of inputs that it sums up and what is fitted by them: of a pass forward
        all of them, of one backwards a third, which with gradients of weights is the forward part."""
        attention, mlp = self._attention(work.attention_tokens, row_length), 2 * self.mlp_weights * work.mlp_tokens
        layers = (attention + mlp) / self.layers
        products: float = 2 * self.input_squares * work.product_tokens
        if work.fitted_share:
            products = products * work.fitted_share + self._fit(work.fitted_share, work.held_tokens)
        if not work.backward:
            return layers + products
        products += 2 * self.group_squares * work.product_tokens
        weights = self.attention_weights * work.attention_tokens + self.mlp_weights * work.mlp_tokens
        unasked = 0 if work.weight_sums else 2 * weights / self.layers
        return layers + (products - unasked) / 3

    def _fit(self, share: float, held_tokens: int) -> float:
        """Operations of fitting all last projections to that share of their inputs once, and of trying it on held-out tokens."""
        errors = 2 * self.hidden_size * self.input_widths * held_tokens
        right = 2 * self.hidden_size * share * (1 - share) * self.input_squares
        return errors + right + share**3 * self.input_cubes / 3 + 2 * self.hidden_size * share**2 * self.input_squares

    def head(self, positions: float) -> float:
        return 2.0 * self.head_weights * positions

    def _attention(self, tokens: float, row_length: float) -> float:
        return (2 * self.attention_weights + 4 * self.query_width * (row_length + 1) / 2) * tokens

    def all_layers(self, tokens: float, row_length: float) -> float:
        """`tokens` in rows of `row_length`, through all layers at every position."""
        return self._attention(tokens, row_length) + 2 * self.mlp_weights * tokens


SAMPLED_ITEMS = 64  # per task, spread over its items

# Rows and, per item with prefixes shared, tokens and scored positions by GPT-2's tokenizer.
HUB_TASKS: dict[str, tuple[int, float, float]] = {
    "boolq": (3270, 130.9, 1.0),
    "piqa": (1838, 48.8, 36.4),
    "hellaswag": (10_042, 76.5, 50.7),
    "winogrande": (1267, 25.2, 10.9),
    "arc_easy": (2376, 38.9, 13.2),
    "arc_challenge": (1172, 48.0, 18.4),
    "openbookqa": (500, 19.9, 9.3),
}
HUB_PERPLEXITY_TOKENS = 287_644  # WikiText-2 raw test, by GPT-2's tokenizer
# Another tokenizer is compared with GPT-2's on this text.
ENGLISH = (
    "The question was simple enough: which of the four materials conducts heat best? A student who had watched the kettle "
    "all morning answered that copper does, because the handle of the old pot was always wrapped in cloth. In 1847 the "
    "town built a second bridge, 310 metres long, over the river; it is still used by walkers, and on warm evenings people "
    "sit along its walls to eat, talk and look at the water. Next, she puts the pan into the oven and waits."
)
ENGLISH_GPT2_TOKENS = 99


@dataclass(frozen=True)
class ZeroShotTokens:
    """What the items of a protocol forward, all slices together, and a sample of their rows."""

    items: int
    tokens: int
    scored: int  # positions whose logits are needed
    exact: bool  # counted, not estimated
    rows: Rows | None = None  # of the sampled items
    longest_row: int | None = None  # tokens

    @property
    def row_length(self) -> float:
        """Mean tokens of an item."""
        return self.tokens / self.items


def suite_tokens(suite: ZeroShotSuite) -> ZeroShotTokens:
    """Those of a suite, counted."""
    by_task: dict[str, list[Item]] = {}
    for item in suite.items:
        by_task.setdefault(item.task, []).append(item)
    sampled = [
        items[int(index)]
        for items in by_task.values()
        for index in np.linspace(0, len(items) - 1, min(SAMPLED_ITEMS, len(items)))
    ]
    rows = [row for index in range(suite.num_slices) for row in suite.rows_in_slice(index).all]
    lengths = [len(row.tokens) for row in rows]
    scored = sum(len(np.unique(row.scored)) for row in rows)
    sample = plan_rows([item.requests for item in sampled])
    return ZeroShotTokens(suite.num_items, sum(lengths), scored, True, sample, max(lengths))


def hub_tokens(tokenizer: PreTrainedTokenizerBase, protocol: EvaluationProtocol) -> ZeroShotTokens:
    """Those of tasks of the hub, by the table. One that is not in it is taken for an average one of the seven."""
    scale = tokens_per_gpt2_token(tokenizer)
    mean_rows, *means = (float(np.mean(column)) for column in zip(*HUB_TASKS.values(), strict=True))
    items = tokens = scored = 0.0
    for name in dict.fromkeys(protocol.tasks):
        count, mean_tokens, mean_scored = HUB_TASKS.get(name, (int(mean_rows), *means))
        count = min(count, protocol.limit or count)
        items += count
        tokens += count * mean_tokens * scale
        scored += count * max(1.0, mean_scored * scale)
    return ZeroShotTokens(int(items), round(tokens), round(scored), exact=False)


def tokens_per_gpt2_token(tokenizer: PreTrainedTokenizerBase) -> float:
    """How many tokens of `tokenizer` make one of GPT-2's, on a few lines of English."""
    return len(tokenizer(ENGLISH, add_special_tokens=False)["input_ids"]) / ENGLISH_GPT2_TOKENS


LONGEST_ROW = 1024  # tokens of a zero-shot item, where none was read


@dataclass(frozen=True)
class Workload:
    """The model and what each of its evaluations reads."""

    config: PretrainedConfig
    perplexity_tokens: int
    perplexity_window: int
    zero_shot: ZeroShotTokens
    notes: tuple[str, ...] = ()  # on what its accuracies will say, in sentences
    warnings: tuple[str, ...] = ()  # those of them that call for something to be done
    keep_suite: Callable[[], None] | None = None  # stores what lm-eval has made of the tasks, for the trials

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row of zero-shot items."""
        return self.zero_shot.longest_row or min(LONGEST_ROW, self.config.max_position_embeddings)


def workload(
    run: ModelRun,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    store: ArtifactStore,
    model_fingerprint: str,
) -> Workload:
    """Counts the tokens of the very items and text that the trials of `run` read; of the hub's, which are read once the search has
    started, by a table. Raises UserError for what cannot be read, scored or embedded."""
    contents = Contents(run)
    kept, of_hub = KeptSuite(run, contents, config, model_fingerprint, store), task_source(run).kind == "hub"
    suite, keep = kept.read(), None
    if of_hub:
        tokens = round(HUB_PERPLEXITY_TOKENS * tokens_per_gpt2_token(tokenizer))
        tokens = min(tokens, run.protocol.perplexity_tokens or tokens)
    else:
        tokens = len(contents.perplexity_tokens(tokenizer, config.vocab_size))
        if suite is None:
            suite = kept.make(tokenizer)
            keep = partial(kept.keep, suite)
    return Workload(
        config,
        tokens,
        min(run.protocol.perplexity_window, config.max_position_embeddings),
        hub_tokens(tokenizer, run.protocol) if suite is None else suite_tokens(suite),
        caveats(tokenizer, suite),
        ends_texts(tokenizer),
        keep,
    )


def recipe_amounts(configs: Collection[PruningConfig]) -> dict[str, tuple[Any, ...]]:
    """By stage of a recipe, what each configuration asks of it: tokens of its refit, and itself where it is trained or pruned in
    several steps; 0: it is not, or its steps are those of one before it."""
    first: dict[PruningConfig, PruningConfig] = {}  # what is done to the weights afterwards is no part of the steps
    for config in configs:
        first.setdefault(replace(config, compensation="none", recovery="none").canonical(), config)
    stepped = {id(config) for config in first.values() if steps_of(config) > 1}
    return {
        "steps": tuple(config if id(config) in stepped else 0 for config in configs),
        "refit": tuple(0 if config.compensation == "none" else config.refit_tokens for config in configs),
        "recovery": tuple(0 if config.recovery == "none" else config for config in configs),
    }


def passes_to_make(
    configs: Iterable[PruningConfig], run: ModelRun, model_fingerprint: str, device: str, store: ArtifactStore
) -> dict[Samples, tuple[Need, ...]]:
    """What the statistics of `configs` lack in the cache of that kind of device (`devices.device_key`)."""
    cache = StatisticCache(run, model_fingerprint, device, store)
    missing = {samples: cache.missing(samples, needs) for samples, needs in by_samples(configs).items()}
    return {samples: needs for samples, needs in missing.items() if needs}


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
