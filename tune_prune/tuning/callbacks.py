"""What the driver does with results while a search runs: the ledger's missing records, TensorBoard, one line of progress."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from ray.tune import Callback
from ray.tune.experiment import Trial as RayTrial
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from tune_prune.records import TrialRecord
from tune_prune.tuning.trainable import TrialSpec, WorkerSettings

TTY_REFRESH_S = 0.5
LOG_REFRESH_S = 10.0


class LedgerCallback(Callback):
    """Records what no worker can: trials the scheduler stopped, and trials whose process died."""

    def __init__(self, specs: Mapping[str, TrialSpec], settings: WorkerSettings) -> None:
        self._specs = specs
        self._settings = settings
        self.records: dict[str, TrialRecord] = {}  # of this search, by key

    def on_trial_result(
        self, iteration: int, trials: list[RayTrial], trial: RayTrial, result: dict[str, Any], **info: Any
    ) -> None:
        record = TrialRecord.from_dict(result["record"])
        if result["trial_status"] != "running":
            self.records[record.key] = record

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        result = trial.last_result
        if result.get("trial_status") != "running":
            return  # the worker has recorded it, or it never ran
        record = TrialRecord.from_dict(result["record"])
        record.status = "stopped_early"
        record.reason = (
            f"stopped by the scheduler at acc_mean {result.get('acc_mean', math.nan):.4f} "
            f"after {result['items_scored']} of {result['items_total']} zero-shot items"
        )
        self._write(record)

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
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
        self._finish(trial, "failed")

    def on_experiment_end(self, trials: list[RayTrial], **info: Any) -> None:
        for key in list(self._writers):
            self._close(key)

    def _finish(self, trial: RayTrial, status: str) -> None:
        key = trial.config["key"]
        config = self._specs[key].config
        row = {"status": status, "method": config.method, "seq_len": config.taylor_seq_len}
        row |= {"num_samples": config.taylor_num_samples, "ratio": config.pruning_ratio}
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


class LiveLine(Callback):
    """One line on the screen: `[12/45] running 2, failed 0, best acc .8421 blockwise-s64-n128, ETA 01:40`.

    On a terminal the line is rewritten; elsewhere a new line is written every ten seconds and at the end.
    """

    def __init__(
        self,
        specs: Mapping[str, TrialSpec],
        total: int,
        known: Iterable[TrialRecord] = (),
        stream: TextIO | None = None,
    ) -> None:
        self._specs = specs
        self._total = total
        self._given_stream = stream  # never sys.stdout itself: Ray pickles callbacks
        self._tty = self._stream.isatty()
        self._best: dict[str, tuple[float, str]] = {}  # by model's label
        self._done = self._failed = self._ended_here = self._width = 0
        self._started = self._shown = time.monotonic()
        for record in known:
            self._count(record.key, record.status, record.metrics)

    @property
    def _stream(self) -> TextIO:
        return self._given_stream or sys.stdout

    def say(self, text: str) -> None:
        """A line of its own that stays, such as a phase before the trials."""
        self._write(text)
        self.end()

    def end(self) -> None:
        """Leave the line, so that what is printed next starts on its own."""
        if self._tty and self._width:
            self._stream.write("\n")
            self._stream.flush()
        self._width = 0

    def setup(self, *args: Any, **info: Any) -> None:
        self._started = time.monotonic()

    def on_step_end(self, iteration: int, trials: list[RayTrial], **info: Any) -> None:
        if time.monotonic() - self._shown >= (TTY_REFRESH_S if self._tty else LOG_REFRESH_S):
            self._write(self._text(sum(trial.status == RayTrial.RUNNING for trial in trials)))

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        result = trial.last_result
        if "record" in result:
            status = result["trial_status"]
            self._ended_here += 1
            self._count(
                trial.config["key"], "stopped_early" if status == "running" else status, result["record"]["metrics"]
            )

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        self._ended_here += 1
        self._count(trial.config["key"], "failed", {})

    def on_experiment_end(self, trials: list[RayTrial], **info: Any) -> None:
        self.say(self._text(0))

    def _count(self, key: str, status: str, metrics: Mapping[str, float]) -> None:
        self._done += 1
        self._failed += status == "failed"
        accuracy = metrics.get("acc_mean", math.nan)
        label, name = self._specs[key].run.label, self._specs[key].config.name
        if status == "complete" and accuracy > self._best.get(label, (-1.0, ""))[0]:
            self._best[label] = (accuracy, name)

    def _text(self, running: int) -> str:
        several = len({spec.run.label for spec in self._specs.values()}) > 1
        best = "; ".join(
            f"best acc {accuracy:.4f}".replace(" 0.", " .") + f" {label + ' ' if several else ''}{name}"
            for label, (accuracy, name) in self._best.items()
        )
        left = self._total - self._done
        eta = ""
        if left and self._ended_here:
            minutes, seconds = divmod(round((time.monotonic() - self._started) / self._ended_here * left), 60)
            eta = f", ETA {minutes:02d}:{seconds:02d}"
        return f"[{self._done}/{self._total}] running {running}, failed {self._failed}{', ' if best else ''}{best}{eta}"

    def _write(self, text: str) -> None:
        if self._tty:
            columns = shutil.get_terminal_size().columns - 1  # a longer line would wrap and could not be rewritten
            self._stream.write("\r" + text[:columns].ljust(self._width))
            self._width = min(len(text), columns)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
        self._shown = time.monotonic()


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
