"""The records of an experiment: what it is (experiment.json), its trials (the ledger, the single source of truth: every table is a
view of it), the dense models, the cost of passes over a model and that of all.

Each object is sealed: its checksum is of its content and of the name that it stands under. A trial's record has the checksums of
the trial's files. What a key hashes stands in experiment.json, so that a record shows whether it is of that experiment. Files of
older versions have no checksums, and are read as far as types and keys prove them, where experiment.json has none either.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any

from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile, to_json
from tune_prune.core.hashing import is_sealed, sealed
from tune_prune.core.records import About, Cost, PassCost, StageReport, TrialRecord
from tune_prune.core.store import (
    ATTEMPTS,
    BASELINES,
    COST,
    EXPERIMENT,
    LEDGER,
    PASSES,
    TRIALS,
    Location,
    Store,
    open_store,
)
from tune_prune.core.validation import validated

_FORGET_COST = "delete it (cost.json counts a little less then), or restore it from a copy"
_FORGET_COSTS = "delete it: the same search command writes it anew"
_NO_OTHER = "restore it from a copy, or start another experiment with --name"


class Ledger:
    """The finished trials of the experiment in `store`, one file each."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def path(self, key: str) -> Location:
        """Where the record of a trial is, for messages."""
        failed = self._store.has(_failed(key)) and not self._store.has(_name(key))
        return self._store.path(_failed(key) if failed else _name(key))

    def write(self, record: TrialRecord) -> TrialRecord:
        """Record a trial, and return what the ledger holds of it now: a failed record is replaced, a finished one never, whichever
        process comes late. Raises DamagedFile."""
        key = record.key
        if record.status == "failed":
            earlier = self.read(key)
            if earlier is None or earlier.status == "failed":
                # Under a name of its own, so that it replaces nothing of a process that finishes the trial at this moment.
                self._store.put(_failed(key), sealed_text(_failed(key), record.to_dict()))
            return self.read(key) or record
        text = sealed_text(_name(key), record.to_dict())
        if not self._store.put_new(_name(key), text):
            finished = self._read(key, _name(key))
            if finished is not None and finished.status != "failed":
                return finished
            self._store.put(_name(key), text)  # in place of a failed one of an older version, which has that name
        self._store.remove(_failed(key))
        return record

    def seal(self, record: TrialRecord) -> None:
        """Write the record of an older version as they are written today."""
        if record.status != "failed":  # it is tried again
            self._store.put(_name(record.key), sealed_text(_name(record.key), record.to_dict()))

    def read(self, key: str) -> TrialRecord | None:
        """The record of a trial, None if it has none. Raises DamagedFile."""
        failed = self._read(key, _failed(key))  # first, as it is removed when the finished one is there
        finished = self._read(key, _name(key))
        return failed if finished is None or (failed is not None and finished.status == "failed") else finished

    def _read(self, key: str, name: str) -> TrialRecord | None:
        values, path = self._store.read(name), self._store.path(name)
        if values is None:
            return None
        record = parse_record(values, path)
        if record.key != key:
            raise DamagedFile(path, f"the record of another trial, {record.key!r}")
        if (
            is_sealed(values) or record.status != "failed"
        ):  # older versions' failures stay as they are: they are tried again
            _check_seal(self._store, name, values, path)
        try:
            PruningConfig.from_dict(record.config)
        except (UserError, TypeError) as error:
            raise DamagedFile(path, f"a record whose configuration is not possible ({error})") from error
        return record

    def records(self) -> list[TrialRecord]:
        """All records, by key. Raises DamagedFile."""
        records, damaged = self.readable()
        if damaged:
            raise damaged[0]
        return records

    def readable(self) -> tuple[list[TrialRecord], list[DamagedFile]]:
        """The records that can be read, by key, and what is wrong with the others."""
        names = {PurePosixPath(name).name for name in self._store.names(LEDGER) if name.endswith(".json")}
        keys = sorted({name.removesuffix(".json").removesuffix(".failed") for name in names})

        def found_or_damage(key: str) -> TrialRecord | DamagedFile | None:
            try:
                return self.read(key) if f"{key}.failed.json" in names else self._read(key, _name(key))
            except DamagedFile as error:
                return error

        if self._store.readers == 1:
            found = [found_or_damage(key) for key in keys]
        else:
            with ThreadPoolExecutor(self._store.readers) as pool:
                found = list(pool.map(found_or_damage, keys))
        # A record may have been removed since they were listed.
        records = [one for one in found if isinstance(one, TrialRecord)]
        return records, [one for one in found if isinstance(one, DamagedFile)]

    def trial_file(self, key: str, name: str) -> bytes | None:
        """A file of a trial's folder; None if it is not there. Raises DamagedFile where it is not the one that the trial's record
        was written with."""
        content = self._store.get(f"{TRIALS}/{key}/{name}")
        record = None if content is None else self.read(key)
        known = None if record is None else record.files.get(name)
        if content is not None and known not in (None, file_checksum(content)):
            step = f"delete {self.path(key)} to have that trial run again, or restore the file from a copy"
            raise DamagedFile(self._store.path(f"{TRIALS}/{key}/{name}"), "not the file that its trial wrote", step)
        return content


