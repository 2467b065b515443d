"""The refit of cut blocks against numpy's least squares on inputs that hooks take off the whole model, and its guards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.conftest import attends
from tests.residencies import FEW, WAYS, in_way
from tune_prune.models.families import FAMILIES, decoder_layers
from tune_prune.models.geometry import read_geometry
from tune_prune.pruning.compensation.refit import Refit, least_squares
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.passes import batches

SEQ_LEN = 12
LAST = {"output", "down"}  # projections, by role
WIDTH = 12  # of a KV group of the tiny models: two query heads of 6
PLANS = {  # kept groups and channels by layer; a layer that keeps all, and blocks that are gone, are not refitted
    "cut": (
        ((0, 2, 3), (1, 3), (0, 1, 2, 3), (0, 1, 2, 3)),
        (tuple(range(0, 40, 2)), tuple(range(31)), tuple(range(40)), tuple(range(40))),
    ),
    "gone": (((0, 1, 2, 3), (), (2,), (0, 3)), ((), tuple(range(5, 40)), (7,), tuple(range(40)))),
}


@pytest.fixture(autouse=True)
def _batches_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH_TOKENS", {"cpu": 4 * SEQ_LEN})


def windows(count: int = 19) -> Tensor:
    return torch.randint(0, 64, (count, SEQ_LEN), generator=torch.Generator().manual_seed(8))


def plan_of(model: nn.Module, name: str = "cut") -> PruningPlan:
    groups, channels = PLANS[name]
    layers = len(decoder_layers(model, FAMILIES[model.config.model_type]))
    family = FAMILIES[model.config.model_type]
    if "attention" not in family.prunes:
        groups = ((),) * layers
    total = read_geometry(model, family).total_params
    return PruningPlan(groups[:layers], channels[:layers], 0, 1, total)


def refitted(model: nn.Module, plan: PruningPlan, samples: Tensor, damping: float = 0.1, *more: object) -> Refit:
    return least_squares(model, FAMILIES[model.config.model_type], plan, samples, damping, *more)


def blocks_of(model: nn.Module, samples: Tensor) -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Observe by layer and role what goes into its last projection [tokens, n], and q [tokens]: of the stream behind the block,
    and of what the projection puts out where a norm stands behind it."""
    seen, calls, streams, handles = {}, {}, {}, []
    family = FAMILIES[model.config.model_type]
    layers = decoder_layers(model, family)

    def stream(out: Tensor | tuple[Tensor]) -> Tensor:
        return out[0] if family.returns_tuple else out

    for index, layer in enumerate(layers):
        for role in LAST & family.linears(layer).keys():

            def watch(_: nn.Module, args: tuple, out: Tensor, at: tuple[int, str] = (index, role)) -> None:
                seen[at] = args[0], out

            handles.append(family.linears(layer)[role].register_forward_hook(watch))

        def given(_: nn.Module, args: tuple, kwargs: dict, out: Tensor, index: int = index) -> None:
            calls[index], streams[index, "down"] = (args, kwargs), stream(out)

        handles.append(layer.register_forward_hook(given, with_kwargs=True))
    with torch.no_grad():
        model(samples, use_cache=False)
        for handle in handles:
            handle.remove()
        for index, layer in enumerate(layers):  # without an MLP a layer gives the stream behind its attention
            mlp = layer.get_submodule(family.mlp)
            handle = mlp.register_forward_hook(lambda _, args, out: torch.zeros_like(out))
            streams[index, "output"] = stream(layer(*calls[index][0], **calls[index][1]))
            handle.remove()

    def energy(values: Tensor) -> np.ndarray:
        return values.double().square().mean(-1).flatten().numpy()

    found = {
        at: (x.flatten(0, 1).double().numpy(), 1 / energy(streams[at]) / (energy(out) if family.output_norms else 1.0))
        for at, (x, out) in seen.items()
    }
    return [{role: found[index, role] for role in LAST if (index, role) in found} for index in range(len(layers))]


def kept_columns(plan: PruningPlan, layer: int, role: str) -> list[int]:
    if role == "down":
        return list(plan.kept_channels[layer])
    return [WIDTH * group + one for group in plan.kept_groups[layer] for one in range(WIDTH)]


