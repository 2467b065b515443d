"""Norms and variances of what goes into the last projection of each block, o of attention and down of the MLP, feature by feature.

    ||X_j|| = sqrt(sum over all calibration tokens of x_j^2)
    Var_j   = sum over them of (x_j - mean)^2 / (tokens - 1)

Wanda (Sun et al. 2023, arXiv:2306.11695) weighs weights by the first, FLAP (An et al. 2023, arXiv:2312.11983) by the second. One
forward pass without the head; squares are summed in float64.
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
from tune_prune.models.families import Family
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.batches import batch_size, check_snapshots, runs, samples_run
from tune_prune.pruning.statistics import Arrays, Need, PassWork, Statistic


@dataclass(frozen=True)
class InputNorms:
    """Per layer, float64: of o's inputs [K*g*d], head by head, and of down's inputs [M]."""

    attention: tuple[np.ndarray, ...]  # ||X_j||
    mlp: tuple[np.ndarray, ...]
    attention_variance: tuple[np.ndarray, ...]  # Var_j
    mlp_variance: tuple[np.ndarray, ...]


class _InputNorms(Statistic):
    version = 2
    stage = "input_norms"
    label = "input norm"

    @torch.inference_mode()
    def collect(
        self,
        model: PreTrainedModel,
        family: Family,
        windows: torch.Tensor,
        needs: Sequence[Need],
        residency: Residency = RESIDENT,
    ) -> dict[Need, dict[str, np.ndarray]]:
        wanted = check_snapshots([need.num_samples for need in needs], len(windows))
        runner = LayerRunner(model, family, residency)
        step = batch_size(windows.shape[1], runner.device.type)
        total: dict[str, torch.Tensor] = {}  # of the batches so far, by block and layer, as the cache names them
        found: dict[int, dict[str, torch.Tensor]] = {n: {} for n in wanted}
        batches = {(start, stop): windows[start:stop] for start, stop in runs(wanted, step)}
        with progress.step(
            "input norms", lambda: samples_run(wanted, step) * runner.num_layers, "samples x layers"
        ) as advance:
            for block in runner.blocks(batches):
                carried = runner.embedded(block)
                for index, layer in runner.layers():
                    for key, samples in block.items():
                        with _sums(family, layer, index) as sums:
                            carried.states[key] = carried.run(layer, index, key, carried.states[key])
                        start, stop = key
                        for name, value in sums.items():
                            value = total[name] + value if start else value
                            if stop in found:
                                found[stop][name] = value
                            if stop - start == step:  # else it ends inside a batch that is run as a whole, too
                                total[name] = value
                        advance(len(samples))
        return {
            need: {name: value.cpu().numpy() for name, value in found[need.num_samples].items()}
            | {"tokens": np.array([need.num_samples * windows.shape[1]])}
            for need in needs
        }

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
        layers = range(sum(name.startswith("mlp_") for name in arrays))

        def variance(block: str, layer: int) -> np.ndarray:
            tokens, total = int(arrays["tokens"][0]), arrays[f"sum_{block}_{layer}"]
            squares: np.ndarray = arrays[f"{block}_{layer}"] - np.square(total) / tokens
            return squares.clip(0) / max(1, tokens - 1)

        blocks = ("attention", "mlp")
        norms = [tuple(np.sqrt(arrays[f"{block}_{i}"]) for i in layers) for block in blocks]
        return InputNorms(*norms, *(tuple(variance(block, i) for i in layers) for block in blocks))


@contextmanager
def _sums(family: Family, layer: nn.Module, index: int) -> Iterator[dict[str, torch.Tensor]]:
    """Over the tokens that `layer`, number `index`, is run on, of squares: "attention_<index>" and "mlp_<index>", and of the inputs
    themselves: "sum_attention_<index>" and "sum_mlp_<index>"."""
    sums: dict[str, torch.Tensor] = {}

    def record(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
            sums[name] = x.square().sum(dim=(0, 1), dtype=torch.float64)
            sums[f"sum_{name}"] = x.sum(dim=(0, 1), dtype=torch.float64)

        return hook

    part = family.linears(layer)
    blocks = (("attention", "output"), ("mlp", "down"))
    handles = [part[role].register_forward_pre_hook(record(f"{block}_{index}")) for block, role in blocks]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


STATISTIC = _InputNorms()
