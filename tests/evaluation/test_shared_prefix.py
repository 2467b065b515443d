"""Scoring the choices of an item as branches of one row, against each request run alone without a batch, a mask or a hook."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.conftest import VARIANTS, attends
from tests.residencies import FEW
from tune_prune.evaluation.engine import prefix_trees
from tune_prune.evaluation.engine.prefix_trees import (
    count_tokens,
    plan_rows,
    score_items,
    unsupported_reason,
)
from tune_prune.evaluation.engine.rows import Request, RequestScores, token_log_probs
from tune_prune.models.families import family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.runner.out_of_memory import OutOfMemory
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import prune

VOCABULARY = 64
# What is left of a block of a pruned model: every variant with less, and two of them without attention, without an MLP or both.
CUT = [(variant, (0, 2) if attends(variant) else (), (1, 5, 7)) for variant in VARIANTS]
CUT += [(variant, groups, ()) for variant, _ in FEW for groups in ((0, 2), ())] + [("llama", (), (1, 5, 7))]


def item(context: int, *continuations: int, seed: int = 0, cut: int = 0) -> list[Request]:
    """An item of random tokens: a shared context and choices of those lengths, of which the first `cut` are lost."""
    generator = np.random.default_rng(seed)
    shared = generator.integers(VOCABULARY, size=context)
    requests = []
    for length in continuations:
        targets = generator.integers(VOCABULARY, size=length)
        whole = np.concatenate([shared, targets[:-1]])[cut:]
        requests.append(Request(whole.astype(np.int32), targets.astype(np.int32)))
    return requests


def assorted_items() -> list[list[Request]]:
    """Every shape that items come in. Most are longer than the tests' sliding window of 5 tokens."""
    ordinary = [item(18, 4, 7, 2, seed=1), item(9, 3, 3, 3, 6, seed=2), item(30, 12, 1, seed=3)]
    one_token = item(14, 1, 1, 1, seed=4)  # equal inputs
    alone = item(11, 5, seed=5)
    nothing_shared = [item(6, 3, seed=6)[0], item(8, 3, seed=7)[0]]
    nested = item(12, 6, seed=8)  # an input that begins another one, and one whose targets begin in the prefix
    nested += [
        Request(nested[0].inputs[:14], nested[0].targets[:3]),
        Request(nested[0].inputs[:14], nested[0].targets[1:9]),
    ]
    first = nested[0]
    late = Request(
        np.append(first.inputs[:-1], (first.inputs[-1] + 1) % VOCABULARY), first.targets
    )  # differs at the end
    same_twice = item(10, 4, seed=9) * 2 + item(10, 6, seed=9)
    return [
        *ordinary,
        one_token,
        alone,
        nothing_shared,
        nested,
        [first, late],
        same_twice,
        item(20, 5, 9, seed=10, cut=3),
    ]


def truth(model: PreTrainedModel, items: list[list[Request]]) -> RequestScores:
    """Each request alone, as the definition of a log-likelihood says."""
    loglikelihoods, greedy = [], []
    for request in (request for requests in items for request in requests):
        inputs, targets = (torch.from_numpy(tokens.astype(np.int64)) for tokens in (request.inputs, request.targets))
        with torch.no_grad():
            logits = model(input_ids=inputs[None]).logits[0, -len(targets) :]
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        loglikelihoods.append(log_probs[torch.arange(len(targets)), targets].sum().item())
        greedy.append(bool((log_probs.argmax(-1) == targets).all()))
    return RequestScores(np.array(loglikelihoods), np.array(greedy))


def assert_equal_to_truth(model: PreTrainedModel, items: list[list[Request]], tolerance: float = 1e-10) -> None:
    expected = truth(model, items)
    for share in (False, True)[: 1 if family_of(model.config.model_type).recurrent else 2]:
        for batch_tokens in (None, 90, 1):
            found = score_items(model, items, batch_tokens, share)
            np.testing.assert_allclose(found.loglikelihoods, expected.loglikelihoods, rtol=0, atol=tolerance)
            assert found.greedy.tolist() == expected.greedy.tolist()


@contextmanager
def forwarded(model: PreTrainedModel) -> Iterator[list[tuple[int, ...]]]:
    """The shape of every batch of tokens that the model reads."""
    shapes: list[tuple[int, ...]] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield shapes
    hook.remove()


