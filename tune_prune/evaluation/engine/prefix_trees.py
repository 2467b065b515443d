"""Log-likelihoods of an item's choices with the tokens that they share forwarded once.

Inputs that begin alike, such as the choices of an item or several questions about one passage, are merged into a tree
of tokens, and the tree is one row: each token comes after its parent, and all that follow from it stand together. The
mask lets a token see its ancestors and itself, and its position is its depth, so it is computed as if its input stood
alone (tree attention as in SpecInfer, Miao et al. 2024). Inputs are compared as the model reads them, cut to its limit:
one that was cut shares only what its own beginning shares.

Legend: R rows of a batch, T tokens of its longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tune_prune.core import terminal
from tune_prune.evaluation.engine.rows import (
    Request,
    RequestScores,
    Row,
    most_halvings,
    pad,
    plain_rows,
    score_rows,
)
from tune_prune.evaluation.engine.tree_attention import blocked_attention
from tune_prune.models.families import known_family
from tune_prune.models.runner.out_of_memory import first_that_fits, is_out_of_memory
from tune_prune.models.runner.residency import RESIDENT, Residency

# An input joins the row of the one before it, in alphabetical order, if they share this fraction of its tokens. Less is
# not worth it: the mask costs 2% of the time at a hidden size of 512 and up to a third at 64, where attention is most of
# the work (one CPU core, rows of 30 to 480 tokens).
MIN_SHARED = 0.25
# A row grows to so many tokens, or to twice the length of its inputs: attention costs the square of it.
MAX_ROW = 256

ALL_LAYERS = ""  # the type of layer of models that take one mask for all of them


@dataclass(frozen=True)
class Tree(Row):
    """A row whose tokens are a tree, in depth-first order."""

    positions: np.ndarray  # [T] depth of each token: its position in its own input
    ends: np.ndarray  # [T] where the tokens end that follow from it; those from itself up to here see it

    masked: ClassVar[bool] = True

    @classmethod
    def extra_inputs(
        cls, model: PreTrainedModel, rows: Sequence[Row], width: int, device: torch.device
    ) -> dict[str, Any]:
        return tree_inputs(model, rows, width, device)

    @classmethod
    def attention(cls, model: PreTrainedModel, device: torch.device) -> AbstractContextManager[None]:
        return blocked_attention(model, device)


@dataclass(frozen=True)
class Rows:
    """The rows of some items. `num_requests` over all items, in order; rows name requests by their number."""

    plain: list[Row]
    trees: list[Tree]
    num_requests: int

    @property
    def all(self) -> list[Row]:
        return [*self.plain, *self.trees]

    @property
    def num_tokens(self) -> int:
        """Return tokens that are forwarded, without padding."""
        return sum(len(row.tokens) for row in self.all)


def plan_rows(items: Sequence[Sequence[Request]], share: bool = True) -> Rows:
    """Return trees for the requests whose inputs share enough, be they of one item or not, and plain rows for the others.

    `share` False: plain rows for all.
    """
    requests = [request for item in items for request in item]
    rows = plain_rows(requests)
    if not share:
        return Rows(rows, [], len(requests))
    # Big-endian bytes sort as the tokens do, and inputs that begin alike become neighbours.
    rows.sort(key=lambda row: row.tokens.astype(">i4").tobytes())
    groups: list[tuple[list[Row], list[int]]] = []  # rows of one tree, and how much each shares with the one before
    size = 0  # tokens of the last group's tree
    for row in rows:
        length = len(row.tokens)
        common = _common_prefix(groups[-1][0][-1].tokens, row.tokens) if groups else 0
        if common >= MIN_SHARED * length and size + length - common <= max(MAX_ROW, 2 * length):
            groups[-1][0].append(row)
            groups[-1][1].append(common)
            size += length - common
        else:
            groups.append(([row], [0]))
            size = length
    plain = [members[0] for members, _ in groups if len(members) == 1]
    trees = [_merge(members, shared) for members, shared in groups if len(members) > 1]
    return Rows(plain, trees, len(requests))


def score_items(
    model: PreTrainedModel,
    items: Sequence[Sequence[Request]],
    batch_tokens: int | None = None,
    share: bool = True,
    residency: Residency = RESIDENT,
) -> RequestScores:
    """Return scores of all requests of `items`, in order. `batch_tokens` and `residency` as in `rows.score_rows`; `share` needs a
    model for which `unsupported_reason` is None. Where memory does not suffice, fewer rows go together; raises OutOfMemory where
    not even one fits."""
    rows = plan_rows(items, share)
    scores = RequestScores.blank(rows.num_requests)
    device = residency.device or model.device
    most = most_halvings(rows.all, model.config, residency, device.type, batch_tokens)
    ways = (replace(residency, halvings=halvings) for halvings in range(most + 1))
    score = partial(score_planned, model, rows, batch_tokens, scores=scores)
    return first_that_fits("zero-shot", ways, lambda way: score(residency=way), device)


def score_planned(
    model: PreTrainedModel,
    rows: Rows,
    batch_tokens: int | None = None,
    advance: terminal.Advance = terminal.unseen,
    residency: Residency = RESIDENT,
    scores: RequestScores | None = None,
) -> RequestScores:
    """Return scores of what was planned before, with no second attempt. `advance` is told the tokens that are done. `scores`: of
    an attempt that has failed, to be completed."""
    scores = RequestScores.blank(rows.num_requests) if scores is None else scores
    score_rows(model, rows.all, scores, batch_tokens, advance, residency)
    return scores


def count_tokens(items: Sequence[Sequence[Request]], share: bool = True) -> int:
    """Count the tokens, without padding, that scoring `items` forwards."""
    return plan_rows(items, share).num_tokens


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Return length of the longest common prefix."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length


def _merge(rows: Sequence[Row], shared: Sequence[int]) -> Tree:
    """Merge plain rows in alphabetical order into a tree; each has its first `shared` tokens in common with the one before."""
    size = sum(len(row.tokens) - common for row, common in zip(rows, shared, strict=True))
    ends = np.full(size, size)
    path = np.zeros(0, dtype=np.int64)  # where the tokens of the current input stand in the tree
    scored = []
    start = 0
    for row, common in zip(rows, shared, strict=True):
        ends[path[common:]] = start
        end = start + len(row.tokens) - common
        path = np.concatenate([path[:common], np.arange(start, end)])
        scored.append(path[row.scored])
        start = end
    return Tree(
        tokens=np.concatenate([row.tokens[common:] for row, common in zip(rows, shared, strict=True)]),
        requests=tuple(index for row in rows for index in row.requests),
        lengths=tuple(length for row in rows for length in row.lengths),
        scored=np.concatenate(scored),
        targets=np.concatenate([row.targets for row in rows]),
        positions=np.concatenate(
            [np.arange(common, len(row.tokens)) for row, common in zip(rows, shared, strict=True)]
        ),
        ends=ends,
    )


def tree_inputs(model: PreTrainedModel, trees: Sequence[Row], width: int, device: torch.device) -> dict[str, Any]:
    """Return position_ids [R, T] and attention masks [R, 1, T, T] of `trees` padded to `width` tokens, on `device`.

    Masks are added to the attention scores, in the model's dtype: eager attention would add a boolean one as 0 and 1.
    Models whose layers differ take a mask for each type of layer.
    """
    assert all(isinstance(tree, Tree) for tree in trees)
    # Padding sees itself: a row of the mask that allowed nothing would give nan in some kernels.
    positions, ends = (
        torch.from_numpy(pad((getattr(tree, name) for tree in trees), len(trees), width, filler)).to(device)
        for name, filler in (("positions", 0), ("ends", width))
    )
    place = torch.arange(width, device=device)
    seen = (place <= place[:, None]) & (place[:, None] < ends[:, None, :])  # [R, T, T], queries before keys
    distance = positions[:, :, None] - positions[:, None, :]
    windows = attention_windows(model.config)
    masks = {
        kind: _additive(seen if window is None else seen & (distance < window), model.dtype)
        for kind, window in windows.items()
    }
    return {"position_ids": positions, "attention_mask": masks.get(ALL_LAYERS, masks)}


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def attention_windows(config: PretrainedConfig) -> dict[str, int | None]:
    """Return how many tokens back each type of layer sees, itself included; None: all of them.

    Raises ValueError for types of layers that are neither full nor sliding attention.

    As transformers reads the fields: Llama has no window, Mistral one for all layers, Qwen one for some.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not kinds:
        return {ALL_LAYERS: window}
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"layers of type {', '.join(sorted(unknown))}")
    if "sliding_attention" not in kinds:
        return {ALL_LAYERS: None}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def unsupported_reason(model: PreTrainedModel, residency: Residency = RESIDENT) -> str | None:
    """Say why `model` cannot score trees, in words; None where it can. `residency` as in `rows.score_rows`.

    Tried on a few random tokens: scores of trees must equal those of plain rows, and whatever the model raises on a
    mask of four dimensions or on position_ids is a reason, too.
    """
    family = known_family(model)
    if family is not None and family.recurrent:
        return f"layers of {type(model).__name__} carry a state from token to token, which has no branches"
    items = _probe_items(model)
    expected = score_planned(model, plan_rows(items, share=False), residency=residency).loglikelihoods
    try:
        shared = score_planned(model, plan_rows(items), residency=residency).loglikelihoods
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        return f"{type(model).__name__} does not take the masks of shared prefixes ({cause})"
    difference = np.abs(shared - expected).max() / _PROBE_TARGETS  # nats per token
    if not difference <= _TOLERANCE.get(model.dtype, 1e-3):
        return f"{type(model).__name__} scores otherwise under the masks of shared prefixes ({difference:.2g} nats a token)"
    return None


_PROBE_TARGETS = 6  # tokens per branch
# Nats a token that rounding may cost; logits of half precision have 8 to 11 bits.
_TOLERANCE = {torch.bfloat16: 0.25, torch.float16: 0.25}


def _probe_items(model: PreTrainedModel) -> list[list[Request]]:
    """Return two items of random tokens, of different lengths; with short sliding windows, longer than the window."""
    generator = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    window = min(getattr(model.config, "sliding_window", None) or 0, 64)
    items: list[list[Request]] = []
    for length in (window + 12, window + 9):
        context = generator.integers(vocabulary, size=length)
        continuations = generator.integers(vocabulary, size=(3, _PROBE_TARGETS))
        items.append([Request(np.concatenate([context, targets[:-1]]), targets) for targets in continuations])
    return items
