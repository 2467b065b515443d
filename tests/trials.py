"""A small trial that several tests run, and contexts to run it in."""

from __future__ import annotations

from pathlib import Path

from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.trial.context import ArtifactStore, TrialContext

RUN = ModelRun(
    model="tiny-llama",
    label="tiny-llama",
    revision=None,
    calibration="embedded",
    data_dir=None,
    protocol=EvaluationProtocol(limit=5, perplexity_window=128),  # what a search gives an embedded model
    seed=0,
    dtype="float32",
)
BLOCKWISE = PruningConfig("blockwise", seq_len=16, num_samples=10, pruning_ratio=0.2)


def open_context(folder: Path, run: ModelRun = RUN) -> TrialContext:
    return TrialContext.open(run, folder, device="cpu")


def with_empty_cache(context: TrialContext, folder: Path) -> TrialContext:
    """A context that shares the loaded model and the tasks of `context`."""
    other = TrialContext(context.run, context.loaded, ArtifactStore(folder))
    other.suite = context.suite
    return other
