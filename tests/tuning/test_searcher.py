"""The adaptive searcher by itself, with Optuna but without a running Ray: trials end by hand."""

import math
from dataclasses import replace
from itertools import product

import pytest
from optuna.trial import TrialState

from tests.trial_messages import stage_message
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.tuning.sampler import OptunaSearcher
from tune_prune.tuning.work import TrialSpec

METHODS = ("taylor", "layerwise", "blockwise")


def specs_of(label: str, seq_lens=(16, 64, 256), num_samples=(8, 16, 64)) -> list[TrialSpec]:
    run = ModelRun(label, label, None, "embedded", None, EvaluationProtocol(), 0, "float32")
    configs = [PruningConfig(*point) for point in product(METHODS, seq_lens, num_samples)]
    return [TrialSpec(run, config, f"{label}-{config.name}") for config in configs]


def record_of(spec: TrialSpec, status: str, accuracy: float = 0.5) -> TrialRecord:
    metrics = {} if status == "failed" else {"acc_mean": accuracy}
    stages = [StageReport("zero_shot", 1.0, items_scored=10)]
    return TrialRecord(spec.key, spec.run.label, spec.config, status, metrics=metrics, stages=stages)


def accuracy_of(key: str) -> float:
    """A smooth landscape whose best points are blockwise with long samples."""
    _, method, seq_len, num_samples = key.split("-")
    return METHODS.index(method) * 0.1 + int(seq_len[1:]) / 1000 + int(num_samples[1:]) / 10000


def run_all(searcher: OptunaSearcher) -> list[str]:
    """Ask and tell one by one until the searcher has finished; the keys in order."""
    keys = []
    while (spec := searcher.ask()) is not None:
        metrics = {"acc_mean": accuracy_of(spec.key)}
        searcher.tell(spec, stage_message(spec.key, status="complete", metrics=metrics, items_scored=20))
        keys.append(spec.key)
    return keys


def states(searcher: OptunaSearcher, label: str = "m") -> list[TrialState]:
    return [trial.state for trial in searcher._studies[label]._study.trials]


def test_a_whole_space_is_tried_once_each():
    specs = specs_of("m")
    keys = run_all(OptunaSearcher(specs, num_trials=100, seed=0))
    assert sorted(keys) == sorted(spec.key for spec in specs)


def test_equal_accuracies_are_one_value_however_they_were_rounded():
    """Both are 389 of 420 items; one is in the ledger already."""
    specs = specs_of("m")
    known = replace(record_of(specs[0], "complete"), metrics={"acc_mean": 0.9261904761904763})
    searcher = OptunaSearcher(specs, num_trials=2, seed=0, known=[known])
    spec = searcher.ask()
    searcher.tell(spec, stage_message(spec.key, status="complete", metrics={"acc_mean": 0.9261904761904762}))
    assert len({trial.value for trial in searcher._studies["m"]._study.trials}) == 1


