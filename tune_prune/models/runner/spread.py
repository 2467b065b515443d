"""A model over several devices: every decoder layer whole on one of them, in turn, so that what goes through it crosses over only
between neighbours. One of them computes at a time: this is for models that one alone does not hold.

Where each module is says a device map of accelerate, by which transformers loads weights straight there. The hooks that
accelerate then has move what modules are given stand in the place of their forward methods: a copy of a layer with a block left
out would run the whole one. So they are taken off, and torch's own hooks do that, which copies have as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.models.families import Family, decoder_layers


def layers_on(num_layers: int, devices: int) -> int:
    """Return the most decoder layers that one of so many devices has."""
    return -(-num_layers // devices)


def device_map(model: PreTrainedModel, family: Family, devices: Sequence[Any]) -> dict[str, Any]:
    """Return where each module of `model` (on the meta device) is, by its name: what stands in front of the layers, with a head
    that is tied to it, on the first of `devices`; what stands behind them on the last."""
    layers = len(decoder_layers(model, family))
    each = layers_on(layers, len(devices))
    places = {f"{family.layers}.{index}": devices[index // each] for index in range(layers)}
    front = {id(p) for p in model.get_input_embeddings().parameters()}
    for name, module in model.named_modules():
        if not name.startswith(family.layers) and (module._parameters or module._buffers):
            behind = {id(p) for p in module.parameters(recurse=False)} - front  # rotary frequencies are no parameters
            # What Gemma 4's layers are given of each token is made in front of them.
            places[name] = devices[-1] if behind and "per_layer" not in name else devices[0]
    return places


def follow_weights(model: PreTrainedModel, family: Family) -> None:
    """Have what the layers of `model` are given, and what stands behind them, moved to where their weights are."""
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    for name, module in model.named_modules():
        module.__dict__.pop("forward", None)  # accelerate has put the class's own back, but of this very module
        layer = name.startswith(f"{family.layers}.") and name.count(".") == family.layers.count(".") + 1
        parameter = next(module.parameters(recurse=layer), None)
        if layer or (parameter is not None and not name.startswith(f"{family.layers}.")):
            assert parameter is not None
            module.register_forward_pre_hook(partial(_move, parameter.device), with_kwargs=True)


def _move(device: torch.device, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from accelerate.utils import send_to_device

    return send_to_device(args, device), send_to_device(kwargs, device)
