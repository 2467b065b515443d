"""The frame of every command: how it runs and ends, and checks that need nothing heavy."""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tune_prune.commands.option_kinds import Several, TaskName
from tune_prune.commands.options import CommandLine
from tune_prune.core import machine
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile, check_writable, parse_json
from tune_prune.core.store import Location, location, open_store
from tune_prune.core.terminal import say

if TYPE_CHECKING:
    from tune_prune.tuning.plan import SearchSettings

SEARCH = ("tune-prune", "search")
task_names = Several(TaskName(), "boolq,piqa").read  # a type of a script's flag


def run(command: str, argv: list[str] | None, body: Callable[[argparse.Namespace], None], advice: str = "") -> int:
    """Call `body` with the values of that command's line (None: this process's), and its words as `argv`. Returns the exit code;
    what ends the command has `advice`, as in `exit_code`."""
    words = sys.argv[1:] if argv is None else argv

    def main() -> None:
        args = CommandLine(command).parse_args(words)
        args.argv = words
        body(args)

    # Set before transformers or datasets are imported: their progress bars and warnings would cut through our lines. Who sits at a
    # terminal sees the hub's downloads, which may last longer than all the rest.
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that wait for each other sleep instead of spinning: the same bits, and where other programs want the CPUs too,
    # tiny-llama's perplexity in two threads takes 0.5 s instead of up to 12.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.lastResort = _Warnings(logging.WARNING)
    # torch and transformers make a million objects that stay to the end: to look through them for garbage once more at the exit
    # takes 1.5 s.
    atexit.register(gc.freeze)
    return exit_code(main, advice)


class _Warnings(logging.Handler):
    """Prints a record that no other handler takes as a line like every other warning."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"warning: {record.getMessage()}", sys.stderr)


def limit_threads() -> None:
    """Hold this process to the CPUs it may use. PyTorch counts those of the affinity mask, and not what a control group allows:
    in a container with 2 of 64 CPUs its 64 threads would wait for each other."""
    import torch  # not before the flags have been read

    torch.set_num_threads(min(torch.get_num_threads(), machine.cpus()))


def check_names(models: Iterable[str], data_dir: str | None, tasks: tuple[str, ...] | None, text: str | None) -> None:
    """Raise UserError unless models, --data-dir, tasks and calibration text are there; None: not asked for. Hub ids and tasks of
    the hub are taken as they are. Needs no torch, whose import takes seconds that nobody should wait to read of a typo."""
    from tune_prune.data import calibration, checks, task_files
    from tune_prune.models import catalog

    folder = checks.data_dir(data_dir)
    for model in models:
        embedded = catalog.resolve(model).kind == "embedded"
        if tasks is not None:
            task_files.check_tasks(task_files.TaskSource.of(folder, embedded and folder is None), tasks)
        if text is not None:
            calibration.resolve(text, folder, embedded)


def settings_from(values: Mapping[str, Any]) -> SearchSettings:
    """Return the settings of a search from the values of its options. Raises UserError for names that are unknown, before torch is
    imported."""
    if not values["model"]:
        raise UserError(f"--model is missing (see {' '.join(SEARCH)} --help)")
    check_names(values["model"], values["data_dir"], values["tasks"], values["calibration"])
    from tune_prune.tuning import space

    space.load(values["search_space"])
    from tune_prune.tuning.plan import SearchSettings

    fields = {"models": tuple(dict.fromkeys(values["model"])), "trial_timeout_s": values["trial_timeout"], **values}
    return SearchSettings(**{field.name: fields[field.name] for field in dataclasses.fields(SearchSettings)})


def record_file(asked: str, field: str, of: str) -> Location:
    """Return where the record that --output asks for goes. Raises UserError where nothing can be written: before the measurement,
    not after it; and where a file is there that is no such record, which has `field` and is `of` something."""
    path = location(asked).expanduser().absolute()
    if not isinstance(path, Path):
        open_store(path.parent).check_writable()
        return path
    if hindrance := _hindrance(path):
        raise UserError(f"--output {asked} {hindrance}; name a file in an existing folder, e.g. record.json")
    try:
        known = not path.exists() or (path.is_file() and field in parse_json(path))  # a device would be replaced, too
    except DamagedFile:
        known = False
    if not known:
        raise UserError(
            f"--output {asked} exists and is no record of {of}; only such a record is replaced, so name another file"
        )
    return path


def output_file(text: str) -> Path:
    """Return the file of a script's flag. Raises argparse.ArgumentTypeError where it cannot be written: before the measurement."""
    path = Path(text)
    hindrance = _hindrance(path.absolute()) or "is no file" * (path.exists() and not path.is_file())
    if hindrance:
        raise argparse.ArgumentTypeError(f"{text!r} {hindrance}; name a file in an existing folder")
    return path


def _hindrance(path: Path) -> str:
    """Say what is in the way of writing that file, as the rest of a clause; empty where nothing is."""
    if path.is_dir():
        return "is a folder"
    try:
        check_writable(path.parent)
        return "" if path.parent.is_dir() else "stands in no folder"
    except OSError as error:
        return f"cannot be written ({error.strerror or error})"
