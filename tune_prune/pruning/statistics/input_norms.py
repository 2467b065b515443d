"""Norms and variances of what goes into the last projection of each block, o of attention and down of the MLP, feature by feature.

    ||X_j|| = sqrt(sum over all calibration tokens of x_j^2)
    Var_j   = sum over them of (x_j - mean)^2 / (tokens - 1)

Wanda (Sun et al. 2023, arXiv:2306.11695) weighs weights by the first, FLAP (An et al. 2023, arXiv:2312.11983) by the second. One
forward pass without the head; squares are summed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from tune_prune.models.families import Family
from tune_prune.pruning.passes.forward_pass import ForwardSums
from tune_prune.pruning.statistics import Arrays, Need, PassWork


@dataclass(frozen=True)
class InputNorms:
    """Per layer, float64: of o's inputs [K*g*d], head by head, and of down's inputs [M]."""

    attention: tuple[np.ndarray, ...]  # ||X_j||
    mlp: tuple[np.ndarray, ...]
    attention_variance: tuple[np.ndarray, ...]  # Var_j
    mlp_variance: tuple[np.ndarray, ...]


class _InputNorms(ForwardSums):
    version = 2
    stage = "input_norms"
    label = "input norm"

    def sums(self, family: Family, layer: nn.Module, index: int) -> AbstractContextManager[dict[str, torch.Tensor]]:
        return _sums(family, layer, index)

    def work(self, needs: Sequence[Need], seq_len: int, num_layers: int, device: str) -> PassWork:
        return replace(super().work(needs, seq_len, num_layers, device), input_squares=True)

    def value(self, arrays: Arrays, need: Need) -> InputNorms:
        layers = range(sum(name.startswith("mlp_") for name in arrays))

        def variance(block: str, layer: int) -> np.ndarray:
            tokens, total = int(arrays["tokens"][0]), arrays[f"sum_{block}_{layer}"]
            squares: np.ndarray = arrays[f"{block}_{layer}"] - np.square(total) / tokens
            return squares.clip(0) / max(1, tokens - 1)

        blocks = ("attention", "mlp")
        there = {block: f"{block}_0" in arrays for block in blocks}  # no attention where it stays whole

        def of_layers(block: str, value: Callable[[str, int], np.ndarray]) -> tuple[np.ndarray, ...]:
            return tuple(value(block, i) if there[block] else np.empty(0) for i in layers)

        norms = [of_layers(block, lambda name, i: np.sqrt(arrays[f"{name}_{i}"])) for block in blocks]
        return InputNorms(*norms, *(of_layers(block, variance) for block in blocks))


@contextmanager
def _sums(family: Family, layer: nn.Module, index: int) -> Iterator[dict[str, torch.Tensor]]:
    """Return sums, over the tokens that `layer`, number `index`, is run on, of squares: "attention_<index>" and "mlp_<index>", and
    of the inputs themselves: "sum_attention_<index>" and "sum_mlp_<index>"."""
    sums: dict[str, torch.Tensor] = {}

    def record(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
            sums[name] = x.square().sum(dim=(0, 1), dtype=torch.float64)
            sums[f"sum_{name}"] = x.sum(dim=(0, 1), dtype=torch.float64)

        return hook

    part = family.linears(layer)
    blocks = (("attention", "output"), ("mlp", "down"))
    handles = [
        part[role].register_forward_pre_hook(record(f"{block}_{index}")) for block, role in blocks if role in part
    ]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


STATISTIC = _InputNorms()
