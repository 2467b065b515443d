"""lm-eval's own rule for turning a request into tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerBase

from tune_prune.core.errors import UserError
from tune_prune.data.task_files import check_characters
from tune_prune.evaluation.engine.rows import Request


def encode(
    tokenizer: PreTrainedTokenizerBase, instances: Sequence[Instance], max_length: int, add_bos_token: bool = False
) -> list[Request]:
    """Encode lm-eval's requests of type loglikelihood, in order, split as lm-eval does.

    The continuation is what is left behind as many tokens as the context alone has. Where that is nothing (tokens that cross word
    boundaries), it is every token that differs from the context's, and the request is `crossing`.

    `add_bos_token`: each begins with the BOS token, also where the tokenizer puts none there by itself.

    Cut to `max_length` as HFLM does: the last max_length + 1 tokens, of which the last is only predicted. Raises
    UserError for continuations without tokens or with more than that, and for a tokenizer with neither BOS nor EOS.
    """
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has neither bos_token nor eos_token, one of which stands for an empty context; name one in its "
            "tokenizer_config.json"
        )
    requests = []
    pairs = _encode_pairs(tokenizer, instances, add_bos_token)
    for instance, (context_ids, continuation_ids, crossing) in zip(instances, pairs, strict=True):
        if not continuation_ids:
            raise _without_tokens(instance)
        if len(continuation_ids) > max_length:
            raise UserError(
                f"{_answer(instance)} is {len(continuation_ids)} tokens; the model takes at most {max_length}, so leave the task "
                "out with --tasks or use a model with a longer limit"
            )
        inputs = (context_ids + continuation_ids)[-(max_length + 1) :][:-1]
        ids, targets = (np.array(tokens, dtype=np.int32) for tokens in (inputs, continuation_ids))
        requests.append(Request(ids, targets, crossing))
    return requests


_Pair = tuple[list[int], list[int], bool]


def _encode_pairs(
    tokenizer: PreTrainedTokenizerBase, instances: Sequence[Instance], add_bos_token: bool
) -> list[_Pair]:
    """Return (context ids, continuation ids, whether a token crosses from one to the other) of every request.

    HFLM's rule goes over the requests twice. The first time, the texts that it would encode are only noted; they are
    then encoded all at once and each once, which a fast tokenizer does on all cores; the second time their tokens are returned.
    """
    for instance in instances:
        check_characters(instance.task_name, instance.doc_id, instance.args)
    bulk = _BulkTokenizer(tokenizer)
    rule = _Encoding(bulk, add_bos_token)
    rule.loglikelihood(list(instances), disable_tqdm=True)
    bulk.encode_noted()
    for instance in instances:
        context, continuation = instance.args
        if context == "" and not rule.tok_encode(continuation, add_special_tokens=False):
            raise _without_tokens(instance)  # HFLM's rule reads its first token
    return rule.loglikelihood(list(instances), disable_tqdm=True)


def _without_tokens(instance: Instance) -> UserError:
    return UserError(f"{_answer(instance)} has no tokens, so nothing of it can be scored; correct it")


def _answer(instance: Instance) -> str:
    return f"task {instance.task_name!r}, question {instance.doc_id}: the answer {instance.args[1][:60]!r}"


class _Encoding(HFLM):
    """Turns (context, continuation) into tokens by HFLM's own rule, with no model behind it."""

    # HFLM's defaults, which its constructor would set along with loading a model.
    custom_prefix_token_id = None
    enable_thinking = False

    def __init__(self, tokenizer: _BulkTokenizer, add_bos_token: bool) -> None:
        self.tokenizer = tokenizer
        self.add_bos_token = add_bos_token or None

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Encode as HFLM does, which has its tokenizer loaded anew so that it adds a BOS token; one that does not gets it here."""
        tokens: list[int] = super().tok_encode(string, add_special_tokens, **options)
        if self.add_bos_token and add_special_tokens is None and tokens[:1] != [self.prefix_token_id]:
            return [self.prefix_token_id, *tokens]
        return tokens

    def _loglikelihood_tokens(self, requests: list, **_: Any) -> list:
        """Hand back the encoded pairs, where HFLM would run its model. Its rule moves white space from the end of the context to
        the continuation; it stops where nothing is left before it, which stands for an empty context here."""
        pairs: list[_Pair] = []
        for texts, context, continuation in requests:
            crossing = not continuation and texts[0] != ""
            if crossing:
                whole = self.tok_encode("".join(texts))
                same = list(takewhile(bool, map(eq, context, whole)))
                context, continuation = whole[: len(same)], whole[len(same) :]
            pairs.append((context or [self.prefix_token_id], continuation, crossing))
        return pairs


class _BulkTokenizer:
    """Stands in for a tokenizer in HFLM's rule and encodes in bulk.

    `encode` notes a text without tokens and returns a placeholder.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: dict[tuple[str, tuple[tuple[str, Any], ...]], list[int]] = {}
        self.decode = functools.cache(tokenizer.decode)
        self.bos_token_id, self.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id

    def encode(self, text: str, **options: Any) -> list[int]:
        return self._tokens.setdefault((text, tuple(options.items())), [-1])

    def encode_noted(self) -> None:
        for options in {options for _, options in self._tokens}:
            noted = [key for key in self._tokens if key[1] == options]
            encoded = self._tokenizer([text for text, _ in noted], **dict(options))["input_ids"]
            self._tokens.update(zip(noted, encoded, strict=True))
