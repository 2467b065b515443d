"""Checkpoints of pruned models for tests of what reads them: an embedded model pruned and measured by a real trial."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tune_prune.checkpoint import layers, manifest
from tune_prune.checkpoint.manifest import Format, Provenance
from tune_prune.checkpoint.save import save_checkpoint
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.store import FolderStore
from tune_prune.data.sources import measured_on
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import cut
from tune_prune.trial.context import TrialContext
from tune_prune.trial.recipe import Recipe
from tune_prune.trial.trial import Trial

CONFIG = PruningConfig("layerwise", 16, 8, 0.3)
PROTOCOL = EvaluationProtocol(("boolq", "piqa"), limit=20, perplexity_window=128)
FLAGS = ("--tasks", "boolq,piqa", "--limit", "20", "--device", "cpu")  # of a command that measures as PROTOCOL says
TRIAL = "trial"  # the folder of the trial's files, beside the checkpoint


def open_context(artifacts: Path, model: str = "tiny-llama", data_dir: str | None = None) -> TrialContext:
    """An embedded model, or a folder, as a search opens it, in float32 on the CPU."""
    run = ModelRun(model, Path(model).name, None, "embedded", data_dir, PROTOCOL, 0, "float32")
    return TrialContext.open(run, artifacts, "cpu")


def measured_checkpoint(folder: Path, context: TrialContext) -> Path:
    """A checkpoint with the numbers that its trial recorded."""
    trial = Trial(CONFIG, context)
    for _ in trial.stages():
        pass
    assert trial.plan is not None
    trial.write_files(FolderStore(folder.with_name(TRIAL)))
    return save(folder, context, trial.plan, metrics=trial.record.metrics)


def save(
    folder: Path,
    context: TrialContext,
    plan: PruningPlan,
    fmt: Format = "hf",
    metrics: Mapping[str, float | None] | None = None,
) -> Path:
    """The checkpoint of the model of `context` pruned by `plan`."""
    run = context.run
    about = Provenance(config=CONFIG, source=run, metrics=metrics, measured_on=measured_on(run))
    save_checkpoint(context.loaded, Recipe(plan), about, folder, fmt)
    return folder


def plan_of(context: TrialContext, groups: list[tuple[int, ...]], channels: list[tuple[int, ...]]) -> PruningPlan:
    """A plan with the parameters that it really removes."""
    loaded, total = context.loaded, context.loaded.geometry.total_params
    plan = PruningPlan(tuple(groups), tuple(channels), 0, 0, total_params=total)
    small, _ = layers.compact(cut(loaded.model, loaded.family, plan), loaded.family)
    removed = total - sum(p.numel() for p in small.model.parameters())
    return PruningPlan(tuple(groups), tuple(channels), 0, removed, total)


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Let `change` edit the object in a JSON file."""
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def record_files(folder: Path) -> None:
    """Let the manifest describe the weight files as they are now."""
    files = {path.name: asdict(manifest.weight_file(path)) for path in folder.glob("*.safetensors")}
    change_json(folder / manifest.MANIFEST, lambda values: values.update(files=files))