def test_the_same_seed_gives_the_same_trials_and_another_seed_others():
    first, again, other = (run_all(OptunaSearcher(specs_of("m"), num_trials=12, seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert len(set(first)) == 12


def test_it_learns():
    """The second half of 18 trials is better on average than the first: over 5 seeds random search has it both ways."""
    gains = []
    for seed in range(5):
        accuracies = [accuracy_of(key) for key in run_all(OptunaSearcher(specs_of("m"), num_trials=14, seed=seed))]
        gains.append(sum(accuracies[7:]) - sum(accuracies[:7]))
    assert sum(gains) / 7 / 5 > 0.02


@pytest.mark.parametrize("objective", ["accuracy", "perplexity", "gold_logprob", "kl"])
def test_it_looks_for_its_objective(objective):
    """Each measure has another best trial, among those that are told and among those that the ledger has."""
    specs = specs_of("m")[:9]

    def metrics_of(spec) -> dict[str, float]:
        place = specs.index(spec)
        worse = {name: float((place - best) % 9) for best, name in enumerate(("acc", "ppl", "gold", "kl"))}
        kl = {"kl_text": worse["kl"], "kl_tasks": 1 + worse["kl"]}
        return {"acc_mean": 1 - worse["acc"] / 10, "ppl": 5 + worse["ppl"], "gold_logprob_mean": -worse["gold"], **kl}

    first = ("accuracy", "perplexity", "gold_logprob", "kl").index(objective)
    told = OptunaSearcher(specs, num_trials=9, seed=0, objective=objective)
    while (spec := told.ask()) is not None:
        told.tell(spec, stage_message(spec.key, status="complete", metrics=metrics_of(spec), items_scored=20))
    known = [replace(record_of(spec, "complete"), metrics=metrics_of(spec)) for spec in specs]
    read = OptunaSearcher(specs, num_trials=9, seed=0, known=known, objective=objective)
    for searcher in (told, read):
        best = searcher._studies["m"]._study.best_trial
        levels = {"seq_len": (16, 64, 256), "num_samples": (8, 16, 64)}
        config = {name: values[best.params[name]] for name, values in levels.items()}
        assert config == {name: getattr(specs[first].config, name) for name in levels}


def test_each_model_ratio_and_recovery_has_its_own_trials_one_group_after_the_other():
    """With recovery in one study, it would find nothing but training."""

    def other(start: str, **values) -> list[TrialSpec]:
        return [
            replace(spec, config=replace(spec.config, **values), key=f"{start}{spec.key}") for spec in specs_of("a")
        ]

    small, trained = other("s", pruning_ratio=0.3), other("t", recovery="lora")
    searcher = OptunaSearcher(specs_of("a") + specs_of("b") + small + trained, num_trials=4, seed=0)
    assert searcher.remaining == 16
    keys = run_all(searcher)
    assert [key[0] for key in keys] == ["a"] * 4 + ["b"] * 4 + ["s"] * 4 + ["t"] * 4
    assert searcher.remaining == 0
    alone = OptunaSearcher(specs_of("b"), num_trials=4, seed=0)
    assert run_all(alone) == keys[4:8]  # the other groups change nothing


def test_known_records_count_and_are_not_run_again():
    specs = specs_of("m")
    known = [record_of(specs[0], "complete", 0.6), record_of(specs[1], "stopped_early", 0.2)]
    searcher = OptunaSearcher(specs, num_trials=5, seed=0, known=known)
    assert set(states(searcher)) == {TrialState.COMPLETE, TrialState.PRUNED}
    assert searcher.remaining == 3
    keys = run_all(searcher)
    assert len(keys) == 3
    assert not {specs[0].key, specs[1].key} & set(keys)
    complete = [record_of(spec, "complete") for spec in specs[:2]]
    searcher = OptunaSearcher(specs, num_trials=2, seed=0, known=complete)
    assert searcher.remaining == 0 and searcher.ask() is None


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (stage_message("t", status="complete", metrics={"acc_mean": 0.7}), TrialState.COMPLETE),
        (stage_message("t", status="complete", metrics={"acc_mean": math.nan}), TrialState.FAIL),
        (stage_message("t", status="failed", metrics={"acc_mean": 0.3}, items_scored=10), TrialState.FAIL),
        (stage_message("t", metrics={"acc_mean": 0.3}, items_scored=10), TrialState.PRUNED),
        (None, TrialState.FAIL),
    ],
)
def test_how_a_trial_ended_is_told_as_it_was(last, state):
    searcher = OptunaSearcher(specs_of("m"), num_trials=2, seed=0)
    searcher.tell(searcher.ask(), last)
    trial = searcher._studies["m"]._study.trials[-1]
    assert trial.state == state
    assert trial.intermediate_values == ({10: 0.3} if state == TrialState.PRUNED else {})


@pytest.mark.parametrize("objective", ["accuracy", "kl"])
def test_what_was_stopped_by_its_kl_has_no_other_value(objective):
    """Told now and read from the ledger: Optuna has its KL where that is looked for, and else no value of it."""
    spec = specs_of("m")[0]
    metrics = {"kl_text": 2.0, "kl_tasks": 4.0}
    record = replace(record_of(spec, "stopped_early"), metrics=metrics, stages=[StageReport("kl", 1.0)])
    told = OptunaSearcher([spec], num_trials=1, seed=0, objective=objective)
    told.ask()
    told.tell(spec, stage_message(spec.key, "kl", metrics=metrics))
    read = OptunaSearcher([spec], num_trials=1, seed=0, known=[record], objective=objective)
    for searcher in (told, read):
        (trial,) = searcher._studies["m"]._study.trials
        assert trial.state == TrialState.PRUNED
        assert trial.intermediate_values == ({0: -3.0} if objective == "kl" else {})
    assert read.remaining == 0


def test_a_proposal_is_taken_without_what_its_method_does_not_read():
    """Methods without removals have one removal_power in a space; TPE proposes them with any."""
    run = specs_of("m")[0].run
    configs = [PruningConfig("taylor", 16, n) for n in range(8, 24)]
    configs += [
        PruningConfig("blockwise", 16, n, removal_power=power) for n in range(8, 24) for power in (0.5, 1.0, 2.0)
    ]
    searcher = OptunaSearcher([TrialSpec(run, config, config.name) for config in configs], 24, 0)
    study, proposed, meant_otherwise = searcher._studies["m"], [], 0
    make = study._config
    study._config = lambda params: proposed.append(make(params)) or proposed[-1]
    for _ in range(24):
        unseen, count = set(study._unseen), len(proposed)
        spec = searcher.ask()
        if len(proposed) > count:
            literal = proposed[-1]
            meant = replace(literal, removal_power=1.0) if literal.method == "taylor" else literal
            if meant in unseen:
                meant_otherwise += meant != literal
                assert spec.config == meant
        metrics = {"acc_mean": 0.9 if spec.config.method == "taylor" else 0.5}
        searcher.tell(spec, stage_message(spec.key, status="complete", metrics=metrics, items_scored=20))
    assert meant_otherwise >= 3
