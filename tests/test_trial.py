"""One trial from end to end, on an embedded model: its record and files, where it needs neither Ray nor Optuna, and what
the cache saves."""

from __future__ import annotations

import gc
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from tune_prune import calibration
from tune_prune.artifacts import ArtifactStore
from tune_prune.config import ZERO_SHOT_TASKS, EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.context import TrialContext
from tune_prune.errors import UserError
from tune_prune.evaluation import perplexity
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.importance import taylor
from tune_prune.pruning.methods import LOSS_FLOOR, Statistics, load_method
from tune_prune.pruning.removal_loss import RemovalLosses, removal_losses
from tune_prune.pruning.selection import select
from tune_prune.pruning.surgery import prune
from tune_prune.records import StageReport, TrialRecord
from tune_prune.trial import SharedStatistics, Trial, prepare, run_trial

RUN = ModelRun(
    model="tiny-llama",
    label="tiny-llama",
    revision=None,
    calibration="embedded",
    data_dir=None,
    protocol=EvaluationProtocol(limit=5),
    seed=0,
    dtype="float32",
)
BLOCKWISE = PruningConfig("blockwise", taylor_seq_len=16, taylor_num_samples=10, pruning_ratio=0.2)


def open_context(folder: Path, run: ModelRun = RUN) -> TrialContext:
    return TrialContext.open(run, folder, device="cpu")


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> TrialContext:
    return open_context(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def first(context, tmp_path_factory):
    """The first trial of the context, which finds no artifact, and its folder."""
    folder = tmp_path_factory.mktemp("trials") / "key"
    return run_trial(BLOCKWISE, context, folder), folder


@pytest.fixture
def fresh(context, tmp_path) -> TrialContext:
    """A context with an empty cache that shares the loaded model and the tasks."""
    other = TrialContext(context.run, context.loaded, ArtifactStore(tmp_path / "artifacts"))
    other.suite = context.suite
    return other


def made(
    fresh: TrialContext, seq_len: int, num_samples: tuple[int, ...], removals: dict[str, int]
) -> list[StageReport]:
    return [report for _, report in prepare(fresh, seq_len, SharedStatistics(num_samples, removals))]


def test_the_record_of_a_trial(first, context):
    record, _ = first
    assert record.status == "complete" and record.model == "tiny-llama" and record.key == context.key(BLOCKWISE)
    assert PruningConfig.from_dict(record.config) == BLOCKWISE
    assert [stage["stage"] for stage in record.stages] == [
        "importance",
        "removal",
        "pruning",
        "perplexity",
        *["zero_shot"] * len(RUN.protocol.slices),
    ]
    geometry, metrics = context.loaded.geometry, record.metrics
    assert 0 <= 0.2 - metrics["removed_fraction"] < geometry.channel_cost[0] / geometry.total_params
    assert metrics["params_count"] == geometry.total_params * (1 - metrics["removed_fraction"])
    assert 1 < metrics["ppl"] < math.inf
    assert metrics["acc_mean"] == pytest.approx(np.mean([metrics[f"acc_{task}"] for task in ZERO_SHOT_TASKS]))
    for task in ZERO_SHOT_TASKS:
        assert metrics[f"acc_{task}"] * 5 == pytest.approx(round(metrics[f"acc_{task}"] * 5))  # of 5 items
        assert f"acc_{task}_stderr" in metrics
    assert {"grad_mean_ratio", "grad_norm_ratio", "grad_std_ratio", "grad_max_ratio"} <= metrics.keys()
    assert record.elapsed_time_s == pytest.approx(sum(stage["duration_s"] for stage in record.stages))
    assert record.peak_memory_bytes > 2**26 and record.host and record.started_at.endswith("+00:00")
    assert json.loads(json.dumps(record.to_dict()))["metrics"] == metrics


def test_each_stage_says_what_it_cost(first, context):
    stages = first[0].stages
    layers = context.loaded.geometry.num_layers
    assert stages[0]["tokens"] == 16 * 10
    assert stages[1]["tokens"] == 16 * 2 * (
        1 + 2 * layers
    )  # 10 // 5 samples, the dense model, each layer for two kinds
    assert stages[2]["tokens"] == 0 and stages[3]["tokens"] > 1000
    scored = [stage["items_scored"] for stage in stages[4:]]
    assert scored == sorted(scored) and scored[-1] == 5 * len(ZERO_SHOT_TASKS)
    assert {stage["items_total"] for stage in stages[4:]} == {scored[-1]}


def test_the_files_of_a_trial(first, context):
    record, folder = first
    assert {path.name for path in folder.iterdir()} == {
        "pruning_plan.json",
        "pruning_comparison.json",
        "gradient_diagnosis.json",
        "items.parquet",
    }
    plan = PruningPlan.from_dict(json.loads((folder / "pruning_plan.json").read_text()))
    assert plan.removed_fraction == record.metrics["removed_fraction"]
    comparison = json.loads((folder / "pruning_comparison.json").read_text())
    lost = sum(layer["params_before"] - layer["params_kept"] for layer in comparison["layers"])
    assert lost == plan.removed_params
    diagnosis = json.loads((folder / "gradient_diagnosis.json").read_text())
    assert diagnosis["grad_norm_ratio"] == pytest.approx(record.metrics["grad_norm_ratio"])
    assert len(diagnosis["layers"]) == context.loaded.geometry.num_layers
    items = pandas.read_parquet(folder / "items.parquet")
    assert items.groupby("task").size().to_dict() == dict.fromkeys(ZERO_SHOT_TASKS, 5)
    assert not items.duplicated(["task", "doc_id"]).any()
    boolq = items[items.task == "boolq"]
    assert boolq.acc.mean() == pytest.approx(record.metrics["acc_boolq"])


def test_the_plan_is_the_method_applied_by_hand(first, context):
    loaded = context.loaded
    importance = taylor(loaded.model, loaded.family, context.windows(16, 10), [10])[10]
    losses = removal_losses(loaded.model, loaded.family, context.windows(16, 2), ("attention", "mlp"))
    increase = {kind: np.maximum(losses.increase(kind, 2), LOSS_FLOOR) for kind in ("attention", "mlp")}
    statistics = Statistics(loaded.geometry, importance.groups.per_parameter(loaded.geometry), increase, RUN.seed)
    expected = select(load_method("blockwise").scores(statistics), loaded.geometry, 0.2)
    told = PruningPlan.from_dict(json.loads((first[1] / "pruning_plan.json").read_text()))
    assert told == expected


def test_a_second_trial_finds_the_statistics_and_the_same_numbers(first, context):
    again = run_trial(BLOCKWISE, context)
    assert [stage["tokens"] for stage in again.stages[:2]] == [0, 0]
    assert again.metrics == first[0].metrics and again.key == first[0].key
    other = Trial(replace(BLOCKWISE, method="taylor", pruning_ratio=0.3), context)
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
def test_a_damaged_artifact_is_computed_again(first, fresh, damage):
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


def test_a_trial_leaves_the_dense_model_as_it_was(context, fresh):
    before = {name: p.clone() for name, p in context.loaded.model.named_parameters()}
    for _ in zip(Trial(BLOCKWISE, fresh).stages(), range(4), strict=False):
        pass
    for name, p in context.loaded.model.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None and not p.requires_grad, name


def test_memory_does_not_grow_from_trial_to_trial(fresh):
    """The pruned copies, gradients and hidden states of a trial are gone when it is."""

    def live_bytes() -> int:
        gc.collect()
        return sum(o.nbytes for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))

    run_trial(replace(BLOCKWISE, pruning_ratio=0.1), fresh)  # loads texts and tasks
    before = live_bytes()
    for method in ("taylor", "layerwise", "blockwise"):
        run_trial(replace(BLOCKWISE, method=method, pruning_ratio=0.3), fresh)
    assert live_bytes() <= before


