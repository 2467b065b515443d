"""How much the loss changes when a group is taken out, squared, sample by sample: Fisher information of a gate on every group.

    s_n(group) = sum over tokens and over the group's inputs x of o, or of down, of  x * dL_n/dx
    F(group)   = mean over the calibration samples of s_n^2

s_n is the derivative of sample n's mean next-token loss by a factor in front of the group, at 1: squared and averaged, the diagonal
of the Fisher information of these factors (Theis et al. 2018, arXiv:1801.05787; Molchanov et al. 2019, arXiv:1906.10771, of
weights). Gradients of activations only: no sums of gradients of weights are kept.

Where a norm stands behind o, the factor of the only group of an attention is behind that norm (x its output): in front of it, it
would change nothing, s_n would be 0, and whole attentions would go first.

An expert has its factor from the router, the weight w_t of token t. So in a mixture of experts, with f(x) the expert's output and
y the mixture's,

    s_n(expert) = sum over the tokens that are routed to it of  w_t * dL_n/dw_t  =  w_t f(x_t) . dL_n/dy_t
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
    """Sums of s_n^2 of `layers`, float64 [K] and [M] each; filled by hooks on the inputs of o and down, the output of a
    norm, or the weights of experts."""

    def __init__(self, family: Family, layers: Iterable[nn.Module]) -> None:
        self.family = family
        layers = list(layers)
        self.sums: list[torch.Tensor] = []
        self.handles: list[RemovableHandle] = []
        self.watched: list[nn.Module | None] = []
        self.mixtures = [layer.get_submodule(family.mlp) for layer in layers if family.mixture(layer)]
        self.samples = 0  # of the batch that a mixture is given
        for layer in layers:
            part, mixture = family.linears(layer), family.mixture(layer)
            mlp, members = (mixture.experts, mixture.count) if mixture else (part["down"], part["down"].in_features)
            device = next(mlp.parameters()).device
            for width in (family.kv_heads(layer), members):
                self.sums.append(torch.zeros(width, dtype=torch.float64, device=device))
            only = family.output_norms and family.kv_heads(layer) == 1
            output = layer.get_submodule(family.output_norms[0]) if only else part.get("output")
            self.watched += [output, mlp]

    def __enter__(self) -> _Squares:
        self.handles = []
        for index, (module, total) in enumerate(zip(self.watched, self.sums, strict=True)):
            if module is None:
                continue  # an attention that stays whole
            if isinstance(module, nn.Linear):
                handle = module.register_forward_pre_hook(self._inputs(total))
            elif index % 2:  # experts
                handle = module.register_forward_pre_hook(self._gates(total))
            else:  # the norm behind o
                handle = module.register_forward_hook(self._outputs(total))
            self.handles.append(handle)
        self.handles += [block.register_forward_pre_hook(self._count) for block in self.mixtures]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _inputs(self, total: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _, args: self._watch(total, args[0])

    def _outputs(self, total: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        return lambda _, __, output: self._watch(total, output)

    @staticmethod
    def _watch(total: torch.Tensor, x: torch.Tensor) -> None:
        """Add to `total` when the gradient of `x` [B, T, all groups' inputs] is there."""
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

    def _count(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.samples = len(args[0])

    def _gates(self, total: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        """Return a hook that adds to `total` when the gradient of the weights [tokens, k] of a mixture's experts is there."""

        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            experts, weights = args[1:]
            if not torch.is_grad_enabled():
                return
            values, taken = weights.detach(), experts.view(self.samples, -1)

            def add(gradient: torch.Tensor) -> None:
                products = (values.double() * gradient.double()).view(taken.shape)
                by_sample = products.new_zeros(len(taken), len(total)).scatter_add_(1, taken, products)
                total.add_(by_sample.square().sum(0))

            weights.register_hook(add)

        return hook

    def copy(self) -> list[torch.Tensor]:
        return [total.clone() for total in self.sums]

    def restore(self, saved: Any) -> None:
        for total, before in zip(self.sums, saved, strict=True):
            total.copy_(before)

    def results(self, num_samples: int) -> list[tuple[np.ndarray, np.ndarray]]:
        means = [(total / num_samples).cpu().numpy() for total in self.sums]
        # Of experts no number for each of their channels.
        of_mlps = (
            mean if isinstance(module, nn.Linear) else mean[:, None]
            for mean, module in zip(means[1::2], self.watched[1::2], strict=True)
        )
        return list(zip(means[::2], of_mlps, strict=True))


class _GateFisher(GroupInformation):
    version = 1
    stage = "gate_fisher"
    label = "gate Fisher"
    sums = _Squares
    weight_sums = 0


STATISTIC = _GateFisher()
