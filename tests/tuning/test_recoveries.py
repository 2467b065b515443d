"""`--recover N`: the best are trained once all are measured, by the records alone; and no table mixes them with the others."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.findings import simulated_study
from tests.search_folders import TINY
from tune_prune.analysis.input.reading import study_of_search
from tune_prune.analysis.statistics.findings import find
from tune_prune.commands import results, search
from tune_prune.commands.flags import settings_from
from tune_prune.commands.results import load
from tune_prune.commands.search import parser
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, read_about, read_baselines, write_baselines
from tune_prune.core.records import FAILURES
from tune_prune.core.store import FolderStore
from tune_prune.tuning import driver, resolve
from tune_prune.tuning import rounds as recoveries
from tune_prune.tuning.driver import TuneOptions


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """Everything trained, of which a decision sees nothing: (plan, findings, keys of what it sees)."""
    every = [f"{m}-s{s}-n{n}" for m in ("taylor", "layerwise", "blockwise") for s in (16, 64, 256) for n in (128, 512)]
    path = simulated_study(
        tmp_path_factory.mktemp("trained"),
        ("alpha",),
        items=400,
        draws=dict.fromkeys((name for name in every if "-s64-" in name), 2),
        draw_sd=0.001,
        trained=dict.fromkeys(every, 0.05),
    )
    store = FolderStore(path)
    records = Ledger(store).records()
    trials = sorted((record.config, record.key) for record in records)
    model = SimpleNamespace(run=SimpleNamespace(label="alpha", seed=0), trials=trials)
    plan = SimpleNamespace(settings=SimpleNamespace(recover=3, draws=None), models=[model])
    given = {key for config, key in trials if config.recovery == "none"}
    own = [record for record in records if record.key in given]
    return plan, find(study_of_search(path, read_about(store) or {}, {}, own)), given


def test_of_what_may_be_the_best_some_are_trained_on_their_draws(searched) -> None:
    plan, findings, given = searched
    (found,) = findings.models.values()
    (trained,), keys = recoveries.choose(plan, findings, given)
    likely = found.eligible[found.eligible["name"].isin(found.tied)].sort_values("gold_logprob_mean", ascending=False)
    assert len(found.tied) > 3 and list(trained.configurations) == likely["name"].tolist()[:3]
    assert (trained.of, trained.tied) == (18, len(found.tied))
    names = {config.name for config, key in plan.models[0].trials if key in keys}
    wanted = {f"{name}-lora" for name in trained.configurations}
    wanted |= {f"{name}-r1-lora" for name in trained.configurations if "-s64-" in name}
    assert len(wanted) > 3 and names == wanted and not keys & given
    assert "training the 3 most promising of 18, by " in str(trained)


def test_right_choices_log_probability_tells_apart_what_accuracy_cannot(searched) -> None:
    plan, findings, given = searched
    ((name, found),) = findings.models.items()
    for tied_value, by in ((-1.0, "gold_logprob_mean"), (float("nan"), "acc_mean")):
        rows = found.eligible.assign(gold_logprob_mean=-np.arange(18.0)[::-1])  # the least accurate has the highest
        rows.loc[rows["name"] == found.tied[0], "gold_logprob_mean"] = tied_value
        rows.loc[rows.index[-1], "in_confidence_set"] = True  # of unknown error, and so not ruled out
        measured = SimpleNamespace(model=found.model, eligible=rows)
        (trained,), keys = recoveries.choose(plan, SimpleNamespace(models={name: measured}), given)
        order, possible = rows.sort_values(by, ascending=False)["name"], {*found.tied, rows["name"].iloc[-1]}
        assert list(trained.configurations) == [one for one in order if one in possible][:3]
        assert trained.by == by and ("right answers" in str(trained)) == (by != "acc_mean") and keys


def test_what_is_worse_for_certain_is_not_trained(searched) -> None:
    plan, findings, given = searched
    (found,) = findings.models.values()
    all_of_them = SimpleNamespace(settings=SimpleNamespace(recover=100, draws=None), models=plan.models)
    (trained,), _ = recoveries.choose(all_of_them, findings, given)
    assert set(trained.configurations) == set(found.tied) and len(found.tied) < 18


def test_a_draw_that_was_not_given_is_not_trained(searched) -> None:
    plan, findings, given = searched
    second = {key for config, key in plan.models[0].trials if config.seed == 1 and config.recovery == "none"}
    _, keys = recoveries.choose(plan, findings, given - second)
    assert not [config for config, key in plan.models[0].trials if key in keys and config.seed == 1]


def test_what_reads_no_seed_untrained_is_trained_on_every_draw(searched) -> None:
    """Untrained it is one trial of no seed; its training draws samples."""
    plan, findings, given = searched
    (found,) = findings.models.values()
    best = found.tied[0]
    rows = found.eligible[found.eligible["name"] == best]
    alone = PruningConfig("magnitude", 16, 128)
    trials = [(alone, rows["key"].iloc[0])]
    trials += [(replace(alone, recovery="lora", seed=seed), f"trained on {seed}") for seed in (3, 4)]
    own = SimpleNamespace(settings=plan.settings, models=[SimpleNamespace(run=plan.models[0].run, trials=trials)])
    measured = SimpleNamespace(model=found.model, eligible=rows, tied=[best])
    (trained,), keys = recoveries.choose(own, SimpleNamespace(models={"alpha": measured}), given)
    assert len(trained.configurations) == 1 and keys == {"trained on 3", "trained on 4"}


def test_flags_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def space(*argv: str) -> Any:
        flags = parser().parse_args(["--model", "tiny-llama", "--search-space", "smoke", "--recover", "2", *argv])
        return resolve.space(settings_from(vars(flags)))

    assert space().values["recovery"] == ("none", "lora")
    path = tmp_path / "space.yaml"
    text = "search: grid\nmethod: taylor\nseq_len: 16\nnum_samples: 8\nrecovery: "
    path.write_text(text + "[none, lora]\nrecovery_steps: [5, 10]\n")
    assert space("--search-space", str(path)).size == 3  # untrained, and both lengths of a training
    path.write_text(text + "lora\n")
    with pytest.raises(UserError, match=r"says `recovery: lora`; write `recovery: \[none, lora\]`"):
        space("--search-space", str(path))
    with pytest.raises(UserError, match="--recover 2 is for a grid"):
        space("--search", "optuna")


@pytest.mark.slow
def test_optuna_searches_trained_and_untrained_by_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its trials are compared: one study would find nothing but training."""
    path = tmp_path / "space.yaml"
    path.write_text(
        "search: optuna\nnum_trials: 2\nmethod: [magnitude, taylor, wanda_sp]\nseq_len: 16\nnum_samples: 8\n"
        "recovery: [none, lora]\nrecovery_steps: 2\n"
    )
    argv = [*TINY, "--search-space", str(path), "--storage-path", str(tmp_path), "--name", "two", "--inline"]
    assert search.main([*argv, "--limit", "8", "--tasks", "piqa", "--gpus-per-trial", "0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "optuna tries 2 of 3 ways to prune it by 20%, both without and with a short training" in said
    assert "each tested; 4 trials" in said
    records = Ledger(FolderStore(tmp_path / "two")).records()
    assert sorted(record.config.get("recovery", "none") for record in records) == ["lora", "lora", "none", "none"]


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
    assert "3 ways to prune it by 20%" in said
    assert "the most promising gets a short training; at most 4 trials" in " ".join(said.split())
    (line,) = re.findall(
        r"^recovery     (tiny-llama: training the most promising of 3, by .*\n +.*)$", said, re.MULTILINE
    )
    store = FolderStore(tmp_path / "trained")
    configs = [record.config for record in Ledger(store).records()]
    trained = [config for config in configs if config.recovery == "lora"]
    assert len(configs) == 4 and len(trained) == 1 and line.split()[-1] == trained[0].untrained().name
    (decided,) = (read_about(store) or {})["recovered"]
    assert decided["configurations"] == [trained[0].untrained().name]
    results = load(tmp_path / "trained")
    assert list(results.best.index) == ["tiny-llama", "tiny-llama+lora"]
    assert "What training changes" in said
    assert (tmp_path / "trained" / "tensorboard" / "tiny-llama+lora").is_dir()
    assert search.main(argv) == 0  # everything is there: the same decision, and nothing is run
    again = capsys.readouterr().out
    assert line in again and len(Ledger(store).records()) == 4
    assert "(4 of 4 trials are done)" in again


@pytest.mark.parametrize("draws", [None, 2])
@pytest.mark.parametrize(("failure", "passes"), [("error", True), ("lost_worker", False), ("infeasible", False)])
def test_what_may_pass_is_tried_once_more_before_anything_is_decided(
    searched,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure,
    passes,
    draws,
) -> None:
    """So that a search with such a failure decides as an undisturbed one; what fails twice is left out."""
    plan, findings, given = searched
    folder = shutil.copytree(next(iter(findings.study.experiments)), tmp_path / "copy")
    store, rounds = FolderStore(folder), []
    ledger, about = Ledger(store), read_about(FolderStore(folder)) or {}
    write_baselines(store, read_baselines(store))
    (model,) = plan.models
    own = SimpleNamespace(
        settings=SimpleNamespace(recover=3, draws=draws, draws_by="accuracy", seed=0),
        models=[model],
        experiment_dir=folder,
    )
    first = next(key for config, key in model.trials if config.name == "taylor-s16-n128")
    good = ledger.read(first)
    bad = replace(good, status="failed", failure=failure, reason="it is", metrics={}, files={})
    ledger.path(first).unlink()

    def run_search(jobs: Any, options: TuneOptions) -> None:
        rounds.append(options.only)
        if first in options.only:
            ledger.write(good if passes and len(rounds) > 1 else bad)

    monkeypatch.setattr(driver, "run_search", run_search)
    results._run_by_decisions(own, store, [], TuneOptions(folder, inline=True), about)
    said = capsys.readouterr().out
    again = f"again        1 {FAILURES[failure]}: tried once more before anything is decided\n"
    may_pass = failure != "infeasible"
    assert (again in said, sum(first in only for only in rounds)) == (may_pass, 1 + may_pass)
    assert not may_pass or rounds[1] == rounds[0]  # the others are there to be judged beside
    assert f"training the 3 most promising of {18 if passes else 17}, by" in said and not rounds[-1] & given


def test_trainings_that_are_done_count_among_those_that_come(searched) -> None:
    plan, _, _ = searched
    (model,) = plan.models
    configs = [config for config, _ in model.trials if config.seed is None]
    trained = [config for config in configs if config.recovery != "none"]
    done = {config for config in configs if config.recovery == "none"} | set(trained[-3:])
    ordered = sorted(configs, key=lambda config: config not in done)
    assert [config for config in recoveries.expected(plan, ordered) if config not in done] == []
    fewer = done - set(trained[-1:])
    ordered = sorted(configs, key=lambda config: config not in fewer)
    assert len([config for config in recoveries.expected(plan, ordered) if config not in fewer]) == 1
