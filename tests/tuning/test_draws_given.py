"""`--draws N`: who gets another draw follows from the ledger's records alone, whenever a search was killed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.findings import simulated_study
from tune_prune.analysis.input.reading import study_of_search
from tune_prune.analysis.statistics.draws import next_draws
from tune_prune.commands import results
from tune_prune.commands.flags import settings_from
from tune_prune.commands.search import parser
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, read_about, read_baselines, write_baselines
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import STATUS, FolderStore
from tune_prune.tuning import driver, resolve
from tune_prune.tuning import rounds as of_plan
from tune_prune.tuning.driver import TuneOptions
from tune_prune.tuning.observers.status import StatusObserver
from tune_prune.tuning.ray_cluster import cluster
from tune_prune.tuning.resources import TrialResources
from tune_prune.tuning.rounds import Draws
from tune_prune.tuning.worker import WorkerSettings

MOST = 3


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[TrialRecord]]:
    """All draws of 18 configurations, from which the ledger of any moment is taken."""
    names = [f"{m}-s{s}-n{n}" for m in ("taylor", "layerwise", "blockwise") for s in (16, 64, 256) for n in (128, 512)]
    folder = tmp_path_factory.mktemp("draws")
    path = simulated_study(folder, ("alpha",), items=150, draws=dict.fromkeys(names, MOST), draw_sd=0.006)
    store = FolderStore(path)
    # A search seals what it decides by, experiment.json: then nothing beside it may be without a checksum.
    write_baselines(store, read_baselines(store))
    return path, read_about(store) or {}, Ledger(store).records()


def draws_of(searched: tuple[Path, dict[str, Any], list[TrialRecord]], by: str = "accuracy") -> Draws:
    path, about, _ = searched
    return Draws(plan_of(searched, by), lambda own: study_of_search(path, about, {}, own))


def plan_of(searched: tuple[Path, dict[str, Any], list[TrialRecord]], by: str = "accuracy") -> Any:
    trials = [(record.config, record.key) for record in searched[2]]
    model = SimpleNamespace(run=SimpleNamespace(label="alpha", seed=0), trials=sorted(trials))
    return SimpleNamespace(
        settings=SimpleNamespace(draws=MOST, draws_by=by, recover=None, seed=0),
        models=[model],
        experiment_dir=searched[0],
    )


def decided(searched: tuple[Path, dict[str, Any], list[TrialRecord]]) -> Draws:
    draws = draws_of(searched)
    while draws.decide(searched[2]):
        pass
    return draws


@pytest.mark.slow
def test_the_winner_of_all_draws_is_found_with_fewer(searched) -> None:
    draws, records = decided(searched), searched[2]
    given = {record.key: record.config.name for record in records if record.key in draws.given}
    assert 18 + 2 * MOST - 2 <= len(given) < 0.75 * len(records)
    means: dict[str, list[float]] = {}
    for record in records:
        means.setdefault(record.config.name.split("-r")[0], []).append(record.metrics["acc_mean"])
    winner = max(means, key=lambda name: sum(means[name]))
    assert {winner, f"{winner}-r1", f"{winner}-r2"} <= set(given.values())
    first = draws.rounds[0]
    assert set(first.draws.values()) == {2} and len(first.draws) == 4 and first.others is None
    assert all(one.others <= 0.03 and one.freedom >= 4 for one in draws.rounds[1:])
    assert "run 2 for 4 of 18 configurations" in str(first) and "degrees of freedom" in str(draws.rounds[-1])


@pytest.mark.parametrize("by", ["gold_logprob", "kl"])
def test_draws_by_another_measure(searched, by: str) -> None:
    """They go to what may be the best by it, here to the least accurate ones; who lacks it gets none."""
    records = []
    for record in searched[2]:
        nats = 40 * (1 - record.metrics["acc_mean"])  # the less accurate, the better
        measures = {"gold_logprob_mean": nats, "kl_text": 1 - nats / 50, "kl_tasks": 1.5 - nats / 50}
        records.append(replace(record, metrics=record.metrics | measures))
    ranked = sorted(records, key=lambda record: -record.metrics["gold_logprob_mean"])
    lost = ranked[-1].key  # the last by this measure, the first by accuracy
    records = [
        replace(one, metrics=one.metrics | dict.fromkeys(measures, math.nan)) if one.key == lost else one
        for one in records
    ]
    draws = draws_of(searched, by)
    while draws.decide(records):
        pass
    names = {record.config.name.split("-r")[0] for record in ranked[:3]}
    assert names & set(draws.rounds[0].draws) and len(draws.rounds[0].draws) == 4
    given = {name for one in draws.rounds for name in one.draws}
    assert 4 <= len(given) < 12 and ranked[-1].config.name.split("-r")[0] not in given
    last = draws.rounds[-1]
    assert last.by == by and last.spread_points is None and 0 < last.spread_nats < 5
    assert "runs differ by " in str(last) and " nats (" in str(last) and "accurate" not in str(last)


def test_a_measure_that_nobody_has(searched) -> None:
    with pytest.raises(
        UserError, match=r"--draws-by kl needs .* which no complete trial of alpha has; use --draws-by acc"
    ):
        draws_of(searched, "kl").decide(searched[2])


@pytest.mark.slow
def test_a_killed_search_decides_the_same_again(searched) -> None:
    """What was run beyond a decision, or not yet, changes none before it."""
    whole = decided(searched)
    again = draws_of(searched)
    for number in range(len(whole.rounds)):
        half = set(list(whole.given - again.given)[::2])  # a part of what comes later has been run already
        again.decide([record for record in searched[2] if record.key in again.given | half])
        assert again.rounds == whole.rounds[: number + 1]
    assert again.given == whole.given


def test_a_failed_draw_is_none(searched, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no mean, and the mean of all draws will be without it."""
    asked = []
    monkeypatch.setattr(of_plan, "next_draws", lambda *given: asked.append(given[1:3]) or next_draws(*given))
    draws, records = draws_of(searched), searched[2]
    first = set(draws.given)
    draws.decide(records)
    failed = min(draws.given - first)
    draws.decide([replace(one, status="failed", metrics={}) if one.key == failed else one for one in records])
    (counts, most), (later, left) = asked
    assert set(counts) == {1} and set(most) == {MOST}
    assert sorted(zip(later, left, strict=True)) == [(1, MOST - 1), *[(1, MOST)] * 14, *[(2, MOST)] * 3]


