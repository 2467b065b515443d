"""Log-likelihoods of given continuations: the one place where a model is run on zero-shot requests.

A row is one sequence of the batch with the requests whose continuations it holds. Here a row is one distinct input,
padded on the right; prefix_trees.py makes rows that hold all choices of an item.

Legend: R rows of a batch, T tokens of its longest row, P scored positions of a batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tune_prune.core import terminal
from tune_prune.evaluation.engine.passes import Batch, Pass, layer_by_layer, whole_model
from tune_prune.models.families import family_of
from tune_prune.models.head import Head, softmax_rows
from tune_prune.models.runner.layer_runner import BLOCK_TOKENS, LayerRunner
from tune_prune.models.runner.residency import RESIDENT, Residency

# Positions that a batch of several rows scores on a CPU, at most: those of so many logits, which are all there at once, or at a
# large vocabulary so many.
_SCORED_ELEMENTS, _FEWEST_SCORED = 6 << 20, 64
# Where a batch scores so many positions that their logits are made in parts: 12,000 at a vocabulary of 150,000 are 3.7 GB.
_HEAD_IN_PARTS = {"cuda"}


@dataclass(frozen=True)
class Request:
    """A continuation to score, as token ids.

    `inputs` [n] is what the model reads: context and continuation without the very last token. `targets` [m], m <= n,
    are the continuation's tokens; they are predicted at the last m positions of `inputs`. `crossing`: the first of them
    begins in the context.
    """

    inputs: np.ndarray
    targets: np.ndarray
    crossing: bool = False


@dataclass(frozen=True)
class Row:
    """One sequence for the model and the requests that are scored on it, one after the other."""

    tokens: np.ndarray  # [T]
    requests: tuple[int, ...]  # which of the caller's requests
    lengths: tuple[int, ...]  # their continuations' lengths, m tokens in all
    scored: np.ndarray  # [m] position in the row that predicts each target; several may share one
    targets: np.ndarray  # [m]

    masked: ClassVar[bool] = False  # whether rows of this kind come with masks

    @classmethod
    def extra_inputs(
        cls, model: PreTrainedModel, rows: Sequence[Row], width: int, device: torch.device
    ) -> dict[str, Any]:
        """Return what the forward pass of `rows` of this kind, padded to `width` tokens, needs besides their tokens.

        Plain rows need no mask: padding stands right of every real token, where causal attention never looks."""
        return {}

    @classmethod
    def attention(cls, model: PreTrainedModel, device: torch.device) -> AbstractContextManager[None]:
        """Within it `model`'s layers attend as suits rows of this kind."""
        return nullcontext()


@dataclass(frozen=True)
class RequestScores:
    """Scores of n requests, in their order."""

    loglikelihoods: np.ndarray  # float64 [n], nats
    greedy: np.ndarray  # bool [n]: greedy decoding would produce the continuation

    @classmethod
    def blank(cls, count: int) -> RequestScores:
        """Return scores of `count` requests, to be filled in."""
        return cls(np.full(count, np.nan), np.zeros(count, dtype=bool))

    def stored(self, arrays: Mapping[str, np.ndarray]) -> RequestScores:
        """Return the scores that were stored for these requests, as arrays. Raises KeyError or ValueError where they are not."""
        scores = RequestScores(arrays["loglikelihoods"], arrays["greedy"])
        if any(
            vars(scores)[name].shape != blank.shape or vars(scores)[name].dtype != blank.dtype
            for name, blank in vars(self).items()
        ):
            raise ValueError(f"it does not have the scores of {len(self.greedy)} requests")
        return scores


