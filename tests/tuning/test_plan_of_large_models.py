"""Plans of searches on models and GPUs that no machine here could hold: from a config and the headers of its weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hollow_models import GIB, hollow_model, in_gib
from tests.search_folders import TINY, data_folder
from tune_prune.commands import search
from tune_prune.tuning import plan_cost
from tune_prune.tuning.gpus import CARDS, parse_card

COSTS = (Path(__file__).parents[2] / "docs" / "costs.md").read_text(encoding="utf-8")
PRODUCTS = 4 * (4096**2 + 14_336**2) / GIB  # of a layer's inputs of o, and of down, in float32
HERE = ("--inline", "--dtype", "bfloat16", "--gpus-per-trial", "0")
Argv = tuple[str, ...]


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Argv]:
    """A function (shape, GiB that are free, lines of a search space) -> a search on such a model."""

    def of(shape: str, free: int, space: str = "") -> Argv:
        folder = hollow_model(tmp_path / shape, shape, free, monkeypatch)
        monkeypatch.chdir(tmp_path)
        Path("space.yaml").write_text(space)
        flags = (
            "--calibration",
            "embedded",
            "--tasks",
            "boolq",
            "--limit",
            "2",
            *("--search-space", "space.yaml") * bool(space),
        )
        return ("--model", str(folder), "--data-dir", str(data_folder(tmp_path / "data")), *flags)

    return of


@pytest.fixture
def mistral(argv: Callable[..., Argv], monkeypatch: pytest.MonkeyPatch) -> Argv:
    """A search on a model of Mistral-7B's shape, on a machine with 2 GiB, where no GPU is looked for and nothing measured."""
    made = argv("mistral-7b", 2)
    monkeypatch.delattr(plan_cost, "measure")
    monkeypatch.delattr("tune_prune.tuning.gpus.call")
    return made


def stages_of(plan: str) -> dict[str, tuple[int, float, str]]:
    """Tokens, GiB at its peak and the way of every stage in a printed plan."""
    rows = re.findall(r"^([a-z-]+) +\d+ +([\d,]+|-) .*? ([\d.]+ [MG]iB)  +(\S.*)$", plan, re.MULTILINE)
    return {
        stage: (int(tokens.replace(",", "").replace("-", "0")), in_gib(peak), way) for stage, tokens, peak, way in rows
    }


def test_a_card_that_is_not_here(mistral: Argv, plan_text: Callable[..., str], refusal: Callable[..., str]) -> None:
    """The plan is docs/costs.md's: copies whole on 24 GB, two trials on 141 GB. It needs config and tokenizer alone."""
    small, large = plan_text(*mistral, "--gpu", "RTX 4090"), plan_text(*mistral, "--gpu", "h200")
    assert "planned for 1 x RTX 4090 (23.6 GiB), not for this machine; a trial takes 4 CPU, 1 GPU" in small
    held = re.search(
        r"weights read from disk while it works, (\S+ GiB) more in main memory, pruned copies whole", small
    )
    assert held and in_gib(held[1]) > 30 and "; 1 at once;" in small
    assert "a trial takes 4 CPU, 0.5 GPU and about 56.2 GiB; 2 at once;" in large and "pruned copies" not in large
    peaks = [re.search(r"about \S+ to \S+ on .* at 40% of (\d+) TFLOP/s", out) for out in (small, large)]
    assert [found and found[1] for found in peaks] == ["165", "989"]
    short = plan_text(*mistral, "--gpu", "RTX 4090", verbose=False)
    fits = re.search(r"^memory +(\S+) GiB of 23.6 GiB: fits, weights read from disk while it works, ", short, re.M)
    assert fits and float(fits[1]) < 23.6
    assert re.search(r"^time +\S+ to \S+ \(\S+ GPU-hours\); computed for 1 x RTX 4090, not measured$", short, re.M)
    for path in Path(mistral[1]).glob("model-*.safetensors"):
        path.unlink()
    assert plan_text(*mistral, "--gpu", "RTX 4090") == small
    assert re.search(r"lacks (\d+) of \1 weight files", refusal(*mistral))


def test_several_gpus_run_as_many_trials_or_hold_one_together(mistral: Argv, plan_text: Callable[..., str]) -> None:
    each = plan_text(*mistral, "--gpu", "2xa100-40gb")
    assert "planned for 2 x A100 40GB (39.3 GiB each)" in each and "; 2 at once;" in each
    together = plan_text(*mistral, "--gpu", "2 x A100 40GB", "--gpus-per-trial", "2")
    assert "2 GPU and about" in together and "of each; 1 at once;" in together


