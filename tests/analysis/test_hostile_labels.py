"""Names and reasons that others chose, in everything that is written or printed: they are shown, and act nowhere. What a browser
makes of Markdown is what markdown-it makes of it, with tables and raw HTML allowed."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from markdown_it import MarkdownIt

from tests.findings import from_csv, simulated_study
from tune_prune.analysis.export import write_views
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.results_csv import read_results_csv
from tune_prune.analysis.input.rows import as_cell, from_cell
from tune_prune.analysis.render.files import csv_text, document, markdown_table
from tune_prune.analysis.render.paragraphs import paragraphs
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.final_table import final_table
from tune_prune.commands import analysis, status
from tune_prune.core.ledger import Ledger
from tune_prune.core.store import RESULTS, FolderStore
from tune_prune.core.terminal import markdown, markdown_code, printable

HOSTILE = (
    "<script>alert(1)</script>",
    "[x](javascript:alert(1))",
    "<javascript:alert(1)>",
    "![x](http://evil/x.png)",
    "=cmd|' /C calc'!A0",
    "@SUM(A1)",
    "+1 or -1 `code` **b** ~~s~~ | cell",
    "&lt;b&gt; &amp; $x$ [@key] _e_",
    "<!-- c --> </b",
)


class _Page(HTMLParser):
    """Text, tags and links of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags, self.links = "", set[str](), list[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


def page(text: str) -> _Page:
    return _Page(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text))


