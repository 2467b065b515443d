"""Perplexity against a plain loop over windows, and where its text comes from."""

from __future__ import annotations

import math
import os
from pathlib import Path

import datasets
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2TokenizerFast, LlamaConfig, LlamaForCausalLM

from tests.residencies import FEW, WAYS, in_way
from tune_prune.core.errors import UserError
from tune_prune.data.perplexity_text import TEXT_FILE, WIKITEXT2, load_text, perplexity_fingerprint
from tune_prune.evaluation.perplexity import perplexity, windows_at_once
from tune_prune.models.head import NextTokenLosses

LIMIT = 32
DATA = Path(os.environ.get("TUNE_PRUNE_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LIMIT,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("window", "device", "windows"),
    [(2048, "cuda", 8), (32_768, "cuda", 1), (128, "cuda", 8), (2048, "cpu", 1), (32, "cpu", 8)],
)
def test_a_large_vocabulary_needs_no_smaller_batches_on_a_gpu(window, device, windows):
    config = LlamaConfig(vocab_size=152_064, hidden_size=3584)  # Qwen2.5-7B's
    assert windows_at_once(window, config, device) == windows


@pytest.mark.parametrize(
    ("num_tokens", "window"),
    [(96, 32), (100, 32), (97, 16), (20, 32), (96, 2048), (65, 7)],
    ids=["whole", "short-last", "one-token-last", "one-short", "above-the-limit", "odd"],
)
def test_equals_a_plain_loop(model, num_tokens, window):
    tokens = torch.randint(0, 50, (num_tokens,), generator=torch.Generator().manual_seed(1))
    total, count = 0.0, 0
    for start in range(0, num_tokens, min(window, LIMIT)):
        part = tokens[start : start + min(window, LIMIT)]
        if len(part) > 1:
            logits = model(part[None]).logits[0, :-1]
            total += cross_entropy(logits, part[1:], reduction="sum").item()
            count += len(part) - 1
    for batch_size in (None, 1, 3):
        result = perplexity(model, tokens, window, batch_size)
        assert result.num_tokens == count
        assert result.mean_loss == pytest.approx(total / count, abs=1e-6)
        assert result.ppl == pytest.approx(math.exp(total / count), rel=1e-5)


@pytest.mark.parametrize(
    ("tokens", "window", "says"), [([3], 16, "has 1 tokens"), ([3, 4, 5], 1, "perplexity_window is 1")]
)
def test_too_little_is_refused(model, tokens, window, says):
    with pytest.raises(UserError, match=says):
        perplexity(model, torch.tensor(tokens), window)


@pytest.mark.parametrize(("variant", "dtype"), FEW)
@pytest.mark.parametrize("way", WAYS)
def test_it_has_the_bits_of_the_whole_model_in_every_way_to_hold_it(tiny, variant, way, dtype):
    whole, total = NextTokenLosses(tiny(variant, dtype)), 0.0
    tokens = torch.randint(0, 64, (81,), generator=torch.Generator().manual_seed(3))
    for batch in [*tokens[:75].view(5, 15).split(2), tokens[75:][None]]:
        total += whole(batch).double().sum().item()
    held, residency = in_way(tiny(variant, dtype), way)
    assert perplexity(held, tokens, 15, 2, residency).mean_loss == total / (5 * 14 + 5)


def test_file_and_hub_give_the_same_text(tmp_path, monkeypatch):
    lines = [" \n", " = Title = \n", " \n", " Text of two words . \n"]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "wikitext2-raw.test.txt").write_text("".join(lines), encoding="utf-8")
    with_mark = tmp_path / "marked" / "text" / "wikitext2-raw.test.txt"
    with_mark.parent.mkdir(parents=True)
    with_mark.write_text("".join(lines), encoding="utf-8-sig")
    rows = ["", " = Title = \n", "", " Text of two words . \n"]  # what the hub's rows of these lines are
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"text": rows})
    from_file = load_text(str(tmp_path), embedded=False)
    assert from_file == load_text(str(tmp_path / "marked"), embedded=False)  # a byte order mark is no text
    assert from_file == load_text(None, embedded=False) == "\n\n = Title = \n\n\n\n\n Text of two words . \n"


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no real text at {DATA} (set TUNE_PRUNE_DATA)")
def test_wikitext2_is_the_text_that_others_measure():
    tokenizer = GPT2TokenizerFast.from_pretrained(DATA / "models" / "gpt2-tokenizer")
    # The number of tokens in transformers' documentation of GPT-2's perplexity on WikiText-2.
    assert len(tokenizer(load_text(str(DATA), embedded=False), verbose=False).input_ids) == 287644
    assert perplexity_fingerprint(str(DATA), embedded=False) == WIKITEXT2[0]


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no real text at {DATA} (set TUNE_PRUNE_DATA)")
def test_wikitext2_is_recognised_whatever_blanks_stand_at_its_end(tmp_path):
    published = (DATA / TEXT_FILE).read_bytes()
    end = published.rstrip()
    (tmp_path / "text").mkdir()
    found = []
    for content in (published, published + b"\n", end + b" \n", end + b"\n", end, end.lstrip()):
        (tmp_path / TEXT_FILE).write_bytes(content)
        found.append(perplexity_fingerprint(str(tmp_path), embedded=False))
    assert tuple(found) == WIKITEXT2
    (tmp_path / TEXT_FILE).write_bytes(published[:-100])
    assert perplexity_fingerprint(str(tmp_path), embedded=False) not in WIKITEXT2


def test_a_text_that_cannot_be_had_is_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"wikitext2-raw\.test\.txt is missing"):
        load_text(str(tmp_path), embedded=False)

    def offline(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"hub \(ConnectionError\).*--data-dir"):
        load_text(None, embedded=False)
