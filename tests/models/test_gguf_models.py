"""GGUF files as models to prune: what is read is what was written, and what transformers reads; what would be another model is
refused; the folder in the cache is whole, and made once."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import tune_prune
from tests.checkpoint.test_gguf_vocab import sentence_pieces
from tests.conftest import build_tiny
from tests.models.conftest import SIZES, saved, tokenizer
from tests.search_folders import data_folder
from tune_prune.checkpoint.gguf.gguf_vocab import QWEN2_SPLIT
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Experiment
from tune_prune.core.store import EXPERIMENT, FolderStore
from tune_prune.models import catalog, loading
from tune_prune.models.gguf import convert, files
from tune_prune.tuning import experiment
from tune_prune.tuning.plan import SearchSettings
from tune_prune.tuning.preflight import make_plan

pytestmark = pytest.mark.usefixtures("cache")
TEXT = "The 2024 thing, it's\n naïve  東京 <|endoftext|> the"
F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


def load(file: Path | str) -> loading.LoadedModel:
    return loading.load_model(catalog.resolve(str(file)), torch.float32, "cpu")


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_what_is_read_is_what_was_written_and_what_transformers_reads(variant: str, words: Path, tmp_path: Path):
    model = build_tiny(variant, torch.float32, **SIZES)
    if "qwen" in variant:
        parts = [pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        words = tokenizer(tmp_path / "words", pre_tokenizers.Sequence(parts))
    file = saved(model, words, tmp_path / "model.gguf")
    read = load(file)
    assert same_weights(read.model, model)
    if variant != "qwen3":  # of which transformers takes heads to have 128 dimensions, whatever the file says
        assert same_weights(
            AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32), model
        )
    ids = torch.arange(20)[None]
    torch.testing.assert_close(read.model(ids).logits, model(ids).logits)
    transformers_s = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    written = PreTrainedTokenizerFast.from_pretrained(words)
    assert read.tokenizer(TEXT)["input_ids"] == transformers_s(TEXT)["input_ids"] == written(TEXT)["input_ids"]
    assert read.tokenizer.eos_token == "<|endoftext|>"
    again = AutoTokenizer.from_pretrained(read.source.location)
    assert again(TEXT)["input_ids"] == read.tokenizer(TEXT)["input_ids"]


@pytest.fixture
def gemma(cache: Path, tmp_path: Path) -> tuple[PreTrainedModel, Path, Path]:
    """A small Gemma 3 with both kinds of layers, a tokenizer as Gemma's (no space before a text), and the file of both."""
    pieces = sentence_pieces([("t", "h"), ("th", "e"), ("▁", "the")])
    pieces.normalizer, pieces.pre_tokenizer = (
        normalizers.Replace(" ", "▁"),
        pre_tokenizers.Split(" ", "merged_with_previous"),
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=pieces, **special).save_pretrained(tmp_path / "pieces")
    sizes = {
        "num_hidden_layers": 6,
        "head_dim": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 300,
    }
    kinds = {"layer_types": [*["sliding_attention"] * 5, "full_attention"], "query_pre_attn_scalar": 256}
    model = build_tiny("gemma3_text", torch.float32, tie_word_embeddings=True, **sizes, **kinds)
    return model, tmp_path / "pieces", saved(model, tmp_path / "pieces", tmp_path / "gemma.gguf")


def test_a_gemma_is_read_as_it_was_written_and_as_transformers_reads_it(gemma):
    """Files hold norms' weights + 1."""
    model, pieces, file = gemma
    read, plain = (
        load(file),
        AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32),
    )
    assert same_weights(read.model, plain) and read.model.config.layer_types == model.config.layer_types
    ids = torch.arange(40)[None]
    torch.testing.assert_close(read.model(ids).logits, model(ids).logits, atol=1e-4, rtol=0)
    text, written = "the mat the\nsea  the 2", PreTrainedTokenizerFast.from_pretrained(pieces)
    assert read.tokenizer(text)["input_ids"] == written(text)["input_ids"]
    assert read.tokenizer.bos_token_id == written.bos_token_id == read.tokenizer(text)["input_ids"][0]


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("tokenizer.ggml.add_space_prefix", True, "puts a space before a text .*, and transformers' never does"),
        ("gemma3.attention.key_length", 128, "its heads are of several sizes"),
        ("gemma3.final_logit_softcapping", 30.0, "sets gemma3.final_logit_softcapping to 30.0"),
    ],
)
def test_a_gemma_that_would_be_another_is_refused(gemma, tmp_path, setting, value, says):
    def change(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
        kind = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}[
            type(value)
        ]
        settings[setting] = value, kind, kind

    with pytest.raises(UserError, match=says):
        load(rewritten(gemma[2], tmp_path / "other.gguf", change))


