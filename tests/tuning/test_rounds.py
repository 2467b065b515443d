"""`--draws N` and `--recover N`: who is run next follows from the records alone, whenever a search was killed."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.findings import simulated_study
from tests.search_folders import TINY
from tests.searches import plan_of
from tune_prune.analysis.input.reading import study_of_search
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.commands import search
from tune_prune.commands.results import load
from tune_prune.core.config import EvaluationProtocol, ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, read_about
from tune_prune.core.records import FAILURES, TrialRecord
from tune_prune.core.store import FolderStore
from tune_prune.tuning.plan import Plan
from tune_prune.tuning.rounds import Batch, Rounds, to_train
from tune_prune.tuning.work import TrialSpec

MOST = 3
NAMES = [f"{m}-s{s}-n{n}" for m in ("taylor", "layerwise", "blockwise") for s in (16, 64, 256) for n in (128, 512)]
RUN = ModelRun("alpha", "alpha", None, "embedded", None, EvaluationProtocol(), 0, "float32")


def plan_in(folder: Path, **settings: Any) -> Plan:
    """A plan of all trials that the ledger in `folder` holds."""
    records = sorted(Ledger(FolderStore(folder)).records(), key=lambda record: record.config)
    return plan_of([TrialSpec(RUN, record.config, record.key) for record in records], folder, **settings)


def run_rounds(
    plan: Plan, records: Sequence[TrialRecord], before: Callable[[Rounds, Batch], None] = lambda *_: None
) -> tuple[Rounds, list[Batch]]:
    """All batches of a plan whose trials leave these `records`; `before` is told of each before it is run."""
    batches, held = Rounds(plan), replace(plan.held, records=())
    made = []
    while (batch := batches.next(held)) is not None:
        made.append(batch)
        before(batches, batch)
        held = replace(held, records=list(records), about=read_about(plan.held.store))
    return batches, made


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All draws of 18 configurations, from which the records of any moment are taken."""
    folder = tmp_path_factory.mktemp("draws")
    return simulated_study(folder, ("alpha",), items=150, draws=dict.fromkeys(NAMES, MOST), draw_sd=0.006)


@pytest.fixture
def draws(drawn: Path, tmp_path: Path) -> Plan:
    return plan_in(shutil.copytree(drawn, tmp_path / "simulated"), draws=MOST)


def decisions(plan: Plan) -> list[dict[str, Any]]:
    return (read_about(plan.held.store) or {})["draws"]


def untimed(name: str) -> str:
    """The configuration of a draw."""
    return name.split("-r")[0]


@pytest.mark.slow
def test_the_winner_of_all_draws_is_found_with_fewer(draws: Plan) -> None:
    records = draws.held.records
    batches, made = run_rounds(draws, records)
    given = {record.key: record.config.name for record in records if record.key in batches.given}
    assert 18 + 2 * MOST - 2 <= len(given) < 0.75 * len(records)
    assert sorted(spec.key for batch in made for spec in batch.trials) == sorted(given)  # each once
    means: dict[str, list[float]] = {}
    for record in records:
        means.setdefault(untimed(record.config.name), []).append(record.metrics["acc_mean"])
    winner = max(means, key=lambda name: sum(means[name]))
    assert {winner, f"{winner}-r1", f"{winner}-r2"} <= set(given.values())
    first, *later = decisions(draws)
    assert set(first["draws"].values()) == {2} and len(first["draws"]) == 4 and first["others"] is None
    assert all(one["others"] <= 0.03 and one["freedom"] >= 4 for one in later)
    assert [batch.may_stop for batch in made] == [True, *[False] * (len(made) - 1)]  # a mean needs all of its draws