def default_batch_tokens(config: PretrainedConfig, device: str) -> int:
    """Return tokens per forward pass on "cpu" or "cuda": a CPU wants batches whose activations stay in its caches, a GPU large
    ones, but no larger than keeps its arithmetic busy, as padding grows with them (docs/studies/h100 has measurements)."""
    if device == "cuda":
        return min(16_384, 2**25 // config.hidden_size)
    return 1024 if config.hidden_size < 256 else 512


def plain_rows(requests: Sequence[Request], indices: Iterable[int] | None = None) -> list[Row]:
    """Return one row for every distinct input among `requests` (of those at `indices`): the one-token choices of an item have
    equal inputs and are forwarded once."""
    sharing: dict[bytes, list[int]] = {}
    for index in range(len(requests)) if indices is None else indices:
        sharing.setdefault(requests[index].inputs.tobytes(), []).append(index)
    rows = []
    for members in sharing.values():
        inputs = requests[members[0]].inputs
        targets = [requests[index].targets for index in members]
        scored = [np.arange(len(inputs) - len(tokens), len(inputs)) for tokens in targets]
        lengths = tuple(len(tokens) for tokens in targets)
        rows.append(Row(inputs, tuple(members), lengths, np.concatenate(scored), np.concatenate(targets)))
    return rows


def most_halvings(
    rows: Sequence[Row], config: PretrainedConfig, residency: Residency, device: str, batch_tokens: int | None = None
) -> int:
    """Count how often `score_rows` can do with half as much at once: then every row is alone."""
    lengths = [len(row.tokens) for row in rows] or [1]
    together = batch_tokens or default_batch_tokens(config, device)
    if residency.streamed:
        together = max(together, residency.block_tokens or BLOCK_TOKENS)
    return max(1, min(together, len(rows) * max(lengths)) // max(1, min(lengths))).bit_length() - 1


def score_rows(
    model: PreTrainedModel,
    rows: Sequence[Row],
    scores: RequestScores,
    batch_tokens: int | None = None,
    advance: terminal.Advance = terminal.unseen,
    residency: Residency = RESIDENT,
) -> None:
    """Write the scores of the requests of `rows` into `scores`, each at its number.

    Rows of a kind run together, longest first, which limits padding; those whose requests all have scores are left out.
    `batch_tokens` bounds rows times longest row of one forward pass (a single longer row is still run; None: by device). With
    `residency.weights`, batches of `residency.block_tokens` in all (None: BLOCK_TOKENS) go through each layer together; with
    `residency.halvings` batches and blocks are that much smaller. `advance` is told the tokens of every block that is done.
    """
    missing = np.isnan(scores.loglikelihoods).tolist()
    if not all(missing):
        advance(sum(len(row.tokens) for row in rows if not any(missing[index] for index in row.requests)))
        rows = [row for row in rows if any(missing[index] for index in row.requests)]
    if not rows:
        return
    rows = sorted(rows, key=lambda row: (row.masked, -len(row.tokens)))
    device = residency.device or model.device
    budget = batch_tokens or default_batch_tokens(model.config, device.type)
    most_scored = budget
    if device.type == "cpu":
        most_scored = max(_FEWEST_SCORED, _SCORED_ELEMENTS // Head(model).vocabulary)
    longest = max(len(row.tokens) for row in rows)
    budget = residency.at_once(min(budget, len(rows) * longest))
    start = 0
    with torch.inference_mode():
        in_parts = device.type in _HEAD_IN_PARTS
        if residency.weights is None:
            block_tokens, run = 0, whole_model(model, in_parts)
        else:
            block_tokens = residency.at_once(min(residency.block_tokens or BLOCK_TOKENS, len(rows) * longest))
            run = layer_by_layer(LayerRunner(model, family_of(model.config.model_type), residency), in_parts)
        while start < len(rows):
            block = _block(rows, start, budget, most_scored, block_tokens)
            _score_block(model, device, run, block, scores)
            start += sum(map(len, block))
            advance(sum(len(row.tokens) for batch in block for row in batch))


def _block(rows: Sequence[Row], start: int, budget: int, most_scored: int, block_tokens: int) -> list[Sequence[Row]]:
    """Return the batches from `start` on that are scored together: one, or as many as have `block_tokens`."""
    block: list[Sequence[Row]] = []
    tokens = 0
    while start < len(rows):
        batch = rows[start : _batch_end(rows, start, budget, most_scored)]
        tokens += _padded(batch)
        if block and tokens > block_tokens:
            break
        block.append(batch)
        start += len(batch)
    return block


def _padded(batch: Sequence[Row]) -> int:
    """Return the number of tokens with padding."""
    return len(batch) * len(batch[0].tokens)


def _batch_end(rows: Sequence[Row], start: int, budget: int, most_scored: int) -> int:
    """Return where the batch ends that begins at `start`: it has one row, or as many as both limits allow."""
    most_rows = budget // max(1, len(rows[start].tokens))
    scored = len(rows[start].scored)
    end = start + 1
    while (
        end < len(rows)
        and rows[end].masked == rows[start].masked
        and end - start < most_rows
        and scored + len(rows[end].scored) <= most_scored
    ):
        scored += len(rows[end].scored)
        end += 1
    return end


def _score_block(
    model: PreTrainedModel, device: torch.device, run: Pass, block: Sequence[Sequence[Row]], scores: RequestScores
) -> None:
    batches, predicting = zip(*(_prepared(model, device, rows) for rows in block), strict=True)
    for rows, where, (given, head) in zip(block, predicting, run(batches), strict=True):
        targets = np.concatenate([row.targets for row in rows])
        chosen, exact = token_log_probs(given, torch.from_numpy(targets.astype(np.int64)).to(device), where, head)
        lengths = [length for row in rows for length in row.lengths]
        indices = [index for row in rows for index in row.requests]
        # Each sum is taken as HFLM takes it, in the softmax's precision: of a thousand nats, its rounding is 1e-4.
        scores.loglikelihoods[indices] = [part.sum().item() for part in chosen.cpu().split(lengths)]
        scores.greedy[indices] = [part.all().item() for part in exact.cpu().split(lengths)]


def _prepared(model: PreTrainedModel, device: torch.device, rows: Sequence[Row]) -> tuple[Batch, Tensor]:
    """Return the batch of `rows`, and which of its positions predicts each target."""
    kind = type(rows[0])
    width = len(rows[0].tokens)
    if kind.masked and device.type == "cuda":
        width = -(-width // 8) * 8  # the memory-efficient kernels want masks whose rows are aligned
    tokens = pad((row.tokens for row in rows), len(rows), width, 0)
    scored = np.concatenate([index * width + row.scored for index, row in enumerate(rows)])
    positions, where = np.unique(scored, return_inverse=True)  # the choices of an item begin at the same one
    extra = kind.extra_inputs(model, rows, width, device)
    ids, at, predicting = (torch.from_numpy(values).to(device) for values in (tokens, positions, where))
    return Batch(ids, at, extra, partial(kind.attention, model, device)), predicting


def pad(values: Iterable[np.ndarray], count: int, width: int, filler: int) -> np.ndarray:
    """Return `count` sequences, each at most `width` long, as an int64 array [count, width], filled up on the right."""
    padded = np.full((count, width), filler, dtype=np.int64)
    for row, sequence in zip(padded, values, strict=True):
        row[: len(sequence)] = sequence
    return padded


def token_log_probs(
    logits: Tensor, targets: Tensor, rows: Tensor | None = None, head: Head | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probability [P] of `targets` [P] under `logits` [P, V], and whether each is the likeliest token [P].

    `rows` [P], in any order, says which row of `logits` predicts each target; None: the one at its own place. With a `head`
    what is given instead of logits is its input [P, H], and it is run a part at a time.
    The softmax is taken in float32 also where the model computes in less: in bfloat16 it is off by whole nats.
    """
    targets = targets.to(logits.device)
    rows = torch.arange(len(targets), device=logits.device) if rows is None else rows.to(logits.device)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    chosen = torch.empty(len(targets), dtype=dtype, device=logits.device)
    likeliest = torch.zeros(len(targets), dtype=torch.bool, device=logits.device)
    vocabulary = logits.shape[-1] if head is None else head.vocabulary
    step = softmax_rows(logits.device.type, vocabulary)
    for start in range(0, len(logits), step):
        part = logits[start : start + step]
        log_probs = torch.log_softmax(part if head is None else head(part), dim=-1, dtype=dtype)
        (here,) = torch.nonzero((rows >= start) & (rows < start + step), as_tuple=True)
        places, wanted = rows[here] - start, targets[here]
        chosen[here] = log_probs[places, wanted]
        # On a CPU argmax over a vocabulary costs more than the softmax and amax a tenth of it, so only targets that reach
        # the maximum are asked whether they are the first that do.
        (top,) = torch.nonzero(chosen[here] == log_probs.amax(dim=-1)[places], as_tuple=True)
        likeliest[here[top]] = log_probs[places[top]].argmax(dim=-1) == wanted[top]
    return chosen, likeliest
