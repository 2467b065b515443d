"""Places and values that are not what they look like, through every command: links that lead nowhere, devices, addresses with a
slash too few, names that are no text, numbers beyond all sizes. One sentence each, and nothing is written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from tests.search_folders import TINY, data_folder, model_folder
from tests.trials import RUN
from tune_prune import embedded
from tune_prune.commands import analysis, prune, search
from tune_prune.core.ending import exit_code

pytestmark = pytest.mark.usefixtures("nothing_created")

ROW = {"model": "m", "method": "taylor", "seq_len": 16, "num_samples": 4, "acc_mean": 0.5, "output_dir": "x"}


def test_links_that_lead_nowhere(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "not there")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for link in ("gone", "loop"):
        sentence = refused(search.main, *TINY, "--storage-path", f"{link}/below", "--dry-run")
        assert f"{tmp_path}/{link} is a link that leads nowhere" in sentence and "--storage-path" in sentence
        assert "cannot be read as a CSV file" in refused(analysis.main, "--csv", f"M={link}")
        assert "which is not in ray_results" in refused(search.main, "--status", f"./{link}")
    text = data_folder(tmp_path / "data") / "text"
    (text / "a.train.txt").symlink_to(text / "a.train.txt")
    folder = model_folder(tmp_path / "m")
    sentence = refused(
        search.main, "--model", folder, "--search-space", "smoke", "--data-dir", text.parent, "--dry-run"
    )
    assert "no calibration text" in sentence


def test_names_of_files_do_not_act_on_a_terminal(plan_text: Callable[..., str], tmp_path: Path) -> None:
    """Of those that nobody has named: the calibration text that lies in the data."""
    data, folder = data_folder(tmp_path / "data"), model_folder(tmp_path / "m")
    (data / "text" / "a\x1b[2Jtrain.txt").write_text(embedded.calibration_text())
    shown = plan_text(
        "--model", folder, "--search-space", "smoke", "--data-dir", data, "--limit", "2", "--tasks", "boolq"
    )
    assert "\x1b" not in shown and r"a\x1b[2Jtrain.txt" in shown


def csv_file(folder: Path, *rows: dict) -> str:
    pd.DataFrame(rows).to_csv(folder / "results.csv", index=False)
    return f"m={folder / 'results.csv'}"


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("num_samples", 1e300, "is not a whole number of up to 9,007,199,254,740,992"),
        ("params_count", 1e308, "is not a whole number"),
        ("ppl", 1e308, "is beyond 1e+100"),
        ("elapsed_time", -1e308, "is beyond 1e+100"),
    ],
)
def test_numbers_beyond_all_sizes(
    column: str, value: float, says: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    sentence = refused(analysis.main, "--csv", csv_file(tmp_path, ROW | {column: value}), "--output", tmp_path / "out")
    assert f"line 2, column {column}: " in sentence and says in sentence and not (tmp_path / "out").exists()


def test_a_results_file_that_names_an_address_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = csv_file(tmp_path, ROW | {"output_dir": "s3:/b/x"}, ROW | {"seq_len": 32, "output_dir": "file:/etc"})
    assert analysis.main(["--csv", where, "--export-study", str(tmp_path / "study.db")]) == 0
    assert "m: 2 trials" in capsys.readouterr().out


# What a study cannot hold of a row.
TIMES = {
    "no time": {"started_at": "soon"},
    "an endless trial": {"started_at": "2026-05-01T12:00:00+00:00", "elapsed_time": 1e99},
    "before all times": {"started_at": "0001-01-01T00:00:00+00:00"},
}


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_a_study_of_no_times(times: dict, refused: Callable[..., str], tmp_path: Path) -> None:
    where = csv_file(tmp_path, ROW | times)
    sentence = refused(analysis.main, "--csv", where, "--export-study", tmp_path / "study.db")
    assert "which are no times; correct its results file" in sentence and times["started_at"] in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_a_stopped_trial_of_a_published_file_in_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = {"seq_len": 32, "key": "k", "status": "stopped_early", "success": False}
    where = csv_file(tmp_path, ROW | {"key": "a", "status": "complete", "success": True}, ROW | stopped)
    assert analysis.main(["--csv", where, "--export-study", str(tmp_path / "study.db")]) == 0
    assert "m: 2 trials" in capsys.readouterr().out


def test_only_a_study_is_replaced_by_a_study(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_text("{}")
    argv = ("--csv", csv_file(tmp_path, ROW), "--export-study", tmp_path / "experiment.json", "--overwrite")
    assert "is no SQLite file, and only such a file is replaced" in refused(analysis.main, *argv)
    assert (tmp_path / "experiment.json").read_text() == "{}"


RECORDED = {
    "tasks a number": ({"tasks": 3}, "does not name a configuration"),
    "a task a number": ({"tasks": {"boolq": 1}}, "does not name a configuration"),
    "an accuracy a text": ({"acc_mean": "high"}, "'high' is not a number"),
    "a baseline a number": ({"baseline": 3}, "does not name a configuration"),
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


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_that_nobody_reads(flag: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    root = str(Path(search.__file__).parents[1])
    command = [sys.executable, "-m", "tune_prune", flag]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root})
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_full_disk_below_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    """Of which no file's name is known, and so no free space."""

    def main() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert exit_code(main) == 1
    said = capfd.readouterr().err
    assert said.startswith(
        "error: a file, or where the output goes, cannot be used (No space left on device); free some"
    )


@pytest.mark.slow
def test_a_plan_leaves_nothing_among_the_temporary_files(tmp_path: Path) -> None:
    """Neither does torch, which makes a folder there as it is imported."""
    command = [sys.executable, "-m", "tune_prune.search", *map(str, TINY), "--dry-run"]
    variables = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    run = subprocess.run(
        command, env=variables | {"TMPDIR": str(temporary)}, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert list(temporary.iterdir()) == []