def rewritten(file: Path, target: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """The file again after `change(settings, tensors)`: name -> (value, its type, type of an array's entries), and name ->
    (shape as numpy has it, type, bytes)."""
    reader = gguf.GGUFReader(file)
    settings = {
        name: (field.contents(), field.types[0], field.types[-1])
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    tensors = {t.name: (tuple(reversed(t.shape.tolist())), t.tensor_type, t.data.tobytes()) for t in reader.tensors}
    change(settings, tensors)
    writer = gguf.GGUFWriter(target, settings.pop("general.architecture")[0])
    for name, (value, kind, entry) in settings.items():
        writer.add_key_value(name, value, kind, entry if kind == gguf.GGUFValueType.ARRAY else None)
    for name, (shape, kind, content) in tensors.items():  # shapes are those of the numbers, whatever they are stored in
        writer.add_tensor_info(name, shape, np.dtype(np.float32), len(content), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, content in tensors.values():
        writer.write_tensor_data(np.frombuffer(content, np.uint8))
    writer.close()
    return target


def test_quantised_weights_are_the_scale_times_the_numbers(tiny_file: Path, tmp_path: Path):
    """Q8_0: blocks of 32 numbers of a row, a float16 scale and 32 bytes each; every row of this matrix is one block."""
    rows, hidden, head_dim = 32, 32, SIZES["head_dim"]
    blocks = [struct.pack("<e32b", 0.5 + row, *range(-16, 16)) for row in range(rows)]

    def quantise(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.1.attn_q.weight"] = ((rows, hidden), Q8_0, b"".join(blocks))
        settings["general.file_type"] = (int(gguf.LlamaFileType.MOSTLY_Q8_0), *settings["general.file_type"][1:])
        settings["general.license"] = ("apache-2.0", gguf.GGUFValueType.STRING, gguf.GGUFValueType.STRING)

    file = rewritten(tiny_file, tmp_path / "tiny.Q8_0.gguf", quantise)
    read = load(file)
    found = read.model.model.layers[1].self_attn.q_proj.weight
    for row in range(rows):  # neighbours in the file turn together; in transformers they lie half a head apart
        head, place = divmod(row, head_dim)
        here = head * head_dim + (place % 2) * (head_dim // 2) + place // 2
        assert found[here].tolist() == [(0.5 + row) * number for number in range(-16, 16)]
    assert read.source.gguf == files.GgufOrigin("tiny.Q8_0.gguf", "Q8_0", read.source.gguf.sha256)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert same_weights(read.model, plain)


def _head_again(
    kind: gguf.GGMLQuantizationType,
    noise: float = 0.0,
    embeddings: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_0,
) -> Callable[..., None]:
    """The embeddings stored again as the head, in another type and with that much noise, relative to them."""

    def change(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
        shape, _, content = tensors["token_embd.weight"]
        values = np.frombuffer(content, np.float32).reshape(shape)
        other = np.random.default_rng(0).standard_normal(shape) * values.std() * noise
        tensors["output.weight"] = (shape, kind, gguf.quantize((values + other).astype(np.float32), kind).tobytes())
        tensors["token_embd.weight"] = (shape, embeddings, gguf.quantize(values, embeddings).tobytes())

    return change


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "BF16"])
def test_a_head_that_is_the_embeddings_again_is_one_matrix(name: str, words: Path, tiny_file: Path, tmp_path: Path):
    """Parameters, numbers and checkpoints are those of the tied model; the matrix is the one of more bits."""
    tied = build_tiny("llama-tied", torch.float32, **SIZES)
    with torch.no_grad():
        tied.lm_head.weight[-1] *= 1e-9  # a token that no text has, whose row is rounded to nothing
    file = rewritten(
        saved(tied, words, tmp_path / "once.gguf"),
        tmp_path / "twice.gguf",
        _head_again(F32, 0.0, gguf.GGMLQuantizationType[name]),
    )
    read = load(file)
    assert read.geometry.total_params == sum(p.numel() for p in tied.parameters())
    assert read.model.config.tie_word_embeddings and same_weights(read.model, tied)
    said = f"its head (output.weight, F32) is its embeddings (token_embd.weight, {name}) again, so both are one matrix here"
    assert said in read.source.found_as and read.source.found_as.endswith("read from output.weight")
    once = load(tiny_file).source
    assert once.found_as == str(once.gguf)


@pytest.mark.parametrize(("kind", "noise"), [(F32, 0.4), (Q8_0, 0.3)], ids=str)
def test_a_head_of_its_own_stays_one(kind: gguf.GGMLQuantizationType, noise: float, tiny_file: Path, tmp_path: Path):
    file = rewritten(tiny_file, tmp_path / "own.gguf", _head_again(kind, noise))
    read = load(file)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert not read.model.config.tie_word_embeddings and same_weights(read.model, plain)
    assert "head" not in read.source.found_as


def test_a_file_is_its_content_and_is_read_once(tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fingerprint(path: Path) -> str:
        source = catalog.resolve(str(path))
        return loading.model_fingerprint(source, loading.load_config(source))

    first = catalog.resolve(str(tiny_file))
    assert (first.label, first.name, first.kind) == ("tiny.F32", str(tiny_file), "gguf")
    calls, slow = [], convert._convert
    monkeypatch.setattr(convert, "_convert", lambda *args: (calls.append(args), slow(*args)))
    together = [threading.Thread(target=loading.load_config, args=(first,)) for _ in range(3)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(content := tiny_file.read_bytes())
    assert fingerprint(copy) == fingerprint(tiny_file) and len(calls) == 1
    copy.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    assert fingerprint(copy) != fingerprint(tiny_file) and len(calls) == 2


def test_a_damaged_note_of_the_content_is_written_again(tiny_file: Path, cache: Path):
    expected = files.folder_of(tiny_file)
    (note,) = cache.glob("*.sha256")
    note.write_bytes(b"\xff" * 64)
    assert files.folder_of(tiny_file) == expected == cache / f"{note.read_text()}-{files.VERSION}"


def test_what_lies_beside_a_file_is_not_read(tiny_file: Path):
    """Its content alone names its folder in the cache."""
    expected = AutoTokenizer.from_pretrained(tiny_file.parent, gguf_file=tiny_file.name)(TEXT)["input_ids"]
    tokenizer(tiny_file.parent, pre_tokenizers.Metaspace())
    (tiny_file.parent / "config.json").write_text("{")
    assert load(tiny_file).tokenizer(TEXT)["input_ids"] == expected


def put(
    name: str, value: Any, kind: gguf.GGUFValueType, entries: gguf.GGUFValueType | None = None
) -> Callable[..., None]:
    return lambda settings, tensors: settings.update({name: (value, kind, entries or kind)})


def _drop(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
    del tensors["blk.2.ffn_up.weight"]


def _no_space_prefix(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
    """State a tokenizer without a space prefix as our own files do."""
    put("tokenizer.ggml.model", "llama", TEXT_TYPE)(settings, tensors)
    put("tokenizer.ggml.add_space_prefix", False, BOOL)(settings, tensors)


def _of_llama_3(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
    """State Llama 3's tokenizer as files of 2024 do."""
    put("tokenizer.ggml.pre", "llama-bpe", TEXT_TYPE)(settings, tensors)
    settings.pop("tokenizer.ggml.add_bos_token")


def _add(name: str, kind: gguf.GGMLQuantizationType = F32) -> Callable[..., None]:
    return lambda settings, tensors: tensors.update({name: ((32,), kind, bytes(128))})


U32, BOOL, ARRAY = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.BOOL, gguf.GGUFValueType.ARRAY
TEXT_TYPE = gguf.GGUFValueType.STRING
REFUSED: dict[str, tuple[Callable[..., None], str]] = {
    "family": (put("general.architecture", "mamba", TEXT_TYPE), r"architecture 'mamba' is none of .*llama, qwen2, qwen3"),
    "one of several": (put("split.count", 3, U32), r"one of 3 files .* llama-gguf-split --merge"),
    "scaled rope": (_add("rope_freqs.weight"), r"rotary frequencies are scaled"),
    "yarn": (put("llama.rope.scaling.type", "yarn", TEXT_TYPE), r"sets llama.rope.scaling.type to 'yarn'"),
    "experts": (put("llama.expert_count", 8, U32), r"sets llama.expert_count to 8, which transformers does not read"),
    "a list of heads": (put("llama.attention.head_count", [8] * 4, ARRAY, U32), r"to \[8, 8, 8, 8\], which is no whole number"),
    "a text of a number": (put("llama.rope.freq_base", "1e4", TEXT_TYPE), r"to '1e4', which is no floating-point number"),
    "two directions": (put("llama.attention.causal", False, BOOL), r"see those behind them \(llama.attention.causal\)"),
    "heads that do not fit": (put("llama.attention.head_count", 6, U32), r"its 6 heads do not divide the hidden size of 32,"),
    "part of a head turns": (put("llama.rope.dimension_count", 2, U32), r"heads are of several sizes"),
    "no tokenizer": (put("tokenizer.ggml.model", "none", TEXT_TYPE), r"no tokenizer that transformers reads"),
    "no space before texts": (_no_space_prefix, r"puts no space before a text \(tokenizer.ggml.add_space_prefix\)"),
    "no word of BOS": (_of_llama_3, r"a text begins with a BOS token .* its tokenizer, 'llama-bpe', it does in llama.cpp"),
    "unknown split": (put("tokenizer.ggml.pre", "viking", TEXT_TYPE), r"tokenizer.ggml.pre 'viking'"),
    "whole numbers": (_add("blk.0.extra", gguf.GGMLQuantizationType.I32), r"blk.0.extra is of type I32"),
    "missing tensor": (_drop, r"it lacks blk.2.ffn_up.weight, .*; give the model in Hugging Face format"),
    "more tensors": (_add("blk.0.extra.weight"), r"blk.0.extra.weight has no place in the model"),
    "biases": (_add("blk.0.attn_q.bias"), r"biases that transformers' llama models do not have \(blk.0.attn_q.bias\)"),
    "other size": (put("llama.feed_forward_length", 48, U32), r"blk.0.ffn_gate.weight is \[40, 32\], not \[48, 32\]"),
    "absurd size": (put("llama.block_count", 2**31, U32), r"num_hidden_layers 2.15e\+09"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_another_model_is_refused(what: str, tiny_file: Path, cache: Path, tmp_path: Path):
    change, message = REFUSED[what]
    file = rewritten(tiny_file, tmp_path / "other.gguf", change)
    with pytest.raises(UserError, match=message) as error:
        load(file)
    text = str(error.value)
    assert "other.gguf" in text and "\n" not in text and len(text) < 700
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_damaged_files_are_refused(tiny_file: Path, tmp_path: Path):
    content = tiny_file.read_bytes()
    damaged = {
        "empty": b"", "other": b"PK\3\4" + content, "begun": content[:1000], "cut": content[:-5000],
        "version": content[:4] + b"\x63" + content[5:], "counts": content[:8] + b"\xff" * 16 + content[24:],
    }  # fmt: skip
    for name, what in damaged.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(what)
        with pytest.raises(UserError, match=r"is no whole GGUF file|is cut off") as error:
            load(file)
        assert f"{name}.gguf" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"no config.json; name the GGUF file in it: --model .*begun.gguf"):
        catalog.resolve(str(tmp_path))


def test_a_pointer_in_the_place_of_a_file_is_called_that(tmp_path: Path):
    (tmp_path / "model.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1117320768\n")
    with pytest.raises(
        UserError, match=r"model\.gguf is a pointer of Git LFS in the place of the file; run `git lfs pull`"
    ):
        load(tmp_path / "model.gguf")


def test_the_origin_stands_in_experiment_manifest_and_card(
    tiny_file: Path, tmp_path: Path, printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    data = data_folder(tmp_path / "data")
    settings = SearchSettings((str(tiny_file),), "smoke", data_dir=str(data), calibration="embedded", inline=True,
        tasks=("piqa",), limit=2, storage_path=str(tmp_path / "results"))  # fmt: skip
    plan = make_plan(settings)
    experiment.write(Experiment(FolderStore(tmp_path / "experiment")), plan, [])
    sha256 = catalog.resolve(str(tiny_file)).gguf.sha256
    expected = {"file": "tiny.F32.gguf", "quantization": "F32", "sha256": sha256}
    about = json.loads((tmp_path / "experiment" / EXPERIMENT).read_text())["models"]["tiny.F32"]
    assert about["gguf"] == expected and about["run"]["model"] == str(tiny_file)

    from tune_prune.commands import prune

    told = printed(prune.main, "--model", tiny_file, "--method", "magnitude", "--output", tmp_path / "pruned")
    assert f"weights      tiny.F32.gguf (F32, SHA-256 {sha256[:16]}...)" in told
    manifest = json.loads((tmp_path / "pruned" / "tune_prune.json").read_text())
    assert manifest["base"]["gguf"] == expected and manifest["base"]["model"] == "tiny.F32.gguf"
    card = (tmp_path / "pruned" / "README.md").read_text()
    assert f"read from `tiny.F32.gguf`, a GGUF file in `F32` (SHA-256 `{sha256}`)" in card
    assert str(tmp_path) not in card + json.dumps(manifest["base"])
    pruned = tune_prune.open(tmp_path / "pruned", data_dir=data)
    assert pruned.manifest.base.gguf == files.GgufOrigin(**expected)
    assert pruned.tokenizer(TEXT)["input_ids"] == tune_prune.open(tiny_file, data_dir=data).tokenizer(TEXT)["input_ids"]
