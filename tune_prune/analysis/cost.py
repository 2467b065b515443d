"""What an experiment has cost so far: cost.json."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tune_prune.ledger import atomic_write_text, to_json
from tune_prune.records import TrialRecord


def write_cost(
    path: Path,
    records: Iterable[TrialRecord],
    baselines: Mapping[str, TrialRecord],
    passes: Sequence[Mapping[str, Any]],
) -> None:
    """Write `path` from all trials, the dense baselines and the passes made for all of them (`ArtifactStore.passes`)."""
    done = [*records, *baselines.values()]
    seconds: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    stages = [stage for record in done for stage in record.stages]
    for stage in [*stages, *passes]:
        seconds[stage["stage"]] += stage["duration_s"]
        tokens[stage["stage"]] += stage["tokens"]

    def computed(name: str) -> int:  # a stage served from the cache forwards no token
        return sum(stage["stage"] == name and stage["tokens"] > 0 for stage in [*stages, *passes])

    total = sum(seconds.values())
    evaluation = seconds["perplexity"] + seconds["zero_shot"]
    gpu_share = max((record.resources.get("gpu", 0.0) for record in done), default=0.0)  # passes ran on a trial's share
    gpu_seconds = sum(record.elapsed_time_s * record.resources.get("gpu", 0.0) for record in done)
    gpu_seconds += gpu_share * sum(stage["duration_s"] for stage in passes)
    cost = {
        "trials": len(done) - len(baselines),
        "gradient_passes": computed("importance"),
        "removal_passes": computed("removal"),
        "seconds_per_stage": dict(seconds),
        "tokens_per_stage": dict(tokens),
        "worker_seconds": total,
        "evaluation_fraction": evaluation / total if total else 0.0,
        "gpu_hours": gpu_seconds / 3600,
        "shared_passes": list(passes),
    }
    atomic_write_text(path, to_json(cost))
