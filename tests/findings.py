"""Inputs for the tests of the analysis: the published Llama grid, and an experiment folder with simulated trials.

The simulated outcomes are of known truth: item i of a task is answered by configuration c if
sqrt(rho) z_i + sqrt(1 - rho) e_ic < quantile(p_c), with standard normal z and e. So its accuracy is p_c, and configurations
find the same items hard.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import ndtri

from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.core.config import ZERO_SHOT_TASKS, EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.hashing import digest
from tune_prune.core.ledger import Ledger, write_about, write_baselines, write_costs
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import FolderStore

LAYERS, GROUPS, CHANNELS, PARAMS = 4, 4, 64, 100_000
SEQ_LENS, SAMPLES = (16, 64, 256), (128, 512)
METHODS = {"taylor": -0.03, "layerwise": -0.01, "blockwise": 0.0}  # what each is above the base
TASK_LEVELS = dict(zip(ZERO_SHOT_TASKS, (0.1, 0.1, 0.0, 0.0, 0.05, -0.15, -0.1), strict=True))


def published_folder() -> Path:
    """The folder of the published grids; skips the test where it is not there."""
    data = Path(os.environ.get("TUNE_PRUNE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    folder = data / "published_grids"
    if not (folder / "consolidated_Llama_20" / "all_methods_results.csv").is_file():
        pytest.skip(f"{folder} has no published grid; TUNE_PRUNE_DATA names the folder with published_grids/")
    return folder


def published_findings(rule: str = "accuracy") -> Findings:
    """The findings of the published Llama-3-8B grid (45 runs, no items), under the label Llama."""
    path = published_folder() / "consolidated_Llama_20" / "all_methods_results.csv"
    return find(read_study([], [("Llama", path)]), rule)


def simulated_findings(folder: Path, rule: str = "accuracy", **settings: Any) -> Findings:
    """The findings of `simulated_study(folder, **settings)`."""
    return find(read_study([simulated_study(folder, **settings)], []), rule)


def from_csv(folder: Path, models: dict[str, Callable[[str, int, int], float]], **columns: object) -> Findings:
    """Findings of results files: a function (method, seq_len, samples) -> accuracy per model; NaN is a failed run."""
    paths = []
    for label, accuracy in models.items():
        grid = itertools.product(("taylor", "layerwise", "blockwise"), (16, 32, 64, 128), (4, 128, 512))
        rows = [(*levels, accuracy(*levels)) for levels in grid]
        frame = pd.DataFrame(rows, columns=["method", "seq_len", "num_samples", "acc_mean"])
        frame = frame.assign(pruning_ratio=0.2, **columns)
        frame["output_dir"] = [f"{label}_{index}" for index in frame.index]
        frame["success"] = frame["acc_mean"].notna()
        for task in ZERO_SHOT_TASKS:
            frame[f"acc_{task}"] = frame["acc_mean"]
        paths.append((label, folder / f"{len(paths)}.csv"))
        frame.to_csv(paths[-1][1], index=False)
    return find(read_study([], paths))


def simulated_scores(
    generator: np.random.Generator, accuracies: Sequence[float] | np.ndarray, items: int, rho: float = 0.6
) -> np.ndarray:
    """Outcomes [items, configurations] of one task, 0 or 1, as the module says; `accuracies` are their expectations."""
    shared = generator.standard_normal((items, 1))
    own = generator.standard_normal((items, len(accuracies)))
    return (np.sqrt(rho) * shared + np.sqrt(1 - rho) * own < ndtri(np.asarray(accuracies))).astype(np.float64)


def true_accuracy(config: PruningConfig, model: str) -> float:
    """The expected acc_mean of a simulated trial: seq_len matters most, and not beyond 64 for the first model."""
    seq_len = {16: -0.08, 64: 0.0, 256: 0.0 if model == "alpha" else 0.02}.get(config.seq_len, 0.0)
    samples = 0.005 if config.num_samples >= 512 else 0.0
    return 0.6 + METHODS.get(config.method, 0.0) + seq_len + samples


def simulated_study(
    folder: Path,
    models: Sequence[str] = ("alpha", "beta"),
    items: int = 150,
    seed: int = 0,
    failed: Collection[str] = (),
    stopped: Collection[str] = (),
    with_items: bool = True,
    draws: Mapping[str, int] | None = None,
    draw_sd: float = 0.02,
    trained: Mapping[str, float] | None = None,
) -> Path:
    """Writes an experiment of 3 methods x 3 seq_len x 2 num_samples for each of `models` below `folder`, and returns its path.

    `items`: per task. `failed` and `stopped` (early) name configurations, e.g. taylor-s16-n128, of every model.
    `draws`: of how many draws of calibration samples a configuration is (others: one), each of an accuracy of its own.
    `trained`: which configurations are there with recovery, too, on every draw, and what that gains in accuracy.
    """
    experiment = folder / "simulated"
    experiment.mkdir(parents=True)
    configs = [PruningConfig(*levels) for levels in itertools.product(METHODS, SEQ_LENS, SAMPLES)]
    configs += [replace(config, seed=s) for config in configs for s in range(1, (draws or {}).get(config.name, 1))]
    gains = {config: (trained or {}).get(replace(config, seed=None).name) for config in configs}
    configs += [replace(config, recovery="lora") for config, gain in gains.items() if gain is not None]
    states = dict.fromkeys(failed, "failed") | dict.fromkeys(stopped, "stopped_early")
    protocol = EvaluationProtocol(slices=(0.5, 1.0))
    baselines, sources, passes = {}, {}, []
    for number, model in enumerate(models):
        generator = np.random.default_rng([seed, number])
        truths = np.array([true_accuracy(config, model) for config in configs] + [0.72])  # the dense model is the last
        truths[:-1] += [gains[config.untrained()] if config.recovery != "none" else 0.0 for config in configs]
        if draws:
            truths[:-1] += draw_sd * generator.standard_normal(len(configs))
        scores = {task: simulated_scores(generator, truths + TASK_LEVELS[task], items) for task in ZERO_SHOT_TASKS}
        gradients = {s: _gradient_metrics(generator) for s in itertools.product(SEQ_LENS, SAMPLES)}
        for index, config in enumerate(configs):
            state = states.get(config.name, "complete")
            record = _record(config, model, state, {task: outcomes[:, index] for task, outcomes in scores.items()})
            if state == "complete":
                record.metrics |= gradients[config.seq_len, config.num_samples]
                if with_items:  # of `_items`, whose choices are all as likely
                    record.metrics |= {"gold_logprob_mean": -1.0, "gold_logprob_mean_stderr": 0.0}
                record.metrics["ppl"] = float(20 - 15 * (truths[index] - 0.5) + generator.normal(0, 0.2))
                _write_trial(experiment / "trials" / record.key, record, scores if with_items else {}, index)
            Ledger(FolderStore(experiment)).write(record)
        baselines[model] = _record(None, model, "complete", {task: s[:, -1] for task, s in scores.items()})
        baselines[model].metrics |= {"ppl": 15.0, "params_count": float(PARAMS), "removed_fraction": 0.0}
        run = ModelRun(f"/models/{model}", model, None, "wikitext2", None, protocol, seed, "float32")
        sources[model] = {"run": run.to_dict(), "trial_keys": {_key(config, model): config.name for config in configs}}
        of_pass = {"stage": "importance", "model": model, "num_samples": max(SAMPLES)}
        passes += [of_pass | {"seq_len": s, "duration_s": s / 8, "tokens": s * max(SAMPLES)} for s in SEQ_LENS]
    levels = {"methods": list(METHODS), "seq_len": list(SEQ_LENS), "num_samples": list(SAMPLES)}
    about = {
        "command": ["tune-prune", "search", *(word for model in models for word in ("--model", model))],
        "git_commit": "0123456789ab",
        "models": sources,
        "space": {"name": "simulated", **levels, "pruning_ratio": 0.2, "removal_divisor": 5},
        "versions": {"tune_prune": "0.1.0"},
    }
    counts = {"trials": len(configs) * len(models), "gradient_passes": len(passes), "gpu_hours": 0.0}
    write_baselines(FolderStore(experiment), baselines)
    write_about(FolderStore(experiment), about)
    write_costs(FolderStore(experiment), counts | {"shared_passes": passes})
    return experiment


def _key(config: PruningConfig | None, model: str) -> str:
    return digest([_values(config), model])


def _values(config: PruningConfig | None) -> dict[str, Any]:
    return {} if config is None else config.to_dict()


def _record(config: PruningConfig | None, model: str, state: Any, outcomes: Mapping[str, np.ndarray]) -> TrialRecord:
    means = {task: float(values.mean()) for task, values in outcomes.items()}
    errors = {task: float(values.std(ddof=1) / len(values) ** 0.5) for task, values in outcomes.items()}
    metrics = {f"acc_{task}": mean for task, mean in means.items()} | {f"acc_{t}_stderr": e for t, e in errors.items()}
    metrics["acc_mean"] = float(np.mean(list(means.values())))
    metrics["acc_mean_stderr"] = float(np.sqrt(np.sum(np.square(list(errors.values())))) / len(errors))
    metrics |= {"chance_acc_mean": 0.357, "params_count": 80_000.0}
    metrics |= {"removed_fraction": 0.2, "extreme_pruning_layers": 1.0}
    seconds = {"importance": 0.0, "pruning": 0.1, "perplexity": 2.0, "zero_shot": 5.0}
    items = dict.fromkeys(("items_scored", "items_total"), sum(map(len, outcomes.values())))
    return TrialRecord(
        key=_key(config, model),
        model=model,
        config=config,
        status=state,
        reason={"failed": "out of memory", "stopped_early": "well below the best"}.get(state, ""),
        metrics=metrics if state == "complete" else {},
        stages=[StageReport(stage, s, **items) for stage, s in seconds.items()],
        started_at="2026-01-01T00:00:00+00:00",
        elapsed_time_s=sum(seconds.values()),
        host="here",
        resources={"cpu": 1.0, "gpu": 0.0},
    )


def _items(task: str, scores: np.ndarray) -> pd.DataFrame:
    """Return the items as a search keeps them; three of five answers of boolq are yes."""
    choices = 2 if task in ("boolq", "piqa", "winogrande") else 4
    places = np.arange(len(scores))
    gold = (places % 5 < 3) if task == "boolq" else places % choices
    likelihoods = [[-1.0] * choices] * len(scores)
    return pd.DataFrame(
        {"score": scores.astype(np.float32), "gold": gold.astype(np.int32), "loglikelihoods": likelihoods}
    )


def _gradient_metrics(generator: np.random.Generator) -> dict[str, float]:
    names = ("mean_ratio", "norm_ratio", "std_ratio", "max_ratio", "mean_range", "norm_range")
    return {f"grad_{name}": float(value) for name, value in zip(names, generator.uniform(2, 10, 6), strict=True)}


def _write_trial(folder: Path, record: TrialRecord, scores: Mapping[str, np.ndarray], index: int) -> None:
    """items.parquet, its rows in an order of their own, and the two diagnoses."""
    folder.mkdir(parents=True)
    kept = [(GROUPS - layer % 2, CHANNELS * (9 - layer) // 10) for layer in range(LAYERS)]
    before = {"kv_groups_before": GROUPS, "mlp_channels_before": CHANNELS, "params_before": 24576}
    comparison = [
        {"layer": layer, **before, "kv_groups_kept": groups, "mlp_channels_kept": channels}
        | {"params_kept": (params := 20000 - 100 * layer), "pruned_fraction": 1 - params / 24576}
        for layer, (groups, channels) in enumerate(kept)
    ]
    per_layer = [
        {"layer": layer, "grad_mean": 1e-3 / (layer + 1), "grad_norm": 0.2, "grad_std": 1e-3, "grad_max": 0.02}
        for layer in range(LAYERS)
    ]
    metrics = {name: value for name, value in record.metrics.items() if name.startswith("grad_")}
    removed = {"removed_fraction": 0.2, "removed_params": 20_000, "total_params": PARAMS}
    compared = removed | {"extreme_pruning_layers": 1, "layers": comparison}
    atomic_write_text(folder / "pruning_comparison.json", to_json(compared))
    atomic_write_text(folder / "gradient_diagnosis.json", to_json(metrics | {"layers": per_layer}))
    if scores:
        columns = {task: _items(task, s[:, index]) for task, s in scores.items()}
        frame = pd.concat(columns, names=["task", "doc_id"]).reset_index().astype({"doc_id": np.int32})
        frame.sample(frac=1, random_state=index).to_parquet(folder / "items.parquet")
