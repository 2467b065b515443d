"""Every renderer shows every number of every table, marks what is marked, and leaves no text that its format reads as code."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from tune_prune.analysis.cost import duration
from tune_prune.analysis.input.study import Message
from tune_prune.analysis.render.files import csv_text, escape, latex_table, markdown_table
from tune_prune.analysis.render.templating import environment
from tune_prune.analysis.render.text import text_table
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables import trial_tables
from tune_prune.analysis.tables.all_tables import all_tables, write_tables
from tune_prune.analysis.tables.table import Column, Row, Table

Grid = list[list[tuple[str, tuple[bool, bool]]]]  # rows of (text, (marked as best, marked as at chance))

SMALL = Table(
    key="small",
    title="A small table",
    best="best_tied",
    columns=[
        Column("model", "Model"),
        Column("acc", "Accuracy", "acc", "stderr", best="tied", threshold="threshold", items="items"),
        Column("low", "95% interval", "acc", upper="high"),
        Column("p", "p", "p"),
        Column("ppl", "PPL", "ppl"),
    ],
    rows=[
        {"model": "甲", "acc": 0.598, "stderr": 0.0048, "tied": True, "threshold": 0.5, "low": -0.25, "high": 0.5},
        {"model": "甲", "acc": 0.59, "stderr": math.nan, "tied": False, "threshold": 0.6, "low": None, "p": 0.0004},
        {"model": "x", "acc": 1.0, "stderr": 0.0, "tied": False, "items": 5, "low": 0.0, "high": 1.0, "p": 0.05},
    ],
)


@pytest.fixture(scope="module")
def every_table(simulated: Findings) -> list[Table]:
    more = [trial_tables.problems(simulated), trial_tables.costs(simulated)]
    made = [*all_tables(simulated).values(), *more, SMALL]
    assert all(table is not None for table in made)
    return [table for table in made if table is not None]


def read_markdown(table: Table) -> Grid:
    lines = [line for line in markdown_table(table).splitlines() if line.startswith("|")][2:]
    grid = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    cells = [[unmarked(cell.strip("*"), cell.startswith("**")) for cell in row] for row in grid]
    return [[(html.unescape(re.sub(r"\\(.)", r"\1", text)), marks) for text, marks in row] for row in cells]


def unmarked(text: str, best: bool) -> tuple[str, tuple[bool, bool]]:
    return text.removesuffix("†"), (best, text.endswith("†"))


def read_html(table: Table) -> Grid:
    """Read a page as XML, which is strict about what is a tag."""
    page = str(environment().get_template("table.html.j2").module.table(table))  # type: ignore[attr-defined]
    found = re.search("<table.*</table>", page, re.DOTALL)
    assert found is not None
    tree = ElementTree.fromstring(found[0])
    assert {element.tag for element in tree.iter()} <= {"table", "thead", "tbody", "tr", "th", "td", "div", "span"}
    rows = [
        [("".join(cell.itertext()), cell.attrib["class"].split()) for cell in row] for row in tree.find("tbody") or ()
    ]
    return [[unmarked(text, "strong" in classes) for text, classes in row] for row in rows]


def assert_shown(text: str, column: Column, row: Row) -> None:
    """Check that `text` is what the row holds: numbers to half of their last digit, texts from their beginning."""
    value = row.get(column.key)
    if value is None or value == "" or (not isinstance(value, (str, Message)) and pd.isna(value)):
        assert text in ("", "–")
    elif not column.format:
        readable = re.sub(r"[^\w.=+<>|-]", "", text.partition(" best")[0] if column.badge else text)
        if isinstance(value, str):
            value = {"dense": "original", "refit": "repair"}.get(value, value)  # as files have it, and as it is shown
            assert re.sub(r"[^\w.=+<>|-]", "", value).startswith(readable.removesuffix("…")[:12]) and readable
        else:
            assert isinstance(value, Message) and readable
    elif column.format == "duration":
        assert text == duration(value)
    elif column.items and value in (0, 1):
        assert float(text.partition(" [")[0]) == value
    elif text == "<.001":
        assert value < 0.001
    elif math.isinf(value):
        assert text == f"{value}"
    else:
        shown = re.findall(r"-?(?:\d[\d,]*)?\.?\d+(?:e[+-]?\d+)?", text)
        other = row.get(column.upper or column.stderr)
        expected = [value] if other is None or pd.isna(other) else [value, other]
        assert len(shown) == len(expected)
        for digits, number in zip(shown, expected, strict=True):
            scale = 100 if "%" in text else 1
            significand, _, exponent = digits.replace(",", "").partition("e")
            half = 0.5001 * 10.0 ** (int(exponent or 0) - len(significand.partition(".")[2]))
            assert float(digits.replace(",", "")) == pytest.approx(scale * number, abs=half)


@pytest.mark.parametrize("read", [read_markdown, read_html])
def test_every_cell_is_shown_and_marked(every_table: list[Table], read: Callable[[Table], Grid]) -> None:
    for table in every_table:
        columns = table.printed if read is read_markdown else table.shown
        grid = read(table)
        assert len(grid) == len(table.rows), table.key
        for cells, row in zip(grid, table.rows, strict=True):
            assert len(cells) == len(columns), table.key
            for (text, marks), column in zip(cells, columns, strict=True):
                assert_shown(text, column, row)
                assert marks == (column.is_best(row), column.at_chance(row)), (table.key, column.key, text)


def test_csv_holds_every_value_in_full_and_no_formula(every_table: list[Table]) -> None:
    for table in every_table:
        read = list(csv.DictReader(io.StringIO(csv_text(table))))
        assert len(read) == len(table.rows)
        for cells, row in zip(read, table.rows, strict=True):
            for key, value in row.items():
                if isinstance(value, float) and not math.isnan(value) and key[0] != "_":
                    assert float(cells[key.replace("=", "'=", 1) if key[0] == "=" else key]) == value
            formulas = [text for text in cells.values() if re.match(r"[=+@\t\r]|-(?!\.?\d|inf)", text)]
            assert formulas == [] and not any(key.startswith("=") for key in cells)


def test_text_is_aligned_marked_and_without_empty_columns() -> None:
    assert text_table(SMALL) == (
        "  Model                 Accuracy     95% interval      p\n"
        "  -----  -----------------------  ---------------  -----\n"
        "  甲              .5980 ± .0048*  [-.2500, .5000]      –\n"
        "  甲                      .5900†                –  <.001\n"
        "  x      1.0000 [.5655, 1.0000]   [.0000, 1.0000]   .050\n"
    )
    assert "Model" not in text_table(SMALL.of("x"))
    assert text_table(SMALL.pick("p", "model")).splitlines()[0].split() == ["p", "Model"]


def test_latex_says_a_model_once_and_marks_cells() -> None:
    body = latex_table(SMALL).partition("\\midrule\n")[2].partition("\\bottomrule")[0]
    assert body.splitlines() == [
        r"{[}U+7532] & \textbf{.5980 $\pm$ .0048} & {[}$-$.2500, .5000] & -- \\",
        r" & .5900\textsuperscript{\dag} & -- & \textless{}.001 \\",
        r"\midrule",
        r"x & 1.0000 {[}.5655, 1.0000] & {[}.0000, 1.0000] & .050 \\",
    ]


def values(table: Table, key: str) -> list[Any]:
    return [row[key] for row in table.rows]


def test_rows_are_the_findings(simulated: Findings) -> None:
    made = all_tables(simulated)
    found = list(simulated.models.values())
    best = made["optimal_configurations"]
    for key in ("acc_mean", "acc_mean_stderr", "ppl", "name"):
        assert values(best, key) == [entry.best[key] for entry in found]
    fits = [entry.cross_fit for entry in found if entry.cross_fit]
    assert values(best, "cross_fitted") == [fit.corrected for fit in fits]
    assert values(best, "cross_fitted_stderr") == [fit.stderr for fit in fits]
    assert values(best, "retained") == [entry.best["acc_mean"] / entry.model.baseline["acc_mean"] for entry in found]
    sizes = [int(entry.eligible["in_confidence_set"].sum()) for entry in found]
    assert values(best, "confidence_set") == sizes
    assert values(best, "share_of_runs") == [f"{size - 1} of 15" for size in sizes]

    own = [[*entry.tasks["acc"].drop("mean"), entry.best["acc_mean"]] for entry in found]
    assert values(made["task_accuracies"], "acc") == [value for part in own for value in part]

    rows = [pd.concat([e.eligible, e.model.rows[~e.model.rows["success"]]]) for e in found]
    trials = made["trials"]
    assert values(trials, "name") == [name for part in rows for name in part["name"]]
    for key in ("acc_mean", "difference_points", "difference_stderr_points", "p_value"):
        np.testing.assert_array_equal(np.array(values(trials, key), float), pd.concat(rows)[key].to_numpy(float))
    assert sorted(set(zip(values(trials, "state"), values(trials, "reason"), strict=True))) == [
        ("complete", ""),
        ("failed", "out of memory"),
        ("stopped early", "well below the best"),
    ]
    for label, entry in simulated.models.items():  # ranks are places in the two orders
        own_rows = trials.of(label).rows[: len(entry.eligible)]
        assert [row["rank"] for row in own_rows] == list(range(1, len(own_rows) + 1))
        by_ppl = sorted(own_rows, key=lambda row: row["ppl_rank"])
        assert [row["ppl"] for row in by_ppl] == sorted(entry.eligible["ppl"])


def test_statistics(simulated: Findings) -> None:
    rows = {row["statistic"]: row for row in all_tables(simulated)["experiment_statistics"].rows}
    pooled = pd.concat([entry.eligible["acc_mean"] for entry in simulated.models.values()])
    assert rows["runs"]["of_All models"] == 36 and rows["complete"]["of_alpha"] == 16
    assert rows["task_evaluations"]["of_All models"] == 32 * 7
    assert rows["completeness"]["of_beta"] == 16 / 18
    for name in ("max", "min", "median", "mean", "std"):
        assert rows[name]["of_All models"] == getattr(pooled, name)()
    assert rows["gradient_passes"]["of_All models"] == 6  # of the experiment, so of no model alone
    assert math.isnan(rows["gradient_passes"]["of_alpha"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50% a_b & #1 $x {y}", r"50\% a\_b \& \#1 \$x \{y\}"),
        ("a\\b~c^d", r"a\textbackslash{}b\textasciitilde{}c\textasciicircum{}d"),
        (".5 ± .1†", r".5 $\pm$ .1\textsuperscript{\dag}"),
        ("-0.5 and -.2, seq-64 --limit", r"$-$0.5 and $-$.2, seq-64 -{}-limit"),
        ("Qwen é ß ø", "Qwen é ß ø"),
        ("模 ŧ", r"{[}U+6A21] {[}U+0167]"),
        ("[x] *", r"{[}x] {*}"),
        ("two\nlines\x00", "two lines "),
        ("–", "--"),
    ],
)
def test_escape(text: str, expected: str) -> None:
    assert escape(text) == expected


def check_latex(text: str) -> None:
    """Environments and braces are balanced, and every row of a tabular has as many cells as its preamble has columns."""
    stack: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert not stack
    text = re.sub(r"\A% The document needs .*", "", text).replace("{!}{%\n", "{!}{\n")  # comments that are meant
    bare = re.sub(r"\\[\\{}&%$#_^~'\"]", "", text)
    assert bare.count("{") == bare.count("}") and re.fullmatch(r"[\x00-\x7fÀ-ž]*", bare) and bare.count("$") % 2 == 0
    assert not re.search(r"[%#]|(?<=[^$\\\s])_", bare)
    columns = None
    for line in text.splitlines():
        if found := re.match(r"\\begin\{(?:tabular|longtable)\}\{@\{\}(.*)@\{\}\}$", line):
            columns = len(re.findall("[lr]|p{[^}]*}", re.sub(">{[^}]*}", "", found[1])))
        elif line.endswith(r" \\") and not line.startswith((r"\multicolumn", r"\caption")):
            assert len(re.findall(r"(?<!\\)&", line)) + 1 == columns, line


def test_files_are_well_formed(simulated: Findings, tmp_path: Path) -> None:
    for path in write_tables(simulated, tmp_path / "tables"):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".tex" and path.stem != "all_tables":
            assert text.startswith("% The document needs \\usepackage{array,booktabs,graphicx,longtable}\n")
        if path.suffix != ".csv":
            assert not re.search(r"\b(nan|None|NaN|NA)\b", text), path
        if path.suffix == ".md":
            rows = [line for line in text.splitlines() if line.startswith("|")]
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, path
    whole = (tmp_path / "tables" / "all_tables.tex").read_text(encoding="utf-8")
    check_latex(whole)
    assert whole.startswith(r"\documentclass") and whole.endswith("\\end{document}\n")
    assert all(latex_table(table) in whole for table in all_tables(simulated).values())


def test_a_table_is_scaled_where_the_line_of_the_document_is_narrower() -> None:
    """The document may have any line: a column of a journal, or a page that no size of letters has room on."""
    columns = [Column("model", "Model"), *(Column(f"n{index}", f"n{index}", "int") for index in range(40))]
    rows = [{"model": "m", **{f"n{index}": 1234567 for index in range(40)}}]
    text = latex_table(Table("wide", "Wide", columns, rows))
    fitted = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
    assert re.search(re.escape(fitted) + r"\n\\begin{tabular}(?s:.*)\\end{tabular}}\n", text)
