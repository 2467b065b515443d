"""Builds a zero-shot suite from lm-eval's own task definitions.

Once per tokenizer and task set: lm-eval (EleutherAI, v0.4) renders the prompts (`build_all_requests`) and its rule
encodes them (encoding.py). What comes out is tokens; scoring a pruned model only runs rows of them (suite.py).
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import threading
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval.utils
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerBase

from tune_prune.core import temporary, terminal
from tune_prune.core.config import EvaluationProtocol
from tune_prune.core.errors import UserError
from tune_prune.data.task_definition import check_scored
from tune_prune.data.task_files import (
    STOCK_TASKS,
    TaskSource,
    cannot_be_built,
    pinned_definition,
    plain_definition,
    right_choice,
    task_files,
    write_definition,
)
from tune_prune.data.templates import TemplateProcess
from tune_prune.evaluation.encoding import encode
from tune_prune.evaluation.engine.rows import Request
from tune_prune.evaluation.item_scores import metric_of
from tune_prune.evaluation.suite import Item, ZeroShotSuite

Rendering = Callable[[], contextlib.AbstractContextManager[None]]
_LM_EVAL_ENVIRONMENT = threading.RLock()
# lm-eval's own environment, which compiles each template once: that takes far longer than to render it.
_COMPILED = SimpleNamespace(from_string=functools.cache(lm_eval.utils.env.from_string))


def build_suite(
    tokenizer: PreTrainedTokenizerBase, protocol: EvaluationProtocol, source: TaskSource, max_length: int
) -> ZeroShotSuite:
    """Render and tokenise every request of the protocol's tasks.

    `max_length` is the model's position limit in tokens; longer requests lose their first tokens, as in lm-eval. Raises
    UserError for what the user must change: unknown tasks, missing or bad files, no hub, a task that is not scored by
    log-likelihoods, a gold answer that is none of the choices.
    """
    items: list[Item] = []
    # The bar is opened outside: whatever is drawn inside is discarded.
    with terminal.step("tasks", lambda: len(set(protocol.tasks)), "tasks") as advance, _quiet():
        for task in _load_tasks(source, protocol):
            check_scored(task.task_name, task.OUTPUT_TYPE, list(task.aggregation()))
            encoded = iter(encode(tokenizer, task.instances, max_length, protocol.bos))
            requests: dict[int, list[Request]] = {}
            documents: dict[int, dict[str, Any]] = {}
            for instance in task.instances:
                documents[instance.doc_id] = instance.doc
                requests.setdefault(instance.doc_id, []).append(next(encoded))
            items += [_item(task, doc_id, doc, requests[doc_id]) for doc_id, doc in documents.items()]
            advance(1)
    return ZeroShotSuite(items, protocol)


def _item(task: Task, doc_id: int, doc: dict[str, Any], requests: list[Request]) -> Item:
    """Return the item of a document, with lm-eval's own judgement unless it is plain multiple choice with one right answer."""
    own_rule = _has_own_rule(task)
    gold = _gold(task, doc_id, doc, not own_rule)
    texts = task.doc_to_choice(doc) if gold >= 0 else []  # no or several right answers: not plain
    if own_rule or len(texts) != len(requests):
        # acc_mutual_info asks for every choice once more, without its context.
        choices = len(requests) // (2 if "acc_mutual_info" in task.aggregation() else 1)
        judged = functools.partial(_judged_by_lm_eval, task, doc)
        try:
            judged([(-1.0 - index, False) for index in range(len(requests))])  # now, and not once all is scored
        except UserError:
            raise
        except Exception as error:  # metrics of a definition may raise anything
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"task {task.task_name!r}, question {doc_id} cannot be judged by the task's metrics ({cause}); correct it, or "
                "leave out metrics other than acc and acc_norm"
            ) from error
        return Item(task.task_name, doc_id, gold, tuple(requests), (), judged, choices)
    lengths = tuple(map(len, texts)) if "acc_norm" in task.aggregation() else ()
    return Item(task.task_name, doc_id, gold, tuple(requests), lengths)


def _has_own_rule(task: Task) -> bool:
    """Say whether something else than lm-eval's own rule judges what a model answers."""
    lm_evals = getattr(task.process_results, "__func__", None) is ConfigurableTask.process_results
    return not lm_evals or callable(task.config.process_results)


def _judged_by_lm_eval(
    task: Task, doc: dict[str, Any], outcomes: list[tuple[float, bool]]
) -> tuple[float, float | None]:
    """Return acc and acc_norm by lm-eval's judgement.

    Raises UserError where the one that the task is reported by is missing, or one is a share of an item, which no outcome of right
    or wrong can keep.
    """
    judged, reported = task.process_results(doc, outcomes), metric_of(task.task_name)
    accuracies = {name: float(judged[name]) for name in ("acc", "acc_norm") if name in judged}
    for name, value in accuracies.items():
        if value not in (0, 1):
            raise UserError(
                f"task {task.task_name!r} judges a question by {name} {value:.4g}; tasks whose questions are right (1) or "
                "wrong (0) are "
                "compared here: leave it out"
            )
    if reported not in accuracies:
        raise UserError(
            f"task {task.task_name!r} is judged without {reported}, by which a task of that name is reported; give its folder "
            "another name, or leave it out"
        )
    return accuracies["acc"], accuracies.get("acc_norm")


