"""How far a pruned model's predictions are from the dense model's: KL(dense || pruned) of the next token's distribution, in nats,
at every token of a few samples, and its mean over them.

Pruning leaves what stands behind the layers as it is, so the dense model is kept as what its head is given (hidden states,
[tokens, H]): its logits are made again beside those of the pruned model, a part at a time.

Legend: N tokens of all samples, B samples of a batch, T tokens of its longest, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tune_prune.core import terminal
from tune_prune.evaluation.engine.rows import default_batch_tokens
from tune_prune.models.families import family_of
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.models.runner.residency import RESIDENT, Residency

TEXT_TOKENS = 4096  # at most: the first ones of the perplexity text, in windows as perplexity's
TASK_TOKENS = 2048  # at most: of questions with their right answers, the items that reach it
ONE_IN = 16  # tokens of either is enough: where all are few, KL would cost as much as what it accompanies
LEAST = 256  # but of so many; two blocks, for a standard error
BLOCK = 128  # tokens of a window that are one observation for the standard error


def compared_tokens(tokens: int, most: int) -> int:
    """Return how many of `tokens` KL is measured on: one in ONE_IN, rounded up, at least LEAST and at most `most`."""
    return min(tokens, most, max(LEAST, math.ceil(tokens / ONE_IN)))


@dataclass(frozen=True)
class Divergence:
    """KL(dense || pruned) in nats per token, by blocks: an item, or BLOCK tokens of a window (less at its end)."""

    nats: np.ndarray  # float64 [blocks], mean of a block's tokens
    tokens: np.ndarray  # int64 [blocks]

    @classmethod
    def of(cls, values: np.ndarray, samples: Sequence[Tensor], block: int | None) -> Divergence:
        """Average `values` [N] of the tokens of `samples` over blocks of `block` tokens (None: a sample is a block)."""
        sizes = [
            min(block or len(sample), len(sample) - start)
            for sample in samples
            for start in range(0, len(sample), block or len(sample))
        ]
        parts = np.split(values.astype(np.float64), np.cumsum(sizes)[:-1])
        return cls(np.array([part.mean() for part in parts]), np.array(sizes, dtype=np.int64))

    def to_dict(self) -> dict[str, list[float]]:
        """Return the fields as kl.json has them."""
        return {"tokens": self.tokens.tolist(), "nats": self.nats.tolist()}

    @property
    def mean(self) -> float:
        """Return the mean over all tokens, in nats."""
        return float(self.nats @ self.tokens / self.tokens.sum())

    @property
    def stderr(self) -> float:
        """Return the standard error of `mean`, which is a ratio of sums over n blocks; nan for a single block.

        sqrt(n / (n - 1) * sum (tokens (nats - mean))^2) / all tokens (Cochran, Sampling Techniques, 1977, 2.11).
        """
        n = len(self.nats)
        spread = float(np.square(self.tokens * (self.nats - self.mean)).sum())
        return math.sqrt(n / (n - 1) * spread) / float(self.tokens.sum()) if n > 1 else math.nan


def most_rows(samples: Sequence[Tensor], config: PretrainedConfig, device: str) -> int:
    """Return the most of `samples` that go through a model of `config` together on "cpu" or "cuda", where nothing is halved."""
    return max(1, min(default_batch_tokens(config, device) // min(map(len, samples)), len(samples)))


@torch.inference_mode()
def head_inputs(model: PreTrainedModel, samples: Sequence[Tensor], residency: Residency = RESIDENT) -> Tensor:
    """Return what the head of `model` is given at every token of `samples` (LongTensor [T] each): [N, H] on the CPU."""
    ends, inputs = list(accumulate(map(len, samples))), torch.empty(0)
    for tail, states, numbers, inside in _behind_the_layers(model, samples, residency, "original model for KL"):
        given = tail.head_inputs(states)
        if not len(inputs):  # once, and no copy of it: those of a long training may be most of what there is
            inputs = torch.empty(ends[-1], given.shape[-1], dtype=given.dtype)
        for number, row, tokens in zip(numbers, given, inside, strict=True):
            inputs[ends[number] - len(samples[number]) : ends[number]] = row[tokens.to(row.device)]
    return inputs


@torch.inference_mode()
def token_divergences(
    model: PreTrainedModel,
    samples: Sequence[Tensor],
    dense: Tensor,
    residency: Residency = RESIDENT,
    dense_head: Callable[[Tensor], Tensor] | None = None,
) -> np.ndarray:
    """Return KL(dense || model) in nats of what is predicted at every token of `samples`: [N], float32 or better.

    `dense` are the `head_inputs` [N, H] of the dense model, `dense_head` its head where it is not that of `model`. `residency` says
    where weights and hidden states are, and how much is done at once.
    """
    dense_inputs = dense.split([len(sample) for sample in samples])
    of_samples: list[Tensor] = [torch.empty(0)] * len(samples)
    for tail, states, numbers, inside in _behind_the_layers(model, samples, residency, "KL"):
        wanted = torch.cat([dense_inputs[number] for number in numbers])
        values = tail.divergences(states, inside, wanted, dense_head).cpu()
        for number, part in zip(numbers, values.split([len(samples[number]) for number in numbers]), strict=True):
            of_samples[number] = part
    return torch.cat(of_samples).numpy()


def _behind_the_layers(
    model: PreTrainedModel, samples: Sequence[Tensor], residency: Residency, what: str
) -> Iterator[tuple[NextTokenLosses, Tensor, tuple[int, ...], Tensor]]:
    """Yield, batch by batch, what stands behind the layers, what the last layer gives [B, T, H], and whose it is.

    The last two parts are the numbers of the samples, and where these have tokens, bool [B, T]: they are padded on the right, where
    causal attention never looks.
    """
    runner = LayerRunner(model, family_of(model.config.model_type), residency)
    device = runner.device.type
    batches = {}
    left = sorted(range(len(samples)), key=lambda number: -len(samples[number]))
    while left:
        width = len(samples[left[0]])
        rows = max(1, default_batch_tokens(model.config, device) // width)
        batch, left = left[:rows], left[rows:]
        step = residency.at_once(len(batch))
        for start in range(0, len(batch), step):
            numbers = tuple(batch[start : start + step])
            batches[numbers] = torch.zeros((len(numbers), width), dtype=torch.long)
            for row, number in zip(batches[numbers], numbers, strict=True):
                row[: len(samples[number])] = samples[number]
    with terminal.step(what, lambda: sum(map(len, samples)), "tokens") as advance:
        for block in runner.blocks(batches):
            states = runner.forward(block)
            with runner.tail() as tail:
                for numbers, tokens in block.items():
                    lengths = torch.tensor([len(samples[number]) for number in numbers])
                    inside = torch.arange(tokens.shape[1]) < lengths[:, None]
                    yield tail, states.pop(numbers), numbers, inside
                    advance(int(lengths.sum()))
