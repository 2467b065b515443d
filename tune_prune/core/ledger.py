"""The records of an experiment: its trials (the ledger, the single source of truth: every table is a view of it), the dense
models, and the cost of passes over a model."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tune_prune.core.files import DamagedFile, to_json
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import ATTEMPTS, BASELINES, LEDGER, PASSES, FolderStore


class Ledger:
    """The finished trials of the experiment in `store`, one file each."""

    def __init__(self, store: FolderStore) -> None:
        self._store = store

    def path(self, key: str) -> Path:
        return self._store.path(_name(key))

    def write(self, record: TrialRecord) -> None:
        """Record a trial; a record of the same key is replaced."""
        self._store.put(_name(record.key), to_json(record.to_dict()))

    def read(self, key: str) -> TrialRecord | None:
        """The record of a trial, None if it has none. Raises DamagedFile."""
        values, path = self._store.read(_name(key)), self.path(key)
        if values is None:
            return None
        record = parse_record(values, path)
        if record.key != key:
            raise DamagedFile(path, f"the record of another trial, {record.key!r}")
        return record

    def records(self) -> list[TrialRecord]:
        """All records, by key. Raises DamagedFile."""
        records, damaged = self.readable()
        if damaged:
            raise damaged[0]
        return records

    def readable(self) -> tuple[list[TrialRecord], list[DamagedFile]]:
        """The records that can be read, by key, and what is wrong with the others."""
        records, damaged = [], []
        for name in self._store.names(LEDGER):
            if name.endswith(".json"):
                try:
                    record = self.read(PurePosixPath(name).stem)
                except DamagedFile as error:
                    damaged.append(error)
                else:
                    records += [record] if record is not None else []  # it was removed since the folder was listed
        return records, damaged


class PassLog:
    """The cost of every pass over a dense model that trials share, one file each; kept whichever start of a search made the pass
    and however that start ended."""

    def __init__(self, store: FolderStore) -> None:
        self._store = store

    def write(self, about: Mapping[str, Any], report: StageReport) -> None:
        """Record a pass: `about` (model, seq_len, samples) and its cost."""
        cost = {"stage": report.stage, "duration_s": report.duration_s, "tokens": report.tokens, "way": report.way}
        self._store.put(f"{PASSES}/{report.stage}-{uuid.uuid4().hex[:12]}.json", to_json({**about, **cost}))

    def read(self) -> list[dict[str, Any]]:
        """All passes, in no order. Raises DamagedFile."""
        found = (self._store.read(name) for name in self._store.names(PASSES))
        return [values for values in found if values is not None]


class AttemptLog:
    """What every attempt at a trial or baseline has computed so far, one file each, a stage at a time. Of one that was killed that
    is all there is; of one that ended well the record says the same, and the file goes."""

    def __init__(self, store: FolderStore) -> None:
        self._store = store

    def write(self, record: TrialRecord, unfinished_s: float | None = None) -> None:
        """Note an attempt as far as `record` goes; `unfinished_s`: that it died so many seconds after its last stage, of which its
        own note may say more."""
        noted = self._store.read(_attempt(record)) if unfinished_s is not None else None
        about: dict[str, Any] = {"key": record.key, "model": record.model, "resources": record.resources}
        about |= {"started_at": record.started_at, "search_id": record.search_id}
        stages: list[dict[str, Any]] = (noted or {}).get("stages", [])
        about["stages"] = max(record.stages, stages, key=len)
        self._store.put(_attempt(record), to_json({**about, "unfinished_s": unfinished_s or 0.0}))

    def drop(self, record: TrialRecord) -> None:
        """Its record is kept."""
        self._store.put_all({_attempt(record): None})

    def read(self, kept: Iterable[TrialRecord]) -> list[TrialRecord]:
        """The attempts whose record is not among the `kept`, as records: `elapsed_time_s` has the unfinished stage, too. Raises
        DamagedFile."""
        names = {_attempt(record) for record in kept}
        found = []
        for name in self._store.names(ATTEMPTS):
            values = self._store.read(name) if name not in names else None
            if values is not None:
                seconds = values.pop("unfinished_s", 0.0)
                record = parse_record({**values, "config": {}, "status": "failed"}, self._store.path(name))
                record.elapsed_time_s = seconds + sum(stage["duration_s"] for stage in record.stages)
                found.append(record)
        return found


def read_baselines(store: FolderStore) -> dict[str, TrialRecord]:
    """The dense models' records by label; empty when there are none yet. Raises DamagedFile."""
    values = store.read(BASELINES) or {}
    return {label: parse_record(record, store.path(BASELINES)) for label, record in values.items()}


def write_baselines(store: FolderStore, baselines: Mapping[str, TrialRecord]) -> None:
    store.put(BASELINES, to_json({label: record.to_dict() for label, record in baselines.items()}))


def parse_record(values: Any, path: Path) -> TrialRecord:
    """The record that `to_json(record.to_dict())` wrote. Raises DamagedFile naming `path` and the field."""
    try:
        return TrialRecord.from_dict(values)
    except ValueError as error:
        raise DamagedFile(path, f"not a trial record ({error})") from error


def _name(key: str) -> str:
    return f"{LEDGER}/{key}.json"


def _attempt(record: TrialRecord) -> str:
    when = "".join(filter(str.isdigit, record.started_at))
    return f"{ATTEMPTS}/{record.key}-{when}-{record.search_id}.json"
