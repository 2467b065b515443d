"""Calibration text and the windows cut from it.

A sample is a window of exactly seq_len real tokens: no padding, no overlap with another sample, in an order fixed by the
seed, so that the first n samples are the same whatever n is asked for. Never the text that perplexity is reported on.

Where a model wants a BOS token in front of every text, a sample is that token and seq_len - 1 of the text.

A mixture of k texts (`wikitext2+c4`) is interleaved in equal parts: sample i comes from text i mod k, each text's own in the
order that they have alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tune_prune import embedded
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.files import utf8_text
from tune_prune.core.hashing import digest, seed_for
from tune_prune.core.kinds import KNOWN_TEXTS, texts_of
from tune_prune.models import hub

if TYPE_CHECKING:
    import torch  # not above: names are checked before it is imported
    from transformers import PreTrainedTokenizerBase

HUB_TEXTS = {"wikitext2": "Salesforce/wikitext", "c4": "allenai/c4"}  # name -> repository
C4_DOCUMENTS = 4000  # first documents of C4's train split: about 2M tokens, enough for 512 windows of 2048


def resolve(name: str | None, data_dir: str | None, model_is_embedded: bool) -> str:
    """Return the source that a `--calibration` value means: "embedded", "wikitext2", "c4", a text file or a mixture of them.

    A file is an absolute path; a name with a plus sign that is a file is that file. Without a value: the embedded text for
    embedded models, else the training (or validation) text of `data_dir`/text, else WikiText-2 train from the hub.
    """
    if name is None:
        if model_is_embedded:
            return "embedded"
        if data_dir is None:
            return "wikitext2"
        folder = Path(data_dir) / "text"
        for kind in ("train", "valid"):
            files = sorted(path for path in folder.glob(f"*{kind}*.txt") if path.is_file())
            if files:
                return str(files[0].resolve())
        raise UserError(
            f"no calibration text in {folder} (a *train*.txt or *valid*.txt file); put one there or name a text file: "
            "--calibration FILE"
        )
    parts = [name] if _path(name).is_file() else [part.strip() for part in name.split("+")]
    sources = [_resolve_one(part) for part in parts]
    mixture = "+".join(sources)
    if texts_of(mixture) != sources or len(set(sources)) < len(sources):
        raise UserError(
            f"calibration text {mixture} is no mixture; name each text once, and rename a path that has a plus sign"
        )
    return mixture


def _resolve_one(name: str) -> str:
    if name in KNOWN_TEXTS:
        return name
    path = _path(name)
    if path.is_file():
        return str(path.resolve())
    raise UserError(
        f"calibration text {name!r} is neither a file nor a known source; {did_you_mean(name, KNOWN_TEXTS)}"
    )


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # that of Path fails for a user that there is not


def load_text(source: str) -> str:
    """Read the text of a resolved source that is no mixture. Raises UserError where it is not available."""
    if source == "embedded":
        return embedded.calibration_text()
    if source not in HUB_TEXTS:
        try:
            content = Path(source).read_bytes()
        except (OSError, ValueError) as error:  # a name with a zero byte
            raise UserError(f"calibration text {source} cannot be read ({error}); give a UTF-8 text file") from error
        text = utf8_text(content, f"calibration text {source}")
        if not text.strip():
            raise UserError(f"calibration text {source} is empty; give a text file with enough tokens for the search")
        return text
    repo = HUB_TEXTS[source]
    commit = hub.dataset_commit(repo)
    import datasets  # only here: half a second, and not needed for local texts

    try:
        if source == "wikitext2":
            return "\n\n".join(datasets.load_dataset(repo, "wikitext-2-raw-v1", split="train", revision=commit)["text"])
        stream = datasets.load_dataset(repo, "en", split="train", streaming=True, revision=commit)
        return "\n\n".join(row["text"] for row in stream.take(C4_DOCUMENTS))
    except Exception as error:  # datasets, huggingface_hub and the network libraries each raise their own kinds
        raise UserError(
            f"calibration text {source!r} could not be downloaded from the Hugging Face hub ({type(error).__name__}); check the "
            "network, or give a text file: --calibration FILE"
        ) from error


def calibration_fingerprint(source: str) -> str:
    """Return a hash of what the calibration text is: its content or, from the hub, its name and commit.

    A text is read for it once per process, unless its file changes. A mixture's comes from those of its texts, in their order.
    """
    if len(parts := texts_of(source)) > 1:
        return digest({"mixture": [calibration_fingerprint(part) for part in parts]})
    if source in HUB_TEXTS:
        return hub.dataset_identity(f"hub:{source}", HUB_TEXTS[source])
    path = Path(source)
    state = path.stat() if path.is_file() else None  # "embedded" is no path
    return _digest(source, None if state is None else (state.st_size, state.st_mtime_ns, state.st_ino))


@lru_cache(maxsize=8)
def _digest(source: str, file_state: tuple[int, int, int] | None) -> str:
    return hashlib.sha256(load_text(source).encode()).hexdigest()[:16]


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Return all tokens of a text, LongTensor [N], without special tokens."""
    import torch

    ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def tokens_of(tokenizer: PreTrainedTokenizerBase, source: str) -> tuple[torch.Tensor, ...]:
    """Return the tokens of each text of a resolved source. Raises UserError."""
    return tuple(tokenize(tokenizer, load_text(part)) for part in texts_of(source))


