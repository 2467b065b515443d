"""Make a pruned model again from what it says of itself, and compare: `tune-prune reproduce ORG/NAME`.

tune_prune.json has the base model with its commit or fingerprint, the configuration, what was kept of every layer, and the SHA-256
of the weight files. Where the model was only cut, that decides every byte. A repair and a short training are computed again from
their sample text, which other machines and versions round differently.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tune_prune.commands import flags
from tune_prune.core import temporary, terminal
from tune_prune.core.errors import MachineError, UserError
from tune_prune.core.kinds import KNOWN_TEXTS, texts_of
from tune_prune.core.terminal import say

if TYPE_CHECKING:
    from tune_prune.checkpoint.manifest import Manifest
    from tune_prune.commands.prune_request import PruneRequest


def main(argv: list[str] | None = None) -> int:
    return flags.run("reproduce", argv, _main)


@terminal.shown()
def _main(args: argparse.Namespace) -> None:
    output = None if args.output is None else Path(args.output).expanduser().absolute()

    from tune_prune.checkpoint.save import SHARD_BYTES, check_folder
    from tune_prune.commands import prune
    from tune_prune.commands.opened import Model

    if output is not None:
        check_folder(output, overwrite=False)
    flags.limit_threads()
    about = recorded(args.where, args.revision)
    request = request_of(about, args.base, args.calibration)
    dense = Model(request.run, prune.device_of(request, args.device), memory=args.memory)
    say(f"reproduce    {about.base.label} by {about.config.pruning_ratio:.0%}: {about.config.in_words()}")
    with contextlib.ExitStack() as stack:
        folder = output or stack.enter_context(temporary.folder()) / "again"
        pruned = dense.execute(request, lambda stage: prune.say_stage(stage, searched=False))
        shard_gb = (about.shard_bytes or SHARD_BYTES) / 1e9
        kind = about.quantization and about.quantization.lower()
        made = pruned.save(folder, about.format, dtype=about.dtype, shard_gb=shard_gb, quantize=kind)
    if output is not None:
        say(f"saved        {args.output}/")
    compare(about, made)


def recorded(where: str, revision: str | None = None) -> Manifest:
    """Return the manifest that `where` names: tune_prune.json, the folder of a checkpoint, or a repository of the hub at
    `revision`. Raises UserError."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    from tune_prune.checkpoint import manifest
    from tune_prune.models import unsupported
    from tune_prune.models.catalog import ModelSource

    path = Path(where).expanduser()
    if path.is_file():
        return manifest.read_file(path)
    if path.is_dir():
        about = manifest.read(path)
        if about is None:
            raise UserError(
                f"{where} has no {manifest.MANIFEST}, so it is no checkpoint of tune_prune; name a folder that has one"
            )
        return about
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", where):
        raise UserError(
            f"{where} does not exist; name {manifest.MANIFEST}, a folder that has it, or a model of the hub: ORG/NAME"
        )
    try:
        return manifest.read_file(Path(huggingface_hub.hf_hub_download(where, manifest.MANIFEST, revision=revision)))
    except UserError:
        raise
    except Exception as error:  # the hub client and the network libraries each raise their own kinds
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise UserError(
                f"{where} of the hub has no {manifest.MANIFEST}, so it cannot be made again; name another"
            ) from error
        source = ModelSource(where.rpartition("/")[2], where, "hub", revision, where)
        raise unsupported.unavailable(source, error, manifest.MANIFEST) from error


def request_of(about: Manifest, base: str | None = None, calibration: str | None = None) -> PruneRequest:
    """Return the request that makes the recorded model again. `base`: where the dense model is now; `calibration`: the sample text
    (None: where the manifest says). Raises UserError where one of them is not there."""
    from tune_prune.checkpoint.card import base_hub_id
    from tune_prune.commands.prune_request import PruneRequest
    from tune_prune.data.calibration import resolve as resolve_text
    from tune_prune.tuning import resolve

    run, config = about.source, about.config
    if run is None:
        raise UserError(
            f"it is not recorded with which settings the pruned {about.base.label} was made; it cannot be made again"
        )
    if (hub_id := base_hub_id(about)) is not None:
        run = replace(run, model=hub_id, revision=about.base.revision)
    source, _ = resolve.searched_model(run, base, None)
    run = replace(run, model=source.name, revision=source.revision)
    if calibration is not None:
        run = replace(run, calibration=resolve_text(calibration, None, model_is_embedded=True))
        config = replace(config, calibration=None)
    elif config.changes_weights:
        files = [text for text in texts_of(run.of(config).calibration) if text not in KNOWN_TEXTS]
        if absent := [file for file in files if not Path(file).is_file()]:
            raise UserError(
                f"its weights were changed with the sample text {absent[0]}, which is not here; name that file with --calibration"
            )
    return PruneRequest(run=run, config=config, source=run, plan=about.plan, fingerprint=about.base.fingerprint)


def compare(about: Manifest, made: Manifest) -> None:
    """Say which weight files are equal. Raises MachineError where one differs, which says why that can be."""
    from tune_prune.checkpoint.card import short_bytes

    names = sorted(about.files.keys() | made.files.keys())
    differing = [name for name in names if about.files.get(name) != made.files.get(name)]
    for name in names:
        before, now = about.files.get(name), made.files.get(name)
        if before is not None and before == now:
            say(f"equal        {name}, {short_bytes(now.bytes)}, SHA-256 {now.sha256}")
        else:
            then, here = (file.sha256 if file else "none" for file in (before, now))
            say(f"differs      {name}, SHA-256 {then} recorded, {here} made")
    if not differing:
        say(f"the weights are the same: {len(names)} of {len(names)} files")
        return
    versions = [
        f"{name} {version} then, {made.versions.get(name)} here"
        for name, version in about.versions.items()
        if made.versions.get(name) != version
    ]
    because = "a repair or a training is rounded differently elsewhere" if about.config.changes_weights else ""
    reasons = "; ".join(filter(None, [because, *versions])) or "the versions are the same"
    raise MachineError(f"{len(differing)} of {len(names)} weight files differ ({reasons})")
