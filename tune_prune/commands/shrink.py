"""Make a smaller model from start to end: `tune-prune shrink MODEL`.

One command in place of `search`, `prune`, `evaluate` and `speed`, with what suits who wants a model and no study: the recommended
search, the choice by the distance from the original, the format of the engine that the model is for, and the saved model measured
once more beside the original (docs/shrink.md has the commands that it stands for). Everything is kept as it is done, so the same
command goes on after whatever has ended it.
"""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tune_prune.commands import flags
from tune_prune.commands.options import OPTIONS, CommandLine, arguments
from tune_prune.core import ending, terminal
from tune_prune.core.errors import UserError
from tune_prune.core.terminal import say
from tune_prune.tuning.local_ray import started_early

if TYPE_CHECKING:
    from tune_prune.checkpoint.generation_speed import GenerationSpeed
    from tune_prune.checkpoint.manifest import Manifest
    from tune_prune.checkpoint.save import Format
    from tune_prune.commands.opened import Model
    from tune_prune.commands.results import Results
    from tune_prune.evaluation.evaluation import Evaluation
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


def parser() -> CommandLine:
    return CommandLine("shrink")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return flags.run(lambda: _main(argv))


def _main(argv: list[str]) -> None:
    args = parser().parse_args(argv)
    if args.quick and args.thorough:
        raise UserError("--quick and --thorough are given; leave one of them out")
    if args.quantize is not None and vars(args)["for"] == "mlx":
        raise UserError(
            f"--quantize {args.quantize} is not for MLX, which quantises by itself; leave it out, then mlx_lm.convert -q"
        )
    if args.tensor_parallel is not None and vars(args)["for"] != "vllm":
        raise UserError(f"--tensor-parallel {args.tensor_parallel} is for vLLM; add --for vllm, or leave it out")
    again = shlex.join(["tune-prune", "shrink", *argv])
    with started_early(not args.dry_run), ending.advised(f"what is done is kept; to go on:\n  {again}"):
        _shrink(args)


def _shrink(args: argparse.Namespace) -> None:
    target = TARGETS[vars(args)["for"]]
    effort = QUICK if args.quick else THOROUGH if args.thorough else USUAL
    with terminal.shown(), terminal.waiting("starting: loading torch and transformers ..."):
        flags.check_names([args.model], args.data_dir, None, args.calibration)
        flags.limit_threads()
        if args.upload is not None:
            _check_upload(args)
        asked = _asked(args, effort, _shape(args.model, target))
        settings = flags.settings_from({name: option.usual for name, option in OPTIONS["search"].items()} | asked)
    from tune_prune.checkpoint import quantisation
    from tune_prune.commands import plan_page, upload
    from tune_prune.commands.results import run
    from tune_prune.tuning.preflight import make_plan

    with terminal.shown(), terminal.waiting("starting: reading model and data, timing this machine ..."):
        plan = make_plan(settings, args.gpu)
    quantisation.check(args.quantize, target.format, plan.models[0].shapes[0])
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
    with terminal.shown():
        about = _saved(results, label, folder, target.format, args.quantize)
        measured = _measured(folder, about, args.data_dir)
        speeds = _speeds(folder, about, vars(args)["for"])
    say(f"\n{comparison(about, measured, speeds)}\n")
    if args.upload is not None:
        upload.upload(folder, args.upload, args.public)
    for name, line in _closing(folder, about, vars(args)["for"], results):  # in one line each, to be copied
        say(f"{name:<12} {line}")


def _check_upload(args: argparse.Namespace) -> None:
    """Raise UserError where the model could not be uploaded: before hours of work."""
    from tune_prune.checkpoint import publish
    from tune_prune.checkpoint.save import base_license
    from tune_prune.models import catalog

    publish.check(args.upload, base_license(catalog.resolve(args.model)), args.public)


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
        **vars(effort),
    }


def _shape(model: str, target: Target) -> str | None:
    """Return the shape for an engine: one width for all layers where llama.cpp has no layers that differ for the family."""
    from tune_prune.checkpoint.gguf.architecture import check_config, check_shape
    from tune_prune.models import catalog, loading

    if target.format != "gguf":
        return target.shape
    config = loading.load_config(catalog.resolve(model))
    check_config(config)
    try:
        check_shape(config, target.shape or "free")
    except UserError:
        return "uniform"
    return target.shape


def _folder(args: argparse.Namespace, plan: Plan) -> Path:
    """Return where the model is saved. Raises UserError for a folder that is another thing than this command saves."""
    from tune_prune.analysis.verdict import folder_name
    from tune_prune.checkpoint import manifest
    from tune_prune.checkpoint.save import check_folder

    model = plan.models[0]
    (ratio,) = model.targets
    name = f"{folder_name(model.run.label)}-{100 * ratio:.4g}{TARGETS[vars(args)['for']].ending}"
    name += f"-{args.quantize}" if args.quantize else ""
    folder = Path(args.output or name).expanduser().absolute()
    if not folder.is_dir() or manifest.read(folder) is None:
        check_folder(folder, overwrite=False)
    return folder


