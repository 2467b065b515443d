"""How many tokens the zero-shot items and the perplexity text are, without lm-eval and before a model is loaded.

Each task's items are rendered by the task's own templates (the functions of two stock definitions are repeated here), as lm-eval
will, so that what cannot be built is found before a search starts. A sample is tokenised and laid out in rows as the engine would;
the other items count by their characters. Hub data that is not at hand counts by a table.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jinja2
import numpy as np
from jinja2.sandbox import SandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from tune_prune.core.config import EvaluationProtocol
from tune_prune.core.errors import UserError
from tune_prune.data.task_definition import followed, read_definition
from tune_prune.data.task_files import (
    OWN_DEFINITION,
    TaskFile,
    TaskSource,
    cannot_be_built,
    check_characters,
    read_items,
    right_choice,
    task_files,
)
from tune_prune.data.templates import TemplateProcess
from tune_prune.evaluation.engine.prefix_trees import Rows, plan_rows
from tune_prune.evaluation.engine.rows import Request

SAMPLED_ITEMS = 64  # per task, spread over its file

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

    @property
    def row_length(self) -> float:
        """Mean tokens of an item."""
        return self.tokens / self.items


def zero_shot_tokens(
    tokenizer: PreTrainedTokenizerBase,
    protocol: EvaluationProtocol,
    source: TaskSource,
    known_tokens: int | None = None,
) -> ZeroShotTokens:
    """Tokens of all items of `protocol`; `known_tokens` where they have been counted before.

    Raises UserError for missing or unreadable files.
    """
    items = tokens = scored = 0.0
    sampled: list[list[Request]] = []
    if source.kind == "hub":
        scale = tokens_per_gpt2_token(tokenizer)
        for name in dict.fromkeys(protocol.tasks):
            count, mean_tokens, mean_scored = HUB_TASKS.get(name, _mean_hub_task())
            count = min(count, protocol.limit or count)
            items += count
            tokens += count * mean_tokens * scale
            scored += count * max(1.0, mean_scored * scale)
    else:
        for file in task_files(source, protocol.tasks):
            docs = read_items(file.items, file.fields)[: protocol.limit]
            pairs = _pairs(file, docs, source)
            some = [pairs[int(index)] for index in np.linspace(0, len(pairs) - 1, min(SAMPLED_ITEMS, len(pairs)))]
            requests = _encode(tokenizer, some)
            longest = max(pairs, key=lambda item: max(len(context) + len(choice) for context, choice in item))
            sample = plan_rows(requests)
            per_character = sample.num_tokens / sum(map(_characters, some))
            task_tokens = per_character * sum(map(_characters, pairs))
            items += len(docs)
            tokens += task_tokens
            scored += task_tokens * _scored(sample) / sample.num_tokens
            # Memory depends on the longest one, wherever it stands.
            sampled += requests if longest in some else [*requests, *_encode(tokenizer, [longest])]
    if known_tokens is not None:
        scored *= known_tokens / tokens
        tokens = known_tokens
    rows = plan_rows(sampled) if sampled else None
    return ZeroShotTokens(int(items), round(tokens), round(scored), known_tokens is not None, rows)


def tokens_per_gpt2_token(tokenizer: PreTrainedTokenizerBase) -> float:
    """How many tokens of `tokenizer` make one of GPT-2's, on a few lines of English."""
    return len(tokenizer(ENGLISH, add_special_tokens=False)["input_ids"]) / ENGLISH_GPT2_TOKENS


Pairs = list[tuple[str, str]]  # context and continuation of each choice of an item
Rendered = tuple[Pairs, Any, Sequence[str] | None]  # with the right answer, and the choices


def _mean_hub_task() -> tuple[int, float, float]:
    """A task of the hub that nothing is known of is taken for an average one of the seven."""
    rows, tokens, scored = (float(np.mean(column)) for column in zip(*HUB_TASKS.values(), strict=True))
    return int(rows), tokens, scored


def _pairs(file: TaskFile, docs: Sequence[dict[str, Any]], source: TaskSource) -> list[Pairs]:
    """The contexts and continuations of the choices of each item. Raises UserError where lm-eval could not build them; of a
    definition that names functions, which are not called here, an item counts by all its strings."""
    stock = file.definition.name != OWN_DEFINITION
    if stock and file.name in _FUNCTIONS:
        render = _FUNCTIONS[file.name]
    elif source.is_data(file):
        names = dict.fromkeys(name for doc in read_items(file.items) for name in doc)
        docs = [{name: doc.get(name) for name in names} for doc in docs]  # as in the columns of a data set
        render = _Renderer(read_definition(file.definition), TemplateProcess().render)
    else:
        environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        compiled = functools.cache(environment.from_string)  # compiling takes far longer than rendering
        render = _Renderer(followed(file.definition)[0], lambda template, doc: compiled(template).render(**doc))
    found = []
    for index, doc in enumerate(docs):
        try:
            pairs, gold, choices = render(doc)
            if choices is not None:
                right_choice(file.name, index, gold, choices, stock or source.is_data(file))
        except UserError:
            raise
        except Exception as error:  # a template may raise anything
            if not stock and not source.is_data(file):
                pairs = _all_strings(doc)
            else:
                error.add_note(f"in item {index}")
                raise cannot_be_built(file, error) from error
        check_characters(file.name, index, chain.from_iterable(pairs))
        found.append(pairs)
    return found


