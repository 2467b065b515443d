"""What a plan has to forward for one model: its texts and items in tokens, and the passes that no cache holds yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig

from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import ModelRun, PruningConfig, Samples
from tune_prune.data.sources import Contents, task_source
from tune_prune.evaluation.kept_suite import KeptSuite, caveats, ends_texts
from tune_prune.models.geometry import Geometry
from tune_prune.pruning.compensation import recovery, refit
from tune_prune.pruning.statistics import Need, PassWork, by_statistic, load_statistic
from tune_prune.trial.iteration import steps_of, works_of
from tune_prune.trial.statistics import StatisticCache, by_samples
from tune_prune.tuning.memory import Shapes
from tune_prune.tuning.memory_plan import MemoryPlan
from tune_prune.tuning.tokens import (
    HUB_PERPLEXITY_TOKENS,
    ZeroShotTokens,
    hub_tokens,
    suite_tokens,
    tokens_per_gpt2_token,
)

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
    """Memory of the largest trial among `configs`, in every way to hold the model, the fastest first. `from_files`: whether weights
    can stay in their files; `gpus`: over which a trial is spread."""
    shapes = Shapes(geometry, work.config, itemsize, device, gpus)
    read = work.perplexity_window, work.perplexity_tokens, work.longest_row, work.zero_shot.tokens
    measured = partial(shapes.evaluation, removed_params, *read)
    passes = passes_of(configs, geometry.num_layers, device)
    return shapes.ways(passes, lambda way: measured(way=way), from_files, removed_params)


def passes_of(configs: Collection[PruningConfig], num_layers: int, device: str) -> list[tuple[str, PassWork]]:
    """What the statistics and the recipes of `configs` take: stage and work of each pass, for its memory."""
    later = [("steps", work) for config in configs for work in works_of(config, num_layers, device)]
    return [*recipe_passes(configs, num_layers, device), *dict.fromkeys(later)] + [
        (load_statistic(name).stage, load_statistic(name).work(needs, samples.seq_len, num_layers, device))
        for samples, shared in by_samples(configs).items()
        for name, needs in by_statistic(shared).items()
    ]


def recipe_passes(configs: Collection[PruningConfig], num_layers: int, device: str) -> list[tuple[str, PassWork]]:
    """Those of the recipes alone; of a recovery one step."""
    tokens = dict.fromkeys(one.refit_tokens for one in configs if one.compensation != "none")
    refits = [("refit", refit.work(amount, num_layers, device)) for amount in tokens]
    trained = dict.fromkeys((one.recovery_steps, one.recovery_rank) for one in configs if one.recovery != "none")
    return refits + [("recovery", recovery.step_work(steps, num_layers, rank)) for steps, rank in trained]


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
