"""The records of an experiment: its description (experiment.json), its trials (the ledger, the single source of truth), the dense
models, and costs. Each is sealed: its checksum is of its text and of the name that it stands under.

`Experiment.read(store)` reads all of it, once; `Ledger` reads and writes one record at a time.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

from tune_prune.core.config import ModelRun, trial_key
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile
from tune_prune.core.hashing import sealed, unsealed
from tune_prune.core.records import StageReport, TrialRecord
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

T = TypeVar("T")

_FORGET_COST = "delete it (cost.json counts a little less then), or restore it from a copy"
_FORGET_COSTS = "delete it: the same search command writes it anew"
_NO_OTHER = "restore it from a copy, or start another experiment with --name"


class Ledger:
    """The trials of the experiment in `store`: a file for each that is finished, one for each attempt that is not."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def path(self, key: str) -> Location:
        """Return where the record of a trial is, for messages."""
        failed = self._store.has(_failed(key)) and not self._store.has(_name(key))
        return self._store.path(_failed(key) if failed else _name(key))

    def note(self, record: TrialRecord) -> None:
        """Keep a running record, in place of what was noted of this attempt before: all that is there of one that is killed."""
        put_sealed(self._store, _attempt(record), record.to_dict())

    def write(self, record: TrialRecord) -> TrialRecord:
        """Record a trial that has ended, and return what the ledger holds of it now: a failed record is replaced, a finished one
        never, whichever process comes late. Raises DamagedFile."""
        key = record.key
        if record.status == "failed":
            earlier = self.read(key)
            if earlier is None or earlier.status == "failed":
                # Under a name of its own, so that it replaces nothing of a process that finishes the trial at this moment.
                put_sealed(self._store, _failed(key), record.to_dict())
            return self.read(key) or record
        if not self._store.put_new(_name(key), sealed(_name(key), record.to_dict())):
            record = self._read(_name(key)) or record
        self._store.remove(_failed(key))
        return record

    def forget(self, record: TrialRecord) -> None:
        """Remove what was noted of an attempt whose record is kept."""
        self._store.remove(_attempt(record))

    def read(self, key: str) -> TrialRecord | None:
        """Return the record of a trial that has ended, None if it has none. Raises DamagedFile."""
        failed = self._read(_failed(key))  # first, as it is removed when the finished one is there
        return self._read(_name(key)) or failed

    def records(self, finished: Mapping[str, TrialRecord] | None = None) -> list[TrialRecord]:
        """Return all records of trials that have ended, by key; those known to be `finished` as they are. Raises DamagedFile."""
        return _undamaged(self.readable(finished))

    def readable(
        self, finished: Mapping[str, TrialRecord] | None = None
    ) -> tuple[list[TrialRecord], list[DamagedFile]]:
        """Return the records that can be read, by key, and what is wrong with the others. One request each, many at a time."""
        known = finished or {}
        names = {PurePosixPath(name).name for name in self._store.names(LEDGER) if name.endswith(".json")}
        keys = sorted({name.removesuffix(".json").removesuffix(".failed") for name in names})

        def read(key: str) -> TrialRecord | None:
            if key in known and f"{key}.json" in names:
                return known[key]
            # A failed one may have been finished since they were listed.
            return self.read(key) if f"{key}.failed.json" in names else self._read(_name(key))

        return read_all(self._store, keys, read)

    def attempts(self, ended: Iterable[TrialRecord]) -> list[TrialRecord]:
        """Return the records of attempts that were killed: those noted that are not among the `ended`. Raises DamagedFile."""
        kept = {_attempt(record) for record in ended}
        names = [name for name in self._store.names(ATTEMPTS) if name not in kept]
        return _undamaged(read_all(self._store, names, self._noted))

    def trial_file(self, key: str, name: str) -> bytes | None:
        """Return a file of a trial's folder, or None. Raises DamagedFile for one that its record was not written with."""
        content = self._store.get(f"{TRIALS}/{key}/{name}")
        record = None if content is None else self.read(key)
        known = None if record is None else record.files.get(name)
        if content is not None and known not in (None, file_checksum(content)):
            step = f"delete {self.path(key)} to have that trial run again, or restore the file from a copy"
            raise DamagedFile(self._store.path(f"{TRIALS}/{key}/{name}"), "not the file that its trial wrote", step)
        return content

    def _read(self, name: str) -> TrialRecord | None:
        return read_sealed(self._store, name, TrialRecord.read, "a trial record")

    def _noted(self, name: str) -> TrialRecord | None:
        return read_sealed(self._store, name, TrialRecord.read, "what an attempt at a trial has done", _FORGET_COST)


