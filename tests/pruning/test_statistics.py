"""Promises of every statistic, and the norms and weights of `wanda_sp` and `magnitude` against plain loops."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import attends, near
from tests.residencies import FEW, WAYS, in_way
from tune_prune.core.config import PruningConfig
from tune_prune.models.families import FAMILIES
from tune_prune.models.geometry import read_geometry
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.methods import Dense, load_method, method_names
from tune_prune.pruning.passes import batches
from tune_prune.pruning.selection import further
from tune_prune.pruning.statistics import Need, by_statistic, load_statistic, statistic_names

SEQ_LEN = 9


def windows(count: int) -> torch.Tensor:
    return torch.randint(0, 64, (count, SEQ_LEN), generator=torch.Generator().manual_seed(3))


def needs_of(name: str, *num_samples: int) -> list[Need]:
    return [Need(name, kind, n) for n in num_samples for kind in load_statistic(name).kinds]


def family_of(model: nn.Module):
    return FAMILIES[model.config.model_type]


@pytest.mark.parametrize("name", statistic_names())
class TestEveryStatistic:
    """The contract."""

    def test_it_says_what_it_is(self, name):
        statistic = load_statistic(name)
        assert statistic.version >= 1 and statistic.stage and statistic.label
        assert {"seq_len", "num_samples"} <= set(statistic.reads) <= set(PruningConfig.__annotations__)
        stages = [load_statistic(other).stage for other in statistic_names()]
        assert stages.count(statistic.stage) == 1  # its files in the cache are its own

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_prefix_is_a_pass_over_it_alone(self, tiny, monkeypatch, name, dtype):
        """Bit for bit, where samples end inside a batch, at its end, and in a ragged last one."""
        monkeypatch.setattr(batches, "BATCH_TOKENS", {"cpu": 4 * SEQ_LEN})
        model, samples, statistic = tiny("llama", dtype), windows(11), load_statistic(name)
        counts = (1, 3, 4, 6, 8, 11)
        (wanted,) = by_statistic(needs_of(name, *counts)).values()
        together = statistic.collect(model, family_of(model), samples, wanted)
        for need in needs_of(name, *counts):
            (stored,) = (arrays for one, arrays in together.items() if statistic.key(one) == statistic.key(need))
            assert statistic.covers(stored, need)
            alone = statistic.collect(model, family_of(model), samples[: need.num_samples], [need])[need]
            assert stored.keys() == alone.keys()
            for array in alone:
                part = stored[array][..., : alone[array].shape[-1]]
                np.testing.assert_array_equal(part, alone[array], err_msg=f"{need} {array}")

    @pytest.mark.parametrize(("variant", "dtype"), FEW)
    @pytest.mark.parametrize("way", [way for way in WAYS if way != "resident"])
    def test_in_every_way_to_hold_the_model_it_has_the_same_bits(self, tiny, monkeypatch, name, variant, dtype, way):
        monkeypatch.setattr(batches, "BATCH_TOKENS", {"cpu": 4 * SEQ_LEN})
        model, samples, statistic = tiny(variant, dtype), windows(7), load_statistic(name)
        held, residency = in_way(model, way)
        (wanted,) = by_statistic(needs_of(name, 1, 3, 4, 7)).values()
        whole = statistic.collect(model, family_of(model), samples, wanted)
        found = statistic.collect(held, family_of(model), samples, wanted, residency)
        for need in wanted:
            assert whole[need].keys() == found[need].keys()
            for array in whole[need]:
                np.testing.assert_array_equal(found[need][array], whole[need][array], err_msg=f"{need} {array}")

    def test_its_key_tells_apart_what_differs(self, name):
        statistic = load_statistic(name)
        for kind in statistic.kinds:
            few, many = Need(name, kind, 2), Need(name, kind, 5)
            stored = {"dense": np.zeros(2)}
            assert statistic.key(few) != statistic.key(many) or not statistic.covers(stored, many)
        assert len({repr(statistic.key(Need(name, kind, 2))) for kind in statistic.kinds}) == len(statistic.kinds)

    def test_the_model_is_left_as_it_was(self, tiny, name):
        model = tiny("qwen3-biases-tied")
        before = {key: p.clone() for key, p in model.named_parameters()}
        modules = list(model.modules())

        def check() -> None:
            assert list(model.modules()) == modules
            for key, p in model.named_parameters():
                assert torch.equal(p, before[key]) and p.grad is None and not p.requires_grad
                assert not p._post_accumulate_grad_hooks
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)

        statistic, (wanted,) = load_statistic(name), by_statistic(needs_of(name, 2)).values()
        statistic.collect(model, family_of(model), windows(2), wanted)
        check()
        with pytest.raises(IndexError):
            statistic.collect(model, family_of(model), torch.full((2, SEQ_LEN), 999), wanted)
        check()


def inputs_by_loop(model: nn.Module, role: str, samples: torch.Tensor) -> list[np.ndarray]:
    """Inputs of that projection of every layer, [tokens, inputs]; none of a layer where it is in no group."""
    found = []
    for layer in model.model.layers:
        linear = family_of(model).linears(layer).get(role)
        if linear is None:
            found.append(np.empty((0, 0)))
            continue
        seen = []
        handle = linear.register_forward_hook(lambda _module, args, _output, seen=seen: seen.append(args[0]))
        for sample in samples:
            model(input_ids=sample[None])
        handle.remove()
        found.append(torch.cat(seen, 1)[0].double().numpy())
    return found


def norms_by_loop(model: nn.Module, samples: torch.Tensor) -> dict[str, list[list[float]]]:
    """||X_j|| of o and down of every layer, token by token."""
    sums: dict[str, list[list[float]]] = {"output": [], "down": []}
    for role, layers in sums.items():
        for inputs in inputs_by_loop(model, role, samples):
            total = [0.0] * inputs.shape[1]
            for token in inputs.tolist():
                for j, x in enumerate(token):
                    total[j] += x * x
            layers.append([math.sqrt(value) for value in total])
    return sums


def scores_of(method: str, model: nn.Module, samples: torch.Tensor):
    family, config = family_of(model), PruningConfig(method, SEQ_LEN, len(samples))
    values = {}
    for name, need in load_method(method).needs(config).items():
        statistic = load_statistic(need.statistic)
        values[name] = statistic.value(statistic.collect(model, family, samples, [need])[need], need)
    return load_method(method).scores(Dense(model, family, read_geometry(model, family), 0, values))


def test_wanda_sp_is_the_formula(tiny, variant):
    model, samples = tiny(variant), windows(3)
    norms = norms_by_loop(model, samples)
    scores, geometry = scores_of("wanda_sp", model, samples), read_geometry(model, family_of(model))
    for index, layer in enumerate(model.model.layers):
        part = family_of(model).linears(layer)
        down = part["down"].weight.tolist()
        assert len(scores.attention[index]) == geometry.kv_heads[index] == (4 if attends(variant) else 0)
        for k in range(geometry.kv_heads[index]):
            columns = range(12 * k, 12 * k + 12)  # two query heads of 6
            o = part["output"].weight.tolist()
            expected = sum(abs(row[j]) * norms["output"][index][j] for row in o for j in columns)
            assert scores.attention[index][k] == pytest.approx(
                expected / geometry.group_cost[index], rel=near(variant, 1e-10)
            )
        for j in range(40):
            expected = sum(abs(row[j]) for row in down) * norms["down"][index][j]
            assert scores.mlp[index][j] == pytest.approx(
                expected / geometry.channel_cost[index], rel=near(variant, 1e-10)
            )


def test_flap_is_the_formula(tiny, variant):
    model, samples = tiny(variant), windows(3)
    scores = scores_of("flap", model, samples)
    powers = {"output": 2, "down": 1} if attends(variant) else {"down": 1}
    inputs = {role: inputs_by_loop(model, role, samples) for role in powers}
    for index, layer in enumerate(model.model.layers):
        z = {}
        for path, power in powers.items():
            weights = family_of(model).linears(layer)[path].weight.double().numpy()
            metric = [
                (statistics.variance(x.tolist()) * sum(w * w for w in column)) ** power
                for x, column in zip(inputs[path][index].T, weights.T.tolist(), strict=True)
            ]
            mean, spread = statistics.mean(metric), statistics.stdev(metric)
            z[path] = [(value - mean) / spread for value in metric]
        attention = z.get("output", [])
        expected = [
            statistics.mean(attention[k : k + 12]) for k in range(0, len(attention), 12)
        ]  # two query heads of 6
        assert scores.attention[index].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert scores.mlp[index].tolist() == pytest.approx(z["down"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5])
def test_flap_keeps_what_its_published_code_keeps(tiny, ratio):
    """AL-AM of FLAP's lib/prune.py: one threshold for the z of all layers, next to where the parts above it, in channels, are the
    share that stays. The first layer's best group is above it here."""
    model, samples = tiny("llama"), windows(3)
    geometry = read_geometry(model, FAMILIES["llama"])
    metrics = [
        torch.stack(
            [
                (torch.from_numpy(x).var(0) * FAMILIES["llama"].linears(layer)[role].weight.double().square().sum(0))
                ** power
                for x, layer in zip(inputs_by_loop(model, role, samples), model.model.layers, strict=True)
            ]
        )
        for role, power in (("output", 2), ("down", 1))
    ]
    attention, channels = ((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True) for x in metrics)
    heads = attention.reshape(len(attention), geometry.kv_heads[0], -1).mean(2)
    found, order = torch.cat([heads.flatten(), channels.flatten()]).sort(descending=True)
    weight = torch.where(order < heads.numel(), geometry.group_cost[0] / geometry.channel_cost[0], 1.0)
    threshold = found[(weight.cumsum(0) - weight.sum() * (1 - ratio)).abs().argmin()]
    masks = heads > threshold, channels > threshold
    removed = int((~masks[0]).sum()) * geometry.group_cost[0] + int((~masks[1]).sum()) * geometry.channel_cost[0]
    scores = scores_of("flap", model, samples)
    plan = further(PruningPlan.keep_all(geometry), scores, geometry, removed, "free")
    assert plan.removed_params == removed
    for kept, mask in zip((plan.kept_groups, plan.kept_channels), masks, strict=True):
        assert [list(one) for one in kept] == [one.nonzero().flatten().tolist() for one in mask]


