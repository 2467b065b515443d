"""Weights that are elsewhere, by the names of a model's parameters, and layers that have theirs while their turn lasts.

accelerate's hooks, which bring a module's weights for a forward pass, are not used: they drop them before a backward pass can
come, and bring nothing ahead. So `layers_in_turn` is our own: it reads the next layer in a thread, and its layers are modules
like any others.
"""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

Weights = Mapping[str, Tensor]


class LazyWeights(Mapping[str, Tensor]):
    """The weights of `names`, each found by `find` whenever it is asked for."""

    def __init__(self, names: Collection[str], find: Callable[[str], Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._find = find

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._find(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def on_device(tensor: Tensor, device: torch.device) -> nn.Parameter:
    """Bring a weight to be computed with: contiguous, and in memory that torch has allocated itself. So one that is mapped from a
    file is copied also where it is on that device: it begins anywhere, and there matrix products may add up in another order."""
    mapped = not tensor.untyped_storage().resizable()
    return nn.Parameter(tensor.to(device, copy=mapped).contiguous(), requires_grad=False)


def bring(model: nn.Module, weights: Weights, device: torch.device | None) -> None:
    """Give the modules of `model` those `weights` that they have on the meta device only: on `device`, or (None) where they are,
    shared with whoever has them. Parameters on the meta device that it shares with another model stay as they are there."""
    names = {id(p): name for name, p in model.named_parameters()}
    brought: dict[int, nn.Parameter] = {}  # tied ones are brought once
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p.is_meta:
                if id(p) not in brought:
                    brought[id(p)] = _parameter(weights[names[id(p)]], device)
                module.register_parameter(name, brought[id(p)])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer if device is None else buffer.to(device)


def _parameter(weight: Tensor, device: torch.device | None) -> nn.Parameter:
    if device is not None:
        return on_device(weight, device)
    return weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight.contiguous(), requires_grad=False)


def first_non_finite(weights: Weights) -> str | None:
    """Return the name of the first weight that holds NaN or infinity. One weight is in memory at a time."""

    def finite(tensor: Tensor) -> bool:
        # Ten times as fast as isfinite, without its memory; NaN is both least and largest.
        return not tensor.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))

    return next((name for name in weights if not finite(weights[name])), None)


def shared(module: nn.Module) -> dict[int, object]:
    """Make a memo for `copy.deepcopy`: the copy has the parameters, buffers and configs of `module` itself."""
    configs = (part.config for part in module.modules() if hasattr(part, "config"))
    return {id(one): one for one in (*module.parameters(), *module.buffers(), *configs)}


def layers_in_turn(
    layers: nn.ModuleList, weights: Weights, prefix: str, order: Sequence[int], device: torch.device
) -> Iterator[tuple[int, nn.Module]]:
    """Yield number and layer, for the numbers in `order`: copies of `layers` with their `weights`, named "<prefix><number>.<name>".
    Two are in memory at a time: the one that is handed out, which is emptied when the next is asked for, and that one."""

    def read(index: int) -> dict[str, Tensor]:
        names = (name for name, _ in layers[index].named_parameters())
        brought = {name: on_device(weights[f"{prefix}{index}.{name}"], device) for name in names}
        return {**brought, **{name: buffer.to(device) for name, buffer in layers[index].named_buffers()}}

    with ThreadPoolExecutor(1, "next-layer") as thread:
        ahead = [thread.submit(read, order[0])]
        for index, following in zip(order, [*order[1:], None], strict=True):
            layer = _with(layers[index], ahead.pop().result())
            if following is not None:
                ahead.append(thread.submit(read, following))
            yield index, layer
            layer.to_empty(device="meta")
    give_back()


def give_back() -> None:
    """Give freed memory that the C library keeps back to the system. The library has an arena for every thread, so that after a
    pass that has read layers in another one it would hold up to half a gigabyte."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc's alone
        trim(0)


def _with(layer: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Copy `layer` with these parameters and buffers, by their names in it."""
    own = {id(one): tensors[name] for name, one in (*layer.named_parameters(), *layer.named_buffers())}
    return copy.deepcopy(layer, shared(layer) | own)
