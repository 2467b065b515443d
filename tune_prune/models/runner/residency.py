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

    weights: Mapping[str, torch.Tensor] | None = (
        None  # by parameter name, in host memory or files; None: the model's own, on the device
    )
    device: torch.device | None = None  # on which layers run; None: the model's own
    states: Literal["device", "host", "file"] = "device"  # where hidden states wait for their next layer
    spill_folder: Path | None = None  # of that file; None: the system's folder for temporary files
    gradients_by_layer: bool = (
        False  # although the weights are on the device; else the sums of all layers are there at once
    )
    block_tokens: int | None = (
        None  # taken through the layers together; None: a batch, or all where weights are elsewhere
    )

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
        return f"by layer{where}" if self.by_layer else "resident"


RESIDENT = Residency()

# The ways in which a trial can hold a model whose weights are on the device, the fastest first.
WAYS = (
    RESIDENT,
    Residency(gradients_by_layer=True),
    Residency(gradients_by_layer=True, states="host"),
    Residency(gradients_by_layer=True, states="file"),
)
