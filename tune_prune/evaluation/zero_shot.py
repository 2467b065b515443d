"""Zero-shot accuracy through lm-eval's own task definitions, encoding and judgement, item by item and in nested slices.

A suite is built once per model and tokenizer: every request is rendered and tokenised then, and scoring a pruned model
only runs rows of tokens. lm-eval (EleutherAI, v0.4) renders the prompts (`build_all_requests`), encodes them (HFLM's
methods, without HFLM's model) and judges each item (`process_results`); only the forward passes are ours.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tune_prune.config import EvaluationProtocol, seed_for
from tune_prune.errors import UserError
from tune_prune.evaluation.item_scores import ItemScore, items_table, metric_of, summarize, write_items
from tune_prune.evaluation.row_scoring import Request, count_tokens, score_requests
from tune_prune.evaluation.task_files import STOCK_TASKS, TaskSource, stock_definition, task_files, write_definition

__all__ = ["ItemScore", "ZeroShotSuite", "items_table", "summarize", "write_items"]


@dataclass(frozen=True)
class _Item:
    task: Task
    doc_id: int
    doc: dict[str, Any]
    gold: int
    requests: list[Request]  # one per choice


class ZeroShotSuite:
    """The items of a protocol, ready to be scored; see `build`.

    `num_items` over all tasks; `num_slices`.
    """

    def __init__(self, items: list[_Item], protocol: EvaluationProtocol) -> None:
        self.num_items = len(items)
        self.num_slices = len(protocol.slices)
        # What each slice adds to the one before it.
        self._added: list[list[_Item]] = [[] for _ in protocol.slices]
        by_task: dict[str, list[_Item]] = {}
        for item in items:
            by_task.setdefault(item.task.task_name, []).append(item)
        for name, members in by_task.items():
            random.Random(seed_for(protocol.seed, f"slices/{name}")).shuffle(members)
            start = 0
            for added, fraction in zip(self._added, protocol.slices, strict=True):
                # The small number keeps 0.1 * 30 = 3.0000000000000004 from becoming 4.
                end = math.ceil(fraction * len(members) - 1e-9)
                added += members[start:end]
                start = end

    @classmethod
    def build(
        cls, tokenizer: PreTrainedTokenizerBase, protocol: EvaluationProtocol, source: TaskSource, max_length: int
    ) -> ZeroShotSuite:
        """Renders and tokenises every request of the protocol's tasks.

        `max_length` is the model's position limit in tokens; longer requests lose their first tokens, as in lm-eval.
        Raises UserError for what the user must change: unknown tasks, missing or bad files, no hub, a task that is not
        scored by log-likelihoods, a gold answer that is none of the choices.
        """
        encoder = _Encoder(tokenizer)
        items: list[_Item] = []
        with _quiet():
            for task in _load_tasks(source, protocol):
                _check_task(task)
                for instances in _by_document(task):
                    gold = _gold(task, instances)
                    requests = [
                        _request(task, encoded, max_length) for encoded in encoder.loglikelihood(instances, True)
                    ]
                    items.append(_Item(task, instances[0].doc_id, instances[0].doc, gold, requests))
        return cls(items, protocol)

    def tokens_in_slice(self, slice_index: int) -> int:
        """Tokens (without padding) that scoring this slice forwards."""
        return count_tokens([request for item in self._added[slice_index] for request in item.requests])

    def score_slice(self, model: PreTrainedModel, slice_index: int, batch_tokens: int | None = None) -> list[ItemScore]:
        """Scores of the items that this slice adds to the one before it.

        `model` is any causal language model of transformers, structurally pruned or not. `batch_tokens` bounds one
        forward pass (None: by device).
        """
        added = self._added[slice_index]
        results = iter(score_requests(model, [request for item in added for request in item.requests], batch_tokens))
        scores = []
        for item in added:
            outcomes = [next(results) for _ in item.requests]
            judged = item.task.process_results(item.doc, outcomes)
            scores.append(
                ItemScore(
                    task=item.task.task_name,
                    doc_id=item.doc_id,
                    slice=slice_index,
                    acc=float(judged["acc"]),
                    acc_norm=float(judged["acc_norm"]) if "acc_norm" in judged else None,
                    loglikelihoods=tuple(loglikelihood for loglikelihood, _ in outcomes),
                    gold=item.gold,
                )
            )
        return scores


class _Encoder(HFLM):
    """HFLM's own rules for turning (context, continuation) into tokens, with no model behind them."""

    # HFLM's defaults, which its constructor would set along with loading a model.
    add_bos_token = None
    custom_prefix_token_id = None
    enable_thinking = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        # The choices of an item mostly share one context; encode it once.
        self.tok_encode = functools.lru_cache(maxsize=8)(super().tok_encode)

    def _loglikelihood_tokens(self, requests: list, **_: Any) -> list:
        """Where HFLM would run its model: hands back ((context, continuation), context ids, continuation ids)."""
        return requests


