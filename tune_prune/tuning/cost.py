"""The cost of a search: tokens and floating-point operations of every stage, seconds, wall time and GPU-hours.

Tokens are counted on the texts and questions themselves (those of the hub by a table), operations follow from a model's shapes
(`Arithmetic`), and seconds from the rate that the device reaches (`Speed`), with what is read from files. Trials and jobs are dealt
out to the slots as the search does. A rate of one short run is extrapolated to hours, so the wall time is a range.

A multiplication and an addition are two operations. Per token, with N the weights of the projections, V x H the head, Q the width
of all query heads and T the length of a row (Kaplan et al. 2020, arXiv:2001.08361; PaLM, arXiv:2204.02311, appendix B):

    forward     2 N  +  4 Q C per layer  +  2 V H where a position is scored
    backward    4 N  +  8 Q C per layer  +  2 V H      gradients of activations everywhere, of weights in projections only

C = (T + 1) / 2 is the mean number of tokens that a token sees. Passes over calibration samples make no logits at a sample's last
position; zero-shot rows leave out the last layer's output projection and MLP where no position is scored. Norms, rotations,
softmax, biases and sliding windows are left out. A refit keeps K = share x n of the n inputs of each layer's last projections and
computes per projection, with P tokens that it is fitted to and T held out:

    2 n K P  +  2 H n T  +  2 H (n - K) K  +  K^3 / 3  +  2 H K^2      products, two errors, right sides, Cholesky, both triangles
"""

from __future__ import annotations

import copy
import heapq
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig

from tune_prune.core import machine
from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import TASK_ITEMS, EvaluationProtocol, ModelRun, PruningConfig, Samples
from tune_prune.core.machine import Load
from tune_prune.core.records import MODEL_STAGES, RECIPE_STAGES, in_order
from tune_prune.data.sources import Contents, task_source
from tune_prune.evaluation.divergence import TASK_TOKENS, TEXT_TOKENS, compared_tokens
from tune_prune.evaluation.engine.rows import default_batch_tokens
from tune_prune.evaluation.kept_suite import KeptSuite, caveats, ends_texts
from tune_prune.models import fused, loading
from tune_prune.models.families import LAYER_LISTS, decoder_layers, family_of
from tune_prune.models.geometry import Geometry, read_geometry
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.runner.layer_runner import BLOCK_TOKENS
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.compensation import recovery, refit
from tune_prune.pruning.statistics import Need, PassWork, by_statistic, load_statistic
from tune_prune.trial.iteration import steps_of, works_of
from tune_prune.trial.statistics import StatisticCache, by_samples
from tune_prune.tuning.gpus import Card

if TYPE_CHECKING:  # it imports pyarrow
    from tune_prune.evaluation.suite import ZeroShotSuite


