"""Perplexity of a text: non-overlapping windows, token-weighted mean next-token loss, exp of it.

The usual WikiText-2 protocol of pruning papers: the raw test split joined, tokenised once, windows of 2048 tokens. It
differs from theirs in one point: the last, shorter window counts too, so that every text has a perplexity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tune_prune.core import terminal
from tune_prune.core.errors import UserError
from tune_prune.data.calibration import begun, text_tokens
from tune_prune.models.families import family_of
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.models.runner.residency import RESIDENT, Residency

# Logits of a batch, where they are all there at once: a window of 2048 tokens at a vocabulary of 131k.
_LOGIT_ELEMENTS = 1 << 28
_GPU_TOKENS = 16_384  # of a batch, as of zero-shot rows
# Hidden states of a batch that stay in a CPU's caches, with what the layers make of them.
_CPU_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class PerplexityResult:
    """`ppl` = exp(`mean_loss`); `mean_loss` in nats per predicted token; `num_tokens` predicted tokens."""

    ppl: float  # inf when the loss is infinite or too large, nan when it is nan
    mean_loss: float
    num_tokens: int


@torch.inference_mode()
def perplexity(
    model: PreTrainedModel,
    tokens: Tensor,
    window: int,
    batch_size: int | None = None,
    residency: Residency = RESIDENT,
    bos: int | None = None,
) -> PerplexityResult:
    """Compute the perplexity of `tokens` (LongTensor [N]) in windows of `window` tokens, at most the model's position limit.

    The first token of each window is context only: one of the text or, where the model wants one, the token `bos`, in front of
    window - 1 tokens of the text, all of which are predicted then. `batch_size` windows are run at once (None:
    by device), or a part of them one after the other where `residency` says so (the losses are summed up as if they had been
    together), as it says where weights and hidden states are. An infinite or undefined loss is a result, not an error.
    Raises UserError for fewer than 2 tokens.
    """
    if len(tokens) < 2:
        raise UserError(f"the perplexity text has {len(tokens)} tokens; at least 2 are needed, choose a longer text")
    window = min(window, getattr(model.config, "max_position_embeddings", None) or window)
    if window < 2:
        raise UserError(f"perplexity_window is {window}; a window needs at least 2 tokens, e.g. 2048")
    runner = LayerRunner(model, family_of(model.config.model_type), residency)
    batch_size = batch_size or windows_at_once(window, model.config, runner.device.type)
    length = text_tokens(window, bos)
    whole = len(tokens) // length
    batches = list(begun(tokens[: whole * length].view(whole, length), bos).split(batch_size)) if whole else []
    rest = begun(tokens[whole * length :][None], bos)
    if rest.shape[1] > 1:
        batches.append(rest)
    parts = {  # by the batch's number and whether it is its last part
        (number, index, batch is pieces[-1]): batch
        for number, pieces in enumerate(batch.split(residency.at_once(batch_size)) for batch in batches)
        for index, batch in enumerate(pieces)
    }
    total, count = 0.0, 0
    of_batch: list[Tensor] = []  # losses of its parts so far, [B, W - 1] each
    with terminal.step("perplexity", lambda: len(tokens), "tokens") as advance:
        for block in runner.blocks(parts):
            states = runner.forward(block)
            with runner.tail() as losses:
                for key, samples in block.items():
                    of_batch.append(losses(samples.to(runner.device), states.pop(key)))
                    if key[-1]:
                        total += torch.cat(of_batch).double().sum().item()
                        count += sum(part.numel() for part in of_batch)
                        of_batch = []
                    advance(samples.numel())
    mean_loss = total / count
    return PerplexityResult(ppl=_exp(mean_loss), mean_loss=mean_loss, num_tokens=count)


def windows_at_once(window: int, config: PretrainedConfig, device: str) -> int:
    """Count the windows of `window` tokens in a batch on `device` ("cpu" or "cuda"), at most 8."""
    if device == "cpu":
        most = min(_LOGIT_ELEMENTS // (window * config.vocab_size), _CPU_ELEMENTS // (window * config.hidden_size))
    else:  # logits are made in parts: large vocabularies need no smaller batches
        most = _GPU_TOKENS // window
    return max(1, min(8, most))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:  # a loss above 709 nats: the perplexity is beyond what a float can say
        return math.inf
