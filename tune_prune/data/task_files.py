"""Sources of the items of zero-shot tasks: the hub, a folder of files, or what ships with the package.

A task-set folder holds `tasks/<name>/<split>.jsonl`, one item a line, and for a task that is not one of the seven
`tasks/<name>/task.yaml`, a definition in lm-eval's format without the data set, which is read as data (task_definition.py)
unless the folder is trusted. The definition of the seven is lm-eval's own. Nothing is cached on disk: items are read from the
file each time, so a changed file is a changed task, without a network and with any number of processes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import yaml

from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.files import utf8_text
from tune_prune.data.task_definition import followed, read_definition
from tune_prune.embedded import tasks_dir
from tune_prune.models import hub

if TYPE_CHECKING:
    from datasets import DatasetDict


class StockTask(NamedTuple):
    """A task that lm-eval defines: its definition below lm_eval/tasks, the split it evaluates, the fields it reads."""

    definition: str
    split: str
    fields: tuple[str, ...]


OWN_DEFINITION = "task.yaml"
STOCK_TASKS = {
    "boolq": StockTask("super_glue/boolq/default.yaml", "validation", ("passage", "question", "label")),
    "piqa": StockTask("piqa/piqa.yaml", "validation", ("goal", "sol1", "sol2", "label")),
    "hellaswag": StockTask(
        "hellaswag/hellaswag.yaml", "validation", ("ctx_a", "ctx_b", "activity_label", "endings", "label")
    ),
    "winogrande": StockTask("winogrande/default.yaml", "validation", ("sentence", "option1", "option2", "answer")),
    "arc_easy": StockTask("arc/arc_easy.yaml", "test", ("question", "choices", "answerKey")),
    "arc_challenge": StockTask("arc/arc_challenge.yaml", "test", ("question", "choices", "answerKey")),
    "openbookqa": StockTask("openbookqa/openbookqa.yaml", "test", ("question_stem", "choices", "answerKey")),
}


@dataclass(frozen=True)
class TaskSource:
    """A source of tasks; `path` is the task-set folder (None for the hub), `trusted` whether its files may run code."""

    kind: Literal["hub", "folder", "embedded"]
    path: str | None = None
    trusted: bool = False

    @classmethod
    def of(cls, data_dir: str | None, embedded: bool, trusted: bool = False) -> TaskSource:
        """Return the source that the settings of a run name; embedded items win over `data_dir`."""
        if embedded:
            return cls("embedded", str(tasks_dir().parent))
        return cls("hub") if data_dir is None else cls("folder", str(Path(data_dir).absolute()), trusted)

    def is_data(self, task: TaskFile) -> bool:
        """Say whether `task` has a definition of the user's that nobody vouches for, so that `read_definition` reads it."""
        return self.kind == "folder" and not self.trusted and task.definition.name == OWN_DEFINITION

    def task_names(self) -> list[str]:
        """Return the tasks that the folder holds, or for the hub the seven (the hub has more)."""
        if self.path is None:
            return sorted(STOCK_TASKS)
        root = Path(self.path) / "tasks"
        return sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []


class TaskFile(NamedTuple):
    """The items of one task and the definition that they are for."""

    name: str
    definition: Path
    split: str
    items: Path
    fields: tuple[str, ...]  # what every item must have


def check_tasks(source: TaskSource, task_names: tuple[str, ...]) -> None:
    """Raise UserError for unknown tasks and for missing files, all of them in one sentence; looks at paths only.

    For the hub nothing can be known without asking it: a name that it lacks is found when the suite is built.
    """
    if source.kind != "hub":
        task_files(source, task_names)


