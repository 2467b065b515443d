"""What the experts of mixtures add to the residual stream: the mean norm of it, over the tokens that are routed to each (REAP).

    S(expert) = mean over the calibration tokens t that are routed to it of  w_t * ||f(x_t)||_2

f is the expert, x_t what the mixture is given and w_t the weight that the router gives it, after softmax, choice and, where the
model has it, division by the sum; 0 of an expert that no token is routed to (Lasby et al. 2025, arXiv:2510.13999, equation 9). One
forward pass without the head, in which every expert is run once more alone; sums in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tune_prune.models.families import Family, Mixture
from tune_prune.pruning.passes.forward_pass import ForwardSums
from tune_prune.pruning.statistics import Arrays, Need, PassWork


class _ExpertOutputs(ForwardSums):
    version = 1
    stage = "expert_outputs"
    label = "expert output"

    def sums(self, family: Family, layer: nn.Module, index: int) -> AbstractContextManager[dict[str, torch.Tensor]]:
        mixture = family.mixture(layer)
        return nullcontext({}) if mixture is None else _sums(mixture, index)

    def work(self, needs: Sequence[Need], seq_len: int, num_layers: int, device: str) -> PassWork:
        work = super().work(needs, seq_len, num_layers, device)
        return replace(work, mlp_tokens=2 * work.mlp_tokens)

    def value(self, arrays: Arrays, need: Need) -> dict[int, np.ndarray]:
        """Return S of the experts, float64 [E], by the number of their layer."""
        layers = sorted(int(name.removeprefix("norms_")) for name in arrays if name.startswith("norms_"))
        return {i: arrays[f"norms_{i}"] / arrays[f"routed_{i}"].clip(1) for i in layers}


@contextmanager
def _sums(mixture: Mixture, index: int) -> Iterator[dict[str, torch.Tensor]]:
    """Return, over the tokens that the mixture of layer number `index` is run on, sums [E] of the norms "norms_<index>" of what
    its experts add, and "routed_<index>", of how many tokens."""
    sums: dict[str, torch.Tensor] = {}
    activation = cast(Any, mixture.experts).act_fn

    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        x, experts, weights = args  # [tokens, H], and of the router [tokens, k]
        norms = torch.zeros(mixture.count, dtype=torch.float64, device=x.device)
        routed = torch.zeros_like(norms)
        for expert in range(mixture.count):
            tokens, places = torch.where(experts == expert)
            gate, up = F.linear(x[tokens], mixture.gate_up[expert]).chunk(2, dim=-1)
            output = F.linear(activation(gate) * up, mixture.down[expert])
            lengths = torch.linalg.vector_norm(output, dim=-1, dtype=torch.float64)
            norms[expert] = (weights[tokens, places].double() * lengths).sum()
            routed[expert] = len(tokens)
        sums[f"norms_{index}"], sums[f"routed_{index}"] = norms, routed

    handle = mixture.experts.register_forward_pre_hook(hook)
    try:
        yield sums
    finally:
        handle.remove()


STATISTIC = _ExpertOutputs()
