"""A search in this process: without Ray, past failed trials, and ended by Ctrl-C with what is finished kept."""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.search_folders import TINY
from tests.searches import start
from tune_prune.commands import search
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import Infeasible, NotFinite, UserError
from tune_prune.core.ledger import Ledger
from tune_prune.core.store import FolderStore
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import Trial
from tune_prune.tuning.work import TrialSpec

WHOLE_TEXT = True

PROTOCOL = EvaluationProtocol(tasks=("boolq",), limit=4, slices=(0.5, 1.0), perplexity_window=64)
RUN = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, PROTOCOL, 0, "float32")
CONFIGS = [PruningConfig("random", 16, 8, ratio) for ratio in (0.1, 0.2, 0.3)]


@pytest.fixture
def jobs(tmp_path: Path) -> list[TrialSpec]:
    context = TrialContext.open(RUN, tmp_path / "artifacts", device="cpu")
    return [TrialSpec(RUN, config, context.key(config)) for config in CONFIGS]


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Callable[[PruningConfig, BaseException], None]:
    """A function: from now on the trial of that configuration raises that after its first stage."""

    def arrange(config: PruningConfig, error: BaseException) -> None:
        original = Trial.stages

        def stages(self: Trial) -> Iterator[Any]:
            for report in original(self):
                yield report
                if self.config == config:
                    raise error

        monkeypatch.setattr(Trial, "stages", stages)

    return arrange


def test_a_trial_that_raises_is_a_record_and_the_next_one_runs(jobs, tmp_path, breaks, monkeypatch):
    breaks(CONFIGS[0], RuntimeError("no such kernel"))
    loaded = []
    original = TrialContext.open
    monkeypatch.setattr(TrialContext, "open", lambda *args, **more: loaded.append(args) or original(*args, **more))
    torch.set_num_threads(2)
    try:
        result = start(jobs, tmp_path / "search", inline=True, scheduler="race")
        assert torch.get_num_threads() == 2  # trials have as many as workers have, this process what it had
    finally:
        torch.set_num_threads(1)
    assert result.ran[0] in {spec.key for spec in jobs} and len(result.ran) == 3
    failed, *others = [result.records[spec.key] for spec in jobs]
    assert (failed.status, failed.reason) == ("failed", "RuntimeError: no such kernel")
    assert [record.status for record in others] == ["complete", "complete"]
    assert len(loaded) == 2  # once more after the failure, as in a fresh worker
    assert Ledger(FolderStore(tmp_path / "search")).records() == list(result.records.values())


def test_a_job_that_cannot_be_done_ends_the_search_in_its_own_words(jobs, tmp_path, breaks):
    impossible = [TrialSpec(RUN, PruningConfig("taylor", 16, 10**6), "0" * 16)]
    with pytest.raises(UserError) as refused:
        start(impossible, tmp_path / "search", inline=True)
    assert "1000000" in str(refused.value).replace(",", "")
    breaks(None, RuntimeError("no such kernel"))  # the baseline
    with pytest.raises(RuntimeError, match=r"^baseline of tiny-llama failed: no such kernel$") as error:
        start(jobs, tmp_path / "other", inline=True)
    assert str(error.value.__cause__) == "no such kernel"
    assert Ledger(FolderStore(tmp_path / "other")).records() == []


def command(folder: Path, space: str, *more: str) -> list[str]:
    """A search of that space in the experiment `folder`/one, in this process."""
    path = folder / "space.yaml"
    path.write_text(space)
    argv = [*TINY, "--search-space", str(path), "--tasks", "boolq", "--limit", "4", "--inline"]
    return [*argv, "--storage-path", str(folder), "--name", "one", *more]


SPACE = "search: grid\nmethod: random\nseq_len: 16\nnum_samples: [8]\npruning_ratio: [0.1, 0.2, 0.3]\n"


@pytest.mark.slow
def test_an_interrupted_search_keeps_what_is_finished_and_says_how_to_go_on(
    tmp_path, breaks, capfd, monkeypatch, run_without
):
    """The second start is a process in which Ray cannot be imported."""
    argv = command(tmp_path, SPACE)
    breaks(CONFIGS[1], KeyboardInterrupt())
    assert search.main(argv) == 130
    said = capfd.readouterr().err
    assert "finished trials are kept" in said and "--inline" in said and "Traceback" not in said
    (first,) = Ledger(FolderStore(tmp_path / "one")).records()
    assert first.status == "complete"

    code = "import sys\nfrom tune_prune.commands import search\ncode = search.main(sys.argv[1:])\n"
    told = run_without(("ray",), f"{code}assert 'ray' not in sys.modules\nsys.exit(code)", *argv)
    assert "; one after the other\n" in told and "(1 of 3 trials are done)" in " ".join(told.split())
    assert "[3/3] running 0, failed 0" in told
    records = Ledger(FolderStore(tmp_path / "one")).records()
    assert len(records) == 3 and first in records
    assert (tmp_path / "one" / "all_methods_results.csv").exists()
    lost = json.loads((tmp_path / "one" / "cost.json").read_text())["lost_work"]  # the interrupted trial had one stage
    assert (lost["attempts"], lost["stages"]) == (1, 1) and lost["seconds"] > 0


@pytest.mark.slow
def test_a_full_disk_ends_a_search_in_a_sentence_and_the_same_command_goes_on(tmp_path, capfd, monkeypatch):
    argv = command(tmp_path, SPACE)
    write = os.fsync

    def full(descriptor: int) -> None:
        if "/trials/" in os.readlink(f"/proc/self/fd/{descriptor}") and any(
            (tmp_path / "one" / "ledger").glob("*.json")
        ):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert search.main(argv) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: ") and "No space left on device); free some space" in err
    assert err.endswith(
        "finished trials are kept; to go on, run the same command again:\n  " + err.splitlines()[-1].strip() + "\n"
    )
    records = Ledger(FolderStore(tmp_path / "one")).records()
    assert [record.status for record in records] == ["complete"]
    monkeypatch.undo()
    assert search.main(argv) == 0
    assert "[3/3] running 0, failed 0" in capfd.readouterr().out


@pytest.mark.slow
def test_a_view_that_cannot_be_written_is_a_warning_and_the_others_are(tmp_path, capfd):
    """A folder in the place of the table."""
    table = tmp_path / "one" / "all_methods_results.csv"
    (table / "mine").mkdir(parents=True)
    assert search.main(command(tmp_path, SPACE.replace("[0.1, 0.2, 0.3]", "0.2"))) == 0
    out, err = capfd.readouterr()
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    said = f"warning: {table.name}: not written: {table} cannot be used (Is a directory); move that folder away"
    assert len(warnings) == 1 and warnings[0].startswith(said)
    for name in ("global_best_config.json", "method_comparison.json", "cost.json"):
        assert json.loads((tmp_path / "one" / name).read_text())
    assert all(f"\n{line} " in out for line in ("time", "results", "keep", "report"))


def test_a_search_ends_with_the_classes_of_its_failures(tmp_path, capfd, breaks):
    argv = command(tmp_path, SPACE)
    breaks(CONFIGS[0], Infeasible("too much"))
    breaks(CONFIGS[2], NotFinite("3 scores are not finite"))
    assert search.main(argv) == 0
    summary = capfd.readouterr().out.splitlines()[-3:]
    assert summary == [
        "failed       2 of 3 trials: 1 infeasible, 1 not finite; reasons are in all_methods_results.csv",
        f"             e.g. tiny-llama@0.1 {CONFIGS[0].name}: too much",
        f"try again    tune-prune search {shlex.join(argv)}",
    ]