class _Renderer:
    """What lm-eval's templates make of an item: contexts and continuations, the right answer, and the choices (None where there
    are none)."""

    def __init__(self, values: dict[str, Any], render: Callable[[str, dict[str, Any]], str]) -> None:
        self.values = values
        self._render = render

    def __call__(self, doc: dict[str, Any]) -> Rendered:
        values = self.values
        for part in ("description", "gen_prefix"):  # few have them, and none counts
            self._field(doc, values.get(part))
        text, target = (self._number(doc, values.get(f"doc_to_{part}")) for part in ("text", "target"))
        if values.get("output_type") == "loglikelihood":
            return [(str(text), str(target))], target, None
        choices = self._field(doc, values.get("doc_to_choice"))
        choices = ast.literal_eval(choices) if isinstance(choices, str) else choices
        choices = list(choices.values()) if isinstance(choices, dict) else choices
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            raise ValueError(f"doc_to_choice makes {choices!r:.100}, and a list of texts is needed")
        delimiter = values.get("target_delimiter", " ")
        if isinstance(text, int):  # the number of a context among the choices; they share their continuation
            return [(choice, f"{delimiter}{target}") for choice in choices], text, choices
        return [(str(text), f"{delimiter}{choice}") for choice in choices], target, choices

    def _field(self, doc: dict[str, Any], how: Any) -> Any:
        if not isinstance(how, str):
            return how
        value = doc[how] if how in doc else self._render(how, doc)
        if value is None:
            raise ValueError("a field is null, or missing")
        return value

    def _number(self, doc: dict[str, Any], how: Any) -> Any:
        """A field where digits that a template has made are a number, and a list in brackets is one."""
        value = self._field(doc, how)
        if not isinstance(how, str) or how in doc:
            return value
        if value.isdigit() and self.values.get("doc_to_choice") is not None:
            return int(value)
        if value.startswith("[") and value.endswith("]"):
            with contextlib.suppress(SyntaxError, ValueError):  # then it is a text in brackets
                return ast.literal_eval(value)
        return value


def _hellaswag(doc: dict[str, Any]) -> Rendered:
    context = f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}"
    return [(context, f" {ending}") for ending in doc["endings"]], int(doc["label"]), doc["endings"]


def _winogrande(doc: dict[str, Any]) -> Rendered:
    before, _, after = doc["sentence"].partition("_")
    options = [doc["option1"], doc["option2"]]
    return [(before + option, f" {after.strip()}") for option in options], {"1": 0, "2": 1}[doc["answer"]], options


_FUNCTIONS = {"hellaswag": _hellaswag, "winogrande": _winogrande}  # of stock definitions


def _all_strings(doc: Any) -> Pairs:
    """The strings outside of lists as context, those of the longest list as continuations."""
    lists = [value for value in _values(doc) if isinstance(value, list) and all(isinstance(v, str) for v in value)]
    context = " ".join(value for value in _values(doc) if isinstance(value, str)) or " "
    return [(context, f" {choice}") for choice in max(lists, key=len, default=[""])] or [(context, " ")]


def _values(doc: Any) -> Iterable[Any]:
    for value in doc.values():
        if isinstance(value, dict):
            yield from _values(value)
        else:
            yield value


def _characters(pairs: Pairs) -> int:
    """What the tokens of an item grow with: contexts that are the same count once, and so do one-word choices."""
    contexts = {context for context, _ in pairs}
    return max(map(len, contexts)) + sum(len(c) for c in {continuation for _, continuation in pairs}) + 1


def _encode(tokenizer: PreTrainedTokenizerBase, items: Sequence[Pairs]) -> list[list[Request]]:
    """Requests of the items; encoded as lm-eval does, context and continuation together."""
    texts = [text for pairs in items for context, continuation in pairs for text in (context + continuation, context)]
    ids = iter(tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"])
    requests: list[list[Request]] = []
    for pairs in items:
        requests.append([])
        for _ in pairs:
            whole, context = next(ids), next(ids)
            if not context or len(whole) < 2:  # a token of lm-eval's stands before it
                whole, context = [0, *(whole or [0])], [0]
            num_targets = max(1, len(whole) - len(context))
            tokens = np.array(whole, dtype=np.int32)
            requests[-1].append(Request(tokens[:-1], tokens[-num_targets:]))
    return requests


def _scored(rows: Rows) -> int:
    return sum(len(np.unique(row.scored)) for row in (*rows.plain, *rows.trees))
