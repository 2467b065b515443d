"""Weights of experts as files hold them: three matrices of each, and not stacked as models have them.

    model.layers.0.mlp.experts.gate_up_proj [E, 2m, H]      model.layers.0.mlp.experts.7.gate_proj.weight [m, H], ....up_proj....
    model.layers.0.mlp.experts.down_proj [E, H, m]          model.layers.0.mlp.experts.7.down_proj.weight [H, m]

So transformers reads and writes the families of Qwen's mixtures (`qwen2_moe` of its conversion_mapping.py), and so does everything
else that reads them. It maps no names of model types that it does not know: a checkpoint of tune_prune_... has its experts stacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from tune_prune.models.families import FAMILIES
from tune_prune.models.runner.layer_weights import LazyWeights, Weights

_STACKED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")
_ONE = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def stored_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of `model` by the names that they have in files, those of an expert as parts of the stacked ones."""
    for name, p in model.named_parameters(remove_duplicate=remove_duplicate):
        yield from _parts(name, p) if _is_split(model, name) else [(name, p)]


def stacked(stored: LazyWeights, model: nn.Module) -> LazyWeights:
    """Map the parameters of `model` to weights that are `stored` by the names in files."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    split = {name: p for name, p in model.named_parameters() if _is_split(model, name)}
    if not split:
        return stored

    def find(name: str) -> Tensor:
        if name not in split:
            return stored[name]
        first = next(stored[part] for part, _ in _parts(name, split[name]))
        whole = first.new_empty(split[name].shape)
        for (part, _), (_, place) in zip(_parts(name, split[name]), _parts(name, whole), strict=True):
            place.copy_(stored[part])
        return whole

    return LazyWeights(names, find)


def unstacked(weights: Weights, model: nn.Module) -> Weights:
    """Map names in files to what they hold of `weights`, the inverse of `stacked`. Of a layer's experts the stacked weights are
    kept until those of another are asked for."""
    names = [name for name, _ in stored_parameters(model)]
    kept: dict[str, Tensor] = {}

    def find(name: str) -> Tensor:
        match = _ONE.fullmatch(name)
        if match is None:
            return weights[name]
        prefix, number, role = match.groups()
        whole = f"{prefix}.{'down' if role == 'down' else 'gate_up'}_proj"
        if whole not in kept:
            if not all(other.startswith(f"{prefix}.") for other in kept):
                kept.clear()
            kept[whole] = weights[whole]
        return dict(_parts(whole, kept[whole], int(number)))[name]

    return weights if len(names) == len(dict(model.named_parameters())) else LazyWeights(names, find)


def _is_split(model: nn.Module, name: str) -> bool:
    family = FAMILIES.get(model.config.model_type)  # type: ignore[union-attr, arg-type]
    return family is not None and bool(family.experts) and _STACKED.fullmatch(name) is not None


def _parts(name: str, weight: Tensor, expert: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield names in files and the parts of a stacked weight that they have: of all experts, or of that one."""
    match = _STACKED.fullmatch(name)
    assert match is not None
    prefix, roles = match[1], ("gate", "up") if match[2] == "gate_up" else ("down",)
    for number in range(len(weight)) if expert is None else (expert,):
        for role, part in zip(roles, weight[number].chunk(len(roles)), strict=True):
            yield f"{prefix}.{number}.{role}_proj.weight", part