def task_files(source: TaskSource, task_names: tuple[str, ...]) -> list[TaskFile]:
    """Return the files of every task, in the order asked. Raises UserError as `check_tasks` does."""
    assert source.path is not None, "the hub has no files"
    root = Path(source.path) / "tasks"
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; --data-dir must name a folder that holds tasks/<name>/<split>.jsonl")
    files: list[TaskFile] = []
    missing: list[str] = []
    fields: tuple[str, ...]
    for name in dict.fromkeys(task_names):
        folder, stock = root / name, STOCK_TASKS.get(name)
        own_definition = folder / OWN_DEFINITION
        if own_definition.is_file():
            splits = [split for split in ("test", "validation") if (folder / f"{split}.jsonl").is_file()]
            definition, split, fields = own_definition, splits[0] if splits else "test", ()
        elif stock is not None:
            definition, split, fields = stock_definition(name), stock.split, stock.fields
        elif folder.is_dir():
            missing.append(str(own_definition))
            continue
        else:
            available = {*source.task_names(), *(STOCK_TASKS if source.kind == "folder" else ())}
            raise UserError(f"task {name!r} is not in {root}; {did_you_mean(name, available)}")
        items = folder / f"{split}.jsonl"
        if items.is_file():
            files.append(TaskFile(name, definition, split, items, fields))
        else:
            missing.append(str(items))
    if missing:
        raise UserError(f"task files are missing: {', '.join(missing)}; add them or leave their tasks out with --tasks")
    return files


def tasks_fingerprint(source: TaskSource, task_names: tuple[str, ...]) -> str:
    """Return a hash of what the tasks ask, without building them.

    It is of the files' content, of hub tasks of their names and, for the seven, commits, and of lm-eval's version, whose
    definitions render them. Raises UserError as `check_tasks` does.
    """
    parts = [importlib.metadata.version("lm_eval"), *task_names]
    if source.kind == "hub":
        repos = {name: repo for name in task_names if (repo := hub_dataset(name)) is not None}
        # Before they were asked without examples the others were known by their names alone.
        parts[1:] = [
            hub.dataset_identity(name, repos[name]) if name in repos else f"{name}, zero-shot" for name in task_names
        ]
    else:
        for task in task_files(source, task_names):
            own = task.definition.name == OWN_DEFINITION
            files = (task.definition, task.items, *(followed(task.definition)[1] if own else ()))
            parts += [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:16]


def cannot_be_built(task: TaskFile, error: Exception) -> UserError:
    """Return the error for a task whose definition and items make no requests; notes of `error` say in which item."""
    cause = " ".join(", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]).split())
    return UserError(
        f"task {task.name!r} cannot be built from {task.definition} and {task.items} ({cause}); correct the definition or the "
        "questions"
    )


def right_choice(task: str, item: int, gold: Any, choices: Any, by_lm_eval: bool = True) -> int:
    """Return the index of an item's right choice, or -1 where it has several, in a list.

    The list is of indices where lm-eval's own rule judges by it. Raises UserError where one is none of the choices, or a choice is
    no text.
    """
    strange = [choice for choice in choices if not isinstance(choice, str)]
    if strange:
        raise UserError(f"task {task!r}, question {item}: the choice {strange[0]!r:.200} is no text; correct it")
    if isinstance(gold, list):
        if by_lm_eval and (not gold or any(type(one) is not int or not 0 <= one < len(choices) for one in gold)):
            raise UserError(
                f"task {task!r}, question {item}: the right answers {gold!r:.200} are no numbers of its {len(choices)} choices, "
                "which begin with 0; correct them"
            )
        return -1
    index = choices.index(gold) if isinstance(gold, str) and gold in choices else gold
    if not isinstance(index, int) or not 0 <= index < len(choices):
        raise UserError(
            f"task {task!r}, question {item}: the right answer {gold!r:.200} is none of its {len(choices)} choices; correct it"
        )
    return index


def check_characters(task: str, item: int, texts: Iterable[str]) -> None:
    """Raise UserError where a text that an item is asked with has half of a character, which no tokenizer takes."""
    if halves := re.search("[\ud800-\udfff]+", "".join(texts)):
        raise UserError(
            f"task {task!r}, question {item} is asked with {halves[0]!r:.60}, a character in halves; write the whole character, as "
            "UTF-8 (YAML does not join JSON's escapes)"
        )


def plain_definition(task: TaskFile) -> dict[str, Any]:
    """Return the config of lm-eval's ConfigurableTask for a definition that is data. Raises UserError where it is not."""
    read = functools.partial(load_items, str(task.items), task.split, list(task.fields))
    return read_definition(task.definition) | {
        "task": task.name,
        "dataset_path": "json",
        "custom_dataset": read,
        "num_fewshot": 0,
        f"{task.split}_split": task.split,
    }


def write_definition(task: TaskFile, folder: Path) -> Path:
    """Write the lm-eval definition of `task`, whose items `load_items` reads, to `folder`; return its path."""
    definition = {
        "include": str(task.definition),
        "task": task.name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"path": str(task.items), "split": task.split, "fields": list(task.fields)},
        "training_split": None,
        "validation_split": None,
        "test_split": None,
        "fewshot_split": None,
        "num_fewshot": 0,
        f"{task.split}_split": task.split,
    }
    path = folder / f"{task.name}.yaml"
    # PyYAML writes custom tags for objects only, so lm-eval's "!function" is added as text.
    path.write_text(yaml.safe_dump(definition) + f"custom_dataset: !function {__name__}.load_items\n", encoding="utf-8")
    return path


