"""What the driver does with results while a search runs: the ledger's missing records, TensorBoard."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial as RayTrial
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from tune_prune.core.config import HYPERPARAMETERS
from tune_prune.core.records import TrialRecord
from tune_prune.tuning.queue import is_job
from tune_prune.tuning.worker import TrialSpec, WorkerSettings


class LedgerCallback(Callback):
    """Records what no worker can: trials the scheduler stopped, and trials whose process died."""

    def __init__(
        self,
        specs: Mapping[str, TrialSpec],
        settings: WorkerSettings,
        stop_reason: Callable[[str], str | None] | None = None,
    ) -> None:
        self._specs = specs
        self._settings = settings
        self._stop_reason = stop_reason  # by trial key; None: the scheduler gives no reasons
        self.records: dict[str, TrialRecord] = {}  # of this search, by key

    def on_trial_result(
        self, iteration: int, trials: list[RayTrial], trial: RayTrial, result: dict[str, Any], **info: Any
    ) -> None:
        if is_job(trial):
            return
        record = TrialRecord.from_dict(result["record"])
        if result["trial_status"] != "running":
            self.records[record.key] = record

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        result = trial.last_result
        if is_job(trial) or result.get("trial_status") != "running":
            return  # the worker has recorded it, or it never ran
        record = TrialRecord.from_dict(result["record"])
        record.status = "stopped_early"
        reason = self._stop_reason(record.key) if self._stop_reason is not None else None
        record.reason = reason or (
            f"stopped by the scheduler at acc_mean {result.get('acc_mean', math.nan):.4f} "
            f"after {result['items_scored']} of {result['items_total']} zero-shot items"
        )
        self._write(record)

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        if is_job(trial):
            return
        spec = self._specs[trial.config["key"]]
        record = self._settings.failure_of_this_search(spec.key)
        if record is None:
            reached = trial.last_result.get("record") or {"key": spec.key, "model": spec.run.label, "status": "failed"}
            record = TrialRecord.from_dict({"config": asdict(spec.config)} | reached)
            record.status = "failed"
            record.reason = _death(trial)
            self._settings.ledger.write(record)
        self.records[record.key] = record

    def _write(self, record: TrialRecord) -> None:
        self._settings.ledger.write(record)
        self.records[record.key] = record


class TensorBoardCallback(Callback):
    """Event files at <folder>/<label>/<config>-<key>/, written while the trials run.

    Accuracies have items_scored as their step, every other metric the stage's index. A trial that ends, in whatever
    way, gets its row in the HPARAMS tab, written into the same event file.
    """

    def __init__(self, folder: Path, specs: Mapping[str, TrialSpec]) -> None:
        self._folder = folder
        self._specs = specs
        self._writers: dict[str, SummaryWriter] = {}

    def on_trial_result(
        self, iteration: int, trials: list[RayTrial], trial: RayTrial, result: dict[str, Any], **info: Any
    ) -> None:
        if is_job(trial):
            return
        key = trial.config["key"]
        if result["training_iteration"] == 1:
            self._close(key)  # of an attempt that died
        if "stage" not in result:
            return
        writer = self._writer(key)
        index, items = result["stage_index"], result["items_scored"]
        writer.add_scalar(f"duration_s/{result['stage']}", result["stage_duration_s"], items or index)
        for name, value in _curves(result["record"]["metrics"]).items():
            if name.startswith("acc_"):
                if items:
                    writer.add_scalar(_tag(name), value, items)
            else:
                writer.add_scalar(_tag(name), value, index)
        writer.flush()

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        if "record" in trial.last_result:
            status = trial.last_result["trial_status"]
            self._finish(trial, "stopped_early" if status == "running" else status)

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        if not is_job(trial):
            self._finish(trial, "failed")

    def on_experiment_end(self, trials: list[RayTrial], **info: Any) -> None:
        for key in list(self._writers):
            self._close(key)

    def _finish(self, trial: RayTrial, status: str) -> None:
        key = trial.config["key"]
        config = self._specs[key].config
        row = {"status": status} | {row.short: getattr(config, name) for name, row in HYPERPARAMETERS.items()}
        known = _curves(trial.last_result.get("record", {}).get("metrics", {}))
        first = [name for name in ("acc_mean", "ppl") if name in known]  # the table's first columns
        rest = [name for name in known if name not in first and not name.startswith("grad_")]
        metrics = {_tag(name): known[name] for name in (*first, *rest)}
        writer = self._writer(key)
        # SummaryWriter.add_hparams would start another run in a folder named by the time.
        events = writer._get_file_writer()
        for summary in hparams(row, metrics):
            events.add_summary(summary)
        self._close(key)

    def _writer(self, key: str) -> SummaryWriter:
        if key not in self._writers:
            spec = self._specs[key]
            folder = self._folder / spec.run.label / f"{spec.config.name}-{key[:6]}"
            if folder.exists():
                shutil.rmtree(folder)  # curves of an attempt that did not finish would mix with the new ones
            self._writers[key] = SummaryWriter(str(folder))
        return self._writers[key]

    def _close(self, key: str) -> None:
        if key in self._writers:
            self._writers.pop(key).close()


def _curves(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics worth a curve: finite ones, without standard errors and constants."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if not name.endswith("_stderr") and name != "chance_acc_mean" and math.isfinite(value)
    }


def _tag(name: str) -> str:
    """The metric's name in TensorBoard, which makes a section of what stands before the slash; accuracies come first."""
    for start, section in (("acc_", "accuracy"), ("ppl", "perplexity"), ("grad_", "gradient")):
        if name.startswith(start):
            return f"{section}/{name}"
    return f"pruning/{name}"


def _death(trial: RayTrial) -> str:
    """Why Ray gave a trial up, in one line; its traceback is in the trial's folder under tune/."""
    error = trial.get_error()
    text = str(error).strip() if error is not None else ""
    last = text.splitlines()[-1].strip().split(" Some common causes")[0] if text else "unknown cause"
    stage = trial.last_result.get("stage")
    return f"the trial ended{f' after the stage {stage}' if stage else ''}, out of memory perhaps: {last}"
