"""The records of an experiment: its trials (the ledger, the single source of truth: every table is a view of it), the dense
models, and the cost of passes over a model."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from tune_prune.core.files import DamagedFile, to_json
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import BASELINES, LEDGER, PASSES, Location, Store


class Ledger:
    """The finished trials of the experiment in `store`, one file each."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def path(self, key: str) -> Location:
        return self._store.path(_name(key))

    def write(self, record: TrialRecord) -> TrialRecord:
        """Record a trial, and return what the ledger holds of it now: a failed record is replaced, a finished one never, whichever
        process comes late. Raises DamagedFile."""
        name, text = _name(record.key), to_json(record.to_dict())
        if self._store.put_new(name, text):
            return record
        earlier = self.read(record.key)
        if earlier is not None and earlier.status != "failed":
            return earlier
        self._store.put(name, text)
        return record

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

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, about: Mapping[str, Any], report: StageReport) -> None:
        """Record a pass: `about` (model, seq_len, samples) and its cost."""
        cost = {"stage": report.stage, "duration_s": report.duration_s, "tokens": report.tokens, "way": report.way}
        self._store.put(f"{PASSES}/{report.stage}-{uuid.uuid4().hex[:12]}.json", to_json({**about, **cost}))

    def read(self) -> list[dict[str, Any]]:
        """All passes, in no order. Raises DamagedFile."""
        found = (self._store.read(name) for name in self._store.names(PASSES))
        return [values for values in found if values is not None]


def read_baselines(store: Store) -> dict[str, TrialRecord]:
    """The dense models' records by label; empty when there are none yet. Raises DamagedFile."""
    values = store.read(BASELINES) or {}
    return {label: parse_record(record, store.path(BASELINES)) for label, record in values.items()}


def write_baselines(store: Store, baselines: Mapping[str, TrialRecord]) -> None:
    store.put(BASELINES, to_json({label: record.to_dict() for label, record in baselines.items()}))


def parse_record(values: Any, path: Location) -> TrialRecord:
    """The record that `to_json(record.to_dict())` wrote. Raises DamagedFile naming `path` and the field."""
    try:
        return TrialRecord.from_dict(values)
    except ValueError as error:
        raise DamagedFile(path, f"not a trial record ({error})") from error


def _name(key: str) -> str:
    return f"{LEDGER}/{key}.json"
