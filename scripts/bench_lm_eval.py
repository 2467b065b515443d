"""lm-eval without tune_prune: its tasks from local files, read by its own loader. The other side of the benchmarks."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tune_prune.data.task_files import TaskSource, task_files


def write_definitions(source: TaskSource, tasks: tuple[str, ...], folder: Path) -> TaskManager:
    """Write definitions own_<task> in `folder`: lm-eval's, or the task's own, with the items of `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in task_files(source, tasks):
        definition: dict[str, Any] = {
            "include": str(file.definition),
            "task": f"own_{file.name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {file.split: str(file.items)}, "cache_dir": str(folder / "cache")},
            "training_split": None,
            "validation_split": None,
            "test_split": None,
            f"{file.split}_split": file.split,
        }
        (folder / f"{file.name}.yaml").write_text(yaml.safe_dump(definition), encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def build_tasks(source: TaskSource, tasks: tuple[str, ...], limit: int | None, folder: Path) -> dict[str, Task]:
    """Return lm-eval's tasks by name, with their requests built."""
    manager = write_definitions(source, tasks, folder)
    built = {}
    with quiet():
        for name in tasks:
            (task,) = manager.load([f"own_{name}"])["tasks"].values()
            task.build_all_requests(limit=limit)
            built[name] = task
    return built


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence lm-eval's progress bars and its warnings about models that are handed to it; errors still raise."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def encoded_inputs(lm: HFLM, task: Task, max_length: int) -> set[tuple[int, ...]]:
    """Return the distinct token rows that HFLM forwards for a task: it runs requests with equal inputs once."""
    inputs = set()
    for instance in task.instances:
        context, continuation = lm._encode_pair(*instance.args)
        inputs.add(tuple((context + continuation)[-(max_length + 1) :][:-1]))
    return inputs
