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

import huggingface_hub
import pytest

import tune_prune.__main__
from tests.search_folders import TINY, model_folder
from tune_prune.commands import search
from tune_prune.core.config import EvaluationProtocol, ModelRun
from tune_prune.data import checks

pytestmark = pytest.mark.usefixtures("nothing_created")

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
    assert main([]) == main(["--help"]) == 0
    assert (out := capfd.readouterr().out) == 2 * out[: len(out) // 2] and "\n  search    try " in out
    for argv, words in ((["serach"], "did you mean 'search'?"), (["search"], "--model")):
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


def test_a_folder_too_deep_for_ray_is_one_sentence(tmp_path, monkeypatch, capfd):
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    monkeypatch.chdir(tmp_path)
    assert search.main([*TINY, "--limit", "2", "--storage-path", str(tmp_path / "results")]) == 2
    error = capfd.readouterr().err
    assert re.search(r"^error: Ray cannot start .* set RAY_TMPDIR to a short writable path", error, re.MULTILINE)
    assert "Traceback" not in error
