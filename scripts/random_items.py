"""Zero-shot items of random tokens in the lengths of the real tasks, and how lm-eval's HFLM scores such items.

The numbers of choices and the lengths of prefixes and answers follow the real task files: GPT-2 tokens, first 400 items a task,
log-normal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from tune_prune.evaluation.engine.rows import Request

HFLM_ROWS = 64


class Lengths(NamedTuple):
    """Describes the items of a task, in tokens: mean, and spread of the logarithm."""

    rows: int
    choices: int
    prefix: float
    prefix_spread: float
    answer: float  # what a choice adds to the prefix; 0: one token, which is only predicted
    answer_spread: float


TASKS = {
    "boolq": Lengths(3270, 2, 139, 0.48, 0, 0),
    "piqa": Lengths(1838, 2, 22, 0.48, 14, 1.11),
    "hellaswag": Lengths(10042, 4, 30, 0.32, 13, 0.49),
    "winogrande": Lengths(1267, 2, 15, 0.29, 6, 0.45),
    "arc_easy": Lengths(2376, 4, 28, 0.44, 3, 0.82),
    "arc_challenge": Lengths(1172, 4, 32, 0.47, 4.5, 0.83),
    "openbookqa": Lengths(500, 4, 12, 0.58, 2, 0.70),
}


def random_items(vocab_size: int, per_task: int, longest: int) -> dict[str, list[list[Request]]]:
    """Make `per_task` items of each task in its proportions; no request is longer than `longest`."""
    random = np.random.default_rng(0)

    def length(mean: float, spread: float, most: int) -> int:
        drawn = random.lognormal(np.log(mean) - spread**2 / 2, spread) if mean else 0
        return min(most, max(1, round(drawn)))

    result: dict[str, list[list[Request]]] = {}
    for name, task in TASKS.items():
        result[name] = []
        for _ in range(per_task):
            prefix = random.integers(vocab_size, size=length(task.prefix, task.prefix_spread, longest // 2))
            item = []
            for _ in range(task.choices):
                answer = random.integers(vocab_size, size=1 + length(task.answer, task.answer_spread, longest // 2 - 1))
                if not task.answer:
                    answer = answer[:1]
                item.append(Request(np.concatenate([prefix, answer[:-1]]), answer))
            result[name].append(item)
    return result


@torch.inference_mode()
def score_as_hflm(model: PreTrainedModel, items: list[list[Request]]) -> np.ndarray:
    """Return log-likelihoods [n] by HFLM's way: equal inputs once, longest first, logits of every position, softmax in
    float32."""
    requests = [request for item in items for request in item]
    sharing: dict[bytes, list[int]] = {}
    for index, request in enumerate(requests):
        sharing.setdefault(request.inputs.tobytes(), []).append(index)
    rows = sorted(sharing.values(), key=lambda members: -len(requests[members[0]].inputs))
    log_likelihoods = np.zeros(len(requests))
    for start in range(0, len(rows), HFLM_ROWS):
        batch = rows[start : start + HFLM_ROWS]
        ids = np.zeros((len(batch), len(requests[batch[0][0]].inputs)), dtype=np.int64)
        for row, members in enumerate(batch):
            inputs = requests[members[0]].inputs
            ids[row, : len(inputs)] = inputs
        logits = model(input_ids=torch.from_numpy(ids).to(model.device)).logits
        log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        for row, members in enumerate(batch):
            for request, index in ((requests[index], index) for index in members):
                at = slice(len(request.inputs) - len(request.targets), len(request.inputs))
                targets = torch.from_numpy(request.targets).to(model.device)
                log_likelihoods[index] = log_probs[row, at].gather(1, targets[:, None]).sum().item()
    return log_likelihoods
