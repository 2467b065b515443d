"""The definition of a task of the user's (task.yaml), read as data: nothing that it says is run.

lm-eval runs what a definition names: functions (`!function`), metrics that the evaluate library loads, scripts of data sets,
templates outside of a sandbox, files that `include` names. Here a definition has plain values only, in fields that are known to
stay plain; what else it says is refused, unless whoever runs the command vouches for it (--trust-tasks).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from tune_prune.core.config import ZERO_SHOT_METRIC
from tune_prune.core.errors import UserError
from tune_prune.core.files import utf8_text

MAX_BYTES = 100_000  # of a file; lm-eval's own are below 10,000

# What lm-eval is given, and of which type. Texts are templates, or names of fields of the items.
USED: dict[str, tuple[type, ...]] = {
    "output_type": (str,),
    "doc_to_text": (str, int),
    "doc_to_target": (str, int, list),
    "doc_to_choice": (str, list, dict),
    "description": (str,),
    "gen_prefix": (str,),
    "target_delimiter": (str,),
    "fewshot_delimiter": (str,),
    "metric_list": (list,),
}
# What lm-eval is not given, as it means nothing here: items come from the file, without examples before them, and nothing is
# generated, filtered or looked for in training data.
UNUSED = {
    "task", "task_alias", "tag", "metadata", "dataset_path", "dataset_name", "num_fewshot", "fewshot_config", "repeats",
    "training_split", "validation_split", "test_split", "fewshot_split", "generation_kwargs", "filter_list",
    "should_decontaminate", "doc_to_decontamination_query",
}  # fmt: skip
_TYPES = {str: "a text", int: "a whole number", list: "a list", dict: "a mapping"}
_METRIC_FIELDS = {"metric", "aggregation", "higher_is_better"}
# Those of lm-eval itself; for another name it loads a program of that name, from a folder or the hub.
METRICS = {
    "acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all", "exact_match", "f1", "mcc", "brier_score", "likelihood",
    "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte",
}  # fmt: skip
OUTPUT_TYPES = ("multiple_choice", "loglikelihood")
_TRUST = "look at what it runs, then give --trust-tasks (trust_tasks=True in Python)"


def read_definition(path: Path) -> dict[str, Any]:
    """Read the fields of USED that a definition sets, with what it includes from its own folder.

    Raises UserError for everything that is not data.
    """
    values = _merged(path, _DataLoader, {}, path.parent.resolve())
    if unknown := sorted(str(name) for name in values if name not in USED and name not in UNUSED):
        raise UserError(
            f"{path} has the field {unknown[0]:.60}, and only fields that are plain data are read (docs/data.md); leave it out, or "
            f"{_TRUST}"
        )
    fields = {name: value for name, value in values.items() if name in USED and value is not None}
    for name, value in fields.items():
        if not isinstance(value, USED[name]) or isinstance(value, bool):
            types = " or ".join(_TYPES[kind] for kind in USED[name])
            raise UserError(f"{path}: {name} is {value!r:.60}; it must be {types}")
    for metric in fields.get("metric_list", ()):
        _check_metric(path, metric)
    return fields


def check_scored(name: str, output_type: str, metrics: Collection[str]) -> None:
    """Raise UserError unless a task of that type and with these metrics is one that is scored here."""
    if output_type not in OUTPUT_TYPES:
        raise UserError(
            f"task {name!r} is of type {output_type}; only multiple_choice and loglikelihood tasks are scored"
        )
    metric = ZERO_SHOT_METRIC.get(name, "acc")
    if not {"acc", metric} <= set(metrics):
        raise UserError(
            f"task {name!r} has no metric {metric}; add `- metric: {metric}` to the metric_list of its definition"
        )


def followed(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return a definition as far as it can be read without running anything, and the other files that it depends on.

    Functions are None. The files are what it includes and, where one of these names functions, the programs of its own folder and
    those that are named elsewhere. Raises UserError for a file that is no YAML.
    """
    files: dict[Path, dict[str, Any]] = {}
    merged = _merged(path.resolve(), _Follower, files)
    texts = {file: _text(file) for file in files}
    programs = sorted(path.parent.rglob("*.py")) if any("!function" in text for text in texts.values()) else []
    for file, text in texts.items():  # lm-eval looks for a function beside the file that names it
        if not file.is_relative_to(path.parent.resolve()):
            modules = dict.fromkeys(re.findall(r"!function\s+['\"]?([\w.]+)\.\w+", text))
            named = [file.parent / f"{module.replace('.', '/')}.py" for module in modules]
            programs += [program for program in named if program.is_file()]
    return merged, [*list(files)[1:], *programs]


