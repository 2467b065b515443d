"""Norms of what goes into the last projection of each block, o of attention and down of the MLP, feature by feature.

    ||X_j|| = sqrt(sum over all calibration tokens of x_j^2)

Wanda (Sun et al. 2023, arXiv:2306.11695) weighs weights by them. One forward pass without the head; squares are summed in
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.core.terminal import progress
from tune_prune.models.families import Family, decoder_layers
from tune_prune.pruning.batches import batch_size, batches, check_snapshots, samples_run
from tune_prune.pruning.statistics import Arrays, Need, PassWork, Statistic


@dataclass(frozen=True)
class InputNorms:
    """||X_j|| per layer, float64."""

    attention: tuple[np.ndarray, ...]  # of o's inputs [K*g*d]: head by head
    mlp: tuple[np.ndarray, ...]  # of down's inputs [M]


class _InputNorms(Statistic):
    version = 1
    stage = "input_norms"
    label = "input norm"

    def collect(
        self, model: PreTrainedModel, family: Family, windows: torch.Tensor, needs: Sequence[Need]
    ) -> dict[Need, dict[str, np.ndarray]]:
        wanted = check_snapshots([need.num_samples for need in needs], len(windows))
        step = batch_size(windows.shape[1], model.device.type)
        samples = progress.step("input norms", lambda: samples_run(wanted, step), "samples")
        with samples as advance, _squares(model, family) as squares_of:
            total: dict[str, torch.Tensor] = {}
            found = {}
            for start, inside, end in batches(wanted, step):
                for n in inside:
                    found[n] = _sum(total, squares_of(windows[start:n]))
                    advance(n - start)
                if end is not None:
                    total = _sum(total, squares_of(windows[start:end]))
                    advance(end - start)
                    if end in wanted:
                        found[end] = total
        return {need: {name: value.cpu().numpy() for name, value in found[need.num_samples].items()} for need in needs}

    def work(self, needs: Sequence[Need], seq_len: int, num_layers: int, device: str) -> PassWork:
        wanted, step = [need.num_samples for need in needs], batch_size(seq_len, device)
        layer_tokens = samples_run(wanted, step) * seq_len * num_layers
        return PassWork(
            tokens=max(wanted) * seq_len,
            attention_tokens=layer_tokens,
            mlp_tokens=layer_tokens,
            head_positions=0,
            batch_tokens=min(step, max(wanted)) * seq_len,
        )

    def value(self, arrays: Arrays, need: Need) -> InputNorms:
        layers = range(len(arrays) // 2)
        attention, mlp = (tuple(np.sqrt(arrays[f"{block}_{i}"]) for i in layers) for block in ("attention", "mlp"))
        return InputNorms(attention, mlp)


@contextmanager
def _squares(model: PreTrainedModel, family: Family) -> Iterator[Callable[[torch.Tensor], dict[str, torch.Tensor]]]:
    """A function: windows [B, T] -> sums of squares over their tokens by block and layer, as the cache names them."""
    sums: dict[str, torch.Tensor] = {}

    def record(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
            sums[name] = x.square().sum(dim=(0, 1), dtype=torch.float64)

        return hook

    handles = []
    for index, layer in enumerate(decoder_layers(model, family)):
        part = family.linears(layer)
        for block, role in (("attention", "output"), ("mlp", "down")):
            handles.append(part[role].register_forward_pre_hook(record(f"{block}_{index}")))

    @torch.inference_mode()
    def run(windows: torch.Tensor) -> dict[str, torch.Tensor]:
        model.base_model(input_ids=windows.to(model.device), use_cache=False)
        return dict(sums)

    try:
        yield run
    finally:
        for handle in handles:
            handle.remove()


def _sum(total: dict[str, torch.Tensor], added: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: total[name] + value if total else value for name, value in added.items()}


STATISTIC = _InputNorms()