def test_what_is_not_known_of_a_card_is_said(mistral: Argv, plan_text: Callable[..., str]) -> None:
    out = plan_text(*mistral, "--gpu", "24GB")
    assert "not predicted: how fast such a GPU is in bfloat16 is not known; name its kind, e.g. --gpu 4090" in out
    assert re.search(r"^removal +- +- +- +- +[\d.]+ GiB", out, re.MULTILINE)
    assert "\ntime         not known: how fast such a GPU is" in plan_text(*mistral, "--gpu", "24GB", verbose=False)
    assert re.search(r"^tiny-llama .* float32$", plan_text(*TINY, "--gpu", "t4"), re.MULTILINE)  # which has no bfloat16


def test_kinds_are_known_however_they_are_written() -> None:
    assert len({card.name for card in CARDS}) == len(CARDS)
    for card in CARDS:
        for text in (card.name, card.name.lower().replace(" ", ""), f"NVIDIA {card.name}"):
            assert parse_card(text) == card
        assert 10 * GIB < card.memory < 180 * GIB
        tera = [f"{card.peaks[dtype] / 1e12:g}" if dtype in card.peaks else "–" for dtype in ("bfloat16", "float32")]
        assert f"| {card.name} | {card.memory / GIB:.1f} GiB | {' | '.join(tera)} |\n" in COSTS
    assert parse_card("a100").name == "A100 80GB" and parse_card("H100 80GB").name == "H100"
    assert str(parse_card(" 4 x l40s ")) == "4 x L40S (44.4 GiB each)" and parse_card("16GiB").memory == 16 * GIB


def test_what_was_searched_here_is_no_part_of_a_plan_for_a_card(
    tmp_path: Path, plan_text: Callable[..., str], printed: Callable[..., str]
) -> None:
    argv = (*TINY, "--limit", "2", "--tasks", "boolq", "--perplexity-tokens", "200", "--storage-path", tmp_path)
    printed(search.main, *argv, "--inline", "--gpus-per-trial", "0")
    out = plan_text(*argv, "--gpu", "t4")
    assert "trials are done" not in out and re.search(r"^zero-shot +7 ", out, re.MULTILINE), out


def test_a_model_of_70b_is_streamed_and_every_stage_says_its_peak(
    argv: Callable[..., Argv], plan_text: Callable[..., str], refused: Callable[..., str]
) -> None:
    """131 GiB of bfloat16 in 24 GiB: two layers of 1.6 GiB are there, and what the host does not hold waits in a file."""
    space = "search: grid\nmethod: layerwise\nseq_len: 128\nnum_samples: 64\n"
    search_70b = (*argv("llama-3-70b", 24, space), *HERE)
    out = plan_text(*search_70b, "--memory", "24GiB")
    stages = stages_of(out)
    assert list(stages) == ["importance", "removal", "pruning", "kl", "perplexity", "zero-shot"]
    assert all(way.startswith("streamed") for *_, way in stages.values()), out
    peaks = [peak for _, peak, _ in stages.values()]
    assert min(peaks) > 3.2 and max(peaks) < 24
    trial = re.search(r"([\d.]+ GiB) a trial: the process .*, weights stay on disk most in stage \S+: ", out)
    assert trial and in_gib(trial[1]) == max(peaks) and "states in host memory" not in out
    sentence = refused(search.main, *search_70b, "--memory", "4GiB", "--dry-run")
    assert re.search(
        r"--memory is 4(\.0)? GiB, but a trial of \S+ needs [\d.]+ GiB in its leanest way \(streamed", sentence
    )


@pytest.mark.parametrize(
    ("memory", "weights", "ways"),
    [
        ("12GiB", 0.0, {"refit": "streamed", "recovery": "streamed"}),
        ("36GiB", 13.5, {"refit": "resident", "recovery": "by layer"}),  # a refit needs no gradients
    ],
    ids=["streamed", "by layer"],
)
def test_a_refit_and_a_training_of_7b_say_their_tokens_and_memory(
    argv: Callable[..., Argv], plan_text: Callable[..., str], memory: str, weights: float, ways: dict[str, str]
) -> None:
    space = (
        "search: grid\nmethod: taylor\nseq_len: 128\nnum_samples: 64\ncompensation: [least_squares]\nrecovery: [lora]\n"
    )
    search_7b = argv("mistral-7b", 190, f"{space}refit_tokens: 4096\nrecovery_steps: 10\n")
    stages = stages_of(plan_text(*search_7b, *HERE, "--memory", memory))
    refit, recovery = stages["refit"], stages["recovery"]
    assert {"refit": refit[2], "recovery": recovery[2]} == ways
    # 56 samples of 128 tokens, of which 16 are held out and run before and after, and 10 steps of 4.
    assert refit[0] == 4096 and recovery[0] == 128 * (56 + 2 * 16 + 10 * 4)
    most = float(memory.removesuffix("GiB"))
    assert weights + PRODUCTS < refit[1] < most and weights < recovery[1] < most