def _load_tasks(source: TaskSource, protocol: EvaluationProtocol) -> Iterator[Task]:
    """The protocol's tasks, each with its requests built."""
    if source.kind == "hub":
        for name in dict.fromkeys(protocol.tasks):
            yield _load_from_hub(name, protocol.limit)
        return
    with tempfile.TemporaryDirectory(prefix="tune_prune_tasks_") as folder:
        for file in task_files(source, protocol.tasks):
            try:
                task = _load(TaskManager(include_defaults=False), str(write_definition(file, Path(folder))))
                _build_requests(task, protocol.limit)
            except UserError:
                raise
            except Exception as error:  # a definition may call anything, so it may raise anything
                cause = " ".join(f"{type(error).__name__}: {error}".split())
                raise UserError(
                    f"task {file.name!r} cannot be built from {file.definition} and {file.items} ({cause}); "
                    f"correct the definition or the items"
                ) from error
            yield task


def _load_from_hub(name: str, limit: int | None) -> Task:
    if name in STOCK_TASKS:
        spec, manager = str(stock_definition(name)), TaskManager(include_defaults=False)
    else:
        spec, manager = name, TaskManager()  # reads every definition that lm-eval has: seconds
        if name not in manager.all_subtasks:
            close = get_close_matches(name, manager.all_subtasks, n=3)
            raise UserError(f"task {name!r} is unknown to lm-eval; close names: {', '.join(close) or 'none'}")
    try:
        task = _load(manager, spec)
        _build_requests(task, limit)
    except Exception as error:  # the hub client has no common class for "offline", "no such data set", "no connection"
        raise UserError(
            f"task {name!r} could not be loaded from the hub ({type(error).__name__}); "
            f"put its items at tasks/{name}/ of a folder and name that folder with --data-dir"
        ) from error
    return task


def _load(manager: TaskManager, spec: str) -> Task:
    """The task of that name or definition file."""
    (task,) = manager.load([spec])["tasks"].values()
    return task


def _build_requests(task: Task, limit: int | None) -> None:
    """Renders the requests, and every document's text, target and choices once and for all.

    lm-eval compiles a template anew at each rendering, and `process_results` renders: that would cost every trial as
    much as running a small model.
    """
    for name in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        setattr(task, name, _rendered_once(getattr(task, name)))
    task.build_all_requests(limit=limit)


def _rendered_once(render: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[int, tuple[dict, Any]] = {}  # holds the document too, so that its id stays its own

    @functools.wraps(render)
    def rendered(doc: dict, template: Any = None) -> Any:
        if template is not None:
            return render(doc, template)
        if id(doc) not in known:
            known[id(doc)] = doc, render(doc)
        return known[id(doc)][1]

    return rendered


def _check_task(task: Task) -> None:
    name, metric = task.task_name, metric_of(task.task_name)
    if task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood"):
        raise UserError(
            f"task {name!r} is of type {task.OUTPUT_TYPE}; only multiple_choice and loglikelihood tasks are scored"
        )
    if not {"acc", metric} <= task.aggregation().keys():
        raise UserError(
            f"task {name!r} has no metric {metric}; add `- metric: {metric}` to the metric_list of its definition"
        )


def _by_document(task: Task) -> list[list]:
    """The task's requests (lm-eval Instances), one list per document, choices in order."""
    documents: dict[int, list] = {}
    for instance in task.instances:
        documents.setdefault(instance.doc_id, []).append(instance)
    return list(documents.values())


def _gold(task: Task, instances: list) -> int:
    """Index of the right choice, or -1 where the task has no single one. Raises UserError where it is no choice."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return -1
    doc = instances[0].doc
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    if isinstance(gold, list):
        return -1
    choices = task.doc_to_choice(doc)
    index = choices.index(gold) if isinstance(gold, str) and gold in choices else gold
    if not isinstance(index, int) or not 0 <= index < len(choices):
        raise UserError(
            f"task {task.task_name!r}, item {instances[0].doc_id}: the right answer {gold!r} is none of its "
            f"{len(choices)} choices; correct the item"
        )
    return index


def _request(task: Task, encoded: tuple[tuple[str, str], list[int], list[int]], max_length: int) -> Request:
    """Cut to the model's limit as HFLM does: the last max_length + 1 tokens, of which the last is only predicted."""
    (_, continuation), context_ids, continuation_ids = encoded
    if not 0 < len(continuation_ids) <= max_length:
        raise UserError(
            f"task {task.task_name!r}: the answer {continuation[:60]!r} is {len(continuation_ids)} tokens; the model "
            f"takes 1 to {max_length}, so leave the task out with --tasks or use a model with a longer limit"
        )
    inputs = (context_ids + continuation_ids)[-(max_length + 1) :][:-1]
    return Request(np.array(inputs, dtype=np.int32), np.array(continuation_ids, dtype=np.int32))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and without warnings about defaults of lm-eval's own definitions and about requests longer
    than the tokenizer's limit (they are cut here); errors still raise."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "transformers.tokenization_utils_base")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