def check_token_ids(label: str, largest: int, vocab_size: int, where: str = "") -> None:
    """Raise UserError where the `largest` token id of a text is none that the model `label` knows; `where`: in which, in words."""
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer of {label} gives the token id {largest}{where}, but vocab_size in its config.json is {vocab_size}; use "
            "the model's own tokenizer files"
        )


def bos_of(tokenizer: PreTrainedTokenizerBase, wanted: bool, label: str) -> int | None:
    """Return the id of the BOS token where it is `wanted` in front of every text, else None. Raises UserError where the tokenizer
    of the model `label` has none."""
    if wanted and tokenizer.bos_token_id is None:
        raise UserError(
            f"a text for {label} has to begin with a BOS token, and its tokenizer has none; name it in its tokenizer_config.json "
            "(bos_token)"
        )
    return tokenizer.bos_token_id if wanted else None


def begun(rows: torch.Tensor, bos: int | None) -> torch.Tensor:
    """Return LongTensor [n, T + 1], `rows` [n, T] with the token `bos` in front of each; None: `rows` as they are."""
    import torch

    return rows if bos is None else torch.cat([rows.new_full((len(rows), 1), bos), rows], dim=1)


def text_tokens(length: int, bos: int | None) -> int:
    """Return how many tokens of text a window of `length` has."""
    return length if bos is None else length - 1


def samples(texts: Sequence[torch.Tensor], seq_len: int, count: int, seed: int, bos: int | None = None) -> torch.Tensor:
    """Return the first `count` calibration samples, LongTensor [count, seq_len]; sample i is one of text i mod k. `bos`: the token
    that each begins with.

    Raises UserError where a text is too short.
    """
    rows = texts[0].new_empty(count, seq_len)
    for index, tokens in enumerate(texts):
        rows[index :: len(texts)] = windows(tokens, seq_len, len(range(index, count, len(texts))), seed, bos)
    return rows


def windows(tokens: torch.Tensor, seq_len: int, count: int, seed: int, bos: int | None = None) -> torch.Tensor:
    """Return the first `count` samples of one text, LongTensor [count, seq_len]: windows of `tokens` [N] in seeded order, each
    behind the token `bos` if there is one.

    Windows do not overlap. Raises UserError where the text is too short.
    """
    import torch

    length = text_tokens(seq_len, bos)
    slots = len(tokens) // length
    if slots < count:
        raise UserError(
            f"the calibration text has {len(tokens):,} tokens, enough for {slots} samples of {seq_len}; {count} were asked "
            "for: give a longer text (--calibration), fewer or shorter samples (num_samples, seq_len), or fewer refit_tokens"
        )
    generator = torch.Generator().manual_seed(seed_for(seed, f"calibration windows of {seq_len}"))
    order = torch.randperm(slots, generator=generator)[:count]
    return begun(tokens[: slots * length].view(slots, length)[order], bos)
