"""`search --status NAME`: how far an experiment is, from its files alone. Reads only, takes no lock, starts nothing.

What is done comes from the ledger, what runs from status.json, which the running search writes every few seconds. Where that
is old, the search was killed or its machine does not reach the storage: that is said, and nothing is guessed.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from tune_prune.analysis.cost import between, duration, gpu_hours
from tune_prune.analysis.input.items import certain_sizes, rows_with_wilson_errors
from tune_prune.analysis.input.rows import frame, plain_values, ranked, without_draw
from tune_prune.analysis.input.study import Model
from tune_prune.analysis.statistics.draws import configurations
from tune_prune.analysis.statistics.rules import score
from tune_prune.core import machine
from tune_prune.core.config import group_labels
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.files import DamagedFile, to_json
from tune_prune.core.ledger import Ledger, read_baselines, readable_passes, required_about, stranger
from tune_prune.core.measures import MEASURES, fraction
from tune_prune.core.records import FAILURES, TrialRecord
from tune_prune.core.store import BASELINES, EXPERIMENT, LEDGER, STATUS, Store, location, open_store
from tune_prune.core.terminal import printable
from tune_prune.core.validation import Count, validated

STALE_S = 35.0  # three of its beats (tuning.observers.status.BEAT_S) are missing
_SHOWN = 8  # trials that run, classes of failure
_NOT_OURS = "delete it, or start another experiment with --name"


def _aware(time: str) -> str:
    try:
        known = datetime.fromisoformat(time).tzinfo is not None
    except ValueError:
        known = False
    if not known:
        raise PydanticCustomError("time", "Input should be a time with its zone")
    return time


_Time = Annotated[str, AfterValidator(_aware)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]


@dataclass
class _Piece:
    model: str
    key: str | None
    config: str
    host: str
    since: str
    after_stage: str


@dataclass
class _Said:
    """Types the fields of status.json that are read here."""

    state: Literal["running", "ended", "stopped"]
    host: str
    pid: Annotated[int, Field(ge=1, lt=2**31)]  # what an operating system takes for one
    started_at: str
    updated_at: _Time
    slots: Count
    running: list[_Piece]
    eta_seconds: tuple[_Seconds, _Seconds] | None
    eta_at: _Time


def shown(name: str, storage_path: str, as_json: bool = False) -> str:
    """Return the status as text or as one JSON object.

    Raises UserError where there is no such experiment, or where its files are damaged.
    """
    found = read(experiment(name, storage_path))
    return to_json(found, plain_ascii=True).rstrip() if as_json else text(found)


def experiment(name: str, storage_path: str) -> Store:
    """Return the store of the experiment of that name in `storage_path`, or in the folder `name`."""
    storage = location(storage_path).expanduser()
    named, below = open_store(location(name).expanduser()), open_store(storage / name.lstrip("/"))
    for store in (below, named):
        if isinstance(store.folder, Path) and not store.folder.is_dir():
            continue
        if store.get(EXPERIMENT) is not None or store.names(LEDGER):
            return store
    others = [place for place in open_store(storage).folders() if open_store(storage / place).has(EXPERIMENT)]
    known = did_you_mean(name, others) if others else "none is there; --storage-path names their folder"
    raise UserError(f"--status names the experiment {name!r}, which is not in {storage_path}; {known}")


def read(store: Store, now: datetime | None = None) -> dict[str, Any]:
    """Return everything that is shown, as plain data (docs/watching.md)."""
    now = now or datetime.now(UTC)
    about, ledger = required_about(store), Ledger(store)
    readable, damaged = ledger.readable()
    others = {record.key: what for record in readable if (what := stranger(record, about))}
    damaged += [DamagedFile(ledger.path(key), what, _NOT_OURS) for key, what in others.items()]
    records = [record for record in readable if record.key not in others]
    baselines, measured_dense = {}, {}
    try:
        measured_dense = read_baselines(store)
    except DamagedFile as error:
        damaged.append(error)
    for label, record in measured_dense.items():
        if what := stranger(record, about):
            damaged.append(DamagedFile(store.path(BASELINES), what, _NOT_OURS))
        else:
            baselines[label] = record
    try:
        search = _said(store)
    except DamagedFile as error:  # only a view
        search, damaged = None, [error, *damaged]
    objective = (about.get("settings") or {}).get("objective")
    told = [str(error) for error in damaged]
    passes, unread = readable_passes(store)
    models = _best(store, records, baselines, objective if objective in MEASURES else "accuracy", told)
    return {
        "experiment": store.folder.name,
        "folder": str(store.folder),
        "state": _state(search, now),
        "search": search,
        "silent_seconds": None if search is None else _age(search["updated_at"], now),
        "trials": _trials(about, records),
        "damaged": [*told, *map(str, unread)],
        "failures": _failures(records),
        "models": models,
        "gpu_hours": gpu_hours([*records, *baselines.values()], passes),
    }


def _said(store: Store) -> dict[str, Any] | None:
    """Read status.json; None where there is none. Raises DamagedFile."""
    step = "delete it: it is only a word of the last start, and the next one that runs a trial writes it anew"
    try:
        values = store.read(STATUS)
        if values is not None:
            validated(_Said, values)
    except DamagedFile as error:
        raise DamagedFile(error.path, error.what, step) from error
    except ValueError as error:
        raise DamagedFile(store.path(STATUS), f"not what a search says of itself ({error})", step) from error
    return values


def _trials(about: Mapping[str, Any], records: Sequence[TrialRecord]) -> dict[str, int | None]:
    """Count the trials that the latest start was to come to (None: not known), those of them that are done, and the others.

    Others are of earlier starts with other search spaces, or of rounds that this one has not come to yet.
    """
    models = about.get("models", {})
    keys = {key for model in models.values() for key in model.get("trial_keys", ())}
    done = [record for record in records if record.key in keys or not keys]
    planned = len(keys) or None
    if about.get("search") == "optuna" and about.get("num_trials") is not None:
        planned = max(int(about["num_trials"]) * len(models), len(done))  # an earlier start may have asked for more
    states = Counter[str](record.status for record in done)
    counts = {state: states[state] for state in _STATES}
    return {"planned": planned, "done": len(done), **counts, "earlier": len(records) - len(done)}


def _state(search: Mapping[str, Any] | None, now: datetime) -> str:
    """Return running, silent, ended, stopped (by an interrupt or an error) or unknown (nothing was said).

    A silent search says that it runs, but has not said so for long, or its process is gone.
    """
    if search is None:
        return "unknown"
    if search["state"] != "running":
        return str(search["state"])
    return "silent" if _age(search["updated_at"], now) > STALE_S or _gone(search) else "running"


def _age(time: str, now: datetime) -> float:
    return max(0.0, (now - datetime.fromisoformat(time)).total_seconds())


def _failures(records: Sequence[TrialRecord]) -> list[dict[str, Any]]:
    """Return a row per class of failure, the most frequent first, with the latest trial that failed so."""
    found: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.status == "failed":
            found.setdefault(getattr(record, "failure", "") or "failed", []).append(record)
    rows = []
    for kind, members in sorted(found.items(), key=lambda entry: -len(entry[1])):
        latest = max(members, key=lambda record: record.started_at)
        example = {"model": latest.model, "config": _name(latest), "reason": latest.reason, "host": latest.host}
        rows.append({"failure": kind, "count": len(members), "latest": example})
    return rows


def _name(record: TrialRecord) -> str:
    return record.config.name if record.config else record.model


def _best(
    store: Store, records: Sequence[TrialRecord], baselines: Mapping[str, TrialRecord], by: str, damaged: list[str]
) -> dict[str, Any]:
    """Return for each group how many trials are complete, and the best configuration `by` one of MEASURES.

    A configuration counts by the mean of its draws, as the search decides at its end. Items that cannot be read are one more of
    what is `damaged`.
    """
    rows = frame(records, store.folder)
    configs = rows["configuration"]
    rows["name"] = [config.name for config in configs]
    complete = rows["success"]
    groups = [config.group(record.model) for config, record in zip(configs, records, strict=True)]
    found: dict[str, Any] = {}
    for group, label in group_labels(group for group, whole in zip(groups, complete, strict=True) if whole).items():
        model = Model(label, rows[[other == group for other in groups]].reset_index(drop=True))
        eligible, _ = configurations(ranked(model.rows), model.rows)
        try:
            eligible = rows_with_wilson_errors(eligible, certain_sizes(model))
        except UserError as error:
            damaged.append(str(error))
        scores = score(eligible, by)
        dense = baselines[group[0]].metrics.get("acc_mean") if group[0] in baselines else None
        found[label] = {
            "complete": int((model.states == "complete").sum()),
            "best": None,
            "by": by,
            "dense_acc_mean": dense,
        }
        if np.isfinite(scores).any():
            best = eligible.iloc[int(np.nanargmax(scores))]
            values = plain_values(best, "key", "draws", "acc_mean", "acc_mean_stderr", "ppl")
            found[label]["best"] = {"config": without_draw(best["configuration"]).name, **values}
    return found


def text(found: Mapping[str, Any]) -> str:
    """Put what `read` gives in words, for a person."""
    trials, search = found["trials"], found["search"]
    planned = "" if trials["planned"] is None else f" of {trials['planned']:,}"
    counts = [f"{trials[state]:,} {words}" for state, words in _STATES.items() if trials[state]]
    lines = [("experiment", f"{found['experiment']} ({found['folder']})"), ("search", _of_search(found))]
    earlier = f"; and {trials['earlier']:,} of earlier starts" if trials["earlier"] else ""
    lines.append(("trials", f"{trials['done']:,}{planned} done{': ' * bool(counts)}{', '.join(counts)}{earlier}"))
    if found["state"] == "running":
        pieces = search["running"]
        for index, piece in enumerate(pieces[:_SHOWN]):
            lines.append(("" if index else "running", _piece(piece)))
        if len(pieces) > _SHOWN:
            hosts = Counter(piece["host"] or "starting" for piece in pieces)
            others = ", ".join(f"{host} {count}" for host, count in hosts.items())
            lines.append(("", f"and {len(pieces) - _SHOWN:,} more; by machine: {others}"))
    for index, failure in enumerate(found["failures"][:_SHOWN]):
        latest = failure["latest"]
        kind = FAILURES.get(failure["failure"], failure["failure"])
        why = f"{kind}: {failure['count']:,}, the latest {latest['model']} {latest['config']} on {latest['host']}"
        lines.append(("" if index else "failed", f"{why}: {_short(latest['reason'])}"))
    lines += [("damaged", error) for error in found["damaged"][:_SHOWN]]
    for index, (label, model) in enumerate(found["models"].items()):
        lines.append(("" if index else "best", _of_model(label, model)))
    if found["state"] == "running" and search["eta_seconds"] is not None:
        passed = _age(search["eta_at"], datetime.now(UTC))
        lines.append(("time left", between([max(0.0, seconds - passed) for seconds in search["eta_seconds"]])))
    lines.append(("GPU-hours", f"{found['gpu_hours']:.2f} so far, of what is finished"))
    return "\n".join(printable(f"{name:<12} {line}") for name, line in lines)


_STATES = {"complete": "complete", "stopped_early": "stopped early", "failed": "failed"}


# As a person says them; the others by their names.
_STAGES = {
    "importance": "sample text",
    "refit": "repair",
    "recovery": "short training",
    "kl": "distance from the original",
    "zero_shot": "a part of the benchmarks",
}


def _of_search(found: Mapping[str, Any]) -> str:
    search, state = found["search"], found["state"]
    if search is None:
        return "not known: none has run trials here, or one of an older version"
    who, silent = f"process {search['pid']} on {search['host']}", duration(found["silent_seconds"])
    if state == "running":
        return f"running, {who}, {search['slots']:,} trials at once, since {search['started_at']}; last heard of {silent} ago"
    if state == "silent":
        if _gone(search):
            return (
                f"killed: {who}, is not there any more, {silent} after it was last heard of; the same command goes on"
            )
        return f"silent for {silent}: {who} was killed, or does not reach this storage; the same command goes on"
    if state == "ended":
        return f"ended {silent} ago, {who}"
    return f"stopped {silent} ago by an interrupt or an error, {who}; the same command goes on"


def _gone(search: Mapping[str, Any]) -> bool:
    """Say whether the search ran on this machine, and does not any more."""
    return search["host"] == platform.node() and not machine.lives(int(search["pid"]))


def _piece(piece: Mapping[str, Any]) -> str:
    stage = piece["after_stage"]
    after = f"{_STAGES.get(stage, stage.replace('_', ' '))} done" if stage else "starting"
    where = f" on {piece['host']}" if piece["host"] else ""
    model = "" if piece["key"] is None else f"{piece['model']} "
    return f"{model}{piece['config']}{where}, {after}, since {piece['since']}"


def _of_model(label: str, model: Mapping[str, Any]) -> str:
    best = model["best"]
    if best is None:
        return f"{label}: {model['complete']:,} trials complete, but no configuration has a finite {model['by']} in all its runs"
    error = best["acc_mean_stderr"]
    known = "" if error is None or not math.isfinite(error) else f" ± {fraction(error)}"
    accuracy = "unknown" if best["acc_mean"] is None else fraction(best["acc_mean"])
    original = "" if model["dense_acc_mean"] is None else f" (original {fraction(model['dense_acc_mean'])})"
    by = "" if model["by"] == "accuracy" else f" by {model['by']}"
    runs = f" (mean of {best['draws']:,} runs)" if best["draws"] > 1 else ""
    return (
        f"{label}: {best['config']}{by}, accuracy {accuracy}{known}{runs}{original}, of {model['complete']:,} complete"
    )


def _short(sentence: str, width: int = 300) -> str:
    line = " ".join(sentence.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"
