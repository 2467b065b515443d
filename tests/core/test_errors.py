"""A refusal of the file system or of a limit ends a command with one sentence; a defect keeps its traceback."""

from __future__ import annotations

import errno
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError, cause_in
from tune_prune.core.files import DamagedFile
from tune_prune.core.machine import TooLittleMemory

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
    """The process may write files of 1,000 bytes at most, as on a full disk."""
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


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (DamagedFile(Path("a.json"), "not valid JSON", "search again"), "a.json is not valid JSON; search again"),
        (TooLittleMemory("it needs 3 GiB", "; take a smaller model"), "it needs 3 GiB; take a smaller model"),
    ],
    ids=["DamagedFile", "TooLittleMemory"],
)
def test_an_error_comes_whole_from_another_process(error: UserError, sentence: str) -> None:
    """A worker of Ray or of a pool sends it."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), sentence, vars(error))
    assert str(error) == sentence


# What vllm bench latency of vLLM 0.32 prints on a model whose heads are too small, in parts.
VLLM = """(MainProcess pid=1) INFO 11-29 23:31:47 [model.py:2495] Downcasting torch.float32 to torch.bfloat16.
(MainProcess pid=1) WARNING 11-29 23:32:13 [base.py:380] ValueError: Tokenizer not available when `skip_tokenizer_init=True`
(Worker pid=2) ERROR 11-29 23:32:13 [multiproc_executor.py:1063] WorkerProc hit an exception.
(Worker pid=2) ERROR 11-29 23:32:13 [multiproc_executor.py:1063] RuntimeError: Unsupported CPU attention configuration: head_dim=8
(EngineCore pid=3) ERROR 11-29 23:32:13 [core.py:1512] RuntimeError: Worker failed with error 'Unsupported CPU attention', please
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
warnings.warn('resource_tracker: There appear to be %d '
"""
LLAMA_CPP = """llama_model_quantize: failed to quantize: unknown model architecture: 'deci'
main: failed to quantize model from 'in.gguf'
"""


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        (VLLM, "RuntimeError: Unsupported CPU attention configuration: head_dim=8"),
        (LLAMA_CPP, "llama_model_quantize: failed to quantize: unknown model architecture: 'deci'"),
        ("importlib.metadata.PackageNotFoundError: No package", "importlib.metadata.PackageNotFoundError: No package"),
        ("loading\nKilled\n", "Killed"),
        ("", "it said nothing"),
    ],
)
def test_the_cause_is_what_came_first(printed: str, cause: str) -> None:
    assert cause_in("", printed) == cause
