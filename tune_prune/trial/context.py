"""What all trials of one model share, loaded or computed once and kept: in memory for a process, in the artifact store for
every process of this search and of later ones.

Keys say what a result depends on and nothing else: statistics on calibration text, seed and samples; measurements on the
kept structure, the text or tasks and the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import PROTOCOL_VERSION, ModelRun, PruningConfig, trial_key
from tune_prune.data import calibration, perplexity_text, task_files
from tune_prune.data.sources import data_fingerprint, task_source, uses_embedded_data
from tune_prune.evaluation import perplexity
from tune_prune.evaluation.engine import prefix_trees
from tune_prune.evaluation.item_scores import ItemScore
from tune_prune.evaluation.perplexity import PerplexityResult
from tune_prune.evaluation.suite import RequestScores, ZeroShotSuite
from tune_prune.models import catalog, loading
from tune_prune.models.runner.layer_weights import bring
from tune_prune.models.runner.mapped_model import map_model
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.statistics import Arrays, Need, Statistic, by_statistic, load_statistic
from tune_prune.pruning.surgery import prune, pruned_weights
from tune_prune.trial.statistics import StatisticCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUITE_VERSION = 1  # raise when the zero-shot requests, as tokens, change their meaning: cached ones are then not used


class TrialContext:
    """What all trials of one model share: the dense model, texts, tasks and cached statistics. Loaded once per process;
    parts that a stage does not need are not loaded."""

    def __init__(self, run: ModelRun, loaded: loading.LoadedModel, artifacts: ArtifactStore) -> None:
        self.run = run
        self.loaded = loaded
        self.artifacts = artifacts

    @classmethod
    def open(
        cls,
        run: ModelRun,
        artifact_dir: str | Path,
        device: str = "auto",
        residency: Residency = RESIDENT,
    ) -> TrialContext:
        """Load the model of `run`. `residency` says whether its weights stay in their files, and what of a pass is in memory at
        once. Raises UserError where the model is not available."""
        source, dtype = catalog.resolve(run.model, run.revision), getattr(torch, run.dtype)
        load = map_model if residency.from_files else loading.load_model
        loaded = load(source, dtype, loading.pick_device(device), residency)
        return cls(run, loaded, ArtifactStore(artifact_dir))

    def key(self, config: PruningConfig | None) -> str:
        return trial_key(config, self.model_fingerprint, self.data_fingerprint, self.run)

    @cached_property
    def model_fingerprint(self) -> str:
        return loading.model_fingerprint(self.loaded.source, self.loaded.model.config)

    @cached_property
    def data_fingerprint(self) -> str:
        return data_fingerprint(self.run)

    @cached_property
    def calibration_tokens(self) -> torch.Tensor:
        return calibration.tokenize(self.loaded.tokenizer, calibration.load_text(self.run.calibration))

    @cached_property
    def perplexity_tokens(self) -> torch.Tensor:
        text = perplexity_text.load_text(self.run.data_dir, uses_embedded_data(self.run))
        return calibration.tokenize(self.loaded.tokenizer, text)

    @property
    def perplexity_window(self) -> int:
        return min(self.run.protocol.perplexity_window, self.loaded.max_length)

    @cached_property
    def suite(self) -> ZeroShotSuite:
        """The requests of all tasks as tokens: made by lm-eval once per model and task set, afterwards read."""
        protocol, source = self.run.protocol, task_source(self.run)
        key = suite_key(self.run, self.model_fingerprint, self.loaded.max_length)
        stored = self.artifacts.get("suite", key)
        if stored is not None:
            return ZeroShotSuite.from_arrays(stored, protocol)
        from tune_prune.evaluation.zero_shot import build_suite  # imports lm_eval: seconds, and not needed before

        suite = build_suite(self.loaded.tokenizer, protocol, source, self.loaded.max_length)
        arrays = suite.arrays()
        if arrays is not None:
            self.artifacts.put("suite", key, arrays)
        return suite

    @cached_property
    def _task_fingerprint(self) -> str:
        return task_files.tasks_fingerprint(task_source(self.run), self.run.protocol.tasks)

    @cached_property
    def _text_fingerprint(self) -> str:
        return perplexity_text.perplexity_fingerprint(self.run.data_dir, uses_embedded_data(self.run))

    @cached_property
    def _sharing_unsupported(self) -> str | None:
        """Why the choices of an item are scored one by one on this model; None: they share their prefix."""
        return prefix_trees.unsupported_reason(self.loaded.model, self.loaded.residency)

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of the measured numbers, in sentences. May run the model on a few tokens to find them."""
        refused = self._sharing_unsupported
        return (f"zero-shot choices are scored one by one: {refused}",) if refused else ()

    def measure_perplexity(self, model: PreTrainedModel, plan: PruningPlan) -> tuple[PerplexityResult, int]:
        """The perplexity of `model`, which keeps what `plan` says, and the tokens forwarded to get it (0: it was cached)."""
        key = self._measurement(plan.structure, text=self._text_fingerprint, window=self.perplexity_window)
        stored = self.artifacts.get("perplexity", key)
        if stored is not None:
            return PerplexityResult(float(stored["ppl"]), float(stored["mean_loss"]), int(stored["num_tokens"])), 0
        residency = self._residency_of(model, plan)
        result = perplexity.perplexity(model, self.perplexity_tokens, self.perplexity_window, residency=residency)
        self.artifacts.put("perplexity", key, {name: np.array(value) for name, value in asdict(result).items()})
        return result, result.num_tokens

    def item_scores(self, model: PreTrainedModel, plan: PruningPlan, index: int) -> tuple[list[ItemScore], int]:
        """The scores of the items that slice `index` adds, and the tokens forwarded to get them (0: they were cached)."""
        protocol = asdict(self.run.protocol) | {"perplexity_window": None}
        key = self._measurement(plan.structure, tasks=self._task_fingerprint, protocol=protocol, slice=index)
        stored = self.artifacts.get("zero_shot", key)
        if stored is not None:
            return self.suite.judge(index, RequestScores(stored["loglikelihoods"], stored["greedy"])), 0
        share = self._sharing_unsupported is None
        scores = self.suite.request_scores(model, index, share=share, residency=self._residency_of(model, plan))
        self.artifacts.put("zero_shot", key, {"loglikelihoods": scores.loglikelihoods, "greedy": scores.greedy})
        return self.suite.judge(index, scores), self.suite.tokens_in_slice(index, share)

    def pruned(self, plan: PruningPlan) -> PreTrainedModel:
        """The dense model without what `plan` drops; as empty as the dense one is, or with its own weights on the device where the
        residency says so."""
        dense = self.loaded
        model = prune(dense.model, dense.family, plan)
        if dense.residency.pruned_whole and dense.residency.weights is not None:
            bring(model, pruned_weights(dense.model, dense.family, plan, dense.residency.weights), dense.device)
        return model

    def _residency_of(self, model: PreTrainedModel, plan: PruningPlan) -> Residency:
        """Of `model`, which keeps what `plan` says: weights that are elsewhere are cut when they are brought."""
        dense = self.loaded
        if dense.residency.weights is None or model.device.type != "meta":
            return RESIDENT
        return replace(
            dense.residency, weights=pruned_weights(dense.model, dense.family, plan, dense.residency.weights)
        )

    def windows(self, seq_len: int, count: int) -> torch.Tensor:
        return calibration.windows(self.calibration_tokens, seq_len, count, self.run.seed)

    @cached_property
    def cache(self) -> StatisticCache:
        return StatisticCache(self.run, self.model_fingerprint, loading.device_key(self.loaded.device), self.artifacts)

    def collect(
        self, seq_len: int, needs: Sequence[Need], shared: Sequence[Need] = ()
    ) -> tuple[dict[Need, Arrays], int]:
        """The arrays of `needs`, all of one statistic, and the tokens forwarded to get them (0: they were cached).

        Where they have to be computed, the same pass serves those of `shared`, of that statistic and the same kinds.
        """
        found = {need: arrays for need in needs if (arrays := self.cache.get(seq_len, need)) is not None}
        missing = [need for need in needs if need not in found]
        if not missing:
            return found, 0
        kinds = {need.kind for need in missing}
        also = self.cache.missing(seq_len, [need for need in shared if need.kind in kinds])
        ((name, wanted),) = by_statistic((*missing, *also)).items()
        statistic, loaded = load_statistic(name), self.loaded
        windows = self.windows(seq_len, max(need.num_samples for need in wanted))
        made = statistic.collect(loaded.model, loaded.family, windows, wanted, self._residency_for(statistic))
        for need, arrays in made.items():
            self.cache.put(seq_len, need, arrays)
            found |= {one: arrays for one in missing if statistic.key(one) == statistic.key(need)}
        return found, statistic.work(wanted, seq_len, loaded.geometry.num_layers, loaded.device.type).tokens

    def _residency_for(self, statistic: Statistic) -> Residency:
        residency = self.loaded.residency
        return residency if statistic.backward else residency.forward_only

    def way(self, statistic: Statistic) -> str:
        """How the model is held for a pass, for the record; "" where it is all there."""
        return _way(self._residency_for(statistic))

    def way_to_measure(self, model: PreTrainedModel, plan: PruningPlan) -> str:
        """The same of `model`, which keeps what `plan` says, while it is measured."""
        return _way(self._residency_of(model, plan))

    def _measurement(self, structure: str, **more: Any) -> dict[str, Any]:
        return {
            "version": PROTOCOL_VERSION,
            "model": self.model_fingerprint,
            "structure": structure,
            "dtype": self.run.dtype,
            "device": loading.device_key(self.loaded.device),
            **more,
        }


def _way(residency: Residency) -> str:
    """For a record; "" where the model is all there."""
    return "" if residency == RESIDENT else str(residency)


def suite_key(run: ModelRun, model_fingerprint: str, max_length: int) -> dict[str, Any]:
    """The artifact key of the zero-shot requests as tokens."""
    return {
        "version": SUITE_VERSION,
        "tokenizer": model_fingerprint,
        "tasks": task_files.tasks_fingerprint(task_source(run), run.protocol.tasks),
        "protocol": asdict(run.protocol) | {"perplexity_window": None},
        "max_length": max_length,
    }
