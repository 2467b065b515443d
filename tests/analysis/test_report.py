"""The text report: the published figures to the digit, both languages with the same numbers, and columns that are straight."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.findings import METHODS, SAMPLES, SEQ_LENS, published_findings, simulated_findings
from tune_prune.analysis.input.study import Study
from tune_prune.analysis.render.messages import LANGUAGES, format_message, printed
from tune_prune.analysis.render.report import SHOWN_PROBLEMS, report
from tune_prune.analysis.render.text import COLUMNS, aligned, fold, text_table, width
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.trial_tables import problem_counts
from tune_prune.core.errors import UserError

NUMBER = re.compile(r"(?<![A-Za-z0-9_.])-?\d*\.?\d+(?![A-Za-z0-9_])")


@pytest.fixture(scope="module")
def published() -> Findings:
    return published_findings()


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Two models with the outcomes of every item, and more trials that do not compete than the first screen has room for."""
    failed, stopped = ("taylor-s16-n128", "taylor-s16-n512"), ("layerwise-s16-n128", "layerwise-s16-n512")
    return simulated_findings(tmp_path_factory.mktemp("two"), failed=failed, stopped=stopped)


def cells(text: str, first: str) -> list[str]:
    """The cells of the only row of a table whose first cell is `first`."""
    found = [line for line in text.splitlines() if re.match(rf" +{re.escape(first)}(  |$)", line)]
    assert len(found) == 1, found
    return re.split(r" {2,}", found[0].strip())


def section(text: str, number: int) -> str:
    return text.partition(f"\n{number}. ")[2].partition(f"\n{number + 1}. ")[0]


def first_screen(text: str) -> str:
    return text.partition("=" * COLUMNS)[0]


def joined(text: str) -> str:
    """The text as if it had not been broken into lines."""
    return " ".join(text.split())


def test_the_published_figures_to_the_digit(published: Findings) -> None:
    """Those that test_tables does not hold."""
    text = report(published)
    assert cells(section(text, 1).partition("Compared with")[0], "blockwise")[4:7] == [".0172", ".5493", ".5879"]
    assert cells(section(text, 2), "64")[1] == "9" and "p <.001" in joined(section(text, 2))
    assert cells(section(text, 2), "residual")[1:4] == ["16", "0.9%", "0.0007125"]
    interval = ["15", ".9611", "[.8842, .9873]"]  # over the passes
    assert cells(section(text, 3), "grad_mean_ratio")[3:] == [".4589", *interval]
    assert "grad_norm_ratio is not computable: it is not a finite number in 3 of the rows." in joined(section(text, 3))
    assert cells(section(text, 4), "5")[1] == "13"
    assert cells(section(text, 5), "blockwise-s64-n128")[1:] == [".5980 ± .0048*", "1", "13.17", "18"]


def test_the_first_screen_has_the_decision_and_all_that_cannot_be_told_from_it(published: Findings) -> None:
    found = published.models["Llama"]
    screen = joined(first_screen(report(published)))
    assert "Best blockwise-s64-n128: method blockwise, seq_len 64, num_samples 128" in screen
    assert "Accuracy .5980 ± .0048 as measured" in screen and "Perplexity 13.17" in screen
    close = found.eligible.iloc[1:].loc[lambda rows: rows["in_confidence_set"].to_numpy(), "name"]
    assert len(close) > 2
    assert f"{len(close)} of 44 others with {found.best['name']}, the most accurate (95%" in screen
    assert all(name in screen.partition("Warnings")[0] for name in close)
    assert "Cross-fitted not known" in screen  # there are no items
    assert all(format_message(warning) in screen for warning in found.warnings)
    assert "grad_norm_ratio is inf" in screen


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_comparison_says_what_the_findings_say(two_models: Findings, language: str) -> None:
    screen, _, across = report(two_models, language).partition("=" * COLUMNS)
    for label, found in two_models.models.items():
        assert found.cross_fit is not None and printed(found.cross_fit.corrected, "acc") in screen
        assert printed(found.best["acc_mean"] / found.model.baseline["acc_mean"], "percent") in screen
        assert label in screen and found.best["name"] in screen
    across = across.partition("\n7. ")[2]
    assert two_models.transfer is not None
    best = two_models.transfer.best_for_all
    assert best["config"] in across and printed(best["acc_mean"], "acc") in across
    assert text_table(all_tables(two_models)["transfer"], language) in across


