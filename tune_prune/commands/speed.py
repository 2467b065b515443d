"""The speed of pruned models beside their dense model: `tune-prune speed --config ray_results/NAME`.

Prefill and decode of a checkpoint, or of the configurations of a search that any rule of the analysis would choose, each in turns
with the dense model. A search's are kept in its folder, apart from its trials: speed is of the machine. The analysis then shows
them beside accuracy and size. Only the plan counts: a refit or a training changes no shape, so neither is made for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tune_prune.commands import flags
from tune_prune.core import terminal
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.files import DamagedFile, parse_json, to_json
from tune_prune.core.store import PLAN, SPEED, TRIALS, Location, Store, location, open_store
from tune_prune.core.terminal import say

if TYPE_CHECKING:
    from tune_prune.analysis.statistics.findings import Findings, ModelFindings
    from tune_prune.checkpoint.generation_speed import GenerationSpeed
    from tune_prune.checkpoint.layers import Sizes
    from tune_prune.checkpoint.manifest import Manifest
    from tune_prune.core.config import ModelRun
    from tune_prune.models.catalog import ModelSource
    from tune_prune.models.loading import LoadedModel
    from tune_prune.pruning.groups import PruningPlan

BATCH = 1  # of what a person waits for; throughput of large batches is another question


def main(argv: list[str] | None = None) -> int:
    return flags.run("speed", argv, _main)


@terminal.shown()
def _main(args: argparse.Namespace) -> None:
    if args.config is None and args.model is None:
        raise UserError("--config or --model is missing; name an experiment, or a pruned checkpoint")
    if args.engine != "transformers":
        _check_engine(args)
    if args.config is None:
        _of_checkpoint(args)
    else:
        _of_search(args)


def _check_engine(args: argparse.Namespace) -> None:
    """Raise UserError for flags that say nothing to another engine than transformers."""
    if args.config is not None:
        raise UserError(
            f"--engine {args.engine} measures saved models, and --config names a search; save one with tune-prune prune, then "
            "name it with --model"
        )
    if args.device != "auto":
        raise UserError(f"--device is for transformers: {args.engine} runs where it was built for; leave it out")
    if args.engine == "llama.cpp" and args.dtype is not None:
        raise UserError("--dtype is not for llama.cpp, which computes in what a GGUF file holds; leave it out")


def _of_checkpoint(args: argparse.Namespace) -> None:
    """Measure a pruned checkpoint beside its dense model; any other model alone."""
    output = None if args.output is None else flags.record_file(args.output, "prefill_tokens_per_s", "a speed")
    if args.engine != "llama.cpp":  # whose files need not be models of transformers
        flags.check_names([args.model], None, None, None)
    flags.limit_threads()

    from tune_prune.checkpoint import generation_speed, layers

    speeds, rows, engine = measured(args)
    if len(speeds) > 1:
        say(f"{generation_speed.verdict_of(speeds)}\n")
    if rows:
        say(f"{layers.size_table(rows)}\n")
    say(f"{generation_speed.speed_table(speeds)}, {engine}")
    if note := generation_speed.kinds_note(speeds):
        say(f"note         {note}")
    if output is not None:
        first = speeds[next(reversed(speeds))]
        sizes = {name: asdict(row) for name, row in rows.items()}
        content = {name: asdict(one) | sizes.get(name, {}) for name, one in speeds.items()}
        about = {"prefill_tokens_per_s": first.prefill_tokens_per_s, "conditions": generation_speed.conditions(first)}
        open_store(output.parent).put(output.name, to_json(about | {"engine": engine, "models": content}))
        say(f"\nrecord       {output}")


Measured = tuple[
    "dict[str, GenerationSpeed]", "dict[str, Sizes]", str
]  # both by model, and the engine with its version


def measured(args: argparse.Namespace) -> Measured:
    """Measure --model beside its original, in turns, in the engine that the line names. Raises UserError."""
    return {"transformers": _in_transformers, "vllm": _in_vllm, "llama.cpp": _in_llama}[args.engine](args)


def _in_transformers(args: argparse.Namespace) -> Measured:
    import transformers

    from tune_prune.checkpoint import generation_speed, layers
    from tune_prune.commands import api
    from tune_prune.models.loading import load_model

    opened = api.open(args.model, revision=args.revision, dtype=args.dtype, device=args.device, base=args.base)
    loaded = opened.loaded()
    models = {opened.label: loaded.model}
    if opened.manifest is not None or args.base is not None:
        dense = load_model(opened.base, loaded.model.dtype, opened.device)
        models = {"dense": dense.model, "pruned": loaded.model}
    if opened.manifest is not None and opened.manifest.quantization is not None:
        kind = opened.manifest.quantization
        say(
            f"note         measured with its weights dequantised from {kind}: as fast and as large as before quantisation"
        )
    speeds = generation_speed.measure(models, args.prompt_tokens, args.new_tokens, BATCH, args.repeats)
    rows = {name: layers.sizes(model, loaded.family, loaded.geometry.around_params) for name, model in models.items()}
    return speeds, rows, f"transformers {transformers.__version__}"


def _in_vllm(args: argparse.Namespace) -> Measured:
    from tune_prune.checkpoint import engine_speed, generation_speed
    from tune_prune.commands import api
    from tune_prune.models import catalog
    from tune_prune.models.loading import load_config
    from tune_prune.tuning import orphans

    engine_speed.program("vllm")
    opened = api.open(args.model, revision=args.revision, dtype=args.dtype, base=args.base)
    models = {opened.label: catalog.resolve(args.model, args.revision)}
    if opened.manifest is not None or args.base is not None:
        models = {"dense": opened.base, "pruned": models[opened.label]}
    configs = [load_config(source) for source in models.values()]
    # The first token comes of the prompt, so the last of one more is the last that takes a step.
    prompt_tokens, answer = generation_speed.lengths(configs, args.prompt_tokens, 1 + args.new_tokens)
    asked, about = (prompt_tokens, answer - 1, args.repeats), opened.manifest
    shape = "free" if about is None else about.config.shape
    with orphans.temporary_folder() as folder:
        speeds, engine = engine_speed.measure("vllm", models, *asked, folder, opened.run.dtype, shape)
    if about is not None and about.quantization is not None:
        speeds["pruned"] = replace(speeds["pruned"], dtype=about.quantization)
    return speeds, _recorded_sizes(about), engine


def _in_llama(args: argparse.Namespace) -> Measured:
    from tune_prune.checkpoint import engine_speed, manifest
    from tune_prune.models import catalog
    from tune_prune.tuning import orphans

    engine_speed.program("llama.cpp")
    folder = Path(args.model).expanduser()
    about = manifest.read(folder if folder.is_dir() else folder.parent)
    if folder.is_dir() and about is not None and about.format == "gguf":
        folder /= next(iter(about.files))
    source = catalog.resolve(str(folder) if folder.exists() else args.model)
    if source.file is None:
        raise UserError(
            f"--engine llama.cpp measures GGUF files, and {args.model} is none; save one with tune-prune prune --format gguf"
        )
    about = about if about is not None and source.file.name in about.files else None
    models = {source.label: source}
    if about is not None or args.base is not None:
        models = {"dense": _gguf_base(args.base, about), "pruned": source}
    asked = (args.prompt_tokens, args.new_tokens, args.repeats)
    with orphans.temporary_folder() as folder:
        speeds, engine = engine_speed.measure("llama.cpp", models, *asked, folder)
    return speeds, _recorded_sizes(about), engine


def _gguf_base(asked: str | None, about: Manifest | None) -> ModelSource:
    """Return the GGUF file of the original, which --base names or which was pruned. Raises UserError where there is none."""
    from tune_prune.models import catalog
    from tune_prune.models.gguf import packages
    from tune_prune.models.gguf.files import SUFFIX

    name = asked or (about.base_name if about is not None else "")
    if asked is not None or name.endswith(SUFFIX) or packages.of(name) is not None:
        source = catalog.resolve(name)
        if source.file is not None:
            return source
    raise UserError(
        f"--engine llama.cpp measures GGUF files, and the original {name} is none; make one with llama.cpp's "
        "convert_hf_to_gguf.py, then name it: --base FILE.gguf"
    )


def _recorded_sizes(about: Manifest | None) -> dict[str, Sizes]:
    return {} if about is None else {"dense": about.sizes["dense"], "pruned": about.saved_sizes}


def _of_search(args: argparse.Namespace) -> None:
    if args.output is not None:
        raise UserError("--output is for --model alone: the speeds of a search are kept in its folder; leave it out")
    from tune_prune.analysis.input.reading import read_study
    from tune_prune.analysis.statistics.findings import find
    from tune_prune.commands.analysis import why_nothing

    study = read_study([location(args.config).expanduser()], [])
    findings = find(study)
    if not findings.models:
        raise UserError(why_nothing(study))
    if args.model is not None and args.model not in findings.models:
        raise UserError(f"--model {args.model} is not in {args.config}; {did_you_mean(args.model, findings.models)}")
    chosen = {label: of_model for label, of_model in findings.models.items() if args.model in (None, label)}
    runs = {label: _run_of(of_model, args.config) for label, of_model in chosen.items()}
    if args.base is not None and len({run.label for run in runs.values()}) > 1:
        raise UserError(f"--base {args.base} is one model, and {args.config} has several; choose one with --model")
    flags.limit_threads()
    opened: dict[str, LoadedModel] = {}  # the last dense model, by its label in the search
    measured, folders = 0, dict[str, None]()
    for label, of_model in chosen.items():
        run = runs[label]
        if run.label not in opened:
            opened.clear()
            opened[run.label] = _dense(args, run, _fingerprint(findings, of_model, run))
        # What any rule chooses, or all, the most accurate first; of several draws the first stands for all.
        names = {name for names in of_model.chosen.values() for name in names}
        rows = of_model.eligible if args.all else of_model.eligible[of_model.eligible["name"].isin(names)]
        trials = {row["name"]: location(row["output_dir"]) for _, row in rows.iterrows()}
        measured += _measure(args, label, opened[run.label], trials)
        folders |= {str(open_store(trial.parent.parent).path(SPEED)): None for trial in trials.values()}
    say(f"\nmeasured     {measured} of them now; all are kept in {', '.join(folders)}")
    say(f"report       tune-prune analysis {args.config}")


def _run_of(findings: ModelFindings, asked: str) -> ModelRun:
    from tune_prune.core.config import ModelRun
    from tune_prune.core.validation import validated

    if findings.model.source is None or findings.model.kind == "published":
        raise UserError(
            f"{asked} does not say which model {findings.model.label} is, as it is no experiment or has lost its experiment.json; "
            "name the folder of a search"
        )
    return validated(ModelRun, findings.model.source)


def _fingerprint(findings: Findings, model_findings: ModelFindings, run: ModelRun) -> str | None:
    """Return the fingerprint of the model that was searched; None where experiment.json does not tell."""
    for folder in model_findings.model.origins:
        entry = findings.study.experiments.get(folder, {}).get("models", {}).get(run.label, {})
        if fingerprint := entry.get("meaning", {}).get("model"):
            return str(fingerprint)
    return None


def _dense(args: argparse.Namespace, run: ModelRun, fingerprint: str | None) -> LoadedModel:
    """Load the dense model of a search. Raises UserError."""
    import torch

    from tune_prune.models import loading
    from tune_prune.models.runner.out_of_memory import first_that_fits
    from tune_prune.models.runner.residency import RESIDENT
    from tune_prune.tuning.resolve import searched_model

    source, config = searched_model(run, args.base, args.revision)
    if fingerprint is not None and fingerprint != loading.model_fingerprint(source, config):
        raise UserError(
            f"{source.location} is not the model that was searched (the contents of its files differ); name that one with --base"
        )
    device, dtype = loading.pick_device(args.device), getattr(torch, args.dtype or run.dtype)
    what = f"{run.label}, whose speed is that of a whole model,"
    return first_that_fits(
        what, [RESIDENT], lambda way: loading.load_model(source, dtype, device, way), torch.device(device)
    )


def _measure(args: argparse.Namespace, label: str, dense: LoadedModel, trials: Mapping[str, Location]) -> int:
    """Measure each of these `trials`, folders by configuration, that was not yet, and keep it before the next; return how many."""
    from tune_prune.checkpoint.generation_speed import spread, verdict
    from tune_prune.commands.opened import measure_speed, speed_conditions
    from tune_prune.core import speed_records

    conditions = speed_conditions(dense, args.prompt_tokens, args.new_tokens, BATCH, args.repeats)
    count = f"{len(trials)} configuration{'s' * (len(trials) != 1)} beside the original"
    lengths = f"prompt of {conditions.prompt_tokens:,} tokens, {conditions.new_tokens:,} new tokens, batch size {BATCH}"
    say(f"{label}: {count}, {lengths}, {conditions.dtype} on {conditions.device}")
    measured = 0
    for index, (name, folder) in enumerate(trials.items()):
        store, key = open_store(folder.parent.parent), folder.name
        record = None if args.overwrite else speed_records.read_speed(store, speed_records.speed_name(key, conditions))
        before = "" if record is None else "  (measured before)"
        if record is None:
            record = measure_speed(dense, _plan(store, key, name), key, conditions)
            speed_records.write_speed(store, record)
            measured += 1
        if index == 0:
            say(f"speed        {verdict(record.prefill, record.decode)}: {name}, the most accurate")
        parts = {"prefill": record.prefill, "decode": record.decode}
        shown = "  ".join(f"{part} {ratio.value:.2f}x {spread(ratio)}" for part, ratio in parts.items())
        say(f"  {name:<{max(map(len, trials))}}  {shown}{before}")
    return measured


def _plan(store: Store, key: str, name: str) -> PruningPlan:
    """Read what the trial has kept of the model. Raises UserError where that is not there any more."""
    from tune_prune.core.ledger import Ledger
    from tune_prune.pruning.groups import PruningPlan

    file = f"{TRIALS}/{key}/{PLAN}"
    content = Ledger(store).trial_file(key, PLAN)
    if content is None:
        raise UserError(f"{store.path(file)} is missing, by which {name} would be cut; search again")
    try:
        return PruningPlan.from_dict(parse_json(store.path(file), content))
    except ValueError as error:
        if isinstance(error, DamagedFile):
            raise
        raise DamagedFile(
            store.path(file), f"no plan ({error})", "delete its trial's record, then search again"
        ) from error
