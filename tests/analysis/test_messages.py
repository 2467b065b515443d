"""Sentences of messages and of the text report in every language, and the forms of numbers."""

from __future__ import annotations

import ast
import math
import re
import string
from typing import Any

import pandas as pd
import pytest
from jinja2 import nodes

from tune_prune.analysis.render.messages import CATALOGUE, LANGUAGES, TRANSLATIONS, format_message, names, printed
from tune_prune.analysis.render.templating import TEMPLATES, environment
from tune_prune.analysis.statistics.findings import Message

CHINESE = re.compile("[\u4e00-\u9fff]")
SOURCES = [path.read_text(encoding="utf-8") for path in TEMPLATES.parents[1].rglob("*.py")]


def placeholders(sentence: str) -> set[tuple[str, str]]:
    """Name and form of every value that a sentence asks for."""
    return {(name, form or "") for _, name, form, _ in string.Formatter().parse(sentence) if name is not None}


def sentences_of_the_report() -> set[str]:
    """What templates/report.txt.j2 gives to `translate` and `entry`."""
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


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(KeyError, match="'no_such_kind'"):
        format_message(Message("no_such_kind"))
    with pytest.raises(KeyError, match="count"):
        format_message(Message("not_finite", {"column": "ppl"}))


def test_lists_are_cut_where_they_get_long() -> None:
    assert [names(list("abcdefg"[:n])) for n in (0, 1, 2, 3)] == ["–", "a", "a and b", "a, b and c"]
    assert names(list("abcde")) == "a, b, c, d and e"  # "and 1 more" would be no shorter
    assert names(list("abcdefg")) == "a, b, c, d and 3 more"
    assert names(list("abcdefg"), "zh") == "a、b、c、d 及另外 3 个"


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
