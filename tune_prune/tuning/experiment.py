"""An experiment's folder: where it is, whether it may go on, and experiment.json, which says what it is."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import logging
import os
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tune_prune import __version__
from tune_prune.core import artifact_cache
from tune_prune.core.errors import UserError
from tune_prune.core.files import MAX_NAME, DamagedFile, to_json
from tune_prune.core.hashing import library_versions, public
from tune_prune.core.kinds import texts_of
from tune_prune.core.ledger import (
    Experiment,
    Ledger,
    read_about,
    read_baselines,
    required_about,
    stranger,
    write_about,
)
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import BASELINES, EXPERIMENT, Location, Store, open_store
from tune_prune.data.sources import perplexity_text_name
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import parse
from tune_prune.tuning.plan import ModelPlan, Plan, one_or_list
from tune_prune.tuning.rounds import Round, Trained, first_given

log = logging.getLogger(__name__)

RECORDED_PACKAGES = ("torch", "transformers", "lm_eval", "ray", "optuna", "numpy")


def experiment_dir(storage: Location, name: str | None, default_name: str) -> Location:
    """Where an experiment is, below `storage`, which is absolute. Raises UserError where it cannot be written; creates nothing."""
    if name is not None and not (re.fullmatch(r"\w[\w .+-]{0,99}", name) and len(os.fsencode(name)) <= MAX_NAME):
        raise UserError(
            f"--name is {name!r}; it must be a plain folder name of at most 100 letters, digits and . + - _ ({MAX_NAME} bytes), "
            "e.g. my-search (its parent folder is --storage-path)"
        )
    if name == artifact_cache.FOLDER:
        raise UserError(f"--name {name} is reserved for the cache that experiments share; choose another name")
    folder = storage / (name or default_name)
    check_writable(folder)
    return folder


def check_writable(folder: Location) -> None:
    """Raise UserError where results cannot be written to `folder`; creates nothing."""
    try:
        open_store(folder).check_writable()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # which has a sentence of its own
            raise
        raise UserError(
            f"results cannot be written to {folder} ({error.strerror or error}); choose another place with --storage-path, "
            "or another --name"
        ) from error


def check_same_identity(
    store: Store,
    identities: Mapping[str, Mapping[str, Any]],
    objective: str | None = None,
    methods: Iterable[str] = (),
) -> list[TrialRecord]:
    """Refuse to add trials of another identity to an experiment that has results, and say what differs; and to go on where a result
    is damaged or is not of the experiment. Gives the records of its trials.

    `identities` is ModelPlan.identity() by label, `objective` that of Plan; `methods` are those of its trials.
    """
    found = Experiment.read(store)
    if found.empty:
        return []
    about, records = required_about(store) if found.about is None else found.about, list(found.records)
    models = _models(store, about)
    changes: list[str] = []
    for label, new in identities.items():
        old = models.get(label, {}).get("meaning")
        if old is not None:
            kept = old.get("texts", {})
            texts = {name: kept.get(name, data) for name, data in new.get("texts", {}).items()}
            changes += [f"{label}: {change}" for change in _changes(_flat(old | {"texts": texts}), _flat(new))]
    if objective is not None and about.get("search") == "optuna":
        before = (about.get("settings") or {}).get("objective", "accuracy")  # from before there were others
        changes += [f"objective was {before}, is {objective}"] if before != objective else []
    if changes:
        raise UserError(
            f"experiment {store.folder} was made with other settings ({'; '.join(changes)}); use them again, or start another "
            "experiment with --name"
        )
    _check_own(store, about, records, found.baselines)
    _check_code(store, records, methods)
    return records


def _check_code(store: Store, records: Iterable[TrialRecord], methods: Iterable[str]) -> None:
    """Raise UserError where trials of a method were chosen by other code than it has now."""
    for method in map(load_method, methods):
        own = [
            record
            for record in records
            if record.config and record.config.method == method.name and record.status != "failed"
        ]
        if others := sum(record.method_code not in ("", method.code) for record in own):
            files = [f"{name}.py" for name in (method.name, *sorted({parse(one)[0] for one in method.statistics}))]
            raise UserError(
                f"the code of method {method.name} ({', '.join(files)}) was changed after {others} "
                f"trial{'s' * (others > 1)} of experiment {store.folder}; give the changed method another name, or start another "
                "experiment with --name"
            )


def warn_of_other_versions(store: Store, records: Iterable[TrialRecord]) -> None:
    """Log a warning where results of the experiment were made with other versions of libraries than are installed now."""
    kept = [record for record in (*records, *read_baselines(store).values()) if record.status != "failed"]
    others = []
    for library in ("torch", "transformers"):  # what records name
        now, found = library_versions()[library], Counter(public(getattr(one, f"{library}_version")) for one in kept)
        others += [f"{found[then]} with {library} {then} (now {now})" for then in sorted(found) if then != now]
    if others:
        log.warning(
            "of the results in %s some were made with other versions, which may have given other numbers than those to come: %s; "
            "install these again, or start another experiment with --name",
            *(store.folder, ", ".join(others)),
        )


def _check_own(
    store: Store, about: Mapping[str, Any], records: Sequence[TrialRecord], baselines: Mapping[str, TrialRecord]
) -> None:
    """Raise DamagedFile for a result that is not of the experiment which `about` describes."""
    others = [(Ledger(store).path(record.key), what) for record in records if (what := stranger(record, about))]
    others += [(store.path(BASELINES), what) for record in baselines.values() if (what := stranger(record, about))]
    if others:
        path, what = others[0]
        more = f"; so are {len(others) - 1} more of the experiment" if len(others) > 1 else ""
        raise DamagedFile(path, what + more, "delete it, or start another experiment with --name")


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    # A bound of tokens is named only where there is one.
    return {
        "perplexity_tokens": None,
        "texts": {},
        **identity,
        **identity["protocol"],
        "protocol": None,
    }


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    changed = [name for name in new if old.get(name) != new[name]]
    # The data's fingerprint follows the names of tasks and calibration text; by itself it says that files changed.
    if {"tasks", "calibration"} & set(changed):
        changed = [name for name in changed if name != "data"]
    contents = {
        "model": "the model's files have changed",
        "data": "the files of texts or tasks have changed",
        "texts": "the files of calibration texts have changed",
    }
    return [contents.get(name) or f"{name} was {_shown(old.get(name))}, is {_shown(new[name])}" for name in changed]


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _models(store: Store, about: Mapping[str, Any]) -> dict[str, Any]:
    """What experiment.json (`about`) says of each model, by label."""
    models: dict[str, Any] | None = about.get("models")
    if models is None or not all("protocol" in model.get("meaning", {}) for model in models.values()):
        raise UserError(
            f"{store.path(EXPERIMENT)} does not describe an experiment; restore it from a copy, or start another experiment "
            "with --name"
        )
    return models


def write(store: Store, plan: Plan, command: list[str]) -> dict[str, Any]:
    """experiment.json: what the experiment is, for people and for the analysis, which it gives, too. Models of earlier starts are
    kept. Hold `store.lock()`: another search may have started since the plan was made."""
    identities = {model.run.label: model.identity() for model in plan.models}
    check_same_identity(store, identities, plan.objective, plan.space.values["method"])
    about = read_about(store) or {"models": {}}
    models = _models(store, about)
    for model in plan.models:
        earlier = models.get(model.run.label, {}).get("meaning", {}).get("texts", {})
        seedless = {method for method, reads in plan.space.reads.items() if "seed" not in reads}
        seedless |= {*models.get(model.run.label, {}).get("seedless", ())}  # those of earlier starts, too
        texts = {"texts": earlier | dict(model.texts)} if earlier or model.texts else {}
        mixtures = _mixtures([model.run.calibration, *texts.get("texts", {})])
        models[model.run.label] = {
            "run": model.run.to_dict(),
            "meaning": model.identity() | texts,
            "geometry": asdict(model.geometry),
            "perplexity_text": perplexity_text_name(model.run),
            "perplexity_window": model.workload.perplexity_window,
            "target_params": one_or_list(model.targets.values()),
            "trial_keys": _trial_keys(plan, model),
            **({"mixtures": mixtures} if mixtures else {}),
            **({"seedless": sorted(seedless)} if seedless else {}),
            **({} if model.gguf is None else {"gguf": asdict(model.gguf)}),
        }
    now: dict[str, Any] = {
        "schema_version": 1,
        "command": command,
        "settings": asdict(plan.settings),
        "search": plan.space.search,
        "num_trials": plan.trials_per_model,
        "space": {"name": plan.space.name} | plan.searched(),
        "models": models,
        "versions": {"tune_prune": __version__}
        | {package: importlib.metadata.version(package) for package in RECORDED_PACKAGES},
        "git_commit": git_commit(),
    }
    write_about(store, now)
    return dict(json.loads(to_json(now)))  # as who reads the file has it


def _mixtures(texts: Iterable[str]) -> dict[str, dict[str, float]]:
    """Of each calibration text that is a mixture, the share of the samples that each of its texts gives."""
    parts = {text: texts_of(text) for text in texts}
    return {text: dict.fromkeys(found, 1 / len(found)) for text, found in parts.items() if len(found) > 1}


def _trial_keys(plan: Plan, model: ModelPlan, given: Collection[str] | None = None) -> dict[str, str]:
    """By key, the names of a model's trials that are `given`; None: that no decision is made for."""
    given = first_given(plan, model) if given is None else given
    return {key: config.name for config, key in model.trials if key in given}


def write_given(
    store: Store, plan: Plan, about: dict[str, Any], given: Collection[str], **decisions: Iterable[Round | Trained]
) -> None:
    """Add to experiment.json (`about`, as `write` gave it) which trials were given so far, and by which decisions: `draws`,
    `recovered`."""
    for model in plan.models:
        about["models"][model.run.label]["trial_keys"] = _trial_keys(plan, model, given)
    about |= {name: [one.to_dict() for one in made] for name, made in decisions.items()}
    write_about(store, about)


def git_commit() -> str | None:
    """The commit of the source checkout this runs from, with "-dirty" for changed files and for code of the package that git does
    not know, ignored or not; None when installed elsewhere."""
    package = Path(__file__).resolve().parents[1]
    if not (package.parent / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        commit = git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
        unknown = git("ls-files", "--others", "*.py")
    except (OSError, subprocess.CalledProcessError):  # no git program, or no commit yet
        return None
    return f"{commit.removesuffix('-dirty')}-dirty" if unknown else commit
