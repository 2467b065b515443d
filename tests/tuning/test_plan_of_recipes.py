"""The plan of a search with a refit and a training at the shape of Mistral-7B, from its config and the headers of its weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hollow_models import GIB, hollow_model, in_gib
from tests.search_folders import data_folder

PRODUCTS = 4 * (4096**2 + 14_336**2) / GIB  # of a layer's inputs of o, and of down, in float32


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, ...]]:
    """A function (tokens of a refit) -> a search on that shape with both, on a machine with memory for it in any way."""
    folder = hollow_model(tmp_path / "mistral-7b", "mistral-7b", 190, monkeypatch)
    data = data_folder(tmp_path / "data")
    monkeypatch.chdir(tmp_path)

    def of(refit_tokens: int) -> tuple[str, ...]:
        space = tmp_path / f"space-{refit_tokens}.yaml"
        space.write_text(
            "search: grid\nmethod: taylor\nseq_len: 128\nnum_samples: 64\ncompensation: [least_squares]\nrecovery: [lora]\n"
            f"refit_tokens: {refit_tokens}\nrecovery_steps: 10\n"
        )
        return (
            "--model", str(folder), "--search-space", str(space), "--data-dir", str(data), "--calibration", "embedded",
            "--tasks", "boolq", "--limit", "2", "--inline", "--dtype", "bfloat16", "--gpus-per-trial", "0",
        )  # fmt: skip

    return of


def stages_of(plan: str) -> dict[str, tuple[int, float, float, str]]:
    """Of the refit and the training in a printed plan: tokens, seconds, GiB at its peak, and the way."""
    rows = re.findall(
        r"^(refit|recovery) +1 +([\d,]+) +\S+ +(?:(\d+)m)?([\d.]+)s +([\d.]+ [MG]iB)  +(.+)$", plan, re.MULTILINE
    )
    return {
        stage: (int(tokens.replace(",", "")), 60 * int(minutes or 0) + float(seconds), in_gib(peak), way)
        for stage, tokens, minutes, seconds, peak, way in rows
    }


@pytest.mark.parametrize(
    ("memory", "weights", "ways"),
    [
        ("12GiB", 0.0, {"refit": "streamed", "recovery": "streamed"}),
        ("36GiB", 13.5, {"refit": "resident", "recovery": "by layer"}),  # a refit needs no gradients
    ],
    ids=["streamed", "by layer"],
)
def test_a_refit_and_a_training_say_their_seconds_and_memory(
    argv: Callable[..., tuple[str, ...]],
    plan_text: Callable[..., str],
    memory: str,
    weights: float,
    ways: dict[str, str],
) -> None:
    less, more = (stages_of(plan_text(*argv(tokens), "--memory", memory)) for tokens in (4096, 16_384))
    for found, tokens in ((less, 4096), (more, 16_384)):
        assert {stage: way for stage, (*_, way) in found.items()} == ways
        # 56 samples of 128 tokens, of which 16 are held out and run before and after, and 10 steps of 4.
        assert found["refit"][0] == tokens and found["recovery"][0] == 128 * (56 + 2 * 16 + 10 * 4)
        assert weights + PRODUCTS < found["refit"][2] < float(memory.removesuffix("GiB"))
        assert weights < found["recovery"][2] < float(memory.removesuffix("GiB"))
        assert min(seconds for _, seconds, *_ in found.values()) > 0
    assert less["refit"][1] < more["refit"][1] < 4 * less["refit"][1]  # what is solved does not grow with the tokens
    assert less["refit"][2] < more["refit"][2]  # held-out inputs do
    assert less["recovery"] == more["recovery"]
    if ways["recovery"] == "streamed":  # every step reads 13.5 GiB twice, at 1 GB a second
        assert more["recovery"][1] > 10 * 2 * 14.4
