"""What a finished search keeps, and who reads each kind of file: what that says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.search_folders import TINY
from tune_prune.analysis.figures import layer_table
from tune_prune.analysis.input.results_csv import read_results_csv
from tune_prune.analysis.tables import trial_tables
from tune_prune.commands import prune_request, results, status
from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.ledger import Experiment, Ledger
from tune_prune.core.store import FolderStore
from tune_prune.evaluation.divergence import Divergence
from tune_prune.evaluation.perplexity import PerplexityResult
from tune_prune.evaluation.suite import ZeroShotSuite
from tune_prune.pruning.compensation.recovery import Recovery
from tune_prune.pruning.statistics import Need, load_statistic
from tune_prune.tuning import experiment
from tune_prune.tuning.plan import Plan

NAME = "damaged"
ARGV = (*TINY, "--limit", "4", "--tasks", "boolq,piqa", "--gpus-per-trial", "0", "--inline", "--name", NAME)
KINDS = (  # of artifacts
    *("suite", "items_in_calibration", "importance", "removal"),
    *("dense_states", "kl", "perplexity", "zero_shot"),
)
OF_OTHERS = ("input_norms", "recovery", "recovery_state")  # of wanda_sp and of a training, done and begun


@dataclass(frozen=True)
class Finished:
    storage: Path
    plan: Plan

    @property
    def folder(self) -> Path:
        return self.storage / NAME

    def file(self, kind: str, number: int = 0) -> Path:
        """One of the files of that kind."""
        (model,) = self.plan.models
        keys = sorted(spec.key for spec in model.trials)
        best = json.loads((self.folder / "global_best_config.json").read_text())["models"]["tiny-llama"]["key"]
        if kind in (*KINDS, *OF_OTHERS):
            return sorted((self.storage / "artifacts").glob(f"{kind}-[0-9a-f]*"))[number]
        if kind in (
            "pruning_plan.json",
            "gradient_diagnosis.json",
            "pruning_comparison.json",
            "kl.json",
            "items.parquet",
        ):
            if number == 0:
                return self.folder / "trials" / best / kind
            paths = [self.folder / "trials" / key / kind for key in (best, *keys)]
            return next(path for path in paths if path.is_file() and path.read_bytes() != paths[0].read_bytes())
        if kind in ("ledger", "passes", "attempts"):
            return sorted((self.folder / kind).iterdir())[number]
        return self.folder / kind


def plan_again(kept: Finished) -> str:
    """What the next search does before it starts, and what it reads when it does."""
    if FolderStore(kept.folder).get("baseline.json") is None:
        return "to be computed again"
    held = Experiment.read(FolderStore(kept.folder))
    experiment.check(held, kept.plan.identities, None, ())
    return "unseen" if held.finished.keys() == {spec.key for spec in kept.plan.trials} else "to be computed again"


def analysed(kept: Finished) -> str:
    (model,) = results.load(kept.folder).findings.study.models.values()
    problems = [problem for problem in model.problems if problem.where]  # without a place: of the five tasks left out
    return "unseen" if len(model.rows) == 6 and not problems else "left out"


def accounted(kept: Finished) -> str:
    """What a search reads at its begin and its end, for what it has cost."""
    store = FolderStore(kept.folder)
    return "unseen" if len(Ledger(store).attempts(Ledger(store).records())) == 2 else "left out"


def costed(kept: Finished) -> str:
    """What the analysis reads of the costs."""
    found = results.load(kept.folder)
    (model,) = found.findings.study.models.values()
    if found.cost:
        assert trial_tables.costs(found.findings) is not None
        return "unseen"
    return "left out" if str(kept.file("cost.json")) in [problem.where for problem in model.problems] else "lost"


def said(kept: Finished) -> str:
    """What `search --status` reads of the last search."""
    store = FolderStore(kept.folder)
    found = status.read(store)
    named = any(sentence.startswith(f"{kept.file('status.json')} is ") for sentence in found["damaged"])
    return "unseen" if found["search"] is not None and not named else "left out" if named else "lost"


def tabled(kept: Finished) -> str:
    """What `analysis --csv` reads."""
    return "unseen" if len(read_results_csv(kept.file("all_methods_results.csv"), None).rows) == 6 else "lost"


def pruned(kept: Finished) -> str:
    return "computed again" if prune_request.from_config(str(kept.folder), None).plan is None else "unseen"


def drawn(kind: str, column: str) -> Callable[[Finished], str]:
    def draw(kept: Finished) -> str:
        return "unseen" if layer_table(kept.file(kind), [column]) is not None else "left out"

    return draw


def of_worker(kind: str) -> Callable[[Finished], str]:
    """What reads an artifact of that kind, as a worker does."""

    def read(kept: Finished) -> str:
        (model,) = kept.plan.models
        readers: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
            "suite": lambda arrays: ZeroShotSuite.from_arrays(arrays, model.run.protocol),
            "items_in_calibration": lambda arrays: int(arrays["count"]),
            "importance": lambda arrays: load_statistic("taylor").value(arrays, Need("taylor", "", 8)),
            "removal": lambda arrays: load_statistic("block_removal").value(arrays, Need("block_removal", "layer", 1)),
            "dense_states": lambda arrays: arrays["states"],
            "kl": Divergence.from_arrays,
            "perplexity": PerplexityResult.from_arrays,
            "zero_shot": lambda arrays: (arrays["loglikelihoods"], arrays["greedy"]),
            "input_norms": lambda arrays: load_statistic("input_norms").value(arrays, Need("input_norms", "", 8)),
            "recovery": Recovery.from_arrays,
            "recovery_state": dict,
        }
        found = ArtifactStore(kept.storage / "artifacts").get(kind, KEYS[kind], readers[kind])
        return "computed again" if found is None else "unseen"

    return read


KEYS: dict[str, dict[str, Any]] = {}  # of the first artifact of each kind

READ: dict[str, Callable[[Finished], str]] = {
    "ledger": plan_again,
    "baseline.json": plan_again,
    "experiment.json": plan_again,
    "passes": plan_again,
    "attempts": accounted,
    "cost.json": costed,
    "status.json": said,
    "all_methods_results.csv": tabled,
    "items.parquet": analysed,
    "global_best_config.json": pruned,
    "pruning_plan.json": pruned,
    "gradient_diagnosis.json": drawn("gradient_diagnosis.json", "grad_mean"),
    "pruning_comparison.json": drawn("pruning_comparison.json", "params_kept"),
    **{kind: of_worker(kind) for kind in (*KINDS, *OF_OTHERS)},
}
