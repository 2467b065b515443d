"""What a file system or a limit refuses ends a command with one sentence; a defect keeps its traceback."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile
from tune_prune.core.machine import TooLittleMemory
from tune_prune.core.store import FolderStore

SMALL_FILES = """
import resource, sys, traceback
from tune_prune.core.ending import exit_code
from tune_prune.core.store import FolderStore

def main():
    try:
        FolderStore(sys.argv[1]).put("ledger/0f.json", "x" * 5000)
    except OSError:
        raise RuntimeError(traceback.format_exc())  # as Ray does

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
sys.exit(exit_code(main))
"""


def test_a_file_that_may_not_be_written_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """In a process that may write files of 1,000 bytes at most, as a full disk would have it."""
    done = subprocess.run([sys.executable, "-c", SMALL_FILES, str(tmp_path)], capture_output=True, text=True)
    name = tmp_path / "ledger" / "0f.json"
    assert done.stderr == (
        f"error: {name} cannot be used (File too large); raise the limit on the size of files (ulimit -f), then run the same "
        "command again\n"
    )
    assert done.returncode == 1 and list((tmp_path / "ledger").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        *(
            (errno.ENOSPC, "free some space"),
            (errno.EACCES, "its owner"),
            (errno.EROFS, "written"),
            (errno.EMFILE, "-n"),
        ),
        (errno.EISDIR, "move that folder away"),
        *((number, "the mount") for number in (errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENOLCK, errno.ETIMEDOUT)),
    ],
)
def test_what_is_refused_says_what_to_do(number: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise OSError(number, "no", "/some/file")

    assert exit_code(main) == (2 if number == errno.EISDIR else 1)
    said = capsys.readouterr().err
    assert said.startswith("error: /some/file cannot be used (no); ") and words in said and said.count("\n") == 1


def test_a_full_disk_below_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names no file, so nobody knows the free space."""

    def main() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert exit_code(main) == 1
    assert capsys.readouterr().err.startswith("error: a file, or where the output goes, cannot be used (No space left")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "no", "/x"),
        ZeroDivisionError(),
        OSError("odd"),
        TimeoutError(errno.ETIMEDOUT, "of a network"),
    ],
)
def test_a_defect_keeps_its_traceback(error: Exception) -> None:
    def main() -> None:
        raise error

    with pytest.raises(type(error)):
        exit_code(main)


def test_a_folder_that_cannot_be_synced_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", sync)
    assert exit_code(lambda: FolderStore(tmp_path).put("a", "b")) == 1
    assert f"error: {tmp_path} cannot be used (Input/output error); look at" in capsys.readouterr().err


def test_open_files_run_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def main() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            FolderStore(tmp_path).put("a", "b")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert exit_code(main) == 1
    assert f"{tmp_path}/a cannot be used (Too many open files)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (DamagedFile(Path("a.json"), "not valid JSON", "search again"), "a.json is not valid JSON; search again"),
        (TooLittleMemory("it needs 3 GiB", "; take a smaller model"), "it needs 3 GiB; take a smaller model"),
    ],
    ids=["DamagedFile", "TooLittleMemory"],
)
def test_an_error_comes_whole_from_another_process(error: UserError, sentence: str) -> None:
    """As from a worker of Ray or of a pool."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), sentence, vars(error))
    assert str(error) == sentence
