"""Zero-shot rows score the same, bit for bit, wherever a model's weights and hidden states are; layers are read once per block; and
memory that does not suffice makes batches and blocks smaller."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.evaluation.test_scored_positions import long_items
from tests.evaluation.test_shared_prefix import assorted_items
from tests.residencies import FEW, in_way
from tune_prune.evaluation.engine.prefix_trees import (
    score_items,
    unsupported_reason,
)
from tune_prune.evaluation.engine.rows import RequestScores
from tune_prune.models.runner.hidden_states import KeptStates

LONGEST = 256  # tokens of `long_items`, some of which are trees of several blocks of attention


def items():
    return [*assorted_items(), *long_items()]


def assert_same_bits(found: RequestScores, expected: RequestScores) -> None:
    np.testing.assert_array_equal(found.loglikelihoods, expected.loglikelihoods)
    np.testing.assert_array_equal(found.greedy, expected.greedy)


@pytest.mark.parametrize(("variant", "dtype"), FEW, ids=str)
def test_scores_have_the_bits_of_the_whole_model(tiny, variant, dtype):
    model = tiny(variant, dtype, max_position_embeddings=LONGEST)
    empty, residency = in_way(model, "streamed")
    for share, batch_tokens, block_tokens in ((True, None, None), (True, 90, 400), (False, 200, 700)):
        expected = score_items(model, items(), batch_tokens, share)
        found = score_items(empty, items(), batch_tokens, share, replace(residency, block_tokens=block_tokens))
        assert_same_bits(found, expected)
    assert unsupported_reason(empty, residency) is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["qwen2-sliding", "llama-tied"])
def test_hidden_states_in_a_file_and_the_head_in_parts(tiny, case, attention, monkeypatch):
    model = tiny(case, torch.float32, max_position_embeddings=LONGEST, attn_implementation=attention)
    module = "tune_prune.evaluation.engine.rows"
    monkeypatch.setattr(f"{module}._HEAD_IN_PARTS", {"cpu"})
    monkeypatch.setattr(f"{module}.softmax_rows", lambda *_: 7)
    expected = score_items(model, items())
    empty, residency = in_way(model, "spilled")
    assert_same_bits(score_items(empty, items(), residency=residency), expected)


def test_blocks_that_do_not_fit_are_halved(tiny, monkeypatch):
    """A device that holds the hidden states of so many batches."""
    model = tiny("llama")
    empty, residency = in_way(model, "streamed")
    expected = score_items(model, assorted_items(), batch_tokens=1)
    held, put = [], KeptStates.__setitem__

    def limited(states: KeptStates, key: int, values: torch.Tensor) -> None:
        put(states, key, values)
        held.append(len(states))
        if held[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(KeptStates, "__setitem__", limited)
    assert_same_bits(score_items(empty, assorted_items(), batch_tokens=1, residency=residency), expected)
    assert held.count(4) >= 2  # the block was halved twice at least
    last_failure = len(held) - 1 - held[::-1].index(4)
    assert 2 <= max(held[last_failure + 1 :]) <= 3
