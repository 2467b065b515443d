"""KL(dense || pruned) against logits made whole by transformers, in every way to hold a model; which tokens it is taken on; and the
standard error of its mean."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tune_prune.evaluation.divergence as of_tokens
from tests.conftest import VARIANTS, near
from tests.models.test_head import scaled
from tests.pruning.test_surgery import KEEP_SETS, plan_of
from tests.quiz import byte_tokenizer, quiz_items, write_quiz
from tests.residencies import FEW, WAYS, in_way
from tests.trials import BLOCKWISE, open_context
from tune_prune.core.config import EvaluationProtocol
from tune_prune.evaluation.divergence import TEXT_TOKENS, Divergence, compared_tokens, head_inputs, token_divergences
from tune_prune.evaluation.suite import ZeroShotSuite
from tune_prune.evaluation.zero_shot import build_suite
from tune_prune.models import head
from tune_prune.models.families import FAMILIES
from tune_prune.pruning.surgery import prune
from tune_prune.trial.trial import Trial

WHOLE_TEXT = True

LENGTHS = (9, 30, 4, 30, 1, 17, 5, 30, 8, 30, 30)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(of_tokens, "default_batch_tokens", lambda *_: 100)


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(64, (length,), generator=generator) for length in LENGTHS]


def pruned(model):
    family = FAMILIES[model.config.model_type]
    return prune(model, family, plan_of(model, family, *KEEP_SETS["different in every layer"]))


@torch.inference_mode()
def by_hand(dense, other, tokens) -> np.ndarray:
    """sum_v p (log p - log q) at every position, sample by sample, without padding."""
    found = []
    for sample in tokens:
        p, q = (torch.softmax(model(input_ids=sample[None]).logits[0].double(), dim=-1) for model in (dense, other))
        found.append((p * (p.log() - q.log())).sum(dim=-1))
    return torch.cat(found).numpy()


@pytest.mark.parametrize(
    ("variant", "dtype", "error"),
    [*((variant, torch.float64, 1e-12) for variant in VARIANTS), ("llama-biases", torch.float32, 2e-6)],
)
def test_equals_whole_logits_of_transformers(variant, tiny, dtype, error):
    dense = tiny(variant, dtype)
    small = pruned(dense)
    expected = by_hand(dense, small, samples())
    found = token_divergences(small, samples(), head_inputs(dense, samples()))
    assert expected.mean() > 0.03
    error = near(variant, error)
    np.testing.assert_allclose(found, expected, rtol=0, atol=error)
    np.testing.assert_allclose(token_divergences(dense, samples(), head_inputs(dense, samples())), 0, atol=error)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "dtype"), FEW)
def test_every_way_has_the_same_bits(tiny, name, dtype, way, tmp_path):
    """Both models are held so: the one whose states are kept, and the one that is compared with it."""
    dense = tiny(name, dtype)
    of_small = head_inputs(pruned(dense), samples())
    empty, residency = in_way(dense, way)
    assert torch.equal(head_inputs(empty, samples(), residency), head_inputs(dense, samples()))
    found = token_divergences(empty, samples(), of_small, residency)
    np.testing.assert_array_equal(found, token_divergences(dense, samples(), of_small))


@pytest.mark.parametrize("change", [lambda model: model, scaled], ids=["in parts", "whole"])
def test_logits_in_parts_and_those_that_change_behind_the_head(tiny, monkeypatch, change):
    dense = change(tiny("llama"))
    small = pruned(dense)
    expected = by_hand(dense, small, samples())
    monkeypatch.setattr(head, "positions_at_once", lambda *_: 7)
    found = token_divergences(small, samples(), head_inputs(dense, samples()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_bfloat16_is_compared_in_float32(tiny):
    dense = tiny("llama", torch.bfloat16)
    small = pruned(dense)
    found = token_divergences(small, samples(), head_inputs(dense, samples()))
    assert found.dtype == np.float32 and (found > -1e-6).all()
    assert found.mean() == pytest.approx(
        by_hand(dense, small, samples()).mean(), rel=0.02
    )  # padded batches round otherwise


def test_mean_and_standard_error_of_blocks():
    """Blocks of equal sizes have the plain standard error; others that of a ratio, by leaving one out (jackknife)."""
    random = np.random.default_rng(0)
    even = Divergence(random.exponential(size=12), np.full(12, 128))
    assert even.mean == pytest.approx(even.nats.mean())
    assert even.stderr == pytest.approx(even.nats.std(ddof=1) / math.sqrt(12))
    tokens = random.integers(20, 60, size=400)
    odd = Divergence(random.exponential(size=400), tokens)
    assert odd.mean == pytest.approx((odd.nats * tokens).sum() / tokens.sum())
    left_out = [np.average(np.delete(odd.nats, i), weights=np.delete(tokens, i)) for i in range(400)]
    assert odd.stderr == pytest.approx(np.std(left_out) * math.sqrt(399), rel=0.01)
    assert math.isnan(Divergence(np.array([0.5]), np.array([128])).stderr)


def test_tokens_are_put_into_blocks():
    values, parts = np.arange(700.0), [torch.zeros(300), torch.zeros(300), torch.zeros(100)]
    found = Divergence.of(values, parts, 128)
    assert found.tokens.tolist() == [128, 128, 44, 128, 128, 44, 100]
    assert found.nats[0] == 63.5 and found.nats[3] == 363.5 and found.nats[-1] == 649.5
    assert Divergence.of(values, parts, None).nats.tolist() == [149.5, 449.5, 649.5]


def test_items_come_from_the_tasks_in_turn_with_their_right_answers(tmp_path):
    tokenizer = byte_tokenizer(True)
    items = build_suite(tokenizer, EvaluationProtocol(("quiz",)), write_quiz(tmp_path, quiz_items()), 512).items
    renamed = [vars(item) | {"task": task} for task in ("a", "b") for item in items]
    renamed[0]["gold"] = -1
    suite = ZeroShotSuite([type(items[0])(**values) for values in renamed], EvaluationProtocol(("a", "b")))
    texts = [
        f"{item['passage']} Question: {item['question']} Answer: {item['options'][item['answer']]}"
        for item in quiz_items()
    ]
    expected = [tokenizer(text).input_ids[:-1] for text in (texts[1], texts[0], texts[2], texts[1], texts[3])]
    found = suite.right_answers()
    assert [tokens.tolist() for tokens in found[: len(expected)]] == expected and len(found) == 21


@pytest.mark.parametrize(
    ("tokens", "compared"), [(1, 1), (255, 255), (4096, 256), (4097, 257), (65_535, 4096), (10**6, 4096)]
)
def test_one_token_in_sixteen_is_compared_up_to_a_bound(tokens, compared):
    assert compared_tokens(tokens, TEXT_TOKENS) == compared


def test_a_trial_measures_it_once_and_keeps_the_dense_states(tmp_path):
    context = open_context(tmp_path)
    trial = Trial(BLOCKWISE, context)
    reports = {report.stage: report for report in trial.stages()}
    loaded = context.loaded
    tokens = context.perplexity_tokens[: math.ceil(len(context.perplexity_tokens) / 16)].split(128)
    expected = by_hand(loaded.model, prune(loaded.model, loaded.family, trial.plan), tokens)
    metrics = trial.record.metrics
    assert metrics["kl_text"] == pytest.approx(expected.mean(), abs=1e-6)
    sums = [(part - expected.mean()).sum() for part in np.split(expected, range(128, len(expected), 128))]
    stderr = math.sqrt(len(sums) / (len(sums) - 1) * np.square(sums).sum()) / len(expected)
    assert metrics["kl_text_stderr"] == pytest.approx(stderr, abs=1e-6)
    assert 0 < metrics["kl_tasks_stderr"] < metrics["kl_tasks"]
    again = {report.stage: report for report in Trial(BLOCKWISE, context).stages()}["kl"]
    assert again.tokens == 0 and again.metrics == reports["kl"].metrics
    other = Trial(replace(BLOCKWISE, method="magnitude", pruning_ratio=0.3), context)
    assert {report.stage: report.tokens for report in other.stages()}["kl"] == reports["kl"].tokens / 2