@dataclass(frozen=True)
class Arithmetic:
    """The shapes of a model that its operations follow from, of all layers together."""

    layers: int
    attention_weights: int  # N, of the attention blocks
    mlp_weights: int  # N, of the MLP blocks
    query_width: int  # Q, summed over layers
    head_weights: int  # V x H, also where the head is the embedding
    output_weights: int  # of the attention's output projections, which are part of the attention weights
    input_squares: int = 0  # widths of what goes into the last projection of each block, squared
    group_squares: int = 0  # and those of what one KV group has of it
    input_widths: int = 0  # as they are
    input_cubes: int = 0
    hidden_size: int = 0
    idle_weights: int = 0  # of experts that a token does not take

    @classmethod
    def of(cls, geometry: Geometry, vocab_size: int) -> Arithmetic:
        group = geometry.queries_per_kv * geometry.head_dim
        widths = [count * group for count in geometry.kv_heads] + list(geometry.mlp_width)
        queries = sum(geometry.query_widths)
        return cls(
            layers=geometry.num_layers,
            attention_weights=sum(geometry.attention_params),
            mlp_weights=sum(geometry.mlp_used),
            query_width=queries,
            head_weights=vocab_size * geometry.hidden_size,
            output_weights=queries * geometry.hidden_size,
            input_squares=sum(n**2 for n in widths),
            group_squares=sum(k * group**2 for k in geometry.kv_heads),
            input_widths=sum(widths),
            input_cubes=sum(n**3 for n in widths),
            hidden_size=geometry.hidden_size,
            idle_weights=sum(geometry.mlp_params) - sum(geometry.mlp_used),
        )

    @property
    def projection_weights(self) -> int:
        return self.attention_weights + self.mlp_weights

    def pruned(self, removed_params: int) -> Arithmetic:
        """Return the shapes without `removed_params` of the projections, taken evenly from attention and MLPs; of a mixture from
        its experts, of which a token takes as many as before."""
        kept = 1 - removed_params / (self.projection_weights + self.idle_weights)
        names = ("attention_weights", "query_width", "output_weights") + ("mlp_weights",) * (not self.idle_weights)
        return replace(self, **{name: round(getattr(self, name) * kept) for name in names})

    def forward(self, tokens: float, row_length: float, scored: float | None = None) -> float:
        """Count `tokens` in rows of `row_length` with logits at `scored` positions (None: at all), and of the last layer what
        they need."""
        if scored is None:
            return self.all_layers(tokens, row_length) + self.head(tokens)
        spared = 2 * (self.mlp_weights + self.output_weights) / self.layers * (tokens - scored)
        return self.all_layers(tokens, row_length) - spared + self.head(scored)

    def of_pass(self, work: PassWork, row_length: int) -> float:
        """Count a statistic's pass over rows of `row_length`; where it runs backwards, gradients of activations, and of the
        projections' weights where it sums any. Those of adapters, a few in a hundred, are left out."""
        layers, head = self.layers_of_pass(work, row_length), self.head(work.head_positions)
        return 3 * layers + 2 * head if work.backward else layers + head

    def layers_of_pass(self, work: PassWork, row_length: int) -> float:
        """Count the operations of the layers in a pass, with the products of inputs that it sums up and what is fitted by them:
        of a pass forward all of them, of one backwards a third, which with gradients of weights is the forward part."""
        attention, mlp = self._attention(work.attention_tokens, row_length), 2 * self.mlp_weights * work.mlp_tokens
        layers = (attention + mlp) / self.layers
        products: float = 2 * self.input_squares * work.product_tokens
        if work.fitted_share:
            share = refit.computed_share(work.fitted_share)
            products = products * share + self._fit(work.fitted_share, work.held_tokens)
        if not work.backward:
            return layers + products
        products += 2 * self.group_squares * work.product_tokens
        weights = self.attention_weights * work.attention_tokens + self.mlp_weights * work.mlp_tokens
        unasked = 0 if work.weight_sums else 2 * weights / self.layers
        return layers + (products - unasked) / 3

    def _fit(self, share: float, held_tokens: int) -> float:
        """Count the operations of fitting all last projections to that share of their inputs once, and of trying it on held-out
        tokens."""
        errors = 2 * self.hidden_size * self.input_widths * held_tokens
        right = 2 * self.hidden_size * share * (1 - share) * self.input_squares
        return errors + right + share**3 * self.input_cubes / 3 + 2 * self.hidden_size * share**2 * self.input_squares

    def head(self, positions: float) -> float:
        return 2.0 * self.head_weights * positions

    def _attention(self, tokens: float, row_length: float) -> float:
        return (2 * self.attention_weights + 4 * self.query_width * (row_length + 1) / 2) * tokens

    def all_layers(self, tokens: float, row_length: float) -> float:
        """Count `tokens` in rows of `row_length` through all layers at every position."""
        return self._attention(tokens, row_length) + 2 * self.mlp_weights * tokens


