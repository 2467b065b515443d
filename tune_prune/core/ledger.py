"""The records of an experiment: what it is (experiment.json), its trials (the ledger, the single source of truth: every table is a
view of it), the dense models, the cost of passes over a model and that of all.

Each object is sealed: its checksum is of its text and of the name that it stands under. A trial's record has the checksums of
the trial's files. What a key hashes stands in experiment.json, so that a record shows whether it is of that experiment.

`Experiment.read(store)` reads all of it, once; `Ledger` reads and writes one record at a time.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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
from tune_prune.core.validation import Number, validated

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

    def note(self, record: TrialRecord, unfinished_s: float | None = None) -> None:
        """Keep a record that is running, in place of what was noted of this attempt before.

        It is all that is there of one that is killed.
        `unfinished_s`: it died so many seconds after its last stage, of which its own note may know more stages."""
        name = _attempt(record)
        if unfinished_s is not None:
            earlier = self._noted(name)
            if earlier is not None and len(earlier.stages) > len(record.stages):
                record = earlier
            record = replace(record, elapsed_time_s=unfinished_s + sum(stage.duration_s for stage in record.stages))
        put_sealed(self._store, name, record.to_dict())

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
        """Return all records of trials that have ended, by key; those that are known to be `finished` as they are known. Raises
        DamagedFile."""
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
        """Return a file of a trial's folder; None if it is not there. Raises DamagedFile where it is not the one that the trial's
        record was written with."""
        content = self._store.get(f"{TRIALS}/{key}/{name}")
        record = None if content is None else self.read(key)
        known = None if record is None else record.files.get(name)
        if content is not None and known not in (None, file_checksum(content)):
            step = f"delete {self.path(key)} to have that trial run again, or restore the file from a copy"
            raise DamagedFile(self._store.path(f"{TRIALS}/{key}/{name}"), "not the file that its trial wrote", step)
        return content

    def _read(self, name: str) -> TrialRecord | None:
        record = read_sealed(self._store, name, TrialRecord.read, "a trial record")
        if record is not None and record.key != PurePosixPath(name).name.removesuffix(".json").removesuffix(".failed"):
            raise DamagedFile(self._store.path(name), f"the record of another trial, {record.key!r}")
        return record

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
        ledger, baselines = Ledger(self.store), read_baselines(self.store)
        records = ledger.records(self.finished)
        killed = ledger.attempts([*records, *baselines.values()])
        return replace(
            self,
            about=read_about(self.store),
            baselines=baselines,
            records=records,
            passes=read_passes(self.store),
            killed=killed,
        )

    @property
    def empty(self) -> bool:
        """Whether it has no result yet."""
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
    """Record a pass over a dense model that trials share: `about` (model, seq_len, samples) and its cost.

    It is kept whichever start of a search made it and however that start ended."""
    told = ("stage", "duration_s", "tokens", "peak_memory_bytes", "way")
    name = f"{PASSES}/{report.stage}-{uuid.uuid4().hex[:12]}.json"
    put_sealed(store, name, {**about, **{name: getattr(report, name) for name in told}})


def read_passes(store: Store) -> list[dict[str, Any]]:
    """Return the cost of all passes, in no order. Raises DamagedFile."""
    return _undamaged(readable_passes(store))


def readable_passes(store: Store) -> tuple[list[dict[str, Any]], list[DamagedFile]]:
    """Return the passes that can be read, in no order, and what is wrong with the others."""

    def read(name: str) -> dict[str, Any] | None:
        return read_sealed(store, name, _holding(StageReport), "the cost of a pass", _FORGET_COST)

    return read_all(store, store.names(PASSES), read)


def read_baselines(store: Store) -> dict[str, TrialRecord]:
    """Return the dense models' records by label; empty when there are none yet. Raises DamagedFile."""

    def read(content: bytes) -> dict[str, TrialRecord]:
        return {label: TrialRecord.read(values) for label, values in json.loads(content).items()}

    return read_sealed(store, BASELINES, read, "the records of original models") or {}


def write_baselines(store: Store, baselines: Mapping[str, TrialRecord]) -> None:
    put_sealed(store, BASELINES, {label: record.to_dict() for label, record in baselines.items()})


