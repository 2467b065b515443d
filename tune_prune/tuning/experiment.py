"""An experiment's folder: where it is, whether it may go on, and experiment.json, which says what it is.

What the folder holds is read once (`core.ledger.Experiment`) and handed on, from the plan to the last table.
"""

from __future__ import annotations

import errno
import importlib.metadata
import logging
import os
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tune_prune import __version__
from tune_prune.core import artifact_cache
from tune_prune.core.errors import UserError
from tune_prune.core.files import MAX_NAME, DamagedFile
from tune_prune.core.hashing import library_versions, public
from tune_prune.core.kinds import texts_of
from tune_prune.core.ledger import Experiment, Ledger, read_about, required_about, stranger, write_about
from tune_prune.core.store import BASELINES, EXPERIMENT, Location, open_store
from tune_prune.data.sources import perplexity_text_name
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import parse
from tune_prune.tuning.plan import one_or_list

if TYPE_CHECKING:
    from tune_prune.tuning.plan import ModelPlan, Plan

log = logging.getLogger(__name__)

RECORDED_PACKAGES = ("torch", "transformers", "lm_eval", "ray", "optuna", "numpy")
_OTHER_NAME = "start another experiment with --name"


def experiment_dir(storage: Location, name: str | None, default_name: str) -> Location:
    """Return where an experiment is, below `storage`, which is absolute. Creates nothing.

    Raises UserError where it cannot be written.
    """
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
    """Raise UserError where results cannot be written to `folder`. Creates nothing."""
    try:
        open_store(folder).check_writable()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # which has a sentence of its own
            raise
        raise UserError(
            f"results cannot be written to {folder} ({error.strerror or error}); choose another place with --storage-path, "
            "or another --name"
        ) from error


