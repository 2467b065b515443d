"""The command line of a search: what is wrong is said in one sentence with exit code 2 before anything is created; the plan
of a dry run holds the numbers of the model's own files."""

from __future__ import annotations

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
import pytest
import torch
from safetensors.torch import load_file, save_file

import tune_prune.__main__
from tests.search_folders import TINY, TINY_FOLDER, data_folder, model_folder
from tune_prune import embedded, search
from tune_prune.core.config import EvaluationProtocol, ModelRun
from tune_prune.data import checks
from tune_prune.data.perplexity_text import TEXT_FILE

pytestmark = pytest.mark.usefixtures("nothing_created")

SPACE = "search: grid\nmethod: [taylor]\ntaylor_seq_len: [16]\ntaylor_num_samples: [8]\n"


# What flags alone can get wrong, with words that the sentence must hold: the flag or thing, the value, the way out.
WRONG_FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "no model": ([], ["--model"]),
    "unknown flag": ([*TINY, "--modle", "x"], ["--modle", "--help"]),
    "unknown alias": (["--model", "mistrall"], ["'mistrall'", "did you mean 'mistral'?", "hub id"]),
    "empty name": (["--model", " "], ["--model", "is empty"]),
    "missing folder": (["--model", "./nope"], ["./nope does not exist", "tiny-llama"]),
    "no home": (["--model", "~no-such-user/model"], ["~no-such-user/model", "whole path"]),
    "revision of no hub model": ([*TINY, "--revision", "main"], ["--revision main", "tiny-llama", "leave it out"]),
    "unknown space": ([*TINY, "--search-space", "papergrid"], ["'papergrid'", "did you mean 'paper_grid'?"]),
    "unknown search": ([*TINY, "--search", "random"], ["--search", "'random'", "optuna"]),
    "trials of a grid": ([*TINY, "--num-trials", "3"], ["--num-trials 3", "all 6", "--search optuna"]),
    "objective of a grid": ([*TINY, "--objective", "kl"], ["--objective kl", "all 6", "analysis --rule kl"]),
    "no trials": ([*TINY, "--search", "optuna", "--num-trials", "0"], ["--num-trials", "'0'", "from 1"]),
    "too many trials": ([*TINY, "--search", "optuna", "--num-trials", "7"], ["7", "only 6", "at most 6"]),
    "ratio 0": ([*TINY, "--pruning-ratio", "0"], ["--pruning-ratio", "'0'", "above 0 and below 1"]),
    "ratio 1": ([*TINY, "--pruning-ratio", "1"], ["'1'", "below 1"]),
    "ratio nan": ([*TINY, "--pruning-ratio", "nan"], ["'nan'"]),
    "ratio infeasible": ([*TINY, "--pruning-ratio", "0.95"], ["0.95", "can be removed", "at most 0."]),
    "ratio of less than a channel": ([*TINY, "--pruning-ratio", "1e-9"], ["1e-09", "MLP channel", "at least 0.00"]),
    "unknown shape": ([*TINY, "--shape", "square"], ["--shape", "'square'", "uniform"]),
    "shape with no number": ([*TINY, "--shape", "aligned-"], ["--shape", "'aligned-'", "aligned-N"]),
    "number of no shape": ([*TINY, "--align", "8"], ["--align 8", "--shape aligned", "is free"]),
    "number of another shape": (
        [*TINY, "--shape", "uniform", "--align", "8"],
        ["--align 8", "is uniform", "leave it out"],
    ),
    "no multiples": ([*TINY, "--shape", "aligned", "--align", "0"], ["--align", "'0'", "from 1"]),
    "wide multiples": ([*TINY, "--shape", "aligned", "--align", "65"], ["64 channels", "the 65", "--align 32"]),
    "beyond aligned": (
        [*TINY, "--shape", "aligned", "--pruning-ratio", "0.4"],
        ["only 46,080 can be removed in shape aligned-64", "at most 0.29,", "a smaller --align"],
    ),
    "beyond uniform": (
        [*TINY, "--shape", "uniform", "--pruning-ratio", "0.9"],
        ["can be removed in shape uniform", "at most 0.6", "--shape aligned"],
    ),
    "before aligned": (
        [*TINY, "--shape", "aligned", "--align", "30", "--pruning-ratio", "0.01"],
        ["shape aligned-30 alone removes 3,840", "beyond multiples of 30", "at least 0.0241"],
    ),
    "less than aligned": ([*TINY, "--shape", "aligned", "--pruning-ratio", "0.01"], ["a KV group, 3,072", "0.0193"]),
    "less than uniform": (
        [*TINY, "--shape", "uniform", "--pruning-ratio", "0.005"],
        ["an MLP channel of every layer, 960", "at least 0.006"],
    ),
    "limit 0": ([*TINY, "--limit", "0"], ["--limit", "'0'", "from 1"]),
    "limit of halves": ([*TINY, "--limit", "1.5"], ["--limit", "'1.5'", "whole number"]),
    "negative seed": ([*TINY, "--seed", "-1"], ["--seed", "'-1'", "from 0 to 4294967295"]),
    "seed beyond the samplers": ([*TINY, "--seed", str(2**32)], ["--seed", "4294967295"]),
    "unknown task": ([*TINY, "--tasks", "piqa,bolq"], ["'bolq'", "did you mean 'boolq'?"]),
    "no task": ([*TINY, "--tasks", ","], ["--tasks", "at least one"]),
    "task as path": ([*TINY, "--tasks", "../x"], ["'../x'", "not the name of a task"]),
    "unknown dtype": ([*TINY, "--dtype", "float16"], ["--dtype", "'float16'", "bfloat16"]),
    "unknown scheduler": ([*TINY, "--scheduler", "pbt"], ["--scheduler", "'pbt'", "asha"]),
    "unknown calibration": ([*TINY, "--calibration", "wikitext"], ["'wikitext'", "did you mean 'wikitext2'?"]),
    "missing data": ([*TINY, "--data-dir", "nope"], ["--data-dir nope", "tasks/"]),
    "GPU share": ([*TINY, "--gpus-per-trial", "0.3"], ["--gpus-per-trial", "0.3", "0.25", "0.3333"]),
    "one and a half GPUs": ([*TINY, "--gpus-per-trial", "1.5"], ["1.5", "use 1 or 2"]),
    "a GPU that is not there": ([*TINY, "--gpus-per-trial", "1"], ["1 GPUs", "at most", "--address"]),
    "several GPUs": ([*TINY, "--gpus-per-trial", "2"], ["2 GPUs", "no node has them together", "--gpus-per-trial"]),
    "CPUs that are not there": ([*TINY, "--cpus-per-trial", "9999"], ["9999 CPUs", "at most", "--cpus-per-trial"]),
    "no CPU": ([*TINY, "--cpus-per-trial", "0"], ["--cpus-per-trial is 0"]),
    "no time": ([*TINY, "--trial-timeout", "0"], ["--trial-timeout", "'0'", "from 1"]),
    "endless time": ([*TINY, "--trial-timeout", "nan"], ["--trial-timeout", "'nan'"]),
    "inline on a cluster": ([*TINY, "--inline", "--address", "a:1"], ["--inline", "--address", "leave one"]),
    "inline on half a GPU": (
        [*TINY, "--inline", "--gpus-per-trial", "0.5"],
        ["--gpus-per-trial is 0.5", "--inline", "1"],
    ),
    "inline with a time limit": (
        [*TINY, "--inline", "--trial-timeout", "60"],
        ["--trial-timeout", "--inline", "leave one"],
    ),
    "address without port": ([*TINY, "--address", "head"], ["'head'", "HOST:PORT"]),
    "address of a client": ([*TINY, "--address", "ray://127.0.0.1:10001"], ["ray://", "HOST:PORT"]),
    "name with a slash": ([*TINY, "--name", "a/b"], ["'a/b'", "--storage-path"]),
    "name upwards": ([*TINY, "--name", ".."], ["'..'", "--name"]),
    "long name": ([*TINY, "--name", "x" * 101], ["at most 100"]),
    "long place": ([*TINY, "--storage-path", "x" * 300], ["which no file can be named by", "shorter name"]),
    "storage in an unknown place": ([*TINY, "--storage-path", "ftp://bucket/x"], ["ftp://b", "file://, s3://, gs://"]),
    "storage that is no folder": ([*TINY, "--storage-path", "/dev/null/x"], ["/dev/null is a file", "--storage-path"]),
}


