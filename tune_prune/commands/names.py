"""Names on a command line, checked before torch is imported: that takes seconds, which nobody should wait for to read of a typo."""

from __future__ import annotations

from collections.abc import Iterable

from tune_prune.data import calibration, checks, task_files
from tune_prune.models import catalog


def check_names(models: Iterable[str], data_dir: str | None, tasks: tuple[str, ...] | None, text: str | None) -> None:
    """Raise UserError unless models, --data-dir, tasks and calibration text are there; None: not asked for. Hub ids and tasks of
    the hub are taken as they are."""
    folder = checks.data_dir(data_dir)
    for model in models:
        embedded = catalog.resolve(model).kind == "embedded"
        if tasks is not None:
            task_files.check_tasks(task_files.TaskSource.of(folder, embedded and folder is None), tasks)
        if text is not None:
            calibration.resolve(text, folder, embedded)
