"""report.html, read back by the standard library's parser, and its sorting in Chromium where that is installed."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imsave

from tests.findings import simulated_study
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render import messages, page
from tune_prune.analysis.statistics.findings import Findings, find

HOSTILE = "<script>alert(1)</script>"
HOSTILE_REASON = "\"><img src=x onerror='alert(1)'> & {{ 7 * 7 }}"
FAILED, STOPPED = "taylor-s16-n128", "layerwise-s64-n512"
VOID = {"meta", "input", "img", "br", "line", "circle"}


class Page(HTMLParser):
    """Elements, and tables as their rows of (attributes, text); raises on an element that is closed by another's tag."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.tables: dict[str, list[list[tuple[dict[str, str | None], str]]]] = {}
        self._open: list[str] = []
        self._table = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.elements.append((tag, values))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section" and "table" in (values.get("class") or "").split():
            self._table = values["id"] or ""
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append((values, ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)
        if {"td", "th"} & set(self._open):
            attributes, text = self.tables[self._table][-1][-1]
            self.tables[self._table][-1][-1] = (attributes, text + data)

    def column(self, table: str, title: str) -> list[tuple[dict[str, str | None], str]]:
        head, *rows = self.tables[table]
        index = [text for _, text in head].index(title)
        return [row[index] for row in rows]

    def numbers(self, table: str, title: str) -> list[float | None]:
        sorts = [attributes.get("data-sort") for attributes, _ in self.column(table, title)]
        return [None if sort is None else float(sort) for sort in sorts]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Two models, one with a name that is HTML; a failed trial whose reason is, and one that was stopped early."""
    folder = tmp_path_factory.mktemp("page")
    study = read_study([simulated_study(folder, models=(HOSTILE, "beta"), failed=[FAILED], stopped=[STOPPED])], [])
    for model in study.models.values():
        model.rows.loc[model.rows["status"] == "failed", "reason"] = HOSTILE_REASON
    return find(study)


@pytest.fixture(scope="module")
def figure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PNG of 40 x 20 white dots."""
    path = tmp_path_factory.mktemp("figures") / "heatmap_beta.png"
    imsave(path, np.ones((20, 40, 3)))
    return path


@pytest.fixture(scope="module")
def html(findings: Findings, figure: Path) -> str:
    return page.render(findings, [figure, figure.with_suffix(".pdf")])


@pytest.fixture(scope="module")
def parsed(html: str) -> Page:
    return Page(html)


def test_nothing_is_loaded_and_only_its_own_script_may_run(parsed: Page) -> None:
    for _, attributes in parsed.elements:
        assert (attributes.get("href") or "#").startswith("#")
        assert (attributes.get("src") or "data:").startswith("data:")
        assert not any(name.startswith("on") or name in ("srcset", "action", "data") for name in attributes)
    assert {"link", "iframe", "object", "embed", "base"}.isdisjoint(tag for tag, _ in parsed.elements)
    assert not re.search(r"url\(|@import|https?:", "".join(parsed.texts["style"]))
    (script,) = ("".join(parsed.texts["script"]),)
    policy = next(a["content"] for tag, a in parsed.elements if tag == "meta" and a.get("http-equiv")) or ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_names_from_outside_are_only_text(parsed: Page) -> None:
    assert Counter(tag for tag, _ in parsed.elements)["script"] == 1
    assert [a["alt"] for tag, a in parsed.elements if tag == "img"] == [
        "Accuracy by seq_len and num_samples, a panel for each method: beta"
    ]
    assert HOSTILE in parsed.texts["h2"]
    reasons = [text for _, text in parsed.column("table-trials", "Reason")]
    assert reasons.count(HOSTILE_REASON) == 2


def test_ids_are_unique_and_links_lead_somewhere(parsed: Page) -> None:
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {(a["href"] or "")[1:] for tag, a in parsed.elements if tag == "a"} <= set(ids)


def test_every_trial_is_there_once_with_its_numbers(parsed: Page, findings: Findings) -> None:
    names = [attributes["data-sort"] for attributes, _ in parsed.column("table-trials", "Configuration")]
    models, states = ([text for _, text in parsed.column("table-trials", title)] for title in ("Model", "Status"))
    numbers = zip(parsed.numbers("table-trials", "Accuracy"), parsed.numbers("table-trials", "p"), states, strict=True)
    seen = dict(zip(zip(models, names, strict=True), numbers, strict=True))
    assert len(names) == len(seen) == 36
    for label, found in findings.models.items():
        for row in found.eligible.to_dict("records"):
            assert seen.pop((label, row["name"])) == (row["acc_mean"], row["p_value"], "complete")
        assert seen.pop((label, FAILED)) == (None, None, "failed")
        assert seen.pop((label, STOPPED)) == (None, None, "stopped early")
    assert seen == {}


def test_first_screen_says_what_the_findings_say(parsed: Page, html: str, findings: Findings) -> None:
    cards = html.split("<article")[1:]
    assert len(cards) == 2
    for card, (label, found) in zip(cards, findings.models.items(), strict=True):
        text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", card))
        best, fit = found.best, found.cross_fit
        assert fit is not None
        for value, stderr in ((best["acc_mean"], best["acc_mean_stderr"]), (fit.corrected, fit.stderr)):
            assert f"{value:.4f} ± {stderr:.4f}".replace("0.", ".") in text
        assert f"{100 * best['acc_mean'] / found.model.baseline['acc_mean']:.1f}%" in text
        assert f"Perplexity {best['ppl']:.2f}" in text
        inside = set(found.eligible.loc[found.eligible["in_confidence_set"], "name"]) - {best["name"]}
        chips = card.split('class="chips">')
        named = {name for part in chips[1:] for name in re.findall(r"<code>([^<]*)</code>", part.split("</p>")[0])}
        assert inside <= named, label
        others = f"{found.compared} others"
        assert (f"{len(inside)} of {others}" if inside else f"Clearly better than all {others}") in text
    said = {text.strip() for text in parsed.texts["li"]}
    warnings = [warning for found in findings.models.values() for warning in found.warnings]
    texts = {messages.format_message(warning) for warning in warnings if warning.kind != "within_noise"}
    assert texts and texts <= said


PROBE = """
<script>
const table = document.querySelector("#table-trials table");
const heads = [...table.tHead.rows[0].cells];
const accuracy = heads.find((head) => head.textContent === "Accuracy").getBoundingClientRect();
const visible = accuracy.width > 0 && accuracy.right <= 390; // Chromium makes no window narrower than 500
const column = heads.findIndex((head) => head.textContent === "Gap");
const keys = () => [...table.tBodies[0].rows].map((row) => row.cells[column].dataset.sort ?? "none").join(" ");
const click = () => {
  heads[column].querySelector("button").click();
  return heads[column].getAttribute("aria-sort") + " " + keys();
};
const up = click(), down = click();
const input = document.querySelector("#table-trials input[type=search]");
input.value = "FAILED taylor";
input.dispatchEvent(new Event("input"));
const shown = [...table.tBodies[0].rows].filter((row) => !row.hidden).length;
const count = document.querySelector("#table-trials output").value;
document.body.textContent = ["[[", up, down, shown, count, visible, "]]"].join("|");
</script>
"""


@pytest.mark.slow
def test_sorting_filter_and_a_narrow_screen_in_chromium(html: str, tmp_path: Path, findings: Findings) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    without_policy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)  # it would stop the probe
    (tmp_path / "page.html").write_text(without_policy.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    flags = [
        "--headless",
        "--window-size=390,844",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [chromium, *flags, "--dump-dom", f"file://{tmp_path / 'page.html'}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    _, up, down, shown, count, visible, _ = done.stdout[done.stdout.index("[[") : done.stdout.index("]]") + 2].split(
        "|"
    )
    gaps = sorted(value for found in findings.models.values() for value in found.eligible["difference_points"])
    for answer, direction, expected in ((up, "ascending", gaps), (down, "descending", gaps[::-1])):
        said, *keys = answer.split()
        assert said == direction
        assert [float(key) for key in keys[:-4]] == expected
        assert keys[-4:] == ["none"] * 4  # two that failed and two that were stopped: last in both directions
    assert (shown, count) == ("2", "2 of 36")
    assert visible == "true"  # accuracy, on a telephone, without scrolling sideways
