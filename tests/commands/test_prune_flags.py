"""`prune` from flags alone: shapes, formats and texts, and what it says of wrong input."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.commands.test_prune_cli import load, read
from tests.search_folders import model_folder
from tune_prune import embedded
from tune_prune.checkpoint.manifest import MANIFEST
from tune_prune.commands import prune, speed

FIRST_HOUSE = Path(__file__).parents[1] / "first_house"
FLAGS = ("--method", "taylor", "--seq-len", "16", "--num-samples", "8")


def test_from_flags_and_shapes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    widths = {}
    for shape in ("free", "aligned", "uniform"):
        out = tmp_path / shape
        align = ["--align", "16"] if shape == "aligned" else []
        argv = ["--model", "tiny-llama", *FLAGS, "--shape", shape, *align, "--output", str(out), "--device", "cpu"]
        assert prune.main(argv) == 0, capfd.readouterr().err
        model = load(out)
        widths[shape] = [
            layer.mlp.gate_proj.out_features for layer in model.model.layers if hasattr(layer.mlp, "gate_proj")
        ]
        own_type = read(out / "config.json")["model_type"]
        assert own_type == ("llama" if shape == "uniform" else "tune_prune_llama")
        assert (out / "modeling_tune_prune.py").is_file() == (shape != "uniform")
        named = read(out / "tokenizer_config.json")["tokenizer_class"]
        assert named == "PreTrainedTokenizerFast"  # by its name in transformers 4
        tokenizer = AutoTokenizer.from_pretrained(out)
        assert len(tokenizer) == len(AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama")))
        assert model.generate(**tokenizer("the", return_tensors="pt"), max_new_tokens=3).shape[1] > 3
    assert len(set(widths["free"])) > 1
    assert {width % 16 for width in widths["aligned"]} == {0}
    assert len(set(widths["uniform"])) == 1
    assert "trust_remote_code" in capfd.readouterr().out


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["default", "llama3"],
)
def test_a_plain_config_has_the_names_of_transformers_4(rope: dict[str, Any], tmp_path: Path) -> None:
    base, out = model_folder(tmp_path / "base", rope_parameters=rope), tmp_path / "out"
    argv = ["--model", str(base), *FLAGS, "--calibration", "embedded", "--shape", "uniform", "--output", str(out)]
    assert prune.main(argv) == 0
    config = read(out / "config.json")
    assert (config["rope_theta"], config["torch_dtype"]) == (5e5, "float32")
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    assert config["rope_scaling"] == (scaling if rope["rope_type"] == "llama3" else None)
    again = load(out)
    assert again.config.rope_parameters == rope
    del config["rope_theta"], config["rope_scaling"], config["torch_dtype"]
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ids = torch.arange(300)[None]
    assert torch.equal(again(ids).logits, load(out)(ids).logits)


def test_no_tasks_have_to_be_there(tmp_path: Path) -> None:
    """Of the texts the one that is measured on, which calibration must not read."""
    text = tmp_path / "data" / "text" / "valid.txt"
    text.parent.mkdir(parents=True)
    text.write_text(embedded.calibration_text()[:20_000])
    (text.parent / "wikitext2-raw.test.txt").write_text(embedded.perplexity_text())
    base, out = model_folder(tmp_path / "base"), tmp_path / "out"
    assert prune.main(["--model", str(base), *FLAGS, "--data-dir", str(tmp_path / "data"), "--output", str(out)]) == 0
    assert read(out / MANIFEST)["source"]["calibration"] == str(text)


@pytest.mark.parametrize(
    ("method", "name", "text"),
    [
        ("magnitude", "magnitude", "without sample text"),
        ("taylor", "taylor on 8 samples of 16 tokens", "by embedded text"),
    ],
)
def test_only_what_was_read_is_named(
    method: str, name: str, text: str, tmp_path: Path, printed: Callable[..., str]
) -> None:
    samples = ["--seq-len", "16", "--num-samples", "8"] if method == "taylor" else []
    out = printed(prune.main, "--model", "tiny-llama", "--method", method, *samples, "--output", tmp_path / "out")
    assert f"prune        tiny-llama by 20% of all parameters: {name}\n" in out
    assert f"%), chosen {text} in float32\n" in out
    assert re.search(r"^cut +[\d.]+ s$", out, re.MULTILINE)


def test_shards_dtype_and_overwrite(tmp_path: Path, sentence: Callable[..., str]) -> None:
    out = tmp_path / "out"
    argv = ["--model", "tiny-llama", *FLAGS, "--output", str(out), "--dtype", "bfloat16", "--shard-gb", "0.0001"]
    assert prune.main(argv) == 0
    shards = [path.name for path in out.glob("model-*.safetensors")]
    assert len(shards) > 1 and (out / "model.safetensors.index.json").is_file()
    assert sorted(read(out / MANIFEST)["files"]) == sorted(shards)
    first = (out / MANIFEST).read_bytes()
    assert {tensor.dtype for tensor in AutoModelForCausalLM.from_pretrained(out, dtype="auto").parameters()} == {
        torch.bfloat16
    }
    assert "exists" in sentence(*argv)
    assert prune.main([*argv, "--overwrite", "--pruning-ratio", "0.1"]) == 0
    assert (out / MANIFEST).read_bytes() != first
    (out / "adapters").mkdir()
    for name in ("NOTES.md", "small-q4.gguf"):
        (out / name).write_text("mine", encoding="utf-8")
    said = sentence(*argv, "--overwrite")
    assert f"--output {out} holds NOTES.md, adapters, small-q4.gguf beside the checkpoint, which would be gone" in said
    assert (out / "NOTES.md").read_text() == "mine" and (out / "adapters").is_dir()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("all I have", encoding="utf-8")
    assert "is not a checkpoint of tune_prune" in sentence(
        "--model", "tiny-llama", *FLAGS, "--overwrite", "--output", mine
    )


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_what_appears_meanwhile_stays(
    overwrite: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    out = tmp_path / "out"

    def written(*_: object) -> None:
        out.mkdir()
        (out / "thesis.tex").write_text("all I have", encoding="utf-8")

    monkeypatch.setattr("tune_prune.checkpoint.card.write_card", written)
    said = refused(prune.main, "--model", "tiny-llama", *FLAGS, "--output", out, *overwrite, begun=True)
    assert f"--output {out} " in said and ("not replaced" if overwrite else "exists") in said
    assert (out / "thesis.tex").read_text() == "all I have" and [*tmp_path.iterdir()] == [out]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("tune_prune.checkpoint.card.write_card", broken)
    with pytest.raises(OSError, match="disk full"):
        prune.main(["--model", "tiny-llama", *FLAGS, "--output", str(tmp_path / "deep" / "out")])
    assert [path.name for path in (tmp_path / "deep").iterdir()] == []


@pytest.mark.parametrize(
    ("text", "word"),
    {
        "no JSON": ("{", "JSON"),
        "another file": ('{"a": 1}', "does not name a configuration"),
        "half an entry": ('{"models": {"m": {"method": "taylor"}}}', "does not name a configuration"),
        "no model": ('{"models": {}}', "no"),
        "of a results file": (
            '{"models": {"m": {"method": "taylor", "seq_len": 16, "num_samples": 8, "source": null}}}',
            "--seq-len 16",
        ),
    }.values(),
)
def test_a_file_that_is_no_result_of_a_search(
    text: str, word: str, sentence: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "global_best_config.json"
    path.write_text(text, encoding="utf-8")
    assert word in sentence("--config", path, "--output", tmp_path / "out")


def test_a_dense_model_that_has_moved_is_asked_for(refused: Callable[..., str], tmp_path: Path) -> None:
    """By both commands that take a search's model up again."""
    experiment = Path(shutil.copytree(FIRST_HOUSE / "storage" / "tiny-llama-20-smoke-limit5", tmp_path / "experiment"))
    for name in ("experiment.json", "global_best_config.json"):
        text = (experiment / name).read_text()
        (experiment / name).write_text(text.replace('"model": "tiny-llama"', f'"model": "{tmp_path / "gone"}"'))
    for main, more in ((prune.main, ("--output", tmp_path / "out")), (speed.main, ())):
        assert (
            f"tiny-llama, the model that was searched, is not where it was (model folder {tmp_path / 'gone'} does not "
            "exist); name where it is now with --base"
        ) in refused(main, "--config", experiment, *more)
        assert "model folder nowhere/at/all does not exist" in refused(
            main, "--config", experiment, "--base", "nowhere/at/all", *more
        )


def test_a_dense_model_that_is_refused_where_it_was_keeps_its_sentence(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    experiment = Path(shutil.copytree(FIRST_HOUSE / "storage" / "tiny-llama-20-smoke-limit5", tmp_path / "experiment"))
    folder = shutil.copytree(embedded.model_dir("tiny-llama"), tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    for name in ("experiment.json", "global_best_config.json"):
        text = (experiment / name).read_text()
        (experiment / name).write_text(text.replace('"model": "tiny-llama"', f'"model": "{folder}"'))
    for main, more in ((prune.main, ("--output", tmp_path / "out")), (speed.main, ())):
        told = refused(main, "--config", experiment, *more)
        assert "adapter_config.json" in told and "move that file away" in told and "not where it was" not in told
