"""cost.json: the cost of an experiment so far, and its last start beside what had been predicted for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tune_prune.core.ledger import write_costs
from tune_prune.core.records import MEASURING_STAGES, MODEL_STAGES, TrialRecord, in_order, pass_name
from tune_prune.core.store import Store

Totals = Mapping[str, Counter]  # "seconds", "tokens", "computed" (how often tokens were forwarded) -> sums by stage


def totals(
    records: Iterable[TrialRecord],
    baselines: Mapping[str, TrialRecord],
    passes: Sequence[Mapping[str, Any]],
    killed: Iterable[TrialRecord] = (),
) -> Totals:
    """Return what `records`, the dense `baselines`, the `passes` made for all trials (`read_passes`) and attempts that were
    `killed` (`Ledger.attempts`) have taken together. A stage served from the cache forwards no token."""
    sums: Totals = {"seconds": Counter(), "tokens": Counter(), "computed": Counter()}
    stages = [stage for record in (*records, *baselines.values(), *killed) for stage in record.stages]
    for stage in (*map(vars, stages), *passes):
        sums["seconds"][stage["stage"]] += stage["duration_s"]
        sums["tokens"][stage["stage"]] += stage["tokens"]
        sums["computed"][stage["stage"]] += stage["tokens"] > 0
    return sums


def gpu_hours(records: Sequence[TrialRecord], passes: Sequence[Mapping[str, Any]]) -> float:
    """Return what trials, dense models (`records` of both) and passes have taken of GPUs."""
    share = max((record.resources.get("gpu", 0.0) for record in records), default=0.0)  # passes ran on a trial's share
    seconds = sum(record.elapsed_time_s * record.resources.get("gpu", 0.0) for record in records)
    return (seconds + share * sum(stage["duration_s"] for stage in passes)) / 3600


def write_cost(
    store: Store,
    records: Iterable[TrialRecord],
    baselines: Mapping[str, TrialRecord],
    passes: Sequence[Mapping[str, Any]],
    predicted: Mapping[str, Any] | None = None,
    before: Totals | None = None,
    wall_seconds: float = 0.0,
    killed: Sequence[TrialRecord] = (),
) -> dict[str, Any]:
    """Write cost.json of the experiment in `store`, and return it as plain data.

    What attempts that were `killed` had computed is in all sums, and once more in `lost_work`: other attempts at the same trials
    found most of it in the cache. A stage in which one was killed counts nowhere.
    `predicted` (`CostEstimate.to_dict`) stands beside what this start has measured: what is there now less what was there
    `before` it, and `wall_seconds` from its beginning to its end.
    """
    records = list(records)
    now = totals(records, baselines, passes, killed)
    seconds, computed = now["seconds"], now["computed"]
    total = sum(seconds.values())
    statistics = [s for s in in_order(sorted({"importance", "removal", *computed})) if s not in MODEL_STAGES]
    lost = totals(killed, {}, [])
    cost = {
        "trials": len(records),
        **{f"{pass_name(stage)}_passes": computed[stage] for stage in statistics},
        "seconds_per_stage": seconds,
        "tokens_per_stage": now["tokens"],
        "worker_seconds": total,
        "evaluation_fraction": sum(seconds[stage] for stage in MEASURING_STAGES) / (total or 1.0),
        "gpu_hours": gpu_hours([*records, *baselines.values(), *killed], passes),
        "shared_passes": list(passes),
        "lost_work": {
            "attempts": len(killed),
            "stages": sum(len(attempt.stages) for attempt in killed),
            "tokens": sum(lost["tokens"].values()),
            "seconds": sum(lost["seconds"].values()),
        },
    }
    if predicted is not None:
        stages, earlier = predicted["stages"], before or totals([], {}, [])

        def beside(name: str) -> dict[str, Any]:
            measured = {stage: now[name][stage] - earlier[name][stage] for stage in stages}
            return {s: {"predicted": values[name], "measured": measured[s]} for s, values in stages.items()}

        cost["last_start"] = {
            "wall_seconds": {"predicted": predicted["wall_seconds"], "measured": wall_seconds},
            "passes": {f"{pass_name(s)}_passes": computed[s] - earlier["computed"][s] for s in statistics},
            "seconds_per_stage": beside("seconds"),
            "tokens_per_stage": beside("tokens"),
            "predicted_flops": {stage: expected["flops"] for stage, expected in stages.items()},
            "predicted_gpu_hours": predicted["gpu_hours"],
            "load": predicted["load"],
            "notes": list(predicted["notes"]),
        }
    write_costs(store, cost)
    return cost


def cost_line(cost: Mapping[str, Any]) -> str:
    """Return one line for the screen from what `write_cost` returned: how long this start took, where something was predicted of
    it, else how long everything did."""
    if (last := cost.get("last_start")) is None:
        return f"time         {duration(cost['worker_seconds'])} of computing in all"
    wall, tokens = last["wall_seconds"], last["tokens_per_stage"].values()
    idle = not any(stage["measured"] for stage in tokens)
    expected = "nothing was left to compute" if idle else f"the plan said {between(wall['predicted'])}"
    return f"time         {duration(wall['measured'])}; {expected}"


def passes(count: float, name: str) -> str:
    """Return how many passes, by their name in cost.json: 1 gradient pass, 2 removal passes."""
    kind = name.removesuffix("_passes").replace("_", " ")
    return f"{count:,.0f} {kind} {'pass' if count == 1 else 'passes'}"


def between(seconds: Sequence[float]) -> str:
    """Return a range of seconds, its ends with two digits, as a person says it: 58s to 1m50s."""
    ends = [duration(float(f"{end:.1e}")) for end in seconds]
    return " to ".join(dict.fromkeys(ends))


def duration(seconds: float) -> str:
    """Return seconds as a person says them: 0.4s, 31s, 1m40s, 2h05m."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    if hours:
        return f"{hours}h{left:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
