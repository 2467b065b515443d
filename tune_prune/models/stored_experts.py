"""Tensors of a model by the names that they have in files: parameters and stored buffers, and of each expert three matrices, which
models have stacked.

    model.layers.0.mlp.experts.gate_up_proj [E, 2m, H]      model.layers.0.mlp.experts.7.gate_proj.weight [m, H], ....up_proj....
    model.layers.0.mlp.experts.down_proj [E, H, m]          model.layers.0.mlp.experts.7.down_proj.weight [H, m]

So transformers reads and writes the families of Qwen's mixtures (`qwen2_moe` of its conversion_mapping.py), and so does everything
else that reads them; Mixtral the same by `OTHER_NAMES`. It maps no names of model types that it does not know: a checkpoint of
tune_prune_... has its experts stacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from tune_prune.models.families import FAMILIES
from tune_prune.models.runner.layer_weights import LazyWeights, Weights

# By family, parts of names that are others in files.
OTHER_NAMES = {
    "mixtral": {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
}
_STACKED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")


def stored_tensors(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of `model`, and its buffers that are stored with them, by the names that they have in files: of an
    expert as parts of the stacked ones."""
    for name, tensor in _tensors(model, remove_duplicate):
        yield from _parts(model, name, tensor)


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of `model` that are in files, such as the factors of Gemma 4's layers, by name."""
    return {name: one for name, one in _tensors(model) if not isinstance(one, nn.Parameter)}


def _tensors(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not (remove_duplicate and id(tensor) in seen):
            yield name, tensor
        seen.add(id(tensor))


def stacked(stored: LazyWeights, model: nn.Module) -> LazyWeights:
    """Map the parameters of `model` to weights that are `stored` by the names in files."""
    parameters = dict(_tensors(model, remove_duplicate=False))
    if not any(_is_split(model, name) for name in parameters):
        return stored

    def find(name: str) -> Tensor:
        names = [part for part, _ in _parts(model, name, parameters[name])]
        first = stored[names[0]]
        if not _is_split(model, name):
            return first
        whole = first.new_empty(parameters[name].shape)
        for part, place in _parts(model, name, whole):
            place.copy_(stored[part])
        return whole

    return LazyWeights(parameters, find)


def unstacked(weights: Weights, model: nn.Module) -> Weights:
    """Map names in files to what they hold of `weights`, the inverse of `stacked`. Of a layer's experts the stacked weights are
    kept until those of another are asked for."""
    own = {part: name for name, tensor in _tensors(model) for part, _ in _parts(model, name, tensor)}
    kept: dict[str, dict[str, Tensor]] = {}

    def find(part: str) -> Tensor:
        name = own[part]
        if not _is_split(model, name):
            return weights[name]
        if name not in kept:
            if any(other.rpartition(".")[0] != name.rpartition(".")[0] for other in kept):
                kept.clear()
            kept[name] = dict(_parts(model, name, weights[name]))
        return kept[name][part]

    return weights if all(part == name for part, name in own.items()) else LazyWeights(own, find)


def _is_split(model: nn.Module, name: str) -> bool:
    family = FAMILIES.get(model.config.model_type)  # type: ignore[union-attr, arg-type]
    return family is not None and bool(family.experts) and _STACKED.fullmatch(name) is not None


def _parts(model: nn.Module, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names in files of a parameter with what they have of its `weight`: of a stacked one a part for each expert."""
    others = OTHER_NAMES.get(model.config.model_type, {})  # type: ignore[union-attr, arg-type]

    def in_files(name: str) -> str:
        for ours, theirs in others.items():
            name = name.replace(ours, theirs)
        return name

    match = _STACKED.fullmatch(name)
    if match is None or not _is_split(model, name):
        yield in_files(name), weight
        return
    prefix, roles = match[1], ("gate", "up") if match[2] == "gate_up" else ("down",)
    for number in range(len(weight)):
        for role, part in zip(roles, weight[number].chunk(len(roles)), strict=True):
            yield in_files(f"{prefix}.{number}.{role}_proj.weight"), part