def test_the_dense_model_through_the_same_evaluation(context, tmp_path):
    record = run_trial(None, context, tmp_path / "dense")
    assert record.config == {} and [stage["stage"] for stage in record.stages] == ["perplexity"] + ["zero_shot"] * 5
    assert record.metrics["params_count"] == context.loaded.geometry.total_params
    assert record.metrics["removed_fraction"] == 0
    assert [path.name for path in (tmp_path / "dense").iterdir()] == ["items.parquet"]


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
    one = run_trial(replace(BLOCKWISE, method="taylor"), fresh, tmp_path / "one")
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


@pytest.mark.parametrize("raw", [[-1.0, 0.5], [0.0, 0.5]])
def test_a_removal_that_helps_is_clamped_and_reported(fresh, monkeypatch, raw):
    layers = fresh.loaded.geometry.num_layers
    increases = np.array([raw[0]] + [raw[1]] * (layers - 1))
    losses = RemovalLosses(np.zeros(2), {"layer": np.tile(increases[:, None], 2)})
    monkeypatch.setattr(fresh, "removal", lambda *_: (losses, 7), raising=False)
    told = Trial(replace(BLOCKWISE, method="layerwise"), fresh)
    stages = told.stages()
    next(stages)
    report = next(stages)
    assert report.metrics == {"clamped_removal_losses": 1.0} and report.tokens == 7
    assert next(stages).metrics["removed_fraction"] == pytest.approx(0.2, abs=0.01)


