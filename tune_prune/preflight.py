"""Everything that can be known before a search starts: which trials, of which sizes, on which data, whether it fits.

Loads configs and tokenizers, never weights. Every check that can fail does so here, in one sentence, rather than an hour
into a search.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tune_prune import __version__, calibration, search_space
from tune_prune.config import EvaluationProtocol, ModelRun, PruningConfig, trial_key
from tune_prune.errors import UserError
from tune_prune.evaluation import perplexity, task_files
from tune_prune.ledger import Ledger, atomic_write_text, parse_json, to_json
from tune_prune.models import catalog, loading
from tune_prune.models.geometry import Geometry
from tune_prune.pruning.importance import BATCH_TOKENS, batch_size
from tune_prune.pruning.methods import load_method, method_names
from tune_prune.pruning.selection import budget
from tune_prune.search_space import SearchSpace
from tune_prune.trial import data_fingerprint, task_source, uses_embedded_data

RECORDED_PACKAGES = ("torch", "transformers", "lm_eval", "ray", "optuna", "numpy")


@dataclass(frozen=True)
class SearchSettings:
    """A search as asked for on the command line. None: chosen by preflight."""

    models: tuple[str, ...]
    search_space: str = "paper_grid"  # a name of search_spaces/ or a YAML file
    search: str | None = None  # grid or optuna; None: as the search space says
    num_trials: int | None = None  # per model, optuna only
    pruning_ratio: float | None = None  # None: the search space's, else 0.2
    revision: str | None = None
    calibration: str | None = None
    data_dir: str | None = None
    tasks: tuple[str, ...] | None = None
    limit: int | None = None
    seed: int = 0
    dtype: str | None = None
    scheduler: str = "none"
    gpus_per_trial: float | None = None
    cpus_per_trial: float | None = None
    trial_timeout_s: float | None = None
    address: str | None = None
    storage_path: str = "ray_results"
    name: str | None = None


@dataclass(frozen=True)
class ModelPlan:
    """One model of a search."""

    run: ModelRun
    geometry: Geometry
    model_fingerprint: str
    data_fingerprint: str
    target_params: int  # parameters to remove
    trials: tuple[tuple[PruningConfig, str], ...]  # configuration and trial key
    trial_bytes: int  # estimated memory of a trial, for sharing a GPU

    def meaning(self) -> dict[str, Any]:
        """What must not change when an experiment goes on."""
        run = self.run
        return {
            "model": self.model_fingerprint,
            "data": self.data_fingerprint,
            "calibration": run.calibration,
            "protocol": asdict(run.protocol) | {"tasks": list(run.protocol.tasks), "slices": list(run.protocol.slices)},
            "seed": run.seed,
            "dtype": run.dtype,
            "pruning_ratio": self.trials[0][0].pruning_ratio,
        }


@dataclass(frozen=True)
class Plan:
    """A search that can start."""

    settings: SearchSettings
    space: SearchSpace
    search: str  # grid or optuna
    num_trials: int  # per model
    pruning_ratio: float
    experiment_dir: Path  # absolute
    models: tuple[ModelPlan, ...]

    def recorded(self) -> int:
        """Trials of this plan that the ledger already holds as finished."""
        ledger = Ledger(self.experiment_dir / "ledger")
        records = (ledger.read(key) for model in self.models for _, key in model.trials)
        return sum(record is not None and record.status != "failed" for record in records)


def make_plan(settings: SearchSettings) -> Plan:
    """Check everything and resolve what was left open. Raises UserError; creates nothing."""
    space = search_space.load(settings.search_space, method_names())
    search = settings.search or space.search
    num_trials = _num_trials(settings, space, search)
    ratio = _pruning_ratio(settings, space)
    models = tuple(_plan_model(settings, space, name, ratio) for name in settings.models)
    labels = [model.run.label for model in models]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(
                f"two models are named {label!r}; each --model must be another one, with a folder name of its own"
            )
    experiment_dir = _experiment_dir(settings, space, labels, ratio)
    plan = Plan(settings, space, search, num_trials, ratio, experiment_dir, models)
    _check_same_meaning(plan)
    return plan


def _num_trials(settings: SearchSettings, space: SearchSpace, search: str) -> int:
    if search == "grid":
        if settings.num_trials is not None:
            raise UserError(
                f"--num-trials {settings.num_trials} goes with --search optuna; a grid runs all {space.size} configurations"
            )
        return space.size
    wanted = settings.num_trials or space.num_trials or min(20, space.size)
    if wanted > space.size:
        raise UserError(f"--num-trials is {wanted}, but search space {space.name} has only {space.size} configurations")
    return wanted


def _pruning_ratio(settings: SearchSettings, space: SearchSpace) -> float:
    asked, fixed = settings.pruning_ratio, space.pruning_ratio
    if asked is not None and fixed is not None and asked != fixed:
        raise UserError(f"--pruning-ratio is {asked}, but {space.path} says {fixed}; leave one of them out")
    ratio = asked if asked is not None else fixed if fixed is not None else 0.2
    if not 0 < ratio < 1:
        raise UserError(f"--pruning-ratio is {ratio}; it must lie between 0 and 1, e.g. 0.2 for 20% smaller")
    return ratio


def _plan_model(settings: SearchSettings, space: SearchSpace, name: str, ratio: float) -> ModelPlan:
    source = catalog.resolve(name, settings.revision)
    data_dir = _data_dir(settings.data_dir)
    run = ModelRun(
        model=source.location if source.kind == "folder" else name,
        label=source.label,
        revision=settings.revision if source.kind == "hub" else None,
        calibration=calibration.resolve(settings.calibration, data_dir, source.kind == "embedded"),
        data_dir=data_dir,
        protocol=EvaluationProtocol(limit=settings.limit, seed=settings.seed),
        seed=settings.seed,
        dtype=_dtype(settings),
    )
    if settings.tasks is not None:
        run = replace(run, protocol=replace(run.protocol, tasks=settings.tasks))
    task_files.check(task_source(run), run.protocol.tasks)
    perplexity.fingerprint(data_dir, uses_embedded_data(run))

    config = loading.load_config(source)
    _, geometry = loading.config_geometry(config)
    commit = getattr(config, "_commit_hash", None)
    if source.kind == "hub" and commit:  # workers load what was planned, whatever the branch says by then
        run = replace(run, revision=commit)
    target = budget(geometry, ratio)
    longest = max(space.seq_len)
    if longest > config.max_position_embeddings:
        raise UserError(
            f"taylor_seq_len {longest} of search space {space.name} is beyond the {config.max_position_embeddings} tokens that "
            f"{source.label} can read; use shorter ones, e.g. --search-space smoke"
        )
    if run.calibration not in calibration.HUB_TEXTS:
        tokens = calibration.tokenize(loading.load_tokenizer(source), calibration.load_text(run.calibration))
        for seq_len in space.seq_len:
            calibration.windows(tokens, seq_len, max(space.num_samples), run.seed)
    fingerprints = loading.fingerprint(source, config), data_fingerprint(run)
    trials = tuple((c, trial_key(c, *fingerprints, run)) for c in space.configs(ratio))
    return ModelPlan(
        run=run,
        geometry=geometry,
        model_fingerprint=fingerprints[0],
        data_fingerprint=fingerprints[1],
        target_params=target,
        trials=trials,
        trial_bytes=_trial_bytes(geometry, config, space, ratio, getattr(torch, run.dtype).itemsize),
    )


def _data_dir(asked: str | None) -> str | None:
    if asked is None:
        return None
    path = Path(asked).expanduser()
    if not path.is_dir():
        raise UserError(f"--data-dir {asked} is not a folder; it must hold tasks/ and text/ (docs/data.md)")
    return str(path.resolve())


def _dtype(settings: SearchSettings) -> str:
    if settings.dtype is not None:
        return settings.dtype
    on_gpu = torch.cuda.is_available() or settings.address is not None
    return "bfloat16" if on_gpu and settings.gpus_per_trial != 0 else "float32"


def _trial_bytes(geometry: Geometry, config: Any, space: SearchSpace, ratio: float, itemsize: int) -> int:
    """Peak memory of a trial: the dense weights, then either float32 gradient sums and activations of a gradient pass, or
    the pruned weights and a batch of the evaluation."""
    weights = geometry.total_params * itemsize
    tokens = max(seq_len * batch_size(seq_len, config.vocab_size) for seq_len in space.seq_len)
    # Saved for backward per token and layer: about 34 numbers of hidden size (Korthikanti et al., arXiv:2205.05198).
    activations = tokens * (34 * geometry.hidden_size * geometry.num_layers * itemsize + 3 * 4 * config.vocab_size)
    gradients = geometry.prunable_params * 4 + activations
    evaluation = weights * (1 - ratio) + BATCH_TOKENS * (8 * geometry.hidden_size * itemsize + 4 * config.vocab_size)
    return int(weights + max(gradients, evaluation))


def _experiment_dir(settings: SearchSettings, space: SearchSpace, labels: list[str], ratio: float) -> Path:
    name = settings.name
    if name is None:
        name = f"{'+'.join(labels)}-{ratio * 100:g}-{space.name}" + (
            f"-limit{settings.limit}" if settings.limit else ""
        )
    elif not name or Path(name).name != name or name in (".", ".."):
        raise UserError(
            f"--name is {name!r}; it must be a plain folder name, e.g. my-search (the place is --storage-path)"
        )
    storage = Path(settings.storage_path).expanduser().absolute()
    existing = next(parent for parent in (storage / name, *(storage / name).parents) if parent.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(
            f"results cannot be written to {storage / name} ({error.strerror or error}); choose another place: --storage-path"
        ) from error
    return storage / name


def _check_same_meaning(plan: Plan) -> None:
    """Refuse to add trials of another meaning to an experiment, and say what differs."""
    path = plan.experiment_dir / "experiment.json"
    if not path.is_file():
        return
    before = parse_json(path).get("models", {})
    changes = []
    for model in plan.models:
        old, new = before.get(model.run.label, {}).get("meaning"), model.meaning()
        for name in new if old else ():
            if old.get(name) != new[name]:
                if isinstance(new[name], dict):
                    inner = [key for key in new[name] if old[name].get(key) != new[name][key]]
                    changes += [
                        f"{model.run.label}: {key} was {old[name].get(key)}, is {new[name][key]}" for key in inner
                    ]
                else:
                    changes.append(f"{model.run.label}: {name} was {old.get(name)}, is {new[name]}")
    if changes:
        raise UserError(
            f"experiment {plan.experiment_dir} was made with other settings ({'; '.join(changes)}); use them again, or start "
            "another experiment with --name"
        )


def write_experiment(plan: Plan, command: list[str]) -> None:
    """experiment.json: what the experiment is, for people and for the analysis. Models of earlier starts are kept."""
    path = plan.experiment_dir / "experiment.json"
    models = parse_json(path)["models"] if path.is_file() else {}
    for model in plan.models:
        models[model.run.label] = {
            "run": model.run.to_dict(),
            "meaning": model.meaning(),
            "geometry": asdict(model.geometry),
            "target_params": model.target_params,
            "trial_keys": {key: config.name for config, key in model.trials},
        }
    plan.experiment_dir.mkdir(parents=True, exist_ok=True)
    atomic_write_text(
        path,
        to_json(
            {
                "schema_version": 1,
                "command": command,
                "settings": asdict(plan.settings),
                "search": plan.search,
                "num_trials": plan.num_trials,
                "space": {
                    "name": plan.space.name,
                    "method": list(plan.space.method),
                    "taylor_seq_len": list(plan.space.seq_len),
                    "taylor_num_samples": list(plan.space.num_samples),
                    "pruning_ratio": plan.pruning_ratio,
                    "removal_divisor": plan.space.removal_divisor,
                },
                "models": models,
                "versions": {"tune_prune": __version__}
                | {package: importlib.metadata.version(package) for package in RECORDED_PACKAGES},
                "git_commit": git_commit(),
            }
        ),
    )


def git_commit() -> str | None:
    """The commit of the source checkout this runs from, with "-dirty" for changed files; None when installed elsewhere."""
    folder = Path(__file__).resolve().parents[1]
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


def describe(plan: Plan) -> str:
    """The plan as text for the screen."""
    space, first = plan.space, plan.models[0]
    total = plan.num_trials * len(plan.models)
    done = plan.recorded()
    protocol = first.run.protocol
    items = "all items" if protocol.limit is None else f"at most {protocol.limit} items each"
    lists = [
        f"{len(values)} {name}"
        for name, values in (("methods", space.method), ("seq_len", space.seq_len), ("num_samples", space.num_samples))
    ]
    kinds = {kind for method in space.method for kind in load_method(method).removals}
    if plan.search == "grid":
        search = f"grid over {space.name}: {' x '.join(lists)} = {space.size} configurations a model"
    else:
        search = f"optuna (TPE) on {space.name}: {plan.num_trials} of {space.size} configurations a model"
    rows = [
        (
            "experiment",
            f"{_shown(plan.experiment_dir)}" + (f"  ({done} of {total} trials are in its ledger)" if done else ""),
        ),
        ("search", search + f", {total} trials"),
        (
            "",
            f"method {', '.join(space.method)}; seq_len {_list(space.seq_len)}; num_samples {_list(space.num_samples)}",
        ),
        ("calibration", f"{_shown(first.run.calibration)}, seed {first.run.seed}"),
        (
            "evaluation",
            f"perplexity on {'the embedded text' if uses_embedded_data(first.run) else 'WikiText-2 test'}; "
            f"{len(protocol.tasks)} zero-shot tasks, {items}",
        ),
        ("", ", ".join(protocol.tasks)),
        (
            "stages",
            "importance, removal, pruning, perplexity, zero-shot " + " / ".join(f"{f:.0%}" for f in protocol.slices),
        ),
        (
            "shared",
            f"{len(space.seq_len)} gradient passes and {len(space.seq_len) * len(kinds)} removal passes a model, one per seq_len"
            f"{' and kind' if len(kinds) > 1 else ''}; 1 dense baseline a model",
        ),
        ("resources", _resources(plan)),
    ]
    lines = [f"{name:<12} {text}" for name, text in rows]
    table = [
        (
            "model",
            "parameters",
            f"remove {plan.pruning_ratio:.4g}",
            "removable",
            "layers",
            "KV group",
            "MLP channel",
            "dtype",
        )
    ]
    for model in plan.models:
        g = model.geometry
        table.append(
            (
                model.run.label,
                f"{g.total_params:,}",
                f"{model.target_params:,}",
                f"{g.prunable_params:,}",
                str(g.num_layers),
                f"{max(g.kv_heads)} x {max(g.group_cost):,}",
                f"{max(g.mlp_width)} x {max(g.channel_cost):,}",
                model.run.dtype,
            )
        )
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines.append("")
    lines += [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return "\n".join(lines)


def _resources(plan: Plan) -> str:
    settings = plan.settings
    asked = "auto" if settings.gpus_per_trial is None else f"{settings.gpus_per_trial:g}"
    where = (
        f"cluster {settings.address}"
        if settings.address
        else f"this machine: {os.cpu_count()} CPUs, {torch.cuda.device_count()} GPUs"
    )
    memory = max(model.trial_bytes for model in plan.models)
    size = f"{memory / 2**30:.1f} GiB" if memory >= 2**30 else f"{memory / 2**20:.0f} MiB"
    return f"{where}; GPUs per trial {asked}; estimated memory of a trial {size}; scheduler {settings.scheduler}"


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _shown(path: Path | str) -> str:
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)
