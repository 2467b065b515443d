"""What all trials of one model share, loaded or computed once and kept: in memory for a process, in the artifact store for
every process of this search and of later ones.

Keys say what a result depends on and nothing else: statistics on calibration text, seed and samples; measurements on the
kept structure, the text or tasks and the protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import PROTOCOL_VERSION, ModelRun, PruningConfig, Samples, trial_key
from tune_prune.core.store import Location
from tune_prune.data import calibration
from tune_prune.data.sources import Contents
from tune_prune.evaluation import perplexity
from tune_prune.evaluation.engine import prefix_trees
from tune_prune.evaluation.item_scores import ItemScore
from tune_prune.evaluation.kept_suite import KeptSuite, caveats
from tune_prune.evaluation.perplexity import PerplexityResult
from tune_prune.models import catalog, loading
from tune_prune.models.loading import map_model
from tune_prune.models.runner.devices import device_key
from tune_prune.models.runner.layer_runner import BLOCK_TOKENS
from tune_prune.models.runner.layer_weights import first_non_finite
from tune_prune.models.runner.mapped_model import readable_in_place
from tune_prune.models.runner.out_of_memory import first_that_fits, release
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.statistics import Arrays, Need, Statistic, by_statistic, load_statistic
from tune_prune.trial.fallback import Fallback, Use, load
from tune_prune.trial.recipe import Made, Recipe
from tune_prune.trial.statistics import StatisticCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tune_prune.evaluation.suite import ZeroShotSuite

log = logging.getLogger(__name__)

T = TypeVar("T")


class TrialContext:
    """What all trials of one model share: the dense model, texts, tasks and cached statistics. Loaded once per process;
    parts that a stage does not need are not loaded."""

    def __init__(
        self,
        run: ModelRun,
        loaded: loading.LoadedModel,
        artifacts: ArtifactStore,
        fallback: Fallback | None = None,
        let_go: Callable[[], None] | None = None,
    ) -> None:
        """`fallback`: what this process has learned before of how the model fits into memory. `let_go`: called where its weights
        have to leave the device, as somebody else has them, too."""
        self.run = run
        self.loaded = loaded
        self.artifacts = artifacts
        self.fallback = fallback or Fallback(replace(loaded.residency, weights=None, device=None))
        self._let_go = let_go
        self.contents = Contents(run)
        known = loaded.tokenizer, loaded.model.config.vocab_size
        self.calibration_tokens = cache(partial(self.contents.calibration_tokens, *known))  # by source
        self._items_in: dict[str, int] = {}  # by source; a cache of a method would hold this object, and so the model
        self._copy: tuple[str, Made] | None = None  # the pruned model, and its structure

    @classmethod
    def open(
        cls,
        run: ModelRun,
        artifact_dir: str | Location,
        device: str = "auto",
        residency: Residency = RESIDENT,
        fallback: Fallback | None = None,
    ) -> TrialContext:
        """Load the model of `run`. `residency` says whether its weights stay in their files, and what of a pass is in memory at
        once; or the `fallback` of an earlier context. Raises UserError where the model is not available, OutOfMemory where it fits
        in no way."""
        source, dtype = catalog.resolve(run.model, run.revision), getattr(torch, run.dtype)
        fallback = fallback or Fallback(residency)
        loaded = load(source, dtype, loading.pick_device(device), run.label, fallback)
        return cls(run, loaded, ArtifactStore(artifact_dir), fallback)

    def key(self, config: PruningConfig | None) -> str:
        return trial_key(config, self.model_fingerprint, self.contents.data(self.run.of(config).calibration), self.run)

    @cached_property
    def model_fingerprint(self) -> str:
        return loading.model_fingerprint(self.loaded.source, self.loaded.model.config)

    @cached_property
    def perplexity_tokens(self) -> torch.Tensor:
        return self.contents.perplexity_tokens(self.loaded.tokenizer, self.loaded.model.config.vocab_size)

    @property
    def perplexity_window(self) -> int:
        return min(self.run.protocol.perplexity_window, self.loaded.max_length)

    @cached_property
    def suite(self) -> ZeroShotSuite:
        """The requests of all tasks as tokens: made by lm-eval once per model and task set, afterwards read."""
        suite = self._kept.read()
        if suite is None:
            suite = self._kept.make(self.loaded.tokenizer)
            self._kept.keep(suite)
        return suite

    def items_in_calibration(self, config: PruningConfig) -> int:
        """How many of the measured items the calibration text of `config` holds with their right answers; a warning says so."""
        text = self.run.of(config).calibration
        if text not in self._items_in:
            self._items_in[text] = self._find_items_in(text)
        return self._items_in[text]

    def _find_items_in(self, text: str) -> int:
        suite, key = self.suite, self._kept.key | {"calibration": self.contents.calibration(text)}
        found = self.artifacts.get("items_in_calibration", key, lambda arrays: int(arrays["count"]))
        if found is None:
            found = suite.items_in(self.calibration_tokens(text), self.loaded.tokenizer)
            self.artifacts.put("items_in_calibration", key, {"count": np.array(found)})
        if found:
            log.warning(
                "calibration text %s holds %d of the %d measured questions with their right answers, so what is pruned by it looks "
                "better on the tasks than it is: measure other questions, or take these out of the text",
                *(text, found, suite.num_items),
            )
        return found

    @cached_property
    def non_finite_weight(self) -> str | None:
        """The first weight of the dense model that holds NaN or infinity. All are read for it, one after the other, once: that is
        less than one pass over the model, of which a trial makes many."""

        def find(_: int) -> str | None:
            return first_non_finite(self.loaded.residency.weights or dict(self.loaded.model.named_parameters()))

        return self.fitted("check of weights", "forward", find)

    @cached_property
    def _kept(self) -> KeptSuite:
        return KeptSuite(self.run, self.contents, self.loaded.model.config, self.model_fingerprint, self.artifacts)

    @cached_property
    def _sharing_unsupported(self) -> str | None:
        """Why the choices of an item are scored one by one on this model; None: they share their prefix."""
        return prefix_trees.unsupported_reason(self.loaded.model, self.loaded.residency)

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of the measured numbers, in sentences. May run the model on a few tokens to find them."""
        refused = self.fitted("zero_shot", "measure", lambda _: self._sharing_unsupported)
        notes = (f"answers are scored one by one, which takes longer: {refused}",) if refused else ()
        return caveats(self.loaded.tokenizer, self.suite) + notes

    def measure_perplexity(self, recipe: Recipe) -> tuple[PerplexityResult, int]:
        """The perplexity of the model that `recipe` makes, and the tokens forwarded to get it (0: it was cached)."""
        most = self.run.protocol.perplexity_tokens
        bound = {} if most is None else {"tokens": most}
        key = self.measurement_key(recipe.structure, text=self.contents.text, window=self.perplexity_window, **bound)
        stored = self.artifacts.get("perplexity", key, PerplexityResult.from_arrays)
        if stored is not None:
            return stored, 0
        tokens, window, config = self.perplexity_tokens, self.perplexity_window, self.loaded.model.config
        at_once = min(perplexity.windows_at_once(window, config, self.loaded.device.type), len(tokens) // window)
        result = self.fitted(
            "perplexity",
            "measure",
            lambda halvings: perplexity.perplexity(
                self.model_of(recipe), tokens, window, residency=replace(self.residency_of(recipe), halvings=halvings)
            ),
            lambda: self.halvings(at_once, window, self.residency_of(recipe)),
        )
        self.artifacts.put("perplexity", key, {name: np.array(value) for name, value in asdict(result).items()})
        return result, result.num_tokens

    def item_scores(self, recipe: Recipe, index: int) -> tuple[list[ItemScore], int]:
        """The scores of the items that slice `index` adds, and the tokens forwarded to get them (0: they were cached)."""
        protocol = self.run.protocol.of_items()
        key = self.measurement_key(recipe.structure, tasks=self.contents.tasks, protocol=protocol, slice=index)
        scores = self.suite.blank_scores(index)
        stored = self.artifacts.get("zero_shot", key, lambda arrays: self.suite.judge(index, scores.stored(arrays)))
        if stored is not None:
            return stored, 0

        def score(halvings: int) -> bool:
            share = self._sharing_unsupported is None
            residency = replace(self.residency_of(recipe), halvings=halvings)
            self.suite.request_scores(self.model_of(recipe), index, share=share, residency=residency, scores=scores)
            return share

        def most() -> int:
            config, device = self.loaded.model.config, self.loaded.device.type
            return self.suite.most_halvings(index, config, True, self.residency_of(recipe), device)

        share = self.fitted("zero_shot", "measure", score, most)
        self.artifacts.put("zero_shot", key, {"loglikelihoods": scores.loglikelihoods, "greedy": scores.greedy})
        return self.suite.judge(index, scores), self.suite.tokens_in_slice(index, share)

    def cut(self, choose: Callable[[], PruningPlan]) -> tuple[PruningPlan, int]:
        """The plan that `choose` finds with the dense model, and the number of parameters of the copy that is made by it."""

        def make(_: int) -> tuple[PruningPlan, int]:
            self.drop_copy()
            plan = choose()
            return plan, self._made(Recipe(plan)).params

        return self.fitted("pruning", "measure", make)

    def model_of(self, recipe: Recipe) -> PreTrainedModel:
        """Return the dense model or, where the plan of `recipe` drops something, the copy that it makes; the last copy is kept
        until `drop_copy`."""
        return self._made(recipe).model

    def _made(self, recipe: Recipe) -> Made:
        dense = self.loaded
        if not recipe.plan.removed_params:
            return Made(dense.model, _count(dense.model), dense.residency.weights)
        if self._copy is None or self._copy[0] != recipe.structure:
            self._copy = None  # before the next one is made
            self._copy = recipe.structure, recipe.make(dense)
        return self._copy[1]

    def drop_copy(self) -> None:
        """Let go of the pruned copy."""
        self._copy = None

    def residency_of(self, recipe: Recipe) -> Residency:
        """Return how the model that `recipe` makes is held: weights that are elsewhere are cut when they are brought."""
        held = self.loaded.residency
        if held.weights is None or (held.pruned_whole and recipe.plan.removed_params):
            return RESIDENT
        return replace(held.forward_only, weights=self._made(recipe).weights)

    def windows(self, samples: Samples, count: int) -> torch.Tensor:
        run = self.run.of(samples)
        return calibration.samples(self.calibration_tokens(run.calibration), samples.seq_len, count, run.seed)

    @cached_property
    def cache(self) -> StatisticCache:
        device, contents = device_key(self.loaded.device), self.contents
        return StatisticCache(
            self.run, self.model_fingerprint, device, self.artifacts, fingerprint=contents.calibration
        )

    def collect(
        self, samples: Samples, needs: Sequence[Need], shared: Sequence[Need] = ()
    ) -> tuple[dict[Need, Arrays], int]:
        """The arrays of `needs`, all of one statistic, and the tokens forwarded to get them (0: they were cached).

        Where they have to be computed, the same pass serves those of `shared`, of that statistic and the same kinds.
        """
        found = {need: arrays for need in needs if (arrays := self.cache.get(samples, need)) is not None}
        missing = [need for need in needs if need not in found]
        if not missing:
            return found, 0
        kinds = {need.kind for need in missing}
        also = self.cache.missing(samples, [need for need in shared if need.kind in kinds])
        ((name, wanted),) = by_statistic((*missing, *also)).items()
        statistic = load_statistic(name)
        windows = self.windows(samples, max(need.num_samples for need in wanted))
        work = statistic.work(wanted, samples.seq_len, self.loaded.geometry.num_layers, self.loaded.device.type)
        made, there = self.fitted(
            statistic.stage,
            "gradients" if statistic.backward else "forward",
            lambda halvings: self.cache.collect(
                samples, wanted, windows, self.loaded, replace(self._residency_for(statistic), halvings=halvings)
            ),
            lambda: self.most_halvings(name, wanted, samples.seq_len),
        )
        for need, arrays in made.items():
            self.cache.put(samples, need, arrays)
            found |= {one: arrays for one in missing if statistic.key(one) == statistic.key(need)}
        return found, work.tokens // len(windows) * (len(windows) - there)

    def _residency_for(self, statistic: Statistic) -> Residency:
        residency = self.loaded.residency
        return residency if statistic.backward else residency.forward_only

    def way(self, statistic: Statistic) -> str:
        """How the model is held for a pass, for the record; "" where it is all there."""
        return self._way(statistic.stage, self._residency_for(statistic))

    def way_of_dense(self, stage: str, forward: bool = True) -> str:
        """The same of the dense model in another stage, which only runs it `forward` or takes gradients."""
        return self._way(stage, self.loaded.residency.forward_only if forward else self.loaded.residency)

    def way_to_measure(self, stage: str, recipe: Recipe) -> str:
        """The same of the model that `recipe` makes, in a stage in which it is measured."""
        return self._way(stage, self.residency_of(recipe))

    def _way(self, stage: str, residency: Residency) -> str:
        residency = replace(residency, halvings=self.fallback.halvings.get(stage, 0))
        return "" if residency == RESIDENT else str(residency)

    def most_halvings(self, name: str, needs: Sequence[Need], seq_len: int) -> int:
        """Times that the pass of a statistic can do with half as much at once; gradients cannot."""
        statistic, num_layers = load_statistic(name), self.loaded.geometry.num_layers
        if statistic.backward:
            return 0
        work = statistic.work(needs, seq_len, num_layers, self.loaded.device.type)
        return self.halvings(statistic.parts(needs, num_layers), work.batch_tokens, self.loaded.residency.forward_only)

    def halvings(self, parts: int, part_tokens: int, residency: Residency) -> int:
        """Times that a stage can do with half as much at once: of so many parts, or of the batches of a block."""
        if residency.streamed:
            parts = max(parts, (residency.block_tokens or BLOCK_TOKENS) // part_tokens)
        return max(1, parts).bit_length() - 1

    def fitted(self, stage: str, use: Use, run: Callable[[int], T], most_halvings: Callable[[], int] = lambda: 0) -> T:
        """What `run` gives, which is told how often to halve what it does at once: as has fitted so far, or else in the next way
        that fits. Raises OutOfMemory where none does. `run` may hold nothing of the model from one time to the next."""
        device, source = self.loaded.device, self.loaded.source
        ways = self.fallback.ways(stage, use, most_halvings, lambda: readable_in_place(source))

        def attempt(way: Residency) -> T:
            self._hold(self.fallback.way)
            return run(way.halvings)

        step = partial(self.fallback.step, source)
        return first_that_fits(f"{stage} of {self.run.label}", ways, attempt, device, step)

    def _hold(self, way: Residency) -> None:
        """Have the model in that way. Weights leave the device where it says so."""
        own = self.loaded.residency
        if way.from_files and not own.from_files:
            source, dtype, device = self.loaded.source, self.loaded.model.dtype, self.loaded.device
            if self._let_go is not None:
                self._let_go()
            self.drop_copy()
            self.loaded = map_model(source, dtype, device.type, way)
            release(device)
        elif replace(own, weights=None, device=None) != way:
            self.drop_copy()  # it may have to be made otherwise
            self.loaded = replace(self.loaded, residency=replace(way, weights=own.weights, device=own.device))

    def measurement_key(self, structure: str, **more: Any) -> dict[str, Any]:
        return {
            "version": PROTOCOL_VERSION,
            "model": self.model_fingerprint,
            "structure": structure,
            "dtype": self.run.dtype,
            "device": device_key(self.loaded.device),
            **more,
        }


def _count(model: PreTrainedModel) -> int:
    return sum(p.numel() for p in model.parameters())
