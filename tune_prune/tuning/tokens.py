"""How many tokens the zero-shot items and the perplexity text are, before a model is loaded. Hub data counts by a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from tune_prune.core.config import EvaluationProtocol
from tune_prune.evaluation.engine.prefix_trees import Rows, plan_rows

if TYPE_CHECKING:  # imports pyarrow, which what plans for a GPU is measured without
    from tune_prune.evaluation.suite import Item, ZeroShotSuite

SAMPLED_ITEMS = 64  # per task, spread over its items

# Rows and, per item with prefixes shared, tokens and scored positions by GPT-2's tokenizer.
HUB_TASKS: dict[str, tuple[int, float, float]] = {
    "boolq": (3270, 130.9, 1.0),
    "piqa": (1838, 48.8, 36.4),
    "hellaswag": (10_042, 76.5, 50.7),
    "winogrande": (1267, 25.2, 10.9),
    "arc_easy": (2376, 38.9, 13.2),
    "arc_challenge": (1172, 48.0, 18.4),
    "openbookqa": (500, 19.9, 9.3),
}
HUB_PERPLEXITY_TOKENS = 287_644  # WikiText-2 raw test, by GPT-2's tokenizer
# Another tokenizer is compared with GPT-2's on this text.
ENGLISH = (
    "The question was simple enough: which of the four materials conducts heat best? A student who had watched the kettle "
    "all morning answered that copper does, because the handle of the old pot was always wrapped in cloth. In 1847 the "
    "town built a second bridge, 310 metres long, over the river; it is still used by walkers, and on warm evenings people "
    "sit along its walls to eat, talk and look at the water. Next, she puts the pan into the oven and waits."
)
ENGLISH_GPT2_TOKENS = 99


@dataclass(frozen=True)
class ZeroShotTokens:
    """What the items of a protocol forward, all slices together, and a sample of their rows."""

    items: int
    tokens: int
    scored: int  # positions whose logits are needed
    exact: bool  # counted, not estimated
    rows: Rows | None = None  # of the sampled items
    longest_row: int | None = None  # tokens

    @property
    def row_length(self) -> float:
        """Mean tokens of an item."""
        return self.tokens / self.items


def suite_tokens(suite: ZeroShotSuite) -> ZeroShotTokens:
    """Those of a suite, counted."""
    by_task: dict[str, list[Item]] = {}
    for item in suite.items:
        by_task.setdefault(item.task, []).append(item)
    sampled = [
        items[int(index)]
        for items in by_task.values()
        for index in np.linspace(0, len(items) - 1, min(SAMPLED_ITEMS, len(items)))
    ]
    rows = [row for index in range(suite.num_slices) for row in suite.rows_in_slice(index).all]
    lengths = [len(row.tokens) for row in rows]
    scored = sum(len(np.unique(row.scored)) for row in rows)
    sample = plan_rows([item.requests for item in sampled])
    return ZeroShotTokens(suite.num_items, sum(lengths), scored, True, sample, max(lengths))


def hub_tokens(tokenizer: PreTrainedTokenizerBase, protocol: EvaluationProtocol) -> ZeroShotTokens:
    """Those of tasks of the hub, by the table. One that is not in it is taken for an average one of the seven."""
    scale = tokens_per_gpt2_token(tokenizer)
    mean_rows, *means = (float(np.mean(column)) for column in zip(*HUB_TASKS.values(), strict=True))
    items = tokens = scored = 0.0
    for name in dict.fromkeys(protocol.tasks):
        count, mean_tokens, mean_scored = HUB_TASKS.get(name, (int(mean_rows), *means))
        count = min(count, protocol.limit or count)
        items += count
        tokens += count * mean_tokens * scale
        scored += count * max(1.0, mean_scored * scale)
    return ZeroShotTokens(int(items), round(tokens), round(scored), exact=False)


def tokens_per_gpt2_token(tokenizer: PreTrainedTokenizerBase) -> float:
    """How many tokens of `tokenizer` make one of GPT-2's, on a few lines of English."""
    return len(tokenizer(ENGLISH, add_special_tokens=False)["input_ids"]) / ENGLISH_GPT2_TOKENS
