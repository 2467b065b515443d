"""Growth of the loss when a group is taken out and the other weights of its last projection make up for it, as far as they can:
Optimal Brain Surgeon (Hassibi & Stork 1993) for a group, by the curvature of K-FAC (Martens & Grosse 2015, arXiv:1503.05671), as
LLM Surgeon has it (van der Ouderaa et al. 2024, arXiv:2312.17244).

    A       = mean over all calibration tokens of a a^T      a [n] the inputs of o, or of down, whose weights are W [H, n]
    G       = mean over them of g g^T                        g [H] = dL_n / d(W a), L_n the mean next-token loss of the sample
    loss(S) = tr( W_S^T G W_S [((A + lambda I)^-1)_SS]^-1 )  lambda = DAMPING * mean of diag A

with S the group's columns: of a channel j alone  w_j^T G w_j / [(A + lambda I)^-1]_jj.  It is the least that
tr(D^T G D (A + lambda I)) comes to among changes D [H, n] of W that make its columns S zero. T times G (x) A, where tokens count as
independent, is the Fisher information of W of which `fisher` has the diagonal; T, the tokens of a sample, and the half of a second
order, which are the same for all groups, are left out. It only scores: the adapted weights are not computed.

G is not made either: with u = W^T g = dL_n/da, which the backward pass has, W_S^T G W_S is the mean of u_S u_S^T. Sums are in
float32, float64 of a float64 model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tune_prune.models.families import Family
from tune_prune.pruning.passes.batches import batch_size, needs_copy
from tune_prune.pruning.passes.gradient_pass import GroupInformation, Sums
from tune_prune.pruning.statistics import Need, PassWork

# That of SparseGPT (arXiv:2301.00774). Of fewer tokens than inputs A has no inverse, and an input that others happen to make up for
# on all of them would cost nothing.
DAMPING = 0.01
AT_ONCE = 256  # columns of L^-1, which as a whole is as large as A


class _Factors(Sums[tuple[np.ndarray, np.ndarray]]):
    """Sums, of o and of down in `layers`, over tokens of a a^T [n, n] and, by group, of u_S u_S^T [groups, size, size]."""

    def __init__(self, family: Family, layers: Iterable[nn.Module]) -> None:
        self.watched: list[nn.Linear] = []
        self.sums: list[tuple[Tensor, Tensor]] = []
        self.handles: list[RemovableHandle] = []
        self.length = 0  # tokens of a sample
        self.attends: list[bool] = []  # whether KV groups of a layer may go
        for layer in layers:
            part = family.linears(layer)
            self.attends.append("output" in part)
            watched = [(part["down"], part["down"].in_features)]
            if self.attends[-1]:
                watched.insert(0, (part["output"], family.kv_heads(layer)))
            for linear, groups in watched:
                n, p = linear.in_features, linear.weight
                zeros = partial(torch.zeros, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
                self.watched.append(linear)
                self.sums.append((zeros(n, n), zeros(groups, n // groups, n // groups)))

    def __enter__(self) -> _Factors:
        self.handles = [
            linear.register_forward_pre_hook(partial(self._watch, *sums))
            for linear, sums in zip(self.watched, self.sums, strict=True)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.sums = []  # now, and not when the next layer's are there, too

    def _watch(self, inputs: Tensor, gradients: Tensor, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Add a projection's inputs [B, T, n] to its sums, and their gradient when it is there."""
        x = args[0]
        if not torch.is_grad_enabled():
            return
        if not x.requires_grad:
            x.requires_grad_(True)  # nothing in front of it does: the first layer's attention
        self.length = x.shape[1]
        a = x.detach().flatten(0, 1).to(inputs.dtype)
        inputs.addmm_(a.T, a)

        def add(gradient: Tensor) -> None:
            u = gradient.flatten(0, 1).to(inputs.dtype).unflatten(1, gradients.shape[:2])  # [tokens, groups, size]
            if u.shape[2] == 1:
                gradients.add_(u.square().sum(0)[..., None])
            else:
                gradients.baddbmm_(u.permute(1, 2, 0), u.transpose(0, 1))

        x.register_hook(add)

    def copy(self) -> list[tuple[Tensor, ...]]:
        return [tuple(total.clone() for total in sums) for sums in self.sums]

    def restore(self, saved: Any) -> None:
        for sums, before in zip(self.sums, saved, strict=True):
            for total, value in zip(sums, before, strict=True):
                total.copy_(value)

    def results(self, num_samples: int) -> list[tuple[np.ndarray, np.ndarray]]:
        tokens = num_samples * self.length
        found = iter([_losses(*sums) / tokens**2 for sums in self.sums])  # lambda, too, is that of sums there
        return [(next(found) if attends else np.empty(0), next(found)) for attends in self.attends]


@torch.no_grad()
def _losses(inputs: Tensor, gradients: Tensor) -> np.ndarray:
    """Return the formula's loss(S) of every group, float64 [groups], with A `inputs` and W_S^T G W_S `gradients`; not a number
    where A is not finite."""
    count, size, _ = gradients.shape
    diagonal = inputs.diagonal().clone()
    damping = DAMPING * diagonal.mean()
    if damping == 0:  # nothing goes in
        return np.zeros(count)
    inputs.diagonal().add_(damping)  # in place: a copy would be as large
    factor, failed = torch.linalg.cholesky_ex(inputs)  # L of L L^T, whose inverse is L^-T L^-1
    inputs.diagonal().copy_(diagonal)
    if failed:
        return np.full(count, np.nan)
    found, step = [], max(1, AT_ONCE // size)
    for start in range(0, count, step):
        first, end = start * size, min(count, start + step) * size
        units = inputs.new_zeros(len(inputs), end - first)
        units[first:end].fill_diagonal_(1)
        # Columns of L^-1. They are zero above their own rows, but torch would copy the part of L that is below.
        columns = torch.linalg.solve_triangular(factor, units, upper=False).T.reshape(-1, size, len(inputs))
        inverse = (columns @ columns.mT).double()  # ((A + lambda I)^-1)_SS
        removed = torch.linalg.solve(inverse, gradients[start : start + step].double())
        found.append(removed.diagonal(dim1=1, dim2=2).sum(1))
    return torch.cat(found).cpu().numpy()


class _Kfac(GroupInformation):
    version = 1
    stage = "kfac"
    label = "K-FAC"
    sums = _Factors
    solves = True
    weight_sums = 0

    def work(self, needs: Sequence[Need], seq_len: int, num_layers: int, device: str) -> PassWork:
        work, wanted = super().work(needs, seq_len, num_layers, device), [need.num_samples for need in needs]
        return replace(
            work,
            product_tokens=work.attention_tokens // num_layers,
            product_sums=2 if needs_copy(wanted, batch_size(seq_len, device)) else 1,
        )


STATISTIC = _Kfac()