@dataclass(frozen=True)
class Experiment:
    """All that the folder of an experiment says of it, read once: whoever needs it is handed it on."""

    store: Store
    about: Mapping[str, Any] | None = None  # experiment.json
    baselines: Mapping[str, TrialRecord] = field(default_factory=dict)  # the dense models' records, by label
    records: Sequence[TrialRecord] = ()  # of trials that have ended, by key
    passes: Sequence[Mapping[str, Any]] = ()  # what passes that trials share have cost
    killed: Sequence[TrialRecord] = ()  # attempts that have no other record

    @classmethod
    def read(cls, store: Store) -> Experiment:
        """Read the experiment in `store`; of an empty folder nothing. Raises DamagedFile."""
        return cls(store).refreshed()

    def refreshed(self) -> Experiment:
        """Read what may have changed since, and so no finished record, which never does. Raises DamagedFile."""
        store, ledger, baselines = self.store, Ledger(self.store), read_baselines(self.store)
        records = ledger.records(self.finished)
        killed = ledger.attempts([*records, *baselines.values()])
        return Experiment(store, read_about(store), baselines, records, read_passes(store), killed)

    @property
    def empty(self) -> bool:
        """Says whether there is no result yet."""
        return not self.records and not self.baselines

    @property
    def finished(self) -> dict[str, TrialRecord]:
        """The records of trials that are not tried again, by key."""
        return {record.key: record for record in self.records if record.status != "failed"}


def file_checksum(content: bytes) -> str:
    """Return what a record keeps of each of its trial's files: SHA-256, hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def trial_file(folder: Location, name: str) -> bytes | None:
    """Return `Ledger.trial_file` of the trial whose folder that is; of one that is no folder of an experiment the file as it is."""
    if folder.parent.name != TRIALS:
        return open_store(folder).get(name)
    return Ledger(open_store(folder.parent.parent)).trial_file(folder.name, name)


def write_pass(store: Store, about: Mapping[str, Any], report: StageReport) -> None:
    """Record the cost of a pass over a dense model that trials share; `about`: its model, seq_len, samples."""
    cost = {name: getattr(report, name) for name in ("stage", "duration_s", "tokens", "peak_memory_bytes", "way")}
    put_sealed(store, f"{PASSES}/{report.stage}-{uuid.uuid4().hex[:12]}.json", {**about, **cost})


def read_passes(store: Store) -> list[dict[str, Any]]:
    """Return the cost of all passes, in no order. Raises DamagedFile."""
    return _undamaged(readable_passes(store))


def readable_passes(store: Store) -> tuple[list[dict[str, Any]], list[DamagedFile]]:
    """Return the passes that can be read, in no order, and what is wrong with the others."""
    return read_all(
        store,
        store.names(PASSES),
        lambda name: read_sealed(store, name, json.loads, "the cost of a pass", _FORGET_COST),
    )


def read_baselines(store: Store) -> dict[str, TrialRecord]:
    """Return the dense models' records by label; empty when there are none yet. Raises DamagedFile."""

    def read(content: bytes) -> dict[str, TrialRecord]:
        return {label: TrialRecord.read(values) for label, values in json.loads(content).items()}

    return read_sealed(store, BASELINES, read, "the records of original models") or {}


def write_baselines(store: Store, baselines: Mapping[str, TrialRecord]) -> None:
    put_sealed(store, BASELINES, {label: record.to_dict() for label, record in baselines.items()})


def read_about(store: Store) -> dict[str, Any] | None:
    """Return experiment.json, any of whose fields may be missing; None where there is none. Raises DamagedFile."""
    return read_sealed(store, EXPERIMENT, json.loads, "the description of an experiment", _NO_OTHER)


