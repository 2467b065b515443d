"""Tokenizers in GGUF files: what is written, whether scores merge as merges do, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from tests.gguf_reading import File, LlamaCpp, pruned
from tune_prune import embedded
from tune_prune.checkpoint.gguf import gguf_vocab
from tune_prune.checkpoint.gguf.gguf_file import write_gguf
from tune_prune.checkpoint.gguf.gguf_vocab import read_vocabulary
from tune_prune.core.errors import UserError
from tune_prune.models.families import FAMILIES
from tune_prune.pruning.surgery import Sketch

BYTE_MERGES = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġt", "h"), ("2", "0")]


def byte_level(
    pre: pre_tokenizers.PreTokenizer,
    ignore_merges: bool = False,
    merges: Sequence[tuple[str, str]] = BYTE_MERGES,
    more: Sequence[str] = (),
) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*alphabet, *(left + right for left, right in merges), *more, "<|end|>"]
    tokenizer = Tokenizer(BPE({text: i for i, text in enumerate(texts)}, list(merges), ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def sentence_pieces(merges: Sequence[tuple[str, str]], more: Sequence[str] = ()) -> Tokenizer:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehimnst", *more]
    texts += dict.fromkeys(left + right for left, right in merges)
    vocabulary = {text: i for i, text in enumerate(texts)}
    tokenizer = Tokenizer(BPE(vocabulary, list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    frame = {"single": "<s> $A", "pair": "<s> $A $B", "special_tokens": [("<s>", 1)]}
    tokenizer.post_processor = processors.TemplateProcessing(**frame)
    return tokenizer


def split(regex: str) -> pre_tokenizers.PreTokenizer:
    parts = [pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


PRE: dict[str, tuple[pre_tokenizers.PreTokenizer, bool]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False),
    "llama-bpe": (split(gguf_vocab.LLAMA3_SPLIT), True),
    "smaug-bpe": (split(gguf_vocab.LLAMA3_SPLIT), False),
    "qwen2": (split(gguf_vocab.QWEN2_SPLIT), False),
    "tekken": (split(gguf_vocab.TEKKEN_SPLIT), True),
    "smollm": (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        False,
    ),
}


TEXTS = (
    "the theme of 2020, 120 20 2s 020",
    "It's THE'S 'the the'll  there\n\n the\r\n\tthe ",
    "McDonald's naïve the—the 中文 the٣٢٠ x²0",
    "a'the x-the ends",
    "ends",
    "  the   20\n  20  the\u00a0the\u3000the 🙂the <tool> the",
)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def run(tokenizer: Tokenizer, **special: Any) -> Path:
        folder = tmp_path / "tokenizer"
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        return folder

    return run


def test_every_known_split_is_tested():
    assert set(PRE) == set(gguf_vocab.PRE_TOKENIZERS.values())
    assert len(PRE) == len(gguf_vocab.PRE_TOKENIZERS)


def test_the_splits_are_those_of_the_families(tmp_path: Path):
    """Qwen2's as transformers builds it, and all as their regular expressions cut a text."""
    Qwen2Tokenizer(vocab={"a": 0, "<|endoftext|>": 1}, merges=[]).save_pretrained(tmp_path)
    assert read_vocabulary(tmp_path, 2).pre == "qwen2"
    cut = {
        name: [piece for piece, _ in pre.pre_tokenize_str("It's 2024 McDonald\n x")] for name, (pre, _) in PRE.items()
    }
    assert cut["gpt-2"] == ["It", "'s", "Ġ2024", "ĠMcDonald", "Ċ", "Ġx"]
    assert cut["llama-bpe"] == ["It", "'s", "Ġ", "202", "4", "ĠMcDonald", "Ċ", "Ġx"]
    assert cut["qwen2"] == ["It", "'s", "Ġ", "2", "0", "2", "4", "ĠMcDonald", "Ċ", "Ġx"]
    assert cut["tekken"] == ["It", "'s", "Ġ", "2", "0", "2", "4", "ĠMc", "Donald", "Ċ", "Ġx"]
    assert cut["smollm"] == ["It", "'s", "Ġ", "2", "0", "2", "4", "ĠMcDonald", "Ċ", "Ġx"]


