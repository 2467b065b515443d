"""A tokenizer as llama.cpp reads it from a GGUF file; an error where llama.cpp would split text otherwise.

    tokenizer.json                                 tokenizer.ggml.model   how it is stated
    BPE over bytes                                 gpt2                   merges, and the name of a known split (PRE_TOKENIZERS)
    BPE with byte fallback, spaces as U+2581       llama                  a score for each token: minus the rank of its merge
    anything else                                  none                   not at all: such a file takes token ids only

The tokenizer is read as transformers loads it, so what is written is what the model was measured with; but the split of a
byte-level one as tokenizer.json states it, of which transformers 5 may leave a part out (digits of SmolLM2). llama.cpp knows such
splits by name only; one that is not in the table is refused, never guessed.

Source: llama.cpp, src/llama-vocab.cpp. Its `llama` tokenizer puts a space before every stretch of text between special
tokens, also where a Metaspace pre-tokenizer does so at the start only or not before a space.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tune_prune.checkpoint.manifest import IDS_ALONE
from tune_prune.core.errors import UserError
from tune_prune.models.catalog import ModelSource
from tune_prune.models.loading import load_tokenizer

SPACE = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
QWEN2_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BYTES, _GPT2_BYTES = ("bytes", False), ("bytes", True)
_Split = tuple[tuple[Any, ...], ...]
# (pre-tokenizer, words that are tokens are not merged) -> tokenizer.ggml.pre
PRE_TOKENIZERS: dict[tuple[_Split, bool], str] = {
    ((_GPT2_BYTES,), False): "gpt-2",
    ((("split", LLAMA3_SPLIT), _BYTES), True): "llama-bpe",
    ((("split", LLAMA3_SPLIT), _BYTES), False): "smaug-bpe",
    ((("split", QWEN2_SPLIT), _BYTES), False): "qwen2",
    ((("split", TEKKEN_SPLIT), _BYTES), True): "tekken",
    ((("digits",), _GPT2_BYTES), False): "smollm",
}


@dataclass(frozen=True)
class Vocabulary:
    """tokenizer.ggml.*: per-token lists have one entry per row of the embedding, and are empty for model "none"."""

    model: str  # gpt2, llama or none
    pre: str = "default"
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)  # gguf.TokenType
    scores: list[float] = field(default_factory=list)  # llama only
    merges: list[str] = field(default_factory=list)  # gpt2 only: "left right", best first
    special: dict[str, int] = field(default_factory=dict)  # bos, eos, unk, pad -> token id
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool | None = None  # llama only
    chat_template: str | list[dict[str, str]] | None = None
    notes: tuple[str, ...] = ()

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        if self.model == "none":
            return
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_scores(self.scores)
        writer.add_token_merges(self.merges)
        for name, index in self.special.items():
            getattr(writer, f"add_{name}_token_id")(index)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.add_space_prefix is not None:
            writer.add_add_space_prefix(self.add_space_prefix)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(folder: Path, rows: int) -> Vocabulary:
    """Return the vocabulary of the tokenizer in `folder` for an embedding of so many rows. Raises UserError where llama.cpp would
    split text otherwise, or where it has more tokens than rows."""
    tokenizer = load_tokenizer(ModelSource(folder.name, str(folder), "folder"))
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer of {folder} has {len(tokenizer)} tokens, the model's embedding {rows} rows; save it with --format hf"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {"model": {"type": "slow"}}
    kind = state["model"]["type"]
    if kind != "BPE":
        return Vocabulary(
            "none",
            notes=(f"llama.cpp has no {kind} tokenizer, so the GGUF file has none: {IDS_ALONE}",),
        )
    model = state["model"]
    if model["dropout"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        raise _unsupported(folder, "its BPE has dropout, a subword prefix or a word suffix")
    common = _common(tokenizer, state, rows)
    if model["byte_fallback"]:
        return Vocabulary(
            "llama",
            **common,
            scores=_scores(folder, model, common["tokens"]),
            add_space_prefix=_prefixes_space(folder, state),
        )
    ranked = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    stated = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")).backend_tokenizer.to_str()
    pre, notes = _pre_tokenizer(folder, json.loads(stated))
    return Vocabulary("gpt2", pre, **common, merges=ranked, notes=notes)


def _unsupported(folder: Path, reason: str) -> UserError:
    return UserError(
        f"llama.cpp would not split text as the tokenizer of {folder} does: {reason}; save the model with --format hf"
    )


def _common(tokenizer: PreTrainedTokenizerBase, state: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the fields that both kinds of vocabulary have."""
    added = {token["id"]: token for token in state["added_tokens"]}
    tokens = {index: text for text, index in state["model"]["vocab"].items()}
    tokens |= {index: token["content"] for index, token in added.items()}
    unknown = state["model"]["unk_token"]
    types = []
    for index in range(rows):
        kind = gguf.TokenType.NORMAL
        if index not in tokens:
            kind = gguf.TokenType.UNUSED
        elif tokens[index] == unknown:
            kind = gguf.TokenType.UNKNOWN
        elif index in added:
            kind = gguf.TokenType.CONTROL if added[index]["special"] else gguf.TokenType.USER_DEFINED
        elif state["model"]["byte_fallback"] and re.fullmatch("<0x[0-9A-F]{2}>", tokens[index]):
            kind = gguf.TokenType.BYTE
        types.append(int(kind))
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    add_bos, add_eos = _added_by_default(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    return {
        "tokens": [tokens.get(index, f"[PAD{index}]") for index in range(rows)],
        "types": types,
        "special": {name: index for name, index in special.items() if index is not None},
        "add_bos": add_bos,
        "add_eos": add_eos,
        "chat_template": template,
    }


def _added_by_default(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Return whether texts get a first and a last token. Raises UserError for other frames than these two."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    for add_bos in (False, True):
        for add_eos in (False, True):
            if framed == [tokenizer.bos_token_id] * add_bos + bare + [tokenizer.eos_token_id] * add_eos:
                return add_bos, add_eos
    raise UserError(
        f"the tokenizer frames a text as {tokenizer.convert_ids_to_tokens(framed)}; llama.cpp can add bos_token "
        f"({tokenizer.bos_token}) and eos_token ({tokenizer.eos_token}) only: save the model with --format hf"
    )


def _pre_tokenizer(folder: Path, state: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return tokenizer.ggml.pre of a byte-level tokenizer, and what it leaves out."""
    given = state["pre_tokenizer"] or {"type": "no pre-tokenizer"}
    parts = given["pretokenizers"] if given["type"] == "Sequence" else [given]
    split: list[tuple[Any, ...]] = []
    for part in parts:
        if part["type"] == "ByteLevel" and not part["add_prefix_space"]:
            split.append(("bytes", part["use_regex"]))
        elif part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            split.append(("split", part["pattern"].get("Regex")))
        elif part["type"] == "Digits" and part["individual_digits"]:
            split.append(("digits",))
        else:
            split.append(("unknown", json.dumps(part, ensure_ascii=False)))
    pre = PRE_TOKENIZERS.get((tuple(split), state["model"]["ignore_merges"]))
    if pre is None:
        raise _unsupported(
            folder,
            f"its pre-tokenizer is {json.dumps(given, ensure_ascii=False)} with ignore_merges "
            f"{state['model']['ignore_merges']}, none of those known here ({', '.join(PRE_TOKENIZERS.values())})",
        )
    normalizer = (state["normalizer"] or {"type": None})["type"]
    if normalizer not in (None, "NFC"):
        raise _unsupported(folder, f"its normalizer is {normalizer}, and llama.cpp has none before byte-level BPE")
    nfc = ("llama.cpp does not bring text into Unicode's NFC form, as the tokenizer does: give it text in that form",)
    return pre, nfc if normalizer else ()


def _prefixes_space(folder: Path, state: dict[str, Any]) -> bool:
    """Return whether a space is put before a text, of a tokenizer with spaces as U+2581."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    normalizer, pre = state["normalizer"], state["pre_tokenizer"]
    if normalizer == replace and pre and pre["type"] == "Split" and pre["pattern"] == {"String": " "}:
        pre = None  # of Gemma: no space is left to split at
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if pre is None and steps in ([replace], [prepend, replace]):
        return len(steps) == 2
    if (
        not steps
        and pre is not None
        and pre["type"] == "Metaspace"
        and pre["replacement"] == SPACE
        and not pre["split"]
    ):
        return pre["prepend_scheme"] != "never"
    raise _unsupported(
        folder,
        f"its normalizer is {json.dumps(normalizer, ensure_ascii=False)} and its pre-tokenizer "
        f"{json.dumps(pre, ensure_ascii=False)}; with byte fallback it knows spaces as {SPACE} only",
    )


def _scores(folder: Path, model: dict[str, Any], tokens: list[str]) -> list[float]:
    """Return a score for each token, so that merging the neighbours whose union has the best score follows the merges: minus the
    rank of the token's first merge. Raises UserError where no scores can do that, or bytes have no tokens."""
    vocabulary = model["vocab"]
    missing = [token for token in (f"<0x{byte:02X}>" for byte in range(256)) if token not in vocabulary]
    if missing:
        raise _unsupported(folder, f"it has no token for {len(missing)} of the 256 bytes ({missing[0]} first)")
    pairs = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    rank: dict[str, int] = {}
    for index, (left, right) in enumerate(pairs):
        first = rank.setdefault(left + right, index)
        if first != index and pairs[index - 1][0] + pairs[index - 1][1] != left + right:
            raise _unsupported(
                folder, f"its merges of {left + right!r} are not consecutive (ranks {first} and {index})"
            )
    listed = set(pairs)
    for token in vocabulary:
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair not in listed and pair[0] in vocabulary and pair[1] in vocabulary:
                raise _unsupported(folder, f"it never merges {pair[0]!r} and {pair[1]!r}, though {token!r} is a token")
    return [-float(rank.get(token, len(pairs))) for token in tokens]
