"""What every command line shares: types of flags, and flags that several of them have."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from tune_prune.core import machine
from tune_prune.core.config import PERPLEXITY_TOKENS, ZERO_SHOT_TASKS
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError, whole_number
from tune_prune.core.files import DamagedFile, check_writable, parse_json
from tune_prune.core.hyperparameters import HYPERPARAMETERS, Hyperparameter
from tune_prune.core.store import Location, location, open_store
from tune_prune.core.terminal import say
from tune_prune.pruning.methods import method_names

_LIBRARIES = "transformers.modeling_utils"  # the last import that every model needs
MODEL_HELP = "alias (mistral, tiny-llama), hub id, folder or GGUF file"
REVISION_HELP = "branch, tag or commit of a hub model (default: main)"
DTYPE_DEFAULT = "bfloat16 where weights are stored in 16 bits or fewer and the device is faster in it, else float32"
RUN_DEFAULTS = {
    "shape": "free, from 1B parameters on aligned",
    "seed": "0",
    "calibration": "embedded for toy models, else the text of --data-dir, else wikitext2",
}
CALIBRATION_HELP = (
    "sample text, best of the kind that the model is for\n\nembedded, wikitext2, c4 or a text file, or several with + between "
    f"them, in equal parts (default: {RUN_DEFAULTS['calibration']})"
)


def add_measurement_flags(group: argparse._ActionsContainer) -> None:
    """--data-dir, --trust-tasks, --tasks, --limit, --perplexity-window, --perplexity-tokens and --dtype: what a model is measured
    on, the same for every command that measures."""
    group.add_argument(
        "--data-dir",
        type=text,
        metavar="DIR",
        help="your own benchmarks and texts (docs/data.md)\n\n(default: those of the hub; toy models have theirs)",
    )
    group.add_argument(
        "--trust-tasks",
        action="store_true",
        help="let task files of --data-dir run code, such as their own functions and metrics: for files that you trust (default: "
        "refuse such files)",
    )
    group.add_argument(
        "--tasks",
        type=task_names,
        metavar="A,B",
        help=f"benchmarks to test on, with commas between them (default: {', '.join(ZERO_SHOT_TASKS)})",
    )
    group.add_argument(
        "--limit",
        type=whole_number(1, 10**9),
        metavar="N",
        help="ask only the first N questions of each benchmark: faster (default: all)",
    )
    group.add_argument(
        "--perplexity-window",
        type=whole_number(2, 10**6),
        metavar="TOKENS",
        help="tokens of each window of the perplexity text, at most what the model takes (default: 2048; for a toy model 128, as "
        "it was trained; for a pruned checkpoint as recorded)",
    )
    group.add_argument(
        "--perplexity-tokens",
        type=whole_number(PERPLEXITY_TOKENS.low, PERPLEXITY_TOKENS.high),
        metavar="N",
        help="take only the first N tokens of the perplexity text: faster (default: all)",
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help=f"data type while it works (default: {DTYPE_DEFAULT})",
    )


def add_device_flag(group: argparse._ActionsContainer) -> None:
    """--device, for `models.loading.pick_device`."""
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where it runs; auto: on a GPU if there is one (default: %(default)s)",
    )


def add_memory_flag(group: argparse._ActionsContainer, of: str) -> None:
    """--memory, in bytes."""
    group.add_argument(
        "--memory",
        type=memory,
        metavar="SIZE",
        help=f"most memory for {of}, e.g. 20GiB (default: what is free)\n\nA model that does not fit goes layer by layer: "
        "slower, with the same numbers.",
    )


def add_hyperparameter_flags(
    group: argparse._ActionsContainer, names: Iterable[str], default: str | None = None
) -> None:
    """A flag for each of these rows of the table, and --align with the shape; `default` in words, else the row's."""
    for row in (HYPERPARAMETERS[name] for name in names):
        usual = "" if row.required else f" (default: {default or RUN_DEFAULTS.get(row.name, row.default)})"
        name = row.name.rpartition("_")[2].upper()
        metavar = name if len(name) < 8 else "VALUE"
        choices = f": {', '.join(method_names())}" if row.name == "method" else ""
        first, *values = f"{row.help}{choices}".split("\n")
        shown = CALIBRATION_HELP if row.name == "calibration" else "\n".join([f"{first}{usual}", *values])
        group.add_argument(row.flag, type=_hyperparameter(row), metavar=metavar, help=shown)
        if row.name == "shape":
            group.add_argument(
                "--align",
                type=whole_number(1, 10**6),
                metavar="N",
                help="widths of MLPs are multiples of N, with --shape aligned (default: 64, from 1B parameters on 256) or uniform "
                "(default: 1, from 1B parameters on 256); --shape aligned-N says the same",
            )


