"""The text report and its sentences: both languages with the same values, straight columns, the forms of numbers."""

from __future__ import annotations

import ast
import math
import re
import string
from collections import Counter
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from jinja2 import nodes

from tune_prune.analysis.input.study import Study
from tune_prune.analysis.render.messages import CATALOGUE, LANGUAGES, TRANSLATIONS, printed
from tune_prune.analysis.render.report import report
from tune_prune.analysis.render.templating import TEMPLATES, environment
from tune_prune.analysis.render.text import COLUMNS, fold, text_columns, width
from tune_prune.analysis.statistics.findings import Findings, find

NUMBER = re.compile(r"(?<![A-Za-z0-9_.])-?\d*\.?\d+(?![A-Za-z0-9_])")


def test_both_languages_say_the_same_numbers(published: Findings, simulated: Findings) -> None:
    for findings in (published, simulated):
        english, chinese = (Counter(NUMBER.findall(report(findings, language))) for language in LANGUAGES)
        assert sum(english.values()) > 200
        assert chinese == english
    assert "剪枝" in report(published, "zh") and "困惑度" in report(published, "zh")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.slow
def test_no_line_is_wider_than_the_page(published: Findings, simulated: Findings, language: str) -> None:
    """Many models of long names fit, and a best of which nothing is known."""
    labels = [f"an-organisation/a-model-of-quite-some-size-{number}-instruct" for number in range(14)]
    alpha = simulated.models["alpha"]
    rows = alpha.model.rows.assign(acc_mean_stderr=float("nan"), ppl=float("nan"), output_dir="")
    bare = replace(alpha.model, rows=rows, baseline={})
    many = find(Study({label: replace(bare, label=label) for label in [*labels, "x" * 130]}))
    many = replace(many, without=tuple(labels))
    for findings in (published, simulated, many):
        text = report(findings, language)
        assert max(map(width, text.splitlines())) <= COLUMNS
        assert "nan" not in text.lower() and "None" not in text and "\n\n\n" not in text and not re.search(r" \n", text)
        assert text.endswith("\n") and not text.endswith("\n\n")


def test_tables_are_straight_where_characters_are_two_columns_wide() -> None:
    rows = [["taylor", "7", ".5412"], ["逐层", "45", ".5323"]]
    assert text_columns(["方法", "n", "准确率"], rows, "lrr") == (
        "  方法     n  准确率\n"  #
        "  ------  --  ------\n"
        "  taylor   7   .5412\n"
        "  逐层    45   .5323\n"
    )


def test_a_table_too_wide_goes_on_below() -> None:
    text = text_columns(["model", *"abc"], [["m1", "1" * 10, "2" * 10, "3" * 10]], "lrrr", columns=32)
    assert [line.split() for line in text.splitlines() if line and "-" not in line] == (
        [["model", "a", "b"], ["m1", "1" * 10, "2" * 10], ["model", "c"], ["m1", "3" * 10]]
    )
    assert max(map(width, text_columns(["x" * 70, "y" * 70], [["甲" * 70, "z" * 70]], "lr").splitlines())) == COLUMNS


def test_folded_text_is_whole_and_breaks_where_it_may() -> None:
    english = "  - The quick brown fox (of length 3.14) jumps over " + "x" * 60
    lines = fold(english, columns=24).splitlines()
    assert max(map(width, lines)) <= 24 and lines[0].startswith("  - The") and lines[1].startswith("    ")
    assert "".join("".join(lines).split()) == "".join(english.split())
    assert fold("  准确率  \ta b c d", columns=14) == "  准确率  a b\n          c d"
    chinese = "最优配置（blockwise-s64-n128）的准确率，在噪声范围内，无法与其他配置区分。" * 3
    for columns in range(26, 60):
        lines = fold(chinese, columns).splitlines()
        assert max(map(width, lines)) <= columns
        assert "".join(lines) == chinese
        assert not any(line.startswith(tuple("，。）")) or line.endswith("（") for line in lines)


CHINESE = re.compile("[\u4e00-\u9fff]")
SOURCES = [path.read_text(encoding="utf-8") for path in TEMPLATES.parents[1].rglob("*.py")]


