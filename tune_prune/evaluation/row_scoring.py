"""Log-likelihoods of given continuations: the one place where a model is run on zero-shot requests.

Plain rows: every distinct input is one right-padded row. An engine that shares prefixes between the choices of an item
replaces `score_requests` and nothing else.

Legend: R rows of a batch, T tokens of its longest row, P scored positions of a batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

# Float32 log-softmax elements held at once (256 MiB), so that a 150k vocabulary does not set the peak memory.
_SOFTMAX_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Request:
    """A continuation to score, as token ids.

    `inputs` [n] is what the model reads: context and continuation without the very last token. `targets` [m], m <= n,
    are the continuation's tokens; they are predicted at the last m positions of `inputs`.
    """

    inputs: np.ndarray
    targets: np.ndarray


def default_batch_tokens(model: PreTrainedModel) -> int:
    """Tokens per forward pass: a GPU wants large batches, a CPU ones whose activations stay in its caches."""
    return 16384 if model.device.type == "cuda" else 2048


def count_tokens(requests: list[Request]) -> int:
    """Tokens (without padding) that scoring `requests` forwards: equal inputs count once."""
    return sum(len(key) for key in {request.inputs.tobytes(): None for request in requests}) // 4


def score_requests(
    model: PreTrainedModel, requests: list[Request], batch_tokens: int | None = None
) -> list[tuple[float, bool]]:
    """(log-likelihood in nats, whether greedy decoding would produce it) of every request, in the order given.

    `batch_tokens` bounds rows times longest row of one forward pass (a single longer row is still run). Requests with
    equal inputs - the one-token choices of an item - are forwarded once.
    """
    results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
    sharing: dict[bytes, list[int]] = {}
    for index, request in enumerate(requests):
        sharing.setdefault(request.inputs.tobytes(), []).append(index)
    rows = sorted(sharing.values(), key=lambda indices: -len(requests[indices[0]].inputs))
    with torch.inference_mode():
        for batch in _batches(rows, requests, batch_tokens or default_batch_tokens(model)):
            indices = [index for row in batch for index in row]
            scores = _score_batch(model, requests, batch)
            for index, score in zip(indices, scores, strict=True):
                results[index] = score
    return results


def token_log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 log-probability [P] of `targets` [P] under `logits` [P, V], and whether each is the likeliest token [P].

    The softmax is taken in float32 whatever the model's dtype: in bfloat16 it is off by whole nats.
    """
    step = max(1, _SOFTMAX_ELEMENTS // logits.shape[-1])
    chosen, greedy = [], []
    for part, wanted in zip(logits.split(step), targets.split(step), strict=True):
        log_probs = torch.log_softmax(part, dim=-1, dtype=torch.float32)
        chosen.append(log_probs.gather(1, wanted[:, None])[:, 0])
        greedy.append(log_probs.argmax(dim=-1) == wanted)
    return torch.cat(chosen), torch.cat(greedy)


def _batches(rows: list[list[int]], requests: list[Request], batch_tokens: int) -> Iterator[list[list[int]]]:
    """`rows`, longest first, in runs whose padded size stays within `batch_tokens`."""
    start = 0
    while start < len(rows):
        longest = len(requests[rows[start][0]].inputs)
        end = start + max(1, batch_tokens // longest)
        yield rows[start:end]
        start = end


def _score_batch(model: PreTrainedModel, requests: list[Request], batch: list[list[int]]) -> list[tuple[float, bool]]:
    """Scores of the requests of `batch` (rows of request indices), in the batch's order."""
    device = model.device
    longest = len(requests[batch[0][0]].inputs)
    input_ids = np.zeros((len(batch), longest), dtype=np.int64)  # [R, T]
    positions, targets, lengths = [], [], []
    for row, sharing in enumerate(batch):
        inputs = requests[sharing[0]].inputs
        input_ids[row, : len(inputs)] = inputs
        for index in sharing:
            wanted = requests[index].targets
            end = row * longest + len(inputs)
            positions.append(np.arange(end - len(wanted), end))
            targets.append(wanted)
            lengths.append(len(wanted))
    flat_targets = torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device)
    with _head_only_at(model, torch.from_numpy(np.concatenate(positions)).to(device)):
        # No attention mask: padding stands right of every real token, where causal attention never looks.
        logits = model(input_ids=torch.from_numpy(input_ids).to(device), use_cache=False).logits[0]  # [P, V]
    chosen, greedy = token_log_probs(logits, flat_targets)
    parts = zip(chosen.cpu().split(lengths), greedy.cpu().split(lengths), strict=True)
    return [(part.sum().item(), bool(exact.all())) for part, exact in parts]


@contextmanager
def _head_only_at(model: PreTrainedModel, positions: Tensor) -> Iterator[None]:
    """Within it the model computes logits [1, P, V] at flat `positions` [P] of its rows only.

    A hook in front of the head, because what a family does to its logits afterwards (soft caps, scales) must stay.
    """
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: (args[0].flatten(0, 1)[positions][None],))
    try:
        yield
    finally:
        handle.remove()
