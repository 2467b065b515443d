"""The request of `prune`: a model, a configuration, and what a search already knows about it.

From a search comes the plan of what to keep (trials/<key>/pruning_plan.json), which is then executed as it was
measured. Without it, the same steps as in a trial find it again: calibration, scores, selection.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tune_prune.checkpoint.manifest import Provenance
from tune_prune.core import artifact_cache
from tune_prune.core.config import ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile, number, parse_json
from tune_prune.core.hyperparameters import HYPERPARAMETERS, RECIPE, unread
from tune_prune.core.kinds import plain
from tune_prune.core.ledger import Ledger, read_about, read_baselines, stranger
from tune_prune.core.measures import wilson_errors
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import BASELINES, BEST_CONFIG, BEST_OF_MODEL, PLAN, Location, location, open_store, read_file
from tune_prune.core.validation import validated
from tune_prune.data import checks
from tune_prune.data.sources import MeasuredOn, data_fingerprint, measured_on
from tune_prune.pruning import selection, shapes
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.methods import NO_STEPS, load_method
from tune_prune.trial.steps import samples_needed
from tune_prune.tuning import resolve
from tune_prune.tuning.resolve import DenseModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PruneRequest(Provenance):
    """One configuration of one model to be pruned. `run` and `config` are always known, the rest where a search has tried them."""

    run: ModelRun  # `source`, or where its model is now
    plan: PruningPlan | None = None
    plan_file: Location | None = None
    fingerprint: str | None = None  # of the model that was searched
    artifact_dir: Location | None = None  # where statistics may already be


def from_config(asked: str, label: str | None, base: str | None = None, revision: str | None = None) -> PruneRequest:
    """Return the best configuration that a search (global_best_config.json, or its folder) or an analysis (best_config.json) names.

    `label` says which of several (a model, or one of its ratios: tiny-llama@0.3); None: the only model, or the better of it and its
    training. `base` and `revision`: where that model is, if not where it was searched. Raises UserError.
    """
    place = location(asked).expanduser()
    is_folder = place.is_dir() if isinstance(place, Path) else place.suffix != ".json"
    path = place / BEST_CONFIG if is_folder else place
    if isinstance(path, Path) and path.is_dir():
        raise DamagedFile(path, "a folder, where a file belongs", "remove it, then search again")
    content = read_file(path)
    if content is None or path.suffix != ".json":
        what = f"has no {BEST_CONFIG}" if is_folder else "is no JSON file" if content is not None else "does not exist"
        raise UserError(
            f"--config {asked} {what}; name the {BEST_CONFIG} that a search writes at its end, or its folder, or the "
            f"{BEST_OF_MODEL} of an analysis"
        )
    try:
        values = parse_json(path, content)
        entries = values["models"] if "models" in values else {values["model"]: values}
        entry = _chosen(entries, values.get("winners", {}), label, path)
        config = PruningConfig.from_dict(entry)
        run = None if entry["source"] is None else validated(ModelRun, entry["source"])
        # A mean over draws is of no one model.
        recorded = {"metrics": _metrics(entry) if entry.get("draws", 1) == 1 else None, "baseline": None}
        if entry.get("baseline") is not None:
            recorded["baseline"] = _metrics(entry["baseline"])
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{path} does not name a configuration that a search has found ({type(error).__name__}: {error}); give the "
            f"{BEST_CONFIG} that a search has written, or all of --model, --method, --seq-len and --num-samples"
        ) from error
    if run is None:
        raise UserError(
            f"{path} does not say which model was searched (it comes from a results file); give --model, --method "
            f"{config.method}, --seq-len {config.seq_len} and --num-samples {config.num_samples} instead"
        )
    trial = _trial_folder(path, entry.get("output_dir"))
    known = recorded | ({} if trial is None else _known(trial, run, config, path))
    moved = run
    if base is not None or revision is not None:
        at, _ = resolve.searched_model(run, base, revision)
        moved = replace(run, model=at.name, revision=at.revision)
    return PruneRequest(run=moved, config=config, source=run, artifact_dir=_artifacts(trial, path), **known)


def _chosen(
    entries: Mapping[str, Any], winners: Mapping[str, str], label: str | None, path: Location
) -> dict[str, Any]:
    """Return the entry of that label; without one that of the only model or, where that is there with and without training, of the
    better one (`winners`)."""
    known: tuple[Collection[str], ...] = (winners.values(), entries)
    for only in known:
        if label is None and len(only) == 1:
            (label,) = only
    if not entries:
        raise UserError(f"{path} names no configuration, as no trial is complete; run the search until one is")
    if label is None or label not in entries:
        what = f"--model {label} is not in {path}" if label else f"{path} holds {len(entries)} results"
        raise UserError(f"{what}; choose one with --model: {', '.join(entries)}")
    return entries[label]


def _trial_folder(path: Location, recorded: Any) -> Location | None:
    """Return the trial's folder, named relative to the file or absolutely; None where it is not there."""
    if not isinstance(recorded, str):
        return None
    folder = location(recorded) if "://" in recorded else path.parent / recorded
    exists = folder.is_dir() if isinstance(folder, Path) else open_store(folder).names()
    return folder.resolve() if exists else None


