"""The result of measuring a model: perplexity, accuracies with their standard errors, and what they come from."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tune_prune.core.config import ModelRun
from tune_prune.core.measures import chance, wilson_errors
from tune_prune.core.records import TrialRecord
from tune_prune.evaluation.item_scores import ItemScore, metric_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Holds what the measurement of a model has found. Accuracies and their standard errors are fractions."""

    run: ModelRun  # what it was measured on: tasks, limit, texts, seed, dtype
    record: TrialRecord  # every metric by its name, and what each stage has cost
    items: tuple[ItemScore, ...]  # the outcome of every single test item
    perplexity_window: int  # tokens

    @property
    def ppl(self) -> float:
        """Return the perplexity per token, over windows of `perplexity_window` tokens of a text that no calibration reads."""
        return self.record.metrics["ppl"]

    @property
    def acc_mean(self) -> float:
        """Return the plain mean of the tasks' accuracies."""
        return self.record.metrics["acc_mean"]

    @property
    def acc_mean_stderr(self) -> float:
        """Return the standard error of `acc_mean`: sqrt(sum of the tasks' squared errors) / number of tasks.

        It is nan where a task has a single item. A task of which all items are right, or none, has the error of Wilson's interval;
        the record has 0 (docs/analysis.md).
        """
        return self._errors["acc_mean_stderr"]

    @cached_property
    def _errors(self) -> dict[str, float]:
        metrics, items = self.record.metrics, Counter(item.task for item in self.items)
        return metrics | wilson_errors(metrics, items)

    @property
    def kl(self) -> dict[str, tuple[float, float]]:
        """Return KL(dense || this model) in nats per token and its standard error, on "text" (the perplexity text) and on "tasks"
        (questions with their right answers); empty where it was not measured."""
        metrics = self.record.metrics
        return {
            name: (metrics[f"kl_{name}"], metrics[f"kl_{name}_stderr"])
            for name in ("text", "tasks")
            if f"kl_{name}" in metrics
        }

    @property
    def tasks(self) -> pd.DataFrame:
        """Return a row per task, by its name.

        Columns: metric (acc, or acc_norm: by log-likelihood per character), accuracy, stderr, chance (what picking choices blindly
        gives) and items (their number); gold_logprob, the mean log-probability of the right choice in nats, and
        gold_logprob_stderr. The last two are nan for a task whose items have no single right choice, and so is chance where they
        have several.
        """
        import pandas as pd

        rows = {}
        for task in dict.fromkeys(item.task for item in self.items):
            items = [item for item in self.items if item.task == task]
            rows[task] = {
                "metric": metric_of(task),
                "accuracy": self.record.metrics[f"acc_{task}"],
                "stderr": self._errors[f"acc_{task}_stderr"],
                "chance": math.fsum(chance(len(item.loglikelihoods), item.gold) for item in items) / len(items),
                "items": len(items),
                "gold_logprob": self.record.metrics.get(f"gold_logprob_{task}", math.nan),
                "gold_logprob_stderr": self.record.metrics.get(f"gold_logprob_{task}_stderr", math.nan),
            }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("task")

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a reader of the numbers should know, in sentences."""
        return tuple(self.record.notes)

    def __repr__(self) -> str:
        return (
            f"Evaluation of {self.run.label}: acc_mean {self.acc_mean:.4f} ± {self.acc_mean_stderr:.4f} over {len(self.items):,} "
            f"questions, perplexity {self.ppl:.2f}"
        )
