"""The text report: the published figures to the digit, both languages with the same numbers, and columns that are straight."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from tests.findings import published_findings, simulated_findings
from tune_prune.analysis.input.study import Study
from tune_prune.analysis.render.messages import LANGUAGES
from tune_prune.analysis.render.report import report
from tune_prune.analysis.render.text import COLUMNS, fold, text_columns, width
from tune_prune.analysis.statistics.findings import Findings, find

NUMBER = re.compile(r"(?<![A-Za-z0-9_.])-?\d*\.?\d+(?![A-Za-z0-9_])")


@pytest.fixture(scope="module")
def published() -> Findings:
    return published_findings()


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Two models with the outcomes of every item, and more trials that do not compete than the first screen has room for."""
    failed, stopped = ("taylor-s16-n128", "taylor-s16-n512"), ("layerwise-s16-n128", "layerwise-s16-n512")
    return simulated_findings(tmp_path_factory.mktemp("two"), failed=failed, stopped=stopped)


def test_both_languages_say_the_same_numbers(published: Findings, two_models: Findings) -> None:
    for findings in (published, two_models):
        english, chinese = (Counter(NUMBER.findall(report(findings, language))) for language in LANGUAGES)
        assert sum(english.values()) > 200
        assert chinese == english
    assert "剪枝" in report(published, "zh") and "困惑度" in report(published, "zh")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.slow
def test_no_line_is_wider_than_the_page(published: Findings, two_models: Findings, language: str) -> None:
    """Also with many models of long names, and where nothing is known of a best."""
    labels = [f"an-organisation/a-model-of-quite-some-size-{number}-instruct" for number in range(14)]
    alpha = two_models.models["alpha"]
    rows = alpha.model.rows.assign(acc_mean_stderr=float("nan"), ppl=float("nan"), output_dir="")
    bare = replace(alpha.model, rows=rows, baseline={})
    many = find(Study({label: replace(bare, label=label) for label in [*labels, "x" * 130]}))
    many = replace(many, without=tuple(labels))
    for findings in (published, two_models, many):
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