def file_checksum(content: bytes) -> str:
    """What a record keeps of each of its trial's files: SHA-256, hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def trial_file(folder: Location, name: str) -> bytes | None:
    """`Ledger.trial_file` of the trial whose folder that is; of one that is no folder of an experiment the file as it is."""
    if folder.parent.name != TRIALS:
        return open_store(folder).get(name)
    return Ledger(open_store(folder.parent.parent)).trial_file(folder.name, name)


class PassLog:
    """The cost of every pass over a dense model that trials share, one file each; kept whichever start of a search made the pass
    and however that start ended."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, about: Mapping[str, Any], report: StageReport) -> None:
        """Record a pass: `about` (model, seq_len, samples) and its cost."""
        told = ("stage", "duration_s", "tokens", "peak_memory_bytes", "way")
        cost = {name: getattr(report, name) for name in told}
        name = f"{PASSES}/{report.stage}-{uuid.uuid4().hex[:12]}.json"
        self._store.put(name, sealed_text(name, {**about, **cost}))

    def read(self) -> list[dict[str, Any]]:
        """All passes, in no order. Raises DamagedFile."""
        passes, damaged = self.readable()
        if damaged:
            raise damaged[0]
        return passes

    def readable(self) -> tuple[list[dict[str, Any]], list[DamagedFile]]:
        """The passes that can be read, in no order, and what is wrong with the others."""
        passes, damaged = [], []
        for name in self._store.names(PASSES):
            try:
                if (values := self._read(name)) is not None:
                    passes.append(values)
            except DamagedFile as error:
                damaged.append(error)
        return passes, damaged

    def seal(self) -> None:
        """Write those of older versions as they are written today."""
        for name in self._store.names(PASSES):
            if (values := self._read(name)) is not None:
                self._store.put(name, sealed_text(name, values))

    def _read(self, name: str) -> dict[str, Any] | None:
        return proven(self._store, name, PassCost, "the cost of a pass", _FORGET_COST)


def read_about(store: Store) -> dict[str, Any] | None:
    """experiment.json; None where there is none. Fields may be missing; those that are there are of their types. Raises
    DamagedFile."""
    return proven(store, EXPERIMENT, About, "the description of an experiment", _NO_OTHER)


def required_about(store: Store) -> dict[str, Any]:
    """experiment.json of an experiment that has results. Raises UserError where it is missing, DamagedFile."""
    about = read_about(store)
    if about is None:
        raise UserError(
            f"experiment {store.folder} has results but no {EXPERIMENT}, which says how they were measured; restore it from a "
            "copy, or start another experiment with --name"
        )
    return about


def proven(store: Store, name: str, kind: type, what: str, step: str) -> dict[str, Any] | None:
    """What is kept under `name`, with fields of the types of `kind` and, where it has one, a checksum that holds; None where there
    is nothing. Raises DamagedFile: it is not `what`, and `step` says what to do."""
    path = store.path(name)
    try:
        values = store.read(name)
        if values is None:
            return None
        validated(kind, values)
    except DamagedFile as error:
        raise DamagedFile(error.path, error.what, step) from error
    except ValueError as error:
        raise DamagedFile(path, f"not {what} ({error})", step) from error
    return _check_seal(store, name, values, path, step)


def write_about(store: Store, about: Mapping[str, Any]) -> None:
    store.put(EXPERIMENT, sealed_text(EXPERIMENT, about))


def read_costs(store: Store) -> dict[str, Any] | None:
    """cost.json; None where there is none. Raises DamagedFile."""
    return proven(store, COST, Cost, "an account of costs", _FORGET_COSTS)


def write_costs(store: Store, costs: Mapping[str, Any]) -> None:
    store.put(COST, sealed_text(COST, costs))


