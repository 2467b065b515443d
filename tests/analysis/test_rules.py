"""Selection rules on rows made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tune_prune.analysis.input.rows import calibration_tokens, typed
from tune_prune.analysis.statistics import rules
from tune_prune.core.config import PruningConfig
from tune_prune.pruning.compensation import recovery


def rows(*values: tuple[Any, ...], **more: list[float]) -> pd.DataFrame:
    """Rows (name, acc_mean, ppl, tokens), the most accurate first; errors of a difference are 1 point if not given."""
    frame = pd.DataFrame(values, columns=["name", "acc_mean", "ppl", "tokens"])
    gaps = 100 * (frame["acc_mean"] - frame["acc_mean"].iloc[0])
    defaults = {
        "params_count": pd.array([800] * len(frame), dtype="Int64"),
        "gradient_pass_s": math.nan,
        "retained_per_second": math.nan,
        "difference_points": gaps,
        "difference_stderr_points": np.where(gaps == 0, 0.0, 1.0),
        "margin_points": 2 + 100 * (frame["acc_mean"] - 0.605),  # below a dense model of .605
    }
    return frame.assign(**(defaults | more))


ABC = (("a", 0.60, 12.0, 4096), ("b", 0.595, 11.0, 1024), ("c", 0.58, 10.0, 64))


def test_each_rule_chooses_what_it_says() -> None:
    assert {rule: choose(rows(*ABC)) for rule, choose in rules.RULES.items()} == {
        "accuracy": ["a"],
        "perplexity": ["c"],
        "gold_logprob": [],  # nobody has measured it
        "kl": [],
        "one-standard-error": ["b"],  # c is cheaper, but 2 points behind with an error of 1
        "pareto": ["a", "b", "c"],
        "smallest": ["a"],  # all are of one size
        "retained-per-second": [],  # no speed was measured
    }


@pytest.mark.parametrize(
    ("errors", "expected"),
    [([0, 0.4, 1.9], "a"), ([0, 0.5, 1.9], "b"), ([0, 0.4, 2.1], "c"), ([math.nan] * 3, "a")],
    ids=["none", "one", "the cheapest of all", "unknown"],
)
def test_one_standard_error_is_of_the_difference_to_the_best(errors: list[float], expected: str) -> None:
    frame = rows(*ABC, difference_stderr_points=[error + 1e-9 for error in errors])
    assert rules.one_standard_error(frame) == [expected]


def test_steps_refit_and_training_count_as_calibration_tokens() -> None:
    configs = [
        PruningConfig("taylor", 16, 8),
        PruningConfig("taylor", 16, 8, steps=4),
        PruningConfig("taylor", 16, 8, compensation="least_squares", refit_tokens=2048),
        PruningConfig(
            "taylor", 16, 8, compensation="least_squares", refit_tokens=2048, recovery="lora", recovery_steps=3
        ),
    ]
    tokens = calibration_tokens(typed(pd.DataFrame([config.to_dict() for config in configs])))
    assert tokens.tolist() == [128, 512, 128 + 2048, 128 + 2048 + 3 * recovery.ROWS * recovery.WINDOW]


def test_equal_tokens_are_told_apart_by_the_measured_pass_then_by_accuracy() -> None:
    same = (("a", 0.600, 12.0, 64), ("b", 0.599, 11.0, 64), ("c", 0.598, 10.0, 64))
    assert rules.one_standard_error(rows(*same)) == ["a"]
    assert rules.one_standard_error(rows(*same, gradient_pass_s=[math.nan, 2.0, 2.0])) == ["b"]
    assert rules.one_standard_error(rows(*same, gradient_pass_s=[3.0, 2.0, 1.0])) == ["c"]


@pytest.mark.parametrize(
    ("params", "margins", "expected"),
    [
        ([800, 700, 600], [1.5, 1.0, 0.0], ["c"]),
        ([800, 700, 600], [1.5, 1.0, -0.1], ["b"]),  # c is too far below the dense model
        ([800, 700, 699.9], [1.5, 1.0, 0.5], ["b"]),  # a channel is no smaller model
        ([800, 700, math.nan], [1.5, 1.0, 0.5], ["b"]),
        ([math.nan] * 3, [1.5, 1.0, 0.5], ["a"]),
        ([800, 700, 600], [-0.1, -0.2, -0.3], []),
        ([800, 700, 600], [math.nan] * 3, []),  # the dense model is unknown
    ],
)
def test_smallest_is_the_smallest_within_the_bound(params: Any, margins: list[float], expected: list[str]) -> None:
    assert rules.smallest(rows(*ABC, params_count=params, margin_points=margins)) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.9, 1.0, 1.1], ["c"]),
        ([1.1, math.nan, 1.1], ["a"]),  # of equal ones the more accurate
        ([math.nan, 0.5, math.nan], ["b"]),  # of those that were measured
    ],
)
def test_the_most_retained_per_second_is_of_those_that_were_measured(values: list[float], expected: list[str]) -> None:
    assert rules.retained_per_second(rows(*ABC, retained_per_second=values)) == expected


def test_perplexity_ignores_what_is_not_finite() -> None:
    frame = rows(("a", 0.6, math.nan, 1), ("b", 0.5, math.inf, 1), ("c", 0.4, 30.0, 1), ("d", 0.3, 30.0, 1))
    assert rules.perplexity(frame) == ["c"]
    assert rules.perplexity(frame.iloc[:2]) == []


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ["a", "b"]),  # c is worse than b in both
        ({"params_count": [800, 800, 799.9]}, ["a", "b"]),  # a channel is no smaller model
        ({"params_count": [800, 800, 700]}, ["a", "b", "c"]),
        ({"params_count": [800, 700, 700]}, ["a", "b"]),
        ({"latency_s": [1.0, 1.0, 0.5]}, ["a", "b", "c"]),
        ({"latency_s": [1.0, 1.0, math.nan]}, ["a", "b"]),  # not measured is not fast
        ({"latency_s": [math.nan] * 3}, ["a", "b"]),
        ({"latency_s": [1.0] * 3, "latency_s_stderr": [3.0, 2.0, 1.0]}, ["a", "b"]),
    ],
)
def test_pareto_keeps_what_nothing_dominates(more: dict[str, list[float]], expected: list[str]) -> None:
    frame = rows(("a", 0.6, 12.0, 1), ("b", 0.5, 10.0, 1), ("c", 0.4, 11.0, 1), **more)
    assert rules.pareto(frame) == expected


def test_pareto_keeps_twins_and_drops_who_is_worse_in_one() -> None:
    assert rules.pareto(rows(("a", 0.6, 10.0, 1), ("b", 0.6, 10.0, 1), ("c", 0.6, 10.1, 1))) == ["a", "b"]


def test_pareto_is_a_brute_force_search() -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(0, 12, (60, 3))
    frame = rows(
        *((str(i), a / 100, float(p), 1) for i, (a, p, _) in enumerate(values)), latency_s=values[:, 2].tolist()
    )
    costs = [(-a, p, s) for a, p, s in values.tolist()]
    expected = {
        str(i)
        for i, mine in enumerate(costs)
        if not any(other != mine and all(o <= m for o, m in zip(other, mine, strict=True)) for other in costs)
    }
    assert set(rules.pareto(frame)) == expected
    assert 1 < len(expected) < 30
