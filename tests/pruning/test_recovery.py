"""The training of what pruning has left against a plain loop with PEFT, torch's optimiser and whole logits, and its guard."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import VARIANTS, attends
from tests.pruning.test_refit import plan_of
from tests.residencies import FEW, WAYS, in_way
from tune_prune.core.hashing import seed_for
from tune_prune.evaluation.divergence import head_inputs
from tune_prune.models.families import FAMILIES, MLP, Family
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.compensation import recovery
from tune_prune.pruning.compensation.recovery import Recovery, State, lora
from tune_prune.pruning.surgery import Changes, cut, prune

STEPS, RATE, RANK, SEED = 3, 0.01, 8, 5
Make = Callable[..., PreTrainedModel]


def samples(count: int, seed: int = 3) -> Tensor:
    return torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "HELD_OUT", 3)
    monkeypatch.setattr(recovery, "ROWS", 2)
    monkeypatch.setattr(recovery, "WARM_UP", 2)


def family_of(model: PreTrainedModel) -> Family:
    return FAMILIES[model.config.model_type]


def states_of(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Hidden states that the dense model's head is given, [samples, T, H]."""
    return head_inputs(model, list(windows)).view(*windows.shape, -1)


def trained(
    dense: PreTrainedModel,
    windows: Tensor,
    way: Residency = RESIDENT,
    kept: State | None = None,
    keep: Callable[[State], object] = id,
    steps: int = STEPS,
    rate: float = RATE,
    rank: int = RANK,
    plan: str = "cut",
) -> Recovery:
    pruned = prune(dense, family_of(dense), plan_of(dense, plan))
    return lora(pruned, family_of(dense), windows, states_of(dense, windows), steps, rate, rank, SEED, way, kept, keep)


def plain_divergence(dense: nn.Module, own: nn.Module, windows: Tensor) -> Tensor:
    """KL(dense || own) [samples, T]."""
    with torch.no_grad():
        wanted = dense(windows).logits.double().log_softmax(-1)
    found = own(windows).logits.double().log_softmax(-1)
    return F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1)


TRAINED = ["llama-biases", "qwen2-sliding", "granite", "phi3", "exaone4", "lfm2"]
SLOWLY = [
    name
    for name, (family, _) in VARIANTS.items()
    if name not in TRAINED and family not in ("qwen3_5_text", "falcon_h1", "granitemoehybrid")
]  # states in float32 are rounded


@pytest.mark.parametrize(
    ("variant", "rank"),
    [
        ("llama-biases", 3),
        *((name, RANK) for name in TRAINED),
        *(pytest.param(name, RANK, marks=pytest.mark.slow) for name in SLOWLY),
    ],
)
def test_training_is_that_of_a_plain_loop(tiny: Make, variant: str, rank: int) -> None:
    dense, windows = tiny(variant, torch.float64), samples(7)  # four to train on, for three steps of two
    found = trained(dense, windows, rank=rank)

    pruned = copy.deepcopy(prune(dense, family_of(dense), plan_of(dense)))  # merging changes what it shares
    start = plain_divergence(dense, copy.deepcopy(pruned), windows[4:]).mean()
    names = ["q_proj", "k_proj", "v_proj", "o_proj"] if attends(variant) else []
    names += [getattr(family_of(dense), role).rpartition(".")[2] for role in MLP]
    own = get_peft_model(pruned, LoraConfig(r=rank, lora_alpha=recovery.ALPHA, target_modules=names))
    generator = torch.Generator().manual_seed(seed_for(SEED, "adapters"))
    adapters = [(name, p) for name, p in own.named_parameters() if "lora_" in name]
    for name, p in adapters:
        if "lora_A" in name:
            bound = 1 / math.sqrt(p.shape[1])
            p.data = torch.empty(p.shape, dtype=torch.float64).uniform_(-bound, bound, generator=generator)
        else:
            assert not p.any()
    optimizer = torch.optim.AdamW([p for _, p in adapters], weight_decay=0.0)
    for step, rows in enumerate(([0, 1], [2, 3], [0, 1])):
        for group in optimizer.param_groups:  # two steps of warming up, then down
            group["lr"] = RATE * (
                (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2)))
            )
        optimizer.zero_grad()
        plain_divergence(dense, own, windows[rows])[:, :-1].mean().backward()
        optimizer.step()
    assert found.before == pytest.approx(float(start), rel=1e-9)
    with torch.no_grad():
        assert found.after == pytest.approx(float(plain_divergence(dense, own, windows[4:]).mean()), rel=1e-6)
    merged = own.merge_and_unload()
    changed = prune(dense, family_of(dense), plan_of(dense), Changes(updates=found.updates))
    for name, p in merged.named_parameters():
        torch.testing.assert_close(changed.get_parameter(name), p, rtol=1e-6, atol=1e-9)
    assert len(found.updates) == len(adapters) // 2
    last = {name: changed.get_parameter(name) for name in found.updates if ".3." in name}
    assert last
    for name, p in last.items():  # of which the first channels stay
        assert (p != dense.get_parameter(name)[: p.shape[0], : p.shape[1]]).any()