def _hyperparameter(row: Hyperparameter) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return row.kind.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {row.kind}") from None

    return parse


def limit_threads() -> None:
    """Hold this process to the CPUs it may use. PyTorch counts those of the affinity mask, and not what a control group allows:
    in a container with 2 of 64 CPUs its 64 threads would wait for each other."""
    import torch  # not before the flags have been read

    torch.set_num_threads(min(torch.get_num_threads(), machine.cpus()))


def record_file(asked: str, field: str, of: str) -> Location:
    """Where the record that --output asks for goes. Raises UserError where nothing can be written: before the measurement, not
    after it; and where a file is there that is no such record, which has `field` and is `of` something."""
    path = location(asked).expanduser().absolute()
    if not isinstance(path, Path):
        open_store(path.parent).check_writable()
        return path
    if hindrance := _hindrance(path):
        raise UserError(f"--output {asked} {hindrance}; name a file in an existing folder, e.g. record.json")
    if path.exists() and not _has(path, field):  # a device would be replaced, too
        raise UserError(
            f"--output {asked} exists and is no record of {of}; only such a record is replaced, so name another file"
        )
    return path


def _hindrance(path: Path) -> str:
    """What is in the way of writing that file, as the rest of a clause; empty where nothing is."""
    if path.is_dir():
        return "is a folder"
    if not path.parent.is_dir():
        return "stands in no folder"
    try:
        check_writable(path.parent)
    except OSError as error:
        return f"cannot be written ({error.strerror or error})"
    return ""


def _has(path: Path, field: str) -> bool:
    try:
        return path.is_file() and field in parse_json(path)
    except DamagedFile:
        return False


def run(main: Callable[[], None]) -> int:
    """Call `main` and return the exit code."""
    # Set before transformers or datasets are imported: their progress bars and warnings would cut through our lines. Who sits at a
    # terminal sees the hub's downloads, which may last longer than all the rest.
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that wait for each other sleep instead of spinning: the same bits, and where other programs want the CPUs too,
    # tiny-llama's perplexity in two threads takes 0.5 s instead of up to 12.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.lastResort = _Warnings(logging.WARNING)
    if _LIBRARIES not in sys.modules:
        # The million objects that it makes stay to the end. Not looked through for garbage again and again while they are made,
        # nor once more at the exit, they save a third of a short command's time.
        gc.disable()
        wrapt.register_post_import_hook(_keep, _LIBRARIES)
        atexit.register(gc.freeze)
    try:
        return exit_code(main)
    finally:
        gc.enable()


class _Warnings(logging.Handler):
    """What is logged, and what nobody else looks for: a line like every other warning."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"warning: {record.getMessage()}", sys.stderr)


def _keep(_: ModuleType) -> None:
    gc.freeze()
    gc.enable()


# Types of flags, for argparse: what is wrong with a value becomes part of the usage error.


def text(value: str) -> str:
    if not value.strip():
        raise argparse.ArgumentTypeError("is empty; give a value or leave the flag out")
    if value.startswith("~") and os.path.expanduser(value) == value:
        raise argparse.ArgumentTypeError(f"{value!r} has no such home folder; write the whole path")
    return value


def output_file(text: str) -> Path:
    """A file that can be written: what is wrong is said before the measurement, not after it."""
    path = Path(text)
    if hindrance := _hindrance(path.absolute()):
        raise argparse.ArgumentTypeError(f"{text!r} {hindrance}; name a file in an existing folder")
    if path.exists() and not path.is_file():  # a device would be replaced
        raise argparse.ArgumentTypeError(f"{text!r} is no file; name a file in an existing folder")
    return path


def seconds(text: str) -> float:
    value = _number(text)
    if not 1 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 1e9, e.g. 3600")
    return value


def gigabytes(text: str) -> float:
    value = _number(text)
    if not 0.0001 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of gigabytes from 0.0001 to 1e6, e.g. 5")
    return value


def memory(text: str) -> int:
    try:
        return machine.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def task_names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no task; name at least one, e.g. boolq,piqa")
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise argparse.ArgumentTypeError(
                f"{name!r} is not the name of a task; separate names by commas, e.g. boolq,piqa"
            )
    return names