def _artifacts(trial: Location | None, path: Location) -> Location | None:
    experiment = trial.parents[1] if trial is not None else path.resolve().parent
    folder = experiment.parent / artifact_cache.FOLDER
    return None if isinstance(folder, Path) and not folder.is_dir() else folder


def _known(trial: Location, run: ModelRun, config: PruningConfig, path: Location) -> dict[str, Any]:
    """Return plan, fingerprint and measurements of the trial that the file `path` names, as far as its experiment has them. A
    damaged plan is as good as none."""
    known: dict[str, Any] = {}
    experiment = open_store(trial.parents[1])
    ledger = Ledger(experiment)
    record = ledger.read(trial.name)
    if record is not None and record.config != config:
        what = f"damaged: it names {config}, and {ledger.path(trial.name)} is of another configuration"
        raise DamagedFile(path, what, "delete it, then run the search again, which writes it anew")
    try:
        content = ledger.trial_file(trial.name, PLAN)
        if content is not None:
            plan = PruningPlan.from_dict(parse_json(trial / PLAN, content))
            removed = plan.removed_fraction
            if record is not None and removed != record.metrics.get("removed_fraction", removed):
                raise ValueError("it removes another part of the model than its trial did")
            known |= {"plan": plan, "plan_file": trial / PLAN}
    except ValueError as error:
        what = error.what if isinstance(error, DamagedFile) else f"no plan ({error})"
        log.warning("%s is %s; the plan is computed again", trial / PLAN, what)
    about = read_about(experiment) or {}
    identity = about.get("models", {}).get(run.label, {}).get("meaning", {})
    baseline = read_baselines(experiment).get(run.label)
    for file, one in ((ledger.path(trial.name), record), (experiment.path(BASELINES), baseline)):
        if one is not None and (other := stranger(one, about)):
            raise DamagedFile(file, other, "delete it, then search again")
    sizes = _certain_sizes(record, baseline, experiment.folder)
    searched = {
        "fingerprint": identity.get("model"),
        "metrics": None if record is None else record.metrics | wilson_errors(record.metrics, sizes),
        "baseline": None if baseline is None else baseline.metrics | wilson_errors(baseline.metrics, sizes),
        "measured_on": _same_data(run, identity.get("data"), "" if record is None else record.device_name),
    }
    return known | {name: value for name, value in searched.items() if value is not None}