@pytest.mark.parametrize("name", ["llama-bpe"])
def test_byte_level_vocabulary_in_the_file(name: str, saved: Callable[..., Path], tmp_path: Path):
    pre, ignore_merges = PRE[name]
    folder = saved(byte_level(pre, ignore_merges), eos_token="<|end|>", chat_template="{{ messages }}")
    path = tmp_path / "model.gguf"
    notes = write_gguf(Sketch.of(pruned("llama", vocab_size=270)), FAMILIES["llama"], folder, path, torch.float16)
    meta = File(path).meta
    assert not [note for note in notes if "tokenizer" in note]
    assert (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) == ("gpt2", name)
    assert meta["tokenizer.ggml.merges"] == ["t h", "th e", "Ġ t", "Ġt h", "2 0"]
    tokens = meta["tokenizer.ggml.tokens"]
    own = ["th", "the", "Ġt", "Ġth", "20", "<|end|>", "<tool>"]
    assert tokens[256:] == own + [f"[PAD{i}]" for i in range(263, 270)]
    kinds = [gguf.TokenType(kind).name for kind in meta["tokenizer.ggml.token_type"]]
    assert kinds == ["NORMAL"] * 261 + ["CONTROL", "USER_DEFINED"] + ["UNUSED"] * 7
    assert meta["tokenizer.ggml.eos_token_id"] == 261 and "tokenizer.ggml.bos_token_id" not in meta
    assert not meta["tokenizer.ggml.add_bos_token"] and not meta["tokenizer.ggml.add_eos_token"]
    assert meta["tokenizer.chat_template"] == "{{ messages }}"
    assert "tokenizer.ggml.scores" not in meta


@pytest.mark.parametrize("name", PRE)
def test_llama_cpp_cuts_texts_as_the_tokenizer(name: str, saved: Callable[..., Path], tmp_path: Path):
    """No two kinds of tokenizer cut the texts alike, so the texts tell them apart."""
    merges, path = [*BYTE_MERGES, ("-", "the")], tmp_path / "model.gguf"
    kinds = {kind: byte_level(*PRE[kind], merges=merges, more=["ends"]) for kind in PRE}
    ids = {kind: [one.encode(text).ids for text in TEXTS] for kind, one in kinds.items()}
    assert len({repr(one) for one in ids.values()}) == len(PRE)
    folder = saved(kinds[name], eos_token="<|end|>")
    write_gguf(Sketch.of(pruned("llama", vocab_size=272)), FAMILIES["llama"], folder, path, torch.float16)
    llama_cpp = LlamaCpp(path)
    assert [llama_cpp.tokens(text) for text in TEXTS] == ids[name]


MERGES = [
    ("t", "h"),
    ("▁", "th"),
    ("▁t", "h"),
    ("▁", "t"),
    ("a", "n"),
    ("an", "d"),
    ("n", "d"),
    ("a", "nd"),
    ("th", "e"),
]
# as sentencepiece gives them: all ways to one token stand together
GROUPED = [
    ("t", "h"),
    ("▁", "t"),
    ("▁", "th"),
    ("▁t", "h"),
    ("n", "d"),
    ("a", "n"),
    ("an", "d"),
    ("a", "nd"),
    ("th", "e"),
]
GROUPED += [("▁th", "e"), ("▁", "the"), ("i", "s"), ("a", "t")]