def chosen(results: Results) -> tuple[str, list[tuple[str, str]]]:
    """Return the label of the configuration that is closest to the original, and lines that say which it is and why."""
    from tune_prune.analysis.render.messages import printed
    from tune_prune.analysis.statistics.rules import score
    from tune_prune.analysis.verdict import in_words, verdicts
    from tune_prune.commands.analysis import why_nothing

    if not results.findings.models:
        raise UserError(why_nothing(results.findings.study))
    (verdict,) = verdicts(results.findings).values()
    best, rows, marked = verdict.winner.best, verdict.rows, len(verdict.marked)
    distance = {result.model.label: -_best(score(result.eligible, RULE)) for result in verdict.members}
    label = verdict.winner.model.label
    lines = [
        ("chosen", f"{in_words(verdict.winner)} ({best['name']})"),
        ("", f"its predictions are the closest to the original's: KL {printed(distance[label], 'nats')} nats"),
    ]
    if marked > 1:
        which = f"the {marked}" if marked == len(rows) else f"the best {marked} of {len(rows)}"
        lines.append(("why", f"accuracy cannot tell {which} apart, and KL sees every prediction"))
    by_right = score(rows, "gold_logprob")
    if not math.isnan(_best(by_right)):
        name = rows["name"].iloc[int(by_right.argmax())]
        same = "is the best by how likely right answers are, too"
        lines.append(("", f"it {same}" if name == best["name"] else f"{name} finds right answers more likely"))
    if len(distance) > 1:
        untrained, trained = (printed(value, "nats") for value in distance.values())
        pays = "pays" if verdict.winner.model.trained else "does not pay"
        lines.append(("training", f"{pays}: KL {untrained} without, {trained} with it"))
    return label, lines


def _best(scores: Any) -> float:
    return max((float(value) for value in scores if not math.isnan(value)), default=math.nan)


def _saved(results: Results, label: str, folder: Path, fmt: Format, kind: str | None) -> Manifest:
    """Save the configuration of that label in `folder`, unless it is there; return what the folder says of it. `kind`: of
    checkpoint.quantisation."""
    from tune_prune.checkpoint import manifest, quantisation
    from tune_prune.commands import prune, prune_request
    from tune_prune.commands.opened import Model

    request = prune_request.from_config(str(results.folder), label)
    if folder.is_dir() and (about := manifest.read(folder)) is not None:
        wanted = request.config, fmt, quantisation.name_of(kind), request.plan or about.plan
        if (about.config, about.format, about.quantization, about.plan) != wanted:
            raise UserError(f"--output {folder} holds another pruned model; name another folder, or remove that one")
        say(f"saved        {folder.name}/ is there already")
        return about
    dense = Model(request.run, prune.device_of(request, measure=True))
    return prune.save(dense, request, folder, fmt, measure=_speed_fits(dense), quantize=kind)


def _speed_fits(dense: Model) -> bool:
    """Return whether the original and its copy can be in memory at once, so that their speeds are measured in turns."""
    import torch

    from tune_prune.tuning.memory import on_this_machine

    free = torch.cuda.mem_get_info()[0] if dense.device == "cuda" else on_this_machine()["host"]
    itemsize = getattr(dense.hf_config, "dtype", None) or torch.float32
    return 2.5 * dense.params * itemsize.itemsize < free


def _speeds(folder: Path, about: Manifest, engine: str) -> tuple[dict[str, GenerationSpeed], str] | None:
    """Return the speeds of the original and of the saved model, and the engine with its version: measured in the engine that it is
    for, where that has a benchmark that is installed, else as they were in transformers; None where neither is known."""
    from tune_prune.checkpoint.engine_speed import PROGRAMS
    from tune_prune.commands import speed

    if engine in PROGRAMS and shutil.which(PROGRAMS[engine][0]) is not None:
        try:
            speeds, _, version = speed.measured(
                speed.parser().parse_args(["--model", str(folder), "--engine", engine, "--repeats", "3"])
            )
            return speeds, version
        except UserError as error:  # such as an original that has no GGUF file
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


def comparison(about: Manifest, measured: Evaluation, speeds: tuple[Mapping[str, GenerationSpeed], str] | None) -> str:
    """Return the saved model beside the original as a table. `speeds`: of both, and the engine."""
    from tune_prune.analysis.render.messages import pm
    from tune_prune.checkpoint.card import format_perplexity, metric, share, short_bytes, short_count
    from tune_prune.checkpoint.generation_speed import conditions, rate
    from tune_prune.checkpoint.layers import aligned

    before: Mapping[str, Any] = about.baseline or {}
    after: Mapping[str, Any] = measured.record.metrics
    dense, now = about.sizes["dense"], about.saved_sizes
    on_disk = sum(file.bytes for file in about.files.values())
    accuracies, likely = (
        [pm(metrics.get(name), metrics.get(f"{name}_stderr"), form) for metrics in (before, after)]
        for name, form in (("acc_mean", "acc"), ("gold_logprob_mean", "nats"))
    )
    rows: list[Sequence[str]] = [
        ("", "original", "smaller", ""),
        ("on disk", short_bytes(dense.weight_bytes), short_bytes(on_disk), share(on_disk, dense.weight_bytes)),
        ("parameters", short_count(dense.params), short_count(now.params), share(now.params, dense.params)),
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
    notes = [] if speeds is None else [f"speed: {conditions(first)}, {speeds[1]}"]
    return "\n".join([*aligned(rows), *notes])


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