def load_items(path: str, split: str, fields: list[str], **_: Any) -> DatasetDict:
    """Return a task's data set from a file, for lm-eval, which also passes the definition's metadata, not used."""
    from datasets import Dataset, DatasetDict

    return DatasetDict({split: Dataset.from_dict(columns(Path(path), read_items(Path(path), tuple(fields))))})


def read_items(path: Path, fields: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Read the items of a JSON-lines file. Raises UserError, with file and line, for bad JSON or an absent field."""
    items = []
    for number, line in enumerate(utf8_text(path.read_bytes(), path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
            raise UserError(f"{path}, line {number}: not JSON ({error}); one object a line is needed") from error
        if not isinstance(item, dict):
            raise UserError(
                f'{path}, line {number}: {type(item).__name__} where an object is needed, e.g. {{"question": ...}}'
            )
        absent = [field for field in fields if item.get(field) is None]
        if absent:
            raise UserError(
                f"{path}, line {number}: no field {', '.join(absent)}, or null in it; the task needs {', '.join(fields)}"
            )
        items.append(item)
    if not items:
        raise UserError(f"{path} has no questions; one JSON object a line is needed")
    return items


def columns(path: Path, items: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return items by field. Raises UserError where a field has values of types that no column has together."""
    import pyarrow

    by_field = {
        name: [item.get(name) for item in items] for name in dict.fromkeys(name for item in items for name in item)
    }
    try:
        for values in by_field.values():
            pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, UnicodeError) as error:
        raise UserError(
            f"{path}: a field has values of different types, or such as no column holds ({error}); use one type"
        ) from error
    return by_field


def hub_dataset(name: str) -> str | None:
    """Return the repository that lm-eval's definition of one of `STOCK_TASKS` names; None for another task."""
    if name not in STOCK_TASKS:
        return None
    return followed(stock_definition(name))[0].get("dataset_path")


def pinned_definition(name: str, folder: Path) -> Path:
    """Write lm-eval's definition of one of `STOCK_TASKS` to `folder`, pinned to the commit that `tasks_fingerprint` names.

    Returns its path; without a commit that of lm-eval's own file.
    """
    repo = hub_dataset(name)
    commit = None if repo is None else hub.dataset_commit(repo)
    if commit is None:
        return stock_definition(name)
    definition = {"include": str(stock_definition(name)), "task": name, "dataset_kwargs": {"revision": commit}}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(definition), encoding="utf-8")
    return path


def stock_definition(name: str) -> Path:
    """Find lm-eval's own definition of one of `STOCK_TASKS` without importing lm_eval (which takes seconds)."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the package lm_eval is not installed; zero-shot tasks need it, run `pip install lm_eval`")
    return Path(spec.submodule_search_locations[0]) / "tasks" / STOCK_TASKS[name].definition
