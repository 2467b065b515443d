"""A search before it starts, as plain data: what was asked for, and what it comes to for each model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tune_prune.core.config import ModelRun, PruningConfig
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.store import Location
from tune_prune.models.geometry import Geometry
from tune_prune.models.gguf.files import GgufOrigin
from tune_prune.models.runner.residency import Residency
from tune_prune.tuning.cost import CostEstimate, Workload
from tune_prune.tuning.gpus import Card
from tune_prune.tuning.memory import MemoryPlan
from tune_prune.tuning.resources import Node, TrialResources
from tune_prune.tuning.space import SearchSpace


@dataclass(frozen=True)
class SearchSettings:
    """A search as it is asked for: a field for each option of commands/options.py that is a setting, where it is explained, with
    its default. None: chosen by the plan."""

    models: tuple[str, ...]
    search_space: str = "paper_grid"
    search: str | None = None
    num_trials: int | None = None
    objective: Literal["accuracy", "perplexity", "gold_logprob", "kl"] = "accuracy"
    pruning_ratio: float | None = None
    shape: str | None = None
    align: int | None = None
    revision: str | None = None
    calibration: str | None = None
    data_dir: str | None = None
    trust_tasks: bool = False
    tasks: tuple[str, ...] | None = None
    limit: int | None = None
    perplexity_window: int | None = None
    perplexity_tokens: int | None = None
    seed: int = 0
    seeds: tuple[int, ...] | None = None
    draws: int | None = None
    draws_by: Literal["accuracy", "gold_logprob", "kl"] = "accuracy"
    recover: int | None = None
    dtype: str | None = None
    scheduler: Literal["none", "race", "race-gold", "asha"] = "none"
    kl_filter: bool = False
    memory: int | None = None  # bytes
    gpus_per_trial: float | None = None
    cpus_per_trial: float | None = None
    trial_timeout_s: float | None = None
    inline: bool = False
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
    texts: Mapping[str, str]  # the other calibration texts of its trials -> data fingerprints with those
    targets: Mapping[float, int]  # pruning ratio -> parameters to remove
    trials: tuple[tuple[PruningConfig, str], ...]  # configuration and trial key
    workload: Workload
    ways: tuple[MemoryPlan, ...]  # memory of its largest trial, the fastest way first
    memory: MemoryPlan  # that which was chosen
    gguf: GgufOrigin | None = None  # the file that the model was read from, if it was one
    other_step: str = ""  # what would open leaner ways to its trials
    stored_as: str = "float32"  # what its weights are stored in
    found_as: str = ""  # where the model was found, if that is not clear from its name

    @property
    def shapes(self) -> tuple[str, ...]:
        """Of its trials: "free", "aligned-N", "uniform" or "uniform-N"."""
        return tuple(dict.fromkeys(config.shape for config, _ in self.trials))

    def identity(self) -> dict[str, Any]:
        """What must not change when an experiment goes on."""
        run = self.run
        return {
            "model": self.model_fingerprint,
            "data": self.data_fingerprint,
            "calibration": run.calibration,
            "protocol": run.protocol.to_dict()
            | {"tasks": list(run.protocol.tasks), "slices": list(run.protocol.slices)},
            "seed": run.seed,
            "dtype": run.dtype,
            "pruning_ratio": one_or_list(self.targets),
            "shape": one_or_list(self.shapes),
            **({"texts": dict(self.texts)} if self.texts else {}),
        }


@dataclass(frozen=True)
class Plan:
    """A search that can start."""

    settings: SearchSettings
    space: SearchSpace  # as the file and the flags say together
    experiment_dir: Location  # absolute
    models: tuple[ModelPlan, ...]
    recorded: int  # trials of this plan that the ledger already holds as finished
    resources: TrialResources  # what one trial takes
    slots: int  # trials that run at once
    gpu_names: tuple[str, ...]  # of the GPUs that they run on, each once; none on CPUs
    cost: CostEstimate | None  # of what the ledger lacks; None: no worker of the cluster was free to measure its speed
    nodes: tuple[Node, ...] = ()  # of the cluster; none on this machine alone
    gpu_ways: Mapping[str, Mapping[str, Residency]] = field(
        default_factory=dict
    )  # by kind of GPU and label; of several kinds
    gpu_free: Mapping[str, int] = field(default_factory=dict)  # bytes by kind of GPU, of that with least to use
    without_bfloat16: tuple[str, ...] = ()  # names of GPUs that do not compute in it, each once, where others do
    left: int = 0  # trials that are still to run, at most
    card: Card | None = None  # what it was made for, if not for what is here

    @property
    def objective(self) -> str | None:
        """What the search looks for; None: it tries all."""
        return self.settings.objective if self.space.search == "optuna" else None

    @property
    def trials_per_model(self) -> int:
        return sum(min(self.space.num_trials or size, size) for size in self.group_sizes)

    @property
    def group_sizes(self) -> list[int]:
        """How many configurations there are in each group of a model that is compared in itself."""
        return list(Counter(config.group("") for config, _ in self.models[0].trials).values())

    def searched(self) -> dict[str, Any]:
        """Every hyperparameter's values for experiment.json, those of optional ones by themselves where there is one; none where it
        is the run's."""
        values = self.space.values | {"shape": shapes_of(self.space, self.models)}
        return {
            name: list(found) if HYPERPARAMETERS[name].required else one_or_list(found)
            for name, found in values.items()
            if found != (None,)
        }

    @property
    def memory(self) -> MemoryPlan:
        """Of the largest trial."""
        return max((model.memory for model in self.models), key=lambda memory: memory.total)


def shapes_of(space: SearchSpace, models: Sequence[ModelPlan]) -> tuple[str, ...]:
    """Of all trials; "aligned" where it has another N for each model."""
    first, *others = (model.shapes for model in models)
    return first if all(other == first for other in others) else space.values["shape"]


def one_or_list(values: Iterable[Any]) -> Any:
    """As files have a hyperparameter: its value where it has one, else all of them."""
    found = list(values)
    return found[0] if len(found) == 1 else found