def _load_tasks(source: TaskSource, protocol: EvaluationProtocol) -> Iterator[Task]:
    """Yield the protocol's tasks, each with its requests built."""
    templates = functools.partial(_rendered_by, _Templates(TemplateProcess()))
    with temporary.folder() as folder:
        if source.kind == "hub":
            for name in dict.fromkeys(protocol.tasks):
                yield _load_from_hub(name, protocol.limit, folder)
            return
        for file in task_files(source, protocol.tasks):
            try:
                if source.is_data(file):
                    with templates(), _of_the_first_item():
                        task = _PlainTask(config=plain_definition(file))
                    _build_requests(task, protocol.limit, templates)
                else:
                    task = _load(TaskManager(include_defaults=False), str(write_definition(file, folder)))
                    _build_requests(task, protocol.limit)
            except UserError:
                raise
            except Exception as error:  # a definition may call anything, so it may raise anything
                raise cannot_be_built(file, error) from error
            yield task


class _PlainTask(ConfigurableTask):
    """Asks as a definition says that is data, and refuses choices that are no list of texts."""

    def doc_to_choice(self, doc: Any, *template: Any) -> list[str]:
        choices = None if self.config.doc_to_choice is None else super().doc_to_choice(doc, *template)
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            raise ValueError(f"doc_to_choice makes {choices!r:.100}, and a list of texts is needed")
        return choices


def _load_from_hub(name: str, limit: int | None, folder: Path) -> Task:
    if name in STOCK_TASKS:
        spec, manager = str(pinned_definition(name, folder)), TaskManager(include_defaults=False)
    else:
        spec, manager = name, TaskManager()  # reads every definition that lm-eval has: seconds
        if name not in manager.all_subtasks and name in manager.all_tasks:
            raise UserError(
                f"task {name!r} is a group of lm-eval's tasks; name its tasks instead (`lm-eval ls tasks` lists all of them)"
            )
        if name not in manager.all_subtasks:
            close = get_close_matches(name, manager.all_subtasks, n=3)
            raise UserError(f"task {name!r} is unknown to lm-eval; close names: {', '.join(close) or 'none'}")
    try:
        task = _load(manager, spec)
        task.set_config("num_fewshot", 0)  # some definitions have examples before the question
        _build_requests(task, limit)
    except UserError:
        raise
    except Exception as error:  # the hub client has no common class for "offline", "no such data set", "no connection"
        raise UserError(
            f"task {name!r} could not be loaded from the hub ({type(error).__name__}); "
            f"put its questions at tasks/{name}/ of a folder and name that folder with --data-dir"
        ) from error
    return task


def _load(manager: TaskManager, spec: str) -> Task:
    """Load the task of that name or definition file."""
    with _of_the_first_item():
        (task,) = manager.load([spec])["tasks"].values()
    return task


@contextlib.contextmanager
def _of_the_first_item() -> Iterator[None]:
    """Note on errors that item 0 may be at fault, whose choices lm-eval reads to know what the definition asks."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        error.add_note("in the definition or in question 0")
        raise


def _build_requests(task: Task, limit: int | None, templates: Rendering | None = None) -> None:
    """Render the requests, and every document's text, target and choices once and for all, inside `templates()`: `process_results`
    renders, too, which would cost every trial as much as running a small model."""
    templates = templates or functools.partial(_rendered_by, _COMPILED)
    for name in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        setattr(task, name, _rendered_once(getattr(task, name), templates))
    construct = task.construct_requests

    def constructed(doc: dict, ctx: Any, **about: Any) -> Any:
        requests = construct(doc, ctx, **about)
        if not requests:  # lm-eval would go on without the item
            raise UserError(f"task {task.task_name!r}, question {about['metadata'][1]} has no choices; correct it")
        return requests

    task.construct_requests = constructed
    with templates():
        task.build_all_requests(limit=limit)


def _rendered_once(render: Callable[..., Any], templates: Rendering) -> Callable[..., Any]:
    cached: dict[int, tuple[dict, Any]] = {}  # holds the document too, so that its id is not reused

    @functools.wraps(render)
    def rendered(doc: dict, template: Any = None) -> Any:
        with templates():
            if template is not None:
                return render(doc, template)
            if id(doc) not in cached:
                try:
                    value = render(doc)
                    if value is None:
                        raise ValueError("a field is null, or missing")
                except Exception as error:
                    error.add_note(f"in question {len(cached)}")  # lm-eval asks for one after the other
                    raise
                cached[id(doc)] = doc, value
        return cached[id(doc)][1]

    return rendered


@contextlib.contextmanager
def _rendered_by(environment: Any) -> Iterator[None]:
    """Make lm-eval render every template inside by `environment`, which has jinja2's `from_string`.

    Its own is a global of its module, so that threads wait for each other here.
    """
    with _LM_EVAL_ENVIRONMENT:
        before, lm_eval.utils.env = lm_eval.utils.env, environment
        try:
            yield
        finally:
            lm_eval.utils.env = before


class _Templates:
    """Stands in for lm-eval's jinja2 environment, and renders in a process with a sandbox."""

    def __init__(self, process: TemplateProcess) -> None:
        self._process = process

    def from_string(self, template: str) -> SimpleNamespace:
        return SimpleNamespace(render=lambda **values: self._process.render(template, values))


def _gold(task: Task, doc_id: int, doc: dict[str, Any], by_lm_eval: bool) -> int:
    """Return the index of the right choice, or -1 where the task has no single one. Raises UserError where it is no choice."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return -1
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    return right_choice(task.task_name, doc_id, gold, task.doc_to_choice(doc), by_lm_eval)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars, and warnings about defaults of lm-eval's own definitions and about long requests.

    Requests longer than the tokenizer's limit are cut here. Errors still raise.
    """
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