@pytest.mark.parametrize("by", ["gold_logprob", "kl"])
def test_draws_by_another_measure(drawn: Path, tmp_path: Path, by: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They go to what may be the best by it, here to the least accurate ones; who lacks it gets none."""
    plan, records = plan_in(shutil.copytree(drawn, tmp_path / "simulated"), draws=MOST, draws_by=by), []
    for record in plan.held.records:
        nats = 40 * (1 - record.metrics["acc_mean"])  # the less accurate, the better
        measures = {"gold_logprob_mean": nats, "kl_text": 1 - nats / 50, "kl_tasks": 1.5 - nats / 50}
        records.append(replace(record, metrics=record.metrics | measures))
    ranked = sorted(records, key=lambda record: -record.metrics["gold_logprob_mean"])
    lost = ranked[-1].key  # the last by this measure, the first by accuracy
    missing = dict.fromkeys(measures, math.nan)
    run_rounds(plan, [replace(one, metrics=one.metrics | missing) if one.key == lost else one for one in records])
    first, *_, last = decisions(plan)
    assert {untimed(record.config.name) for record in ranked[:3]} & set(first["draws"]) and len(first["draws"]) == 4
    given = {name for one in decisions(plan) for name in one["draws"]}
    assert 4 <= len(given) < 12 and untimed(ranked[-1].config.name) not in given
    assert last["by"] == by and last["spread_points"] is None and 0 < last["spread_nats"] < 5
    said = capsys.readouterr().out
    assert "run 2 for 4 of 18 configurations" in said and " nats (" in said and "accurate" not in said


def test_a_measure_that_nobody_has(drawn: Path, tmp_path: Path) -> None:
    plan = plan_in(shutil.copytree(drawn, tmp_path / "simulated"), draws=MOST, draws_by="kl")
    with pytest.raises(UserError, match=r"--draws-by kl needs .* no complete trial of alpha has; use --draws-by acc"):
        run_rounds(plan, plan.held.records)


@pytest.mark.slow
def test_a_killed_search_decides_the_same_again(draws: Plan) -> None:
    """Records beyond a decision, or missing ones, change no decision before it."""
    records = {record.key: record for record in draws.held.records}
    whole, _ = run_rounds(draws, list(records.values()))
    decided = decisions(draws)
    again = Rounds(draws)
    held = replace(draws.held, records=())
    while again.next(held) is not None:
        beyond = sorted(whole.given - again.given)[::2]  # a part of what comes later has been run already
        held = replace(held, records=[records[key] for key in sorted(again.given | {*beyond})])
    assert decisions(draws) == decided and again.given == whole.given


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything trained, of which a decision sees nothing; those of 64 tokens on two draws."""
    return simulated_study(
        tmp_path_factory.mktemp("trained"),
        ("alpha",),
        items=400,
        draws=dict.fromkeys((name for name in NAMES if "-s64-" in name), 2),
        draw_sd=0.001,
        trained=dict.fromkeys(NAMES, 0.05),
    )


@pytest.fixture(scope="module")
def measured(trained: Path) -> tuple[Plan, Findings, set[str]]:
    """A plan that trains three, the findings of what is untrained, and its keys."""
    plan = plan_in(trained, recover=3)
    given = plan.first_trials
    records = [record for record in plan.held.records if record.key in given]
    return plan, find(study_of_search(trained, plan.held.about or {}, {}, records)), given


def test_of_what_may_be_the_best_some_are_trained_on_their_draws(measured) -> None:
    plan, findings, given = measured
    (found,) = findings.models.values()
    (chosen,), keys = to_train(plan, findings, given)
    likely = found.eligible[found.eligible["name"].isin(found.tied)].sort_values("gold_logprob_mean", ascending=False)
    assert len(found.tied) > 3 and list(chosen.configurations) == likely["name"].tolist()[:3]
    assert (chosen.of, chosen.tied) == (18, len(found.tied)) and len(found.tied) < 18
    names = {spec.config.name for spec in plan.trials if spec.key in keys}
    wanted = {f"{name}-lora" for name in chosen.configurations}
    wanted |= {f"{name}-r1-lora" for name in chosen.configurations if "-s64-" in name}
    assert len(wanted) > 3 and names == wanted and not keys & given
    assert "training the 3 most promising of 18, by " in str(chosen)
    more = replace(plan, settings=replace(plan.settings, recover=100))
    (chosen,), _ = to_train(more, findings, given)
    assert set(chosen.configurations) == set(found.tied)  # what is worse for certain is not trained
    second = {spec.key for spec in plan.trials if spec.config.seed == 1}
    _, keys = to_train(plan, findings, given - second)  # a draw that was not given is not trained
    assert not keys & second


def test_with_another_objective_the_best_by_that_are_trained(measured) -> None:
    plan, findings, given = measured
    (model,) = findings.models.values()
    plan = replace(plan, settings=replace(plan.settings, objective="perplexity"))
    (chosen,), _ = to_train(plan, findings, given)
    assert list(chosen.configurations) == model.eligible.sort_values("ppl", kind="stable")["name"].tolist()[:3]
    assert chosen.by == "perplexity" and ", by perplexity\n" in str(chosen)


@pytest.mark.parametrize(
    ("failure", "passes", "more"), [("error", True, None), ("lost_worker", False, 2), ("infeasible", False, None)]
)
def test_what_may_pass_is_tried_once_more_before_anything_is_decided(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], failure: str, passes: bool, more: int | None
) -> None:
    """So that a search with such a failure decides as an undisturbed one; what fails twice is left out."""
    plan = plan_in(shutil.copytree(trained, tmp_path / "simulated"), recover=3, draws=more)
    first = next(spec.key for spec in plan.trials if spec.config.name == "taylor-s16-n128")
    bad = {"status": "failed", "failure": failure, "reason": "it is", "metrics": {}, "files": {}}
    records, tries = list(plan.held.records), 0

    def run(_: Rounds, batch: Batch) -> None:
        nonlocal tries
        tries += first in {spec.key for spec in batch.trials}
        failed = not passes or tries < 2
        records[:] = [replace(one, **bad) if one.key == first and failed else one for one in plan.held.records]

    batches, held, made = Rounds(plan), replace(plan.held, records=()), []
    while (batch := batches.next(held)) is not None:
        made.append({spec.key for spec in batch.trials})
        run(batches, batch)
        held = replace(held, records=list(records))
    said = capsys.readouterr().out
    again = f"again        1 {FAILURES[failure]}: tried once more before anything is decided\n"
    may_pass = failure != "infeasible"
    assert (again in said, tries) == (may_pass, 1 + may_pass)
    assert not may_pass or made[1] == made[0]  # the others are there to be judged beside
    assert f"training the 3 most promising of {18 if passes else 17}, by" in said
    assert not made[-1] & plan.first_trials