@pytest.mark.parametrize(
    ("variant", "attention", "tolerance"),  # eager attention takes its softmax in float32
    [*((variant, "sdpa", 1e-10) for variant in VARIANTS), *((variant, "eager", 1e-5) for variant, _ in FEW)],
)
def test_trees_score_as_each_request_alone(variant, tiny, attention, tolerance):
    model = tiny(variant, attn_implementation=attention)
    recurrent = family_of(model.config.model_type).recurrent
    state = f"layers of {type(model).__name__} carry a state from token to token, which has no branches"
    assert unsupported_reason(model) == (state if recurrent else None)
    assert_equal_to_truth(model, assorted_items(), 1e-5 if recurrent else tolerance)  # states are in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equally_likely_tokens_the_first_is_greedy(monkeypatch, dtype):
    """Ties go to the first, as in argmax, which lm-eval uses; in parts as in one."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(4, (40, 9), generator=generator).to(dtype)  # ties in almost every row
    rows, targets = torch.randint(40, (300,), generator=generator), torch.randint(9, (300,), generator=generator)
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    expected = log_probs.argmax(dim=-1)[rows] == targets
    assert 0 < expected.sum() < (log_probs[rows, targets] == log_probs.amax(dim=-1)[rows]).sum()
    for elements in (1 << 20, 5 * 9):
        monkeypatch.setattr("tune_prune.models.head.SOFTMAX_ELEMENTS", {"cpu": elements})
        chosen, greedy = token_log_probs(logits, targets, rows)
        assert torch.equal(greedy, expected)
        assert torch.equal(chosen, log_probs[rows, targets])


def test_the_head_in_parts_scores_as_the_whole(tiny, monkeypatch):
    """On a GPU the logits of a batch are never all there."""
    model = tiny("granite-biases-tied")
    module = "tune_prune.evaluation.engine.rows"
    monkeypatch.setattr(f"{module}._HEAD_IN_PARTS", {"cpu"})
    monkeypatch.setattr(f"{module}.softmax_rows", lambda *_: 7)
    items, positions = assorted_items(), []
    expected = truth(model, items).loglikelihoods
    model.lm_head.register_forward_hook(lambda _, __, logits: positions.append(logits.shape[:-1].numel()))
    np.testing.assert_allclose(score_items(model, items).loglikelihoods, expected, rtol=0, atol=1e-10)
    assert max(positions) == 7


@pytest.mark.parametrize(("variant", "groups", "channels"), CUT)
def test_pruned_models(variant, tiny, groups, channels):
    model = tiny(variant)
    whole = PruningPlan.keep_all(read_geometry(model, family_of(model.config.model_type)))
    kept_groups, kept_channels = list(whole.kept_groups), list(whole.kept_channels)
    kept_groups[1], kept_channels[2] = groups, channels
    plan = PruningPlan(tuple(kept_groups), tuple(kept_channels), 0, 0, whole.total_params)
    family = family_of(model.config.model_type)
    smaller = prune(model, family, plan)
    assert (unsupported_reason(smaller) is not None) == family.recurrent
    assert_equal_to_truth(smaller, assorted_items(), 1e-5 if family.recurrent else 1e-10)


@pytest.mark.parametrize("variant", ["llama-biases", "qwen2-sliding"])
def test_low_precision(variant, tiny):
    exact = truth(tiny(variant), assorted_items()).loglikelihoods
    model = tiny(variant, dtype=torch.bfloat16)
    assert unsupported_reason(model) is None
    shared = score_items(model, assorted_items()).loglikelihoods
    plain = score_items(model, assorted_items(), share=False).loglikelihoods
    # Rounding of the weights is most of it; sharing must not add to it.
    assert np.abs(shared - exact).max() < 1.5 * np.abs(plain - exact).max() + 0.1
    np.testing.assert_allclose(
        score_items(tiny(variant, dtype=torch.float32), assorted_items()).loglikelihoods, exact, atol=1e-4
    )


def test_sharing_forwards_the_prefix_once(tiny):
    items = [item(20, 4, 6, 9, seed=1), item(15, 1, 1, seed=2), item(3, 5, seed=3)]
    assert count_tokens(items, share=False) == 3 * 20 + 3 + 5 + 8 + 15 + 7
    assert count_tokens(items) == 20 + 3 + 5 + 8 + 15 + 7
    model = tiny("llama")
    for share in (True, False):
        with forwarded(model) as shapes:
            score_items(model, items, batch_tokens=1, share=share)
        assert all(rows == 1 for rows, _ in shapes)
        assert sum(width for _, width in shapes) == count_tokens(items, share)


def test_items_on_one_passage_share_it(tiny):
    passage = item(16, 1, seed=1)[0].inputs
    items = []
    for seed in range(3):
        question = item(6, 2, 3, seed=seed)
        items.append([Request(np.concatenate([passage, request.inputs]), request.targets) for request in question])
    assert count_tokens(items) == 16 + 3 * (6 + 1 + 2)
    assert count_tokens(items, share=False) == 3 * (2 * 22 + 1 + 2)
    (tree,) = plan_rows(items).trees
    assert sorted(tree.requests) == list(range(6))
    assert_equal_to_truth(tiny("mistral-sliding"), items)


def test_rows_stay_short_unless_their_inputs_are_long():
    questions = [item(100, 11, seed=0) for _ in range(40)]
    for number, (request,) in enumerate(questions):
        request.inputs[60:] = number  # 60 tokens are shared, 50 are not
    rows = plan_rows(questions)
    assert len(rows.trees) > 5
    assert max(len(tree.tokens) for tree in rows.trees) <= prefix_trees.MAX_ROW
    long = item(1000, 20, 20, 20, 20)
    assert [len(tree.tokens) for tree in plan_rows([long]).trees] == [1000 + 4 * 19]


def test_batches_stay_within_the_budget_and_go_from_long_to_short(tiny):
    model = tiny("llama")
    items = [item(length, 3, 4, seed=length) for length in range(8, 30)]
    with forwarded(model) as shapes:
        score_items(model, items, batch_tokens=100)
    assert len(shapes) > 3
    assert all(rows * width <= 100 for rows, width in shapes)
    assert [width for _, width in shapes] == sorted((width for _, width in shapes), reverse=True)


@pytest.mark.parametrize("most", [5, 1, 0])
def test_out_of_memory_halves_the_batch(tiny, caplog, most):
    model = tiny("llama")
    items = [item(12, 3, 4, seed=seed) for seed in range(12)]
    expected = truth(model, items).loglikelihoods
    tried: list[int] = []

    def refuse(_, __, kwargs):
        tried.append(len(kwargs["input_ids"]))
        if tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = model.model.register_forward_pre_hook(refuse, with_kwargs=True)
    with caplog.at_level(logging.WARNING):
        if most:
            np.testing.assert_allclose(score_items(model, items).loglikelihoods, expected, atol=1e-10)
        else:
            with pytest.raises(OutOfMemory, match="zero-shot does not fit into memory, even resident, 1/8 at once"):
                score_items(model, items)
    hook.remove()
    assert tried == {5: [12, 6, 3, 3, 3, 3], 1: [12, 6, 3] + [1] * 12, 0: [12, 6, 3, 1]}[most]
    assert "out of memory in zero-shot (resident)" in caplog.text
    np.testing.assert_allclose(score_items(model, items).loglikelihoods, expected, atol=1e-10)  # no hook is left behind


def test_each_wrong_mask_is_noticed(tiny, monkeypatch):
    """The probe of `unsupported_reason` sees what it is there for: masks and positions that are not the tree's."""
    right = prefix_trees.tree_inputs
    model = tiny("mistral-sliding")

    def no_window(model, trees, width, device):
        inputs = right(model, trees, width, device)
        windowless = right(tiny("llama"), trees, width, device)
        return inputs | {"attention_mask": windowless["attention_mask"]}

    def no_positions(*args):
        return {"attention_mask": right(*args)["attention_mask"]}

    def no_branches(*args):
        return {"position_ids": right(*args)["position_ids"]}

    for wrong in (no_window, no_positions, no_branches):
        monkeypatch.setattr(prefix_trees, "tree_inputs", wrong)
        assert unsupported_reason(model) is not None, wrong.__name__
    monkeypatch.setattr(prefix_trees, "tree_inputs", right)
    assert unsupported_reason(model) is None