def _certain_sizes(record: TrialRecord | None, baseline: TrialRecord | None, folder: Location) -> Mapping[str, float]:
    """Return the items of tasks that are all right or all wrong, whose standard errors are Wilson's in the final table, too."""
    from tune_prune.analysis.input.items import certain_sizes
    from tune_prune.analysis.input.rows import frame
    from tune_prune.analysis.input.study import Model

    if record is None:
        return {}
    try:
        return certain_sizes(Model("", frame([record], folder), baseline.metrics if baseline is not None else {}))
    except UserError as error:
        log.warning("%s; a task that is all right or all wrong has no standard error", error)
        return {}


def _same_data(run: ModelRun, recorded: str | None, device: str) -> MeasuredOn | None:
    """Return what the search measured on, part by part, by that device; None where its files are not there any more, or not the
    same."""
    try:
        return measured_on(run, device) if recorded is not None and data_fingerprint(run) == recorded else None
    except UserError:  # then the checkpoint is saved without, and `evaluate` says that it cannot compare
        return None


def _metrics(entry: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the measurements that an entry itself holds, named as in the ledger."""
    metrics = {
        name: entry[name] for name in ("ppl", "acc_mean", "acc_mean_stderr", "removed_fraction") if name in entry
    }
    for task, values in (entry.get("tasks") or {}).items():
        metrics |= {f"acc_{task}": values["acc"], f"acc_{task}_stderr": values["stderr"]}
    return {name: None if value is None else number(value) for name, value in metrics.items()}


def from_values(dense: DenseModel, values: Mapping[str, Any], align: int | None, gpus: int | None) -> PruneRequest:
    """Return the configuration that `values` name, by the names of HYPERPARAMETERS (None or absent: the default), of a model that
    is known without its weights; `align` and `gpus` are the numbers of shape aligned or uniform. Raises UserError."""
    method = load_method(values["method"])
    given = {name: plain(value) for name, value in values.items() if value is not None}
    missing = [name for name in method.hyperparameters if HYPERPARAMETERS[name].required and name not in given]
    if missing:
        examples = ", ".join(f"{name}={HYPERPARAMETERS[name].example}" for name in missing)
        raise UserError(
            f"{method.name} reads calibration samples: {' and '.join(missing)} must be given, e.g. {examples}"
        )
    if given.get("steps", 1) != 1 and "steps" not in method.reads:
        raise UserError(f"steps is {given['steps']}, but {method.name} {NO_STEPS}; leave it out")
    if given.get("removal_power", 1.0) != 1 and "removal_power" not in method.reads:
        what = f"removal_power is {given['removal_power']:g}, but {method.name} has no removal losses"
        raise UserError(f"{what}; leave it out, or use layerwise or blockwise")
    for name in unread(given) & given.keys():
        switch = RECIPE[RECIPE[name].of]
        raise UserError(
            f"{name} is {given[name]}, but nothing reads it; leave it out, or give {switch.name}={switch.example}"
        )
    full = {name: row.usual for name, row in HYPERPARAMETERS.items()} | {"shape": shapes.BY_SIZE} | given
    method.check_normalization(full["normalization"])
    (shape,) = resolve.aligned((full["shape"],), align, gpus)
    shape = shapes.resolve(shape, None, dense.geometry.total_params, dense.geometry.mixtures)
    method.check_shape(shape)
    method.check_experts(dense.geometry.mixtures, dense.run.label)
    config = PruningConfig(**full | {"shape": shape}).within(dense.run)
    method.check_whole_experts(config, dense.geometry.mixtures, dense.run.label)
    selection.target_params(dense.geometry, config.pruning_ratio, config.shape, config.layer_cap, config.whole_experts)
    about = dense.run.of(config), dense.source, dense.config, dense.tokenizer
    if method.statistics:
        checks.check_calibration(*about, (config.seq_len,), config.num_samples)
    for length, count in samples_needed(config, dense.config.max_position_embeddings):
        checks.check_calibration(*about, (length,), count)
    shared = Path("ray_results") / artifact_cache.FOLDER
    return PruneRequest(
        run=dense.run,
        config=config,
        source=dense.run,
        artifact_dir=shared.absolute() if shared.is_dir() else None,
    )
