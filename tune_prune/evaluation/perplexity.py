"""Perplexity of a text: non-overlapping windows, token-weighted mean next-token loss, exp of it.

The usual WikiText-2 protocol of pruning papers: the raw test split joined, tokenised once, windows of 2048 tokens. It
differs from theirs in one point: the last, shorter window counts too, so that every text has a perplexity.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tune_prune.errors import UserError
from tune_prune.evaluation.row_scoring import CPU_LOGITS

TEXT_FILE = Path("text") / "wikitext2-raw.test.txt"

# Logits of one forward pass: half a GiB in bfloat16, i.e. one window of 2048 tokens at a vocabulary of 131k.
_LOGIT_ELEMENTS = 1 << 28
# Logits held at once, with the float32 elements of their softmax.
_AT_ONCE = {"cuda": 1 << 26, "cpu": CPU_LOGITS}


@dataclass(frozen=True)
class PerplexityResult:
    """`ppl` = exp(`mean_loss`); `mean_loss` in nats per predicted token; `num_tokens` predicted tokens."""

    ppl: float  # inf when the loss is infinite or too large, nan when it is nan
    mean_loss: float
    num_tokens: int


def perplexity(model: PreTrainedModel, tokens: Tensor, window: int, batch_size: int | None = None) -> PerplexityResult:
    """Perplexity of `tokens` (LongTensor [N]) in windows of `window` tokens, at most the model's position limit.

    The first token of each window is context only. `batch_size` windows are run at once; by default as many as keep
    the logits small. An infinite or undefined loss is a result, not an error. Raises UserError for fewer than 2 tokens.
    """
    if len(tokens) < 2:
        raise UserError(f"the perplexity text has {len(tokens)} tokens; at least 2 are needed, choose a longer text")
    window = min(window, getattr(model.config, "max_position_embeddings", None) or window)
    if window < 2:
        raise UserError(f"perplexity_window is {window}; a window needs at least 2 tokens, e.g. 2048")
    batch_size = batch_size or max(1, min(8, _LOGIT_ELEMENTS // (window * model.config.vocab_size)))
    whole = len(tokens) // window
    batches = list(tokens[: whole * window].view(whole, window).split(batch_size)) if whole else []
    rest = tokens[whole * window :]
    if len(rest) > 1:
        batches.append(rest[None])

    total, count = 0.0, 0
    with torch.inference_mode():
        separate = _head_is_last(model, tokens[:2])
        for batch in batches:
            batch = batch.to(model.device)  # [B, W]
            hidden, logits = _forward(model, batch, batch.shape[1] - 1 if not separate else 1)
            # A window at a time: all at once would copy every logit, which costs a small model as much as making them.
            for number, tokens_of_window in enumerate(batch):
                parts = _parts(model, hidden[number, :-1]) if separate else iter([logits[number]])
                targets = tokens_of_window[1:]
                for part in parts:
                    total += _loss(part, targets[: len(part)])
                    targets = targets[len(part) :]
            count += batch[:, 1:].numel()
            del logits  # the next ones are made before the name would be theirs
    mean_loss = total / count
    return PerplexityResult(ppl=_exp(mean_loss), mean_loss=mean_loss, num_tokens=count)


def _forward(model: PreTrainedModel, batch: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """What the head gets for `batch` [B, W] and the logits at the first `positions` of each row: [B, W, H], [B, positions, V]."""
    seen: list[Tensor] = []

    def first_only(_: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(args[0])
        return (args[0][:, :positions],)

    handle = model.get_output_embeddings().register_forward_pre_hook(first_only)
    try:
        logits = model(input_ids=batch, use_cache=False).logits
    finally:
        handle.remove()
    return seen[0], logits


def _head_is_last(model: PreTrainedModel, tokens: Tensor) -> bool:
    """Whether logits are what the head gives. Then they can be made a part at a time, in memory that is used again: the
    logits of a window of 2048 tokens at a vocabulary of 50k are 400 MB, which a CPU pays for at every window, once when the
    pages are touched and once when they are given back. A model that scales or caps them afterwards makes all at once."""
    hidden, logits = _forward(model, tokens[None].to(model.device), len(tokens))
    return torch.equal(model.get_output_embeddings()(hidden), logits)


def _parts(model: PreTrainedModel, hidden: Tensor) -> Iterator[Tensor]:
    """The logits [p, V] of a window's `hidden` [P, H], a few positions at a time."""
    head = model.get_output_embeddings()
    step = max(1, _AT_ONCE.get(hidden.device.type, CPU_LOGITS) // model.config.vocab_size)
    for part in hidden.split(step):
        yield head(part)


def _loss(logits: Tensor, targets: Tensor) -> float:
    """Summed cross entropy in nats of `targets` [P] under `logits` [P, V], in float32 also where the model computes in less."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    step = max(1, _AT_ONCE.get(logits.device.type, CPU_LOGITS) // logits.shape[-1])
    parts = zip(logits.split(step), targets.split(step), strict=True)
    return sum(
        F.cross_entropy(part.to(dtype), wanted, reduction="none").double().sum().item() for part, wanted in parts
    )


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:  # a loss above 709 nats: the perplexity is beyond what a float can say
        return math.inf


def load_text(data_dir: str | None, embedded: bool) -> str:
    """The text whose perplexity is reported: embedded, else WikiText-2 raw test of `data_dir`, else of the hub.

    File and hub give the same text: the data set's rows are the file's lines (with their newline; empty where the line
    is blank), joined by two newlines as in the usual protocol. Raises UserError where the text cannot be had.
    """
    if embedded:
        from tune_prune.embedded import perplexity_text

        return perplexity_text()
    if data_dir is not None:
        path = Path(data_dir) / TEXT_FILE
        if not path.is_file():
            raise UserError(
                f"the perplexity text {path} is missing; put the raw WikiText-2 test there, or leave --data-dir out"
            )
        with path.open(encoding="utf-8") as file:
            return "\n\n".join(line if line.strip() else "" for line in file)

    from datasets import load_dataset

    try:
        rows = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
    except Exception as error:  # the hub client has no common class for "offline", "no such file" and "no connection"
        raise UserError(
            f"WikiText-2 could not be loaded from the hub ({type(error).__name__}); put its raw test split at "
            f"{TEXT_FILE} of a folder and name that folder with --data-dir"
        ) from error
    return "\n\n".join(rows["text"])


def fingerprint(data_dir: str | None, embedded: bool) -> str:
    """What the perplexity text is, by content; the hub's by name. Raises UserError where a local text cannot be had."""
    if data_dir is None and not embedded:
        return "hub:wikitext-2-raw-v1"
    return hashlib.sha256(load_text(data_dir, embedded).encode()).hexdigest()[:16]
