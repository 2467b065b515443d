"""What trials share: statistics and measurements are computed once, kept by their meaning, and computed again when damaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.trials import BLOCKWISE, RUN, open_context, with_empty_cache
from tune_prune.core.config import EvaluationProtocol, PruningConfig
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import FolderStore
from tune_prune.data import calibration
from tune_prune.evaluation import perplexity
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.statistics.block_removal import removal_losses
from tune_prune.pruning.statistics.taylor import taylor
from tune_prune.pruning.surgery import prune
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import SharedStatistics, Trial, prepare, run_trial


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> TrialContext:
    return open_context(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture
def fresh(context, tmp_path) -> TrialContext:
    return with_empty_cache(context, tmp_path / "artifacts")


def made(
    fresh: TrialContext, seq_len: int, num_samples: tuple[int, ...], removals: dict[str, int]
) -> list[StageReport]:
    return [report for _, report in prepare(fresh, seq_len, SharedStatistics(num_samples, removals))]


def test_a_second_trial_finds_the_statistics_and_the_same_numbers(fresh):
    first = run_trial(BLOCKWISE, fresh)
    again = run_trial(BLOCKWISE, fresh)
    assert [stage["tokens"] for stage in again.stages[:2]] == [0, 0]
    assert again.metrics == first.metrics and again.key == first.key
    other = Trial(replace(BLOCKWISE, method="taylor", pruning_ratio=0.3), fresh)
    stages = other.stages()
    assert next(stages).tokens == 0  # the gradients do not depend on method or ratio
    assert next(stages).stage == "pruning"  # taylor asks for no removal losses


def test_a_shorter_removal_run_is_a_prefix_of_a_longer_one(fresh):
    longer, tokens = fresh.removal(16, {"layer": 4})
    assert tokens > 0
    found, tokens = fresh.removal(16, {"layer": 2})
    assert tokens == 0
    alone = removal_losses(fresh.loaded.model, fresh.loaded.family, fresh.windows(16, 2), ("layer",))
    np.testing.assert_allclose(found.increase("layer", 2), alone.increase("layer", 2), atol=1e-5)
    more, tokens = fresh.removal(16, {"layer": 6})
    assert tokens > 0 and more.removed["layer"].shape[1] == 6
    np.testing.assert_allclose(more.increase("layer", 4), longer.increase("layer", 4), atol=1e-5)


@pytest.mark.parametrize("change", [{"seed": 1}, {"calibration": "text.txt"}, {"dtype": "bfloat16"}])
def test_statistics_of_another_run_are_not_taken(fresh, tmp_path, change):
    (tmp_path / "text.txt").write_text(calibration.load_text("embedded")[:5000])
    if "calibration" in change:
        change = {"calibration": str(tmp_path / "text.txt")}
    fresh.importance(16, 4)
    fresh.removal(16, {"layer": 1})
    other = TrialContext(replace(RUN, **change), fresh.loaded, fresh.artifacts)
    assert other.importance(16, 4)[1] > 0 and other.removal(16, {"layer": 1})[1] > 0
    assert fresh.importance(16, 4)[1] == fresh.removal(16, {"layer": 1})[1] == 0  # its own are still there
    assert other.importance(8, 4)[1] > 0 and other.importance(16, 3)[1] > 0


@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: raw[: len(raw) // 2]], ids=["empty", "half"])
def test_a_damaged_artifact_is_computed_again(fresh, damage):
    statistics, tokens = fresh.importance(16, 10)
    fresh.removal(16, {"attention": 2, "mlp": 2})
    assert tokens == 160
    files = sorted(fresh.artifacts.folder.iterdir())
    assert len(files) == 3
    for path in files:
        path.write_bytes(damage(path.read_bytes()))
    stages = Trial(BLOCKWISE, fresh).stages()
    assert next(stages).tokens == 160 and next(stages).tokens > 0
    next(stages)
    again, tokens = fresh.importance(16, 10)
    assert tokens == 0
    for name, array in statistics.arrays().items():
        np.testing.assert_array_equal(again.arrays()[name], array)


def test_prepare_makes_one_pass_for_all_sample_counts_and_one_for_all_removals(fresh):
    reports = made(fresh, 16, (3, 6, 12), {"layer": 2, "mlp": 1})
    layers = fresh.loaded.geometry.num_layers
    assert [(report.stage, report.tokens) for report in reports] == [
        ("importance", 16 * 12),
        ("removal", 16 * 2 * (1 + 2 * layers)),
    ]
    for count in (3, 6, 12):
        found, tokens = fresh.importance(16, count)
        direct = taylor(fresh.loaded.model, fresh.loaded.family, fresh.windows(16, count), [count])[count]
        assert tokens == 0
        for name, array in direct.arrays().items():
            np.testing.assert_array_equal(found.arrays()[name], array)
    assert made(fresh, 16, (3, 6, 12), {"layer": 2, "mlp": 1}) == []
    assert [report.tokens for report in made(fresh, 16, (3, 9), {})] == [16 * 9]  # only what is missing
    assert [report.tokens for report in made(fresh, 16, (), {"layer": 2, "attention": 2})] == [16 * 2 * (1 + layers)]


def test_the_first_trial_at_a_seq_len_computes_what_its_neighbours_need(fresh):
    """Adaptive searches prepare nothing."""
    configs = [PruningConfig(m, 16, n) for m in ("taylor", "layerwise", "blockwise") for n in (5, 10)]
    shared = SharedStatistics.of(configs)
    assert shared == SharedStatistics((5, 10), {"layer": 2, "attention": 2, "mlp": 2})
    tokens = []
    for config in configs:
        stages = Trial(config, fresh, shared).stages()
        tokens.append([next(stages).tokens for _ in range(1 if config.method == "taylor" else 2)])
    layers = fresh.loaded.geometry.num_layers
    assert tokens == [[160], [0], [0, 32 * (1 + layers)], [0, 0], [0, 32 * (1 + 2 * layers)], [0, 0]]


def measured(record: TrialRecord) -> list[int]:
    return [stage["tokens"] for stage in record.stages if stage["stage"] in ("perplexity", "zero_shot")]


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
    two = same_plan.record()
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
    done = ["importance", "removal", "perplexity", "zero_shot"]
    assert [stage["tokens"] for stage in again.stages if stage["stage"] in done][:4] == [0, 0, 0, 0]
    assert measured(again)[:2] == [0, 0] and sum(measured(again)) > 0
    assert again.metrics == whole.metrics


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"protocol": EvaluationProtocol(limit=6)}])
def test_measurements_of_another_protocol_are_not_taken(fresh, change):
    run_trial(None, fresh)
    other = TrialContext(replace(RUN, **change), fresh.loaded, fresh.artifacts)
    assert measured(run_trial(None, other))[-1] > 0
    reseeded = TrialContext(replace(RUN, seed=1), fresh.loaded, fresh.artifacts)
    assert not any(measured(run_trial(None, reseeded)))  # the dense model is the same whatever it is calibrated on
