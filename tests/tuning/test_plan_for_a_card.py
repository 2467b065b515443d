"""Plans for a GPU that this machine does not have: `--dry-run --gpu`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hollow_models import GIB, hollow_model, in_gib
from tests.search_folders import data_folder
from tune_prune.commands import search
from tune_prune.tuning import plan_cost
from tune_prune.tuning.gpus import CARDS, parse_card

COSTS = (Path(__file__).parents[2] / "docs" / "costs.md").read_text(encoding="utf-8")
TINY = ("--model", "tiny-llama", "--search-space", "smoke")


@pytest.fixture
def mistral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A search on a model of Mistral-7B's shape, on a machine with 2 GiB, where no GPU is looked for and nothing measured."""
    folder = hollow_model(tmp_path / "mistral-7b", "mistral-7b", 2, monkeypatch)
    monkeypatch.delattr(plan_cost, "measure")
    monkeypatch.delattr("tune_prune.tuning.gpus.call")
    monkeypatch.chdir(tmp_path)
    data = str(data_folder(tmp_path / "data"))
    return ("--model", str(folder), "--data-dir", data, "--calibration", "embedded", "--tasks", "boolq", "--limit", "2")


def seconds(text: str) -> float:
    return sum(
        int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)(?:\.\d)?([hms])", text)
    )


def test_the_way_and_the_time_are_those_of_the_card(mistral: tuple[str, ...], plan_text: Callable[..., str]) -> None:
    """As in docs/costs.md: copies whole on 24 GB, two trials on 141 GB. What waits in host memory is said, and not bounded."""
    small, large = plan_text(*mistral, "--gpu", "RTX 4090"), plan_text(*mistral, "--gpu", "h200")
    assert "planned for 1 x RTX 4090 (23.6 GiB), not for this machine; a trial takes 4 CPU, 1 GPU" in small
    assert "; 1 at once;" in small
    held = re.search(
        r"weights read from disk while it works, (\S+ GiB) more in main memory, pruned copies whole", small
    )
    assert held and in_gib(held[1]) > 30
    assert "a trial takes 4 CPU, 0.5 GPU and about 56.4 GiB; 2 at once;" in large and "pruned copies" not in large
    cost = [re.search(r"about (\S+) to \S+ on .* at 40% of (\d+) TFLOP/s", out) for out in (small, large)]
    assert cost[0] and cost[1] and (cost[0][2], cost[1][2]) == ("165", "989")
    passes = [re.search(r"^removal .*e\+\d+ +(\S+)", out, re.MULTILINE) for out in (small, large)]
    assert passes[0] and passes[1]
    # Twice as many trials share the H200, so that each takes twice as long there; on the RTX 4090 weights are read, too.
    assert seconds(passes[0][1]) > 165 / 989 * seconds(passes[1][1])


def test_ten_lines_say_whether_it_fits_and_how_long(mistral: tuple[str, ...], plan_text: Callable[..., str]) -> None:
    out = plan_text(*mistral, "--gpu", "RTX 4090", verbose=False)
    fits = re.search(r"^memory +(\S+) GiB of 23.6 GiB: fits, weights read from disk while it works, ", out, re.M)
    assert fits and float(fits[1]) < 23.6 and " GiB more in main memory\n" in out
    assert re.search(r"^time +\S+ to \S+ \(\S+ GPU-hours\); computed for 1 x RTX 4090, not measured$", out, re.M)
    assert "shape        aligned-256: fast on a GPU" in out
    assert "\ntime         not known: how fast such a GPU is" in plan_text(*mistral, "--gpu", "24GB", verbose=False)


