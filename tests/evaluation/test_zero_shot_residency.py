"""Zero-shot rows score the same, bit for bit, wherever a model's weights and hidden states are; layers are read once per block; and
memory that does not suffice makes batches and blocks smaller."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.evaluation.test_scored_positions import long_items
from tests.evaluation.test_shared_prefix import assorted_items
from tests.residencies import FEW, Counted, in_way
from tune_prune.evaluation.engine.prefix_trees import (
    count_tokens,
    plan_rows,
    score_items,
    score_planned,
    unsupported_reason,
)
from tune_prune.evaluation.engine.rows import RequestScores
from tune_prune.models.families import FAMILIES, decoder_layers
from tune_prune.models.runner.hidden_states import KeptStates
from tune_prune.models.runner.out_of_memory import OutOfMemory

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
    monkeypatch.setattr(f"{module}._SOFTMAX_ELEMENTS", {"cpu": 7 * model.config.vocab_size})
    expected = score_items(model, items())
    empty, residency = in_way(model, "spilled")
    assert_same_bits(score_items(empty, items(), residency=residency), expected)


def test_every_layer_is_read_once_per_block_and_nothing_stays(tiny):
    model = tiny("llama", max_position_embeddings=LONGEST)
    empty, residency = in_way(model, "streamed")
    assert residency.weights is not None
    rows = plan_rows(items())
    assert rows.plain and rows.trees
    for block_tokens, blocks in ((None, 1), (1, len(rows.plain) + len(rows.trees))):
        weights, done = Counted(residency.weights), []
        held = replace(residency, weights=weights, block_tokens=block_tokens)
        score_planned(empty, rows, batch_tokens=1, advance=done.append, residency=held)
        asked = [name for name in weights.asked if name.startswith("model.layers.")]
        assert sorted(asked) == sorted(blocks * [name for name in weights if name in asked])
        assert len(set(asked)) == 4 * 9  # parameters of a layer
        assert len(done) == blocks and sum(done) == count_tokens(items())
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert empty.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("most", [3, 1, 0])
def test_batches_that_do_not_fit_are_halved(tiny, caplog, most):
    model = tiny("llama")
    expected = score_items(model, assorted_items()).loglikelihoods
    empty, residency = in_way(model, "streamed")
    tried: list[int] = []

    def refuse(_, args):
        tried.append(len(args[0]))
        if tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    decoder_layers(empty, FAMILIES["llama"])[2].register_forward_pre_hook(refuse)  # the copies of the layer have it
    with caplog.at_level(logging.WARNING):
        if most:
            found = score_items(empty, assorted_items(), residency=residency).loglikelihoods
            np.testing.assert_allclose(found, expected, atol=1e-10)
        else:
            with pytest.raises(OutOfMemory):
                score_items(empty, assorted_items(), residency=residency)
    failed = [rows for rows in tried if rows > most]
    assert failed == sorted(failed, reverse=True) and failed[-1] == {3: 4, 1: 2, 0: 1}[most]
    assert "out of memory in zero-shot (streamed)" in caplog.text


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
