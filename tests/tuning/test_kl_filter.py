"""The filter by KL: its rule by a plain loop, whom it compares, and what a restarted search goes on with."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.trial_messages import stage_message
from tests.tuning.test_stopping import message, specs_of
from tune_prune.core.records import TrialRecord
from tune_prune.tuning.stopping.kl_filter import KlFilterRule
from tune_prune.tuning.stopping.race import RaceRule

KEYS = [f"key{index:03}" for index in range(60)]


def kl(key: str, text: float | None, tasks: float | None):
    """A worker's message after the KL of a trial; None: it has no such one."""
    values = {"kl_text": text, "kl_tasks": tasks, "kl_text_stderr": 100.0, "kl_tasks_stderr": 100.0}
    return stage_message(key, "kl", metrics={name: value for name, value in values.items() if value is not None})


def stopped_by(rule: KlFilterRule, trials) -> list[str]:
    return [key for key, text, tasks in trials if rule.stops(kl(key, text, tasks))]


def by_a_plain_loop(trials) -> list[str]:
    """Every trial beside all before it, with NumPy's median."""
    found = []
    for place, (key, *values) in enumerate(trials):
        beyond = 0
        for column, value in enumerate(values):
            before = [other[1 + column] for other in trials[:place]]
            before = [other for other in before if other is not None and math.isfinite(other)]
            if value is not None and len(before) >= 5:
                beyond += not math.isfinite(value) or value > 1.5 * float(np.median(before))
        found += [key] * (beyond == 2)
    return found


def draw(rng: random.Random, odd: float) -> float | None:
    return rng.choice([None, math.nan, math.inf]) if rng.random() < odd else rng.lognormvariate(0, 1)


@pytest.mark.parametrize("odd", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(20))
def test_it_stops_what_a_plain_loop_stops_and_a_restart_changes_nothing(seed, odd):
    """Restarted after every trial in turn, with the records that the ledger has then."""
    rng = random.Random(seed)
    trials = [(key, draw(rng, odd), draw(rng, odd)) for key in KEYS]
    specs, expected = specs_of(*KEYS), by_a_plain_loop(trials)
    assert expected and not {*expected} & {*KEYS[:5]}
    assert stopped_by(KlFilterRule(specs), trials) == expected
    records = [
        TrialRecord(key, "m", {}, "stopped_early" if key in expected else "complete", metrics=one.progress.metrics)
        for key, text, tasks in trials
        for one in [kl(key, text, tasks)]
    ]
    for done in range(0, len(trials), 7):
        known = random.Random(done).sample(records[:done], done)  # the ledger has no order
        later = [key for key in expected if KEYS.index(key) >= done]
        assert stopped_by(KlFilterRule(specs, known), trials[done:]) == later


def test_the_record_says_which_measures_their_values_and_the_medians():
    rule = KlFilterRule(specs_of(*KEYS))
    falling = [(key, 6.0 - n, 60.0 - 10 * n) for n, key in enumerate(KEYS[:6])]
    assert (
        stopped_by(rule, [*falling, ("key010", 5.25, 999.0), ("key011", 999.0, 60.0)]) == []
    )  # 5.25 and 60 are let through
    assert stopped_by(rule, [("key012", 7.0, 80.0), ("key013", math.nan, math.inf)]) == ["key012", "key013"]
    assert rule.reasons == {
        "key012": "stopped by the KL filter: kl_text 7 is above 1.5 times 4.5, the median of 8 earlier trials; "
        "kl_tasks 80 is above 1.5 times 45, the median of 8 earlier trials",
        "key013": "stopped by the KL filter: kl_text nan is not finite, and 5 is the median of 9 earlier trials; "
        "kl_tasks inf is not finite, and 50 is the median of 9 earlier trials",
    }


def test_four_earlier_trials_stop_nobody():
    trials = [(key, 1.0, 1.0) for key in KEYS[:4]]
    assert stopped_by(KlFilterRule(specs_of(*KEYS)), [*trials, ("key010", 100.0, 100.0)]) == []
    assert stopped_by(KlFilterRule(specs_of(*KEYS)), [*trials, ("key009", 1.0, 1.0), ("key010", 100.0, 100.0)]) == [
        "key010"
    ]
    broken = [(key, math.nan, math.nan) for key in KEYS[4:10]]  # of which there is no median
    assert stopped_by(KlFilterRule(specs_of(*KEYS)), [*trials, *broken]) == []


@pytest.mark.parametrize("far", [(100.0, 1.5), (1.5, 100.0), (100.0, None), (None, 100.0), (math.nan, 1.0)])
def test_both_have_to_be_too_large(far):
    trials = [(key, 1.0, 1.0) for key in KEYS[:9]]
    assert stopped_by(KlFilterRule(specs_of(*KEYS)), [*trials, ("key010", *far)]) == []


@pytest.mark.parametrize("others", [{"model": "other"}, {"ratio": 0.3}, {"recovery": "lora"}, {"seed": 3}])
def test_groups_are_apart(others):
    """Other models, pruning ratios, recoveries and draws of calibration samples."""
    specs = specs_of(*KEYS[:20], **{name: value for name, value in others.items() if name in ("model", "ratio")})
    more = {name: value for name, value in others.items() if name in ("recovery", "seed")}
    specs = {key: replace(spec, config=replace(spec.config, **more)) for key, spec in specs.items()}
    specs |= specs_of(*KEYS[20:])
    rule = KlFilterRule(specs)
    trials = [(key, 1.0, 1.0) for key in KEYS[:9]] + [(key, 100.0, 100.0) for key in KEYS[20:29]]
    assert stopped_by(rule, trials) == []
    assert stopped_by(rule, [("key010", 10.0, 10.0), ("key030", 110.0, 110.0)]) == ["key010"]


def test_a_second_attempt_goes_on_as_the_first_and_counts_once():
    rule = KlFilterRule(specs_of(*KEYS))
    trials = [("key010", 9.0, 9.0), *((key, 1.0, 1.0) for key in KEYS[:4])]
    assert stopped_by(rule, [*trials, ("key010", 9.0, 9.0)]) == []
    assert stopped_by(rule, [("key011", 9.0, 9.0)]) == ["key011"]
    assert "the median of 5 earlier trials" in rule.reasons["key011"]


def test_what_passes_it_is_left_to_the_scheduler():
    """Stages without a KL, and trials whose KL is good enough: they race, and both rules say why in one place."""
    specs = specs_of(*KEYS)
    rule = KlFilterRule(specs, then=RaceRule(specs))
    trials = [(key, 1.0, 1.0) for key in KEYS[:6]]
    assert stopped_by(rule, trials) == []
    assert not rule.stops(stage_message("key000", "perplexity", metrics={"kl_text": 99.0, "kl_tasks": 99.0}))
    answers = [rule.stops(message(*one)) for one in (("key000", 0, 0.8), ("key001", 0, 0.1))]
    assert answers == [False, True]
    assert stopped_by(rule, [("key007", 2.0, 2.0)]) == ["key007"]
    assert rule.reasons["key001"].startswith("stopped by the race: behind ")
    assert rule.reasons["key007"].startswith("stopped by the KL filter: kl_text 2 is above 1.5 times 1, ")
