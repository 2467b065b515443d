"""Measurements of a model for the API: as a search measures a trial and, of a checkpoint, its KL to the model that it was
pruned from; and how fast a pruned model is beside the dense one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import torch

from tune_prune.checkpoint import generation_speed, layers
from tune_prune.checkpoint.layers import sizes
from tune_prune.checkpoint.manifest import MANIFEST, Manifest
from tune_prune.commands.options import checked
from tune_prune.core import speed_records
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.records import StageReport
from tune_prune.data.checks import check_data
from tune_prune.evaluation.evaluation import Evaluation
from tune_prune.models import catalog, loading
from tune_prune.models.catalog import ModelSource
from tune_prune.models.loading import LoadedModel
from tune_prune.models.runner.devices import device_name
from tune_prune.models.runner.mapped_model import readable_in_place
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning import surgery
from tune_prune.pruning.groups import PruningPlan
from tune_prune.trial.context import TrialContext
from tune_prune.trial.recipe import Recipe
from tune_prune.trial.trial import Trial
from tune_prune.tuning.memory import Shapes, StageMemory


def measure(
    context: TrialContext,
    config: PruningConfig | None,
    recipe: Recipe | None,
    base: ModelSource | None,
    on_stage: Callable[[StageReport], object],
) -> Evaluation:
    """The model of `context` as it is, or as the `recipe` of `config` makes it; `base`: as `base_of` gives it, for KL to it. Raises
    UserError."""
    _ = context.perplexity_tokens, context.suite  # what cannot be read or built is refused before anything is measured
    key = context.key(config and replace(config, calibration=None))  # it is not read
    trial = Trial(config, context, key=key, base=base)
    for report in trial.stages() if recipe is None else trial.measure(recipe):
        on_stage(report)
    record = trial.progress.record("complete")
    return Evaluation(context.run, record, tuple(trial.items), context.perplexity_window)


def as_measured(run: ModelRun, limit: int | None, tasks: Sequence[str] | str | None) -> ModelRun:
    """The settings of `run` for `limit` items of these `tasks` (None: all, the seven), once texts and tasks were found. Raises
    UserError."""
    usual = EvaluationProtocol()
    asked = checked("evaluate", {"limit": limit, "tasks": tasks})
    protocol = replace(run.protocol, limit=asked["limit"], seed=run.seed, slices=usual.slices)
    protocol = replace(protocol, tasks=usual.tasks if tasks is None else asked["tasks"])
    found = replace(run, protocol=protocol, calibration="embedded")  # nothing is calibrated: no text has to be there
    check_data(found)
    return found


def base_of(label: str, manifest: Manifest | None, asked: str | None) -> ModelSource:
    """The dense model that the checkpoint `label` was pruned from: where its `manifest` says or, if that is elsewhere now or there
    is no manifest, the one `asked` for. Raises UserError where it is not found, and where it is not the one of the manifest."""
    if manifest is None and asked is None:
        raise UserError(
            f"{label} has no {MANIFEST}, which would name the model that it was pruned from; name that with --base to measure KL"
        )
    name = asked if manifest is None or asked is not None else manifest.base_name
    assert name is not None
    try:
        source = catalog.resolve(name, None if manifest is None else manifest.base.revision)
        config = loading.load_config(source)
    except UserError as error:
        if asked is not None:
            raise
        cause = str(error).partition("; ")[0]
        raise UserError(
            f"the model that {label} was pruned from is not where {MANIFEST} says ({cause}); name where it is now with --base"
        ) from error
    if manifest is not None and manifest.base.fingerprint != loading.model_fingerprint(source, config):
        raise UserError(
            f"{source.location} is not the model that {label} was pruned from (the contents of its files differ, or it is another "
            "commit); name that one with --base"
        )
    return source


def base_memory(source: ModelSource, itemsize: int, device: str, window: int, tokens: int, row: int) -> StageMemory:
    """Plan the memory that the pass over the base model takes beside the checkpoint. `window`, `tokens`, `row`: as
    `Shapes.evaluation` has them."""
    config, streamed = loading.load_config(source), readable_in_place(source)
    geometry = loading.config_geometry(config)[1]
    stages = Shapes(geometry, config, itemsize, device).evaluation(
        0, window, tokens, row, way=Residency(from_files=streamed)
    )
    kl = next(stage for stage in stages if stage.stage == "kl")
    return kl if streamed else replace(kl, held=geometry.total_params * itemsize)  # in place of a pruned copy's


def speed_conditions(
    dense: LoadedModel, prompt_tokens: int, new_tokens: int, batch_size: int, repeats: int
) -> speed_records.Conditions:
    """Return the conditions under which `measure_speed` measures: lengths as far as the model has positions. Raises UserError."""
    prompt_tokens, new_tokens = generation_speed.lengths([dense.model.config], prompt_tokens, new_tokens)
    device = dense.model.device
    threads = torch.get_num_threads()
    where = device_name(device) + ("" if device.type == "cuda" else f", {threads} thread{'s' * (threads != 1)}")
    dtype = str(dense.model.dtype).removeprefix("torch.")
    return speed_records.Conditions(prompt_tokens, new_tokens, batch_size, repeats, dtype, where, torch.__version__)


def measure_speed(
    dense: LoadedModel, plan: PruningPlan, key: str, conditions: speed_records.Conditions
) -> speed_records.SpeedRecord:
    """Measure how fast the model that `plan` leaves of `dense` is, in turns with that, as a checkpoint of it would be: a refit or a
    training changes no shape, so neither is made. `key`: of the trial. Raises UserError for a plan of another model."""
    layers.check_plan(plan, dense)
    pruned, _ = layers.compact(surgery.cut(dense.model, dense.family, plan), dense.family)
    saved = layers.as_saved(pruned, dense.model, dense.family, dense.geometry, "hf")
    models = {"dense": dense.model, "pruned": saved.in_memory()}
    asked = (conditions.prompt_tokens, conditions.new_tokens, conditions.batch_size, conditions.repeats)
    found = generation_speed.measure(models, *asked)
    rounds = {name: speed_records.Rounds(list(one.prefill_s), list(one.decode_s)) for name, one in found.items()}
    kv_bytes = {name: sizes(model, dense.family).kv_bytes_per_token for name, model in models.items()}
    return speed_records.SpeedRecord(
        key=key,
        conditions=conditions,
        dense=rounds["dense"],
        pruned=rounds["pruned"],
        kv_bytes_per_token=kv_bytes["pruned"],
        dense_kv_bytes_per_token=kv_bytes["dense"],
        graph=found["dense"].graph,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
