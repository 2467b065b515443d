"""`prune --format gguf --quantize`: the types of a file, what llama.cpp and tune_prune read of it, what is refused; and files of
every architecture, read again by their manifest."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tune_prune
from tests.checkpoint.test_gguf import CASES, WRITTEN
from tests.conftest import build_tiny
from tests.gguf_reading import File, LlamaCpp, family_of, pruned
from tests.models.conftest import SIZES, tokenizer
from tests.pruning.test_surgery import tokens
from tests.search_folders import data_folder
from tune_prune.checkpoint import manifest
from tune_prune.checkpoint.gguf.gguf_file import write_gguf
from tune_prune.checkpoint.gguf.reading import stored_weights
from tune_prune.commands import evaluate, prune
from tune_prune.models.gguf import header
from tune_prune.pruning.surgery import Sketch


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer(tmp_path_factory.mktemp("words"), pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture
def dense(words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose matrices have rows of 256 numbers, but for those of its MLPs; the cache is one of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = SIZES | {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = build_tiny("llama", torch.float32, **sizes, intermediate_size=320, num_hidden_layers=3)
    model.save_pretrained(tmp_path / "dense")
    PreTrainedTokenizerFast.from_pretrained(words).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.mark.parametrize(("case", "shape"), WRITTEN)
def test_a_file_is_read_again_as_the_model_that_was_written(case: str, shape: str, words: Path, tmp_path: Path) -> None:
    variant, overrides = CASES[case]
    model, again = (pruned(variant, shape, torch.float32, vocab_size=272, **overrides) for _ in range(2))
    family, file = family_of(variant), tmp_path / "model.gguf"
    write_gguf(Sketch.of(model), family, words, file, torch.float32)
    weights = stored_weights(file, header.contents(file)[0].tensors, again, family)
    for name, p in again.named_parameters():
        p.copy_(weights[name])
    torch.testing.assert_close(again(tokens()).logits, model(tokens()).logits, rtol=1e-5, atol=1e-5)


def log_probabilities(model: Path, data: Path, ids: list[int]) -> np.ndarray:
    """What tune_prune's own engine predicts behind `ids`, and behind one more of the token 5."""
    opened = tune_prune.open(model, data_dir=data, dtype="float32")
    logits = opened.model(torch.tensor([[*ids, 5]])).logits[0, -2:]
    return torch.log_softmax(logits, -1).numpy()


