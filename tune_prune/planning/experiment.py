"""An experiment's folder: where it is, whether it may go on, and experiment.json, which says what it is."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tune_prune import __version__
from tune_prune.core import artifact_cache
from tune_prune.core.errors import UserError
from tune_prune.core.files import to_json
from tune_prune.core.store import BASELINES, EXPERIMENT, LEDGER, Location, Store, open_store
from tune_prune.planning.plan import Plan, one_or_list

RECORDED_PACKAGES = ("torch", "transformers", "lm_eval", "ray", "optuna", "numpy")


def experiment_dir(storage: Location, name: str | None, default_name: str) -> Location:
    """Where an experiment is, below `storage`, which is absolute. Raises UserError where it cannot be written; creates nothing."""
    if name is not None and not re.fullmatch(r"\w[\w .+-]{0,99}", name):
        raise UserError(
            f"--name is {name!r}; it must be a plain folder name of at most 100 letters, digits and . + - _, e.g. my-search (its "
            "parent folder is --storage-path)"
        )
    if name == artifact_cache.FOLDER:
        raise UserError(f"--name {name} is reserved for the cache that experiments share; choose another name")
    for folder in (storage / artifact_cache.FOLDER, storage / (name or default_name)):
        try:
            open_store(folder).check_writable()
        except OSError as error:
            raise UserError(
                f"results cannot be written to {folder} ({error.strerror or error}); choose another place with --storage-path, "
                "or another --name"
            ) from error
    return folder


def check_same_identity(store: Store, identities: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to add trials of another identity to an experiment that has results, and say what differs.

    `identities` is ModelPlan.identity() by label.
    """
    if store.get(BASELINES) is None and not store.names(LEDGER):
        return
    models = _models(store)
    changes: list[str] = []
    for label, new in identities.items():
        old = models.get(label, {}).get("meaning")
        if old is not None:
            changes += [f"{label}: {change}" for change in _changes(_flat(old), _flat(new))]
    if changes:
        raise UserError(
            f"experiment {store.folder} was made with other settings ({'; '.join(changes)}); use them again, or start another "
            "experiment with --name"
        )


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    # An experiment from before there were shapes is of the free one.
    return {"shape": "free", **identity, **identity["protocol"], "protocol": None}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    changed = [name for name in new if old.get(name) != new[name]]
    # The data's fingerprint follows the names of tasks and calibration text; by itself it says that files changed.
    if {"tasks", "calibration"} & set(changed):
        changed = [name for name in changed if name != "data"]
    contents = {
        "model": "the model's files have changed, or are over 256 MiB and version 0.2.0 identified them, which read less",
        "data": "the files of texts or tasks have changed",
    }
    return [contents.get(name) or f"{name} was {_shown(old.get(name))}, is {_shown(new[name])}" for name in changed]


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _models(store: Store) -> dict[str, Any]:
    """What experiment.json says of each model, by label; nothing where there is no such file."""
    about = store.read(EXPERIMENT)
    if about is None:
        return {}
    models = about.get("models")
    if not isinstance(models, dict) or not all(
        isinstance(model, dict) and isinstance(model.get("meaning", {}).get("protocol"), dict)
        for model in models.values()
    ):
        raise UserError(
            f"{store.path(EXPERIMENT)} does not describe an experiment; restore it from a copy, or start another experiment "
            "with --name"
        )
    return models


def write(store: Store, plan: Plan, command: list[str]) -> dict[str, Any]:
    """experiment.json: what the experiment is, for people and for the analysis. Models of earlier starts are kept; gives all of
    them, by label. Hold `store.lock()`: another search may have started since the plan was made."""
    check_same_identity(store, {model.run.label: model.identity() for model in plan.models})
    models = _models(store)
    for model in plan.models:
        models[model.run.label] = {
            "run": model.run.to_dict(),
            "meaning": model.identity(),
            "geometry": asdict(model.geometry),
            "perplexity_window": model.workload.perplexity_window,
            "target_params": one_or_list(model.targets.values()),
            "trial_keys": {key: config.name for config, key in model.trials},
        }
    store.put(
        EXPERIMENT,
        to_json(
            {
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
        ),
    )
    return models


def git_commit() -> str | None:
    """The commit of the source checkout this runs from, with "-dirty" for changed files; None when installed elsewhere."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # no git program, or no commit yet
        return None
    return answer.stdout.strip()
