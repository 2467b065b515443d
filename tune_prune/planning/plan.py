"""A search before it starts, as plain data: what was asked for, and what it comes to for each model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tune_prune.core.config import ModelRun, PruningConfig
from tune_prune.cost_model.estimate import CostEstimate
from tune_prune.cost_model.memory import MemoryPlan
from tune_prune.cost_model.workload import Workload
from tune_prune.models.geometry import Geometry
from tune_prune.planning.search_space import SearchSpace
from tune_prune.tuning.ray_cluster.resources import TrialResources


@dataclass(frozen=True)
class SearchSettings:
    """A search as asked for on the command line. None: chosen by preflight."""

    models: tuple[str, ...]
    search_space: str = "paper_grid"  # a name of search_spaces/ or a YAML file
    search: str | None = None  # grid or optuna; None: as the search space says
    num_trials: int | None = None  # per model, optuna only
    pruning_ratio: float | None = None  # None: the search space's, else 0.2
    shape: str | None = None  # free, aligned or uniform; None: the search space's, else free
    align: int | None = None  # N of the aligned shape; None: as suits the model
    revision: str | None = None
    calibration: str | None = None
    data_dir: str | None = None
    tasks: tuple[str, ...] | None = None
    limit: int | None = None
    seed: int = 0
    dtype: str | None = None
    scheduler: Literal["none", "race", "asha"] = "none"
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
    workload: Workload
    memory: MemoryPlan  # of a trial

    @property
    def shape(self) -> str:
        """Of all its trials: "free", "aligned-N" or "uniform"."""
        return self.trials[0][0].shape

    def identity(self) -> dict[str, Any]:
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
            "shape": self.shape,
        }


@dataclass(frozen=True)
class Plan:
    """A search that can start."""

    settings: SearchSettings
    space: SearchSpace
    search: str  # grid or optuna
    num_trials: int  # per model
    pruning_ratio: float
    shape: str  # "free", "uniform", "aligned-N", or "aligned" where it has another N for each model
    experiment_dir: Path  # absolute
    models: tuple[ModelPlan, ...]
    recorded: int  # trials of this plan that the ledger already holds as finished
    resources: TrialResources  # what one trial takes
    slots: int  # trials that run at once
    cost: CostEstimate | None  # of what the ledger lacks; None: no worker of the cluster was free to measure its speed

    @property
    def total_trials(self) -> int:
        return self.num_trials * len(self.models)

    @property
    def memory(self) -> MemoryPlan:
        """Of the largest trial."""
        return max((model.memory for model in self.models), key=lambda memory: memory.total)