@pytest.fixture(scope="module", params=[HOSTILE[:3], HOSTILE[3:6], HOSTILE[6:]], ids=["tags", "formulas", "marks"])
def labels(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture(scope="module")
def findings(labels: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Findings:
    models = {label: lambda m, s, n: 0.5 + 0.01 * len(m) + s / 10_000 for label in labels}
    folder = tmp_path_factory.mktemp("csv")
    return from_csv(folder, models, device_name=labels[0], reason=labels[1], host=labels[2], ppl=range(36))


@pytest.mark.slow
def test_markdown_shows_what_was_named(labels: tuple[str, ...], findings: Findings) -> None:
    texts = [markdown_table(table) for table in all_tables(findings).values()] + [paragraphs(findings)[0]]
    assert len(texts) > 5
    pages = [page(text) for text in texts]
    for shown in pages:
        assert shown.tags <= {
            "h1",
            "h2",
            "p",
            "table",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "strong",
            "em",
            "ul",
            "li",
            "code",
        }
        assert shown.links == []
    for label in labels:
        assert sum(label in shown.text for shown in pages) > 3 and label in pages[-1].text


def test_screens_show_what_was_named(labels: tuple[str, ...], findings: Findings) -> None:
    assert all(label in final_table(findings) for label in labels)


def test_spreadsheets_calculate_nothing(findings: Findings) -> None:
    for table in all_tables(findings).values():
        for row in csv.reader(io.StringIO(csv_text(table))):
            assert not [cell for cell in row if re.match(r"[=+@\t\r\n]|-(?![\d.])", cell)]


def test_latex_prints_what_was_named(findings: Findings) -> None:
    text = document(list(all_tables(findings).values()))
    assert set(re.findall(r"\\(?:input|write|immediate|include|openout|def|catcode|href|url)\b", text)) == set()
    assert not [plain for plain in ("$x$", " _e_", "| cell", "<script") if plain in text]


def test_a_text_is_itself_in_markdown() -> None:
    for text in (
        *HOSTILE,
        "tiny-llama",
        "taylor-s256-n128",
        "p <.001",
        "grad_mean_ratio",
        "a_b",
        "5 < 6",
        "x\\y",
        "C:\\[a]",
    ):
        assert page(markdown(text)).text.strip() == text
        assert page(f"| a |\n| --- |\n| {markdown_code(text)} |\n").text.split() == [
            "a",
            *text.replace("`", "'").split(),
        ]
    assert markdown("a\nb\t c") == "a b c" and markdown("p <.001 grad_mean") == "p <.001 grad_mean"


def test_a_terminal_is_not_spoken_to() -> None:
    text = "\x1b]0;title\x07\x1b[2Jred\x1b[31m \u202egnp\u202c \x00 \u009b31m"
    shown = printable(text)
    assert shown.isprintable() and "\\x1b[2Jred" in shown and "\\u202e" in shown
    assert printable("two\nlines\tand ä 中 ±") == "two\nlines\tand ä 中 ±"
    assert "\x1b" not in markdown(text) + markdown_code(text)


def test_the_status_of_a_search_does_not_either() -> None:
    latest = {"model": "m\x1b[2J", "config": "c", "host": "h\x1b[31m", "reason": "\x1b]0;title\x07"}
    found = {
        "trials": {"planned": 1, "done": 1, "complete": 0, "stopped_early": 0, "failed": 1, "earlier": 0},
        **{
            "search": None,
            "experiment": "e",
            "folder": "f",
            "state": "none",
            "damaged": [],
            "models": {},
            "gpu_hours": 0.0,
        },
        "failures": [{"failure": "other", "count": 1, "latest": latest}],
    }
    said = status.text(found)
    assert "\x1b" not in said and "\\x1b]0;title" in said and said.count("\n") == 4


# Texts as they are in records, and whether a results file must change them.
CELLS = {
    "=1+1": True,
    "+1": True,
    "-1": True,
    "@x": True,
    "'=1": True,
    "''-": True,
    "\t=1": True,
    "\r=1": True,
    "'quoted'": False,
    "plain": False,
    'a,b\n"c"': False,
    "": False,
}


def test_a_cell_is_read_as_it_was() -> None:
    for text, changes in CELLS.items():
        cell = as_cell(text)
        assert (cell == f"'{text}") == changes and (cell == text) != changes
        assert from_cell(cell) == text
    assert [as_cell(value) for value in (-1.5, 3, None, True)] == [-1.5, 3, None, True]


def test_results_files_come_back_unchanged(tmp_path: Path) -> None:
    folder = simulated_study(tmp_path / "study")
    texts = [text for text in CELLS if text.strip() == text]
    records = [
        replace(record, device_name=texts[index % len(texts)], host=texts[-1 - index % len(texts)])
        for index, record in enumerate(Ledger(FolderStore(folder)).records())
    ]
    written = FolderStore(tmp_path / "views")
    write_views(written, records, find(read_study([folder], [])))
    with (written.folder / RESULTS).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert not [cell for row in rows for name, cell in row.items() if cell[:1] in "=+@\t\r" and cell]
    assert {cell[:2] for row in rows for cell in row.values() if cell[:1] == "'"} >= {"'=", "'+", "'-", "'@", "''"}
    assert {type(float(row[name])) for row in rows for name in ("acc_mean", "seq_len", "params_count")} == {float}
    label = sorted({record.model for record in records})[0]
    only = tmp_path / "one.csv"
    frame = pd.DataFrame([row for row in rows if row["model"] == as_cell(label)])
    frame.to_csv(only, index=False)
    read = read_results_csv(only, label).rows.set_index("key")
    for record in records:
        if record.model == label and record.key in read.index:
            assert (read.loc[record.key, "device_name"], read.loc[record.key, "host"]) == (
                record.device_name,
                record.host,
            )
    assert len(read) > 5


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("output_dir", "x" * 300, "column output_dir: 'xxx"),
        ("output_dir", "a/" * 3000, "column output_dir"),
        ("output_dir", "剪" * 100, "column output_dir"),
        ("output_dir", "剪/" * 1200, "has 4,800 bytes"),
        ("model", "x" * 300, "300 letters; a name has 1 to 100"),
        ("model", "\x1b[31mred", "no control characters"),
    ],
)
def test_names_that_no_folder_can_have(column: str, value: str, says: str, tmp_path: Path, capsys) -> None:
    row = {"model": "m", "method": "taylor", "seq_len": 16, "num_samples": 4, "acc_mean": 0.5, "output_dir": "x"}
    pd.DataFrame([row | {column: value}]).to_csv(tmp_path / "consolidated.csv", index=False)
    where = f"m={tmp_path / 'consolidated.csv'}"
    assert analysis.main(["--csv", where, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and len(error) < 500 and "\x1b" not in error
    assert not (tmp_path / "out").exists()
