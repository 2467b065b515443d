"""What an experiment has cost so far: cost.json."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tune_prune.ledger import atomic_write_text, parse_json, to_json
from tune_prune.records import StageReport, TrialRecord


def write_cost(
    path: Path,
    records: Iterable[TrialRecord],
    baselines: Mapping[str, TrialRecord],
    prepared: Sequence[tuple[str, StageReport]],
) -> None:
    """Write `path` from all trials, the dense baselines and the shared passes (model label, report): those that this
    start made, added to those that the file already tells of."""
    passes: list[dict[str, Any]] = parse_json(path)["shared_passes"] if path.is_file() else []
    passes += [
        {"model": label, **{key: value for key, value in asdict(report).items() if key != "metrics"}}
        for label, report in prepared
        if report.stage in ("importance", "removal")
    ]
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
    gpu_seconds = sum(record.elapsed_time_s * record.resources.get("GPU", 0.0) for record in done)
    cost = {
        "trials": len(done) - len(baselines),
        "gradient_passes": computed("importance"),
        "removal_passes": computed("removal"),
        "seconds_per_stage": dict(seconds),
        "tokens_per_stage": dict(tokens),
        "worker_seconds": total,
        "evaluation_fraction": evaluation / total if total else 0.0,
        "gpu_hours": gpu_seconds / 3600,
        "shared_passes": passes,
    }
    atomic_write_text(path, to_json(cost))
