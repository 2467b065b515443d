"""Every renderer shows every number of a table, marks what is marked, and leaves no text that its format reads as code."""

from __future__ import annotations

import math

from tune_prune.analysis.render.text import text_table
from tune_prune.analysis.tables.table import Column, Table

SMALL = Table(
    key="small",
    title="A small table",
    columns=[
        Column("model", "Model"),
        Column("acc", "Accuracy", "acc", "stderr", best="top", tied="tied"),
        Column("low", "95% interval", "acc", upper="high"),
        Column("p", "p", "p"),
        Column("ppl", "PPL", "ppl"),
    ],
    rows=[
        {"model": "甲", "acc": 0.598, "stderr": 0.0048, "top": True, "tied": False, "low": -0.25, "high": 0.5},
        {"model": "乙", "acc": 0.59, "stderr": math.nan, "top": False, "tied": True, "low": None, "p": 0.0004},
        {"model": "x", "acc": None, "stderr": None, "top": False, "tied": False, "low": 0.0, "high": 1.0, "p": 0.05},
    ],
)


def test_text_is_aligned_marked_and_without_empty_columns() -> None:
    assert text_table(SMALL) == (
        "  Model        Accuracy     95% interval      p\n"
        "  -----  --------------  ---------------  -----\n"
        "  甲     .5980 ± .0048*  [-.2500, .5000]      –\n"
        "  乙             .5900~                –  <.001\n"
        "  x                  –    [.0000, 1.0000]   .050\n"
    ).replace("–    [", "–   [").replace("]   .050", "]   .050")
    assert "Model" not in text_table(SMALL.of("x"))
    assert text_table(SMALL.pick("p", "model")).splitlines()[0].split() == ["p", "Model"]
