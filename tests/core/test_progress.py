"""Progress bars: nothing is drawn where nobody asked or nobody sees it, and every step of the program ends when its bar is full."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import tqdm

from tune_prune.commands import evaluate, search
from tune_prune.core import terminal as progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal() -> contextlib.redirect_stderr[Terminal]:
    """Stand in for standard error; no fixture, as pytest puts its own there after them."""
    return contextlib.redirect_stderr(Terminal())


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every bar that is drawn from now on."""
    drawn: list[Any] = []

    class Bar(tqdm.tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if options.get("bar_format"):  # lm-eval and others draw some, too, to where nobody looks
                drawn.append(self)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    return drawn


def steps(*amounts: int) -> None:
    with progress.step("walking", lambda: 10, "metres", lambda: 3) as advance:
        for amount in amounts:
            advance(amount)


def test_a_bar_says_what_is_done_and_goes() -> None:
    with terminal() as screen, progress.shown():
        steps(2, 5)
    first, *_, last = (line for line in screen.getvalue().split("\r") if line)
    assert first.startswith("walking ") and "30%" in first and "3.00 of 10.0 metres" in first
    assert last.isspace()  # wiped


def test_nothing_is_drawn_unasked_or_unseen(capfd: pytest.CaptureFixture[str]) -> None:
    with terminal() as screen:
        steps(2, 5)
    assert screen.getvalue() == ""
    with progress.shown():  # the captured standard error is no terminal
        steps(2, 5)
    assert capfd.readouterr() == ("", "")


def test_what_is_waited_for_stands_on_the_line_and_goes() -> None:
    with terminal() as screen, progress.shown(after_s=3600), progress.waiting("starting: something ..."):
        assert screen.getvalue().endswith("\rstarting: something ...\r")
    assert screen.getvalue().split("\r")[-3:] == [" " * len("starting: something ..."), "", ""]
    with terminal() as screen, progress.waiting("starting: something ..."):
        assert screen.getvalue() == ""


def test_a_short_step_is_not_drawn_where_only_long_ones_are() -> None:
    with terminal() as screen, progress.shown(after_s=3600):
        steps(2, 5)
    assert screen.getvalue() == ""


def test_every_step_of_an_evaluation_fills_its_bar(bars: list[Any], tmp_path: Path) -> None:
    argv = ["--model", "tiny-llama", "--limit", "4", "--tasks", "boolq,piqa", "--device", "cpu"]
    with terminal():
        assert evaluate.main(argv) == 0
    assert list(dict.fromkeys(bar.desc for bar in bars)) == ["weights", "tasks", "perplexity", "zero-shot"]
    slices = [bar for bar in bars if bar.desc == "zero-shot"]
    assert len({bar.total for bar in slices}) == 1 and slices[0].initial == 0 and slices[-1].n == slices[-1].total
    assert [bar.initial for bar in slices[1:]] == [bar.n for bar in slices[:-1]]  # one goes on where the last one ended
    assert all(bar.n == bar.total for bar in bars if bar.desc != "zero-shot")


def test_the_stages_of_a_search_in_this_process_fill_their_bars(bars, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "_BESIDE_THE_LINE_S", 0.0)
    (tmp_path / "space.yaml").write_text("search: grid\nmethod: blockwise\nseq_len: 16\nnum_samples: 8\n")
    tiny = ["--model", "tiny-llama", "--tasks", "boolq", "--limit", "4", "--inline"]
    with terminal() as screen, contextlib.redirect_stdout(screen):  # as on a screen, where both are
        assert (
            search.main([*tiny, "--search-space", str(tmp_path / "space.yaml"), "--storage-path", str(tmp_path)]) == 0
        )
    stages = {"weights", "perplexity", "tasks", "zero-shot", "gradients", "removals"}
    assert stages <= {bar.desc for bar in bars} and all(bar.n == bar.total for bar in bars if bar.desc != "zero-shot")
    lines = screen.getvalue().split("\n")
    assert any(line.rpartition("\r")[2].startswith("[1/1] running 0, failed 0, best accuracy ") for line in lines)
    for seen in (part for line in lines for part in line.split("\r")):  # a bar or another text, not some of both
        assert ("ETA" in seen and "|" in seen) + ("running" in seen) + ("[prepare" in seen) < 2, seen
