"""Next-token losses with the output head run by itself, a few positions at a time.

Logits are a model's largest tensors: 2,048 tokens at a vocabulary of 50k are 400 MB, and a loss needs as much again for its
softmax and, backwards, twice more. Here they are made, used and dropped in parts. Nothing is computed at the last position
of a sample, which predicts nothing that is known.

Legend: B samples of T tokens, H hidden size, V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

# Elements of logits that are there at once. On a CPU 24 MB in float32: from 32 MB on, the C library asks the system for new
# pages every time, and touching them costs as much as a third of the head.
MAX_LOGIT_ELEMENTS = {"cuda": 1 << 26, "cpu": 6 << 20}


class NextTokenLosses:
    """Losses of `model`, in nats and in float32 or better, on samples [B, T] of at least two tokens.

    Where logits are what the head gives, the head runs on parts of the positions. A model that scales or caps its logits
    afterwards makes those of all B samples at once.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.step = max(
            1, MAX_LOGIT_ELEMENTS.get(model.device.type, MAX_LOGIT_ELEMENTS["cpu"]) // model.config.vocab_size
        )
        self.separate = _head_comes_last(model)

    @torch.inference_mode()
    def __call__(self, samples: Tensor) -> Tensor:
        """Of every token but the first: [B, T - 1]."""
        targets = samples[:, 1:]
        if self.separate:
            hidden = _hidden_states(self.model, samples)[:, :-1].flatten(0, 1)
            logits = (self._logits(part) for part in hidden.split(self.step))
            losses = [
                _losses(part, wanted) for part, wanted in zip(logits, targets.flatten().split(self.step), strict=True)
            ]
        else:  # their softmax at least is taken in parts
            rows = zip(self.model(input_ids=samples, use_cache=False).logits, targets, strict=True)
            parts = (zip(row[:-1].split(self.step), wanted.split(self.step), strict=True) for row, wanted in rows)
            losses = [_losses(part, wanted) for row in parts for part, wanted in row]
        return torch.cat(losses).view(targets.shape)

    @torch.enable_grad()
    def backward(self, samples: Tensor) -> None:
        """Add to the parameters' gradients those of the sum over samples of their mean losses."""
        targets, weight = samples[:, 1:], 1 / (samples.shape[1] - 1)
        if not self.separate:
            logits = self.model(input_ids=samples, use_cache=False).logits
            (weight * _losses(logits[:, :-1].flatten(0, 1), targets.flatten()).sum()).backward()
            return
        hidden = _hidden_states(self.model, samples)  # [B, T, H]
        inputs = hidden.detach()[:, :-1].flatten(0, 1)
        parts = []
        for part, wanted in zip(inputs.split(self.step), targets.flatten().split(self.step), strict=True):
            part.requires_grad_(True)
            (weight * _losses(self._logits(part), wanted).sum()).backward()
            parts.append(part.grad)
        gradient = torch.zeros_like(hidden)
        gradient[:, :-1] = torch.cat(parts).view(len(samples), -1, hidden.shape[2])
        hidden.backward(gradient)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits


@contextmanager
def head_input(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within it the head gets what `change` makes of its input [B, T, H].

    A hook in front of the head, because what a family does to its logits afterwards (soft caps, scales) must stay.
    """
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (change(args[0]),))
    try:
        yield
    finally:
        handle.remove()


def _hidden_states(model: PreTrainedModel, samples: Tensor) -> Tensor:
    """What the head gets, [B, T, H]; it is run at no position."""
    return _first_logits(model, samples, 0)[0]


def _first_logits(model: PreTrainedModel, samples: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What the head gets, [B, T, H], and logits [B, count, V] at the first `count` positions."""
    seen: list[Tensor] = []

    def first_only(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return hidden[:, :count]

    with head_input(model, first_only):
        logits = model(input_ids=samples, use_cache=False).logits
    return seen[0], logits


@torch.no_grad()
def _head_comes_last(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    if head is None:
        return False
    hidden, logits = _first_logits(model, torch.zeros((1, 2), dtype=torch.long, device=model.device), 2)
    return torch.equal(head(hidden), logits)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy [P] of `targets` [P] under `logits` [P, V]; in bfloat16 it would be off by whole nats."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, reduction="none")
