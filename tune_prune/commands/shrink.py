"""Make a smaller model from start to end: `tune-prune shrink MODEL`.

One command in place of `search`, `prune`, `evaluate` and `speed`, with what suits who wants a model and no study: the recommended
search, the choice by the distance from the original, the format of the engine that the model is for, and the saved model measured
once more beside the original (docs/shrink.md has the commands that it stands for). Trials and the saved model are kept, so the
same command goes on after whatever has ended it.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tune_prune.commands import flags
from tune_prune.commands.options import OPTIONS, CommandLine, arguments
from tune_prune.core import ending, terminal
from tune_prune.core.errors import UserError
from tune_prune.core.store import is_address
from tune_prune.core.terminal import say
from tune_prune.tuning.local_ray import started_early

if TYPE_CHECKING:
    from tune_prune.checkpoint.generation_speed import GenerationSpeed
    from tune_prune.checkpoint.manifest import Manifest
    from tune_prune.checkpoint.save import Format
    from tune_prune.commands.opened import Model
    from tune_prune.commands.results import Results
    from tune_prune.evaluation.evaluation import Evaluation
    from tune_prune.models.catalog import ModelSource
    from tune_prune.tuning.plan import Plan

RULE = "kl"  # what tells pruned models apart where accuracy guesses: docs/quality.md


@dataclass(frozen=True)
class Effort:
    """How much a search tries, by the names of its options."""

    search_space: str
    recover: int | None
    limit: int | None
    perplexity_tokens: int | None


QUICK = Effort("quick", None, 40, 16_384)
USUAL = Effort("recommended", 2, 100, 32_768)
THOROUGH = Effort("thorough", 4, None, None)


@dataclass(frozen=True)
class Target:
    """What a model for an engine needs: the format of its files, the shape of its layers (None: by its size), how the name of its
    folder ends, and the names of the lines (checkpoint.card.uses) that run it there."""

    format: Format
    shape: str | None
    ending: str
    uses: tuple[str, ...]


TARGETS = {
    "transformers": Target("hf", None, "", ("try",)),
    "vllm": Target("vllm", None, "-vllm", ("serve",)),
    "llama.cpp": Target("gguf", "aligned", "-gguf", ("chat", "serve", "quantise")),
    "mlx": Target("hf", "aligned", "-mlx", ()),
}


def main(argv: list[str] | None = None) -> int:
    return flags.run("shrink", argv, _main)


def _main(args: argparse.Namespace) -> None:
    if args.quick and args.thorough:
        raise UserError("--quick and --thorough are given; leave one of them out")
    if args.quantize is not None and vars(args)["for"] == "mlx":
        raise UserError(
            f"--quantize {args.quantize} is not for MLX, which quantises by itself; leave it out, then mlx_lm.convert -q"
        )
    if args.tensor_parallel is not None and vars(args)["for"] != "vllm":
        raise UserError(f"--tensor-parallel {args.tensor_parallel} is for vLLM; add --for vllm, or leave it out")
    again = shlex.join(["tune-prune", "shrink", *args.argv])
    with (
        started_early(not (args.dry_run or args.inline)),
        ending.advised(f"what is done is kept; to go on:\n  {again}"),
    ):
        _shrink(args)


def _shrink(args: argparse.Namespace) -> None:
    target = TARGETS[vars(args)["for"]]
    effort = QUICK if args.quick else THOROUGH if args.thorough else USUAL
    with terminal.shown(), terminal.waiting("starting: loading torch and transformers ..."):
        flags.check_names([args.model], args.data_dir, None, args.calibration)
        flags.limit_threads()
        if args.upload is not None:
            _check_upload(args)
        asked = _asked(args, effort, _shape(args, target))
        settings = flags.settings_from({name: option.usual for name, option in OPTIONS["search"].items()} | asked)
    from tune_prune.checkpoint import quantisation
    from tune_prune.commands import plan_page, upload
    from tune_prune.commands.results import run
    from tune_prune.models import catalog
    from tune_prune.tuning.preflight import make_plan

    with terminal.shown(), terminal.waiting("starting: reading model and data, timing this machine ..."):
        plan = make_plan(settings, args.gpu)
    (model,) = plan.models
    quantisation.check(args.quantize, target.format, model.shapes[0], model.geometry)
    if target is TARGETS["mlx"] and model.geometry.around_params:
        raise UserError(
            f"mlx_lm takes no language model out of {model.run.label}, which reads images, too; leave --for mlx out"
        )
    folder = _folder(args, plan)
    say(plan_page.summary(plan, details=False))
    say(
        f"then         the one closest to the original is saved as {plan_page.shown_path(folder)}/, and measured once more"
    )
    if args.dry_run:
        say("\ndry run: nothing was started")
        return
    say()
    with terminal.shown(0.5):
        results = run(plan, [*flags.SEARCH, *arguments("search", asked)])
    label, lines = chosen(results)
    say("\n" + "\n".join(plan_page.lines(lines)) + "\n")
    original = catalog.resolve(args.model)
    with terminal.shown():
        about = _saved(results, label, folder, target.format, args.quantize)
        measured = _measured(folder, about, args.data_dir)
        speeds = _speeds(folder, about, vars(args)["for"], original)
    say(f"\n{comparison(about, measured, speeds, original)}\n")
    for name, line in _closing(folder, about, vars(args)["for"], results):  # in one line each, to be copied
        say(f"{name:<12} {line}")
    if args.upload is not None:
        say()
        upload.upload(folder, args.upload, args.public)


def _check_upload(args: argparse.Namespace) -> None:
    """Raise UserError where the model could not be uploaded: before hours of work."""
    from tune_prune.checkpoint import publish
    from tune_prune.checkpoint.save import base_license
    from tune_prune.models import catalog, loading

    source = catalog.resolve(args.model)
    loading.load_config(source)  # a GGUF file's licence is read with it
    publish.check(args.upload, base_license(source), args.public)


def _asked(args: argparse.Namespace, effort: Effort, shape: str | None) -> dict[str, Any]:
    """Return the options of the search that differ from its defaults, by name."""
    return {
        "model": (args.model,),
        "pruning_ratio": args.pruning_ratio,
        "shape": shape,
        "tensor_parallel": args.tensor_parallel,
        "calibration": args.calibration,
        "data_dir": args.data_dir,
        "objective": RULE,
        "inline": args.inline,
        "name": args.name,
        **vars(effort),
    }


def _shape(args: argparse.Namespace, target: Target) -> str | None:
    """Return the shape for an engine: one width for all layers where llama.cpp has no layers that differ for the family, or where
    only a plain config says how many experts there are. Raises UserError where the engine cannot run the family."""
    from tune_prune.checkpoint.gguf.architecture import check_config, check_shape
    from tune_prune.models import catalog, loading
    from tune_prune.models.families import family_of
    from tune_prune.models.registration import MLX_FAMILIES, MLX_ROPE_TYPES
    from tune_prune.models.wrapper import language_config

    engine = vars(args)["for"]
    wanted = "aligned" if args.quantize == "int4" else target.shape  # which takes widths in multiples of 32
    if engine == "transformers":
        return wanted
    whole = loading.whole_config(catalog.resolve(args.model))
    config = language_config(whole)
    family = family_of(config.model_type)
    if family.experts and engine in ("vllm", "mlx"):
        return "uniform"
    if engine == "vllm":  # by its own class where it would not know ours: beside a vision tower, or with a state
        return "uniform" if family.recurrent or whole is not config else wanted
    if engine == "mlx":
        if config.model_type not in MLX_FAMILIES:
            raise UserError(
                f"mlx_lm runs pruned models of {', '.join(MLX_FAMILIES)}, and not of {config.model_type}; take --for transformers "
                "or --for vllm"
            )
        rope = getattr(config, "rope_parameters", None) or {}
        kind = rope.get("full_attention", rope).get("rope_type", "default")
        if kind not in MLX_ROPE_TYPES:
            raise UserError(
                f"the model has rotary embeddings of type {kind!r}, which the class for mlx_lm does not have "
                f"({', '.join(MLX_ROPE_TYPES)}); take --for transformers or --for vllm"
            )
        return target.shape
    check_config(config)
    try:
        check_shape(config, target.shape or "free")
    except UserError:
        return "uniform"
    return target.shape


def _folder(args: argparse.Namespace, plan: Plan) -> Path:
    """Return where the model is saved. Raises UserError, before the search, for a folder that holds another thing than this command
    saves."""
    from tune_prune.analysis.verdict import folder_name
    from tune_prune.checkpoint import manifest, quantisation
    from tune_prune.checkpoint.save import check_folder

    model, target = plan.models[0], TARGETS[vars(args)["for"]]
    (ratio,) = model.targets
    parts = [folder_name(model.run.label), f"{100 * ratio:.4g}"]
    parts += ["quick"] * args.quick + ["thorough"] * args.thorough
    parts += [f"tp{args.tensor_parallel}"] if args.tensor_parallel else []
    name = f"{args.name or '-'.join(parts)}{target.ending}" + (f"-{args.quantize}" if args.quantize else "")
    if is_address(args.output or ""):
        raise UserError(f"--output {args.output} is no folder, which a model is saved to; name one, then copy it there")
    folder = Path(args.output or name).expanduser().absolute()
    about = manifest.read(folder) if folder.is_dir() else None
    if about is not None:
        made = about.base.fingerprint, about.config.pruning_ratio, about.config.shape, about.format, about.quantization
        kind = quantisation.name_of(args.quantize)
        if made != (model.model_fingerprint, ratio, model.shapes[0], target.format, kind):
            raise _another(folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--output {folder} exists and holds no pruned model; name a new folder with --output")
    else:
        check_folder(folder, overwrite=False)
    return folder


def _another(folder: Path) -> UserError:
    return UserError(f"{folder} holds another pruned model; name a new folder with --output, or remove that one")


def chosen(results: Results) -> tuple[str, list[tuple[str, str]]]:
    """Return the label of the configuration that is closest to the original, and lines that say which it is and why."""
    import numpy as np

    from tune_prune.analysis.render.messages import printed
    from tune_prune.analysis.statistics.rules import score
    from tune_prune.analysis.verdict import close_calls, in_words, verdicts
    from tune_prune.commands.analysis import why_nothing

    if not results.findings.models:
        raise UserError(why_nothing(results.findings.study))
    (verdict,) = verdicts(results.findings).values()
    best, rows = verdict.winner.best, verdict.rows
    distances = {result.model.trained: -np.nanmax(score(result.eligible, RULE)) for result in verdict.members}
    label = verdict.winner.model.label
    lines = [
        ("chosen", f"{in_words(verdict.winner)} ({best['name']})"),
        ("", f"its predictions are the closest to the original's: KL {printed(min(distances.values()), 'nats')} nats"),
    ]
    if len(rows) > 1:
        lines.append(("why", f"KL sees every prediction; by accuracy {close_calls(verdict.winner, rows)}"))
    by_right = score(rows, "gold_logprob")
    if not np.isnan(by_right).all():
        name = rows["name"].iloc[int(np.nanargmax(by_right))]
        same = "it is the best by how likely right answers are, too"
        lines.append(("", same if name == best["name"] else f"{name} finds right answers more likely"))
    if len(distances) > 1:
        untrained, trained = (printed(distances[training], "nats") for training in (False, True))
        pays = "pays" if verdict.winner.model.trained else "does not pay"
        lines.append(("training", f"{pays}: KL {untrained} without, {trained} with it"))
    return label, lines


def _saved(results: Results, label: str, folder: Path, fmt: Format, kind: str | None) -> Manifest:
    """Save the configuration of that label in `folder`, unless it is there; return what the folder says of it. `kind`: of
    checkpoint.quantisation."""
    from tune_prune.checkpoint import manifest, quantisation
    from tune_prune.commands import prune, prune_request
    from tune_prune.commands.opened import Model

    request = prune_request.from_config(str(results.folder), label)
    if folder.is_dir() and (about := manifest.read(folder)) is not None:
        wanted = request.config, request.source, fmt, quantisation.name_of(kind), request.plan or about.plan
        if (about.config, about.source, about.format, about.quantization, about.plan) != wanted:
            raise _another(folder)
        say(f"saved        {folder.name}/ is there already")
        return about
    dense = Model(request.run, prune.device_of(request, measure=True))
    # Of a quantised model its engine alone can tell the speed.
    return prune.save(dense, request, folder, fmt, measure=kind is None and _speed_fits(dense), quantize=kind)


def _speed_fits(dense: Model) -> bool:
    """Return whether the original and its copy can be in memory at once, so that their speeds are measured in turns."""
    import torch

    from tune_prune.tuning.memory import on_this_machine

    free = torch.cuda.mem_get_info()[0] if dense.device == "cuda" else on_this_machine()["host"]
    dtype = getattr(dense.hf_config, "dtype", None) or torch.float32
    if 2.5 * dense.params * dtype.itemsize < free:
        return True
    say("note         speed is not measured: the original and its copy do not fit into memory at once")
    return False


def _speeds(
    folder: Path, about: Manifest, engine: str, original: ModelSource
) -> tuple[dict[str, GenerationSpeed], str] | None:
    """Return the speeds of the original and of the saved model, and the engine with its version: measured in the engine that it is
    for, where that has a benchmark that is installed (llama.cpp's wants a GGUF file of the original), else as they were in
    transformers; None where neither is known."""
    import torch

    from tune_prune.checkpoint.engine_speed import PROGRAMS
    from tune_prune.commands import speed
    from tune_prune.models.runner.out_of_memory import release

    comparable = engine != "llama.cpp" or original.file is not None
    if engine in PROGRAMS and comparable and shutil.which(PROGRAMS[engine][0]) is not None:
        if torch.cuda.is_available():
            release(torch.device("cuda"))  # what this process has measured with: the engine wants the whole GPU
        try:
            line = ["--model", str(folder), "--engine", engine, "--repeats", "3"]
            speeds, _, version = speed.measured(CommandLine("speed").parse_args(line))
            return speeds, version
        except UserError as error:
            say(f"note         no speed in {engine}: {error}")
    return None if about.speed is None else (about.speed, f"transformers {about.versions['transformers']}")


def _measured(folder: Path, about: Manifest, data_dir: str | None) -> Evaluation:
    """Measure what was saved on the search's questions and text, beside the original."""
    from tune_prune.commands import api

    run = about.source
    assert run is not None  # a search's
    place = folder / next(iter(about.files)) if about.format == "gguf" else folder
    protocol = run.protocol
    model = api.open(
        place, data_dir=data_dir, seed=run.seed, dtype=run.dtype, perplexity_tokens=protocol.perplexity_tokens
    )
    with terminal.waiting("measuring the saved model ..."):
        return model.evaluate(protocol.limit, protocol.tasks, kl=True)


def comparison(
    about: Manifest,
    measured: Evaluation,
    speeds: tuple[Mapping[str, GenerationSpeed], str] | None,
    original: ModelSource,
) -> str:
    """Return the saved model beside the original as a table, and what is to be known of its numbers. `speeds`: of both, and the
    engine."""
    from tune_prune.analysis.render.messages import pm
    from tune_prune.checkpoint.card import format_perplexity, metric, share, short_bytes, short_count
    from tune_prune.checkpoint.generation_speed import conditions, kinds_note, rate
    from tune_prune.checkpoint.layers import aligned

    before: Mapping[str, Any] = about.baseline or {}
    after: Mapping[str, Any] = measured.record.metrics
    dense, now = about.sizes["dense"], about.saved_sizes
    on_disk = sum(file.bytes for file in about.files.values())
    before_bytes = dense.weight_bytes if original.file is None else original.file.stat().st_size
    accuracies, likely = (
        [pm(metrics.get(name), metrics.get(f"{name}_stderr"), form) for metrics in (before, after)]
        for name, form in (("acc_mean", "acc"), ("gold_logprob_mean", "nats"))
    )
    rows: list[Sequence[str]] = [
        ("", "original", "smaller", ""),
        ("on disk", short_bytes(before_bytes), short_bytes(on_disk), share(on_disk, before_bytes)),
        ("parameters", short_count(dense.params), short_count(now.params), share(now.params, dense.params)),
        (
            "memory per token",
            short_bytes(dense.kv_bytes_per_token),
            short_bytes(now.kv_bytes_per_token),
            share(now.kv_bytes_per_token, dense.kv_bytes_per_token),
        ),
    ]
    if speeds is not None:
        first, last = speeds[0].values()
        for title, field in (("reads, tokens/s", "prefill_tokens_per_s"), ("writes, tokens/s", "decode_tokens_per_s")):
            old, new = getattr(first, field), getattr(last, field)
            rows.append((title, rate(old), rate(new), f"{new / old:.2f}x"))
    rows += [
        ("perplexity", format_perplexity(metric(before, "ppl")), format_perplexity(metric(after, "ppl")), ""),
        ("accuracy", *accuracies, share(metric(after, "acc_mean"), metric(before, "acc_mean"))),
        ("log-prob of right answers", *likely, ""),
    ]
    rows += [
        (f"KL on {text}", "0", f"{after[name]:.4f}", "")
        for name, text in (("kl_text", "text"), ("kl_tasks", "questions"))
        if name in after
    ]
    notes = list(about.notes)
    if about.quantization is not None:
        notes.append(f"scores are those of weights dequantised from {about.quantization}")
    if on_disk > before_bytes:
        notes.append("larger than the original's file, which is in fewer bits: --quantize makes it smaller")
    if speeds is not None:
        notes.append(f"speed: {conditions(first)}, {speeds[1]}")
        notes += filter(None, [kinds_note(speeds[0])])
    return "\n".join([*aligned(rows), *(f"note         {note}" for note in notes)])


def _closing(folder: Path, about: Manifest, engine: str, results: Results) -> Sequence[tuple[str, str]]:
    """Return the lines that run the model in that engine, and the one that reports on the search."""
    from tune_prune.checkpoint.card import uses
    from tune_prune.commands.plan_page import shown_path

    where = str(shown_path(folder))
    lines = [(name, line) for name, line in uses(folder, about, where) if name in TARGETS[engine].uses]
    if engine == "mlx":
        prompt = ["--trust-remote-code", "--prompt", "Once upon a time"]
        lines.append(("generate", shlex.join(["mlx_lm.generate", "--model", where, *prompt])))
    return [*lines, ("report", f"tune-prune analysis {shown_path(results.folder)} --rule {RULE}")]