def _merged(
    path: Path, loader: type[yaml.SafeLoader], files: dict[Path, dict[str, Any]], folder: Path | None = None
) -> dict[str, Any]:
    """Merge a definition with what it includes, its own fields last, as lm-eval does; `files` gets the fields of each by its path.
    `folder`: raise UserError for a file that is not in it."""
    values = files[path] = _load(path, loader)
    merged: dict[str, Any] = {}
    for other in _included(path, values):
        target = Path(os.path.realpath(other))  # unchanged where links lead nowhere
        if folder is not None and not target.is_relative_to(folder):
            raise UserError(
                f"{path} includes {other}, which is outside its folder; copy that file into it, or {_TRUST}"
            )
        if folder is not None and not target.is_file():
            raise UserError(f"{path} includes {other}, which is not there; correct the definition")
        if target not in files and target.is_file():
            merged |= _merged(target, loader, files, folder)
    return merged | values


def _included(path: Path, values: dict[str, Any]) -> Iterator[Path]:
    """Yield the files that `include` names, which is taken out of `values`."""
    names = values.pop("include", None)
    for name in names if isinstance(names, list) else [] if names is None else [names]:
        if not isinstance(name, str) or not name.isprintable():
            raise UserError(f"{path}: include is {name!r:.60}; it must be the name of a file, or a list of them")
        yield path.parent / name


def _load(path: Path, loader: type[yaml.SafeLoader]) -> dict[str, Any]:
    try:
        values = yaml.load(_text(path), Loader=loader)
    except _Tagged as error:
        tag, line = error.args
        raise UserError(
            f"{path}, line {line}: {tag} would run code, and task files are read as data; {_TRUST}"
        ) from None
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML ({' '.join(str(error).split())}); correct the definition") from error
    if not isinstance(values, dict):
        raise UserError(
            f"{path} is no definition of a task: a mapping with fields such as doc_to_text is needed (docs/data.md)"
        )
    return values


def _text(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise UserError(f"{path} has {size:,} bytes, and a definition has at most {MAX_BYTES:,}; name the right file")
    return utf8_text(path.read_bytes(), path)


def _check_metric(path: Path, metric: Any) -> None:
    if not isinstance(metric, dict) or not isinstance(metric.get("metric"), str):
        raise UserError(f"{path}: metric_list has {metric!r:.60}; each entry must name a metric, as in `- metric: acc`")
    name, strange = metric["metric"], sorted(map(str, metric.keys() - _METRIC_FIELDS))
    if name not in METRICS or strange or not isinstance(metric.get("aggregation", ""), str):
        what = f"the metric {name}" + (f" with {', '.join(strange)}" if strange else "")
        raise UserError(
            f"{path} has {what}, which would run as a program; use acc and acc_norm, with `aggregation` and "
            f"`higher_is_better`, or {_TRUST}"
        )


class _WithoutAliases(yaml.SafeLoader):
    """Refuses aliases, by which a few lines can make a value that nobody can wait for, or one that holds itself."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(
                None, None, "aliases (*) are read with --trust-tasks alone", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)


class _DataLoader(_WithoutAliases):
    """Reads plain data; a tag that would make anything else is refused."""

    def refuse(self, node: yaml.Node) -> None:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        named = f" {node.value}" if isinstance(node, yaml.ScalarNode) and node.value else ""
        raise _Tagged(f"{tag}{named}"[:80], node.start_mark.line + 1)


class _Tagged(Exception):
    """Carries a tag that was refused, and the line where it stands."""


class _Follower(yaml.SafeLoader):
    """Reads definitions that are trusted, or were read as data before, without running what they name by tags."""


_DataLoader.add_constructor(None, _DataLoader.refuse)
_Follower.add_constructor(None, lambda loader, node: None)