def test_a_plan_for_a_card_needs_no_weights(
    mistral: tuple[str, ...], plan_text: Callable[..., str], refusal: Callable[..., str]
) -> None:
    """A folder with config and tokenizer, with an index beside them or not, has the plan of the whole model."""
    folder = Path(mistral[1])
    whole = plan_text(*mistral, "--gpu", "RTX 4090")
    for path in folder.glob("model-*.safetensors"):
        path.unlink()
    assert plan_text(*mistral, "--gpu", "RTX 4090") == whole
    assert re.search(r"lacks (\d+) of \1 weight files", refusal(*mistral))
    (folder / "model.safetensors.index.json").unlink()
    assert plan_text(*mistral, "--gpu", "RTX 4090") == whole
    assert "has no weights" in refusal(*mistral)


def test_several_gpus_run_as_many_trials_or_hold_one_together(
    mistral: tuple[str, ...], plan_text: Callable[..., str]
) -> None:
    assert "planned for 2 x A100 40GB (39.3 GiB each)" in (each := plan_text(*mistral, "--gpu", "2xa100-40gb"))
    assert "a trial takes 4 CPU, 1 GPU" in each and "; 2 at once;" in each
    together = plan_text(*mistral, "--gpu", "2 x A100 40GB", "--gpus-per-trial", "2")
    assert "2 GPU and about" in together and "of each; 1 at once;" in together


def test_there_are_cpus_for_all_trials_that_a_card_holds(plan_text: Callable[..., str]) -> None:
    assert "takes 32 CPU, 0.25 GPU" in (out := plan_text(*TINY, "--gpu", "4090", "--cpus-per-trial", "32"))
    assert "; 4 at once;" in out


def test_a_size_alone_says_nothing_of_time(mistral: tuple[str, ...], plan_text: Callable[..., str]) -> None:
    out = plan_text(*mistral, "--gpu", "24GB")
    assert "planned for 1 x GPU (22.4 GiB)" in out and "pruned copies whole" in out
    assert "not predicted: how fast such a GPU is in bfloat16 is not known; name its kind, e.g. --gpu 4090" in out
    assert re.search(r"^removal +- +- +- +- +[\d.]+ GiB", out, re.MULTILINE)


def test_a_card_without_bfloat16_computes_in_float32(plan_text: Callable[..., str]) -> None:
    assert re.search(r"^tiny-llama .* float32$", out := plan_text(*TINY, "--gpu", "t4"), re.MULTILINE)
    assert "at 40% of 8.1 TFLOP/s" in out
    out = plan_text(*TINY, "--gpu", "t4", "--dtype", "bfloat16")
    assert "how fast such a GPU is in bfloat16 is not known; leave out --dtype" in out


def test_kinds_are_known_however_they_are_written() -> None:
    assert len({card.name for card in CARDS}) == len(CARDS)
    for card in CARDS:
        for text in (card.name, card.name.lower().replace(" ", ""), f"NVIDIA {card.name}"):
            assert parse_card(text) == card
        # Less than it is sold with, which its plan must not count on.
        assert 10 * GIB < card.memory < 180 * GIB
        tera = [f"{card.peaks[dtype] / 1e12:g}" if dtype in card.peaks else "–" for dtype in ("bfloat16", "float32")]
        assert f"| {card.name} | {card.memory / GIB:.1f} GiB | {' | '.join(tera)} |\n" in COSTS
    assert parse_card("NVIDIA GeForce RTX 4090").name == "RTX 4090"
    assert parse_card("a100").name == "A100 80GB" and parse_card("H100 80GB").name == "H100"
    assert str(parse_card(" 4 x l40s ")) == "4 x L40S (44.4 GiB each)" and parse_card("16GiB").memory == 16 * GIB


def test_what_was_searched_here_is_no_part_of_it(
    tmp_path: Path, plan_text: Callable[..., str], printed: Callable[..., str]
) -> None:
    """Neither its dtype nor its records, which are of this machine."""
    argv = (*TINY, "--limit", "2", "--tasks", "boolq", "--perplexity-tokens", "200", "--storage-path", tmp_path)
    printed(search.main, *argv, "--inline", "--gpus-per-trial", "0")
    for card in ("4090", "t4"):
        out = plan_text(*argv, "--gpu", card)
        assert "trials are done" not in out and re.search(r"^zero-shot +7 ", out, re.MULTILINE), out
