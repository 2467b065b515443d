"""How commands end by signals, and what becomes of temporary folders, in processes of their own."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tune_prune.core import ending, temporary

COMMAND = """
import sys, time
from tune_prune.core import ending, temporary
ending.PATIENCE_S = float(sys.argv[2])

def main():
    with ending.advised("to go on, run it again"), temporary.folder() as folder:
        (folder / "file").touch()
        try:
            print(folder, flush=True)
            time.sleep(60)
        finally:
            if sys.argv[1] == "hangs":
                time.sleep(60)

sys.exit(ending.exit_code(main))
"""


def _hear() -> None:
    """Tests that run in the background ignore the one, those under nohup the other."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def started(tmp_path: Path, how: str = "ends", patience_s: float = 10) -> tuple[subprocess.Popen, Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, how, str(patience_s)],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "its terminal went away"),
    ],
)
def test_a_signal_ends_a_command_with_its_code_and_what_to_do(number, code, word, tmp_path):
    process, folder = started(tmp_path)
    assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700
    process.send_signal(number)
    said = process.communicate(timeout=20)[1]
    assert (process.returncode, said) == (code, f"\n{word}: to go on, run it again\n")
    assert list(tmp_path.iterdir()) == []


def test_commands_leave_no_file_open():
    before = sorted(os.listdir("/proc/self/fd"))
    assert [ending.exit_code(lambda: None) for _ in range(50)] == [0] * 50
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_second_signal_changes_nothing_and_what_hangs_is_ended(tmp_path):
    process, _ = started(tmp_path, "hangs", 0.5)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.05)
    said = process.communicate(timeout=20)[1]
    assert (process.returncode, said) == (143, "\nterminated: to go on, run it again\n")
    assert list(tmp_path.iterdir()) == []


def test_only_a_folder_that_nobody_holds_is_abandoned(tmp_path, monkeypatch):
    process, folder = started(tmp_path)
    mine = temporary.make(str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{temporary.PREFIX}link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"{temporary.PREFIX}file").touch()
    temporary.sweep(str(tmp_path))
    assert folder.exists()
    process.kill()
    process.communicate()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        temporary.sweep(str(tmp_path))
        assert folder.exists()  # another user's
    temporary.sweep(str(tmp_path))
    assert not folder.exists() and mine.exists()
    temporary.remove(mine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "tune_prune.file", "tune_prune.link"]


@pytest.mark.parametrize(
    ("advice", "said"), [("", ""), ("run it again", "what read the output has ended: run it again\n")]
)
def test_output_that_nobody_reads_any_more_is_no_traceback(advice: str, said: str) -> None:
    program = (
        "import sys, time\nfrom tune_prune.core import ending\n"
        "def main():\n    for _ in range(10_000):\n        print('a line of output', flush=True)\n"
        f"sys.exit(ending.exit_code(main, {advice!r}))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "a line of output\n"
    process.stdout.close()
    assert (process.stderr.read(), process.wait(30)) == (said, 128 + signal.SIGPIPE)


def test_a_letter_that_the_terminal_lacks_is_spelt_out() -> None:
    program = "from tune_prune.core import ending\nending.exit_code(lambda: print('.88 \\u00b1 .01\\u2026'))\n"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (".88 \\xb1 .01\\u2026\n", "")
