"""Experiments of a few trials, as a search leaves them on disk, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tune_prune.analysis.export import write_views
from tune_prune.analysis.input import rows as columns
from tune_prune.analysis.input.reading import read_study, study_of_search
from tune_prune.analysis.input.study import Model
from tune_prune.analysis.statistics.findings import find
from tune_prune.core.config import ZERO_SHOT_TASKS, EvaluationProtocol, ModelRun, PruningConfig, trial_key
from tune_prune.core.ledger import Ledger, put_sealed
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import FolderStore

ODD = TrialRecord("odd", "tiny", PruningConfig("x", 8, 8), "failed")
NAMES = ("taylor-s16-n8", "taylor-s32-n8", "blockwise-s16-n8")


def record(name: str, key: str | None = None, status: Any = "complete", acc: float = 0.5, **fields: Any) -> TrialRecord:
    metrics = {"ppl": 9.0, "acc_mean": acc, "acc_mean_stderr": 0.01, "params_count": 80.0, "removed_fraction": 0.2}
    metrics |= {f"acc_{task}": acc for task in ZERO_SHOT_TASKS} | {"extreme_pruning_layers": 0.0}
    metrics |= {name: 2.0 for name in columns.COLUMNS if name.startswith("grad_")}
    method, seq_len, samples = name.split("-")
    config = PruningConfig(method, int(seq_len[1:]), int(samples[1:]), **fields)
    outcome = {"metrics": metrics} if status == "complete" else {"reason": "no memory"}
    return TrialRecord(key or key_of(config), "tiny", config, status, **outcome)


def run_of(seed: int) -> ModelRun:
    return ModelRun("/models/tiny", "tiny", None, "wikitext2", None, EvaluationProtocol(), seed, "float32")


def key_of(config: PruningConfig | None, seed: int = 0) -> str:
    return trial_key(config, "fingerprint", "texts", run_of(seed))


def experiment(folder: Path, records: Sequence[TrialRecord], seed: int = 0, planned: Sequence[str] = NAMES) -> Path:
    """A folder as a search leaves it: experiment.json, baseline.json, the ledger, the trials' items."""
    run = run_of(seed)
    keys = {key_of(record(name).config, seed): name for name in planned}
    model = {"run": run.to_dict(), "meaning": {"model": "fingerprint", "data": "texts"}, "trial_keys": keys}
    folder.mkdir(parents=True)
    dense = TrialRecord(
        trial_key(None, "fingerprint", "texts", run), "tiny", None, "complete", metrics={"acc_mean": 0.7}
    )
    texts = {
        "experiment.json": {"search": "grid", "num_trials": len(planned), "models": {"tiny": model}},
        "baseline.json": {"tiny": dense.to_dict()},
        "cost.json": {"gpu_hours": 1.0},
    }
    for name, values in texts.items():
        put_sealed(FolderStore(folder), name, values)
    for one in (replace(one, key=key_of(one.config, seed)) for one in records):
        Ledger(FolderStore(folder)).write(one)
        items = folder / "trials" / one.key / "items.parquet"
        items.parent.mkdir(parents=True)
        items.touch()
    return folder


def write_table(folder: Path, records: Sequence[TrialRecord]) -> None:
    write_views(FolderStore(folder), records, find(study_of_search(folder, {}, {}, records)))


def only(*folders: Path) -> Model:
    (model,) = read_study(folders, []).models.values()
    return model


def said(model: Model, kind: str | None = None) -> list[str]:
    return [f"{p.where} | {p.what}" for p in model.problems if kind in (None, p.kind)]


KEYS = {name: record(name).key for name in NAMES}
FIRST = f"ledger/{KEYS[NAMES[0]]}.json"

HEADER = "output_dir,acc_mean,pruning_ratio,extreme_pruning_layers,success,method\n"
FOLDER = "x/exp_001_taylor_seq_len{}_taylor_num_samples128"
ROW = f"{FOLDER.format(16)},0.5,0.2,1,True,taylor"


def csv(folder: Path, *lines: str, header: str = HEADER) -> Path:
    path = folder / "r.csv"
    path.write_text(header + "".join(f"{line}\n" for line in lines))
    return path