def check(dense: Path, folder: Path, kind: str, printed: Callable[..., str]) -> File:
    """Prune with --quantize, then hold files, manifest, card and what is printed against each other; evaluate; run llama.cpp."""
    data = data_folder(folder.parent / "data")
    argv = ["--model", dense, "--method", "random", "--shape", "free", "--format", "gguf", "--output", folder]
    told = printed(prune.main, *argv, "--quantize", kind)
    about = manifest.read(folder)
    assert about is not None and about.quantization == kind.upper()
    (name,) = about.files
    assert name == f"dense-pruned-{kind.upper()}.gguf" and [path.name for path in folder.glob("*gguf*")] == [name]
    assert about.files[name] == manifest.weight_file(folder / name)
    card = (folder / "README.md").read_text()
    assert f"| Quantised | to `{kind.upper()}`" in card and f"--quantize {kind}" in card
    assert "llama-quantize" not in told and f"llama-cli -m {folder / name}" in told and "evaluate   " in told
    assert all(note in told for note in about.notes)

    more = ["--tasks", "piqa", "--limit", "2", "--data-dir", data, "--dtype", "float32"]
    measured = printed(evaluate.main, "--model", folder / name, "--kl", *more)
    assert f"weights dequantised from {kind.upper()}, in float32" in measured and "KL  " in measured
    ids = torch.randint(262, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    ours = log_probabilities(folder / name, data, ids)
    theirs = LlamaCpp(folder / name).log_probabilities(ids, 5, 1, 272)
    # llama.cpp rounds what goes into a quantised matrix to 8 bits, too.
    assert np.abs(theirs - ours).mean() < 0.05 and np.abs(theirs - ours).max() < 0.4
    return File(folder / name, about.notes)


def test_q8_0_is_written_with_nothing_installed(
    dense: Path, tmp_path: Path, printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = check(dense, tmp_path / "small", "q8_0", printed)
    assert file.architecture == "deci" and file.meta["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    whole = {name: values for name, values in file.tensors.items() if values.ndim > 1 and values.shape[1] % 32}
    assert whole and all(name.endswith("ffn_down.weight") for name in whole)
    for name, values in file.tensors.items():
        assert file.types[name] == ("F32" if values.ndim == 1 else "F16" if name in whole else "Q8_0")
    assert any(note.startswith(f"{len(whole)} of 23 matrices ({min(whole)}") for note in file.notes)

    exact = tmp_path / "exact"
    argv = ["--model", dense, "--method", "random", "--shape", "free", "--format", "gguf", "--output", exact]
    printed(prune.main, *argv)
    for name, values in File(next(exact.glob("*.gguf"))).tensors.items():
        if (
            file.types[name] == "Q8_0"
        ):  # half of a step, which is a 127th of the largest of 32 numbers, stored in float16
            blocks = values.reshape(-1, 32)
            errors = np.abs(file.tensors[name].reshape(-1, 32) - blocks)
            assert (errors <= np.abs(blocks).max(1, keepdims=True) * (0.5 / 127 + 2**-11) + 1e-7).all()


@pytest.mark.skipif(
    shutil.which("llama-quantize") is None and find_spec("llama_cpp") is None,
    reason="neither llama-quantize nor llama-cpp-python is installed",
)
@pytest.mark.parametrize("kind", ["q6_k", "q4_k_m", "q4_0"])
def test_llama_cpps_own_quantiser(kind: str, dense: Path, tmp_path: Path, printed: Callable[..., str]) -> None:
    file = check(dense, tmp_path / "small", kind, printed)
    expected = {"q6_k": {"Q6_K"}, "q4_k_m": {"Q4_K", "Q6_K"}, "q4_0": {"Q4_0", "Q6_K"}}[kind]
    rows_of_256 = {
        file.types[name] for name, values in file.tensors.items() if values.ndim > 1 and not values.shape[1] % 256
    }
    assert rows_of_256 == expected
    others = {
        name: values.shape[1] for name, values in file.tensors.items() if values.ndim > 1 and values.shape[1] % 256
    }
    assert all(file.types[name] == "F16" for name, columns in others.items() if columns % 32)
    assert any("are F16, not quantised, as their rows are no multiple of 32" in note for note in file.notes)


FLAGS = ["--model", "tiny-llama", "--method", "random", "--output"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--format gguf --quantize q4_k", "--quantize: unknown value 'q4_k'; did you mean 'q4_k_s'? known: "),
        (
            "--quantize q4_k_m",
            "--quantize q4_k_m is no type of --format hf; add --format gguf, or leave --quantize out",
        ),
        ("--format gguf --quantize int8", "--quantize int8 is no type of --format gguf; take one of q8_0, q6_k, "),
        ("--format hf-padded --quantize int8", "fills it up with zeros; take --format hf, with --shape uniform"),
        (
            "--quantize int4 --shape free",
            "--quantize int4 takes widths in multiples of 32, and --shape free has others",
        ),
        ("--quantize int8", "--quantize int8 needs the package compressed-tensors; pip install 'tune_prune[quantize]'"),
        ("--format gguf --quantize q4_k_m", "llama-quantize is not on PATH; install llama.cpp, or llama-cpp-python"),
    ],
)
def test_what_cannot_be_made_is_refused_before_any_work(
    flags: str, sentence: str, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for package in ("llama_cpp", "compressed_tensors"):
        monkeypatch.setitem(sys.modules, package, None)
    assert sentence in refused(prune.main, *FLAGS, tmp_path / "small", *flags.split())
    assert not (tmp_path / "small").exists()


def test_a_quantiser_that_fails_leaves_nothing_behind(
    dense: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "llama-quantize"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\necho loading\necho 'failed to quantize: unknown model architecture: deci' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/bin:/usr/bin")
    flags = ["--model", dense, "--method", "random", "--format", "gguf", "--quantize", "q4_k_m"]
    sentence = refused(prune.main, *flags, "--output", tmp_path / "small", begun=True)
    assert (
        "could not make a q4_k_m file" in sentence and "unknown model architecture: deci); install a newer" in sentence
    )
    assert not (tmp_path / "small").exists() and not [*tmp_path.glob("*small*")]


def test_a_file_is_read_by_the_model_that_the_manifest_names_or_by_base(
    dense: Path, tmp_path: Path, printed: Callable[..., str], refused: Callable[..., str]
) -> None:
    folder, data = tmp_path / "small", data_folder(tmp_path / "data")
    argv = ["--model", dense, "--method", "random", "--shape", "free", "--format", "gguf", "--quantize", "q8_0"]
    printed(prune.main, *argv, "--output", folder)
    moved = dense.rename(tmp_path / "moved")
    (file,) = folder.glob("*.gguf")
    about = ["--model", file, "--tasks", "piqa", "--limit", "2", "--data-dir", data]
    assert "name where it is now with --base" in refused(evaluate.main, *about)
    output = tmp_path / "metrics.json"
    printed(evaluate.main, *about, "--base", moved, "--output", output)
    measured = json.loads(output.read_text())
    assert measured["gguf"]["quantization"] == "Q8_0" and measured["metrics"]["ppl"] > 1