def placeholders(sentence: str) -> set[tuple[str, str]]:
    """Name and form of every value that a sentence asks for."""
    return {(name, form or "") for _, name, form, _ in string.Formatter().parse(sentence) if name is not None}


def sentences_of_the_report() -> set[str]:
    """Return the texts that templates/report.txt.j2 gives to `translate` and `entry`."""
    parsed = environment().parse((TEMPLATES / "report.txt.j2").read_text(encoding="utf-8"))
    calls = [call for call in parsed.find_all(nodes.Call) if getattr(call.node, "name", "") in ("translate", "entry")]
    first = [call.args[0] for call in calls]
    either = [text for a in first for text in ((a.expr1, a.expr2) if isinstance(a, nodes.CondExpr) else (a,))]
    return {text.value for text in either if isinstance(text, nodes.Const)}


def test_every_sentence_has_every_language_with_the_same_values() -> None:
    assert all(set(sentences) == set(LANGUAGES) for sentences in CATALOGUE.values())
    pairs = [(sentences["en"], sentences["zh"]) for sentences in CATALOGUE.values()]
    for english, chinese in [*pairs, *TRANSLATIONS["zh"].items()]:
        assert placeholders(english) == placeholders(chinese)
        letters = "".join(text for text, *_ in string.Formatter().parse(english))
        assert CHINESE.search(chinese) or not re.search("[a-z]", letters)
        assert not CHINESE.search(english)


def test_every_translation_is_used_and_every_sentence_of_the_report_has_one() -> None:
    said = sentences_of_the_report()
    assert len(said) > 40
    assert said <= set(TRANSLATIONS["zh"])
    sources = "".join(SOURCES).lower()  # some labels are names of columns, capitalised
    assert not [text for text in set(TRANSLATIONS["zh"]) - said if f'"{text.lower()}"' not in sources]


def test_every_message_that_is_made_is_in_the_catalogue_and_the_other_way_round() -> None:
    """With the values that its sentence asks for, where these are written beside it."""
    made: dict[str, set[str] | None] = {}
    for call in (node for source in SOURCES for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        if getattr(call.func, "id", "") == "Message" and isinstance(call.args[0], ast.Constant):
            values = call.args[1] if len(call.args) > 1 else ast.Dict([], [])
            keys = {ast.literal_eval(key) for key in values.keys} if isinstance(values, ast.Dict) else None  # type: ignore[arg-type]
            made[call.args[0].value] = keys
    assert len(made) > 30 and made.keys() <= CATALOGUE.keys()
    for kind, names_of_values in made.items():
        asked = {name for name, _ in placeholders(CATALOGUE[kind]["en"])}
        assert names_of_values is None or names_of_values == asked, kind
    template = (TEMPLATES / "report.txt.j2").read_text(encoding="utf-8")
    texts = "".join([*SOURCES, template])
    prefixes = tuple(re.findall(r'"(\w+_)(?:\{|" ~)', texts))
    assert not [kind for kind in CATALOGUE if f'"{kind}"' not in texts and not kind.startswith(prefixes)]


@pytest.mark.parametrize(
    ("form", "values"),
    [
        ("acc", {0.598: ".5980", -0.79724: "-.7972", 1.0: "1.0000", 0.0: ".0000", -0.00001: ".0000", math.inf: "inf"}),
        ("acc", dict.fromkeys((math.nan, None, pd.NA), "–")),
        ("points", {-0.004: "0.00", 8.166: "8.17"}),
        ("percent", {0.8547: "85.5%", None: "–"}),
        ("int", {8030261248: "8,030,261,248", 0: "0", 10_000.0: "10,000", -100: "-100"}),
        ("number", {256: "256", 65536: "65,536", 0.5: "0.5", 1234.567: "1235"}),
        ("ppl", {13.169: "13.17", 1234567.0: "1.23e+06"}),
        ("p", {0.0004: "<.001", 0.05: ".050", 1.0: "1.000"}),
        ("duration", {100: "1m40s", None: "–"}),
    ],
)
def test_numbers(form: str, values: dict[Any, str]) -> None:
    assert {value: printed(value, form) for value in values} == values
