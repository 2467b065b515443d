"""Messages of workers, made by hand for those who read them."""

from __future__ import annotations

from typing import Any

from tune_prune.core.records import StageReport
from tune_prune.trial.trial import TrialProgress
from tune_prune.tuning.messages import Slice, TrialMessage


def stage_message(
    key: str, stage: str = "zero_shot", *, status: str = "running", part: Slice | None = None, **report: Any
) -> TrialMessage:
    """A message after a stage of the trial `key`, whose report has the fields `report`; `status` "complete" or "failed": the
    last one."""
    done = StageReport(stage, **({"duration_s": 1.0} | report))
    progress = TrialProgress(key, "tiny-llama", None, reports=(done,))
    record = None if status == "running" else progress.record(status)
    return TrialMessage(progress, done, slice=part, record=record)
