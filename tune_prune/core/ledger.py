"""The ledger: one JSON file per finished trial, the only truth of an experiment; every table is a view of it.

A file is complete or absent: it is written under a temporary name in its folder, flushed to disk and renamed. So
writers may run at the same time on any machine that shares the folder, and a kill at any moment loses at most the trial
that was being written.
"""

from __future__ import annotations

import errno
import json
import math
import os
import uuid
from pathlib import Path
from typing import Any, get_args

from tune_prune.core.errors import UserError
from tune_prune.core.records import StageReport, Status, TrialRecord

_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_json(value: Any) -> str:
    """The text of `value` (plain data or NumPy scalars) as files keep it: sorted keys, indented, a newline at the end.

    JSON has no NaN or infinity: they become the strings "nan", "inf" and "-inf"; `number` turns them back.
    """
    return json.dumps(_plain(value), sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def number(value: Any) -> float | int:
    """The number that `to_json` wrote as `value`; ValueError if it is none."""
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is not a number")


def parse_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`; UserError naming the file if it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise _unreadable(path, "JSON, but not an object {...}")
    return value


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path`: a reader sees the old file or the whole new one, even after a power loss."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` as `atomic_write_text` does."""
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


class Ledger:
    """The finished trials in `folder`, one `<key>.json` each; the folder is created by the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def write(self, record: TrialRecord) -> None:
        """Record a trial; a record of the same key is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self.path(record.key), to_json(record.to_dict()))

    def read(self, key: str) -> TrialRecord | None:
        """The record of a trial, None if it has none; UserError naming the file if it is damaged."""
        path = self.path(key)
        try:
            values = parse_json(path)
        except FileNotFoundError:
            return None
        record = parse_record(values, path)
        if record.key != key:
            raise _unreadable(path, f"the record of another trial, {record.key!r}")
        return record

    def records(self) -> list[TrialRecord]:
        """All records, by key. Temporary files that a killed writer left behind are no records."""
        keys = sorted(path.stem for path in self.folder.glob("*.json") if not path.name.startswith("."))
        return [record for key in keys if (record := self.read(key)) is not None]


class PassLog:
    """What every pass over a model made for all trials has cost, one file each in `folder`: whichever start of a search
    made it, and however that start ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def write(self, what: dict[str, Any], report: StageReport) -> None:
        """Note a pass, for `what` and at which cost."""
        values = what | {"stage": report.stage, "duration_s": report.duration_s, "tokens": report.tokens}
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self.folder / f"{report.stage}-{uuid.uuid4().hex[:12]}.json", to_json(values))

    def read(self) -> list[dict[str, Any]]:
        """All passes, in no order."""
        return [parse_json(path) for path in sorted(self.folder.glob("*.json")) if not path.name.startswith(".")]


def parse_record(values: dict[str, Any], path: Path) -> TrialRecord:
    """The record that `to_json(record.to_dict())` wrote; UserError naming the file `path` if it is none."""
    try:
        record = TrialRecord.from_dict(values)
        if not isinstance(record.key, str) or not isinstance(record.model, str) or not isinstance(record.config, dict):
            raise ValueError("key and model must be text, config an object")
        if record.status not in get_args(Status):
            raise ValueError(f"status {record.status!r} is none of {', '.join(get_args(Status))}")
        record.metrics = {name: number(value) for name, value in record.metrics.items()}
        record.resources = {name: number(value) for name, value in record.resources.items()}
        record.elapsed_time_s = number(record.elapsed_time_s)
        record.stages = [{name: _maybe_number(value) for name, value in stage.items()} for stage in record.stages]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _unreadable(path, f"no trial record ({error})") from error
    return record


def _maybe_number(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if not isinstance(value, (str, int, float, type(None))) and hasattr(value, "item"):
        value = value.item()  # a NumPy scalar
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _unreadable(path: Path, what: str) -> UserError:
    return UserError(f"{path} is {what}; delete it to have that result computed again, or restore it from a copy")


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
