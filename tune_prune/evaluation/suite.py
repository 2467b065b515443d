"""The items of a protocol as tokens, in nested slices, scored and judged without lm-eval.

zero_shot.py builds a suite through lm-eval; `arrays` and `from_arrays` carry it to other processes, which then need
neither lm-eval nor the tokenizer. Judgement is lm-eval's for multiple choice (v0.4, ConfigurableTask.process_results):
the right choice has the highest log-likelihood, for acc_norm the highest per character. Right choices and lengths are
known beforehand, so judging thousands of items takes milliseconds; items of other kinds keep lm-eval's own judgement.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import zip_longest

import numpy as np
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tune_prune.core import terminal
from tune_prune.core.config import EvaluationProtocol
from tune_prune.core.hashing import seed_for
from tune_prune.data.calibration import check_token_ids
from tune_prune.evaluation.engine.prefix_trees import Rows, plan_rows, score_planned
from tune_prune.evaluation.engine.rows import Request, RequestScores, most_halvings
from tune_prune.evaluation.item_scores import ItemScore
from tune_prune.models.runner.residency import RESIDENT, Residency

__all__ = ["Item", "RequestScores", "ZeroShotSuite", "even_slices"]

_SURE = 32  # characters

# (log-likelihood, greedy) of an item's requests -> acc, and acc_norm where the task has it.
Judgement = Callable[[list[tuple[float, bool]]], tuple[float, float | None]]


@dataclass(frozen=True)
class Item:
    """Holds one document of a task as requests."""

    task: str
    doc_id: int  # position in the task's evaluation split
    gold: int  # index of the right choice; -1 where there is no single one
    requests: tuple[Request, ...]  # one per choice, behind which there may be others that the judgement asks for
    lengths: tuple[int, ...]  # of the choices in characters; empty where the task has no acc_norm
    judgement: Judgement | None = None  # None: by gold and lengths
    choices: int | None = None  # None: as many as requests


class ZeroShotSuite:
    """Holds the items of a protocol, ready to be scored in slices.

    Each slice adds items of every task to the one before it, as evenly from the tasks as their sizes allow (`even_slices`); which
    ones follows from the protocol's seed.
    """

    def __init__(self, items: Sequence[Item], protocol: EvaluationProtocol) -> None:
        self.items = list(items)
        self.num_items = len(self.items)
        self.num_slices = len(protocol.slices)
        by_task: dict[str, list[Item]] = {}
        for item in self.items:
            by_task.setdefault(item.task, []).append(item)
        self.items_per_task = {task: len(members) for task, members in by_task.items()}
        self.num_crossing = sum(any(request.crossing for request in item.requests) for item in self.items)
        self.gold_items_per_task = dict(Counter(item.task for item in self.items if item.gold >= 0))
        added: list[list[Item]] = [[] for _ in protocol.slices]
        counts = even_slices(self.items_per_task, protocol.slices)
        for task, members in by_task.items():
            random.Random(seed_for(protocol.seed, f"slices/{task}")).shuffle(members)
            start = 0
            for part, seen in zip(added, counts, strict=True):
                part += members[start : seen[task]]
                start = seen[task]
        self._slices = [_Slice(index, part) for index, part in enumerate(added)]

    def check_token_ids(self, label: str, vocab_size: int) -> None:
        """Raise UserError where a request has a token that the model `label`, of so many, does not know."""
        for task in self.items_per_task:
            requests = [request for item in self.items if item.task == task for request in item.requests]
            largest = max(int(tokens.max()) for request in requests for tokens in (request.inputs, request.targets))
            check_token_ids(label, largest, vocab_size, f" in task {task!r}")

    def right_answers(self) -> list[np.ndarray]:
        """Return questions with their right answers as token ids, without the very last, an item of each task in turn.

        Items without a single right choice are left out.
        """
        by_task: dict[str, list[np.ndarray]] = {task: [] for task in self.items_per_task}
        for item in self.items:
            if item.gold >= 0:
                by_task[item.task].append(item.requests[item.gold].inputs)
        return [inputs for turn in zip_longest(*by_task.values()) for inputs in turn if inputs is not None]

    def items_in(self, texts: Iterable[Tensor], tokenizer: PreTrainedTokenizerBase) -> int:
        """Count the items that one of `texts`, token ids [N] each, holds.

        An item is the question with its right answer in the words in which it is asked, whatever the white space. Shorter ones than
        `_SURE` characters are not counted: they may be there by chance.
        """
        right = [item.requests[item.gold] for item in self.items if item.gold >= 0]
        whole = [[*request.inputs.tolist(), int(request.targets[-1])] for request in right]
        asked = [_words(text) for text in tokenizer.batch_decode(whole, skip_special_tokens=True)]
        by_end: dict[str, set[str]] = {}
        for question in asked:
            if len(question) >= _SURE:
                by_end.setdefault(question[-_SURE:], set()).add(question)
        seen: set[str] = set()
        for text in map(_words, tokenizer.batch_decode([tokens.tolist() for tokens in texts])):
            for end in range(_SURE, len(text) + 1):
                if questions := by_end.get(text[end - _SURE : end]):
                    seen.update(question for question in questions if text.endswith(question, 0, end))
        return sum(question in seen for question in asked)

    def tokens_in_slice(self, slice_index: int, share: bool = True) -> int:
        """Return how many tokens (without padding) are forwarded to score the items that this slice adds."""
        return self.rows_in_slice(slice_index, share).num_tokens

    def rows_in_slice(self, slice_index: int, share: bool = True) -> Rows:
        """Return the rows that are forwarded to score the items that this slice adds."""
        return self._slices[slice_index].rows(share)

    def request_scores(
        self,
        model: PreTrainedModel,
        slice_index: int,
        batch_tokens: int | None = None,
        share: bool = True,
        residency: Residency = RESIDENT,
        scores: RequestScores | None = None,
    ) -> RequestScores:
        """Score the requests that this slice adds to the one before it.

        `model` is any causal language model of transformers, structurally pruned or not. `batch_tokens` bounds one
        forward pass (None: by device). `share`: whether the choices of an item share their prefix; a model must be able
        to (`prefix_trees.unsupported_reason`). `residency`: where the model's weights are, and how many rows go together.
        `scores`: `blank_scores`, or those of an attempt that has failed, to be completed.
        """

        def tokens_before(end: int) -> int:
            return sum(self.tokens_in_slice(index, share) for index in range(end))

        done, total = (partial(tokens_before, end) for end in (slice_index, self.num_slices))
        with terminal.step("zero-shot", total, "tokens", done) as advance:
            rows = self._slices[slice_index].rows(share)
            return score_planned(model, rows, batch_tokens, advance, residency, scores)

    def blank_scores(self, slice_index: int) -> RequestScores:
        """Return empty scores of the requests that this slice adds, to be filled in."""
        return RequestScores.blank(self._slices[slice_index].rows(True).num_requests)

    def most_halvings(
        self, slice_index: int, config: PretrainedConfig, share: bool, residency: Residency, device: str
    ) -> int:
        """Return how many times `request_scores` can do with half as much at once on "cpu" or "cuda"."""
        return most_halvings(self._slices[slice_index].rows(share).all, config, residency, device)

    def judge(self, slice_index: int, scores: RequestScores) -> list[ItemScore]:
        """Return the items that this slice adds, with their accuracies."""
        return self._slices[slice_index].judge(scores)

    def score_slice(
        self, model: PreTrainedModel, slice_index: int, batch_tokens: int | None = None, share: bool = True
    ) -> list[ItemScore]:
        """Score and judge the items that this slice adds."""
        return self.judge(slice_index, self.request_scores(model, slice_index, batch_tokens, share))

    def arrays(self) -> dict[str, np.ndarray] | None:
        """Return the suite as arrays; None where an item needs lm-eval's judgement, which no array can hold."""
        if any(item.judgement for item in self.items):
            return None
        tasks = list(self.items_per_task)
        requests = [request for item in self.items for request in item.requests]
        return {
            "tasks": np.array(tasks),
            "task": _integers(tasks.index(item.task) for item in self.items),
            "doc_id": _integers(item.doc_id for item in self.items),
            "gold": _integers(item.gold for item in self.items),
            "num_requests": _integers(len(item.requests) for item in self.items),
            "num_lengths": _integers(len(item.lengths) for item in self.items),
            "lengths": _integers(length for item in self.items for length in item.lengths),
            "num_inputs": _integers(len(request.inputs) for request in requests),
            "num_targets": _integers(len(request.targets) for request in requests),
            "crossing": np.array([request.crossing for request in requests]),
            "inputs": np.concatenate([request.inputs for request in requests]),
            "targets": np.concatenate([request.targets for request in requests]),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], protocol: EvaluationProtocol) -> ZeroShotSuite:
        """Return the suite whose `arrays` these are."""
        inputs = _split(arrays["inputs"], arrays["num_inputs"])
        targets = _split(arrays["targets"], arrays["num_targets"])
        requests = [Request(*one) for one in zip(inputs, targets, arrays["crossing"].tolist(), strict=True)]
        lengths = arrays["lengths"].tolist()
        tasks = arrays["tasks"].tolist()
        columns = (arrays[name].tolist() for name in ("task", "doc_id", "gold", "num_requests", "num_lengths"))
        items = []
        first_request = first_length = 0
        for task, doc_id, gold, num_requests, num_lengths in zip(*columns, strict=True):
            end, end_length = first_request + num_requests, first_length + num_lengths
            of_item = tuple(requests[first_request:end]), tuple(lengths[first_length:end_length])
            items.append(Item(tasks[task], doc_id, gold, *of_item))
            first_request, first_length = end, end_length
        return cls(items, protocol)


