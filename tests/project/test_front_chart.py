"""scripts/front_chart.py: the chart and table of README and docs/quality.md, computed anew."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, geometric_mean

import front_chart
import pytest
from PIL import Image

from tests.project.test_study_pages import BEST, PLAIN, ROOT, STUDIES, TWO_STEPS, record, row_of

PICTURE = ROOT / "docs" / "figures" / "front_chart.png"
PAGE = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = README.partition("\n## Results\n")[2].partition("\n## ")[0]
HEAD = "| | Perplexity | Distance on text | Distance on questions | Runs |"


def cells() -> Iterator[str]:
    """Yield what stands behind the label of each row."""
    yield f"{record('smollm2-135m/dense')['ppl']:.1f} | 0 | 0 | |"
    of_tables = (
        ("quality_two_steps_trained", BEST),
        ("quality_two_steps", f"{TWO_STEPS}-k2"),
        ("quality_draws", PLAIN),
    )
    for row in (row_of(*one) for one in of_tables):
        yield f"{row['ppl']:.1f} | {row['kl_text']:.2f} | {row['kl_tasks']:.2f} | {row['draws']} |"
    for file, start in (
        ("contenders", "taylor,256,128,"),
        ("contenders", "layerwise,32,256,"),
        ("control", "random,16,128,"),
    ):
        head, *lines = (STUDIES / "smollm2-135m" / f"{file}.csv").read_text(encoding="utf-8").splitlines()
        runs = list(csv.DictReader([head, *(line for line in lines if line.startswith(f"smollm2,{start}"))]))
        ppl = geometric_mean([float(run["ppl"]) for run in runs])
        on_text, on_tasks = (fmean(float(run[name]) for run in runs) for name in ("kl_text", "kl_tasks"))
        yield f"{ppl:,.{0 if ppl >= 1000 else 1}f} | {on_text:.2f} | {on_tasks:.2f} | {len(runs)} |"


@pytest.mark.parametrize("page", [PAGE, RESULTS], ids=["docs/quality.md", "README"])
def test_the_table_is_what_the_files_say(page: str) -> None:
    rows = page.partition(f"{HEAD}\n|---|---|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert [row[-len(numbers) - 3 :] for row, numbers in zip(rows, cells(), strict=True)] == [
        f" | {own}" for own in cells()
    ]


def test_the_script_prints_that_table_and_draws_the_picture_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert front_chart.main(["--output", str(tmp_path / "chart.png")]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed in PAGE and printed in README
    with Image.open(PICTURE) as committed, Image.open(tmp_path / "chart.png") as drawn:
        assert committed.info["Description"] == drawn.info["Description"] == printed  # else draw it again
        assert committed.size == drawn.size == (960, 480)
        assert committed.convert("RGB").getpixel((0, 0)) == (255, 255, 255)  # on a dark page, too
    assert f"]({PICTURE.relative_to(ROOT).as_posix()})" in README
    bars = [front_chart.shown(row.ppl) for row in front_chart.rows() if row.chart]
    assert bars == [row.split(" | ")[0] for row in [*cells()][:2] + [*cells()][3:6]]
    with pytest.raises(SystemExit) as ended:
        front_chart.main(["--output", str(tmp_path / "chart.pdf")])
    assert ended.value.code == 2 and "is no picture; give a name that ends in .png or .svg" in capsys.readouterr().err


def test_what_readme_says_beside_the_table_is_computed() -> None:
    """Of numbers with a decimal point, perplexities of the simpler recipe; the others are ratios, steps and names."""
    trained = "gate_fisher-s128-n256-least_squares-t65536-lora-e0.003"
    known = {f"{row_of('quality_ratios', trained, f'smollm2@{ratio}')['ppl']:.1f}" for ratio in (0.1, 0.35, 0.5)}
    prose = re.sub(r"^\|.*|\]\([^)]*\)", "", RESULTS, flags=re.MULTILINE)
    assert set(re.findall(r"\d+\.\d+", prose)) <= known
