"""What an experiment has cost so far, and its last start beside what had been predicted for it: cost.json."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.records import MODEL_STAGES, TrialRecord, in_order


@dataclass(frozen=True)
class Totals:
    """Sums over the stages of all trials, baselines and passes, by stage. A stage served from the cache forwards no token."""

    seconds: dict[str, float]
    tokens: dict[str, int]
    computed: dict[str, int]  # how often it forwarded tokens


def totals(
    records: Iterable[TrialRecord], baselines: Mapping[str, TrialRecord], passes: Sequence[Mapping[str, Any]]
) -> Totals:
    """What `records`, the dense `baselines` and the `passes` made for all trials (`PassLog.read`) have taken together."""
    result = Totals(defaultdict(float), defaultdict(int), defaultdict(int))
    stages = [stage for record in (*records, *baselines.values()) for stage in record.stages]
    for stage in (*stages, *passes):
        name = stage["stage"]
        result.seconds[name] += stage["duration_s"]
        result.tokens[name] += stage["tokens"]
        result.computed[name] += stage["tokens"] > 0
    return result


def write_cost(
    path: Path,
    records: Iterable[TrialRecord],
    baselines: Mapping[str, TrialRecord],
    passes: Sequence[Mapping[str, Any]],
    predicted: Mapping[str, Any] | None = None,
    before: Totals | None = None,
    wall_seconds: float = 0.0,
) -> dict[str, Any]:
    """Write `path`, and return it as plain data.

    `predicted` (`CostEstimate.to_dict`) stands beside what this start has measured: what is there now less what was there
    `before` it, and `wall_seconds` from its beginning to its end.
    """
    records = list(records)
    now = totals(records, baselines, passes)
    total = sum(now.seconds.values())
    evaluation = now.seconds.get("perplexity", 0.0) + now.seconds.get("zero_shot", 0.0)
    # how often each statistic took a pass, those of importance as gradient_passes
    computed = {"importance": 0, "removal": 0} | now.computed
    statistics = [stage for stage in in_order(sorted(computed)) if stage not in MODEL_STAGES]
    done = [*records, *baselines.values()]
    gpu_share = max((record.resources.get("gpu", 0.0) for record in done), default=0.0)  # passes ran on a trial's share
    gpu_seconds = sum(record.elapsed_time_s * record.resources.get("gpu", 0.0) for record in done)
    gpu_seconds += gpu_share * sum(stage["duration_s"] for stage in passes)
    cost = {
        "trials": len(records),
        **{f"{'gradient' if stage == 'importance' else stage}_passes": computed[stage] for stage in statistics},
        "seconds_per_stage": dict(now.seconds),
        "tokens_per_stage": dict(now.tokens),
        "worker_seconds": total,
        "evaluation_fraction": evaluation / total if total else 0.0,
        "gpu_hours": gpu_seconds / 3600,
        "shared_passes": list(passes),
    }
    if predicted is not None:
        before = before or totals([], {}, [])
        cost["last_start"] = {
            "wall_seconds": {"predicted": predicted["wall_seconds"], "measured": wall_seconds},
            "seconds_per_stage": _beside("seconds", predicted, now.seconds, before.seconds),
            "tokens_per_stage": _beside("tokens", predicted, now.tokens, before.tokens),
            "predicted_flops": {stage: expected["flops"] for stage, expected in predicted["stages"].items()},
            "predicted_gpu_hours": predicted["gpu_hours"],
            "notes": list(predicted["notes"]),
        }
    atomic_write_text(path, to_json(cost))
    return cost


def _beside(
    name: str, predicted: Mapping[str, Any], now: Mapping[str, float], before: Mapping[str, float]
) -> dict[str, Any]:
    """Predicted beside measured, of one start."""
    return {
        stage: {"predicted": expected[name], "measured": now.get(stage, 0) - before.get(stage, 0)}
        for stage, expected in predicted["stages"].items()
    }


def cost_line(cost: Mapping[str, Any]) -> str:
    """One line for the screen from what `write_cost` returned."""
    counts = {name: n for name, n in cost.items() if name.endswith("_passes") and isinstance(n, int)}
    line = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counts.items())
    if "last_start" in cost:
        wall = cost["last_start"]["wall_seconds"]
        line = f"predicted {duration(wall['predicted'])}, took {duration(wall['measured'])}; {line}"
    return f"cost         {line}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 0.4s, 31s, 1m40s, 2h05m."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    if hours:
        return f"{hours}h{left:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
