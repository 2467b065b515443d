"""Models over two devices on a machine without a GPU: `python -m tests.two_devices llama` prints, for everything that is done with
a model of each variant, how far it is from what one device gives, as a share of it.

The second device is torch's place for backends of others: its tensors are tensors of the CPU in a wrapper, and what is given
tensors of both devices raises, as with two GPUs.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import build_tiny
from tests.pruning.test_surgery import KEEP_SETS, plan_of
from tune_prune.evaluation.divergence import head_inputs, token_divergences
from tune_prune.evaluation.engine import prefix_trees
from tune_prune.evaluation.engine.rows import Request
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models.families import decoder_layers, family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.runner.residency import Residency
from tune_prune.models.runner.spread import device_map, follow_weights
from tune_prune.pruning.compensation.refit import least_squares
from tune_prune.pruning.methods import Dense, load_method
from tune_prune.pruning.statistics import Need, load_statistic
from tune_prune.pruning.statistics.block_removal import KINDS
from tune_prune.pruning.surgery import prune

_setup_privateuseone_for_python_backend("far")
NEAR, FAR = torch.device("cpu"), torch.device("far:0")
CROSSING = (torch.ops.aten._to_copy, torch.ops.aten.to, torch.ops.aten.copy_)
GENERATOR = np.random.default_rng(0)
WINDOWS = torch.from_numpy(GENERATOR.integers(64, size=(6, 11)))
RESIDENT = Residency(gpus=2)
WAYS = {"whole": RESIDENT} | {
    f"by layer, states in the {place}": Residency(gradients_by_layer=True, states=place, gpus=2)
    for place in ("host", "file")
}


class FarTensor(torch.Tensor):
    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> FarTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=FAR
        )

    def __init__(self, near: torch.Tensor) -> None:
        self.near = near

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class TwoDevices(TorchDispatchMode):
    """So that calls on tensors of the CPU alone, too, may ask for results over there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_flatten((args, kwargs))[0]
    given = [value for value in leaves if isinstance(value, torch.Tensor)]
    far = {id(value.near): value for value in given if isinstance(value, FarTensor)}
    asked = next((value for value in leaves if isinstance(value, torch.device)), None)
    if far and func.overloadpacket not in CROSSING and any(t.dim() for t in given if not isinstance(t, FarTensor)):
        raise RuntimeError(f"{func} is given tensors of both devices")
    there = bool(given) and isinstance(given[0], FarTensor) if asked is None else asked == FAR

    def inside(value: Any) -> Any:
        if isinstance(value, FarTensor):
            return value.near
        return NEAR if value == FAR else value  # the meta device stays what it is

    def outside(value: Any) -> Any:
        if not there or not isinstance(value, torch.Tensor):
            return value
        return far.get(id(value)) if id(value) in far else FarTensor(value)

    args, kwargs = tree_map(inside, (args, kwargs))
    return tree_map(outside, func(*args, **kwargs))


def over_two_devices(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the second half of its layers, and what stands behind them, on the far device."""
    family = family_of(model.config.model_type)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    empty.tie_weights()
    places = device_map(empty, family, [NEAR, FAR])
    model = copy.deepcopy(model)
    for name, place in places.items():
        if place == FAR:
            for module in model.get_submodule(name).modules():
                for key, p in [*module._parameters.items()]:
                    if p is not None:
                        module._parameters[key] = nn.Parameter(FarTensor(p.data), requires_grad=False)
                for key, buffer in [*module._buffers.items()]:
                    if buffer is not None:
                        module._buffers[key] = FarTensor(buffer)
    follow_weights(model, family)
    assert [next(layer.parameters()).device for layer in decoder_layers(model, family)] == [NEAR, NEAR, FAR, FAR]
    return model


def statistic(name: str, kinds: tuple[str, ...], way: Residency) -> Callable[[PreTrainedModel], Any]:
    needs = [Need(name, kind, count) for kind in kinds for count in (3, 6)]
    return lambda model: load_statistic(name).collect(model, family_of(model.config.model_type), WINDOWS, needs, way)


def zero_shot(share: bool) -> Callable[[PreTrainedModel], Any]:
    context = GENERATOR.integers(64, size=9)
    ends = GENERATOR.integers(64, size=(3, 4))
    item = [Request(np.concatenate([context, end[:-1]]), end) for end in ends]

    def scores(model: PreTrainedModel) -> Any:
        found = prefix_trees.score_items(model, [item], share=share)
        return [found.loglikelihoods, found.greedy]

    return scores


def pruned(of: Callable[[PreTrainedModel], Any]) -> Callable[[PreTrainedModel], Any]:
    def run_pruned(model: PreTrainedModel) -> Any:
        family = family_of(model.config.model_type)
        return of(prune(model, family, plan_of(model, family, *KEEP_SETS["different in every layer"])))

    return run_pruned


def magnitude(model: PreTrainedModel) -> Any:
    family = family_of(model.config.model_type)
    scores = load_method("magnitude").scores(Dense(model, family, read_geometry(model, family), 0, {}, RESIDENT))
    return [*scores.attention, *scores.mlp]


def measured(model: PreTrainedModel) -> Any:
    return perplexity(model, WINDOWS.flatten(), 11, residency=RESIDENT).mean_loss


def diverged(model: PreTrainedModel) -> Any:
    family = family_of(model.config.model_type)
    small = prune(model, family, plan_of(model, family, *KEEP_SETS["different in every layer"]))
    return token_divergences(small, list(WINDOWS), head_inputs(model, list(WINDOWS), RESIDENT), RESIDENT)


def refitted(model: PreTrainedModel) -> Any:
    family = family_of(model.config.model_type)
    plan = plan_of(model, family, *KEEP_SETS["different in every layer"])
    found = least_squares(model, family, plan, WINDOWS, 0.1, RESIDENT)
    return [[block.before, block.after] for block in found.blocks] + [*found.weights.values()]


DONE: dict[str, Callable[[PreTrainedModel], Any]] = {
    **{f"gradients {name}": statistic("taylor", ("",), way) for name, way in WAYS.items()},
    "gradients of kfac": statistic("kfac", ("",), RESIDENT),
    "removals": statistic("block_removal", KINDS, RESIDENT),
    "input norms": statistic("input_norms", ("",), RESIDENT),
    "block influence": statistic("block_influence", ("",), RESIDENT),
    "magnitude": magnitude,
    "perplexity": measured,
    "perplexity, pruned": pruned(measured),
    "kl": diverged,
    "refit": refitted,
    "zero-shot": zero_shot(share=True),
    "zero-shot, plain rows": zero_shot(share=False),
    "zero-shot, pruned": pruned(zero_shot(share=True)),
}


def difference(one: Any, other: Any) -> float:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max(difference(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return max(difference(*pair) for pair in zip(one, other, strict=True))
    one, other = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    gap = np.abs(one - other).max(initial=0)
    return float(gap and gap / np.abs(one).max())


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Plain attention, as torch's kernel takes other ways on devices that it does not know.
    for variant in sys.argv[1:]:
        model = build_tiny(variant, torch.float64, attn_implementation="eager")
        with TwoDevices():
            spread = over_two_devices(model)
            print(json.dumps({name: difference(do(model), do(spread)) for name, do in DONE.items()}))
