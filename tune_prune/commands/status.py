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
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AwareDatetime, Field

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
    updated_at: AwareDatetime
    slots: Count
    running: list[_Piece]
    eta_seconds: tuple[_Seconds, _Seconds] | None
    eta_at: AwareDatetime


def shown(name: str, storage_path: str, as_json: bool = False) -> str:
    """Return the status as text or as one JSON object.

    Raises UserError where there is no such experiment, or where its files are damaged.
    """
    status = read(experiment(name, storage_path))
    return to_json(status, plain_ascii=True).rstrip() if as_json else text(status)


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
    try:
        baselines = read_baselines(store)
    except DamagedFile as error:
        baselines, damaged = {}, [*damaged, error]
    records: list[TrialRecord] = []
    strangers: list[DamagedFile] = []
    for record in readable:
        if what := stranger(record, about):
            strangers.append(DamagedFile(ledger.path(record.key), what, _NOT_OURS))
        else:
            records.append(record)
    for label, record in list(baselines.items()):
        if what := stranger(record, about):
            strangers.append(DamagedFile(store.path(BASELINES), what, _NOT_OURS))
            del baselines[label]
    try:
        search = _said(store)
    except DamagedFile as error:  # only a view
        search, damaged = None, [error, *damaged]
    objective = (about.get("settings") or {}).get("objective")
    passes, unread = readable_passes(store)
    problems = [str(error) for error in (*damaged, *strangers)]
    models = _best(store, records, baselines, objective if objective in MEASURES else "accuracy", problems)
    return {
        "experiment": store.folder.name,
        "folder": str(store.folder),
        "state": _state(search, now),
        "search": search,
        "silent_seconds": None if search is None else _age(search["updated_at"], now),
        "trials": _trials(about, records),
        "damaged": [*problems, *map(str, unread)],
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
    """Count the trials that the latest start was to come to (None: not known), those of them that are done, and those of earlier
    starts with other search spaces, or of rounds that this one has not come to yet."""
    models = about.get("models", {})
    keys = {key for model in models.values() for key in model.get("trial_keys", ())}
    done = [record for record in records if record.key in keys or not keys]
    planned = len(keys) or None
    if about.get("search") == "optuna" and about.get("num_trials") is not None:
        planned = max(int(about["num_trials"]) * len(models), len(done))  # an earlier start may have asked for more
    counts = {state: sum(record.status == state for record in done) for state in _STATES}
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
    failed = sorted((record for record in records if record.status == "failed"), key=lambda record: record.started_at)
    latest = {record.failure or "failed": record for record in failed}
    rows = []
    for kind, count in Counter(record.failure or "failed" for record in failed).most_common():
        record = latest[kind]
        name = record.config.name if record.config else record.model
        example = {"model": record.model, "config": name, "reason": record.reason, "host": record.host}
        rows.append({"failure": kind, "count": count, "latest": example})
    return rows


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
    groups = [config.group(record.model) for config, record in zip(configs, records, strict=True)]
    best: dict[str, Any] = {}
    with_complete = [group for group, complete in zip(groups, rows["success"], strict=True) if complete]
    for group, label in group_labels(with_complete).items():
        model = Model(label, rows[[other == group for other in groups]].reset_index(drop=True))
        eligible, _ = configurations(ranked(model.rows), model.rows)
        try:
            eligible = rows_with_wilson_errors(eligible, certain_sizes(model))
        except UserError as error:
            damaged.append(str(error))
        scores = score(eligible, by)
        dense = baselines[group[0]].metrics.get("acc_mean") if group[0] in baselines else None
        complete = int((model.states == "complete").sum())
        best[label] = {"complete": complete, "best": None, "by": by, "dense_acc_mean": dense}
        if np.isfinite(scores).any():
            row = eligible.iloc[int(np.nanargmax(scores))]
            values = plain_values(row, "key", "draws", "acc_mean", "acc_mean_stderr", "ppl")
            best[label]["best"] = {"config": without_draw(row["configuration"]).name, **values}
    return best


_STATES = {"complete": "complete", "stopped_early": "stopped early", "failed": "failed"}


def text(status: Mapping[str, Any]) -> str:
    """Put what `read` gives in words, for a person."""
    trials, search, running = status["trials"], status["search"], status["state"] == "running"
    planned = "" if trials["planned"] is None else f" of {trials['planned']:,}"
    counts = [f"{trials[state]:,} {words}" for state, words in _STATES.items() if trials[state]]
    earlier = f"; and {trials['earlier']:,} of earlier starts" if trials["earlier"] else ""
    lines = [
        ("experiment", f"{status['experiment']} ({status['folder']})"),
        ("search", _of_search(status)),
        ("trials", f"{trials['done']:,}{planned} done{': ' * bool(counts)}{', '.join(counts)}{earlier}"),
    ]
    pieces = search["running"] if running else []
    lines += [("running", _piece(piece)) for piece in pieces[:_SHOWN]]
    if len(pieces) > _SHOWN:
        lines.append(("running", f"and {len(pieces) - _SHOWN:,} more"))
    for failure in status["failures"][:_SHOWN]:
        latest, kind = failure["latest"], FAILURES.get(failure["failure"], failure["failure"])
        reason = shorten(latest["reason"], 300, placeholder=" …")
        which = f"the latest {latest['model']} {latest['config']} on {latest['host']}"
        lines.append(("failed", f"{kind}: {failure['count']:,}, {which}: {reason}"))
    lines += [("damaged", error) for error in status["damaged"][:_SHOWN]]
    lines += [("best", _of_model(label, model)) for label, model in status["models"].items()]
    if running and search["eta_seconds"] is not None:
        passed = _age(search["eta_at"], datetime.now(UTC))
        lines.append(("time left", between([max(0.0, seconds - passed) for seconds in search["eta_seconds"]])))
    lines.append(("GPU-hours", f"{status['gpu_hours']:.2f} so far, of what is finished"))
    names = ["" if name == before else name for (before, _), (name, _) in pairwise([("", ""), *lines])]
    return "\n".join(printable(f"{name:<12} {line}") for name, (_, line) in zip(names, lines, strict=True))


def _of_search(status: Mapping[str, Any]) -> str:
    search, state = status["search"], status["state"]
    if search is None:
        return "not known: none has run trials here, or one of an older version"
    who, silent = f"process {search['pid']} on {search['host']}", duration(status["silent_seconds"])
    if state == "running":
        return f"running, {who}, {search['slots']:,} trials at once, since {search['started_at']}; last heard of {silent} ago"
    if state == "ended":
        return f"ended {silent} ago, {who}"
    how = f"stopped {silent} ago by an interrupt or an error, {who}"
    if state == "silent" and _gone(search):
        how = f"killed: {who}, is not there any more, {silent} after it was last heard of"
    elif state == "silent":
        how = f"silent for {silent}: {who} was killed, or does not reach this storage"
    return f"{how}; the same command goes on"


def _gone(search: Mapping[str, Any]) -> bool:
    """Say whether the search ran on this machine, and does not any more."""
    return search["host"] == platform.node() and not machine.lives(int(search["pid"]))


def _piece(piece: Mapping[str, Any]) -> str:
    after = f"{piece['after_stage'].replace('_', ' ')} done" if piece["after_stage"] else "starting"
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
