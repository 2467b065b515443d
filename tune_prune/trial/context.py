"""The things that all trials of one model share, loaded or computed once and kept: in memory for a process, in the artifact store
for every process of this search and of later ones.

Keys say what a result depends on and nothing else: statistics on calibration text, seed and samples; measurements
(`trial.measurements`) on the kept structure, the text or tasks and the protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import PROTOCOL_VERSION, ModelRun, PruningConfig, Samples, trial_key
from tune_prune.core.store import Location
from tune_prune.data import calibration
from tune_prune.data.sources import Contents
from tune_prune.evaluation.engine import prefix_trees
from tune_prune.evaluation.kept_suite import KeptSuite, caveats
from tune_prune.models import catalog, loading
from tune_prune.models.runner.devices import device_key
from tune_prune.models.runner.layer_weights import first_non_finite
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.statistics import Arrays, Need, Statistic, by_statistic, load_statistic
from tune_prune.trial.fallback import Fallback, load
from tune_prune.trial.held import HeldModel
from tune_prune.trial.statistics import StatisticCache

if TYPE_CHECKING:
    from tune_prune.evaluation.suite import ZeroShotSuite

log = logging.getLogger(__name__)


class TrialContext(HeldModel):
    """Holds the dense model, texts, tasks and cached statistics for all trials of one model. Each part is loaded once per process,
    when a stage first needs it."""

    def __init__(
        self,
        run: ModelRun,
        loaded: loading.LoadedModel,
        artifacts: ArtifactStore,
        fallback: Fallback | None = None,
        let_go: Callable[[], None] | None = None,
    ) -> None:
        """Take `fallback` and `let_go` as a HeldModel does."""
        super().__init__(run.label, loaded, fallback, let_go)
        self.run = run
        self.artifacts = artifacts
        self.contents = Contents(run)
        known = loaded.tokenizer, loaded.model.config.vocab_size
        self.calibration_tokens = cache(partial(self.contents.calibration_tokens, *known))  # by source
        self._items_in: dict[str, int] = {}  # by source; a cache of a method would hold this object, and so the model

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

    @cached_property
    def bos(self) -> int | None:
        """The token that stands in front of every text; None: none. Raises UserError where the tokenizer has not the one that the
        model wants."""
        return calibration.bos_of(self.loaded.tokenizer, self.run.protocol.bos, self.run.label)

    @property
    def perplexity_window(self) -> int:
        return min(self.run.protocol.perplexity_window, self.loaded.max_length)

    @cached_property
    def suite(self) -> ZeroShotSuite:
        """Return the requests of all tasks as tokens: made by lm-eval once per model and task set, afterwards read."""
        suite = self._kept.read()
        if suite is None:
            suite = self._kept.make(self.loaded.tokenizer)
            self._kept.keep(suite)
        return suite

    def items_in_calibration(self, config: PruningConfig) -> int:
        """Return how many of the measured items the calibration text of `config` holds with their right answers; a warning
        says so."""
        text = self.run.of(config).calibration
        if text in self._items_in:
            return self._items_in[text]
        suite, key = self.suite, self._kept.key | {"calibration": self.contents.calibration(text)}
        count = self.artifacts.get("items_in_calibration", key, lambda arrays: int(arrays["count"]))
        if count is None:
            count = suite.items_in(self.calibration_tokens(text), self.loaded.tokenizer)
            self.artifacts.put("items_in_calibration", key, {"count": np.array(count)})
        if count:
            log.warning(
                "calibration text %s holds %d of the %d measured questions with their right answers, so what is pruned by it looks "
                "better on the tasks than it is: measure other questions, or take these out of the text",
                *(text, count, suite.num_items),
            )
        self._items_in[text] = count
        return count

    @cached_property
    def non_finite_weight(self) -> str | None:
        """Return the first weight of the dense model that holds NaN or infinity. All are read for it, one after the other, once:
        that is less than one pass over the model, of which a trial makes many."""

        def find(_: int) -> str | None:
            return first_non_finite(self.loaded.residency.weights or dict(self.loaded.model.named_parameters()))

        return self.fitted("check of weights", "forward", find)

    @cached_property
    def _kept(self) -> KeptSuite:
        return KeptSuite(self.run, self.contents, self.loaded.model.config, self.model_fingerprint, self.artifacts)

    @cached_property
    def sharing_unsupported(self) -> str | None:
        """Say why the choices of an item are scored one by one on this model; None: they share their prefix."""
        return prefix_trees.unsupported_reason(self.loaded.model, self.loaded.residency)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return caveats of the measured numbers, in sentences. May run the model on a few tokens to find them."""
        refused = self.fitted("zero_shot", "measure", lambda _: self.sharing_unsupported)
        notes = (f"answers are scored one by one, which takes longer: {refused}",) if refused else ()
        return caveats(self.loaded.tokenizer, self.suite) + notes

    def windows(self, samples: Samples, count: int) -> torch.Tensor:
        run = self.run.of(samples)
        texts = self.calibration_tokens(run.calibration)
        return calibration.samples(texts, samples.seq_len, count, run.seed, self.bos)

    @cached_property
    def cache(self) -> StatisticCache:
        device, contents = device_key(self.loaded.device), self.contents
        return StatisticCache(
            self.run, self.model_fingerprint, device, self.artifacts, fingerprint=contents.calibration
        )

    def collect(
        self, samples: Samples, needs: Sequence[Need], shared: Sequence[Need] = ()
    ) -> tuple[dict[Need, Arrays], int]:
        """Return the arrays of `needs`, all of one statistic, and the tokens forwarded to get them (0: they were cached).

        Where they have to be computed, the same pass serves those of `shared`, of that statistic and the same kinds.
        """
        collected = {need: arrays for need in needs if (arrays := self.cache.get(samples, need)) is not None}
        missing = [need for need in needs if need not in collected]
        if not missing:
            return collected, 0
        kinds = {need.kind for need in missing}
        also = self.cache.missing(samples, [need for need in shared if need.kind in kinds])
        ((name, wanted),) = by_statistic((*missing, *also)).items()
        statistic = load_statistic(name)
        windows = self.windows(samples, max(need.num_samples for need in wanted))
        made, tokens = self.fitted(
            statistic.stage,
            "gradients" if statistic.backward else "forward",
            lambda halvings: self.cache.collect(
                samples, wanted, windows, self.loaded, replace(self.residency_for(statistic), halvings=halvings)
            ),
            lambda: self.most_halvings(name, wanted, samples.seq_len),
        )
        for need, arrays in made.items():
            collected |= {one: arrays for one in missing if statistic.key(one) == statistic.key(need)}
        return collected, tokens

    def residency_for(self, statistic: Statistic) -> Residency:
        """Return how the dense model is held for the pass of a statistic."""
        residency = self.loaded.residency
        return residency if statistic.backward else residency.forward_only

    def most_halvings(self, name: str, needs: Sequence[Need], seq_len: int) -> int:
        """Return how often the pass of a statistic can do with half as much at once; gradients cannot."""
        statistic, num_layers = load_statistic(name), self.loaded.geometry.num_layers
        if statistic.backward:
            return 0
        work = statistic.work(needs, seq_len, num_layers, self.loaded.device.type)
        return self.halvings(statistic.parts(needs, num_layers), work.batch_tokens, self.loaded.residency.forward_only)

    def measurement_key(self, structure: str, **more: Any) -> dict[str, Any]:
        return {
            "version": PROTOCOL_VERSION,
            "model": self.model_fingerprint,
            "structure": structure,
            "dtype": self.run.dtype,
            "device": device_key(self.loaded.device),
            **({"bos": True} if self.run.protocol.bos else {}),
            **more,
        }