@pytest.mark.parametrize("name", PLANS)
def test_weights_are_those_of_numpy(tiny, variant, name):
    model, samples, damping = tiny(variant, torch.float64), windows(), 0.3
    plan = plan_of(model, name)
    found = refitted(model, plan, samples, damping)
    fit, held = samples[:17], samples[17:]  # 19 // 8 are held out
    seen = 0
    for index, (blocks, others) in enumerate(zip(blocks_of(model, fit), blocks_of(model, held), strict=True)):
        family = FAMILIES[model.config.model_type]
        parts = family.linears(decoder_layers(model, family)[index])
        for role, linear in ((role, parts[role]) for role in ("output", "down") if role in parts):
            weight, kept = linear.weight.numpy(), kept_columns(plan, index, role)
            gone = sorted(set(range(weight.shape[1])) - set(kept))
            new = found.weights.get(f"model.layers.{index}.{family.projections()[role]}.weight")
            if not gone or not kept:
                assert new is None
                continue
            seen += 1
            (x, q), (other, other_q) = blocks[role], others[role]
            root = np.sqrt(q)[:, None]
            for times in (1, 10, 100):  # until the weights do not grow too much
                ridge = np.sqrt(times * damping * np.mean(np.sum((root * x[:, kept]) ** 2, axis=0)))
                rows = np.vstack([root * x[:, kept], ridge * np.eye(len(kept))])
                wanted = np.vstack([root * (x[:, gone] @ weight[:, gone].T), np.zeros((len(kept), len(weight)))])
                change = np.linalg.lstsq(rows, wanted, rcond=None)[0].T
                if np.linalg.norm(weight[:, kept] + change) <= 2 * np.linalg.norm(weight[:, kept]):
                    break
            else:
                change = np.zeros_like(change)
            block = next(b for b in found.blocks if (b.layer, b.role) == (index, role))
            missing = other[:, gone] @ weight[:, gone].T
            errors = missing, missing - other[:, kept] @ change.T
            before, after = (float(np.sum(other_q[:, None] * error**2)) for error in errors)
            assert (block.before, block.after) == pytest.approx((before, after), rel=1e-8)
            assert block.used == (after < before) and block.used == (new is not None)
            if new is not None:
                np.testing.assert_allclose(new.numpy(), weight[:, kept] + change, rtol=1e-7, atol=1e-9)
    assert seen == len(found.blocks) >= (3 if attends(variant) else 2)


@pytest.mark.parametrize(("variant", "dtype"), FEW)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "resident"])
def test_every_way_to_hold_the_model_gives_the_same_bits(tiny, variant, way, dtype, tmp_path):
    model = tiny(variant, dtype)
    plan, samples = plan_of(model), windows(9)
    whole = refitted(model, plan, samples)
    held, residency = in_way(model, way)
    found = refitted(held, plan, samples, 0.1, residency)
    assert found.blocks == whole.blocks and whole.weights and dict(found.weights).keys() == dict(whole.weights).keys()
    for name, weight in whole.weights.items():
        assert torch.equal(found.weights[name], weight) and weight.dtype == dtype, name
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_overfit_is_caught_and_an_innocent_refit_is_not_accused(tiny):
    model = tiny("llama", torch.float64)
    plan = plan_of(model)
    one_text = windows(2).repeat(32, 1)[:56]  # two windows again and again
    other = windows(64)[56:]
    overfit = refitted(model, plan, torch.cat([one_text, other]), 1e-9)
    innocent = refitted(model, plan, windows(64), 0.1)
    assert any(not block.used for block in overfit.blocks)
    for block in overfit.blocks:  # what is held out was never fitted to
        assert block.used == (block.after < block.before)
    assert all(block.used for block in innocent.blocks) and innocent.error < 1


def test_a_plan_that_removes_nothing_takes_no_layer(tiny):
    model = tiny("llama")
    keep_all = PruningPlan.keep_all(read_geometry(model, FAMILIES["llama"]))
    assert refitted(model, keep_all, windows()) == Refit({}, ())
    assert Refit({}, ()).error == 1.0
    with pytest.raises(ValueError, match="the plan is for"):
        refitted(model, replace(keep_all, kept_groups=keep_all.kept_groups[1:]), windows())
