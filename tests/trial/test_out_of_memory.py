"""Stages of a trial that run out of memory: less at once, then the next leaner way, then a failed record with the figures; with the
numbers of a trial that did not, remembered for the next one and noted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import tune_prune
from tests.limited_memory import LimitedMemory
from tests.searches import start
from tests.trials import BLOCKWISE, RUN, open_context
from tune_prune.core.config import EvaluationProtocol, PruningConfig
from tune_prune.models import loading
from tune_prune.models.runner.out_of_memory import OutOfMemory
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.trial import fallback
from tune_prune.trial import trial as trials
from tune_prune.trial.context import TrialContext
from tune_prune.trial.recipe import Recipe
from tune_prune.trial.trial import Trial, run_trial
from tune_prune.tuning.resources import TrialResources
from tune_prune.tuning.work import TrialSpec
from tune_prune.tuning.worker import ContextCache, WorkerSettings

SMALL = replace(
    RUN, protocol=EvaluationProtocol(tasks=("boolq", "piqa"), limit=4, slices=(0.5, 1.0), perplexity_window=128)
)
TOO_LITTLE = 100_000  # bytes: the embedding has more
METHODS = {"importance": "taylor", "removal": "layerwise", "input_norms": "wanda_sp", "steps": "taylor"}
METHODS |= dict.fromkeys(("pruning", "refit", "recovery", "kl", "perplexity", "zero_shot"), "magnitude")


STEPS: dict[str, dict[str, Any]] = {
    "steps": {"steps": 2},
    "refit": {"compensation": "least_squares", "refit_tokens": 2048},
    "recovery": {"recovery": "lora", "recovery_steps": 1, "recovery_rate": 0.003},
}


def config_for(stage: str) -> PruningConfig:
    return replace(BLOCKWISE, method=METHODS[stage], seq_len=64, num_samples=40, **STEPS.get(stage, {}))


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return open_context(tmp_path_factory.mktemp("artifacts"), SMALL).suite


@pytest.fixture
def opened(suite, tmp_path, monkeypatch) -> Callable[[str], TrialContext]:
    """A function: a context in a folder of its own, with a short text."""

    def make(name: str) -> TrialContext:
        context = open_context(tmp_path / name, SMALL)
        context.suite = suite
        assert context.non_finite_weight is None  # looked for before: it takes no memory but the weights'
        context.perplexity_tokens = context.perplexity_tokens[:3000].clone()
        return context

    return make


def run_limited(context: TrialContext, stage: str, limit: int = 2**62) -> tuple[Trial, int]:
    """A trial whose `stage` has so much memory, and the most that the stage took."""
    trial, peak = Trial(config_for(stage), context), 0
    stages, names = trial.stages(), []
    order = ["pruning", *([stage, "kl"] if stage in STEPS else ["kl", "perplexity", "zero_shot", "zero_shot"])]
    order = [*dict.fromkeys(["importance"] if METHODS[stage] in ("taylor", "layerwise") else []), *order]
    if stage == "steps":
        order = ["importance", "steps", "pruning", "kl"]
    if stage in ("removal", "input_norms"):
        order.insert(order.index("pruning"), stage)
    for name in order:
        host = (context.calibration_tokens(context.run.calibration)[0], context.perplexity_tokens)
        with LimitedMemory(limit if name == stage else 2**62, host) as memory:
            names.append(next(stages).stage)
        if name == stage:
            peak = max(peak, memory.peak)
    assert names == order and (stage in STEPS or next(stages, None) is None)
    return trial, peak


def alike(trial: Trial, other: Trial) -> bool:
    """Whether all metrics are the same, but for those that tell the last bits of logits: few rows round otherwise."""
    one, two = trial.record.metrics, other.record.metrics
    close = {name for name in one if name.startswith(("gold_logprob_", "kl_tasks"))}
    assert {name: one[name] for name in close} == pytest.approx({name: two.get(name) for name in close}, abs=1e-5)
    return one == two | {name: one[name] for name in close}


@pytest.mark.parametrize(
    ("stage", "part", "way"),
    [
        ("importance", 0.345, "streamed, states in a file"),
        ("removal", 0.95, "resident, 1/2 at once"),
        ("input_norms", 0.95, "streamed"),
        ("steps", 0.4, "by layer, states in a file"),
        ("pruning", 0.95, ""),
        ("refit", 0.95, "streamed"),
        ("recovery", 0.56, "streamed, states in a file"),
        ("perplexity", 0.4, "resident, 1/4 at once"),
        ("zero_shot", 0.5, "streamed"),
    ],
)
@pytest.mark.slow
def test_a_stage_that_does_not_fit_is_made_with_less(opened, stage, part, way):
    whole, peak = run_limited(opened("whole"), stage)
    context = opened("limited")
    trial, less = run_limited(context, stage, int(part * peak))
    assert less <= part * peak
    ways = {report.stage: report.way for report in trial.record.stages}
    assert ways[stage] == way
    assert alike(trial, whole) and trial.plan == whole.plan
    for one, other in zip(trial.items, whole.items, strict=True):
        np.testing.assert_allclose(one.loglikelihoods, other.loglikelihoods, rtol=0, atol=1e-4)
        assert (one.acc, one.acc_norm) == (other.acc, other.acc_norm)
    (note,) = trial.record.notes
    last = way or "streamed"  # its pruned copy is all there
    assert note == f"memory did not suffice for the stage {stage} resident, so it was made {last}"
    assert whole.record.notes == []

    begins = []
    context.artifacts = type(context.artifacts)(context.artifacts.folder / "another")  # nothing is cached
    context.__dict__.pop("cache", None)
    with LimitedMemory() as memory:
        for report in Trial(config_for(stage), context).stages():
            if report.stage == stage:
                begins.append(report.way)
            elif begins:
                break
    assert set(begins) == {way} and memory.refused == 0  # what worked is where the next trial begins


def leanness(way: Residency) -> tuple[object, ...]:
    return way.streamed, way.gradients_by_layer, not way.pruned_whole, ("device", "host", "file").index(way.states)


@pytest.mark.parametrize("stage", METHODS)
def test_less_at_once_comes_first_then_leaner_ways_then_the_failure_with_its_figures(opened, stage, caplog):
    context = opened("impossible")
    with pytest.raises(OutOfMemory) as raised:
        run_limited(context, stage, TOO_LITTLE)
    tried = [record.args[1] for record in caplog.records if record.msg.startswith("out of memory in")]
    assert tried[0] == RESIDENT
    for before, after in pairwise(tried):
        if after.halvings:
            assert after == replace(before, halvings=before.halvings + 1)
        else:
            assert leanness(before) < leanness(after)
    halved = max(way.halvings for way in tried if not way.streamed)
    assert (halved > 0) == (stage in ("removal", "recovery", "kl", "perplexity", "zero_shot"))
    assert ("by layer" in {str(way) for way in tried}) == (stage in ("importance", "steps"))
    said = str(raised.value)
    first = {"recovery": "original model for training"}.get(stage, stage)
    assert said.startswith(f"{first} of tiny-llama does not fit into memory, even {tried[-1]} (")
    assert "asked for, " in said and f"the first of {len(tried)} ways tried: resident" in said
    assert not any(p.requires_grad or p.grad is not None for p in context.loaded.model.parameters())


@pytest.mark.parametrize("stage", ["importance", "perplexity"])
def test_other_errors_pass_untouched(opened, stage, monkeypatch):
    broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    context = opened("broken")

    def fail(*_: object, **__: object) -> None:
        raise broken

    monkeypatch.setattr("tune_prune.models.head.NextTokenLosses.__call__", fail)
    monkeypatch.setattr("tune_prune.models.head.NextTokenLosses.backward", fail)
    with pytest.raises(RuntimeError) as raised:
        run_limited(context, stage)
    assert raised.value is broken and context.fallback.way == RESIDENT and context.fallback.notes == ()


def test_a_model_whose_weights_do_not_fit_is_streamed_and_opened_so_again(tmp_path, monkeypatch):
    loads = []

    def too_large(*args: object) -> None:
        loads.append(args)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.00 GiB.")

    monkeypatch.setattr(loading, "bring", too_large)
    cache = ContextCache(WorkerSettings(tmp_path, tmp_path / "artifacts", TrialResources()))
    context = cache.open(SMALL)
    assert context.loaded.residency.from_files and len(loads) == 1
    assert context.fallback.notes == ("memory did not suffice for the stage loading resident, so it was made streamed",)
    cache.open(replace(SMALL, seed=1))
    assert len(loads) == 2
    assert cache.open(SMALL) is not context and len(loads) == 2  # remembered
    monkeypatch.setattr(fallback, "readable_in_place", lambda source: False)
    with pytest.raises(OutOfMemory, match="loading of tiny-llama does not fit"):
        TrialContext.open(SMALL, tmp_path, "cpu")


def spec_of(context: TrialContext, config: PruningConfig) -> TrialSpec:
    return TrialSpec(SMALL, config, context.key(config))


@pytest.fixture
def no_gradients(monkeypatch) -> None:
    """Gradient passes never fit."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr("tune_prune.models.head.NextTokenLosses.backward", refuse)