def test_every_trial_that_does_not_compete_is_listed(two_models: Findings) -> None:
    text = report(two_models)
    for found in two_models.models.values():
        assert len(found.model.problems) == 4 <= SHOWN_PROBLEMS
        assert all(f"{problem.where}: {problem.what}" in joined(first_screen(text)) for problem in found.model.problems)
    assert (
        "2 trials were stopped early" in first_screen(text)
        and "2 trials failed" in first_screen(text)
        and "Appendix" not in text
    )

    alpha = two_models.models["alpha"]
    many = tuple(
        replace(alpha.model.problems[0], where=f"line {number} of x.csv") for number in range(SHOWN_PROBLEMS + 1)
    )
    text = report(replace(two_models, models={"alpha": replace(alpha, model=replace(alpha.model, problems=many))}))
    (counted,) = problem_counts(many)
    assert counted.values == {"count": len(many)} and f"{format_message(counted)}, see the appendix" in joined(
        first_screen(text)
    )
    assert all(f"line {number} of x.csv: " in text.partition("Appendix")[2] for number in range(len(many)))


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


def test_another_rule_says_where_its_choice_stands(tmp_path: Path) -> None:
    findings = simulated_findings(tmp_path, rule="one-standard-error", models=("alpha",), items=100)
    found = findings.models["alpha"]
    top = found.eligible["name"].iloc[0]
    assert found.best["name"] != top  # else this shows nothing
    screen = joined(first_screen(report(findings)))
    assert f"Best {found.best['name']}" in screen and f"with {top}, the most accurate" in screen
    assert "fewest calibration tokens within one standard error" in screen
    assert "at least two models" in report(findings).partition("\n7. ")[2]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_model_with_one_complete_trial(tmp_path: Path, language: str) -> None:
    others = [f"{method}-s{s}-n{n}" for method in METHODS for s in SEQ_LENS for n in SAMPLES][1:]
    text = report(simulated_findings(tmp_path, models=("alpha",), failed=others), language)
    only = {"en": "no other configuration is complete", "zh": "没有其他完成的配置"}[language]
    assert only in text and "nan" not in text.lower()
    assert "Std  " not in section(text, 1) and "标准差  " not in section(text, 1)  # there is none of one
    assert section(text, 3).count("\n  - ") == 1  # why nothing is correlated, once for all measures


def test_a_language_that_is_not_there(published: Findings) -> None:
    with pytest.raises(UserError, match="language is 'fr'; it must be one of en, zh"):
        report(published, "fr")


def test_tables_are_straight_where_characters_are_two_columns_wide() -> None:
    rows = [["taylor", "7", ".5412"], ["逐层", "45", ".5323"]]
    assert aligned(["方法", "n", "准确率"], rows, "lrr") == (
        "  方法     n  准确率\n"  #
        "  ------  --  ------\n"
        "  taylor   7   .5412\n"
        "  逐层    45   .5323\n"
    )


def test_a_table_too_wide_goes_on_below() -> None:
    text = aligned(["model", *"abc"], [["m1", "1" * 10, "2" * 10, "3" * 10]], "lrrr", columns=32)
    assert [line.split() for line in text.splitlines() if line and "-" not in line] == (
        [["model", "a", "b"], ["m1", "1" * 10, "2" * 10], ["model", "c"], ["m1", "3" * 10]]
    )
    assert max(map(width, aligned(["x" * 70, "y" * 70], [["甲" * 70, "z" * 70]], "lr").splitlines())) == COLUMNS


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