class AttemptLog:
    """What every attempt at a trial or baseline has computed so far, one file each, a stage at a time. Of one that was killed that
    is all there is; of one that ended well the record says the same, and the file goes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, record: TrialRecord, unfinished_s: float | None = None) -> None:
        """Note an attempt as far as `record` goes; `unfinished_s`: that it died so many seconds after its last stage, of which its
        own note may say more."""
        name = _attempt(record)
        noted = self._read(name) if unfinished_s is not None else None
        about: dict[str, Any] = {"key": record.key, "model": record.model, "resources": record.resources}
        about |= {"started_at": record.started_at, "search_id": record.search_id}
        stages: list[dict[str, Any]] = (noted or {}).get("stages", [])
        about["stages"] = max(record.stages, stages, key=len)
        self._store.put(name, sealed_text(name, {**about, "unfinished_s": unfinished_s or 0.0}))

    def drop(self, record: TrialRecord) -> None:
        """Its record is kept."""
        self._store.put_all({_attempt(record): None})

    def read(self, kept: Iterable[TrialRecord]) -> list[TrialRecord]:
        """The attempts whose record is not among the `kept`, as records: `elapsed_time_s` has the unfinished stage, too. Raises
        DamagedFile."""
        names = {_attempt(record) for record in kept}
        found = []
        for name in self._store.names(ATTEMPTS):
            values = self._read(name) if name not in names else None
            if values is not None:
                record = parse_record({**values, "config": {}, "status": "failed"}, self._store.path(name))
                record.elapsed_time_s = values["unfinished_s"] + sum(stage["duration_s"] for stage in record.stages)
                found.append(record)
        return found

    def _read(self, name: str) -> dict[str, Any] | None:
        values, path = self._store.read(name), self._store.path(name)
        if values is None or is_sealed(values):
            return None if values is None else _check_seal(self._store, name, values, path, _FORGET_COST)
        raise DamagedFile(path, "not what an attempt at a trial has done (it has no checksum)", _FORGET_COST)


def read_baselines(store: Store) -> dict[str, TrialRecord]:
    """The dense models' records by label; empty when there are none yet. Raises DamagedFile."""
    values = store.read(BASELINES) or {}
    return {label: parse_baseline(store, label, record) for label, record in values.items()}


def parse_baseline(store: Store, label: str, values: Any) -> TrialRecord:
    """One of the records that `write_baselines` wrote. Raises DamagedFile."""
    record = parse_record(values, store.path(BASELINES))
    _check_seal(store, f"{BASELINES}/{label}", values, store.path(BASELINES))
    return record


def write_baselines(store: Store, baselines: Mapping[str, TrialRecord]) -> None:
    records = {label: _sealed(f"{BASELINES}/{label}", record.to_dict()) for label, record in baselines.items()}
    store.put(BASELINES, to_json(records))


def parse_record(values: Any, path: Location) -> TrialRecord:
    """The record that `to_json(record.to_dict())` wrote. Raises DamagedFile naming `path` and the field."""
    try:
        return TrialRecord.from_dict(values)
    except ValueError as error:
        raise DamagedFile(path, f"not a trial record ({error})") from error


def _name(key: str) -> str:
    return f"{LEDGER}/{key}.json"


def _failed(key: str) -> str:
    return f"{LEDGER}/{key}.failed.json"


def _attempt(record: TrialRecord) -> str:
    when = "".join(filter(str.isdigit, record.started_at))
    return f"{ATTEMPTS}/{record.key}-{when}-{record.search_id}.json"


def _sealed(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return sealed(name, json.loads(to_json(values)))


def sealed_text(name: str, values: Mapping[str, Any]) -> str:
    return to_json(_sealed(name, values))


def _check_seal(store: Store, name: str, values: dict[str, Any], path: Location, *step: str) -> dict[str, Any]:
    """`values`, as they were read. Raises DamagedFile where their checksum is another one, and where they have none though the
    experiment has: `tuning.experiment` seals all that older versions have left before experiment.json."""
    if not is_sealed(values):
        if name != EXPERIMENT and is_sealed(store.read(EXPERIMENT) or {}):
            raise DamagedFile(path, f"without a checksum, beside an {EXPERIMENT} that has one", *step)
        return values
    try:
        genuine = sealed(name, values) == values
    except ValueError:  # a number beyond all floats has become infinite
        genuine = False
    if not genuine:
        raise DamagedFile(path, "damaged or of another place (its checksum does not match)", *step)
    return values
