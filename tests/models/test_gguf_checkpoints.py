"""GGUF files that `prune` has written, where it has written them: held against their manifest, measured as their trial was, not
pruned again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import tune_prune
from tests.conftest import build_tiny, whole
from tests.models.conftest import SIZES, saved
from tests.search_folders import data_folder
from tune_prune.checkpoint import manifest
from tune_prune.checkpoint.manifest import IDS_ALONE
from tune_prune.commands import evaluate, prune
from tune_prune.core.errors import UserError
from tune_prune.models import catalog, loading

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("variant", ["llama", "granite", "phi3"])  # all are llama's in such a file
def test_a_file_is_held_against_the_manifest_beside_it(variant: str, words: Path, cache: Path, tmp_path: Path):
    dense = tmp_path / "dense"
    whole(build_tiny(variant, torch.float32, **SIZES)).save_pretrained(dense)
    PreTrainedTokenizerFast.from_pretrained(words).save_pretrained(dense)
    data = data_folder(tmp_path / "data")
    pruned = tune_prune.open(dense, data_dir=data, calibration="embedded").prune("magnitude", shape="uniform")
    pruned.save(tmp_path / "small", "gguf")
    (tmp_path / "small" / "model.safetensors").write_bytes(b"of another one, and not read")
    file = next((tmp_path / "small").glob("*.gguf"))

    read = tune_prune.open(file, data_dir=data)
    assert read.manifest is not None and read.manifest.config == pruned.config and read.params == pruned.params
    assert read.base.location == str(dense)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(read.model(ids).logits, pruned.model(ids).logits)
    comparable = variant != "granite"
    found = read.evaluate(limit=2, tasks="piqa", kl=comparable).record.metrics
    recorded = pruned.evaluate(limit=2, tasks="piqa").record.metrics
    assert {"kl_text", "kl_tasks", "ppl", "acc_piqa"} <= recorded.keys()
    if not comparable:
        recorded = {name: value for name, value in recorded.items() if not name.startswith("kl_")}
        with pytest.raises(UserError, match=r"whose logits are scaled otherwise, as those of a Granite model"):
            read.evaluate(limit=2, tasks="piqa", kl=True)
    assert found == pytest.approx(recorded | {"removed_fraction": 0.0}, abs=1e-5)  # of the file itself nothing

    (tmp_path / "small" / "config.json").write_text((dense / "config.json").read_text())
    with pytest.raises(
        UserError, match=rf"holds a checkpoint for llama.cpp; name its GGUF file itself: --model {file}"
    ):
        tune_prune.open(tmp_path / "small", data_dir=data)
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"the content of {file.name} has changed \(its SHA-256 differs\)"):
        tune_prune.open(file, data_dir=data)
    saved(build_tiny(variant, torch.float32, **SIZES), words, file)
    with pytest.raises(UserError, match=rf"{file.name} states other layers, or other sizes"):
        tune_prune.open(file, data_dir=data)


def test_the_command_that_checks_a_file_is_said(
    tiny_file: Path, words: Path, tmp_path: Path, printed: Callable[..., str]
):
    def told(shape: str, *more: Any) -> str:
        about = ["--model", tiny_file, "--method", "random", "--shape", shape, "--format", "gguf"]
        return printed(prune.main, *about, "--output", tmp_path / shape, *more)

    biased = tmp_path / "biased"
    build_tiny("llama-biases", torch.float32, **SIZES).save_pretrained(biased)
    PreTrainedTokenizerFast.from_pretrained(words).save_pretrained(biased)
    about = ["--model", biased, "--method", "random", "--shape", "uniform", "--format", "gguf"]
    with_biases = printed(prune.main, *about, "--output", tmp_path / "small")
    more = "--data-dir", data_folder(tmp_path / "data"), "--tasks", "piqa", "--limit", "2"
    for text in (
        with_biases,
        told("free", "--seed", "1"),
        told("uniform"),
    ):  # deci twice, which only its manifest explains
        assert "llama-cli -m" in text
        command = text.partition("evaluate   ")[2].partition("\n")[0].split()
        assert command[:3] == ["tune-prune", "evaluate", "--model"] and command[3].endswith(".gguf")
        assert "its files are those that tune_prune.json lists" in printed(evaluate.main, *command[2:], *more)


def test_what_no_file_can_hold_is_refused_before_anything_is_computed(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    dense = tmp_path / "dense"
    build_tiny("mistral-sliding", torch.float32, **SIZES).save_pretrained(dense)
    PreTrainedTokenizerFast.from_pretrained(words).save_pretrained(dense)
    flags = ["--model", str(dense), "--method", "taylor", "--seq-len", "16", "--num-samples", "8"]
    flags += ["--calibration", "embedded", "--format", "gguf", "--output", str(tmp_path / "small")]
    assert prune.main(flags) == 2
    said = capsys.readouterr()
    assert "sliding_window is 5" in said.err and "tokens" not in said.out and not (tmp_path / "small").exists()


def test_a_file_without_a_tokenizer_is_for_no_program_of_texts(tmp_path: Path, printed: Callable[..., str]):
    flags = ["--model", "tiny-llama", "--method", "magnitude", "--format", "gguf", "--output", tmp_path / "small"]
    told = printed(prune.main, *flags)
    assert f"the GGUF file has none: {IDS_ALONE}" in told and "saved  " in told
    assert "llama-cli" not in told and "llama-server" not in told
    assert "```sh\nllama-cli" not in (card := (tmp_path / "small" / "README.md").read_text()) and IDS_ALONE in card


def test_a_file_that_tune_prune_has_pruned_is_not_pruned_again(tiny_file: Path, tmp_path: Path):
    model = tune_prune.open(tiny_file, data_dir=data_folder(tmp_path / "data"), calibration="embedded")
    model.prune("magnitude", ratio=0.2, shape="uniform").save(tmp_path / "small", "gguf")
    file = next((tmp_path / "small").glob("*.gguf"))
    source = catalog.resolve(str(file))
    with pytest.raises(
        UserError, match=r"is already pruned, .* of tiny.F32 are removed; start from the original model"
    ):
        manifest.require_dense(source, loading.load_config(source))
