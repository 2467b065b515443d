"""A whole search as others follow it: every line of `--log-json`, and its status afterwards."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tune_prune.commands import search, status
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.ledger import Ledger, write_about
from tune_prune.core.store import EXPERIMENT, FolderStore
from tune_prune.trial.trial import Trial


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    """The folder of a search with --log-json, its events, and what it has written to standard error."""
    folder = tmp_path_factory.mktemp("followed")
    argv = ["--model", "tiny-llama", "--search-space", "control", "--limit", "5", "--inline", "--log-json"]
    with pytest.MonkeyPatch.context() as patch:
        out, err = _Stream(), _Stream()
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        patch.setenv("HF_TOKEN", "hf_secret123")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "aws_secret123")
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        for place, name in ((socket, "getaddrinfo"), (socket.socket, "connect"), (socket.socket, "sendto")):
            patch.setattr(place, name, lambda *arguments, **_: asked.append(arguments))
        assert search.main([*argv, "--storage-path", str(folder), "--name", "followed"]) == 0
    return folder / "followed", [json.loads(line) for line in out.text.splitlines()], err.text


asked: list[Any] = []  # over the network


class _Stream:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


def test_every_line_of_the_log_is_an_event(followed: tuple[Path, list[dict[str, Any]], str]) -> None:
    folder, events, text = followed
    names = [event["event"] for event in events]
    assert names[:2] == ["start", "plan"] and names[-2:] == ["trial_end", "end"]
    assert names.count("job_start") == names.count("job_end") == 1  # the baseline
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert events[1]["trials"] == {"tiny-llama": 1} and events[1]["recorded"] == 0
    (record,) = Ledger(FolderStore(folder)).records()
    stages = [event for event in events if event["event"] == "stage"]
    assert [stage["stage"] for stage in stages] == [stage.stage for stage in record.stages]
    ended = events[-2]
    assert (ended["key"], ended["status"], ended["failure"]) == (record.key, "complete", "")
    assert ended["metrics"] == record.metrics and events[-1]["trials"] == {"complete": 1}
    (best,) = events[-1]["best"]
    assert best["method"] == "random" and "nan" not in (best[name] for name in HYPERPARAMETERS)
    assert best["damping"] is best["recovery_rate"] is best["refit_tokens"] is None  # of none of which it has a use
    assert "[1/1] running 0" in text and "\r" not in text


def test_no_secret_is_written(followed: tuple[Path, list[dict[str, Any]], str]) -> None:
    folder, events, text = followed
    files = [path for path in folder.parent.rglob("*") if path.is_file()]
    assert len(files) > 20 and not [path for path in files if b"secret123" in path.read_bytes()]
    assert "secret123" not in f"{events}{text}"


def test_nothing_is_asked_over_the_network(followed: tuple[Path, list[dict[str, Any]], str]) -> None:
    """An embedded model needs nothing of it."""
    assert followed and asked == []
    with pytest.raises(OSError):  # noqa: PT011  # the real one: what has been recorded is what is called
        socket.create_connection(("127.0.0.1", 1), timeout=1)


def test_a_search_that_cannot_start_is_a_failure_in_the_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--model", "tiny-llama", "--inline", "--log-json", "--storage-path", str(tmp_path), "--name", "a/b"]
    assert search.main(argv) == 2
    output = capsys.readouterr()
    start, failure = map(json.loads, output.out.splitlines())
    assert start["event"] == "start" and failure["event"] == "failure"
    assert failure["reason"] and failure["reason"] in output.err


def test_records_of_another_search_are_named_and_left_out(followed, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(followed[0], folder)
    about = json.loads((folder / EXPERIMENT).read_text())
    about["models"]["tiny-llama"]["run"]["seed"] += 1
    write_about(FolderStore(folder), {name: value for name, value in about.items() if name != "checksum"})
    found = status.read(FolderStore(folder))
    assert found["trials"]["done"] == 0 and found["models"] == {}
    assert len(found["damaged"]) == 2 and all("of another search: its key would be" in it for it in found["damaged"])


def troubled(monkeypatch: pytest.MonkeyPatch, troubles: dict[str, BaseException]) -> None:
    """From now on the trials of these methods raise that after their first stage."""
    original = Trial.stages

    def stages(self: Trial) -> Iterator[Any]:
        for report in original(self):
            yield report
            if self.config is not None and self.config.method in troubles:
                raise troubles[self.config.method]

    monkeypatch.setattr(Trial, "stages", stages)


def test_a_log_of_failures_and_an_interrupt(tmp_path, monkeypatch, capsys):
    """Every line is an object, also of what went wrong; nothing acts on a terminal; the same command goes on."""
    red = "too \x1b[31m\x9b31mred ü\nand a second line"
    troubles: dict[str, BaseException] = {"magnitude": RuntimeError(red), "taylor": KeyboardInterrupt()}
    troubled(monkeypatch, troubles)
    (tmp_path / "space.yaml").write_text(
        "search: grid\nmethod: [random, magnitude, taylor]\nseq_len: 16\nnum_samples: 8\n"
    )
    argv = ["--model", "tiny-llama", "--search-space", str(tmp_path / "space.yaml"), "--limit", "2", "--tasks", "boolq"]
    argv += ["--perplexity-tokens", "300", "--inline", "--log-json", "--storage-path", str(tmp_path), "--name", "one"]
    assert search.main(argv) == 130
    output = capsys.readouterr()
    events = [json.loads(line) for line in output.out.splitlines()]
    ends = {event["status"]: event for event in events if event["event"] == "trial_end"}
    assert (ends["failed"]["failure"], ends["failed"]["name"]) == ("error", "magnitude-s16-n8")
    assert (
        ends["failed"]["reason"] == "RuntimeError: too \x1b[31m\x9b31mred ü\nand a second line"
        and ends["complete"]["metrics"]
    )
    assert events[-1] | {"event": "failure", "error": "KeyboardInterrupt", "reason": "interrupted"} == events[-1]
    assert "interrupted: finished trials are kept; to go on, run the same command again" in output.err
    shown = output.out + output.err
    assert not [letter for letter in shown if not (letter.isprintable() or letter == "\n")]

    assert search.main(["--status", str(tmp_path / "one")]) == 0
    said = capsys.readouterr().out
    assert "by an interrupt or an error, process" in said and "trials       2 of 3 done: 1 complete, 1 failed" in said
    assert (
        "failed       other error: 1, the latest tiny-llama magnitude-s16-n8 on " in said
        and "\\x1b[31m\\x9b31mred ü and a" in said
    )

    troubles.clear()
    assert search.main(argv) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["recorded"] for event in events if event["event"] == "plan"] == [1]
    assert events[-1]["trials"] == {"complete": 3}
