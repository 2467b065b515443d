"""How much a decoder layer turns the residual stream: block influence (ShortGPT, Men et al. 2024, arXiv:2403.03853, equation 1).

    BI_l = 1 - mean over all calibration tokens t of  x_t . y_t / (||x_t|| ||y_t||)

x_t is the residual stream in front of layer l, y_t behind it, before any norm. 0: the layer changes no direction; where one of both
is zero, the cosine counts as 0. One forward pass without the head; products and sums in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import nn

from tune_prune.models.families import Family
from tune_prune.models.runner.layer_runner import hidden_states
from tune_prune.pruning.passes.forward_pass import ForwardSums
from tune_prune.pruning.statistics import Arrays, Need

AT_ONCE = 256  # tokens that are there in float64: few beside what a batch takes in a layer


class _BlockInfluence(ForwardSums):
    version = 1
    stage = "block_influence"
    label = "block influence"

    def sums(self, family: Family, layer: nn.Module, index: int) -> AbstractContextManager[dict[str, torch.Tensor]]:
        return _cosines(layer, index)

    def value(self, arrays: Arrays, need: Need) -> np.ndarray:
        """Return the BI of every layer, float64 [layers], within 0 to 2."""
        layers = range(sum(name.startswith("cosines_") for name in arrays))
        sums = np.array([arrays[f"cosines_{layer}"][0] for layer in layers])
        return 1 - sums / int(arrays["tokens"][0])


@contextmanager
def _cosines(layer: nn.Module, index: int) -> Iterator[dict[str, torch.Tensor]]:
    """Return, over the tokens that `layer`, number `index`, is run on, the sum [1] of cosines: "cosines_<index>"."""
    sums: dict[str, torch.Tensor] = {}

    def hook(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor | tuple[torch.Tensor]) -> None:
        states = (args[0], hidden_states(output))
        parts = zip(*(part.flatten(0, 1).split(AT_ONCE) for part in states), strict=True)
        sums[f"cosines_{index}"] = torch.cat([_cosine(x, y) for x, y in parts]).sum(0, keepdim=True)

    handle = layer.register_forward_hook(hook)
    try:
        yield sums
    finally:
        handle.remove()


def _cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the cosines of the rows of [tokens, H], float64; 1 where they are equal, to the last bit."""
    x, y = x.double(), y.double()
    lengths = (x.square().sum(-1) * y.square().sum(-1)).sqrt()  # sqrt(s * s) is s
    return (x * y).sum(-1) / lengths.clamp_min(torch.finfo(torch.float64).tiny)


STATISTIC = _BlockInfluence()