@pytest.mark.parametrize(("variant", "dtype"), FEW)
def test_every_way_to_hold_the_model_gives_the_same_bits(
    tiny: Make, variant: str, dtype: torch.dtype, tmp_path
) -> None:
    dense, windows = tiny(variant, dtype), samples(7)
    plan, family, states = plan_of(dense), family_of(dense), states_of(dense, windows)
    results = []
    for way in WAYS:
        empty, residency = in_way(dense, way)
        pruned = cut(empty, family, plan, residency.weights)
        if residency.weights is not None:
            residency = Residency(pruned.weights, residency.device, residency.states)
        else:
            pruned.in_memory()
        results.append(lora(pruned.model, family, windows, states, STEPS, RATE, RANK, SEED, residency))
    first = results[0]
    assert first.after != first.before and len(first.updates) > 7
    for other in results[1:]:
        assert (other.before, other.after) == (first.before, first.after)
        for name, parts in first.updates.items():
            assert all(map(torch.equal, parts, other.updates[name])), name


@pytest.mark.parametrize("variant", ["llama", "llama-biases"])  # a block that is gone leaves its last bias
def test_a_model_whose_blocks_are_gone_is_trained_in_the_others(tiny: Make, variant: str) -> None:
    dense = tiny(variant)
    found = trained(dense, samples(7), plan="gone")
    gone = [name for name in found.updates if name.startswith(("model.layers.0.mlp", "model.layers.1.self_attn"))]
    assert bool(gone) == (variant == "llama-biases") and not any(found.updates[name][1].numel() for name in gone)
    assert any(name.startswith("model.layers.1.mlp") for name in found.updates)
    assert all(p.grad is None and not p.requires_grad for p in dense.parameters())
    changed = prune(dense, family_of(dense), plan_of(dense, "gone"), Changes(updates=found.updates))
    assert changed(samples(1)).logits.isfinite().all()


def test_an_interrupted_training_goes_on_with_the_same_result(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, windows, states = tiny("llama"), samples(9), []
    monkeypatch.setattr(recovery, "KEEP_EVERY_S", -1.0)
    whole = trained(dense, windows, keep=states.append, steps=5)
    assert [int(state["done"]) for state in states] == [1, 2, 3, 4]
    for state in states[1:3]:
        later = []
        again = trained(dense, windows, kept=state, keep=later.append, steps=5)
        assert [int(one["done"]) for one in later] == list(range(int(state["done"]) + 1, 5))
        assert (again.before, again.after) == (whole.before, whole.after)
        assert all(all(map(torch.equal, whole.updates[name], again.updates[name])) for name in whole.updates)
    read = Recovery.from_arrays(whole.arrays())
    assert (read.before, read.after) == (whole.before, whole.after)
    assert all(all(map(torch.equal, parts, read.updates[name])) for name, parts in whole.updates.items())


@pytest.mark.slow
def test_an_overfit_is_found_on_held_out_samples_and_an_innocent_training_is_not_accused(tiny: Make) -> None:
    dense = tiny("llama")
    one_text, other = samples(2).repeat(8, 1), samples(3, seed=11)
    overfit = trained(dense, torch.cat([one_text, other]), steps=60, rate=0.3)
    assert not overfit.used and overfit.error == 1.0 and overfit.after > overfit.before
    innocent = trained(dense, samples(200), steps=60, rate=0.003)
    assert innocent.used and innocent.error == innocent.after / innocent.before < 0.95


def test_a_step_that_is_captured_has_the_gradients_of_the_pass(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here what a GPU captures is called again; new samples are put where the first were."""
    calls = []

    def captured(step: Callable[[], object]) -> Callable[[], object]:
        calls.append(step())

        def replay() -> None:  # a graph needs no gradients to be wanted any more
            for p in training.adapters.values():
                p.requires_grad_(True)
            step()
            for p in training.adapters.values():
                p.requires_grad_(False)
                p.grad = None

        return replay

    monkeypatch.setattr(recovery, "captured", captured)
    dense, windows = tiny("qwen2-sliding", torch.float64), samples(6)
    pruned, states = prune(dense, family_of(dense), plan_of(dense)), states_of(dense, windows)
    pruned.requires_grad_(True)
    training = recovery._Training(pruned, family_of(dense), RESIDENT, STEPS, RATE, RANK, SEED)
    graph = recovery._Graph(training.runner, windows[:2], states[:2])
    for rows in (slice(2, 4), slice(4, 6), slice(0, 2)):
        captured_ones = graph(windows[rows], states[rows])
        passed = list(training._gradients(windows[rows], states[rows]))
        assert len(captured_ones) == len(passed) == len(training.adapters) and any(p.any() for p in passed)
        assert all(torch.equal(one, other) for one, other in zip(captured_ones, passed, strict=True))
    assert len(calls) == 1 and not any(p.grad is not None for p in training.adapters.values())