def test_scores_merge_as_the_merges_do(saved: Callable[..., Path], tmp_path: Path):
    tokenizer = sentence_pieces(GROUPED)
    folder = saved(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    vocabulary = read_vocabulary(folder, 300)
    assert (vocabulary.model, vocabulary.add_bos, vocabulary.add_space_prefix) == ("llama", True, True)
    path = tmp_path / "model.gguf"
    write_gguf(Sketch.of(pruned("llama", vocab_size=300)), FAMILIES["llama"], folder, path, torch.float16)
    llama_cpp = LlamaCpp(path)
    for text in ("the theme and ends", "that isn't athe  hand", "naïve ths", "ath atat"):
        assert llama_cpp.tokens(text) == tokenizer.encode(text).ids, text
    meta = File(path).meta
    assert meta["tokenizer.ggml.model"] == "llama" and meta["tokenizer.ggml.add_bos_token"]
    assert meta["tokenizer.ggml.scores"] == vocabulary.scores
    kinds = [gguf.TokenType(kind).name for kind in meta["tokenizer.ggml.token_type"]]
    assert kinds[:4] == ["UNKNOWN", "CONTROL", "CONTROL", "BYTE"] and kinds[258:260] == ["BYTE", "NORMAL"]
    assert [meta[f"tokenizer.ggml.{name}_token_id"] for name in ("unknown", "bos", "eos")] == [0, 1, 2]


def test_spaces_before_a_text(saved: Callable[..., Path]):
    special = {"bos_token": "<s>", "unk_token": "<unk>"}
    tokenizer = sentence_pieces(GROUPED)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    assert read_vocabulary(saved(tokenizer, **special), 300).add_space_prefix is False
    tokenizer.normalizer = None  # type: ignore[assignment]
    for scheme, prefix in (("first", True), ("always", True), ("never", False)):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        assert read_vocabulary(saved(tokenizer, **special), 300).add_space_prefix is prefix


def refused_tokenizers() -> dict[str, tuple[Tokenizer, str]]:
    gpt2 = PRE["gpt-2"][0]
    prefix = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))
    lowercase, framed, metaspace = byte_level(gpt2), byte_level(gpt2), sentence_pieces(GROUPED)
    lowercase.normalizer = normalizers.Lowercase()
    framed.post_processor = processors.TemplateProcessing(single="$A <tool>", special_tokens=[("<tool>", 262)])
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [
        pre_tokenizers.Split(Regex(gguf_vocab.QWEN2_SPLIT), "removed"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    dropping = pre_tokenizers.Sequence(parts)
    missing = Tokenizer(BPE({"<unk>": 0, "<0x00>": 1, "a": 2}, [], unk_token="<unk>", byte_fallback=True))
    missing.normalizer = normalizers.Replace(" ", "▁")
    left_out = sentence_pieces([("t", "h"), ("th", "e")], more=["he"])
    return {
        "another split": (
            byte_level(split(r"\p{L}+|\p{N}")),
            r"pre-tokenizer is .*Split.*none of those known here \(gpt-2",
        ),
        "a split that drops": (byte_level(dropping), r"pre-tokenizer is .*Removed.*none of those known here"),
        "known split, other merging": (
            byte_level(gpt2, ignore_merges=True),
            r"with ignore_merges True, none of those known",
        ),
        "a space in front": (prefix, r"pre-tokenizer is .*\"add_prefix_space\": true"),
        "a normalizer": (lowercase, "its normalizer is Lowercase"),
        "another frame": (framed, r"frames a text as \['a', '<tool>'\]; llama.cpp can add bos_token"),
        "words apart": (metaspace, r"its pre-tokenizer .*Metaspace.*it knows spaces as ▁ only"),
        "no bytes": (missing, r"no token for 255 of the 256 bytes \(<0x01> first\)"),
        "merges apart": (sentence_pieces(MERGES), r"its merges of 'and' are not consecutive \(ranks 5 and 7\)"),
        "a pair left out": (left_out, "it never merges 'h' and 'e', though 'he' is a token"),
    }


@pytest.mark.parametrize("what", refused_tokenizers())
def test_tokenizers_that_split_otherwise_are_refused(what: str, saved: Callable[..., Path]):
    tokenizer, message = refused_tokenizers()[what]
    special = {"bos_token": "<s>"} if tokenizer.token_to_id("<s>") is not None else {}
    with pytest.raises(UserError, match=message):
        read_vocabulary(saved(tokenizer, **special), 300)


def test_more_tokens_than_rows_are_refused(saved: Callable[..., Path]):
    folder = saved(byte_level(PRE["gpt-2"][0]))
    assert len(read_vocabulary(folder, 263).tokens) == 263
    with pytest.raises(UserError, match="has 263 tokens, the model's embedding 262 rows"):
        read_vocabulary(folder, 262)


def test_embedded_models_go_without_a_tokenizer():
    folder = Path(embedded.__file__).parent / "models" / "tiny-llama"
    rows = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    vocabulary = read_vocabulary(folder, rows)
    assert vocabulary.model == "none" and "takes and gives token ids, not text" in vocabulary.notes[0]
