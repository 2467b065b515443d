"""The filter by KL: its rule by a plain loop, whom it compares, what a restarted search goes on with, and whole searches."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from tests.trial_messages import stage_message
from tests.tuning.test_stopping import message, specs_of
from tune_prune import load_results
from tune_prune.commands import search
from tune_prune.core.ledger import Ledger
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import FolderStore
from tune_prune.tuning.stopping import KlFilterRule, RaceRule

WHOLE_TEXT = True

KEYS = [f"key{index:03}" for index in range(60)]


def kl(key: str, text: float | None, tasks: float | None):
    """A worker's message after the KL of a trial; None: it has no such one."""
    values = {"kl_text": text, "kl_tasks": tasks, "kl_text_stderr": 100.0, "kl_tasks_stderr": 100.0}
    return stage_message(key, "kl", metrics={name: value for name, value in values.items() if value is not None})


def stopped_by(rule: KlFilterRule, trials) -> list[str]:
    return [key for key, text, tasks in trials if rule.stops(kl(key, text, tasks))]


def test_a_failed_trial_is_in_no_median():
    low, high = [(key, 10.0, 10.0) for key in KEYS[:5]], [(key, 14.0, 14.0) for key in KEYS[5:10]]
    rule, other = (KlFilterRule(specs_of(*KEYS)) for _ in range(2))
    assert not stopped_by(rule, low + high) and not stopped_by(other, low + high)
    for key, *_ in low * 2:  # again is no more
        rule.forget(key)
    between = [("key050", 19.0, 19.0)]  # 1.5 times the median is 18 of all, and 21 without those that have failed
    assert stopped_by(other, between) == ["key050"] and not stopped_by(rule, between)
    assert stopped_by(rule, [(KEYS[0], 22.0, 22.0)]) == [KEYS[0]]  # tried again, it is judged again


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
@pytest.mark.parametrize("seed", range(3))
def test_it_stops_what_a_plain_loop_stops_and_a_restart_changes_nothing(seed, odd):
    """Restarted after every trial in turn, with the records that the ledger has then."""
    rng = random.Random(seed)
    trials = [(key, draw(rng, odd), draw(rng, odd)) for key in KEYS]
    specs, expected = specs_of(*KEYS), by_a_plain_loop(trials)
    assert expected and not {*expected} & {*KEYS[:5]}
    assert stopped_by(KlFilterRule(specs), trials) == expected
    records = [
        TrialRecord(key, "m", None, "stopped_early" if key in expected else "complete", metrics=one.record.metrics)
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
        "key013": "stopped by the KL filter: kl_text nan is not finite, beside 5, the median of 9 earlier trials; "
        "kl_tasks inf is not finite, beside 50, the median of 9 earlier trials",
    }


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


SPACE = "search: grid\nmethod: [wanda_sp, taylor, random]\nseq_len: 16\nnum_samples: [8, 16]\nshape: [free, uniform]\n"
SEARCH = ("--model", "tiny-llama", "--tasks", "boolq,piqa", "--limit", "8", "--perplexity-tokens", "500", "--inline")


def run_command(folder: Path, name: str, *flags: str) -> str:
    """Run a search in `folder`, whose experiments share what they have measured, and return what it prints."""
    space, printed = folder / "space.yaml", StringIO()
    space.write_text(SPACE)
    argv = [*SEARCH, "--search-space", str(space), "--storage-path", str(folder), "--name", name, *flags]
    with redirect_stdout(printed):
        assert search.main(argv) == 0
    return printed.getvalue()


def in_order(folder: Path) -> list[TrialRecord]:
    return sorted(Ledger(FolderStore(folder)).records(), key=lambda record: record.started_at)


def stages(record: TrialRecord) -> list[str]:
    return [stage.stage for stage in record.stages]


def expected_of(records: Sequence[TrialRecord]) -> set[str]:
    return {*by_a_plain_loop([(one.key, one.metrics["kl_text"], one.metrics["kl_tasks"]) for one in records])}


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A search of ten configurations, of which the two of random removal are far off, and what it has printed."""
    folder = tmp_path_factory.mktemp("searched")
    return folder, run_command(folder, "filtered", "--kl-filter", "--verbose")


@pytest.mark.slow
def test_a_search_stops_bad_trials_before_their_items(searched):
    folder, printed = searched
    records = in_order(folder / "filtered")
    expected = expected_of(records)
    assert len(records) == 10 and {one.key for one in records if one.status == "stopped_early"} == expected
    assert {one.config.method for one in records if one.key in expected} >= {"random"}
    for one in records:
        if one.key not in expected:
            assert one.status == "complete" and {"perplexity", "zero_shot"} <= {*stages(one)}
            continue
        assert stages(one)[-1] == "kl" and not {"acc_mean", "ppl", "gold_logprob_mean"} & {*one.metrics}
        assert one.reason.startswith(
            f"stopped by the KL filter: kl_text {one.metrics['kl_text']:.4g} is above 1.5 times "
        )
        assert f"; kl_tasks {one.metrics['kl_tasks']:.4g} is above 1.5 times " in one.reason
        assert not (folder / "filtered" / "trials" / one.key / "items.parquet").exists()
    count = f"{10 - len(expected)} complete, {len(expected)} stopped early"
    assert f"tiny-llama: 10 trials ({count})" in printed
    assert f"[10/10] running 0, failed 0, stopped {len(expected)}, best acc" in printed
    said = " ".join(printed.split())
    assert "; scheduler none, KL filter " in said and "an upper bound: the KL filter stops trials early" in said
    # Stopped trials are rows that decide nothing.
    results = load_results(folder / "filtered")
    for row in results.trials.to_dict("records"):
        (one,) = (record for record in records if record.key == row["key"])
        assert (row["status"], row["reason"]) == (one.status, one.reason)
        assert math.isnan(row["acc_mean"]) == (one.status == "stopped_early")
    (found,) = results.findings.models.values()
    complete = {one.key for one in records if one.status == "complete"}
    assert {*found.eligible["key"]} == complete


@pytest.mark.slow
@pytest.mark.parametrize("kept", [3, 7])
def test_a_restarted_search_stops_the_same(searched, kept):
    """The ledger of a moment, with KLs in the cache, which count as any."""
    folder, _ = searched
    records, again = in_order(folder / "filtered"), folder / f"again{kept}"
    shutil.copytree(folder / "filtered", again)
    for one in records[kept:]:
        (again / "ledger" / f"{one.key}.json").unlink()
    run_command(folder, again.name, "--kl-filter")
    after = in_order(again)
    assert [(one.key, one.status, one.reason) for one in after] == [
        (one.key, one.status, one.reason) for one in records
    ]
    kls = [stage for one in after[kept:] for stage in one.stages if stage.stage == "kl"]
    assert len(kls) == 10 - kept and {stage.tokens for stage in kls} == {0}
