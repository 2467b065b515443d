"""A search before it starts, as plain data: what was asked for, and what it comes to for each model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tune_prune.core import artifact_cache
from tune_prune.core.config import ModelRun, PruningConfig
from tune_prune.core.hyperparameters import HYPERPARAMETERS, RECIPE
from tune_prune.core.ledger import Experiment
from tune_prune.core.store import Location
from tune_prune.models.geometry import Geometry
from tune_prune.models.gguf.files import GgufOrigin
from tune_prune.models.runner.residency import Residency
from tune_prune.tuning.cost import CostEstimate, Workload
from tune_prune.tuning.gpus import Card
from tune_prune.tuning.memory import MemoryPlan
from tune_prune.tuning.resources import Node, TrialResources
from tune_prune.tuning.space import SearchSpace
from tune_prune.tuning.work import TrialSpec


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
    tensor_parallel: int | None = None
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
    trials: tuple[TrialSpec, ...]
    workload: Workload
    ways: tuple[MemoryPlan, ...]  # memory of its largest trial, the fastest way first
    memory: MemoryPlan  # that which was chosen
    gguf: GgufOrigin | None = None  # the file that the model was read from, if it was one
    other_step: str = ""  # what would open leaner ways to its trials
    stored_as: str = "float32"  # what its weights are stored in
    found_as: str = ""  # where the model was found, if that is not clear from its name

    @property
    def configs(self) -> tuple[PruningConfig, ...]:
        """The configurations of its trials."""
        return tuple(spec.config for spec in self.trials)

    @property
    def shapes(self) -> tuple[str, ...]:
        """The shapes of its trials: "free", "aligned-N", "uniform" or "uniform-N", the last three also with "-tpN"."""
        return tuple(dict.fromkeys(config.shape for config in self.configs))

    def identity(self) -> dict[str, Any]:
        """Return what must not change when an experiment goes on."""
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
    experiment_dir: Location  # absolute; on a cluster a bucket, or a folder that every node mounts
    models: tuple[ModelPlan, ...]
    held: Experiment  # what that folder held when the plan was made
    resources: TrialResources = field(default_factory=TrialResources)  # what one trial takes
    slots: int = 1  # trials that run at once
    gpu_names: tuple[str, ...] = ()  # of the GPUs that they run on, each once; none on CPUs
    cost: CostEstimate | None = None  # of what the ledger lacks; None: no worker of the cluster could say its speed
    nodes: tuple[Node, ...] = ()  # of the cluster; none on this machine alone
    gpu_ways: Mapping[str, Mapping[str, Residency]] = field(
        default_factory=dict
    )  # by kind of GPU and label; of several kinds
    gpu_free: Mapping[str, int] = field(default_factory=dict)  # bytes by kind of GPU, of that with least to use
    without_bfloat16: tuple[str, ...] = ()  # names of GPUs that do not compute in it, each once, where others do
    left: int = 0  # trials that are still to run, at most
    card: Card | None = None  # what it was made for, if not for what is here

    @property
    def artifact_dir(self) -> Location:
        """The cache of statistics and measurements, which the experiments of a storage path share."""
        return self.experiment_dir.parent / artifact_cache.FOLDER

    @property
    def trials(self) -> tuple[TrialSpec, ...]:
        """The trials of all models: an adaptive search, --draws and --recover run some of them."""
        return tuple(spec for model in self.models for spec in model.trials)

    @property
    def recorded(self) -> int:
        """Count the trials that the ledger already holds as finished."""
        return len(self.held.finished.keys() & {spec.key for spec in self.trials})

    @property
    def identities(self) -> dict[str, dict[str, Any]]:
        """Return by model's label the settings that must not change when an experiment goes on."""
        return {model.run.label: model.identity() for model in self.models}

    @property
    def objective(self) -> str | None:
        """The measure that decides which trials are run, by Optuna or by --recover; None: all are, whatever is best."""
        decides = self.space.search == "optuna" or self.settings.recover is not None
        return self.settings.objective if decides else None

    @property
    def trials_per_model(self) -> int:
        return sum(min(self.space.num_trials or size, size) for size in self.group_sizes)

    @property
    def group_sizes(self) -> list[int]:
        """Count the configurations in each group of a model that is compared in itself."""
        return list(Counter(config.group("") for config in self.models[0].configs).values())

    @property
    def decides(self) -> bool:
        """Whether some of its trials are run by what others have measured: --draws or --recover."""
        return self.settings.draws is not None or self.settings.recover is not None

    def is_withheld(self, config: PruningConfig) -> bool:
        """Say whether a trial waits until --recover has chosen who is trained."""
        return self.settings.recover is not None and config.recovery != PruningConfig.recovery

    @property
    def first_trials(self) -> set[str]:
        """The keys of the trials that no decision is made for: with --draws those of the first draw, with --recover those
        without training, else all."""
        first = {spec.key for spec in self.trials if not self.is_withheld(spec.config)}
        if self.settings.draws is None:
            return first
        return first & {spec.key for spec in self.trials if spec.config.seed in (None, spec.run.seed)}

    def expected(self, configs: Iterable[PruningConfig]) -> list[PruningConfig]:
        """Return those of a model's configurations that the search runs at most.

        With --recover these are, of the trained ones, so many of each ratio and draw."""
        most, counts, runs = self.settings.recover, Counter[tuple[Any, ...]](), []
        for config in configs:
            if most is not None and self.is_withheld(config):
                trained = (getattr(config, name) for name, row in RECIPE.items() if row.of == "recovery")
                group = config.pruning_ratio, config.seed, *trained
                counts[group] += 1
                if counts[group] > most:
                    continue
            runs.append(config)
        return runs

    def searched(self) -> dict[str, Any]:
        """Return every hyperparameter's values for experiment.json, those of optional ones by themselves where there is one.

        One whose value is the run's is left out."""
        values = self.space.values | {"shape": shapes_of(self.space, self.models)}
        return {
            name: list(listed) if HYPERPARAMETERS[name].required else one_or_list(listed)
            for name, listed in values.items()
            if listed != (None,)
        }

    @property
    def memory(self) -> MemoryPlan:
        """The memory of the largest trial."""
        return max((model.memory for model in self.models), key=lambda memory: memory.total)


def shapes_of(space: SearchSpace, models: Sequence[ModelPlan]) -> tuple[str, ...]:
    """Return the shapes of all trials; "aligned" where it has another N for each model."""
    first, *others = (model.shapes for model in models)
    return first if all(other == first for other in others) else space.values["shape"]


def one_or_list(values: Iterable[Any]) -> Any:
    """Return a hyperparameter as files have it: its value where it has one, else the list of all."""
    listed = list(values)
    return listed[0] if len(listed) == 1 else listed
