"""Turn a configuration into a pruned model on disk: `tune-prune prune --config global_best_config.json --output DIR`.

The configuration comes from a search, with its plan of what to keep where the trial's folder is still there, or straight
from flags. No Ray, and no evaluation: `tune-prune evaluate --model DIR` does that.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tune_prune.commands import flags
from tune_prune.core import terminal
from tune_prune.core.config import ZERO_SHOT_TASKS
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.kinds import Shape
from tune_prune.core.store import is_address
from tune_prune.core.terminal import say
from tune_prune.pruning.methods import load_method, read_by

if TYPE_CHECKING:
    from tune_prune.checkpoint.manifest import Manifest
    from tune_prune.checkpoint.save import Format
    from tune_prune.commands.opened import Model
    from tune_prune.commands.prune_request import PruneRequest
    from tune_prune.core.records import StageReport


def main(argv: list[str] | None = None) -> int:
    return flags.run("prune", argv, _main)


@terminal.shown()
def _main(args: argparse.Namespace) -> None:
    _check_flags(args)

    from tune_prune.checkpoint.save import check_folder
    from tune_prune.commands import (
        api,
        prune_request,  # imports torch: not before every flag has been read
        upload,
    )
    from tune_prune.commands.opened import Model
    from tune_prune.tuning import resolve

    if is_address(args.output):
        raise UserError(f"--output {args.output} is no folder, which a checkpoint is; name one, then copy it there")
    folder = Path(args.output).expanduser().absolute()
    check_folder(folder, args.overwrite)
    flags.limit_threads()
    if args.config is not None:
        request = prune_request.from_config(args.config, args.model, args.base, args.revision)
        check_agreement(args, request)
        resolve.searched_model(request.run, args.base, None)
        dense = Model(request.run, device_of(request, args.device, args.measure), memory=args.memory)
    else:
        dense = api.open(
            args.model,
            revision=args.revision,
            calibration=args.calibration,
            data_dir=args.data_dir,
            seed=args.seed or 0,
            device=args.device,
            memory=args.memory,
        )
        request = dense.request(
            {name: getattr(args, name) for name, row in HYPERPARAMETERS.items() if not row.of_run},
            args.align,
            args.tensor_parallel,
        )
    if args.upload is not None:
        dense.check_upload(args.upload, args.public)
    how = {name: getattr(args, name) for name in ("dtype", "overwrite", "shard_gb", "measure", "quantize")}
    saved = save(dense, request, folder, args.format, **how)
    others = args.revision or args.dtype or args.memory  # which the command that is printed would have to repeat
    say(describe(folder, saved, dense, [] if others else again(args.config, args.model, args.base)))
    if args.upload is not None:
        say()
        upload.upload(folder, args.upload, args.public)


def again(config: str | None, label: str | None, base: str | None = None) -> list[str]:
    """Return the command that prunes by the same search once more; empty where there was none."""
    given = {"--config": config, "--model": label, "--base": base}
    words = [word for flag, value in given.items() if value is not None for word in (flag, value)]
    return [] if config is None else ["tune-prune", "prune", *words]


def device_of(request: PruneRequest, asked: str = "auto", measure: bool = False) -> str:
    """Return the device on which the dense model of a request is needed: to cut it by a plan that is there takes no GPU, unless
    its weights are changed."""
    cut_alone = request.plan is not None and not request.config.changes_weights
    return "cpu" if asked == "auto" and cut_alone and not measure else asked


def save(dense: Model, request: PruneRequest, folder: Path, fmt: Format = "hf", **options: Any) -> Manifest:
    """Execute a request for that model and save what it makes, saying what is done; `options` as in `PrunedModel.save`. Raises
    UserError."""
    from tune_prune.checkpoint import quantisation
    from tune_prune.checkpoint.layers import check_experts, padded_params

    # Before hours of statistics.
    quantisation.check(options.get("quantize"), fmt, request.config.shape, dense.geometry)
    check_experts(fmt, request.config.shape, dense.geometry)
    if fmt == "gguf":
        from tune_prune.checkpoint.gguf.architecture import check_shape

        check_shape(dense.hf_config, request.config.shape)
    config = request.config
    read = read_by(config)
    say(f"prune        {request.run.label} by {config.pruning_ratio:.0%} of all parameters: {config.in_words(read)}")
    if dense.found_as:
        say(f"weights      {dense.found_as}")
    searched = request.plan_file is not None
    pruned = dense.execute(request, lambda stage: say_stage(stage, searched))
    plan = pruned.plan
    text = f"by {request.run.of(config).calibration} text" if "calibration" in read else "without sample text"
    how = "as searched" if searched else f"chosen {text} in {request.run.dtype}"
    removed = f"{plan.removed_params:,} of {plan.total_params:,} parameters ({plan.removed_fraction:.2%})"
    say(f"removed      {removed}, {how}")
    if fmt == "hf-padded":  # before anything is written
        params = padded_params(plan, dense.geometry)
        if plan.total_params - params < plan.removed_params / 2:
            step = "prune" if request.metrics is None else "search again"
            say(
                "warning      --format hf-padded fills every layer with zeros up to the widest, so this model will have "
                f"{params / plan.total_params:.0%} of the original's size;\n             to have a smaller one that loads in every "
                f"program, {step} with --shape uniform"
            )
    return pruned.save(folder, fmt, **options)


_STAGES = {"importance": "gradients", "refit": "repair", "recovery": "training", "pruning": "cut"}


def say_stage(stage: StageReport, searched: bool) -> None:
    """Say what a stage has taken; cutting runs no text through the model, and is never kept from before."""
    taken = f"{stage.duration_s:.1f} s"
    if stage.tokens:
        taken = f"{stage.tokens:,} tokens, {taken}"
    elif stage.stage != "pruning":
        taken = "already done by the search, which has kept it" if searched else "already done, and kept from then"
    say(f"{_STAGES.get(stage.stage, stage.stage.replace('_', ' ')):<12} {taken}")


def _check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for flags that do not go together."""
    if args.config is not None:
        return
    flags.check_names(filter(None, [args.model]), args.data_dir, None, args.calibration)
    read = HYPERPARAMETERS if args.method is None else load_method(args.method).hyperparameters
    needed = ("model", *(row.name for name, row in HYPERPARAMETERS.items() if row.required and name in read))
    missing = [_flag(name) for name in needed if getattr(args, name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} must be given; name a search's result with --config, or give all of "
            f"{', '.join(map(_flag, needed))}"
        )