@pytest.mark.parametrize(("argv", "words"), WRONG_FLAGS.values(), ids=WRONG_FLAGS)
def test_wrong_flags_are_refused(argv: list[str], words: list[str], refusal: Callable[..., str]) -> None:
    sentence = refusal(*argv, dry=False)  # refused before anything starts
    assert [word for word in words if word not in sentence] == [], sentence


def test_every_flag_refuses_an_empty_value(refusal: Callable[..., str]) -> None:
    flags = set(re.findall(r"(--[a-z-]+) [A-Z{]", search.parser().format_help()))
    assert {"--model", "--limit", "--dtype"} <= flags
    for flag in flags:
        assert flag in refusal(*TINY, flag, "")


def write_weights(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def keep_index_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')


def store_in_8_bits(folder: Path) -> None:
    """As checkpoints in FP8 have it, whose scales are tensors beside the weights."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors", {"format": "pt"})


# How a copy of tiny-llama is broken (fields of its config, or a function of the folder), and what the sentence must hold.
BROKEN_MODELS: dict[str, tuple[dict[str, Any] | Callable[[Path], object], list[str]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["has no config.json"]),
    "config no JSON": (lambda folder: (folder / "config.json").write_text("{"), ["config.json", "not a valid JSON"]),
    "config a list": (lambda folder: (folder / "config.json").write_text("[1]"), ["config.json", "no model_type"]),
    "other family": ({"model_type": "gpt2"}, ["'gpt2'", "not supported", "qwen2"]),
    "misspelt family": ({"model_type": "llamaa"}, ["did you mean 'llama'?"]),
    "text for a size": ({"hidden_size": "big"}, ["hidden_size", "'big'"]),
    "no layers": ({"num_hidden_layers": 0}, ["num_hidden_layers 0", "at least 1"]),
    "no KV heads": ({"num_key_value_heads": 0}, ["num_key_value_heads 0"]),
    "heads that do not divide": ({"num_attention_heads": 7, "head_dim": None}, ["number of attention heads (7)"]),
    "unknown activation": ({"hidden_act": "nope"}, ["no model that can be built", "nope"]),
    "left out size": ({"hidden_size": None}, ["do not fit its config.json", "model.embed_tokens.weight"]),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, ["quantised (fp8", "made from"]),
    "weights in 8 bits": (store_in_8_bits, ["quantised (model.layers.0.mlp.down_proj.weight is F8_E4M3)"]),
    "other width": ({"intermediate_size": 72}, ["gate_proj.weight is [", "instead of [72"]),
    "more layers": ({"num_hidden_layers": 99}, ["missing or of another shape"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["no weights", "model.safetensors"]),
    "weights cut off": (
        write_weights((TINY_FOLDER / "model.safetensors").read_bytes()[:-5000]),
        ["damaged or cut off", "bytes", "download the model again"],
    ),
    "weights a Git LFS pointer": (
        write_weights(b"version https://git-lfs.github.com/spec/v1\n"),
        ["damaged", "43 bytes"],
    ),
    "weights of a missing part": (keep_index_only, ["lacks 1 of 1 weight files", "model-1.safetensors"]),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("token*")], ["tokenizer", "complete"]),
    "tokenizer no JSON": (lambda folder: (folder / "tokenizer.json").write_text("{"), ["tokenizer"]),
    "tokenizer of another model": ({"vocab_size": 10}, ["gives the token id", "vocab_size", "10"]),
    "short positions": ({"max_position_embeddings": 8}, ["seq_len 32", "8 tokens"]),
}


@pytest.mark.parametrize(("change", "words"), BROKEN_MODELS.values(), ids=BROKEN_MODELS)
def test_broken_models_are_refused_before_weights_are_loaded(
    change: dict[str, Any] | Callable[[Path], object], words: list[str], refusal: Callable[..., str], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "broken", **(change if isinstance(change, dict) else {}))
    if callable(change):
        change(folder)
    sentence = refusal("--model", folder, "--search-space", "smoke", "--calibration", "embedded")
    assert [word for word in words if word not in sentence] == [], sentence


def test_a_file_is_no_model(refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("x")
    assert "model.bin is a file" in refusal("--model", tmp_path / "model.bin")


def test_models_must_be_distinct(refusal: Callable[..., str], plan_text: Callable[..., str], tmp_path: Path) -> None:
    more = ("--search-space", "smoke", "--calibration", "embedded", "--data-dir", data_folder(tmp_path / "data"))
    more += ("--tasks", "piqa", "--limit", "5")
    one, same_name = model_folder(tmp_path / "a" / "m"), model_folder(tmp_path / "b" / "m", rms_norm_eps=1e-5)
    copy = model_folder(tmp_path / "copy")
    assert "'m'" in refusal("--model", one, "--model", same_name, *more)
    assert "same model" in refusal("--model", one, "--model", copy, *more)
    assert "1 trials" not in plan_text("--model", one, "--model", one, *more)  # the same name twice is once
    (copy / "model.safetensors").write_bytes(b"")
    sentence = refusal("--model", one, "--model", copy, *more)
    assert sentence.startswith(f"error: --model {copy}: weight file")  # of several models the broken one is named


# A file of --data-dir, what is written there (None: the file is taken away), and what the sentence must hold.
BROKEN_DATA: dict[str, tuple[str, bytes | None, list[str]]] = {
    "task missing": ("tasks/boolq/test.jsonl", None, ["task files are missing", "boolq/test.jsonl", "--tasks"]),
    "bad line": ("tasks/boolq/test.jsonl", b'{"a": 1}\n{oops\n', ["boolq/test.jsonl, line 2", "not JSON"]),
    "no items": ("tasks/piqa/test.jsonl", b"\n", ["piqa/test.jsonl has no items"]),
    "items no text": ("tasks/piqa/test.jsonl", b"\xff\xfe", ["piqa/test.jsonl is not UTF-8"]),
    "bad definition": ("tasks/piqa/task.yaml", b"a: [", ["piqa/task.yaml is not valid YAML"]),
    "perplexity text missing": (TEXT_FILE, None, ["perplexity text", "is missing"]),
    "perplexity text empty": (TEXT_FILE, b" \n", ["perplexity text", "is empty"]),
    "perplexity text binary": (TEXT_FILE, b"\xff\xfe", ["perplexity text", "not UTF-8 (byte 0)"]),
}


@pytest.mark.parametrize(("file", "content", "words"), BROKEN_DATA.values(), ids=BROKEN_DATA)
def test_broken_data_is_refused(
    file: str, content: bytes | None, words: list[str], refusal: Callable[..., str], tmp_path: Path
) -> None:
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


def test_the_folder_that_experiments_share_must_be_writable_too(refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "artifacts").write_text("no folder")
    assert f"results cannot be written to {tmp_path}/kept/artifacts" in refusal(*TINY, "--storage-path", "kept")


def test_search_spaces_of_the_user(refusal: Callable[..., str], tmp_path: Path) -> None:
    space = tmp_path / "my.yaml"

    def sentence(text: str, *more: str) -> str:
        space.write_text(text)
        return refusal("--model", "tiny-llama", "--search-space", space, *more)

    assert "seq_len 100000" in sentence(SPACE.replace("[16]", "[100000]"))
    assert "enough for" in sentence(SPACE.replace("[8]", "[1000000]"))
    assert "is 0.2, but" in sentence(f"{SPACE}pruning_ratio: 0.3\n", "--pruning-ratio", "0.2")
    assert "the shape is uniform" in sentence(f"{SPACE}shape: uniform\n", "--align", "16")
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


def test_data_sets_without_a_network(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_commands_under_one_name(capfd: pytest.CaptureFixture[str]) -> None:
    main = tune_prune.__main__.main
    assert main(["search", *TINY, "--dry-run"]) == 0
    assert "dry run" in capfd.readouterr().out
    assert main(["--help"]) == 0
    assert "search" in capfd.readouterr().out
    for argv, words in (([], "no command"), (["serach"], "did you mean 'search'?"), (["search"], "--model")):
        assert main(argv) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err


@pytest.mark.slow
def test_libraries_add_no_lines_of_their_own(tmp_path: Path) -> None:
    """In a process of its own, where transformers would warn about this config before it fails."""
    folder = model_folder(tmp_path / "m", rope_parameters={"rope_type": "nope", "rope_theta": 10000.0})
    argv = ["--model", str(folder), "--search-space", "smoke", "--calibration", "embedded"]
    done = subprocess.run(
        [sys.executable, "-m", "tune_prune", "search", *argv], capture_output=True, text=True, env=_environment()
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(
        r"error: config.json of .* describes no model that can be built \(KeyError: 'nope'\).*\n", done.stderr
    )


def _environment() -> dict[str, str]:
    """This process's, with the package found from the temporary folder."""
    return os.environ | {"PYTHONPATH": str(Path(search.__file__).parents[2])}


def test_calibration_on_the_perplexity_text_is_refused(tmp_path, capsys):
    text = tmp_path / "copy.txt"
    text.write_text(embedded.perplexity_text() + "\n\n")  # layout does not make it another text
    assert search.main([*TINY, "--dry-run", "--calibration", str(text)]) == 2
    assert "is the text that perplexity is reported on" in capsys.readouterr().err


def test_unusable_mixtures(refusal: Callable[..., str], tmp_path: Path) -> None:
    copy, short, report = (tmp_path / f"{name}.txt" for name in ("copy", "short", "report"))
    copy.write_text(embedded.calibration_text() + "\n")
    short.write_text("too short")
    report.write_text(embedded.perplexity_text())
    assert f"{copy} is twice in embedded+{copy}, by two names" in refusal(*TINY, "--calibration", f"embedded+{copy}")
    assert f"{short}, of embedded+{short}: the" in refusal(*TINY, "--calibration", f"embedded+{short}")
    assert "that perplexity is reported on" in refusal(*TINY, "--calibration", f"embedded+{report}")
    assert "a mixture with an empty name" in refusal(*TINY, "--calibration", "embedded+")


def test_a_folder_too_deep_for_ray_is_one_sentence(tmp_path, monkeypatch, capfd):
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    monkeypatch.chdir(tmp_path)
    assert search.main([*TINY, "--limit", "2", "--storage-path", str(tmp_path / "results")]) == 2
    error = capfd.readouterr().err
    assert re.search(r"^error: Ray cannot start .* set RAY_TMPDIR to a short writable path", error, re.MULTILINE)
    assert "Traceback" not in error