@pytest.mark.slow
def test_a_search_trains_its_best_and_shows_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "search: grid\nmethod: [magnitude, random, wanda_sp]\nseq_len: 16\nnum_samples: 8\nrecovery: [none, lora]\n"
        "recovery_steps: 2\n"
    )
    argv = [*TINY, "--search-space", str(path), "--storage-path", str(tmp_path), "--name", "trained", "--inline"]
    argv += ["--limit", "8", "--tasks", "piqa", "--gpus-per-trial", "0", "--recover", "1"]
    assert search.main(argv) == 0
    said = capsys.readouterr().out
    assert "the most promising gets a short training; at most 4 trials" in " ".join(said.split())
    (line,) = re.findall(
        r"^recovery     (tiny-llama: training the 1 most promising of 3, by .*\n +.*)$", said, re.MULTILINE
    )
    store = FolderStore(tmp_path / "trained")
    configs = [record.config for record in Ledger(store).records()]
    trained = [config for config in configs if config.recovery == "lora"]
    assert len(configs) == 4 and len(trained) == 1 and line.split()[-1] == trained[0].untrained().name
    (decided,) = (read_about(store) or {})["recovered"]
    assert decided["configurations"] == [trained[0].untrained().name]
    assert list(load(tmp_path / "trained").best.index) == ["tiny-llama", "tiny-llama+lora"]
    assert "What training changes" in said
    assert (tmp_path / "trained" / "tensorboard" / "tiny-llama+lora").is_dir()
    assert search.main(argv) == 0  # everything is there: the same decision, and nothing is run
    again = capsys.readouterr().out
    assert line in again and len(Ledger(store).records()) == 4
    assert "(4 of 4 trials are done)" in again
