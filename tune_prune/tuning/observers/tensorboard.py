"""Event files for TensorBoard, written while a search runs."""

from __future__ import annotations

import math
import os
import platform
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams, scalar

from tune_prune.core import temporary
from tune_prune.core.store import Location, open_store
from tune_prune.tuning.observers.observer import Event, Reader
from tune_prune.tuning.work import TrialSpec


class TensorBoardObserver(Reader):
    """Event files at <folder>/<label>/<config>-<key>/, written while the trials run. The label, by trial key, is that of the group
    in which the trial is compared: it tells pruning ratios apart.

    Accuracies have items_scored as their step; every other metric is one point, at the index of the stage that measured it.
    A trial that ends, in whatever way, gets its row in the HPARAMS tab, written into the same event file. On object storage, where
    nothing can be appended to, a file is written on this machine and put whole after each stage.
    """

    title = "TensorBoard"

    def __init__(self, folder: Location, labels: Mapping[str, str]) -> None:
        self._store = open_store(folder)
        self._temporary: Path | None = None
        if not isinstance(folder, Path):
            self._temporary = folder = temporary.make()
        self._folder = folder
        self._labels = labels
        self._files: dict[str, _EventFile] = {}

    def read(self, event: Event) -> None:
        if not isinstance(work := event.work, TrialSpec):
            return
        if event.name == "trial_start":
            self._close(work)  # of an attempt that died
            return
        fields, file = event.fields, self._file(work)
        if event.name == "stage":
            step = fields["items_scored"] or fields["index"]
            file.add(scalar(f"duration_s/{fields['stage']}", fields["duration_s"]), step)
            for name, value in _curves(fields["metrics"]).items():
                file.add(scalar(_tag(name), value), step)
            file.flush()
        else:
            row = {"status": fields["status"], "failure": fields["failure"] or "none", **work.config.values(work.run)}
            values = _curves(fields["metrics"])
            first = [name for name in ("acc_mean", "ppl") if name in values]  # the table's first columns
            rest = [name for name in values if name not in first and not name.startswith("grad_")]
            for summary in hparams(row, {_tag(name): values[name] for name in (*first, *rest)}):
                file.add(summary)
            self._close(work)
        self._put(work)

    def on_finish(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._temporary is not None:
            temporary.remove(self._temporary)

    def _file(self, spec: TrialSpec) -> _EventFile:
        if spec.key not in self._files:
            folder = self._folder / self._name(spec)
            if folder.exists():
                shutil.rmtree(folder)  # curves of an attempt that did not finish would mix with the new ones
            for name in self._store.names(self._name(spec)):
                self._store.remove(name)
            self._files[spec.key] = _EventFile(folder)
        return self._files[spec.key]

    def _name(self, spec: TrialSpec) -> str:
        return f"{self._labels[spec.key]}/{spec.config.name}-{spec.key[:6]}"

    def _put(self, spec: TrialSpec) -> None:
        if self._temporary is not None:
            for file in (self._folder / self._name(spec)).iterdir():
                self._store.put(f"{self._name(spec)}/{file.name}", file.read_bytes())

    def _close(self, spec: TrialSpec) -> None:
        if spec.key in self._files:
            self._files.pop(spec.key).close()


class _EventFile:
    """One file of events in a folder of its own. torch's SummaryWriter has a thread for each, hundreds on a cluster, in which a
    full disk would be met."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self.flush, self.close = self._file.flush, self._file.close
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, summary: Summary, step: int | None = None) -> None:
        self._write(event_pb2.Event(wall_time=time.time(), summary=summary, step=step))

    def _write(self, event: event_pb2.Event) -> None:
        self._records.write(event.SerializeToString())


def _curves(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics worth a curve: finite ones, without standard errors and constants."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if not name.endswith("_stderr") and name != "chance_acc_mean" and math.isfinite(value)
    }


def _tag(name: str) -> str:
    """Return the metric's name in TensorBoard, e.g. "accuracy/acc_piqa": what stands before the slash is a section."""
    sections = {
        "acc_": "accuracy",
        "gold_logprob_": "gold_logprob",
        "kl_": "kl",
        "ppl": "perplexity",
        "grad_": "gradient",
    }
    for start, section in sections.items():
        if name.startswith(start):
            return f"{section}/{name}"
    return f"pruning/{name}"