def check(
    held: Experiment, identities: Mapping[str, Mapping[str, Any]], objective: str | None, methods: Iterable[str]
) -> None:
    """Raise UserError where a search may not go on with what the experiment has `held` so far.

    It may not where results are of another identity, which is said with the difference, where the code of one of its
    `methods` is another, or where a result is not of the experiment. `identities` is `ModelPlan.identity()` by label,
    `objective` that of the Plan.
    """
    if held.empty:
        return
    about = required_about(held.store) if held.about is None else held.about
    changes: list[str] = []
    models = _models(held, about)
    for label, new in identities.items():
        old = models.get(label, {}).get("meaning")
        if old is not None:
            known = old.get("texts", {})
            texts = {name: known.get(name, data) for name, data in new.get("texts", {}).items()}
            changes += [f"{label}: {change}" for change in _changes(_flat(old | {"texts": texts}), _flat(new))]
    if objective is not None and (about.get("search") == "optuna" or about.get("recovered")):
        before = (about.get("settings") or {}).get("objective", "accuracy")
        changes += [f"objective was {before}, is {objective}"] if before != objective else []
    if changes:
        raise UserError(
            f"experiment {held.store.folder} was made with other settings ({'; '.join(changes)}); use them again, or "
            f"{_OTHER_NAME}"
        )
    _check_own(held, about)
    _check_code(held, methods)


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    # A bound of tokens, a BOS token, and other calibration texts, are named only where there are some.
    return {"perplexity_tokens": None, "bos": False, "texts": {}, **identity, **identity["protocol"], "protocol": None}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    changed = [name for name in new if old.get(name) != new[name]]
    # A text that was moved is the same by its content. Where a space lists several, records name each by its path.
    if "data" not in changed and not new["texts"]:
        changed = [name for name in changed if name != "calibration"]
    # The data's fingerprint follows the names of tasks and calibration text; by itself it says that files changed.
    if {"tasks", "calibration"} & set(changed):
        changed = [name for name in changed if name != "data"]
    contents = {
        "model": "the model's files have changed",
        "data": "the files of texts or tasks have changed",
        "texts": "the files of calibration texts have changed",
    }

    def shown(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

    return [contents.get(name) or f"{name} was {shown(old.get(name))}, is {shown(new[name])}" for name in changed]


def _check_own(held: Experiment, about: Mapping[str, Any]) -> None:
    """Raise DamagedFile for a result that is not of the experiment which `about` describes."""
    others = [(Ledger(held.store).path(one.key), what) for one in held.records if (what := stranger(one, about))]
    others += [(held.store.path(BASELINES), what) for one in held.baselines.values() if (what := stranger(one, about))]
    if others:
        path, what = others[0]
        more = f"; so are {len(others) - 1} more of the experiment" if len(others) > 1 else ""
        raise DamagedFile(path, what + more, f"delete it, or {_OTHER_NAME}")


def _check_code(held: Experiment, methods: Iterable[str]) -> None:
    """Raise UserError where trials of a method were chosen by other code than it has now."""
    for method in map(load_method, methods):
        made = [one for one in held.finished.values() if one.config and one.config.method == method.name]
        if others := sum(record.method_code not in ("", method.code) for record in made):
            files = [f"{name}.py" for name in (method.name, *sorted({parse(one)[0] for one in method.statistics}))]
            raise UserError(
                f"the code of method {method.name} ({', '.join(files)}) was changed after {others} "
                f"trial{'s' * (others > 1)} of experiment {held.store.folder}; give the changed method another name, or "
                f"{_OTHER_NAME}"
            )


def warn_of_other_versions(held: Experiment) -> None:
    """Log a warning where results of the experiment were made with other versions of libraries than are installed now."""
    results = [one for one in (*held.records, *held.baselines.values()) if one.status != "failed"]
    others = []
    for library in ("torch", "transformers"):
        now = library_versions()[library]
        counts = Counter(public(getattr(record, f"{library}_version")) for record in results)
        others += [f"{counts[then]} with {library} {then} (now {now})" for then in sorted(counts) if then != now]
    if others:
        log.warning(
            "of the results in %s some were made with other versions, which may have given other numbers than those to come: %s; "
            "install these again, or start another experiment with --name",
            *(held.store.folder, ", ".join(others)),
        )


def _models(held: Experiment, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what experiment.json (`about`) says of each model, by label. Raises UserError where it says nothing."""
    models: dict[str, Any] | None = about.get("models")
    if models is None or not all("protocol" in model.get("meaning", {}) for model in models.values()):
        raise UserError(
            f"{held.store.path(EXPERIMENT)} does not describe an experiment; restore it from a copy, or {_OTHER_NAME}"
        )
    return models


def write(held: Experiment, plan: Plan, command: list[str]) -> Experiment:
    """Write experiment.json, which says what the experiment is, and return what the experiment holds with it.

    Models of earlier starts stay in it. Hold `store.lock()`, and have read `held` since: another search may have started
    when the plan was made. Raises as `check` does.
    """
    check(held, plan.identities, plan.objective, plan.space.values["method"])
    models = _models(held, held.about or {"models": {}})
    about = {
        "schema_version": 1,
        "command": command,
        "settings": asdict(plan.settings),
        "search": plan.space.search,
        "num_trials": plan.trials_per_model,
        "space": {"name": plan.space.name} | plan.searched(),
        "models": models
        | {model.run.label: _about(plan, model, models.get(model.run.label, {})) for model in plan.models},
        "versions": {"tune_prune": __version__}
        | {package: importlib.metadata.version(package) for package in RECORDED_PACKAGES},
        "git_commit": git_commit(),
    }
    write_about(held.store, about)
    return replace(held, about=read_about(held.store))  # as whoever reads the file has it


def _about(plan: Plan, model: ModelPlan, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return what experiment.json says of a model, of which `earlier` starts have said that."""
    # Other calibration texts, and methods that read no seed, are those of all starts.
    texts = {**earlier.get("meaning", {}).get("texts", {}), **model.texts}
    seedless = {method for method, reads in plan.space.reads.items() if "seed" not in reads}
    seedless |= {*earlier.get("seedless", ())}
    parts = {text: texts_of(text) for text in (model.run.calibration, *texts)}
    mixtures = {text: dict.fromkeys(mixed, 1 / len(mixed)) for text, mixed in parts.items() if len(mixed) > 1}
    optional = {"mixtures": mixtures, "seedless": sorted(seedless), "gguf": model.gguf and asdict(model.gguf)}
    return {
        "run": model.run.to_dict(),
        "meaning": model.identity() | ({"texts": texts} if texts else {}),
        "geometry": asdict(model.geometry),
        "perplexity_text": perplexity_text_name(model.run),
        "perplexity_window": model.workload.perplexity_window,
        "target_params": one_or_list(model.targets.values()),
        "trial_keys": _names(model, plan.first_trials),
        **{name: values for name, values in optional.items() if values},
    }


def _names(model: ModelPlan, given: Collection[str]) -> dict[str, str]:
    """Return by key the names of a model's trials whose keys are `given`."""
    return {spec.key: spec.config.name for spec in model.trials if spec.key in given}


def write_given(held: Experiment, plan: Plan, given: Collection[str], **decisions: Iterable[Any]) -> Experiment:
    """Add to experiment.json which trials (keys) were given so far, and by which decisions: `draws`, `recovered`.

    Returns what the experiment holds with it."""
    about = dict(held.about or {})
    labels = {model.run.label: model for model in plan.models}
    about["models"] = {
        label: model | ({"trial_keys": _names(labels[label], given)} if label in labels else {})
        for label, model in about["models"].items()
    }
    write_about(held.store, about | {name: [asdict(one) for one in made] for name, made in decisions.items()})
    return replace(held, about=read_about(held.store))


def git_commit() -> str | None:
    """Return the commit of the source checkout this runs from; None when installed elsewhere.

    It ends in "-dirty" for changed files and for code of the package that git does not know, ignored or not.
    """
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
