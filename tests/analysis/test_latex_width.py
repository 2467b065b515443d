"""LaTeX tables are no wider than a page, however many models there are and however long their labels: by their own account, and
as pdflatex sets them where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.findings import simulated_findings
from tune_prune.analysis.render.files import document, escape, latex_table
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.table import Column, Table

LONG = (
    "mistral-community/Mistral-7B-Instruct-v0.3-unsloth",
    "meta-llama_Meta-Llama-3.1-8B-Instruct-hf",
    "Qwen2.5MathInstruct7BReasoningDistilled",
    "some_organisation.model_name_with_underscores_13b",
)
RATIOS = tuple(f"tiny-{family}@{ratio}" for family in ("llama", "qwen2", "mistral") for ratio in (0.2, 0.3))


@pytest.fixture(scope="module", params=[("one",), LONG, RATIOS], ids=["one label", "long labels", "six labels"])
def findings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    lost = {"failed": ["taylor-s16-n128"], "stopped": ["layerwise-s64-n512"]}
    return simulated_findings(tmp_path_factory.mktemp("study"), models=request.param, items=40, **lost)


@pytest.mark.slow
def test_a_broken_name_is_whole_without_its_breaks(findings: Findings) -> None:
    text = document(list(all_tables(findings).values()))
    whole = text.replace(r"\allowbreak{}", "")
    for label, found in findings.models.items():
        assert escape(label) in whole and escape(found.best["name"]) in whole
    assert len(findings.models) == 1 or r"-\allowbreak{}" in text


def test_a_table_is_scaled_where_the_line_of_the_document_is_narrower() -> None:
    """Of any document: a column of a journal, or a page that no size of letters has room on."""
    columns = [Column("model", "Model"), *(Column(f"n{index}", f"n{index}", "int") for index in range(40))]
    rows = [{"model": "m", **{f"n{index}": 1234567 for index in range(40)}}]
    text = latex_table(Table("wide", "Wide", columns, rows))
    fitted = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
    assert re.search(re.escape(fitted) + r"\n\\begin{tabular}(?s:.*)\\end{tabular}}\n", text)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex (texlive-latex-recommended)")
def test_pdflatex_finds_nothing_too_wide(findings: Findings, tmp_path: Path) -> None:
    (tmp_path / "all.tex").write_text(document(list(all_tables(findings).values())), encoding="utf-8")
    for _ in range(2):  # a longtable knows its widths the second time
        run = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == 0, done.stdout[-2000:]
    assert not re.search(r"Overfull|Float too large", done.stdout), done.stdout


def test_every_letter_of_the_tables_is_one_that_latex_prints(findings: Findings) -> None:
    """What is not is written as its code point: Kendall's tau once was."""
    text = document(list(all_tables(findings).values()))
    assert r"Kendall's $\tau$" in text and "{[}U+" not in text
