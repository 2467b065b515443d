"""How much the loss changes when a group is taken out, squared, sample by sample: Fisher information of a gate on every group.

    s_n(group) = sum over tokens and over the group's inputs x of o, or of down, of  x * dL_n/dx
    F(group)   = mean over the calibration samples of s_n^2

s_n is the derivative of sample n's mean next-token loss by a factor in front of the group, at 1: squared and averaged, the diagonal
of the Fisher information of these factors (Theis et al. 2018, arXiv:1801.05787; Molchanov et al. 2019, arXiv:1906.10771, of
weights). Gradients of activations only: no sums of gradients of weights are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tune_prune.models.families import Family
from tune_prune.pruning.passes.gradient_pass import GroupInformation, Sums


class _Squares(Sums[tuple[np.ndarray, np.ndarray]]):
    """Sums of s_n^2 of `layers`, float64 [K] and [M] each; filled by hooks on the inputs of o and down."""

    def __init__(self, family: Family, layers: Iterable[nn.Module]) -> None:
        self.family = family
        layers = list(layers)
        self.parts = [family.linears(layer) for layer in layers]
        self.sums: list[torch.Tensor] = []
        self.handles: list[RemovableHandle] = []
        for part, layer in zip(self.parts, layers, strict=True):
            widths = family.kv_heads(layer), part["down"].in_features
            device = part["down"].weight.device
            self.sums += [torch.zeros(width, dtype=torch.float64, device=device) for width in widths]

    def __enter__(self) -> _Squares:
        watched = [part.get(role) for part in self.parts for role in ("output", "down")]
        self.handles = [
            linear.register_forward_pre_hook(self._watch(total))
            for linear, total in zip(watched, self.sums, strict=True)
            if linear is not None  # an attention that stays whole
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    @staticmethod
    def _watch(total: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        """Return a hook that adds to `total` when the gradient of a projection's inputs [B, T, inputs] is there."""

        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0]
            if not torch.is_grad_enabled():
                return
            if not x.requires_grad:
                x.requires_grad_(True)  # nothing in front of it does: the first layer's attention
            values = x.detach()

            def add(gradient: torch.Tensor) -> None:
                wide = torch.promote_types(values.dtype, torch.float32)
                products = (values.to(wide) * gradient.to(wide)).sum(1, dtype=torch.float64)  # [B, inputs]
                total.add_(products.view(len(products), len(total), -1).sum(2).square().sum(0))

            x.register_hook(add)

        return hook

    def copy(self) -> list[torch.Tensor]:
        return [total.clone() for total in self.sums]

    def restore(self, saved: Any) -> None:
        for total, before in zip(self.sums, saved, strict=True):
            total.copy_(before)

    def results(self, num_samples: int) -> list[tuple[np.ndarray, np.ndarray]]:
        means = [(total / num_samples).cpu().numpy() for total in self.sums]
        return list(zip(means[::2], means[1::2], strict=True))


class _GateFisher(GroupInformation):
    version = 1
    stage = "gate_fisher"
    label = "gate Fisher"
    sums = _Squares
    weight_sums = 0


STATISTIC = _GateFisher()
