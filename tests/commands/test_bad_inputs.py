"""Models, data, search spaces, results and places that a command cannot use: each is refused before weights are loaded, in a
sentence that names the file and the way out, and nothing is written."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.search_folders import TINY, TINY_FOLDER, data_folder, model_folder
from tests.trials import RUN
from tune_prune import embedded
from tune_prune.commands import analysis, prune, search
from tune_prune.core.config import EvaluationProtocol, ModelRun
from tune_prune.core.store import FolderStore
from tune_prune.data import checks
from tune_prune.data.perplexity_text import TEXT_FILE

pytestmark = pytest.mark.usefixtures("nothing_created")


def write_weights(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def keep_index_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')


def store_in_8_bits(folder: Path) -> None:
    """Store a weight as checkpoints in FP8 do, whose scales are tensors beside the weights."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors", {"format": "pt"})


# How a copy of tiny-llama is broken (fields of its config, or a function of the folder), and what the sentence must hold.
BROKEN_MODELS: dict[str, tuple[dict[str, Any] | Callable[[Path], object], list[str]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["has no config.json"]),
    "config no JSON": (lambda folder: (folder / "config.json").write_text("{"), ["config.json", "cannot be loaded"]),
    "config a list": (lambda folder: (folder / "config.json").write_text("[1]"), ["config.json", "no model_type"]),
    "other family": ({"model_type": "gpt2"}, ["'gpt2'", "not supported", "qwen2"]),
    "misspelt family": ({"model_type": "llamaa"}, ["did you mean 'llama'?"]),
    "images, too": ({"model_type": "llava"}, ["'llava' is not supported", "(llama) as one of its parts"]),
    "images, too, of a family that is not pruned": (
        {"model_type": "mistral3", "text_config": {"model_type": "mamba"}},
        ["'mamba' is not supported", "has no model.layers"],
    ),
    "no language model": ({"model_type": "t5"}, ["'t5' is not supported", "no causal language model"]),
    "text for a size": ({"hidden_size": "big"}, ["hidden_size", "'big'"]),
    "no layers": ({"num_hidden_layers": 0}, ["num_hidden_layers 0", "at least 1"]),
    "heads that do not divide": ({"num_attention_heads": 7, "head_dim": None}, ["number of attention heads (7)"]),
    "unknown activation": ({"hidden_act": "nope"}, ["no model that can be built", "nope"]),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, ["quantised (fp8", "made from"]),
    "weights in 8 bits": (store_in_8_bits, ["quantised (model.layers.0.mlp.down_proj.weight is F8_E4M3)"]),
    "other width": ({"intermediate_size": 72}, ["gate_proj.weight is [", "instead of [72"]),
    "more layers": ({"num_hidden_layers": 99}, ["is missing, and", "more such tensors"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["no weights", "model.safetensors"]),
    "weights cut off": (
        write_weights((TINY_FOLDER / "model.safetensors").read_bytes()[:-5000]),
        ["damaged or cut off", "download the model again"],
    ),
    "a Git LFS pointer": (write_weights(b"version https://git-lfs.github.com/spec/v1\n"), ["git lfs pull"]),
    "weights elsewhere": ({"transformers_weights": "other.safetensors"}, ["transformers_weights", "take"]),
    "weights of a missing part": (keep_index_only, ["lacks 1 of 1 weight files", "model-1.safetensors"]),
    "an adapter beside": (
        lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        ["adapter_config.json", "merge the adapter"],
    ),
    "an adapter alone": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        ["is an adapter", "merge the adapter into the model that it names"],
    ),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("token*")], ["tokenizer", "complete"]),
    "tokenizer no JSON": (lambda folder: (folder / "tokenizer.json").write_text("{"), ["tokenizer"]),
    "tokenizer of another model": ({"vocab_size": 10}, ["gives the token id", "vocab_size", "10"]),
    "short positions": ({"max_position_embeddings": 8}, ["seq_len 32", "8 tokens"]),
}


