"""Next-token losses, and divergences of predictions, with the output head run by itself, a few positions at a time.

Logits are a model's largest tensors: 2,048 tokens at a vocabulary of 50k are 400 MB, and a loss needs as much again for its
softmax and, backwards, twice more. Here they are made, used and dropped in parts. Nothing is computed at the last position
of a sample, which predicts nothing that is known.

Legend: B samples of T tokens, H hidden size, V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

# Elements of logits that are there at once, and on a CPU how many positions at least: a product of fewer waits for its weights (a
# head of 151,936 x 1,536 in bfloat16 takes 1.4 times as long by 64 positions as by 256, one of 262,144 x 640 2.4 times).
MAX_LOGIT_ELEMENTS = {"cuda": 1 << 26, "cpu": 6 << 20}
FEWEST_ROWS = {"cuda": 1, "cpu": 256}
# Of these so many at once go through a softmax, in float32: on a CPU what its cache holds, but a position for each thread.
SOFTMAX_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}


def positions_at_once(device: str, vocabulary: int, models: int = 1) -> int:
    """Return at how many positions logits of so many models are there at a time; a `device` other than "cuda" counts as a CPU."""
    device = device if device in MAX_LOGIT_ELEMENTS else "cpu"
    return max(FEWEST_ROWS[device], MAX_LOGIT_ELEMENTS[device] // (models * vocabulary))


def softmax_rows(device: str, vocabulary: int) -> int:
    """Return of how many positions a softmax is taken at a time."""
    fewest = 1 if device == "cuda" else torch.get_num_threads()
    return max(fewest, SOFTMAX_ELEMENTS.get(device, SOFTMAX_ELEMENTS["cpu"]) // vocabulary)


class Head:
    """The output head of `model`, and what its config does to logits: hidden states [..., H] -> logits [..., V]."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.projection: nn.Linear = model.get_output_embeddings()
        self.scale: float | None = getattr(model.config, "logits_scaling", None)  # of Granite
        # Of Cohere, and of Falcon-H1. A pruned Granite has the former for vLLM alone.
        self.factor: float | None = getattr(model.config, "lm_head_multiplier", None)
        if self.scale is None and self.factor is None:
            self.factor = getattr(model.config, "logit_scale", None)
        self.cap: float | None = getattr(model.config, "final_logit_softcapping", None)  # of Gemma

    @property
    def vocabulary(self) -> int:
        return len(self.projection.weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.finished(self.projection(hidden))

    def finished(self, logits: Tensor) -> Tensor:
        """Return logits as the model gives them, made of what the projection gives: in its place, as a second tensor of them is in
        no plan."""
        if self.scale is not None:
            logits = logits.div_(self.scale)
        if self.factor is not None:
            logits = logits.mul_(self.factor)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of `finished` where it gives `logits`."""
        slope = (self.factor or 1.0) / (self.scale or 1.0)
        if self.cap is None:
            return slope
        return (logits.to(_wide(logits)) / self.cap).square_().mul_(-slope).add_(slope)


class NextTokenLosses:
    """Losses of `model`, in nats and in float32 or better, on samples [B, T] of at least two tokens.

    Where logits are what `Head` gives, it runs on parts of the positions. A model that does something else to its logits makes
    those of all B samples at once.

    `forward` is the model's forward pass. A model whose layers were run before (`runner.LayerRunner.tail`) has one that begins
    with what they gave, hidden states [B, T, H]: methods then take these as `given`, and `probe` [1, 2, H] is an example.
    """

    def __init__(
        self, model: PreTrainedModel, forward: Callable[[Tensor], Any] | None = None, probe: Tensor | None = None
    ) -> None:
        self.model = model
        self.head = Head(model)
        self.forward = forward or (lambda samples: model(input_ids=samples, use_cache=False))
        if probe is None:
            probe = torch.zeros((1, 2), dtype=torch.long, device=model.device)
        self.step, self.step_of_two = (
            positions_at_once(probe.device.type, model.config.vocab_size, models) for models in (1, 2)
        )
        self.separate = self._head_comes_last(probe)

    @torch.inference_mode()
    def __call__(self, samples: Tensor, given: Tensor | None = None) -> Tensor:
        """Return the loss of every token but the first: [B, T - 1]."""
        targets = samples[:, 1:]
        given = samples if given is None else given
        if self.separate:
            hidden = self.head_inputs(given)[:, :-1].flatten(0, 1)
            parts = zip(hidden.split(self.step), targets.flatten().split(self.step), strict=True)
            losses = [_losses(self.head(part), wanted) for part, wanted in parts]
        else:
            rows = zip(self.forward(given).logits, targets, strict=True)
            losses = [_losses(row[:-1], wanted) for row, wanted in rows]
        return torch.cat(losses).view(targets.shape)

    @torch.inference_mode()
    def divergences(
        self, given: Tensor, inside: Tensor, dense: Tensor, dense_head: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return KL(dense || own) [P] of the next token's distribution at the P positions where `inside` [B, T] is true, in
        nats and in float32 or better. `dense` [P, H]: what the head is given there (`head_inputs`) in a model that differs only
        in layers; `dense_head`: that model's head, where it is another one, [.., H] -> logits [.., V]."""
        hidden = self.head_inputs(given)
        inside, dense = inside.to(hidden.device), dense.to(hidden.device, hidden.dtype)
        if not self.separate:
            other = hidden.clone()
            other[inside] = dense
            wanted = self._logits_of(given, other)[inside] if dense_head is None else dense_head(dense)
            return _divergences(wanted, self.forward(given).logits[inside])
        parts = zip(dense.split(self.step_of_two), hidden[inside].split(self.step_of_two), strict=True)
        return torch.cat([_divergences((dense_head or self.head)(one), self.head(own)) for one, own in parts])

    @torch.enable_grad()
    def backward(self, samples: Tensor, given: Tensor | None = None, dense: Tensor | None = None) -> None:
        """Add to the gradients of the parameters, and of `given`, those of the sum over samples of their mean losses; where there
        is `dense` [B, T, H], what the head is given in a model that differs only in layers, of their mean divergences from that
        one."""
        weight = 1 / (samples.shape[1] - 1)
        given = samples if given is None else given
        if not self.separate:
            logits = self.forward(given).logits[:, :-1].flatten(0, 1)
            if dense is None:
                losses = _losses(logits, samples[:, 1:].flatten())
            else:
                losses = _divergences(self._logits_of(given, dense)[:, :-1].flatten(0, 1), logits)
            (weight * losses.sum()).backward()
            return
        hidden = self.head_inputs(given)  # [B, T, H]
        inputs = hidden.detach()[:, :-1].flatten(0, 1)
        targets = samples[:, 1:].flatten() if dense is None else dense[:, :-1].flatten(0, 1).to(inputs)
        step = self.step if dense is None else self.step_of_two
        parts = []
        for part, wanted in zip(inputs.split(step), targets.split(step), strict=True):
            self._backward_part(part.requires_grad_(True), wanted, weight)
            parts.append(part.grad)
        gradient = torch.zeros_like(hidden)
        gradient[:, :-1] = torch.cat(parts).view(len(samples), -1, hidden.shape[2])
        hidden.backward(gradient)

    def _backward_part(self, hidden: Tensor, wanted: Tensor, weight: float) -> None:
        """Add to the gradient of what the head is given [P, H] `weight` times that of losses at the tokens `wanted` [P], or of
        divergences from where it is given `wanted` [P, H]."""
        projected = self.head.projection(hidden)
        with torch.no_grad():
            own = self.head.finished(projected.detach())  # in its place, as its gradient does not read it
            aim = self.head(wanted) if wanted.is_floating_point() else wanted
            gradient = _gradient(own, aim, weight, self.head.slope)
        projected.backward(gradient)

    @torch.no_grad()
    def _logits_of(self, given: Tensor, dense: Tensor) -> Tensor:
        """Return the logits that the model makes where its head is given `dense` [B, T, H]."""
        with head_input(self.model, lambda hidden: dense.to(hidden)):
            logits: Tensor = self.forward(given).logits
        return logits

    def head_inputs(self, given: Tensor) -> Tensor:
        """Return what the head is given, [B, T, H]; it is run at no position."""
        return self._first_logits(given, 0)[0]

    def _first_logits(self, given: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return what the head is given, [B, T, H], and logits [B, count, V] at the first `count` positions."""
        seen: list[Tensor] = []

        def first_only(hidden: Tensor) -> Tensor:
            seen.append(hidden)
            return hidden[:, :count]

        with head_input(self.model, first_only):
            logits = self.forward(given).logits
        return seen[0], logits

    @torch.no_grad()
    def _head_comes_last(self, probe: Tensor) -> bool:
        if self.model.get_output_embeddings() is None:
            return False
        hidden, logits = self._first_logits(probe, 2)
        return torch.equal(self.head(hidden), logits)


@contextmanager
def head_input(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Give the head within this context what `change` makes of its input [B, T, H]: by a hook in front of it, because what a family
    does to its logits afterwards (soft caps, scales) must stay."""
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (change(args[0]),))
    try:
        yield
    finally:
        handle.remove()


def _in_rows(*of_positions: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split logits [P, V], and what else there is of each position, into as many rows as a softmax is taken of at a time."""
    logits = of_positions[0]
    rows = softmax_rows(logits.device.type, logits.shape[-1])
    return zip(*(tensor.to(logits.device).split(rows) for tensor in of_positions), strict=True)


def _wide(logits: Tensor) -> torch.dtype:
    """Return what softmaxes are taken in: in bfloat16 losses would be off by whole nats."""
    return torch.promote_types(logits.dtype, torch.float32)


def _divergences(dense: Tensor, own: Tensor) -> Tensor:
    """Return KL(dense || own) [P] of the distributions that these logits [P, V] are of."""

    def of_rows(dense: Tensor, own: Tensor) -> Tensor:
        wanted, found = (torch.log_softmax(logits, dim=-1, dtype=_wide(logits)) for logits in (dense, own))
        nats = wanted - found
        return nats.mul_(wanted.exp_()).sum(dim=-1)  # a quarter of the time that F.kl_div takes on a CPU

    return torch.cat([of_rows(*rows) for rows in _in_rows(dense, own)])


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy [P] of `targets` [P] under `logits` [P, V]."""
    parts = _in_rows(logits, targets)
    return torch.cat([F.cross_entropy(rows.to(_wide(rows)), wanted, reduction="none") for rows, wanted in parts])


def _gradient(own: Tensor, wanted: Tensor, weight: float, slope: Callable[[Tensor], Tensor | float]) -> Tensor:
    """Return `weight` times the gradient of the losses of logits `own` [P, V] at the tokens `wanted` [P], or of their divergences
    from the logits `wanted` [P, V], which it is written over: softmax(own) less what is wanted, times the `slope` of `own`."""

    def of_rows(own: Tensor, wanted: Tensor) -> Tensor:
        found = torch.softmax(own, dim=-1, dtype=_wide(own))
        if wanted.is_floating_point():
            found -= torch.softmax(wanted, dim=-1, dtype=found.dtype)
        else:
            found[torch.arange(len(wanted), device=wanted.device), wanted] -= 1
        return found.mul_(weight * slope(own))

    gradient = wanted if wanted.is_floating_point() else torch.empty_like(own)
    for logits, aim, part in _in_rows(own, wanted, gradient):
        part.copy_(of_rows(logits, aim))
    return gradient