def check_agreement(args: argparse.Namespace, request: PruneRequest) -> None:
    """Raise UserError for a flag that contradicts what was searched. One that repeats it is accepted."""
    from tune_prune.data import calibration, checks

    run = request.source or request.run
    said = request.config.values(run) | {"data_dir": run.data_dir}
    asked = {name: getattr(args, name) for name in said if getattr(args, name) is not None}
    searched = Shape.read(said["shape"])
    shape = searched if args.shape in (None, searched.kind) else Shape.read(args.shape)
    shape = shape._replace(align=args.align or shape.align, gpus=args.tensor_parallel or shape.gpus)
    if shape.kind == "free" and shape != Shape("free"):
        shape = shape._replace(kind="aligned")
    asked["shape"] = str(shape)
    if "data_dir" in asked:
        asked["data_dir"] = checks.data_dir(asked["data_dir"])
    if "calibration" in asked:
        asked["calibration"] = calibration.resolve(asked["calibration"], run.data_dir, model_is_embedded=True)
    for name, value in asked.items():
        if value != said[name]:
            raise UserError(
                f"{_flag(name)} is {value}, but {args.config} says {said[name]}; leave the flag out, search again with that value, "
                "or leave --config out and give all flags"
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def describe(folder: Path, about: Manifest, dense: Model, command: Sequence[str] = ()) -> str:
    """Say what was saved: how large it is, how fast where that was measured, and what to do with it. `dense`: what it
    was made from; `command`: that prunes it again (`again`)."""
    from tune_prune.checkpoint import generation_speed
    from tune_prune.checkpoint.card import short_bytes
    from tune_prune.commands.plan_page import shown_path

    original, now = about.sizes["dense"], about.saved_sizes
    on_disk = sum(file.bytes for file in about.files.values())
    where = str(shown_path(folder))
    shares = {
        "parameters": now.params / original.params,
        "memory per token of context": now.kv_bytes_per_token / original.kv_bytes_per_token,
        "arithmetic per token": now.macs_per_token / original.macs_per_token,
    }
    lines = [
        "",
        f"saved        {where}/: {short_bytes(on_disk)} on disk, {on_disk / original.weight_bytes:.1%} of the original's "
        f"{short_bytes(original.weight_bytes)}",
        f"             {', '.join(f'{share:.1%} of its {name}' for name, share in shares.items())}",
    ]
    if "padded" in about.sizes and (zeros := now.params - about.sizes["pruned"].params):
        lines.append(f"             {zeros:,} of the parameters are zeros")
    if about.speed is not None:
        lines += ["", generation_speed.verdict_of(about.speed), generation_speed.speed_table(about.speed), ""]
    notes = list(about.notes)
    if about.dropped_layers:
        layers = ", ".join(map(str, about.dropped_layers))
        notes.insert(0, f"nothing was kept of layers {layers} of the original, so they are left out")
    if dense.file is not None and on_disk > (before := dense.file.stat().st_size):
        step = "for a small file take --format gguf --quantize q4_k_m"
        notes.append(f"this is larger than {dense.file.name} ({short_bytes(before)}), as it is in more bits: {step}")
    lines += [f"note         {note}" for note in notes]
    return "\n".join([*lines, "", *_next(folder, about, dense, where, command)])


def _next(folder: Path, about: Manifest, dense: Model, where: str, command: Sequence[str]) -> list[str]:
    """Return the block `next`: commands for this very checkpoint."""
    from tune_prune.checkpoint.card import uses
    from tune_prune.checkpoint.gguf.architecture import check_shape
    from tune_prune.checkpoint.gguf.gguf_vocab import read_vocabulary

    steps, place = uses(folder, about, where), folder
    if about.format == "gguf":
        place = folder / next(iter(about.files))
    elif command:
        with contextlib.suppress(UserError):  # llama.cpp has no such layers, or no such tokenizer
            check_shape(dense.hf_config, about.config.shape)
            if read_vocabulary(folder, dense.hf_config.vocab_size).model != "none":
                steps.append(("llama.cpp", shlex.join([*command, "--format", "gguf", "--output", f"{where}-gguf"])))
    model = where if place == folder else f"{where}/{place.name}"
    steps.append(("evaluate", shlex.join(evaluation(model, about))))
    # As the hub takes a name.
    name = re.sub(r"[^\w.-]+|-{2,}|\.{2,}", "-", folder.name, flags=re.ASCII).strip("-.") or "model"
    steps.append(("share", shlex.join(["tune-prune", "upload", where, f"YOU/{name}"])))
    return [f"{'' if number else 'next':<13}{name:<11}{line}" for number, (name, line) in enumerate(steps)]


def evaluation(model: str, about: Manifest) -> list[str]:
    """Return the command that measures a checkpoint on what its recorded numbers were measured on."""
    command = ["tune-prune", "evaluate", "--model", model]
    run = about.source
    if run is None or about.metrics is None:
        return command
    limits = {"--limit": run.protocol.limit, "--perplexity-tokens": run.protocol.perplexity_tokens}
    for flag, value in ({"--data-dir": run.data_dir} | limits).items():
        command += [flag, str(value)] if value is not None else []
    return command + (["--tasks", ",".join(run.protocol.tasks)] if run.protocol.tasks != ZERO_SHOT_TASKS else [])