@pytest.mark.filterwarnings("error")
def test_flap_cannot_rank_the_only_group_of_a_layer_nor_its_only_channel(tiny):
    """Both stand at the mean of their layer: exactly, as rounding must not choose among layers."""
    scores = scores_of("flap", tiny("llama", num_key_value_heads=1, intermediate_size=1), windows(3))
    assert not np.concatenate([*scores.attention, *scores.mlp]).any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("weights", [("self_attn.o_proj", "mlp.down_proj"), ("self_attn.v_proj", "mlp.up_proj")])
def test_a_layer_that_adds_nothing_goes_before_all_others_by_every_method_that_reads_data(tiny, weights):
    model, samples = tiny("qwen3"), windows(3)
    with torch.no_grad():
        for path in weights:
            model.model.layers[2].get_submodule(path).weight.zero_()
    for method in map(load_method, method_names()):
        name = method.name
        for by in method.normalizations if method.statistics and not method.only_experts else ():
            layers = scores_of(name, model, samples).normalized(by).with_a_lowest()
            dead, *others = (np.concatenate([layers.attention[i], layers.mlp[i]]) for i in (2, 0, 1, 3))
            assert dead.max() < np.concatenate(others).min(), (name, by)


def test_magnitude_is_the_mean_weight_of_a_group(tiny, variant):
    model = tiny(variant)
    scores, geometry = scores_of("magnitude", model, windows(1)), read_geometry(model, family_of(model))
    for index, layer in enumerate(model.model.layers):
        part = family_of(model).linears(layer)
        for k in range(geometry.kv_heads[index]):
            group = [part["output"].weight[:, 12 * k : 12 * k + 12]]
            for role, width in (("query", 12), ("key", 6), ("value", 6)):
                group += [p[width * k : width * k + width] for p in part[role].parameters()]
            assert sum(p.numel() for p in group) == geometry.group_cost[index]
            expected = torch.cat([p.flatten() for p in group]).abs().mean().item()
            assert scores.attention[index][k] == pytest.approx(expected, rel=1e-10)
        for j in range(40):
            channel = [p[j] for role in ("gate", "up") for p in part[role].parameters()]
            channel.append(part["down"].weight[:, j])
            expected = torch.cat([p.flatten() for p in channel]).abs().mean().item()
            assert scores.mlp[index][j] == pytest.approx(expected, rel=1e-10)


def test_magnitudes_in_bfloat16_are_summed_in_float32(tiny):
    model = tiny("mistral", torch.bfloat16)
    exact = scores_of("magnitude", tiny("mistral", torch.bfloat16).double(), windows(1))
    for one, other in zip(scores_of("magnitude", model, windows(1)).mlp, exact.mlp, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_what_methods_read():
    reads = {name: load_method(name).reads for name in method_names()}
    samples = {"seq_len", "num_samples", "seed", "calibration", "steps"}
    assert reads["magnitude"] == set() and reads["random"] == {"seed"}
    assert reads["taylor"] == reads["wanda_sp"] == reads["flap"] == reads["block_influence"] == reads["kfac"] == samples
    assert reads["reap"] == samples
    assert reads["layerwise"] == reads["blockwise"] == {*samples, "removal_divisor", "removal_power"}
