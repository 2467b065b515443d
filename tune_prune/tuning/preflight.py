"""Everything that can be known before a search starts: which trials, of which sizes, on which data, whether it fits.

Loads configs and tokenizers, never weights. Every check that can fail does so here, in one sentence, rather than an hour
into a search. The road: resolve (what is asked for) -> each model (checks, trials, memory) -> the machine (resources) -> the
experiment (may it go on) -> plan_cost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from tune_prune.core import artifact_cache, machine
from tune_prune.core.config import ModelRun, PruningConfig, trial_key
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.ledger import Experiment
from tune_prune.core.store import Location, location, open_store
from tune_prune.data import calibration, checks
from tune_prune.data.sources import data_fingerprint
from tune_prune.models import hub, loading, weight_files
from tune_prune.models.catalog import ModelSource
from tune_prune.models.geometry import Geometry
from tune_prune.models.runner import devices
from tune_prune.models.runner.residency import to_bring_layers
from tune_prune.pruning import shapes
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.selection import target_params
from tune_prune.trial.steps import samples_needed
from tune_prune.tuning import address, experiment, gpus, memory_bounds, plan_cost, resolve, set_up_ray
from tune_prune.tuning.cost import workload
from tune_prune.tuning.gpus import Card, Gpu, visible_gpus
from tune_prune.tuning.memory import INLINE_BYTES, advising, memory_of
from tune_prune.tuning.plan import ModelPlan, Plan, SearchSettings, shapes_of
from tune_prune.tuning.resources import (
    MAX_AUTO_CPUS,
    MAX_TRIALS_PER_GPU,
    Node,
    plan_resources,
    usable_bytes,
)
from tune_prune.tuning.space import SearchSpace
from tune_prune.tuning.work import TrialSpec


def make_plan(settings: SearchSettings, card: Card | None = None) -> Plan:
    """Check everything, and resolve what was left open. Creates nothing. Raises UserError.

    `card`: GPUs to plan for in the place of what is here, in a machine that has no records, and memory and room on its disk for all
    that waits there.
    """
    _check_machine(settings, card)
    space = resolve.space(settings)
    storage = location(settings.storage_path).expanduser().absolute()
    try:
        str(storage).encode()  # as in the records, which are written when trials have ended
    except UnicodeEncodeError as error:
        raise UserError(
            f"the results would be in {str(storage)!r}, which is not UTF-8; name another --storage-path"
        ) from error
    experiment.check_writable(storage / artifact_cache.FOLDER)
    store = artifact_cache.ArtifactStore(storage / artifact_cache.FOLDER)
    with _cluster(settings):
        told = _survey(settings)
        nodes, gpus = _of_card(settings, card) if card else _nodes(settings, told)
        on_gpu = settings.gpus_per_trial != 0 and any(node.get("GPU", 0) > 0 for node in nodes)
        device = "cuda" if on_gpu else "cpu"
        gains = [one.bfloat16 for one in (gpus if on_gpu else [node for node in told if node.runs_trials])]
        fast = partial(all, gains) if on_gpu or told else partial(devices.fast_at_bfloat16, device)
        # The run's text is the one of the flag or, where only the space names some, the first of those.
        asked = replace(settings, calibration=settings.calibration or space.values["calibration"][0])
        models = tuple(_plan_model(asked, space, name, device, fast, store, card) for name in settings.models)
        _check_distinct(models)
        folder = experiment.experiment_dir(storage, settings.name, _default_name(settings, space, models))
        held = Experiment(open_store(folder)) if card else Experiment.read(open_store(folder))
        plan = Plan(settings, space, folder, models, held, nodes=told, card=card)
        experiment.check(held, plan.identities, plan.objective, space.values["method"])
        plan = replace(plan, left=sum(plan_cost.left(plan, model, held.finished.keys())[1] for model in models))
        if plan.left:
            experiment.warn_of_other_versions(held)
        plan = _with_resources(plan, nodes, gpus, on_gpu)
        if told:
            _check_reach(told, folder.parent, models)
        return replace(plan, cost=plan_cost.cost_of(plan, held.finished.keys(), store))


def _with_resources(plan: Plan, nodes: Sequence[Mapping[str, float]], gpus: Sequence[Gpu], on_gpu: bool) -> Plan:
    """Return the plan with what a trial takes of these nodes and GPUs, and how it holds its model. Raises UserError where it does
    not fit."""
    settings, told, card = plan.settings, plan.nodes, plan.card
    work = plan_cost.at_once(plan, plan.held.finished.keys())
    # Inline, the trial of the moment has a GPU to itself, or several.
    share = max(1.0, settings.gpus_per_trial or 1.0) if settings.inline and on_gpu else settings.gpus_per_trial
    fullest = min((gpu.memory for gpu in gpus), key=usable_bytes, default=None)
    bounds = memory_bounds.bounds(settings, nodes, told, share, fullest, work, here=card is None)
    with advising(next((model.other_step for model in plan.models if model.other_step), "")):
        models = tuple(replace(model, memory=memory_bounds.choose(settings, model, bounds)) for model in plan.models)
        trial_bytes = max(model.memory.total for model in models)
        waiting = [(model.memory.way.states, model.memory.away) for model in models if model.memory.away]
        most = min(
            (bounds[0][place] // away for place, away in waiting if place in bounds[0]),
            default=1 if waiting else MAX_TRIALS_PER_GPU,
        )
        resources = plan_resources(settings.cpus_per_trial, share, nodes, trial_bytes, fullest, most)
        slots = memory_bounds.slots(settings, resources, nodes, work)
        gpu_ways = memory_bounds.ways_of_kinds(settings, models, nodes, told, resources, gpus, work)
        if resources.gpus == 0:
            memory_bounds.check(trial_bytes, slots, told, resources)
    lacking = dict.fromkeys(gpu.name for gpu in gpus if not gpu.bfloat16)
    return replace(
        plan,
        models=models,
        resources=resources,
        slots=slots,
        gpu_names=tuple(dict.fromkeys(gpu.name for gpu in gpus)) if resources.gpus else (),
        gpu_ways=gpu_ways,
        gpu_free={name: memory.available for name, memory in memory_bounds.kinds_of(gpus).items()},
        without_bfloat16=tuple(lacking) if any(gpu.bfloat16 for gpu in gpus) else (),
    )


def _check_machine(settings: SearchSettings, card: Card | None) -> None:
    """Raise UserError where --inline comes with what only Ray can do, and --gpu with what says otherwise where trials run."""
    asked, on_cluster = settings.gpus_per_trial, settings.address is not None
    one_of = "leave one of them out"
    for wrong, sentence in (
        (settings.inline and on_cluster, f"--inline runs in this process and --address on a cluster; {one_of}"),
        (
            settings.inline and asked and asked < 1,
            f"--gpus-per-trial is {asked}, but --inline runs one trial at a time, which has the whole GPU; use 1, or leave it out",
        ),
        (
            settings.inline and settings.trial_timeout_s,
            f"--trial-timeout ends the worker of a trial, and --inline has none but this process; {one_of}",
        ),
        (card and on_cluster, f"--gpu is for a machine that is not here, and --address for a cluster; {one_of}"),
        (card and asked == 0, f"--gpu is a GPU to plan for, and --gpus-per-trial 0 runs trials on CPUs; {one_of}"),
        (
            card and asked and asked > card.count,
            f"--gpus-per-trial is {asked or 0:g}, but --gpu is {card}; name as many, e.g. --gpu 2x4090 for two, or use fewer",
        ),
    ):
        if wrong:
            raise UserError(sentence)


def _default_name(settings: SearchSettings, space: SearchSpace, models: tuple[ModelPlan, ...]) -> str:
    """Return the name of an experiment without --name: models, percentages, search space; shapes, limit, tokens."""
    shapes = shapes_of(space, models)
    parts = [
        "+".join(model.run.label for model in models),
        "+".join(f"{100 * ratio:g}" for ratio in space.values["pruning_ratio"]),
        space.name,
        *(["+".join(shapes)] if shapes != ("free",) else []),
        *([f"limit{settings.limit}"] if settings.limit else []),
        *([f"tokens{settings.perplexity_tokens}"] if settings.perplexity_tokens else []),
    ]
    return "-".join(parts)


def _check_distinct(models: tuple[ModelPlan, ...]) -> None:
    labels: dict[str, str] = {}
    trials: dict[str, str] = {}
    for model in models:
        run, key = model.run, model.trials[0].key
        if run.label in labels:
            raise UserError(
                f"{labels[run.label]} and {run.model} would both be named {run.label!r} in the results; rename one of the folders, "
                "or search them one after the other"
            )
        if key in trials:
            raise UserError(f"{trials[key]} and {run.model} are the same model; name it with one --model only")
        labels[run.label] = trials[key] = run.model


def _plan_model(
    settings: SearchSettings,
    space: SearchSpace,
    name: str,
    device: str,
    fast: Callable[[], bool],
    store: artifact_cache.ArtifactStore,
    card: Card | None,
) -> ModelPlan:
    try:
        model = resolve.dense_model(settings, name, fast)
        source, run, config, geometry = model.source, model.run, model.config, model.geometry
        configs = _configs(space, geometry, run, source)
        sizes = dict.fromkeys((one.pruning_ratio, one.shape, one.layer_cap, one.whole_experts) for one in configs)
        targets = {
            ratio: target_params(geometry, ratio, shape, cap, whole_experts)
            for ratio, shape, cap, whole_experts in sizes
        }
        checks.check_data(run)
        by_right_choices = {
            "--scheduler race-gold": settings.scheduler == "race-gold",
            "--objective gold_logprob": settings.objective == "gold_logprob",
            "--draws-by gold_logprob": settings.draws is not None and settings.draws_by == "gold_logprob",
            "--kl-filter": settings.kl_filter,
        }
        for flag in (flag for flag, given in by_right_choices.items() if given):
            checks.check_right_choices(run, flag)
        seq_lens = dict.fromkeys(config.seq_len for config in configs)
        most = max(config.num_samples for config in configs)
        texts = dict.fromkeys([run.calibration, *(run.of(config).calibration for config in configs)])
        for text in texts:
            used = replace(run, calibration=text)
            checks.check_calibration(used, source, config, model.tokenizer, seq_lens, most)
            positions = config.max_position_embeddings
            for length, count in sorted({needed for one in configs for needed in samples_needed(one, positions)}):
                checks.check_calibration(used, source, config, model.tokenizer, (length,), count)
        # A plan for a GPU that is not here asks for no weights either.
        loading.check_weights(source, config, needed=card is None)
        for text in texts:
            checks.check_cached(replace(run, calibration=text))
    except UserError as error:
        if len(settings.models) == 1:
            raise
        raise UserError(f"--model {name}: {error}") from error
    commit = hub.commit(source.location, source.revision) if source.kind == "hub" else None
    if commit:  # workers load what was planned, whatever the branch says by then
        run = replace(run, revision=commit)
    model_fingerprint = loading.model_fingerprint(source, config)
    data = {text: data_fingerprint(replace(run, calibration=text)) for text in texts}
    if len(set(data.values())) < len(data):
        raise UserError(f"calibration lists {', '.join(data)}, of which two have the same content; keep one of them")
    work = workload(run, config, model.tokenizer, store, model_fingerprint)
    itemsize = getattr(torch, run.dtype).itemsize
    # Of weights that are not here it is not known, and hardly any model has pickled ones alone.
    folder = Path(source.location)
    from_files = source.kind == "hub" or bool(weight_files.files(folder)) or not weight_files.pickled_files(folder)
    gpus = max(1, int(settings.gpus_per_trial or 1))

    planned = memory_of(work, geometry, configs, min(targets.values()), itemsize, device, from_files, gpus)
    more = INLINE_BYTES[device] if settings.inline else 0
    ways = tuple(replace(plan, process=plan.process + more) for plan in planned)
    return ModelPlan(
        run=run,
        geometry=geometry,
        model_fingerprint=model_fingerprint,
        data_fingerprint=data[run.calibration],
        texts={text: fingerprint for text, fingerprint in data.items() if text != run.calibration},
        targets=targets,
        trials=tuple(
            TrialSpec(run, one, trial_key(one, model_fingerprint, data[run.of(one).calibration], run))
            for one in configs
        ),
        workload=work,
        ways=ways,
        memory=ways[0],
        other_step=to_bring_layers(from_files, gpus),
        gguf=source.gguf,
        found_as=source.found_as,
        stored_as=loading.stored_as(source, config),
    )


def _configs(space: SearchSpace, geometry: Geometry, run: ModelRun, source: ModelSource) -> tuple[PruningConfig, ...]:
    """Return the configurations of a model; "aligned" gets the N that suits its size."""
    named = {
        shape: shapes.resolve(shape, None, geometry.total_params, geometry.mixtures) for shape in space.values["shape"]
    }
    if len(set(named.values())) < len(named):
        raise UserError(
            f"shape lists {', '.join(named)}, of which two are the same here ({', '.join(named.values())}); keep one of them"
        )
    for method, shape in product(map(load_method, space.values["method"]), named.values()):
        method.check_shape(shape)
        method.check_experts(geometry.mixtures, run.label)
    embedded, kind = source.kind == "embedded", HYPERPARAMETERS["calibration"].kind
    texts = {
        name: name if name is None else calibration.resolve(name, run.data_dir, embedded)
        for name in space.values["calibration"]
    }
    if len({text and kind.short(text) for text in texts.values()}) < len(texts):
        raise UserError(
            f"calibration lists {', '.join(texts)}, of which two are the same text or have the same name; keep one of them, or "
            "rename a file"
        )
    values = {"shape": tuple(named.values()), "calibration": tuple(texts.values())}
    configs = replace(space, values=space.values | values).configs()
    for config in configs:
        load_method(config.method).check_whole_experts(config, geometry.mixtures, run.label)
    return tuple(config.within(run) for config in configs)


@contextlib.contextmanager
def _cluster(settings: SearchSettings) -> Iterator[None]:
    """Be connected to the cluster at --address within, if one is named."""
    if settings.address is None:
        yield
        return
    address.check(settings.address)
    set_up_ray(settings.address)
    from tune_prune.tuning import ray  # imports ray: not needed to plan a search on this machine

    with ray.connected(settings.address):
        yield


def _survey(settings: SearchSettings) -> tuple[Node, ...]:
    """Return what each node of the connected cluster tells; nothing without a cluster."""
    if settings.address is None:
        return ()
    from tune_prune.tuning import nodes

    return tuple(nodes.survey(use_gpus=settings.gpus_per_trial != 0))


def _check_reach(told: Sequence[Node], folder: Location, models: Sequence[ModelPlan]) -> None:
    """Raise UserError for nodes that do not share `folder`, or lack a model or its data."""
    from tune_prune.tuning import nodes

    data = [
        (replace(model.run, calibration=text), model.model_fingerprint, fingerprint)
        for model in models
        for text, fingerprint in {model.run.calibration: model.data_fingerprint, **model.texts}.items()
    ]
    nodes.check_reach(told, folder, data)


def _of_card(settings: SearchSettings, card: Card) -> tuple[list[Mapping[str, float]], list[Gpu]]:
    """Return the nodes and GPUs of a machine with those GPUs, and with CPUs for all trials that they hold."""
    cpus = max(MAX_AUTO_CPUS, settings.cpus_per_trial or 0)
    gpu = Gpu(card.name, machine.Memory(card.memory, card.memory), card.bfloat16)
    return [{"CPU": card.count * MAX_TRIALS_PER_GPU * cpus, "GPU": card.count}], [gpu]


def _nodes(settings: SearchSettings, told: Sequence[Node]) -> tuple[list[Mapping[str, float]], list[Gpu]]:
    """Return CPUs and GPUs of each node, of this machine or of the connected cluster, and which GPUs those are, if they are used.

    Raises UserError for a GPU of this machine that torch has no kernels for; of a cluster the survey does."""
    if told:
        return [node.resources for node in told], [gpu for node in told for gpu in node.gpus]
    count = torch.cuda.device_count()
    visible = gpus.call(visible_gpus) if count and settings.gpus_per_trial != 0 else []
    if problem := next((gpu.problem for gpu in visible if gpu.problem), None):
        raise UserError(f"{problem}: {devices.NO_KERNELS_STEP} (--gpus-per-trial 0)")
    return [{"CPU": machine.cpus(), "GPU": count}], visible