@pytest.mark.parametrize(("change", "words"), BROKEN_MODELS.values(), ids=BROKEN_MODELS)
def test_broken_models_are_refused_before_weights_are_loaded(change, words, refusal, tmp_path):
    folder = model_folder(tmp_path / "broken", **(change if isinstance(change, dict) else {}))
    if callable(change):
        change(folder)
    sentence = refusal("--model", folder, "--search-space", "smoke", "--calibration", "embedded")
    assert [word for word in words if word not in sentence] == [], sentence


def test_a_file_is_no_model(refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("x")
    assert "model.bin is a file" in refusal("--model", tmp_path / "model.bin")


def test_models_must_be_distinct(refusal: Callable[..., str], tmp_path: Path) -> None:
    more = ("--search-space", "smoke", "--calibration", "embedded", "--data-dir", data_folder(tmp_path / "data"))
    one, same_name = model_folder(tmp_path / "a" / "m"), model_folder(tmp_path / "b" / "m", rms_norm_eps=1e-5)
    assert "'m'" in refusal("--model", one, "--model", same_name, *more)
    assert "same model" in refusal("--model", one, "--model", model_folder(tmp_path / "copy"), *more)


# A file of --data-dir, what is written there (None: the file is taken away), and what the sentence must hold.
BROKEN_DATA: dict[str, tuple[str, bytes | None, list[str]]] = {
    "task missing": ("tasks/boolq/test.jsonl", None, ["task files are missing", "boolq/test.jsonl", "--tasks"]),
    "bad line": ("tasks/boolq/test.jsonl", b'{"a": 1}\n{oops\n', ["boolq/test.jsonl, line 2", "not JSON"]),
    "no items": ("tasks/piqa/test.jsonl", b"\n", ["piqa/test.jsonl has no questions"]),
    "items no text": ("tasks/piqa/test.jsonl", b"\xff\xfe", ["piqa/test.jsonl is not UTF-8"]),
    "bad definition": ("tasks/piqa/task.yaml", b"a: [", ["piqa/task.yaml is not valid YAML"]),
    "perplexity text missing": (TEXT_FILE, None, ["perplexity text", "is missing"]),
    "perplexity text empty": (TEXT_FILE, b" \n", ["perplexity text", "is empty"]),
    "perplexity text binary": (TEXT_FILE, b"\xff\xfe", ["perplexity text", "not UTF-8 text (byte 0)"]),
}


@pytest.mark.parametrize(("file", "content", "words"), BROKEN_DATA.values(), ids=BROKEN_DATA)
def test_broken_data_is_refused(file, content, words, refusal, tmp_path):
    path = data_folder(tmp_path / "data") / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    sentence = refusal(*TINY, "--data-dir", tmp_path / "data")
    assert [word for word in words if word not in sentence] == [], sentence


def test_data_without_tasks_and_without_calibration_text(refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty/tasks is not a folder" in refusal(*TINY, "--data-dir", tmp_path / "empty")
    folder, data = model_folder(tmp_path / "m"), data_folder(tmp_path / "data")
    sentence = refusal("--model", folder, "--search-space", "smoke", "--data-dir", data)
    assert "no calibration text" in sentence and "--calibration FILE" in sentence


@pytest.mark.parametrize(
    ("content", "words"),
    [(b" \n", "is empty"), (b"\xff\xfe\x80", "UTF-8"), (b"too short", "enough for 0 samples of 16")],
)
def test_unusable_calibration_texts(content: bytes, words: str, refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    assert words in refusal(*TINY, "--calibration", tmp_path / "text")


def test_unusable_mixtures(refusal: Callable[..., str], tmp_path: Path) -> None:
    short, report = (tmp_path / f"{name}.txt" for name in ("short", "report"))
    short.write_text("too short")
    report.write_text(embedded.perplexity_text())
    assert f"{short}, of embedded+{short}: the" in refusal(*TINY, "--calibration", f"embedded+{short}")
    assert "that perplexity is reported on" in refusal(*TINY, "--calibration", f"embedded+{report}")
    assert "'' is neither a file nor" in refusal(*TINY, "--calibration", "embedded+")


SPACE = "search: grid\nmethod: [taylor]\ntaylor_seq_len: [16]\ntaylor_num_samples: [8]\n"


def test_search_spaces_of_the_user(refusal: Callable[..., str], tmp_path: Path) -> None:
    space = tmp_path / "my.yaml"

    def sentence(text: str, *more: str) -> str:
        space.write_text(text)
        return refusal("--model", "tiny-llama", "--search-space", space, *more)

    assert "seq_len 100000" in sentence(SPACE.replace("[16]", "[100000]"))
    assert "enough for" in sentence(SPACE.replace("[8]", "[1000000]"))
    assert "is 0.2, but" in sentence(f"{SPACE}pruning_ratio: 0.3\n", "--pruning-ratio", "0.2")
    assert "the shape is free" in sentence(f"{SPACE}shape: free\n", "--align", "16")
    for said, flags, words in [
        ("uniform", ["--shape", "free"], f"--shape is free, but {space} says uniform; leave one of them out"),
        ("[free, uniform]", ["--shape", "uniform"], f"--shape is uniform, but {space} says free, uniform; leave one"),
        ("aligned-32", ["--align", "8"], "--align is 8, but the shape is aligned-32; leave one of the two numbers out"),
    ]:
        assert words in sentence(f"{SPACE}shape: {said}\n", *flags)


def test_all_problems_of_a_search_space_are_listed(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(SPACE.replace("[taylor]", "[tailor]").replace("[8]", "[0]"))
    assert search.main(["--model", "tiny-llama", "--search-space", "my.yaml"]) == 2
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 3 and lines[0].startswith("error: ")
    assert "did you mean 'taylor'?" in lines[1] and "num_samples is 0" in lines[2]


@pytest.mark.parametrize("speaks", [False, True], ids=["closed port", "another program"])
def test_dead_addresses_are_known_at_once(speaks: bool, refusal: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        if speaks:
            threading.Thread(target=answer, daemon=True).start()
        else:
            server.close()
        sentence = refusal(*TINY, "--address", f"127.0.0.1:{port}", dry=False)
    assert f"no Ray cluster answers at 127.0.0.1:{port}" in sentence and "ray start --head" in sentence
    assert ("another program" in sentence) == speaks


def test_hub_models_without_a_network(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sentence = refusal("--model", "no-such-owner/no-such-model", "--search-space", "smoke")
    assert "unset HF_HUB_OFFLINE" in sentence and "--model DIR" in sentence

    asked = []

    def no_network(url: str) -> None:
        asked.append(url)
        raise ConnectionError("no route to host")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_network)
    sentence = refusal("--model", "no-such-owner/no-such-model", "--search-space", "smoke")
    assert "no route to host" in sentence and "hf download no-such-owner/no-such-model" in sentence
    assert len(asked) == 1  # the client's own retries would take half a minute


def test_data_sets_without_a_network(refusal, monkeypatch, tmp_path):
    def no_network(url: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_network)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    model = str(model_folder(tmp_path / "m"))
    for offline, cause in ((True, "HF_HUB_OFFLINE is set; unset it"), (False, "no route to host")):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        for argv in (("--model", model, "--search-space", "smoke"), (*TINY, "--calibration", "c4")):
            sentence = refusal(*argv)
            assert cause in sentence and "--data-dir DIR" in sentence
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "allenai___c4").mkdir()  # as the datasets library keeps what it has prepared
    checks.check_cached(ModelRun("m", "m", None, "c4", str(tmp_path), EvaluationProtocol(), 0, "float32"))


def test_a_folder_too_deep_for_ray_is_one_sentence(tmp_path, monkeypatch, capfd):
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    monkeypatch.chdir(tmp_path)
    assert search.main([*TINY, "--limit", "2", "--storage-path", str(tmp_path / "results")]) == 2
    error = capfd.readouterr().err
    assert re.search(r"^error: Ray cannot start .* set RAY_TMPDIR to a short writable path", error, re.MULTILINE)
    assert "Traceback" not in error


HOLD = """
import sys
from tune_prune.core.store import FolderStore
with FolderStore(sys.argv[1]).lock():
    print(flush=True)
    sys.stdin.read()
"""


def test_a_second_search_leaves_and_a_dry_run_does_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = FolderStore(tmp_path / "busy")
    argv = ["--model", "tiny-llama", "--search-space", "smoke", "--storage-path", str(tmp_path), "--name", "busy"]
    running = [sys.executable, "-c", HOLD, str(store.folder)]
    with subprocess.Popen(running, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"\n"
        contents = {"tensorboard/tiny-llama/taylor/events": "of the first"}
        store.put_all(contents)
        before = sorted(store.folder.rglob("*"))
        assert search.main(argv) == 2
        said = capfd.readouterr().err
        assert said.startswith(f"error: another search runs on experiment {store.folder} (process {first.pid} on ")
        assert said.count("\n") == 1 and "--name" in said
        assert sorted(store.folder.rglob("*")) == before
        assert {name: store.path(name).read_text() for name in contents} == contents
        assert search.main([*argv, "--dry-run"]) == 0
        first.kill()


ROW = {"model": "m", "method": "taylor", "seq_len": 16, "num_samples": 4, "acc_mean": 0.5, "output_dir": "x"}


def test_names_of_files_do_not_act_on_a_terminal(plan_text: Callable[..., str], tmp_path: Path) -> None:
    """Nobody has named this one: the calibration text that lies in the data."""
    data, folder = data_folder(tmp_path / "data"), model_folder(tmp_path / "m")
    (data / "text" / "a\x1b[2Jtrain.txt").write_text(embedded.calibration_text())
    shown = plan_text(
        "--model", folder, "--search-space", "smoke", "--data-dir", data, "--limit", "2", "--tasks", "boolq"
    )
    assert "\x1b" not in shown and r"a\x1b[2Jtrain.txt" in shown


def csv_file(folder: Path, *rows: dict) -> str:
    pd.DataFrame(rows).to_csv(folder / "results.csv", index=False)
    return f"m={folder / 'results.csv'}"


def test_only_a_study_is_replaced_by_a_study(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_text("{}")
    argv = ("--csv", csv_file(tmp_path, ROW), "--export-study", tmp_path / "experiment.json", "--overwrite")
    assert "is no SQLite file, and only such a file is replaced" in refused(analysis.main, *argv)
    assert (tmp_path / "experiment.json").read_text() == "{}"


RECORDED = {
    "tasks a number": ({"tasks": 3}, "does not name a configuration"),
    "an accuracy a text": ({"acc_mean": "high"}, "'high' is not a number"),
    "no name of a text": (
        {"source": RUN.to_dict() | {"calibration": "/a\0b"}},
        "calibration text /a\\x00b cannot be read",
    ),
}


@pytest.mark.parametrize(("changes", "says"), RECORDED.values(), ids=RECORDED)
def test_what_no_search_has_recorded(changes: dict, says: str, refused: Callable[..., str], tmp_path: Path) -> None:
    entry = {"method": "taylor", "seq_len": 16, "num_samples": 8, "source": RUN.to_dict()} | changes
    (tmp_path / "best.json").write_text(json.dumps({"models": {"tiny-llama": entry}}))
    assert says in refused(prune.main, "--config", "best.json", "--output", "out", begun=True)
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]


def test_help_that_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    root = str(Path(search.__file__).parents[1])
    command = [sys.executable, "-m", "tune_prune", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root})
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
