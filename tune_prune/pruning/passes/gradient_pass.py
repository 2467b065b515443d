"""One forward and backward pass over calibration samples, for every statistic that decides by gradients.

Of the whole model at once, or layer by layer (`residency.by_layer`): then what is summed up of one layer is there at a time and,
in `residency.states`, the inputs of all layers; the forward pass is made twice. Both give the same bits on a CPU. Weights are not
changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.core import terminal
from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.passes.batches import batch_size, batches, check_snapshots, runs, samples_run
from tune_prune.pruning.statistics import Arrays, Need, PassWork, Statistic

T = TypeVar("T")


class Sums(ABC, Generic[T]):
    """Sums of what the backward passes of some layers add up to. Within its context it fills itself, by hooks; afterwards the
    layers are as they were. `T`: of one layer after so many samples."""

    @abstractmethod
    def __enter__(self) -> Sums[T]: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
    def copy(self) -> Any:
        """Return what was added so far, for `restore`."""

    @abstractmethod
    def restore(self, saved: Any) -> None: ...

    @abstractmethod
    def results(self, num_samples: int) -> list[T]:
        """Return the results by layer, of the mean over so many samples."""


class WeightSums(Sums[T]):
    """A sum for each weight of the projections of `layers`, in float32 (float64 for float64 models), filled by hooks as gradients
    get ready, so that a model in bfloat16 never sums in bfloat16 and no gradient lives longer than its layer's backward pass."""

    def __init__(self, family: Family, layers: Iterable[nn.Module]) -> None:
        self.family = family
        self.layers = list(layers)
        # The large allocation comes first: where it fails, the model, which other trials use, is as it was.
        self.sums: dict[torch.Tensor, torch.Tensor] = {
            p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            for layer in self.layers
            for p in _members(family, layer)
        }

    def __enter__(self) -> WeightSums[T]:
        self.handles = [p.requires_grad_(True).register_post_accumulate_grad_hook(self._take) for p in self.sums]
        return self

    def __exit__(self, *_: object) -> None:
        # A hook holds this object, and so its layers and their hooks: without this, they would live until a garbage collection.
        for handle in self.handles:
            handle.remove()
        for p in self.sums:
            p.requires_grad_(False)
        self.sums = {}  # now, and not when the next layer's are there, too

    def _take(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        self.sums[p] += self.added(p, p.grad)
        p.grad = None

    def added(self, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return what the gradient of a batch adds to the sum of `p`."""
        return gradient

    def copy(self) -> dict[torch.Tensor, torch.Tensor]:
        return {p: total.clone() for p, total in self.sums.items()}

    def restore(self, saved: dict[torch.Tensor, torch.Tensor]) -> None:
        for p, total in saved.items():
            self.sums[p].copy_(total)


def _members(family: Family, layer: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters of a layer that belong to groups: o and down keep their bias whatever is removed."""
    yield from family.group_weights(layer)
    for role, linear in family.linears(layer).items():
        if linear.bias is not None and role not in ("output", "down"):
            yield linear.bias


MakeSums = Callable[[Family, Iterable[nn.Module]], Sums[T]]


def gradient_pass(
    runner: LayerRunner,
    windows: torch.Tensor,
    snapshots: Sequence[int],
    make: MakeSums[T],
    together: int | None = None,
    dense: torch.Tensor | None = None,
) -> dict[int, list[T]]:
    """Return what `make`'s sums come to, by layer, from the first n rows of `windows` [samples, seq_len], for every n in
    `snapshots`, of the model that `runner` runs: of the gradients of the sum over samples of their mean next-token losses or, where
    there is `dense` [samples, seq_len, H], what the dense model's head is given, of their mean divergences from it; `together`
    samples at a time (None: as many as `batch_size` says). Raises ValueError when a snapshot is not within 1..len(windows)."""
    wanted = check_snapshots(snapshots, len(windows))
    step = together or batch_size(windows.shape[1], runner.device.type)
    with no_gradients(runner.parameters):
        return (_by_layer if runner.residency.by_layer else _whole)(runner, windows, wanted, step, make, dense)


def gradient_work(wanted: Sequence[int], seq_len: int, num_layers: int, step: int, weight_sums: int) -> PassWork:
    """Return what such a pass computes; `weight_sums`: float32 numbers that its sums keep per weight."""
    samples = samples_run(wanted, step)
    return PassWork(
        tokens=max(wanted) * seq_len,
        attention_tokens=samples * seq_len * num_layers,
        mlp_tokens=samples * seq_len * num_layers,
        head_positions=samples * (seq_len - 1),
        batch_tokens=min(step, max(wanted)) * seq_len,
        row_tokens=seq_len,
        backward=True,
        snapshots=len(wanted),
        weight_sums=weight_sums,
    )


class GroupInformation(Statistic):
    """A statistic whose `sums` come to a number for every group, [K] and [M] of each layer."""

    backward = True
    sums: MakeSums[tuple[np.ndarray, np.ndarray]]
    together: int | None = None  # samples of a batch; None: as many as `batch_size` says
    weight_sums: int  # as `PassWork` has them

    def collect(
        self,
        model: PreTrainedModel,
        family: Family,
        windows: torch.Tensor,
        needs: Sequence[Need],
        residency: Residency = RESIDENT,
    ) -> dict[Need, dict[str, np.ndarray]]:
        wanted = [need.num_samples for need in needs]
        sums = gradient_pass(LayerRunner(model, family, residency), windows, wanted, self.sums, self.together)
        return {need: GroupScores.of_layers(sums[need.num_samples]).arrays() for need in needs}

    def work(self, needs: Sequence[Need], seq_len: int, num_layers: int, device: str) -> PassWork:
        step = self.together or batch_size(seq_len, device)
        return gradient_work([need.num_samples for need in needs], seq_len, num_layers, step, self.weight_sums)

    def value(self, arrays: Arrays, need: Need) -> GroupScores:
        """Return sums that are not yet divided by what a group costs."""
        return GroupScores.from_arrays(arrays)


def _whole(
    runner: LayerRunner,
    windows: torch.Tensor,
    wanted: Sequence[int],
    step: int,
    make: MakeSums[T],
    dense: torch.Tensor | None,
) -> dict[int, list[T]]:
    model = runner.model
    with (
        make(runner.family, decoder_layers(model, runner.family)) as sums,
        terminal.step("gradients", lambda: samples_run(wanted, step), "samples") as advance,
    ):
        losses = runner.losses

        def add(start: int, stop: int) -> None:
            losses.backward(windows[start:stop].to(model.device), dense=None if dense is None else dense[start:stop])
            advance(stop - start)

        return _snapshots(sums, add, wanted, step)


def _by_layer(
    runner: LayerRunner,
    windows: torch.Tensor,
    wanted: Sequence[int],
    step: int,
    make: MakeSums[T],
    dense: torch.Tensor | None,
) -> dict[int, list[T]]:
    """Run forward layer by layer, keeping the inputs of each; the head's gradients; and back, each layer run again for all batches
    before the one in front of it."""

    def gradient(hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.grad is not None
        return hidden.grad

    last = runner.num_layers
    parts = {(start, stop): windows[start:stop] for start, stop in runs(wanted, step)}
    by_samples: dict[int, list[T]] = {n: [] for n in wanted}
    with terminal.step("gradients", lambda: 2 * last, "layers") as advance, torch.no_grad():
        carried = runner.embedded(parts)
        states = carried.states  # by (batch, layer): its inputs; by batch: gradients of what it has given
        for batch in parts:
            states[batch, 0] = states.pop(batch)
        for index, layer in runner.layers():
            for batch in parts:
                states[batch, index + 1] = carried.run(layer, index, batch, states[batch, index])
            advance(1)
        with runner.tail() as losses:
            for batch, samples in parts.items():
                hidden = states.pop((batch, last)).requires_grad_(True)
                losses.backward(samples.to(runner.device), hidden, None if dense is None else dense[slice(*batch)])
                states[batch] = gradient(hidden)
        for index, layer in runner.layers(range(last - 1, -1, -1)):

            @torch.enable_grad()
            def add(start: int, stop: int, index: int = index, layer: nn.Module = layer) -> None:
                batch = (start, stop)
                hidden = states.pop((batch, index)).requires_grad_(index > 0)  # nobody asks for that of the embeddings
                output = carried.run(layer, index, batch, hidden)
                output.backward(states[batch].to(output.device))
                if index:
                    states[batch] = gradient(hidden)

            with make(runner.family, [layer]) as sums:
                for n, (result,) in _snapshots(sums, add, wanted, step).items():
                    by_samples[n].insert(0, result)
            advance(1)
    return by_samples


def _snapshots(sums: Sums[T], add: Callable[[int, int], None], wanted: Sequence[int], step: int) -> dict[int, list[T]]:
    """Return what `sums` come to after each number of samples in `wanted`; `add(start, stop)` adds the gradients of samples."""
    by_samples = {}
    for start, inside, end in batches(wanted, step):
        # The sums are put back only where something follows: a copy is as large as the sums themselves.
        before = sums.copy() if len(inside) > 1 or (inside and end is not None) else None
        for n in inside:
            add(start, n)
            by_samples[n] = sums.results(n)
            if before is not None:
                sums.restore(before)
        if end is not None:
            add(start, end)
            if end in wanted:
                by_samples[end] = sums.results(end)
    return by_samples


@contextmanager
def no_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Take their gradients, and the wish for them, from parameters within the context; afterwards they are as they were."""
    before = [(p, p.requires_grad, p.grad) for p in parameters]
    try:
        for p, _, _ in before:
            p.requires_grad_(False)
            p.grad = None
        yield
    finally:
        for p, requires_grad, grad in before:
            p.requires_grad_(requires_grad)
            p.grad = grad
