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

from tune_prune.analysis.render.messages import (
    CATALOGUE,
    LANGUAGES,
    TRANSLATIONS,
    format_message,
    names,
    pm,
    printed,
)
from tune_prune.analysis.render.templating import TEMPLATES, environment
from tune_prune.analysis.statistics.findings import RULES, Message, Trend
from tune_prune.analysis.tables.hyperparameters import trend_message

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


def test_sentences_as_they_read() -> None:
    def said(kind: str, language: str = "en", **values: Any) -> str:
        return format_message(Message(kind, values), language)

    assert said("not_finite", column="grad_norm_ratio", count=3) == (
        "grad_norm_ratio is not computable: it is not a finite number in 3 of the rows."
    )
    assert said("selection_bias", "zh", naive=0.598, corrected=0.5951).count(".59") == 2
    largest = Message("edge_upper", {"factor": "seq_len", "value": 256})
    smallest = Message("edge_lower", {"factor": "num_samples", "value": 8})
    space = ["seq_len: [256, 512]", "num_samples: [4, 8]"]
    assert said("edges", edges=[largest, smallest], space=space) == (
        "The range may be too small: the best seq_len, 256, is the largest tried and the best num_samples, 8, is the smallest "
        "tried. Search again with seq_len: [256, 512] and num_samples: [4, 8] in the search space."
    )
    assert "最优的 seq_len（256）" in said("edges", "zh", edges=[largest], space=space[:1])
    ranks = said("rank_disagrees", by_mean="taylor", by_max="blockwise")
    assert ranks.startswith(
        "taylor has the highest mean accuracy, but the most accurate configuration is one of blockwise"
    )
    assert said("within_noise", best="x", others=["a", "b"], next="a", points=0.123) == (
        "a and b cannot be told from x, the most accurate; a is 0.12 points behind. For the least sample text within one "
        "standard error of it, use --rule one-standard-error."
    )


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(KeyError, match="'no_such_kind'"):
        format_message(Message("no_such_kind"))
    with pytest.raises(KeyError, match="count"):
        format_message(Message("not_finite", {"column": "ppl"}))


@pytest.mark.parametrize("direction", ["rises", "falls", "rises_then_falls", "falls_then_rises", "flat", "mixed"])
def test_every_trend_and_rule_has_words(direction: str) -> None:
    trend = Trend("seq_len", direction, 8.166, 0.5, 256, (256,), 0.9, 0.01)
    for language in LANGUAGES:
        said = format_message(trend_message(trend), language)
        assert "seq_len" in said and "8.17 ± 0.50" in said
    assert all(f"rule_{rule}" in CATALOGUE for rule in RULES)


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


def test_numbers_with_their_standard_errors() -> None:
    assert (pm(0.598, 0.0048), pm(0.598, math.nan), pm(None, 0.1)) == (".5980 ± .0048", ".5980", "–")
    assert pm(0.123, 0.5, "points") == "0.12 ± 0.50"


def test_environment_escapes_pages_only_and_refuses_unknown_names() -> None:
    jinja = environment()
    assert jinja.from_string("{{ 0.598 | pm(0.0048) }} {{ 45000 | int }}").render() == ".5980 ± .0048 45,000"
    with pytest.raises(Exception, match="'nothing' is undefined"):
        jinja.from_string("{{ nothing }}").render()
    assert callable(jinja.autoescape)
    assert jinja.autoescape("report.html.j2")
    assert not jinja.autoescape("paragraphs.md.j2") and not jinja.autoescape(None)
    assert TEMPLATES.is_dir()
