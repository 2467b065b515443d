"""Sentences of remarks in every language, and the forms of numbers."""

from __future__ import annotations

import math
import re
import string
from typing import Any

import pandas as pd
import pytest

from tune_prune.analysis.render.messages import (
    CATALOGUE,
    LANGUAGES,
    acc,
    format_message,
    integer,
    names,
    number,
    p_value,
    percent,
    pm,
    points,
)
from tune_prune.analysis.render.templating import TEMPLATES, environment
from tune_prune.analysis.statistics.findings import RULES, Message, Trend
from tune_prune.analysis.tables.hyperparameters import trend_message

# What the statistics put into each kind of remark.
VALUES: dict[str, dict[str, Any]] = {
    "edge": {"factor": "taylor_seq_len", "value": 256, "side": "upper"},
    "within_noise": {"best": "taylor-s64-n128", "others": ["a", "b"], "points": 0.123},
    "ppl_disagrees": {"best": "a", "best_ppl": "b"},
    "rank_disagrees": {"by_mean": ["taylor", "blockwise"], "by_max": "blockwise"},
    "not_finite": {"column": "grad_norm_ratio", "count": 3},
    "no_items": {},
    "too_few": {"n": 3},
    "constant": {"column": "ppl"},
    "at_chance": {"dense": 0.36, "chance": 0.357},
    "dense_unknown": {},
    "missing_trials": {"missing": 2, "expected": 45},
    "unpaired": {},
    "seeds_one": {},
    "partly_unpaired": {"names": ["a"]},
    "stopped_early": {"count": 22},
    "stderr_unknown": {"names": ["a", "b"]},
    "selection_bias": {"naive": 0.598, "corrected": 0.5951},
}


CHINESE = re.compile("[\u4e00-\u9fff]")


def placeholders(sentence: str) -> set[tuple[str, str]]:
    """Name and form of every value that a sentence asks for."""
    return {(name, form or "") for _, name, form, _ in string.Formatter().parse(sentence) if name is not None}


@pytest.mark.parametrize("kind", CATALOGUE)
def test_every_kind_has_every_language_with_the_same_values(kind: str) -> None:
    sentences = CATALOGUE[kind]
    assert set(sentences) == set(LANGUAGES)
    asked = {language: placeholders(sentence) for language, sentence in sentences.items()}
    assert asked["en"] == asked["zh"]
    letters = "".join(text for text, *_ in string.Formatter().parse(sentences["en"]))
    assert CHINESE.search(sentences["zh"]) or not re.search("[a-z]", letters)
    assert not CHINESE.search(sentences["en"])


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("kind", VALUES)
def test_the_statistics_remarks_are_said_with_all_their_values(kind: str, language: str) -> None:
    assert {name for name, _ in placeholders(CATALOGUE[kind][language])} == set(VALUES[kind])
    said = format_message(Message(kind, VALUES[kind]), language)
    assert "{" not in said and said.endswith("." if language == "en" else "。")
    assert "[" not in said  # a list is spelled out


def test_every_message_that_is_made_is_in_the_catalogue_and_the_other_way_round() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in TEMPLATES.parents[1].rglob("*.py"))
    made = set(re.findall(r'(?:Message|message|_section)\(\s*"(\w+)"', sources))
    assert len(made) > 50
    assert made <= set(CATALOGUE)
    prefixes = tuple(re.findall(r'f"(\w+_)\{', sources))
    assert not [
        kind for kind in CATALOGUE if not re.search(f"[\"']{kind}[\"']", sources) and not kind.startswith(prefixes)
    ]


def test_sentences_as_they_read() -> None:
    assert format_message(Message("not_finite", {"column": "grad_norm_ratio", "count": 3})) == (
        "grad_norm_ratio is not computable: it is not a finite number in 3 rows."
    )
    assert "in 1 row." in format_message(Message("not_finite", {"column": "x", "count": 1}))
    assert format_message(Message("selection_bias", VALUES["selection_bias"]), "zh").count(".59") == 2
    assert "taylor_seq_len, 256, is the largest" in format_message(Message("edge", VALUES["edge"]))
    assert "最小" in format_message(Message("edge", VALUES["edge"] | {"side": "lower"}), "zh")


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(KeyError, match="'no_such_kind'"):
        format_message(Message("no_such_kind"))
    with pytest.raises(KeyError, match="count"):
        format_message(Message("not_finite", {"column": "ppl"}))


@pytest.mark.parametrize("direction", ["rises", "falls", "rises_then_falls", "falls_then_rises", "flat", "mixed"])
def test_every_trend_and_rule_has_words(direction: str) -> None:
    trend = Trend("taylor_seq_len", direction, 8.166, 0.5, 256, 0.9, 0.01)
    for language in LANGUAGES:
        said = format_message(trend_message(trend), language)
        assert "taylor_seq_len" in said and "8.17 ± 0.50" in said
    assert all(f"rule_{rule}" in CATALOGUE for rule in RULES)


def test_lists_are_cut_where_they_get_long() -> None:
    assert [names(list("abcdefg"[:n])) for n in (0, 1, 2, 3)] == ["–", "a", "a and b", "a, b and c"]
    assert names(list("abcde")) == "a, b, c, d and e"  # "and 1 more" would be no shorter
    assert names(list("abcdefg")) == "a, b, c, d and 3 more"
    assert names(list("abcdefg"), "zh") == "a、b、c、d 及另外 3 个"


def test_numbers() -> None:
    assert [acc(x) for x in (0.598, -0.79724, 1.0, 0.0, -0.00001, math.nan, None, pd.NA, math.inf)] == (
        [".5980", "-.7972", "1.0000", ".0000", ".0000", "–", "–", "–", "inf"]
    )
    assert (points(-0.004), points(8.166), percent(0.8547), percent(None)) == ("0.00", "8.17", "85.5%", "–")
    assert (integer(8030261248), integer(0), integer(10_000.0), integer(-100)) == (
        "8,030,261,248",
        "0",
        "10,000",
        "-100",
    )
    assert (number(256), number(65536), number(0.5), number(1234.567)) == ("256", "65,536", "0.5", "1235")
    assert (p_value(0.0004), p_value(0.05), p_value(1.0)) == ("<.001", ".050", "1.000")
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