def read_about(store: Store) -> dict[str, Any] | None:
    """Return experiment.json; None where there is none. Fields may be missing; those that are there are of their types. Raises
    DamagedFile."""
    return read_sealed(store, EXPERIMENT, _holding(_About), "the description of an experiment", _NO_OTHER)


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
    return read_sealed(store, COST, _holding(_Cost), "an account of costs", _FORGET_COSTS)


def write_costs(store: Store, costs: Mapping[str, Any]) -> None:
    put_sealed(store, COST, costs)


def put_sealed(store: Store, name: str, values: Mapping[str, Any]) -> None:
    """Keep `values` under `name` with their checksum."""
    store.put(name, sealed(name, values))


def read_sealed(store: Store, name: str, read: Callable[[bytes], T], what: str, *step: str) -> T | None:
    """Return what `read` makes of the text under `name`, once its checksum has proven it; None where there is nothing.

    Raises DamagedFile where the checksum does not hold or `read` raises ValueError: it is not `what`, `step` says what to do."""
    path = store.path(name)
    try:
        content = store.get(name)
    except DamagedFile as error:
        raise DamagedFile(error.path, error.what, *step) from error
    if content is None:
        return None
    try:
        text = unsealed(name, content)
    except ValueError as error:
        raise DamagedFile(path, str(error), *step) from error
    try:
        return read(text)
    except ValueError as error:
        raise DamagedFile(path, f"not {what} ({error})", *step) from error


def _holding(kind: type) -> Callable[[bytes], dict[str, Any]]:
    """Return a reader of all values of an object that has the fields of `kind`: there may be more."""

    def read(text: bytes) -> dict[str, Any]:
        validated(kind, text)
        return dict(json.loads(text))

    return read


def read_all(store: Store, names: Sequence[str], read: Callable[[str], T | None]) -> tuple[list[T], list[DamagedFile]]:
    """Return what `read` gives of each name that is still there, as many at a time as the store answers, and what is damaged."""

    def one(name: str) -> T | DamagedFile | None:
        try:
            return read(name)
        except DamagedFile as error:
            return error

    if store.readers == 1:
        found = list(map(one, names))
    else:
        with ThreadPoolExecutor(store.readers) as pool:
            found = list(pool.map(one, names))
    damaged = [one for one in found if isinstance(one, DamagedFile)]
    return [one for one in found if one is not None and not isinstance(one, DamagedFile)], damaged


def _undamaged(found: tuple[list[T], list[DamagedFile]]) -> list[T]:
    values, damaged = found
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


@dataclass
class _Cost:
    """The fields of cost.json (ray_results/README.md) that are read; any of them may be missing, and there are more."""

    trials: int = 0
    seconds_per_stage: dict[str, Number] = field(default_factory=dict)
    worker_seconds: Number = 0.0
    evaluation_fraction: Number = 0.0
    gpu_hours: Number = 0.0


@dataclass
class _Meaning:
    """What must not change in an experiment, of one model."""

    model: str = ""  # fingerprint
    data: str = ""  # likewise
    calibration: str = ""
    texts: dict[str, str] = field(default_factory=dict)  # data fingerprints with other calibration texts
    protocol: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    dtype: str = ""
    pruning_ratio: float | list[float] = 0.0
    shape: str | list[str] = ""


@dataclass
class _Sizes:
    mlp_width: list[int]
    total_params: int


@dataclass
class _ModelAbout:
    run: ModelRun = field(default=None)  # type: ignore[assignment]  # may be missing, but not null
    meaning: _Meaning = field(default_factory=_Meaning)
    geometry: _Sizes = field(default_factory=lambda: _Sizes([], 0))
    perplexity_window: int = 0
    target_params: int | list[int] = 0
    trial_keys: dict[str, str] = field(default_factory=dict)


@dataclass
class _About:
    """The types of the fields of experiment.json (ray_results/README.md); any of them may be missing."""

    command: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    search: str = ""
    num_trials: int = 0
    space: dict[str, Any] = field(default_factory=dict)
    models: dict[str, _ModelAbout] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None


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
        own, searched = getattr(config, name), meaning.get(name)
        if searched is not None and own not in (searched if isinstance(searched, list) else [searched]):
            return f"of another search: its {name} is {own}, in {EXPERIMENT} {searched}"
    return ""
