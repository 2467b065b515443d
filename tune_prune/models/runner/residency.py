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
    gpus: int = 1  # over which a model in memory is spread, layer by layer

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
        if self.weights is not None:
            return f"streamed{where}"
        way = f"by layer{where}" if self.gradients_by_layer else "resident"
        return way if self.gpus == 1 else f"{way}, on {self.gpus} GPUs"


RESIDENT = Residency()

# The ways in which a trial can hold a model whose weights are on the device, the fastest first.
WAYS = (
    RESIDENT,
    Residency(gradients_by_layer=True),
    Residency(gradients_by_layer=True, states="host"),
    Residency(gradients_by_layer=True, states="file"),
)