def required_about(store: Store) -> dict[str, Any]:
    """Return experiment.json of an experiment that has results. Raises UserError where it is missing, DamagedFile."""
    about = read_about(store)
    if about is None:
        raise UserError(
            f"experiment {store.folder} has results but no {EXPERIMENT}, which says how they were measured; restore it from a "
            "copy, or start another experiment with --name"
        )
    return about


def write_about(store: Store, about: Mapping[str, Any]) -> None:
    put_sealed(store, EXPERIMENT, about)


def read_costs(store: Store) -> dict[str, Any] | None:
    """Return cost.json; None where there is none. Raises DamagedFile."""
    return read_sealed(store, COST, json.loads, "an account of costs", _FORGET_COSTS)


def write_costs(store: Store, costs: Mapping[str, Any]) -> None:
    put_sealed(store, COST, costs)


def put_sealed(store: Store, name: str, values: Mapping[str, Any]) -> None:
    """Keep `values` under `name` with their checksum."""
    store.put(name, sealed(name, values))


def read_sealed(store: Store, name: str, read: Callable[[bytes], T], what: str, *step: str) -> T | None:
    """Return what `read` makes of the text under `name`, once its checksum has proven it; None where there is nothing.

    Raises DamagedFile where the checksum does not hold or `read` raises ValueError: it is not `what`, `step` says what to do."""
    path, text = store.path(name), None
    try:
        content = store.get(name)
        text = None if content is None else unsealed(name, content)
        return None if text is None else read(text)
    except DamagedFile as error:
        raise DamagedFile(error.path, error.what, *step) from error
    except ValueError as error:
        raise DamagedFile(path, str(error) if text is None else f"not {what} ({error})", *step) from error


def read_all(store: Store, names: Sequence[str], read: Callable[[str], T | None]) -> tuple[list[T], list[DamagedFile]]:
    """Return what `read` gives of each name that is still there, as many at a time as the store answers, and what is damaged."""

    def read_one(name: str) -> T | DamagedFile | None:
        try:
            return read(name)
        except DamagedFile as error:
            return error

    with ThreadPoolExecutor(store.readers) as pool:
        results = list(pool.map(read_one, names))
    damaged = [result for result in results if isinstance(result, DamagedFile)]
    return [result for result in results if result is not None and not isinstance(result, DamagedFile)], damaged


def _undamaged(results: tuple[list[T], list[DamagedFile]]) -> list[T]:
    values, damaged = results
    if damaged:
        raise damaged[0]
    return values


def _name(key: str) -> str:
    return f"{LEDGER}/{key}.json"


def _failed(key: str) -> str:
    return f"{LEDGER}/{key}.failed.json"


def _attempt(record: TrialRecord) -> str:
    when = "".join(filter(str.isdigit, record.started_at))
    return f"{ATTEMPTS}/{record.key}-{when}-{record.search_id}.json"


def stranger(record: TrialRecord, about: Mapping[str, Any]) -> str:
    """Return how `record`, of a trial or a dense model, differs from the experiment that experiment.json (`about`) describes, as
    the end of "it is ..."; "" where it is one of its own, as far as `about` tells."""
    models = about.get("models")
    if models is None:
        return ""
    if record.model not in models:
        return f"of a model, {record.model}, that {EXPERIMENT} does not name"
    entry, config = models[record.model], record.config
    meaning = entry.get("meaning", {})
    if "run" in entry and {"model", "data"} <= set(meaning):
        data = meaning["data"]
        if config is not None and config.calibration is not None:
            data = meaning.get("texts", {}).get(config.calibration)
        if data is None:
            return f"of another search: {EXPERIMENT} does not name its calibration text"
        key = trial_key(config, meaning["model"], data, validated(ModelRun, entry["run"]))
        if record.key != key:
            return f"of another search: its key would be {key} by the model, data and settings in {EXPERIMENT}"
    for name in ("pruning_ratio", "shape") if config is not None else ():
        value, searched = getattr(config, name), meaning.get(name)
        if searched is not None and value not in (searched if isinstance(searched, list) else [searched]):
            return f"of another search: its {name} is {value}, in {EXPERIMENT} {searched}"
    return ""