class _Slice:
    """Holds the items that one slice adds."""

    def __init__(self, index: int, items: list[Item]) -> None:
        self.index = index
        self.items = items
        self.rows: Callable[[bool], Rows] = cache(lambda share: plan_rows([item.requests for item in items], share))

    @cached_property
    def _starts(self) -> np.ndarray:
        """Return the number of each item's first request, and at the end that of all [items + 1]."""
        return np.cumsum([0] + [len(item.requests) for item in self.items])

    @cached_property
    def _groups(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Return items with equally many choices c, judged at once: their numbers [g], their requests' [g, c], the right
        choices [g] and the choices' lengths [g, c] (0 where the task has no acc_norm)."""
        members: dict[int, list[int]] = {}
        for number, item in enumerate(self.items):
            if item.judgement is None:
                members.setdefault(len(item.requests), []).append(number)
        groups = []
        for choices, numbers in members.items():
            items = [self.items[number] for number in numbers]
            requests = self._starts[numbers][:, None] + np.arange(choices)
            gold = np.array([item.gold for item in items])
            lengths = np.array([item.lengths or (0,) * choices for item in items], dtype=np.float64)
            groups.append((np.array(numbers), requests, gold, lengths))
        return groups

    def judge(self, scores: RequestScores) -> list[ItemScore]:
        assert len(scores.loglikelihoods) == self._starts[-1], "these are the scores of another slice"
        acc, acc_norm = np.zeros(len(self.items)), np.zeros(len(self.items))
        for numbers, requests, gold, lengths in self._groups:
            values = scores.loglikelihoods[requests]
            acc[numbers] = values.argmax(axis=1) == gold
            with np.errstate(divide="ignore", invalid="ignore"):  # an empty choice: as lm-eval, whatever comes out
                acc_norm[numbers] = (values / lengths).argmax(axis=1) == gold
        loglikelihoods, greedy = scores.loglikelihoods.tolist(), scores.greedy.tolist()
        items = []
        for number, (item, start, end) in enumerate(zip(self.items, self._starts, self._starts[1:], strict=False)):
            of_item = tuple(loglikelihoods[start:end])
            if item.judgement is not None:
                judged = item.judgement(list(zip(of_item, greedy[start:end], strict=True)))
            else:
                judged = float(acc[number]), float(acc_norm[number]) if item.lengths else None
            of_choices = of_item[: item.choices]
            items.append(ItemScore(item.task, item.doc_id, self.index, *judged, of_choices, item.gold))
        return items


def _words(text: str) -> str:
    return " ".join(text.split())


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int32)


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Return views of consecutive parts of `values` of those lengths."""
    ends = np.cumsum(lengths).tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def even_slices(task_sizes: Mapping[str, int], fractions: Sequence[float]) -> list[dict[str, int]]:
    """Return how many items of each task have been seen after each slice.

    A slice takes its fraction of ALL items, as evenly from the tasks as their sizes allow: min(N_t, level), rounded up.

    acc_mean weighs tasks and not items alike, so its error is that of the smallest samples: for the same number of items
    equal samples give the smallest one if outcomes spread alike in all tasks (Neyman's allocation; Cochran 1977, 5.5).
    """
    sizes = sorted(task_sizes.values())
    slices = []
    for fraction in fractions:
        left, level = fraction * sum(sizes), 0.0
        for index, size in enumerate(sizes):  # smallest first: each takes all it has or an equal share of what is left
            level = left / (len(sizes) - index)
            if level <= size:
                break
            left -= size
        # The small number keeps a level of 3.0000000000000004 from becoming 4.
        slices.append({task: math.ceil(min(size, level) - 1e-9) for task, size in task_sizes.items()})
    return slices