@pytest.mark.slow
def test_a_trial_that_fits_in_no_way_is_a_failed_record_and_the_search_goes_on(tmp_path, no_gradients):
    context = open_context(tmp_path / "reference", SMALL)
    taylor, magnitude = (replace(BLOCKWISE, method=name) for name in ("taylor", "magnitude"))
    specs = [spec_of(context, config) for config in (taylor, magnitude)]
    result = start(specs, tmp_path / "search", inline=True)
    failed, complete = (result.records[spec.key] for spec in specs)
    assert (failed.status, complete.status) == ("failed", "complete")
    assert failed.reason.startswith(
        "importance of tiny-llama does not fit into memory, even streamed, states in a file ("
    )
    assert "an unknown amount asked for" in failed.reason and "\n" not in failed.reason
    assert failed.notes and complete.metrics == run_trial(magnitude, context).metrics
    assert complete.notes == failed.notes  # it began in the way that the trial before had come to


def test_a_baseline_that_fits_in_no_way_does_not_end_the_search(opened, tmp_path, monkeypatch):
    context = opened("keys")
    spec = spec_of(context, replace(BLOCKWISE, method="magnitude"))
    measure = trials.measure_perplexity

    def refuse(context: TrialContext, recipe: Recipe) -> object:
        if not recipe.plan.removed_params:
            raise OutOfMemory("perplexity of tiny-llama does not fit into memory")
        return measure(context, recipe)

    monkeypatch.setattr(trials, "measure_perplexity", refuse)
    result = start([spec], tmp_path / "search", inline=True)
    assert result.records[spec.key].status == "complete" and result.baselines == {}


def test_an_opened_model_whose_weights_do_not_fit_is_measured_from_its_files(tmp_path, monkeypatch):
    """But who asks for the model itself gets a sentence."""
    monkeypatch.chdir(tmp_path)
    expected = tune_prune.open("tiny-llama").evaluate(limit=4, tasks="boolq")

    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.00 GiB.")

    monkeypatch.setattr(loading, "bring", too_large)
    model = tune_prune.open("tiny-llama")
    found = model.evaluate(limit=4, tasks="boolq")
    assert (found.ppl, found.acc_mean) == (expected.ppl, expected.acc_mean)
    assert found.notes == ("memory did not suffice for the stage loading resident, so it was made streamed",)
    with pytest.raises(
        OutOfMemory, match=r"loading of tiny-llama does not fit into memory, even resident \(14.0 GiB asked for"
    ):
        _ = tune_prune.open("tiny-llama").model