def test_a_stopped_or_failed_trial_has_a_record_too(context):
    stopped = Trial(replace(BLOCKWISE, method="random"), context)
    stages = stopped.stages()
    while next(stages).stage != "perplexity":
        pass
    stages.close()
    record = stopped.record("stopped_early", "rung 1")
    assert (record.status, record.reason) == ("stopped_early", "rung 1")
    assert "ppl" in record.metrics and "acc_mean" not in record.metrics
    failed = Trial(replace(BLOCKWISE, method="no-such-method"), context)
    with pytest.raises(UserError, match="unknown pruning method"):
        next(failed.stages())
    assert failed.record("failed", "unknown method").metrics == {}


def test_keys_tell_configurations_models_data_and_protocols_apart(context, tmp_path):
    runs = [
        RUN,
        replace(RUN, seed=1),
        replace(RUN, protocol=EvaluationProtocol(limit=6)),
        replace(RUN, dtype="bfloat16"),
    ]
    text = tmp_path / "text.txt"
    text.write_text("another text")
    runs.append(replace(RUN, calibration=str(text)))
    keys = {
        TrialContext(run, context.loaded, context.artifacts).key(config) for run in runs for config in (None, BLOCKWISE)
    }
    assert len(keys) == 2 * len(runs)
    relabelled = TrialContext(replace(RUN, label="other"), context.loaded, context.artifacts)
    assert relabelled.key(BLOCKWISE) == context.key(BLOCKWISE)  # a label means nothing


IN_A_BARE_PROCESS = """
import json
from pathlib import Path
import torch
torch.set_num_threads(1)
from tune_prune.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.context import TrialContext
from tune_prune.trial import Trial, run_trial
run = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, EvaluationProtocol(limit=5), 0, "float32")
context = TrialContext.open(run, sys.argv[1], device="cpu")
config = PruningConfig("blockwise", 16, 10, 0.2)
"""


def test_a_whole_trial_needs_neither_ray_nor_optuna(first, run_without, tmp_path):
    code = IN_A_BARE_PROCESS + "print(json.dumps(run_trial(config, context, Path(sys.argv[2])).to_dict()))"
    told = run_without(("ray", "optuna", "tensorboard"), code, str(tmp_path / "artifacts"), str(tmp_path / "trial"))
    record = json.loads(told.splitlines()[-1])
    here = json.loads(json.dumps(first[0].metrics))
    assert record["key"] == first[0].key
    assert record["metrics"].keys() == here.keys()
    for name, value in here.items():
        assert record["metrics"][name] == pytest.approx(value, rel=1e-6, nan_ok=True), name
    assert sorted(os.listdir(tmp_path / "trial")) == sorted(os.listdir(first[1]))


def test_all_stages_before_zero_shot_need_no_lm_eval(first, run_without, tmp_path):
    code = IN_A_BARE_PROCESS + (
        "trial = Trial(config, context)\n"
        "for report in trial.stages():\n"
        "    if report.stage == 'perplexity': break\n"
        "print(json.dumps(trial.record().metrics))"
    )
    told = run_without(("ray", "optuna", "tensorboard", "lm_eval", "datasets", "pandas"), code, str(tmp_path))
    metrics = json.loads(told.splitlines()[-1])
    assert metrics["ppl"] == pytest.approx(first[0].metrics["ppl"], rel=1e-6)
    assert "acc_mean" not in metrics


def test_a_calibration_text_that_is_too_short_is_one_sentence(context, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("too short")
    short = TrialContext(replace(RUN, calibration=str(text)), context.loaded, context.artifacts)
    with pytest.raises(UserError, match="10 were asked") as error:
        next(Trial(BLOCKWISE, short).stages())
    assert "\n" not in str(error.value)
