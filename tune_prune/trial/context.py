"""What all trials of one model share, loaded or computed once and kept: in memory for a process, in the artifact store for
every process of this search and of later ones.

Keys say what a result depends on and nothing else: statistics on calibration text, seed and samples; measurements on the
kept structure, the text or tasks and the protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
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
from tune_prune.evaluation.suite import Outcomes, ZeroShotSuite
from tune_prune.models import catalog, loading
from tune_prune.pruning.statistics.block_removal import RemovalLosses, removal_losses
from tune_prune.pruning.statistics.taylor import Importance, taylor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATISTICS_VERSION = 2  # raise when importance or removal losses change their meaning: cached ones are then not used
SUITE_VERSION = 1  # the same for the zero-shot requests, as tokens


class TrialContext:
    """What all trials of one model share: the dense model, texts, tasks and cached statistics. Loaded once per process;
    parts that a stage does not need are not loaded."""

    def __init__(self, run: ModelRun, loaded: loading.LoadedModel, artifacts: ArtifactStore) -> None:
        self.run = run
        self.loaded = loaded
        self.artifacts = artifacts

    @classmethod
    def open(cls, run: ModelRun, artifact_dir: str | Path, device: str = "auto") -> TrialContext:
        """Load the model of `run`. Raises UserError where it cannot be had."""
        source = catalog.resolve(run.model, run.revision)
        loaded = loading.load_model(source, getattr(torch, run.dtype), loading.pick_device(device))
        return cls(run, loaded, ArtifactStore(artifact_dir))

    def key(self, config: PruningConfig | None) -> str:
        return trial_key(config, self.model_fingerprint, self.data_fingerprint, self.run)

    @cached_property
    def model_fingerprint(self) -> str:
        return loading.fingerprint(self.loaded.source, self.loaded.model.config)

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
        return task_files.fingerprint(task_source(self.run), self.run.protocol.tasks)

    @cached_property
    def _text_fingerprint(self) -> str:
        return perplexity_text.fingerprint(self.run.data_dir, uses_embedded_data(self.run))

    @cached_property
    def _sharing_refused(self) -> str | None:
        """Why the choices of an item are scored one by one on this model; None: they share their prefix."""
        return prefix_trees.refusal(self.loaded.model)

    @property
    def notes(self) -> list[str]:
        return [f"zero-shot choices are scored one by one: {self._sharing_refused}"] if self._sharing_refused else []

    def perplexity(self, model: PreTrainedModel, structure: str) -> tuple[PerplexityResult, int]:
        """The perplexity of `model`, which keeps `structure`, and the tokens forwarded to get it (0: it was cached)."""
        key = self._measurement(structure, text=self._text_fingerprint, window=self.perplexity_window)
        stored = self.artifacts.get("perplexity", key)
        if stored is not None:
            return PerplexityResult(float(stored["ppl"]), float(stored["mean_loss"]), int(stored["num_tokens"])), 0
        result = perplexity.perplexity(model, self.perplexity_tokens, self.perplexity_window)
        self.artifacts.put("perplexity", key, {name: np.array(value) for name, value in asdict(result).items()})
        return result, result.num_tokens

    def item_scores(self, model: PreTrainedModel, structure: str, index: int) -> tuple[list[ItemScore], int]:
        """The scores of the items that slice `index` adds, and the tokens forwarded to get them (0: they were cached)."""
        protocol = asdict(self.run.protocol) | {"perplexity_window": None}
        key = self._measurement(structure, tasks=self._task_fingerprint, protocol=protocol, slice=index)
        stored = self.artifacts.get("zero_shot", key)
        if stored is not None:
            return self.suite.judge(index, Outcomes(stored["loglikelihoods"], stored["greedy"])), 0
        share = self._sharing_refused is None
        outcomes = self.suite.outcomes(model, index, share=share)
        self.artifacts.put("zero_shot", key, {"loglikelihoods": outcomes.loglikelihoods, "greedy": outcomes.greedy})
        return self.suite.judge(index, outcomes), self.suite.tokens_in_slice(index, share)

    def windows(self, seq_len: int, count: int) -> torch.Tensor:
        return calibration.windows(self.calibration_tokens, seq_len, count, self.run.seed)

    def importance(self, seq_len: int, num_samples: int, also: Sequence[int] = ()) -> tuple[Importance, int]:
        """The importance from `num_samples` windows, and the tokens forwarded to get it (0: it was cached).

        Where it has to be computed, the same pass serves the sample counts of `also`.
        """
        stored = self.artifacts.get("importance", self._statistic(seq_len, num_samples=num_samples))
        if stored is not None:
            return Importance.from_arrays(num_samples, stored), 0
        wanted = {num_samples, *self.missing_importance(seq_len, also)}
        return self.compute_importance(seq_len, sorted(wanted))[num_samples], seq_len * max(wanted)

    def missing_importance(self, seq_len: int, num_samples: Iterable[int]) -> list[int]:
        """Those of `num_samples` whose importance is not cached."""
        return [
            n for n in num_samples if self.artifacts.get("importance", self._statistic(seq_len, num_samples=n)) is None
        ]

    def compute_importance(self, seq_len: int, snapshots: list[int]) -> dict[int, Importance]:
        """One gradient pass for all `snapshots`; every result is cached."""
        loaded = self.loaded
        results = taylor(loaded.model, loaded.family, self.windows(seq_len, max(snapshots)), snapshots)
        for n, importance in results.items():
            self.artifacts.put("importance", self._statistic(seq_len, num_samples=n), importance.arrays())
        return results

    def removal(self, seq_len: int, num_samples: dict[str, int]) -> tuple[RemovalLosses, int]:
        """Losses without each block of the kinds in `num_samples`, each on at least that many windows, and the tokens
        forwarded to get them: one pass for all kinds that the cache lacks."""
        keys = {kind: self._statistic(seq_len, removal=kind) for kind in num_samples}
        found = {kind: self.artifacts.get("removal", key) for kind, key in keys.items()}
        missing = [kind for kind, stored in found.items() if stored is None or len(stored["dense"]) < num_samples[kind]]
        tokens = 0
        if missing:
            count = max(num_samples[kind] for kind in missing)
            losses = removal_losses(self.loaded.model, self.loaded.family, self.windows(seq_len, count), missing)
            tokens = seq_len * count * (1 + len(missing) * self.loaded.geometry.num_layers)
            for kind in missing:
                arrays = {"dense": losses.dense, "removed": losses.removed[kind]}
                self.artifacts.put("removal", keys[kind], arrays)
                found[kind] = arrays
        dense = max((stored["dense"] for stored in found.values() if stored is not None), key=len)
        return RemovalLosses(dense, {kind: stored["removed"] for kind, stored in found.items() if stored}), tokens

    def _statistic(self, seq_len: int, **more: Any) -> dict[str, Any]:
        return statistic_key(self.run, self.model_fingerprint, self.loaded.device.type, seq_len, **more)

    def _measurement(self, structure: str, **more: Any) -> dict[str, Any]:
        return {
            "version": PROTOCOL_VERSION,
            "model": self.model_fingerprint,
            "structure": structure,
            "dtype": self.run.dtype,
            "device": self.loaded.device.type,
            **more,
        }


def suite_key(run: ModelRun, model_fingerprint: str, max_length: int) -> dict[str, Any]:
    """The artifact key of the zero-shot requests as tokens."""
    return {
        "version": SUITE_VERSION,
        "tokenizer": model_fingerprint,
        "tasks": task_files.fingerprint(task_source(run), run.protocol.tasks),
        "protocol": asdict(run.protocol) | {"perplexity_window": None},
        "max_length": max_length,
    }


def statistic_key(run: ModelRun, model_fingerprint: str, device: str, seq_len: int, **more: Any) -> dict[str, Any]:
    """The artifact key of importance (`num_samples`) or removal losses (`removal`, the kind)."""
    return {
        "version": STATISTICS_VERSION,
        "model": model_fingerprint,
        "calibration": calibration.fingerprint(run.calibration),
        "seed": run.seed,
        "dtype": run.dtype,
        "device": device,
        "seq_len": seq_len,
        **more,
    }
