"""scripts/front_chart.py: the chart and table of README, and what docs/quality.md says beside them, computed anew."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import front_chart
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "docs" / "studies" / "smollm2-135m"
PICTURE = ROOT / "docs" / "figures" / "front_chart.png"
PAGE = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = README.partition("\n## Results\n")[2].partition("\n## ")[0]
HEAD = "| | Perplexity | Distance on text | Distance on questions | Runs |"


def recorded(table: str, configuration: str, model: str = "smollm2") -> dict[str, Any]:
    rows = json.loads((STUDY / f"{table}.json").read_text(encoding="utf-8"))
    (row,) = (row for row in rows if (row["configuration"], row["model"]) == (configuration, model))
    return row


def trials(file: str, start: str) -> list[dict[str, str]]:
    """Of one configuration: a line of the file begins with its values."""
    lines = (STUDY / f"{file}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader([lines[0], *(line for line in lines if line.startswith(start))]))


def cells() -> Iterator[str]:
    """What stands behind the labels, row by row."""
    dense = json.loads((STUDY / "dense.json").read_text(encoding="utf-8"))
    yield f"{dense['ppl']:.1f} | 0 | 0 | |"
    for table, name in (
        ("quality_two_steps_trained", "gate_fisher-s128-n512-least_squares-t131072-lora-i400-e0.003-k2"),
        ("quality_two_steps", "gate_fisher-s128-n512-least_squares-t131072-k2"),
        ("quality_draws", "gate_fisher-s128-n128-least_squares"),
    ):
        row = recorded(table, name)
        yield f"{row['ppl']:.1f} | {row['kl_text']:.2f} | {row['kl_tasks']:.2f} | {row['draws']} |"
    for file, start in (
        ("contenders", "smollm2,taylor,256,128,"),
        ("contenders", "smollm2,layerwise,32,256,"),
        ("control", "smollm2,random,16,128,"),
    ):
        runs = trials(file, start)
        ppl = geometric_mean([float(run["ppl"]) for run in runs])
        text, tasks = (fmean(float(run[name]) for run in runs) for name in ("kl_text", "kl_tasks"))
        yield f"{ppl:,.{0 if ppl >= 1000 else 1}f} | {text:.2f} | {tasks:.2f} | {len(runs)} |"


@pytest.mark.parametrize("page", [PAGE, RESULTS], ids=["docs/quality.md", "README"])
def test_the_table_is_what_the_files_say(page: str) -> None:
    rows = page.partition(f"{HEAD}\n|---|---|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    expected = list(cells())
    assert len(rows) == len(expected) == 7
    for row, numbers in zip(rows, expected, strict=True):
        assert row.endswith(f" | {numbers}"), (row, numbers)


def test_the_script_prints_that_table_and_draws_the_picture_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert front_chart.main(["--output", str(tmp_path / "chart.png")]) == 0
    told = capsys.readouterr().out.strip()
    assert told in PAGE and told in README
    with Image.open(PICTURE) as committed, Image.open(tmp_path / "chart.png") as drawn:
        assert committed.info["Description"] == drawn.info["Description"] == told  # else draw it again
        assert committed.size == drawn.size == (960, 480)
        assert committed.convert("RGB").getpixel((0, 0)) == (255, 255, 255)  # on a dark page, too
    assert f"]({PICTURE.relative_to(ROOT).as_posix()})" in README
    bars = [(row.chart.split(":")[0], front_chart.shown(row.ppl)) for row in front_chart.rows() if row.chart]
    assert [number for _, number in bars] == [row.split(" | ")[0] for row in [*cells()][:2] + [*cells()][3:6]]
    assert front_chart.main(["--output", str(tmp_path / "chart.svg")]) == 0
    assert "9,492" in re.sub(r"<[^>]+>", " ", (tmp_path / "chart.svg").read_text(encoding="utf-8"))


def test_a_name_that_is_no_picture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        front_chart.main(["--output", str(tmp_path / "chart.pdf")])
    assert ended.value.code == 2 and "is no picture; give a name that ends in .png or .svg" in capsys.readouterr().err


def test_what_readme_says_beside_the_table_is_computed() -> None:
    """Of numbers with a decimal point, perplexities of the simpler recipe; the others are ratios, steps and names."""
    trained = "gate_fisher-s128-n256-least_squares-t65536-lora-e0.003"
    found = {f"{recorded('quality_ratios', trained, f'smollm2@{ratio}')['ppl']:.1f}" for ratio in (0.1, 0.35, 0.5)}
    prose = re.sub(r"^\|.*|\]\([^)]*\)", "", RESULTS, flags=re.MULTILINE)
    assert set(re.findall(r"\d+\.\d+", prose)) <= found


def claims() -> list[str]:
    """Sentences' parts of docs/quality.md that have numbers."""
    plain, mixed = "gate_fisher-s128-n128-least_squares", "gate_fisher-s128-n256-least_squares-t65536"
    two = "gate_fisher-s128-n512-least_squares-t131072"
    best, taylor = recorded("quality_draws", plain), recorded("quality_grid", "taylor-s256-n128")
    question, steps = recorded("quality_mixed", mixed), recorded("quality_two_steps", f"{two}-k2")
    trained = recorded("quality_two_steps_trained", f"{two}-lora-i400-e0.003-k2")

    def share(table: str, name: str, measure: str, error: bool = True) -> str:
        row = recorded(table, name)
        own = f" ± {100 * row[f'{measure}_stderr']:.0f}%" if error else ""
        return f"{100 * row[f'{measure}_regained']:.0f}{own}"

    def three(table: str, name: str, error: bool = True) -> list[str]:
        return [share(table, name, measure, error) for measure in ("kl_text", "kl_tasks", "gold_logprob_mean")]

    first, second = three("quality_two_steps", f"{two}-k2"), three("quality_two_steps_layerwise", f"{two}-k2")
    after = [
        three(f"quality_two_steps_trained{of}", trained["configuration"], error=False) for of in ("", "_layerwise")
    ]
    at = {
        ratio: [
            f"{recorded('quality_ratios', f'{mixed}{lora}', f'smollm2@{ratio}')['ppl']:.1f}"
            for lora in ("", "-lora-e0.003")
        ]
        for ratio in (0.35, 0.5)
    }
    accuracies = [row["accuracy"] for row in json.loads((STUDY / "quality.json").read_text(encoding="utf-8"))]
    dense = json.loads((STUDY / "dense.json").read_text(encoding="utf-8"))["acc_mean"]
    masks = json.loads((STUDY / "masks.json").read_text(encoding="utf-8"))["rows"]
    shapes = [
        recorded("quality_uniform", f"gate_fisher-s128-n256{shape}-least_squares-t65536-lora-e0.003")
        for shape in ("", "-uniform")
    ]
    more = [100 * (shapes[1][name] / shapes[0][name] - 1) for name in ("kl_text", "kl_tasks")]
    return [
        f"the perplexity from {taylor['ppl']:.1f}, the published grid's best, to {best['ppl']:.1f}",
        f"{share('quality_grid', plain, 'kl_text')} smaller on text",
        f"{share('quality_grid', plain, 'kl_tasks')} on questions",
        f"falls from {best['kl_tasks']:.2f} to {question['kl_tasks']:.2f}",
        f"On text it is {question['kl_text']:.2f}, from {best['kl_text']:.2f}",
        f"is {steps['kl_text']:.2f} on text and {steps['kl_tasks']:.2f} on questions",
        f"takes {steps['seconds'] / 60:.0f} minutes",
        f"| best by perplexity (`taylor`) | {' | '.join(first)} |",
        f"| best by right answers (`layerwise`) | {' | '.join(second)} |",
        f"[from {steps['ppl']:.1f} to {trained['ppl']:.1f}]",
        f"Of `taylor`'s damage {after[0][0]}, {after[0][1]} and {after[0][2]}% are then undone",
        f"of `layerwise`'s {after[1][0]}, {after[1][1]} and {after[1][2]}%",
        f"At 35% they bring the perplexity from {at[0.35][0]} to {at[0.35][1]}, at 50% from {at[0.5][0]} to {at[0.5][1]}",
        f"{min(accuracies):.3f} to {max(accuracies):.3f}, and the original has {dense:.3f}".replace("0.", "."),
        f"[{more[0]:.0f}% more distance on text and {more[1]:.0f}% on questions]",
        f"keep a distance of {masks[-1]['kl_text']:.2f} on text",
        f"In [one table of {('seven', 'eight')[len(accuracies) - 7]} recipes]",
    ]


def test_every_claim_of_the_page_is_computed() -> None:
    text = " ".join(PAGE.split())
    assert [claim for claim in claims() if claim not in text] == []
