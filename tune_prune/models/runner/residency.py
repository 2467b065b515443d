"""Where a pass over a model keeps what it needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Residency:
    """Where weights and hidden states are, and how much is there at once. No number depends on it."""

    # By parameter name, in host memory or files, for layers that are brought one at a time; None: the model's own, on the device.
    weights: Mapping[str, torch.Tensor] | None = None
    device: torch.device | None = None  # on which layers run; None: the model's own
    states: Literal["device", "host", "file"] = "device"  # where hidden states wait for their next layer
    spill_folder: Path | None = None  # of that file; None: the system's folder for temporary files
    # With weights on the device: one layer's gradients at a time, or those of the whole model, whose sums are all there at once.
    gradients_by_layer: bool = False
    # Hidden states that go through the layers together; None: those of a batch, or 2**18 where layers are brought.
    block_tokens: int | None = None
    # Times that what need not be done at once is halved, where memory does not suffice: perplexity windows and zero-shot rows of a
    # batch, removals of a sweep, blocks. Batches of calibration samples stay: gradients and norms are sums over them.
    halvings: int = 0

    def at_once(self, count: int) -> int:
        """How many of `count` such things are done at once: at least 1."""
        return max(1, count >> self.halvings)

    @property
    def by_layer(self) -> bool:
        """Whether gradients are taken one layer at a time."""
        return self.gradients_by_layer or self.weights is not None

    @property
    def forward_only(self) -> Residency:
        """Of passes without gradients. With weights on the device they take batch after batch, so that little waits."""
        return self if self.weights is not None else replace(self, states="device")

    def __str__(self) -> str:
        where = {"device": "", "host": ", states in host memory", "file": ", states in a file"}[self.states]
        if self.halvings:
            where += f", 1/{2**self.halvings} at once"
        if self.weights is not None:
            return f"streamed{where}"
        return f"by layer{where}" if self.gradients_by_layer else f"resident{where}"


RESIDENT = Residency()

# The ways in which a trial can hold a model whose weights are on the device, the fastest first.
WAYS = (
    RESIDENT,
    Residency(gradients_by_layer=True),
    Residency(gradients_by_layer=True, states="host"),
    Residency(gradients_by_layer=True, states="file"),
)
