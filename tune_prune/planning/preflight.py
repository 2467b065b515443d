"""Everything that can be known before a search starts: which trials, of which sizes, on which data, whether it fits.

Loads configs and tokenizers, never weights. Every check that can fail does so here, in one sentence, rather than an hour
into a search.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from tune_prune.checkpoint import origin
from tune_prune.core import artifact_cache
from tune_prune.core.config import EvaluationProtocol, ModelRun, trial_key
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger
from tune_prune.core.store import FolderStore
from tune_prune.cost_model.workload import memory_of, workload
from tune_prune.data import calibration, checks
from tune_prune.data.sources import data_fingerprint
from tune_prune.models import catalog, hub, loading, weight_files
from tune_prune.models.geometry import Geometry
from tune_prune.planning import experiment, plan_cost, search_space
from tune_prune.planning.plan import ModelPlan, Plan, SearchSettings
from tune_prune.planning.search_space import SearchSpace
from tune_prune.pruning import shapes
from tune_prune.pruning.methods import method_names
from tune_prune.pruning.selection import budget
from tune_prune.tuning.ray_cluster import address
from tune_prune.tuning.ray_cluster.resources import plan_resources, trial_slots


def make_plan(settings: SearchSettings) -> Plan:
    """Check everything and resolve what was left open. Raises UserError; creates nothing."""
    if settings.gpus_per_trial is not None and settings.gpus_per_trial > 1:
        raise UserError(
            f"--gpus-per-trial is {settings.gpus_per_trial:g}, but a trial runs on one GPU; use 1, a share 1/k such as 0.5, or auto"
        )
    space = search_space.load(settings.search_space, method_names())
    search = settings.search or space.search
    num_trials = _num_trials(settings, space, search)
    ratio, shape = _pruning_ratio(settings, space), _shape(settings, space)
    store = artifact_cache.ArtifactStore(Path(settings.storage_path).expanduser().absolute() / artifact_cache.FOLDER)
    with _cluster(settings):
        nodes, gpu_bytes = _nodes(settings)
        on_gpu = settings.gpus_per_trial != 0 and any(node.get("GPU", 0) > 0 for node in nodes)
        device = "cuda" if on_gpu else "cpu"
        models = tuple(_plan_model(settings, space, name, ratio, shape, device, store) for name in settings.models)
        trial_bytes = max(model.memory.total for model in models)
        resources = plan_resources(settings.cpus_per_trial, settings.gpus_per_trial, nodes, trial_bytes, gpu_bytes)
        slots = trial_slots(resources, nodes)
        if resources.gpus == 0 and settings.address is None:
            _check_memory(trial_bytes, slots, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        _check_distinct(models)
        shape = models[0].shape if len({model.shape for model in models}) == 1 else shape
        default_name = "-".join(
            [
                *("+".join(model.run.label for model in models), f"{ratio * 100:g}", space.name),
                *([] if shape == "free" else [shape]),
                *([f"limit{settings.limit}"] if settings.limit else []),
            ]
        )
        folder = experiment.experiment_dir(settings.storage_path, settings.name, default_name)
        results = FolderStore(folder)
        finished = {record.key for record in Ledger(results).records() if record.status != "failed"}
        experiment.check_same_identity(results, {model.run.label: model.identity() for model in models})
        plan = Plan(
            settings=settings,
            space=space,
            search=search,
            num_trials=num_trials,
            pruning_ratio=ratio,
            shape=shape,
            experiment_dir=folder,
            models=models,
            recorded=sum(key in finished for model in models for _, key in model.trials),
            resources=resources,
            slots=slots,
            cost=None,
        )
        return replace(plan, cost=plan_cost.cost_of(plan, finished, store))


def _check_distinct(models: tuple[ModelPlan, ...]) -> None:
    labels: dict[str, str] = {}
    trials: dict[str, str] = {}
    for model in models:
        run, key = model.run, model.trials[0][1]
        if run.label in labels:
            raise UserError(
                f"{labels[run.label]} and {run.model} would both be named {run.label!r} in the results; rename one of the folders, "
                "or search them one after the other"
            )
        if key in trials:
            raise UserError(f"{trials[key]} and {run.model} are the same model; name it with one --model only")
        labels[run.label] = trials[key] = run.model


def _num_trials(settings: SearchSettings, space: SearchSpace, search: str) -> int:
    if search == "grid":
        if settings.num_trials is not None:
            raise UserError(
                f"--num-trials {settings.num_trials} is for --search optuna, but a grid runs all {space.size} configurations; "
                "leave it out or use --search optuna"
            )
        return space.size
    wanted = settings.num_trials or space.num_trials or min(20, space.size)
    if wanted > space.size:
        raise UserError(
            f"--num-trials is {wanted}, but search space {space.name} has only {space.size} configurations; ask for at most "
            f"{space.size}, or leave it out and use --search grid"
        )
    return wanted


def _pruning_ratio(settings: SearchSettings, space: SearchSpace) -> float:
    asked, fixed = settings.pruning_ratio, space.pruning_ratio
    if asked is not None and fixed is not None and asked != fixed:
        raise UserError(f"--pruning-ratio is {asked}, but {space.path} says {fixed}; leave one of them out")
    ratio = asked if asked is not None else fixed if fixed is not None else 0.2
    if not 0 < ratio < 1:
        raise UserError(f"--pruning-ratio is {ratio}; it must lie between 0 and 1, e.g. 0.2 for 20% smaller")
    return ratio


def _shape(settings: SearchSettings, space: SearchSpace) -> str:
    """The shape asked for; "aligned" without a number where each model gets the N that suits it."""
    shape = settings.shape or space.shape or "free"
    if settings.align is None:
        return shape
    if not shape.startswith("aligned"):
        raise UserError(
            f"--align {settings.align} is for --shape aligned, but the shape is {shape}; leave it out or add --shape aligned"
        )
    return shapes.resolve("aligned", settings.align, 0)


def _plan_model(
    settings: SearchSettings,
    space: SearchSpace,
    name: str,
    ratio: float,
    shape: str,
    device: str,
    store: artifact_cache.ArtifactStore,
) -> ModelPlan:
    dtype = settings.dtype or ("bfloat16" if device == "cuda" else "float32")
    try:
        source = catalog.resolve(name, settings.revision)
        run = model_run(settings, name, source, dtype)
        config = loading.load_config(source)
        origin.require_dense(source, config)
        _, geometry = loading.config_geometry(config)
        shape = shapes.resolve(shape, None, geometry.total_params)
        target = _target_params(geometry, ratio, shape)
        checks.check_data(run)
        tokenizer = loading.load_tokenizer(source)
        checks.check_calibration(run, source, config, tokenizer, space.seq_len, max(space.num_samples))
        if source.kind != "hub":
            weight_files.check(Path(source.location), loading.meta_model(config))
    except UserError as error:
        if len(settings.models) == 1:
            raise
        raise UserError(f"--model {name}: {error}") from error
    commit = hub.commit(source.location, source.revision) if source.kind == "hub" else None
    if commit:  # workers load what was planned, whatever the branch says by then
        run = replace(run, revision=commit)
    fingerprints = loading.fingerprint(source, config), data_fingerprint(run)
    configs = space.configs(ratio, shape)
    work = workload(run, config, tokenizer, store, fingerprints[0])
    return ModelPlan(
        run=run,
        geometry=geometry,
        model_fingerprint=fingerprints[0],
        data_fingerprint=fingerprints[1],
        target_params=target,
        trials=tuple((config, trial_key(config, *fingerprints, run)) for config in configs),
        workload=work,
        memory=memory_of(work, geometry, configs, target, getattr(torch, run.dtype).itemsize, device),
    )


def model_run(settings: SearchSettings, name: str, source: catalog.ModelSource, dtype: str) -> ModelRun:
    """What all trials of the model share. Raises UserError for flags that do not fit together."""
    if settings.revision is not None and source.kind != "hub":
        raise UserError(
            f"--revision {settings.revision} is for models of the hub, but {name} is {'an' if source.kind == 'embedded' else 'a'} "
            f"{source.kind} model; leave it out"
        )
    data_dir = checks.data_dir(settings.data_dir)
    protocol = EvaluationProtocol(limit=settings.limit, seed=settings.seed)
    if settings.tasks is not None:
        protocol = replace(protocol, tasks=settings.tasks)
    return ModelRun(
        model=source.location if source.kind == "folder" else name,
        label=source.label,
        revision=settings.revision,
        calibration=calibration.resolve(settings.calibration, data_dir, source.kind == "embedded"),
        data_dir=data_dir,
        protocol=protocol,
        seed=settings.seed,
        dtype=dtype,
    )


def _target_params(geometry: Geometry, ratio: float, shape: str) -> int:
    """Parameters to remove, at least the smallest part that the shape lets one remove, such as an MLP channel."""
    target, bounds = budget(geometry, ratio, shape), shapes.removal_bounds(geometry, shape)
    smallest = bounds.smallest
    if target < smallest:
        least = math.ceil(1e6 * smallest / geometry.total_params) / 1e6
        raise UserError(
            f"--pruning-ratio {ratio:g} asks for {target:,} of {geometry.total_params:,} parameters, less than the smallest part "
            f"that can be removed ({bounds.smallest_part}, {smallest:,}); ask for at least {least:g}"
        )
    return target


def _check_memory(trial_bytes: int, slots: int, machine_bytes: int) -> None:
    """Raise UserError where `slots` trials on CPUs do not fit into this machine's memory together."""
    need, have = f"{trial_bytes / 2**30:.1f} GiB", f"{machine_bytes / 2**30:.1f} GiB"
    if trial_bytes > machine_bytes:
        raise UserError(
            f"a trial needs about {need} of memory and this machine has {have}; use a machine with a larger GPU or more memory, "
            "or a smaller model"
        )
    if slots * trial_bytes > machine_bytes:
        fits = machine_bytes // trial_bytes
        raise UserError(
            f"{slots} trials at once need about {need} each and this machine has {have}; let at most {fits} run at once: "
            f"--cpus-per-trial {math.ceil((os.cpu_count() or 1) / fits)}"
        )


@contextlib.contextmanager
def _cluster(settings: SearchSettings) -> Iterator[None]:
    """Connected to the cluster at --address, if one is named."""
    if settings.address is None:
        yield
        return
    from tune_prune.tuning.ray_cluster import cluster  # imports ray: not needed to plan a search on this machine

    address.check(settings.address)
    with cluster.connected(settings.address):
        yield


def _nodes(settings: SearchSettings) -> tuple[list[dict[str, float]], int | None]:
    """CPUs and GPUs of each node, of this machine or of the connected cluster (which is asked), and the memory of the
    smallest GPU."""
    if settings.address is not None:
        from tune_prune.tuning.ray_cluster import cluster

        return cluster.node_resources(), cluster.smallest_gpu_bytes() if settings.gpus_per_trial is None else None
    gpus = range(torch.cuda.device_count())
    gpu_bytes = min((torch.cuda.get_device_properties(i).total_memory for i in gpus), default=None)
    return [{"CPU": os.cpu_count() or 1, "GPU": len(gpus)}], gpu_bytes