def test_rounds_are_one_search_on_one_ray(searched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is joined once, around all rounds; none of them ends what status.json says of the search. Only in the first one are
    trials stopped."""
    path, about, _ = searched
    store, done, stopping = FolderStore(path), [], []

    @contextmanager
    def connected(*_: Any) -> Iterator[None]:
        done.append("joined")
        yield
        done.append("left")

    def run_search(jobs: Any, options: TuneOptions) -> None:
        observer = StatusObserver(
            WorkerSettings(path, path, TrialResources()), 1, 1, 1, lambda: None, goes_on=options.goes_on
        )
        observer.on_finish()
        stopping.append((options.scheduler, options.kl_filter))
        done.append((store.read(STATUS) or {})["state"])

    monkeypatch.setattr(cluster, "connected", connected)
    monkeypatch.setattr(driver, "run_search", run_search)
    results._run_by_decisions(
        plan_of(searched), store, [], TuneOptions(path, scheduler="race", kl_filter=True), deepcopy(about)
    )
    assert stopping == [("race", True), *[("none", False)] * (len(stopping) - 1)]
    assert done == ["joined", *["running"] * (len(done) - 2), "left"] and len(done) > 4
    assert (store.read(STATUS) or {})["state"] == "running"  # `results._run` ends it, as that of any search


def settings(*argv: str) -> Any:
    return settings_from(vars(parser().parse_args(["--model", "tiny-llama", "--search-space", "smoke", *argv])))


def test_flags_that_do_not_fit_are_refused() -> None:
    assert resolve.space(settings("--draws", "3", "--seed", "5")).values["seed"] == (5, 6, 7)
    with pytest.raises(UserError, match=r"--draws-by kl says which .* add --draws 3"):
        resolve.space(settings("--draws-by", "kl"))
    for argv, said in (
        (["--seeds", "0,1"], "--seeds names others"),
        (["--search", "optuna"], "is for a grid"),
        (["--seed", str(2**32 - 1)], "above the largest"),
    ):
        with pytest.raises(UserError, match=said):
            resolve.space(settings("--draws", "3", *argv))


@pytest.mark.parametrize(
    ("scheduler", "flag", "by", "instead"),
    [
        ("asha", "--objective", "perplexity", "$"),
        ("race", "--objective", "gold_logprob", ", or use --scheduler race-gold$"),
        ("race", "--draws-by", "kl", ", or use --kl-filter in place of it$"),
        ("race-gold", "--draws-by", "kl", ", or use --kl-filter in place of it$"),
    ],
)
def test_no_scheduler_keeps_another_best_than_is_looked_for(scheduler: str, flag: str, by: str, instead: str) -> None:
    argv = ["--draws", "2"] if flag == "--draws-by" else ["--search", "optuna"]
    with pytest.raises(
        UserError, match=rf"^--scheduler {scheduler} stops .* \({flag} {by}\); leave one of them out{instead}"
    ):
        resolve.space(settings(*argv, flag, by, "--scheduler", scheduler))
    for fits in ("accuracy", "gold_logprob"):  # no refusal
        assert resolve.space(settings(*argv, flag, fits, "--scheduler", "race-gold"))


def test_several_seeds_are_measured_whole_or_refused(tmp_path: Path) -> None:
    for scheduler in ("race", "asha"):
        with pytest.raises(
            UserError, match=f"--scheduler {scheduler} stops .* mean of 2 .*seeds 0, 1.*--draws 2 in place"
        ):
            resolve.space(settings("--seeds", "0,1", "--scheduler", scheduler))
        assert resolve.space(settings("--draws", "2", "--scheduler", scheduler)).values["seed"] == (0, 1)
        assert resolve.space(settings("--seeds", "3", "--scheduler", scheduler)).values["seed"] == (3,)
    with pytest.raises(UserError, match=r"^--kl-filter stops single trials, .* mean of 2 .*--draws 2 in place"):
        resolve.space(settings("--seeds", "0,1", "--kl-filter"))
    assert resolve.space(settings("--draws", "2", "--kl-filter")).values["seed"] == (0, 1)
    space = tmp_path / "space.yaml"
    space.write_text("search: optuna\nmethod: taylor\nseq_len: [16, 32]\nnum_samples: 8\nseeds: [0, 2]\nnum_trials: 2")
    with pytest.raises(UserError, match=r"2 seeds \(0, 2\) are for a grid.*name one seed, or use --search grid"):
        resolve.space(settings("--search-space", str(space)))
    assert resolve.space(settings("--seeds", "3", "--search", "optuna")).values["seed"] == (3,)
