"""`--recover N`: which configurations are trained once all of them are measured without training, and why.

A training takes longer than everything else of a trial. So of each model and pruning ratio N are trained of those that may still be
the most accurate (the confidence set, docs/analysis.md), on each draw of calibration samples that they were given. Accuracy cannot
tell these apart; the log-probability of right choices, which says more per item, does: the N with the highest, or, where tasks have
none, the N most accurate. That follows from the records alone, so a search that was killed decides the same again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tune_prune.analysis.input.measures import GOLD
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.core.config import PruningConfig
from tune_prune.core.hyperparameters import RECIPE
from tune_prune.tuning.plan import Plan


@dataclass(frozen=True)
class Trained:
    """What is trained of one model."""

    model: str  # label, with the pruning ratio where there are several
    configurations: tuple[str, ...]  # without training, the best first
    of: int  # configurations that were compared
    tied: int  # of which so many may still be the most accurate
    by: str  # the measure that chose among those

    def __str__(self) -> str:
        names, count = self.configurations, len(self.configurations)
        shown = "".join(f"\n{'':13}{name}" for name in names[:4])
        more = f"\n{'':13}and {count - 4} more" if count > 4 else ""
        which = "the most promising" if count == 1 else f"the {count} most promising"
        by = "the likelihood of right answers" if self.by == GOLD else "accuracy"
        return f"{self.model}: training {which} of {self.of}, by {by}{shown}{more}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def is_withheld(plan: Plan, config: PruningConfig) -> bool:
    """Whether that trial has to wait for the decision."""
    return plan.settings.recover is not None and config.recovery != PruningConfig.recovery


def expected(plan: Plan, configs: Iterable[PruningConfig]) -> list[PruningConfig]:
    """Those of a model's configurations that the search runs at most: of the trained ones so many of each ratio and draw."""
    most, counts, found = plan.settings.recover, Counter[tuple[Any, ...]](), []
    for config in configs:
        trained = (getattr(config, name) for name, row in RECIPE.items() if row.of == "recovery")
        of = config.pruning_ratio, config.seed, *trained
        counts[of] += is_withheld(plan, config)
        if most is None or not is_withheld(plan, config) or counts[of] <= most:
            found.append(config)
    return found


def choose(plan: Plan, findings: Findings, given: Collection[str]) -> tuple[list[Trained], set[str]]:
    """What is trained by the `findings` of what was `given` (trial keys), and the keys of those trials."""
    chosen, keys = [], set()
    for found in findings.models.values():
        tied = found.eligible[found.eligible["in_confidence_set"]]
        by = GOLD if GOLD in tied and tied[GOLD].notna().all() else "acc_mean"
        # By accuracy they are in that order already.
        ordered = tied.sort_values(GOLD, ascending=False, kind="stable") if by == GOLD else tied
        best = ordered.head(plan.settings.recover)
        chosen.append(Trained(found.model.label, tuple(best["name"]), len(found.eligible), len(tied), by))
        for model in plan.models:
            by_key = {key: config for config, key in model.trials}
            untrained = {config: key for key, config in by_key.items()}
            wanted = {replace(by_key[key], seed=None) for key in best["key"] if key in by_key}
            keys |= {
                key
                for key, config in by_key.items()
                if is_withheld(plan, config)
                and replace(config.untrained(), seed=None) in wanted
                and untrained.get(config.untrained(), untrained.get(replace(config.untrained(), seed=None))) in given
            }
    return chosen, keys
