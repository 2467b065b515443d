"""Statistics and measurements that trials share are computed once, kept by their meaning, and computed again when damaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trials import BLOCKWISE, RUN, open_context, with_empty_cache
from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import PruningConfig, Samples
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import FolderStore
from tune_prune.data import calibration
from tune_prune.evaluation import perplexity
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import Need, block_removal, load_statistic, parse
from tune_prune.pruning.statistics.block_removal import removal_losses
from tune_prune.pruning.statistics.taylor import Importance, taylor
from tune_prune.pruning.surgery import prune
from tune_prune.trial.context import TrialContext
from tune_prune.trial.statistics import StatisticCache, needs_of
from tune_prune.trial.trial import Trial, prepare, run_trial

WHOLE_TEXT = True
INPUT_NORMS = PruningConfig("wanda_sp", seq_len=16, num_samples=10)


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> TrialContext:
    return open_context(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture
def fresh(context, tmp_path) -> TrialContext:
    return with_empty_cache(context, tmp_path / "artifacts")


def gradients(*num_samples: int) -> list[Need]:
    return [Need("taylor", "", n) for n in num_samples]


def removals(**num_samples: int) -> list[Need]:
    return [Need("block_removal", kind, n) for kind, n in num_samples.items()]


def made(fresh: TrialContext, samples: Samples, needs: list[Need]) -> list[StageReport]:
    return [report for _, report in prepare(fresh, samples, needs)]


def tokens_of(context: TrialContext, samples: Samples, needs: list[Need]) -> int:
    return context.collect(samples, needs)[1]


def test_a_shorter_removal_run_is_a_prefix_of_a_longer_one(fresh):
    def increase(num_samples: int) -> tuple[np.ndarray, int]:
        (need,) = removals(layer=num_samples)
        found, tokens = fresh.collect(Samples(16), [need])
        return load_statistic("block_removal").value(found[need], need), tokens

    longer, tokens = increase(4)
    assert tokens > 0
    shorter, tokens = increase(2)
    assert tokens == 0
    alone = removal_losses(fresh.loaded.model, fresh.loaded.family, fresh.windows(Samples(16), 2), ("layer",))
    np.testing.assert_array_equal(shorter, alone.increase("layer", 2))
    assert increase(6)[1] > 0
    again, tokens = increase(4)
    assert tokens == 0
    np.testing.assert_array_equal(again, longer)


def test_a_removal_pass_that_is_interrupted_goes_on(fresh, monkeypatch):
    """It goes on from what was stored last, and reports the tokens that it forwarded itself."""
    monkeypatch.setattr(block_removal, "KEEP_EVERY_S", -1.0)
    needs, runs = removals(layer=6, mlp=4), 1 + 2 * fresh.loaded.geometry.num_layers
    put, puts = ArtifactStore.put, []

    def interrupted(store, kind, key, arrays):
        put(store, kind, key, arrays)
        puts.append(len(arrays["dense"]))
        if puts == [1, 1, 2, 2, 4, 4]:
            raise KeyboardInterrupt

    monkeypatch.setattr(ArtifactStore, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fresh.collect(Samples(16), needs)
    monkeypatch.setattr(ArtifactStore, "put", put)
    assert fresh.cache.missing(Samples(16), needs) == (needs[0],)  # four samples are there, of each kind
    found, tokens = fresh.collect(Samples(16), removals(layer=6, mlp=6))
    assert tokens == 16 * (6 - 4) * runs
    windows = fresh.windows(Samples(16), 6)
    alone = removal_losses(fresh.loaded.model, fresh.loaded.family, windows, ("layer", "mlp"))
    for need, arrays in found.items():
        np.testing.assert_array_equal(arrays["removed"], alone.removed[need.kind])
        np.testing.assert_array_equal(arrays["dense"], alone.dense)


@pytest.mark.parametrize("change", [{"seed": 1}, {"calibration": "text.txt"}, {"dtype": "bfloat16"}])
def test_statistics_of_another_run_are_not_taken(fresh, tmp_path, change):
    (tmp_path / "text.txt").write_text(calibration.load_text("embedded")[:5000])
    if "calibration" in change:
        change = {"calibration": str(tmp_path / "text.txt")}
    other = TrialContext(replace(RUN, **change), fresh.loaded, fresh.artifacts)
    for needs in (gradients(4), removals(layer=1), [Need("input_norms", "", 4)]):
        assert tokens_of(fresh, Samples(16), needs) > 0 and tokens_of(other, Samples(16), needs) > 0
        assert tokens_of(fresh, Samples(16), needs) == 0  # its own are still there
    assert tokens_of(other, Samples(8), gradients(4)) > 0 and tokens_of(other, Samples(16), gradients(3)) > 0


@pytest.mark.parametrize("changed", ["taylor", "block_removal", "input_norms"])
def test_a_new_version_of_a_statistic_throws_no_others_away(fresh, monkeypatch, changed):
    every = {"taylor": gradients(4), "block_removal": removals(mlp=1), "input_norms": [Need("input_norms", "", 4)]}
    assert all(tokens_of(fresh, Samples(16), needs) > 0 for needs in every.values())
    statistic = load_statistic(changed)
    monkeypatch.setattr(type(statistic), "version", statistic.version + 1)
    assert {name for name, needs in every.items() if tokens_of(fresh, Samples(16), needs)} == {changed}


def test_what_is_computed_of_a_text_that_is_edited_meanwhile_is_kept_under_what_it_was(tmp_path):
    text, whole = tmp_path / "own.txt", calibration.load_text("embedded")
    text.write_text(whole[:60_000])
    config = replace(INPUT_NORMS, calibration=str(text), seq_len=32)
    (need,) = load_method(config.method).needs(config).values()
    opened = [open_context(tmp_path / folder) for folder in ("shared", "shared", "alone")]
    running, later, alone = opened
    key, before = running.key(config), running.calibration_tokens(str(text))
    text.write_text(whole[-60_000:])
    old, _ = running.collect(config.samples, [need])
    assert running.key(config) == key != later.key(config) and running.calibration_tokens(str(text)) is before
    (found, tokens), (expected, _) = (one.collect(config.samples, [need]) for one in (later, alone))
    assert tokens == 320 and all(np.array_equal(found[need][name], values) for name, values in expected[need].items())
    assert not all(np.array_equal(old[need][name], values) for name, values in expected[need].items())


def test_fewer_samples_do_not_replace_more(tmp_path):
    """A search that needs fewer samples may end later."""
    cache, kept = StatisticCache(RUN, "0123456789abcdef", "cpu", ArtifactStore(tmp_path)), []
    for count in (4, 2, 6, 5):
        (need,) = removals(layer=count)
        cache.put(Samples(16), need, {"dense": np.zeros(count), "removed": np.ones((3, count))})
        kept.append(len(cache.get(Samples(16), need)["dense"]))
    assert kept == [4, 4, 6, 6]


def test_prepare_makes_one_pass_for_all_sample_counts_and_one_for_all_removals(fresh):
    reports = made(fresh, Samples(16), [*removals(layer=2, mlp=1), *gradients(3, 6, 12)])
    layers = fresh.loaded.geometry.num_layers
    assert [(report.stage, report.tokens) for report in reports] == [
        ("importance", 16 * 12),
        ("removal", 16 * 2 * (1 + 2 * layers)),
    ]
    for need in gradients(3, 6, 12):
        found, tokens = fresh.collect(Samples(16), [need])
        windows = fresh.windows(Samples(16), need.num_samples)
        direct = taylor(fresh.loaded.model, fresh.loaded.family, windows, [len(windows)])[len(windows)]
        assert tokens == 0
        for name, array in direct.arrays().items():
            np.testing.assert_array_equal(found[need][name], array)
        assert Importance.from_arrays(len(windows), found[need]).arrays().keys() == direct.arrays().keys()
    assert made(fresh, Samples(16), [*gradients(3, 6, 12), *removals(layer=2, mlp=1)]) == []
    assert [report.tokens for report in made(fresh, Samples(16), gradients(3, 9))] == [16 * 9]  # only what is missing
    ((about, report),) = prepare(fresh, Samples(16), removals(layer=2, attention=2))
    assert about == {"model": "tiny-llama", "seq_len": 16, "attention": 2} and report.tokens == 16 * 2 * (1 + layers)


def test_another_draw_is_the_trial_of_a_run_with_that_seed(fresh, tmp_path):
    """Its samples, key, statistics and plan; and one of the cached statistics of the other serves it."""
    run = replace(fresh.run, seed=3)
    other = TrialContext(run, fresh.loaded, ArtifactStore(tmp_path / "other"))
    config = PruningConfig("taylor", 16, 6, seed=3)
    windows = fresh.windows(config.samples, 6)
    assert torch.equal(windows, other.windows(Samples(16), 6))
    assert not torch.equal(windows, fresh.windows(Samples(16), 6))
    assert fresh.key(config) == other.key(replace(config, seed=None)) != fresh.key(replace(config, seed=None))
    assert tokens_of(fresh, Samples(16), gradients(6)) == 16 * 6
    ((about, report),) = prepare(fresh, config.samples, gradients(6))
    assert about == {"model": "tiny-llama", "seq_len": 16, "seed": 3, "num_samples": 6} and report.tokens == 16 * 6
    for method in ("taylor", "random"):
        trials = [Trial(replace(config, method=method, seed=seed), at) for at, seed in ((fresh, 3), (other, None))]
        for trial in trials:
            for stage in trial.stages():
                if stage.stage == "pruning":
                    break
        assert trials[0].plan == trials[1].plan
    assert tokens_of(other, Samples(16), gradients(6)) == 0


def test_the_first_trial_at_a_seq_len_computes_what_its_neighbours_need(fresh):
    """Adaptive searches prepare nothing."""
    configs = [PruningConfig(m, 16, n) for m in ("taylor", "layerwise", "blockwise", "random") for n in (5, 10)]
    shared = needs_of(configs)
    assert shared == (*gradients(5, 10), *removals(attention=2, layer=2, mlp=2))
    assert needs_of(config for config in configs if config.method == "random") == ()
    tokens = []
    for config in configs:
        stages = Trial(config, fresh, shared).stages()
        statistics = {parse(name)[0] for name in load_method(config.method).statistics}
        tokens.append([next(stages).tokens for _ in statistics])
    layers = fresh.loaded.geometry.num_layers
    assert tokens == [[160], [0], [0, 32 * (1 + layers)], [0, 0], [0, 32 * (1 + 2 * layers)], [0, 0], [], []]


def measured(record: TrialRecord) -> list[int]:
    return [stage.tokens for stage in record.stages if stage.stage in ("kl", "perplexity", "zero_shot")]


def test_removing_nothing_is_the_baseline(fresh):
    dense = run_trial(None, fresh)
    nothing = run_trial(replace(BLOCKWISE, method="random", pruning_ratio=0.0), fresh)
    assert sum(measured(dense)) > 25_000 and not any(measured(nothing))  # not measured a second time
    for name, value in dense.metrics.items():
        assert nothing.metrics[name] == pytest.approx(value, rel=0, abs=0, nan_ok=True), name
    loaded = fresh.loaded
    whole = prune(loaded.model, loaded.family, PruningPlan.keep_all(loaded.geometry))  # and it would measure the same
    tokens, window = fresh.perplexity_tokens, fresh.perplexity_window
    assert perplexity.perplexity(whole, tokens, window).ppl == dense.metrics["ppl"]


def test_configurations_that_keep_the_same_groups_are_measured_once(fresh, tmp_path):
    one = run_trial(replace(BLOCKWISE, method="taylor"), fresh, FolderStore(tmp_path / "one"))
    # The sums over ten samples rank as the means over the same ten: the same plan by another name.
    same_plan = Trial(replace(BLOCKWISE, method="taylor", removal_divisor=4), fresh)
    for _ in same_plan.stages():
        pass
    two = same_plan.record
    assert one.key != two.key and sum(measured(one)) > 25_000 and not any(measured(two))
    assert two.metrics == one.metrics
    other = run_trial(replace(BLOCKWISE, method="taylor", pruning_ratio=0.3), fresh)
    assert sum(measured(other)) > 25_000 and other.metrics["ppl"] > one.metrics["ppl"]


def test_an_interrupted_trial_goes_on_where_it_was(context, fresh):
    whole = run_trial(BLOCKWISE, context)
    first_part = Trial(BLOCKWISE, fresh)
    for report in first_part.stages():
        if report.items_scored:
            break
    again = run_trial(BLOCKWISE, fresh)
    done = ["importance", "removal", "kl", "perplexity", "zero_shot"]
    assert [stage.tokens for stage in again.stages if stage.stage in done][:5] == [0, 0, 0, 0, 0]
    assert measured(again)[:3] == [0, 0, 0] and sum(measured(again)) > 0
    assert again.metrics == whole.metrics
