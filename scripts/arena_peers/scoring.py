"""A judge that knows torch and a causal language model of transformers, nothing else: every model of the arena is measured by it.

Legend: N tokens of the perplexity text, K of them for KL, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

WINDOW = 2048  # tokens of the perplexity text that a model sees at once
BLOCK = 128  # tokens whose mean KL is one observation for standard errors


class Question(NamedTuple):
    """Holds a question: for each choice the token ids of question and choice, and how many of them, at the end, are the choice."""

    task: str
    choices: list[tuple[list[int], int]]
    gold: int  # index of the right choice


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits [B, T, V] of `tokens` [B, T] in float32."""
    return model(input_ids=tokens, use_cache=False).logits.float()


def log_probabilities(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probabilities [K, V] of what follows each of `tokens` [K], at most a window of them."""
    return logits(model, tokens[None])[0].log_softmax(-1)


def perplexity(model: nn.Module, text: Tensor, window: int = WINDOW) -> float:
    """Return exp of the mean loss of `text` [N] in windows, the first token of each without a prediction."""
    total, count = 0.0, 0
    for tokens in text.split(window):
        if len(tokens) > 1:
            total += cross_entropy(logits(model, tokens[None])[0, :-1], tokens[1:], reduction="sum").double().item()
            count += len(tokens) - 1
    return math.exp(total / count)


def choice_logprobs(model: nn.Module, question: Question) -> list[float]:
    """Return the log-probability of each choice behind its question, the sum over its tokens, in nats."""
    longest = max(len(tokens) for tokens, _ in question.choices)
    rows = [pad(torch.tensor(tokens), (0, longest - len(tokens))) for tokens, _ in question.choices]
    predicted = logits(model, torch.stack(rows))
    values = []
    for row, (tokens, count) in zip(predicted, question.choices, strict=True):
        begin, end = len(tokens) - count, len(tokens)
        of_choice = row[begin - 1 : end - 1].log_softmax(-1)
        values.append(of_choice.gather(1, torch.tensor(tokens[begin:])[:, None]).sum().item())
    return values


@torch.inference_mode()
def score(
    model: nn.Module, text: Tensor, questions: Sequence[Question], dense: Tensor | None, window: int = WINDOW
) -> dict[str, Any]:
    """Measure `model`: perplexity of `text` [N]; of each question the right choice's log-probability, and whether it is first.

    `dense`: the dense model's log-probabilities [K, V] of what follows the first K tokens; with it KL(dense || model) by blocks.
    """
    of_choices = [choice_logprobs(model, question) for question in questions]
    row: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "ppl": perplexity(model, text, window),
        "tasks": [question.task for question in questions],
        "gold": [values[one.gold] for one, values in zip(questions, of_choices, strict=True)],
        "right": [values.index(max(values)) == one.gold for one, values in zip(questions, of_choices, strict=True)],
    }
    if dense is not None:
        own = log_probabilities(model, text[: len(dense)])
        row["kl"] = [block.mean().item() for block in (dense.exp() * (dense - own)).sum(-1).split(BLOCK)]
    return row
