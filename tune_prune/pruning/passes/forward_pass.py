"""One forward pass over calibration samples, for statistics of what happens in each layer: resident, layer by layer or streamed,
with the same bits on a CPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.core import terminal
from tune_prune.models.families import Family
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.passes.batches import batch_size, check_snapshots, runs, samples_run
from tune_prune.pruning.statistics import Need, PassWork, Statistic


class ForwardSums(Statistic):
    """A statistic of sums over tokens of what happens in each layer, by one forward pass without the head. Its arrays are these
    sums, by the names that `sums` gives them, and "tokens", [1]: of how many."""

    @abstractmethod
    def sums(self, family: Family, layer: nn.Module, index: int) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Within the context `layer`, number `index`, is run once; then the sums over the tokens [B, T] of that run, float64, are
        in it."""

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
        total: dict[str, torch.Tensor] = {}  # of the batches so far
        sums_at: dict[int, dict[str, torch.Tensor]] = {n: {} for n in wanted}
        parts = {(start, stop): windows[start:stop] for start, stop in runs(wanted, step)}
        with terminal.step(
            f"{self.label}s", lambda: samples_run(wanted, step) * runner.num_layers, "samples x layers"
        ) as advance:
            for block in runner.blocks(parts):
                carried = runner.embedded(block)
                for index, layer in runner.layers():
                    for key, samples in block.items():
                        with self.sums(family, layer, index) as sums:
                            carried.states[key] = carried.run(layer, index, key, carried.states[key])
                        start, stop = key
                        for name, value in sums.items():
                            value = total[name] + value if start else value
                            if stop in sums_at:
                                sums_at[stop][name] = value
                            if stop - start == step:  # else it ends inside a batch that is run as a whole, too
                                total[name] = value
                        advance(len(samples))
        return {
            need: {name: value.cpu().numpy() for name, value in sums_at[need.num_samples].items()}
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
            row_tokens=seq_len,
        )
