"""Messages of workers, made by hand for those who read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.tuning.messages import TrialMessage


def stage_message(key: str, stage: str = "zero_shot", *, status: Any = "running", **report: Any) -> TrialMessage:
    """A message after a stage of the trial `key`, whose report has the fields `report`; `status` "complete" or "failed": the
    last one."""
    done = StageReport(stage, **({"duration_s": 1.0} | report))
    record = TrialRecord.begun(key, "tiny-llama", None).after(done)
    return TrialMessage(replace(record, status=status), done)
