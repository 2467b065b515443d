"""The ways to hold a model: where a pass over it keeps weights and hidden states. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


Place = Literal["device", "host", "file"]


@dataclass(frozen=True)
class Residency:
    """A way to hold a model: where its weights and its hidden states are, and how much is there at once.

    On a CPU no number depends on it, but for zero-shot rows and KL where `halvings` is above 0 (after a lack of memory): matrix
    products of fewer rows round otherwise, log-likelihoods by up to 1e-4 nats in float32 and, of 1,500 nats, by half a nat in
    bfloat16. On a GPU other shapes of batches may take other kernels: there all that is made in another way, or in smaller
    batches, is equal up to that rounding."""

    # By parameter name, in host memory or files, for layers that are brought one at a time; None: the model's own, on the device.
    weights: Mapping[str, torch.Tensor] | None = None
    device: torch.device | None = None  # on which layers run; None: the model's own
    # Where hidden states wait for their next layer. With "host" those of a forward pass, a block of tokens at a time, stay on the
    # device; those that a gradient pass comes back to do not.
    states: Place = "device"
    # With weights on the device: one layer's gradients at a time, or those of the whole model, whose sums are all there at once.
    gradients_by_layer: bool = False
    # Hidden states that go through the layers together; None: those of a batch, or 2**18 where layers are brought.
    block_tokens: int | None = None
    from_files: bool = False  # the model is opened without its weights, which stay in their files: `weights` reads them
    # Of such a model: pruned copies are read as a whole, and measured with their weights on the device.
    pruned_whole: bool = False
    # Times that what need not be done at once is halved, where memory did not suffice: perplexity windows and zero-shot rows of a
    # batch, removals of a sweep, blocks. Batches of calibration samples stay: gradients and norms are sums over them.
    halvings: int = 0
    gpus: int = 1  # over which a model in memory is spread, layer by layer

    def at_once(self, count: int) -> int:
        """Return how many of `count` things are done at once: at least 1."""
        return max(1, count >> self.halvings)

    @property
    def by_layer(self) -> bool:
        """Gradients are taken one layer at a time."""
        return self.gradients_by_layer or self.streamed

    @property
    def streamed(self) -> bool:
        """Layers are brought one at a time."""
        return self.from_files or self.weights is not None

    @property
    def forward_only(self) -> Residency:
        """Return this way for passes without gradients: with weights on the device they take batch after batch, so little waits."""
        if not self.streamed:
            return RESIDENT
        return replace(self, states="device") if self.states == "host" else self

    def __str__(self) -> str:
        name = "streamed" if self.streamed else "by layer" if self.gradients_by_layer else "resident"
        name += ", states in a file" * (self.states == "file")
        name += f", 1/{2**self.halvings} at once" * bool(self.halvings)
        return name if self.gpus == 1 else f"{name}, on {self.gpus} GPUs"


RESIDENT = Residency()

# The ways in which a trial can hold its model, the fastest first.
_PLACES: tuple[Place, ...] = ("host", "file")
WAYS = (
    RESIDENT,
    *(Residency(gradients_by_layer=True, states=place) for place in _PLACES),
    *(Residency(from_files=True, pruned_whole=True, states=place) for place in _PLACES),
    *(Residency(from_files=True, states=place) for place in _PLACES),
)


def to_bring_layers(readable: bool, gpus: int) -> str:
    """Return what has to be done before layers can be brought one at a time, of weights that are `readable_in_place` or not, to so
    many GPUs; "" where they can be."""
    steps = [
        ("save the model with save_pretrained, which writes safetensors", not readable),
        ("use --gpus-per-trial 1 (layers are brought one at a time to one GPU only)", gpus > 1),
    ]
    return " and ".join(step for step, needed in steps if needed)
