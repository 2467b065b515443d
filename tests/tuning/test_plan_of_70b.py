"""The plan of a search on a model that no machine here could hold, from its config and the headers of its weights: 131 GiB of
bfloat16 in 24 GiB."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hollow_models import hollow_model, in_gib
from tests.search_folders import data_folder
from tune_prune.commands import search

STAGES = ("importance", "removal", "pruning", "kl", "perplexity", "zero-shot")


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A search on a config of Llama-3-70B's shape, on a machine of which 24 GiB are free, with room in a folder for more."""
    folder = hollow_model(tmp_path / "llama-70b", "llama-3-70b", 24, monkeypatch)
    space = tmp_path / "space.yaml"
    space.write_text("search: grid\nmethod: layerwise\nseq_len: 128\nnum_samples: 64\n")
    monkeypatch.chdir(tmp_path)
    return (
        "--model", str(folder), "--search-space", str(space), "--data-dir", str(data_folder(tmp_path / "data")), "--calibration",
        "embedded", "--tasks", "boolq", "--limit", "2", "--inline", "--dtype", "bfloat16", "--gpus-per-trial", "0",
    )  # fmt: skip


def test_it_is_streamed_and_every_stage_says_its_peak(argv: tuple[str, ...], plan_text: Callable[..., str]) -> None:
    out = plan_text(*argv, "--memory", "24GiB")
    rows = re.findall(rf"^({'|'.join(STAGES)}) +\d.*? ([\d.]+ [MG]iB)  +(.+)$", out, re.MULTILINE)
    assert [stage for stage, _, _ in rows] == list(STAGES)
    assert all(way.startswith("streamed") for _, _, way in rows), out
    peaks = [in_gib(peak) for _, peak, _ in rows]
    # Two layers of 1.6 GiB are there, and of 132 GiB of weights never more than a fifth of that.
    assert min(peaks) > 3.2 and max(peaks) < 24
    trial = re.search(r"([\d.]+ GiB) a trial: the process .*, weights stay on disk most in stage \S+: ", out)
    assert trial and in_gib(trial[1]) == max(peaks)
    assert not re.search(r"\bresident\b", out.partition("\nstage ")[2])


def test_what_the_host_does_not_hold_waits_in_a_file(argv: tuple[str, ...], plan_text: Callable[..., str]) -> None:
    """Nothing of it is planned into host memory, which is what is computed in; a smaller bound changes the way, not the stages."""
    free = plan_text(*argv)  # 24 GiB are free, none are named
    least = plan_text(*argv, "--memory", "19GiB")
    for out in (free, least):
        assert "states in host memory" not in out and "in main memory" not in out
        assert "streamed" in out


def test_less_than_its_leanest_way_is_a_sentence(argv: tuple[str, ...], refused: Callable[..., str]) -> None:
    sentence = refused(search.main, *argv, "--memory", "4GiB", "--dry-run")
    assert re.search(
        r"--memory is 4(\.0)? GiB, but a trial of llama-70b needs [\d.]+ GiB in its leanest way \(streamed", sentence
    )
