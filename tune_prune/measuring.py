"""How the API measures a model: as a search measures a trial and, of a checkpoint, its KL to the model that it was pruned from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tune_prune.checkpoint.manifest import MANIFEST, Manifest
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.records import StageReport
from tune_prune.cost_model.memory import Shapes
from tune_prune.cost_model.memory_plan import StageMemory
from tune_prune.data.checks import check_data
from tune_prune.evaluation.evaluation import Evaluation
from tune_prune.models import catalog, loading
from tune_prune.models.catalog import ModelSource
from tune_prune.models.runner.mapped_model import readable_in_place
from tune_prune.models.runner.residency import Residency
from tune_prune.trial.context import TrialContext
from tune_prune.trial.recipe import Recipe
from tune_prune.trial.trial import Trial


def measure(
    context: TrialContext,
    config: PruningConfig | None,
    recipe: Recipe | None,
    base: ModelSource | None,
    on_stage: Callable[[StageReport], object],
) -> Evaluation:
    """The model of `context` as it is, or as the `recipe` of `config` makes it; `base`: as `base_of` gives it, for KL to it. Raises
    UserError."""
    largest, vocab_size = int(context.perplexity_tokens.max()), context.loaded.model.config.vocab_size
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer of {context.run.label} gives the token id {largest}, but vocab_size in its config.json is "
            f"{vocab_size}; use the model's own tokenizer files"
        )
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
    protocol = replace(run.protocol, limit=limit, seed=run.seed, tasks=usual.tasks, slices=usual.slices)
    if tasks is not None:
        protocol = replace(protocol, tasks=tuple(tasks.split(",") if isinstance(tasks, str) else tasks))
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
    if manifest is not None and not loading.is_model_of(manifest.base.fingerprint, source, config):
        raise UserError(
            f"{source.location} is not the model that {label} was pruned from (the contents of its files differ, or it is another "
            "commit); name that one with --base"
        )
    return source


def base_memory(source: ModelSource, itemsize: int, device: str, window: int, tokens: int, row: int) -> StageMemory:
    """What the pass over the base model takes beside the checkpoint. `window`, `tokens`, `row`: as `Shapes.evaluation` has them."""
    config, streamed = loading.load_config(source), readable_in_place(source)
    geometry = loading.config_geometry(config)[1]
    stages = Shapes(geometry, config, itemsize, device).evaluation(
        0, window, tokens, row, way=Residency(from_files=streamed)
    )
    kl = next(stage for stage in stages if stage.stage == "kl")
    return kl if streamed else replace(kl, held=geometry.total_params * itemsize)  # in place of a pruned copy's
