"""What the driver does with results while a search runs: the ledger's missing records, TensorBoard."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial as RayTrial
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from tune_prune.core.config import HYPERPARAMETERS
from tune_prune.core.records import Status, TrialRecord
from tune_prune.trial.trial import TrialProgress
from tune_prune.tuning.messages import trial_message
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
        message = trial_message(result)
        if message is not None and message.record is not None:
            self.records[message.record.key] = message.record

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        message = trial_message(trial.last_result)
        if message is None or message.record is not None or message.stage is None:
            return  # it never ran, or the worker has recorded it
        reason = self._stop_reason(message.progress.key) if self._stop_reason is not None else None
        reason = reason or (
            f"stopped by the scheduler at acc_mean {message.progress.metrics.get('acc_mean', math.nan):.4f} "
            f"after {message.stage.items_scored} of {message.stage.items_total} zero-shot items"
        )
        self._write(message.progress, "stopped_early", reason)

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        if is_job(trial):
            return
        spec = self._specs[trial.config["key"]]
        record = self._settings.failure_of_this_search(spec.key)
        if record is not None:
            self.records[record.key] = record
            return
        message = trial_message(trial.last_result)
        progress = TrialProgress(spec.key, spec.run.label, spec.config, "", "") if message is None else message.progress
        self._write(progress, "failed", _death(trial, progress))

    def _write(self, progress: TrialProgress, status: Status, reason: str) -> None:
        self.records[progress.key] = self._settings.write_record(progress, status, reason)


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
        message = trial_message(result)
        if message is None or message.stage is None:
            return
        key, report = trial.config["key"], message.stage
        if message.index == 0:
            self._close(key)  # of an attempt that died
        writer, items = self._writer(key), report.items_scored
        writer.add_scalar(f"duration_s/{report.stage}", report.duration_s, items or message.index)
        for name, value in _curves(message.progress.metrics).items():
            if name.startswith("acc_"):
                if items:
                    writer.add_scalar(_tag(name), value, items)
            else:
                writer.add_scalar(_tag(name), value, message.index)
        writer.flush()

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        message = trial_message(trial.last_result)
        if message is not None:
            self._finish(trial, "stopped_early" if message.record is None else message.record.status)

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        if not is_job(trial):
            self._finish(trial, "failed")

    def on_experiment_end(self, trials: list[RayTrial], **info: Any) -> None:
        for key in list(self._writers):
            self._close(key)

    def _finish(self, trial: RayTrial, status: str) -> None:
        key = trial.config["key"]
        config = self._specs[key].config
        row = {"status": status} | {row.name: getattr(config, name) for name, row in HYPERPARAMETERS.items()}
        message = trial_message(trial.last_result)
        values = {} if message is None else _curves(message.progress.metrics)
        first = [name for name in ("acc_mean", "ppl") if name in values]  # the table's first columns
        rest = [name for name in values if name not in first and not name.startswith("grad_")]
        metrics = {_tag(name): values[name] for name in (*first, *rest)}
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


def _death(trial: RayTrial, progress: TrialProgress) -> str:
    """Why Ray gave a trial up, in one line; its traceback is in the trial's folder under tune/."""
    error = trial.get_error()
    text = str(error).strip() if error is not None else ""
    last = text.splitlines()[-1].strip().split(" Some common causes")[0] if text else "unknown cause"
    after = f" after the stage {progress.reports[-1].stage}" if progress.reports else ""
    return f"the trial ended{after}, out of memory perhaps: {last}"
