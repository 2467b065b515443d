"""Names and reasons that others chose, in everything that is written or printed: they are shown, and act nowhere. What a browser
makes of Markdown is what markdown-it makes of it, with tables and raw HTML allowed."""

from __future__ import annotations

import csv
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
from tune_prune.analysis.verdict import final_table
from tune_prune.commands import analysis, status
from tune_prune.core.ledger import Ledger
from tune_prune.core.store import RESULTS, FolderStore
from tune_prune.core.terminal import markdown, markdown_code, printable

HOSTILE = (
    "<script>alert(1)</script>",
    "[x](javascript:alert(1))",
    "![x](http://evil/x.png)",
    "=cmd|' /C calc'!A0",
    "@SUM(A1)",
    "+1 or -1 `code` **b** ~~s~~ | cell",
    "&lt;b&gt; &amp; $x$ [@key] _e_",
    "<!-- c --> </b",
)
MODELS = (HOSTILE[0], HOSTILE[5], HOSTILE[6])
TAGS = set(["h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "strong", "em", "ul", "li", "code"])


class Page(HTMLParser):
    """Text, tags and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.links = "", set[str](), list[str]()
        self.feed(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text))

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Find three models with such names, and columns that hold others."""
    models = {name: lambda m, s, n: 0.5 + 0.01 * len(m) + s / 10_000 for name in MODELS}
    about = dict(zip(("device_name", "reason", "host"), HOSTILE[1::2], strict=False))
    return from_csv(tmp_path_factory.mktemp("csv"), models, ppl=range(36), **about)


@pytest.mark.parametrize("label", HOSTILE)
def test_each_format_shows_the_text_and_does_nothing(label: str) -> None:
    assert Page(markdown(label)).text.strip() == label
    code = Page(f"| a |\n| --- |\n| {markdown_code(label)} |\n")
    assert code.text.split() == ["a", *label.replace("`", "'").split()] and code.tags <= TAGS and not code.links
    assert from_cell(as_cell(label)) == label and not re.match(r"[=+@\t\r]", as_cell(label))


def test_markdown_shows_what_was_named(findings: Findings) -> None:
    texts = [markdown_table(table) for table in all_tables(findings).values()] + [paragraphs(findings)[0]]
    pages = [Page(text) for text in texts]
    assert all(shown.tags <= TAGS and not shown.links for shown in pages)
    for label in MODELS:
        assert sum(label in shown.text for shown in pages) > 3 and label in pages[-1].text
        assert label in final_table(findings)


def test_spreadsheets_calculate_nothing(findings: Findings) -> None:
    cells = [
        cell
        for table in all_tables(findings).values()
        for row in csv.reader(csv_text(table).splitlines())
        for cell in row
    ]
    assert len(cells) > 100 and not [cell for cell in cells if re.match(r"[=+@\t\r\n]|-(?![\d.])", cell)]


def test_latex_prints_what_was_named(findings: Findings) -> None:
    text = document(list(all_tables(findings).values()))
    assert not re.search(r"\\(?:input|write|immediate|include|openout|def|catcode|href|url)\b", text)
    assert not [plain for plain in ("$x$", " _e_", "| cell", "<script") if plain in text]


def test_a_terminal_is_not_spoken_to() -> None:
    text = "\x1b]0;title\x07\x1b[2Jred\x1b[31m \u202egnp\u202c \x00 \u009b31m"
    shown = printable(text)
    assert shown.isprintable() and "\\x1b[2Jred" in shown and "\\u202e" in shown
    assert printable("two\nlines\tand ä 中 ±") == "two\nlines\tand ä 中 ±"
    assert "\x1b" not in markdown(text) + markdown_code(text)
    counts = {"planned": 1, "done": 1, "complete": 0, "stopped_early": 0, "failed": 1, "earlier": 0}
    about = {
        "search": None,
        "experiment": "e",
        "folder": "f",
        "state": "none",
        "damaged": [],
        "models": {},
        "gpu_hours": 0.0,
    }
    latest = {"model": "m\x1b[2J", "config": "c", "host": "h\x1b[31m", "reason": text}
    said = status.text(about | {"trials": counts, "failures": [{"failure": "other", "count": 1, "latest": latest}]})
    assert "\x1b" not in said and "\\x1b]0;title" in said and said.count("\n") == 4


def test_results_files_come_back_unchanged(tmp_path: Path) -> None:
    folder = simulated_study(tmp_path / "study", models=("alpha",))
    texts = ["=1+1", "+1", "-1", "@x", "'=1", "''-", "'quoted'", "plain", 'a,b\n"c"', ""]
    records = [
        replace(record, device_name=texts[index % len(texts)], host=texts[-1 - index % len(texts)])
        for index, record in enumerate(Ledger(FolderStore(folder)).records())
    ]
    written = FolderStore(tmp_path / "views")
    write_views(written, records, find(read_study([folder], [])))
    with (written.folder / RESULTS).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert not [cell for row in rows for cell in row.values() if cell[:1] in ("=", "+", "@", "\t", "\r")]
    assert {cell[:2] for row in rows for cell in row.values() if cell[:1] == "'"} >= {"'=", "'+", "'-", "'@", "''"}
    assert {type(float(row[name])) for row in rows for name in ("acc_mean", "seq_len", "params_count")} == {float}
    read = read_results_csv(written.folder / RESULTS, "alpha").rows.set_index("key")
    for record in records:
        assert (read.loc[record.key, "device_name"], read.loc[record.key, "host"]) == (record.device_name, record.host)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
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


@pytest.mark.parametrize("name", ["x" * 300, "剪/" * 1200, "a\0b"])
def test_a_name_that_no_folder_can_have_is_no_folder(name: str, tmp_path: Path) -> None:
    row = {"method": "taylor", "seq_len": 16, "num_samples": 4, "acc_mean": 0.5, "output_dir": name}
    pd.DataFrame([row]).to_csv(tmp_path / "results.csv", index=False)
    assert read_results_csv(tmp_path / "results.csv", "m").rows["output_dir"].tolist() == [""]