# Tokens and scored positions per item, with prefixes shared, by GPT-2's tokenizer.
HUB_TASKS: dict[str, tuple[float, float]] = {
    "boolq": (130.9, 1.0),
    "piqa": (48.8, 36.4),
    "hellaswag": (76.5, 50.7),
    "winogrande": (25.2, 10.9),
    "arc_easy": (38.9, 13.2),
    "arc_challenge": (48.0, 18.4),
    "openbookqa": (19.9, 9.3),
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
    """Count of what the items of a protocol forward, all slices together."""

    items: int
    tokens: int
    scored: int  # positions whose logits are needed
    exact: bool  # counted, not estimated
    longest_row: int | None = None  # tokens

    @property
    def row_length(self) -> float:
        """Mean tokens of an item."""
        return self.tokens / self.items


def suite_tokens(suite: ZeroShotSuite, share: bool = True) -> ZeroShotTokens:
    """Count what the items of `suite` forward; `share`: whether the choices of an item share their prefix."""
    rows = [row for index in range(suite.num_slices) for row in suite.rows_in_slice(index, share).all]
    lengths = [len(row.tokens) for row in rows]
    scored = sum(len(np.unique(row.scored)) for row in rows)
    return ZeroShotTokens(suite.num_items, sum(lengths), scored, exact=True, longest_row=max(lengths))


def hub_tokens(tokenizer: PreTrainedTokenizerBase, protocol: EvaluationProtocol) -> ZeroShotTokens:
    """Estimate what tasks of the hub forward, by the table. A task that is not in it is taken for an average one of the seven."""
    scale = tokens_per_gpt2_token(tokenizer)
    mean_items = int(np.mean([*TASK_ITEMS.values()]))
    means = [float(np.mean(column)) for column in zip(*HUB_TASKS.values(), strict=True)]
    items = tokens = scored = 0.0
    for name in dict.fromkeys(protocol.tasks):
        mean_tokens, mean_scored = HUB_TASKS.get(name, means)
        count = TASK_ITEMS.get(name, mean_items)
        count = min(count, protocol.limit or count)
        items += count
        tokens += count * mean_tokens * scale
        scored += count * max(1.0, mean_scored * scale)
    return ZeroShotTokens(int(items), round(tokens), round(scored), exact=False)


def tokens_per_gpt2_token(tokenizer: PreTrainedTokenizerBase) -> float:
    """Return how many tokens of `tokenizer` make one of GPT-2's, on a few lines of English."""
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
    """Count the tokens of the very items and text that the trials of `run` read; of the hub's, which are read once the search has
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
        hub_tokens(tokenizer, run.protocol)
        if suite is None
        else suite_tokens(suite, share=not family_of(config.model_type).recurrent),
        caveats(tokenizer, suite),
        ends_texts(tokenizer),
        keep,
    )


def recipe_amounts(configs: Collection[PruningConfig]) -> dict[str, tuple[Any, ...]]:
    """Return by stage of a recipe what each configuration asks of it: tokens of its refit, and itself where it is trained or
    pruned in several steps; 0: it is not, or its steps are those of one before it."""
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
    """Find what the statistics of `configs` lack in the cache of that kind of device (`devices.device_key`)."""
    cache = StatisticCache(run, model_fingerprint, device, store)
    missing = {samples: cache.missing(samples, needs) for samples, needs in by_samples(configs).items()}
    return {samples: needs for samples, needs in missing.items() if needs}


# Of the peak of a GPU that is not here: an H100 reached 0.37 to 0.5 of its data sheet's at the widths of 7B (docs/gpu.md).
REACHED = 0.4
ROW = 128  # tokens of the rows by which a rate is measured
CALL_S = 0.025  # batches grow until one takes so long; a GPU's are as large as those of an evaluation at once
BUILT_BYTES = {"cpu": 32 * 2**20, "cuda": 2**30}  # of the layers that are built for it
HALVED = (  # of a model too large to be built
    "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "moe_intermediate_size",
    "shared_intermediate_size", "mamba_n_heads", "mamba_d_ssm",
)  # fmt: skip
MEASURED_VOCABULARY = 32_768  # of a larger one this much


@dataclass(frozen=True)
class SpeedRequest:
    """A model whose rate is to be measured, here or by a worker."""

    config: PretrainedConfig
    dtype: str
    device: str  # cpu or cuda
    threads: int


@dataclass(frozen=True)
class Speed:
    """The rate that one process reaches on one device."""

    flops: float  # floating-point operations per second
    spread: float = 1.0  # of equal runs the slowest over the fastest
    load: Load = field(default_factory=Load)  # of the machine meanwhile


def measure(request: SpeedRequest) -> Speed:
    """Measure in about a second the rate of next-token losses, of a model of random weights that has the shapes of
    `request.config`, or as many of its layers as are small."""
    threads, load, rates = torch.get_num_threads(), machine.load(), []
    if request.device == "cuda":
        loading.set_up_gpu()
    model = _random_model(request.config, getattr(torch, request.dtype), torch.device(request.device))
    try:
        # On a busy machine several threads wait for each other's turn, which says nothing of a search of hours.
        for count in {1 if request.device == "cpu" else request.threads, request.threads}:
            torch.set_num_threads(count)
            rates.append(_rate(model))
    finally:
        torch.set_num_threads(threads)
    return replace(max(rates, key=lambda rate: rate.flops), load=load)


def computed(card: Card, dtype: str) -> Speed | None:
    """Compute the rate of a GPU that is not here from its peak in `dtype`; None where that is not known. Small models, which wait
    for launches of kernels, are slower."""
    return Speed(card.peaks[dtype] * REACHED) if dtype in card.peaks else None


def _rate(model: PreTrainedModel) -> Speed:
    """Time a growing batch of rows until it takes CALL_S, and then three times."""
    losses, device = NextTokenLosses(model), model.device.type
    arithmetic = Arithmetic.of(read_geometry(model, family_of(model.config.model_type)), model.config.vocab_size)
    most = max(1, default_batch_tokens(model.config, device) // ROW)
    rows = most if device == "cuda" else 1

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def seconds() -> float:
        tokens = torch.randint(model.config.vocab_size, (rows, ROW), device=model.device)
        wait()
        began, used = time.perf_counter(), time.process_time()
        losses(tokens)
        wait()
        passed, used = time.perf_counter() - began, time.process_time() - used
        # On a CPU what the process waits for others is not its own: `load` tells of them.
        return min(passed, used) if device == "cpu" else passed

    seconds()  # the first call sets up kernels
    while seconds() < CALL_S and rows < most:
        rows = min(most, 2 * rows)
    times = [seconds() for _ in range(3)]
    return Speed(arithmetic.forward(rows * ROW, ROW, rows * (ROW - 1)) / min(times), max(times) / min(times))


def _random_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Make a model of that config's shapes, reduced until its layers fit into BUILT_BYTES, with one matrix for embedding and
    head. Where not even one layer does (7B on a CPU), it has fewer heads and channels in the same proportions."""
    config, room = copy.deepcopy(config), BUILT_BYTES[device.type]
    if hasattr(config, "num_kv_shared_layers"):  # of Gemma 4: all layers with heads of one size and keys of their own
        config.per_layer_config, config.num_kv_shared_layers = None, 0
        config.vocab_size_per_layer_input = MEASURED_VOCABULARY

    def layer_bytes() -> int:
        layers = decoder_layers(loading.meta_model(config), family_of(config.model_type))
        return sum(p.numel() for p in layers[0].parameters()) * dtype.itemsize

    while layer_bytes() > room and config.num_key_value_heads % 2 == 0:
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for name in HALVED:
            if getattr(config, name, None):
                setattr(config, name, getattr(config, name) // 2)
    config.num_hidden_layers = min(config.num_hidden_layers, max(1, room // layer_bytes()))
    for name in LAYER_LISTS:
        if len(values := getattr(config, name, None) or ()) > config.num_hidden_layers:
            setattr(config, name, values[: config.num_hidden_layers])
    config.vocab_size = min(config.vocab_size, MEASURED_VOCABULARY)
    config.pad_token_id, config.tie_word_embeddings = None, True
    model: PreTrainedModel = loading.meta_model(config)
    fused.take_apart(model, family_of(config.model_type))
    model = model.to(dtype).to_empty(device=device)  # type: ignore[arg-type]  # transformers hides torch's signature
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.normal_(std=0.02)
    return model.eval().requires_grad_(False)


# Measured on a two-core machine without a GPU, but for one.
WORKER_START_S = 10.0  # Ray, a worker's imports and its model's configuration
INLINE_START_S = 1.0  # without Ray: what the plan has not imported
DISK_BYTES_PER_S = 1e9  # weights and hidden states, from and to a local disk or its cache
# Gradients by layer over those of the whole model, as the forward pass is made twice: 1.21 to 1.36 where it was measured.
BY_LAYER = 1.3
# Seconds of zero-shot rows, with their padding, masks and trees, over those of windows: 7B on an H100, small models on CPUs.
ZERO_SHOT = {"cpu": 1.3, "cuda": 1.1}
HOST_BYTES_PER_S = 1e10  # hidden states, between a GPU and host memory
SUITE_S = 3.0  # importing lm-eval
SUITE_S_PER_ITEM = 0.8e-3  # rendering and tokenising
TRIAL_OVERHEAD_S = 0.15  # of each trial outside of its stages: Ray's scheduling, files, TensorBoard
PRUNING_S = 0.005  # the choice of what is kept
# Slicing the weights. Of a GPU it is computed: reading and writing them takes a tenth of its memory's 1 to 5 TB/s.
PRUNING_BYTES_PER_S = {"cpu": 5e8, "cuda": 1e11}

# Weights of the layers from which on one trial fills a GPU: several at once take turns. A model of 3B parameters has so many.
FILLS_GPU = 2.5e9

# What the rates and constants may be off by.
FASTER, SLOWER = 0.65, 1.8

Seconds = dict[str, float]  # by stage


@dataclass(frozen=True)
class ModelWork:
    """The work of a plan that is still to be done for one model."""

    label: str
    arithmetic: Arithmetic
    device: str  # cpu or cuda
    weight_bytes: int
    speed: Speed
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
    runs: int = 0  # passes, or times it is done
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0  # of one worker

    def __add__(self, more: StageCost) -> StageCost:
        sums = (self.runs + more.runs, self.tokens + more.tokens, self.flops + more.flops, self.seconds + more.seconds)
        return StageCost(self.stage, *sums)

    def __mul__(self, count: int) -> StageCost:
        return StageCost(self.stage, self.runs * count, self.tokens * count, self.flops * count, self.seconds * count)


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
        """Return the seconds that the whole takes, at least and at most."""
        return self.wall_seconds * self.slowdown[0], self.wall_seconds * self.slowdown[1]

    def stages(self) -> tuple[StageCost, ...]:
        """Sum the stages of all models up, by name."""
        return _summed(stage for model in self.models for stage in model.stages)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for cost.json."""

        def plain(stages: Iterable[StageCost]) -> dict[str, dict[str, Any]]:
            return {one.stage: {name: value for name, value in vars(one).items() if name != "stage"} for one in stages}

        return {
            "stages": plain(self.stages()),
            "models": {model.label: plain(model.stages) for model in self.models},
            "slots": self.slots,
            "wall_seconds": list(self.wall_range),
            "load": None if self.load is None else asdict(self.load),
            "gpu_hours": self.gpu_hours,
            "notes": list(self.notes),
        }


def estimate(
    works: Iterable[ModelWork],
    slots: int,
    gpus: float,
    statistics_in_trials: bool = False,
    notes: Sequence[str] = (),
    cpus: float = 1.0,
    start_s: float = WORKER_START_S,
) -> CostEstimate:
    """Estimate the cost of `works` on `slots` workers with `gpus` and `cpus` each, which take `start_s` to start. Workers that
    share a GPU run at full speed beside each other while one alone does not fill it (FILLS_GPU). `statistics_in_trials`: passes
    are made by the first trial that needs them instead of by jobs before."""
    sharing = min(slots, round(1 / gpus)) if 0 < gpus < 1 else 1
    works = [
        replace(work, speed=replace(work.speed, flops=work.speed.flops / sharing)) if _fills_gpu(work) else work
        for work in works
    ]
    models = tuple(_model(work, statistics_in_trials) for work in works)
    durations: list[float] = []
    for model in models:
        durations += [sum(job.values()) for job in model.jobs.values()]
        durations += [sum(model.trial.values()) + TRIAL_OVERHEAD_S] * model.trials
    free = [0.0] * slots  # when each worker is done: the first of them takes the next piece
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    wall = start_s + max(free) if durations else 0.0
    work = sum(stage.seconds for model in models for stage in model.stages)
    load = max((work.speed.load for work in works), key=lambda load: load.average, default=None)
    most = max((_slowdown(work, slots, cpus, gpus) for work in works), default=1.0)
    return CostEstimate(models, slots, wall, work * gpus / 3600, tuple(notes), load, (FASTER, most), start_s)


def _fills_gpu(work: ModelWork) -> bool:
    return work.device == "cuda" and work.arithmetic.projection_weights >= FILLS_GPU


def _slowdown(work: ModelWork, slots: int, cpus: float, gpus: float) -> float:
    """Return how much longer than predicted a worker may take that shares its device with the others and with what else ran
    when it was measured."""
    speed = work.speed
    if _fills_gpu(work):  # that they wait for each other is predicted
        return SLOWER * speed.spread
    if gpus > 0:  # the trials of one GPU may each wait for all others
        return SLOWER * speed.spread * min(slots, round(1 / min(1.0, gpus)))
    trials = min(slots, math.floor(speed.load.cpus / cpus))  # on the machine that was measured
    # What runs beside them is also why equal runs of the measurement differed: not counted twice.
    return SLOWER * max(speed.spread, (speed.load.average + trials * max(1, int(cpus))) / speed.load.cpus)


def _model(work: ModelWork, statistics_in_trials: bool) -> ModelCost:
    states, *dense = _evaluation(work, 0)
    jobs: dict[Samples | None, list[StageCost]] = {}
    trials: list[StageCost] = []  # of all of them together
    if work.baseline:
        # Requests that have been counted are in the cache.
        suite = 0.0 if work.zero_shot.exact else SUITE_S + SUITE_S_PER_ITEM * work.zero_shot.items
        loading = 0.0 if work.way.streamed else work.weight_bytes / DISK_BYTES_PER_S
        perplexity, zero_shot = dense
        jobs[None] = [perplexity, replace(zero_shot, seconds=zero_shot.seconds + suite + loading)]
    for samples, needs in work.passes.items():
        passes = _passes(work, samples.seq_len, needs)
        if statistics_in_trials:
            trials += passes
        else:
            jobs[samples] = passes
    if work.trials:
        pruning = StageCost("pruning", 1, seconds=_cutting_s(work))
        trials += [stage * work.trials for stage in (pruning, *_evaluation(work, work.removed_params))]
        trials += [_step(work, name, amounts) for name, amounts in work.recipes.items() if any(amounts)]
        if work.baseline:  # the first trial makes the dense model's hidden states
            trials.append(states)
    usual = [StageCost(name) for name in MODEL_STAGES if name not in RECIPE_STAGES]
    return ModelCost(
        work.label,
        _summed([*(stage for stages in jobs.values() for stage in stages), *trials, *usual]),
        {samples: {stage.stage: stage.seconds for stage in _summed(stages)} for samples, stages in jobs.items()},
        {stage.stage: stage.seconds / work.trials for stage in _summed(trials)},
        work.trials,
    )


def _summed(stages: Iterable[StageCost]) -> tuple[StageCost, ...]:
    """Sum up stages of one name, in the order in which they follow in a trial."""
    sums: dict[str, StageCost] = {}
    for one in stages:
        sums[one.stage] = sums.get(one.stage, StageCost(one.stage)) + one
    return tuple(sums[name] for name in in_order(sums))


def _cutting_s(work: ModelWork) -> float:
    """Return the seconds in which one pruned copy is made: read, sliced, or cut when its layers are brought."""
    if work.way.pruned_whole:
        return PRUNING_S + work.weight_bytes / DISK_BYTES_PER_S
    return PRUNING_S + (0.0 if work.way.streamed else work.weight_bytes / PRUNING_BYTES_PER_S[work.device])


def _passes(work: ModelWork, seq_len: int, needs: Sequence[Need]) -> list[StageCost]:
    """Count the pass of each statistic at one seq_len."""
    stages = []
    for name, wanted in by_statistic(needs).items():
        statistic = load_statistic(name)
        todo = statistic.work(wanted, seq_len, work.arithmetic.layers, work.device)
        # The Cholesky factor and the inverse of what each projection was given, where a statistic solves by it.
        solved = 2.0 * work.arithmetic.input_cubes * todo.snapshots if statistic.solves else 0.0
        stages.append(_pass(work, statistic.stage, todo, seq_len, solved))
    return stages


def _pass(work: ModelWork, stage: str, todo: PassWork, seq_len: int, solved: float = 0.0) -> StageCost:
    """Count one pass; `solved`: operations besides, which are not matrix products of the model."""
    if (todo.of_copy or todo.adapter_rank) and work.way.pruned_whole:  # the copy is there (Recipe.to_train)
        work = replace(work, way=replace(work.way, from_files=False, pruned_whole=False, gradients_by_layer=True))
    flops = work.arithmetic.of_pass(todo, seq_len)
    seconds = (flops + solved) / work.speed.flops
    if todo.backward and work.way.by_layer:
        seconds = BY_LAYER * seconds + _waiting_s(work, todo)
    if work.way.streamed:
        seconds += 2 * _reading_s(work) if todo.backward else _reading_s(work, todo.tokens)
    return StageCost(stage, 1, todo.tokens, flops, seconds)


def _step(work: ModelWork, stage: str, amounts: Sequence[Any]) -> StageCost:
    """Count a step of the recipes of all trials; of a search that visits only some configurations as many as fall on them on
    average."""
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
    """Return the seconds in which hidden states that are not on the device come and go: for every layer a token's are read and
    written forward; backward they are read again, and their gradient is read and written."""
    if work.way.states == "device" or (work.way.states == "host" and work.device == "cpu"):
        return 0.0
    rate = DISK_BYTES_PER_S if work.way.states == "file" else HOST_BYTES_PER_S
    return 5 * todo.attention_tokens * work.state_bytes / rate


def _reading_s(work: ModelWork, tokens: int = 0, parts: int = 1) -> float:
    """Return the seconds in which weights come from their files for a pass over so many tokens, which go through the layers in
    blocks, no fewer than `parts`."""
    return max(parts, math.ceil(tokens / BLOCK_TOKENS)) * work.weight_bytes / DISK_BYTES_PER_S


def _evaluation(work: ModelWork, removed_params: int) -> list[StageCost]:
    """Count KL, perplexity and zero-shot of one model of which `removed_params` are gone; of the dense one KL is the pass for the
    hidden states that every trial's KL reads."""
    arithmetic = work.arithmetic.pruned(removed_params)
    tokens, window = work.perplexity_tokens, min(work.perplexity_window, work.perplexity_tokens)
    zero_shot = work.zero_shot
    compared = compared_tokens(tokens, TEXT_TOKENS) + compared_tokens(zero_shot.tokens, TASK_TOKENS)
    heads = 2 * compared if removed_params else 0
    brought = work.way.streamed and not (work.way.pruned_whole and removed_params)

    def read(count: int, parts: int = 1) -> float:
        return _reading_s(work, count, parts) if brought else 0.0

    flops = arithmetic.all_layers(compared, window) + arithmetic.head(heads)
    kl = StageCost("kl", 1, compared, flops, read(compared) + flops / work.speed.flops)
    flops = arithmetic.forward(tokens, window)
    perplexity = StageCost("perplexity", 1, tokens, flops, read(tokens) + flops / work.speed.flops)
    flops = arithmetic.forward(zero_shot.tokens, zero_shot.row_length, zero_shot.scored)
    seconds = read(zero_shot.tokens, work.slices) + ZERO_SHOT[work.device] * (flops / work.speed.flops)
    return [kl, perplexity, StageCost("zero_shot", 1, zero_shot.tokens, flops, seconds)]
