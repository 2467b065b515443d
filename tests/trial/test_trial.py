"""One trial from end to end, on an embedded model: its record and files, where it needs neither Ray nor Optuna, and what
the cache saves."""

from __future__ import annotations

import gc
import json
import math
import os
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from tests.trials import BLOCKWISE, RUN, open_context, with_empty_cache
from tune_prune.core.config import ZERO_SHOT_TASKS, Samples
from tune_prune.core.store import FolderStore
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.groups import GroupScores, PruningPlan
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.selection import select
from tune_prune.pruning.statistics import Need
from tune_prune.pruning.statistics.block_removal import LOSS_FLOOR, removal_losses
from tune_prune.pruning.statistics.taylor import taylor
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import Trial, run_trial

WHOLE_TEXT = True

CPU_INFO = Path("/proc/cpuinfo")  # of Linux


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> TrialContext:
    return open_context(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def first(context, tmp_path_factory):
    """The first trial of the context, which finds no artifact, and its folder."""
    folder = tmp_path_factory.mktemp("trials") / "key"
    return run_trial(BLOCKWISE, context, FolderStore(folder)), folder


@pytest.fixture
def fresh(context, tmp_path) -> TrialContext:
    return with_empty_cache(context, tmp_path / "artifacts")


def test_the_record_of_a_trial(first, context):
    record, _ = first
    assert record.status == "complete" and record.model == "tiny-llama" and record.key == context.key(BLOCKWISE)
    assert record.config == BLOCKWISE
    assert [stage.stage for stage in record.stages] == [
        "importance",
        "removal",
        "pruning",
        "kl",
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
    assert record.elapsed_time_s == pytest.approx(sum(stage.duration_s for stage in record.stages))
    named = re.search(r"^model name\s*: (.*)$", CPU_INFO.read_text() if CPU_INFO.is_file() else "", re.MULTILINE)
    assert record.device_name == (named[1].strip() if named else record.device_name) != ""
    # Before "+cpu" or "+cu130", which a wheel of the CUDA build has in the one and not in the other.
    assert record.torch_version.partition("+")[0] == metadata.version("torch").partition("+")[0]
    assert record.transformers_version == metadata.version("transformers")
    assert record.method_code == load_method("blockwise").code != load_method("layerwise").code
    assert record.peak_memory_bytes > 2**26 and record.host and record.started_at.endswith("+00:00")
    assert json.loads(json.dumps(record.to_dict()))["metrics"] == metrics


def test_the_files_of_a_trial(first, context):
    record, folder = first
    assert {path.name for path in folder.iterdir()} == {
        "pruning_plan.json",
        "pruning_comparison.json",
        "gradient_diagnosis.json",
        "items.parquet",
        "kl.json",
    }
    plan = PruningPlan.from_dict(json.loads((folder / "pruning_plan.json").read_text()))
    assert plan.removed_fraction == record.metrics["removed_fraction"]
    comparison = json.loads((folder / "pruning_comparison.json").read_text())
    lost = sum(layer["params_before"] - layer["params_kept"] for layer in comparison["layers"])
    assert lost == plan.removed_params
    diagnosis = json.loads((folder / "gradient_diagnosis.json").read_text())
    assert diagnosis["grad_norm_ratio"] == pytest.approx(record.metrics["grad_norm_ratio"])
    assert len(diagnosis["layers"]) == context.loaded.geometry.num_layers
    blocks = json.loads((folder / "kl.json").read_text())
    for name, found in blocks.items():
        mean = np.average(found["nats"], weights=found["tokens"])
        assert 0 < mean == pytest.approx(record.metrics[f"kl_{name}"])
    assert list(blocks) == ["tasks", "text"] and set(blocks["text"]["tokens"][:-1]) == {128}
    items = pandas.read_parquet(folder / "items.parquet")
    assert items.groupby("task").size().to_dict() == dict.fromkeys(ZERO_SHOT_TASKS, 5)
    assert not items.duplicated(["task", "doc_id"]).any()
    boolq = items[items.task == "boolq"]
    assert boolq.acc.mean() == pytest.approx(record.metrics["acc_boolq"])


def test_the_plan_is_the_method_applied_by_hand(first, context):
    loaded = context.loaded
    importance = taylor(loaded.model, loaded.family, context.windows(Samples(16), 10), [10])[10]
    losses = removal_losses(loaded.model, loaded.family, context.windows(Samples(16), 2), ("attention", "mlp"))
    a, m = (np.log1p(np.maximum(losses.increase(kind, 2), LOSS_FLOOR)) for kind in ("attention", "mlp"))
    scores = GroupScores(
        tuple(s / c * f for s, c, f in zip(importance.groups.attention, loaded.geometry.group_cost, a, strict=True)),
        tuple(s / c * f for s, c, f in zip(importance.groups.mlp, loaded.geometry.channel_cost, m, strict=True)),
    )
    expected = select(scores, loaded.geometry, 0.2)
    written = PruningPlan.from_dict(json.loads((first[1] / "pruning_plan.json").read_text()))
    assert written == expected


@pytest.mark.parametrize(
    ("method", "whole"), [("blockwise", False), pytest.param("magnitude", True, marks=pytest.mark.slow)]
)
def test_a_trial_whose_weights_stay_in_their_files_has_the_same_numbers(method, whole, context, tmp_path):
    """Its pruned copy may be read as a whole."""
    config = replace(BLOCKWISE, method=method)
    expected = run_trial(config, context)
    other = TrialContext.open(RUN, tmp_path, "cpu", Residency(from_files=True, pruned_whole=whole))
    trial = Trial(config, other)
    for _ in trial.stages():
        pass
    record = trial.record
    assert (record.key, record.metrics, record.notes) == (expected.key, expected.metrics, expected.notes)
    assert {p.device.type for p in other.loaded.model.parameters()} == {"meta"}
    ways = {stage.stage: stage.way for stage in record.stages}
    assert ways["zero_shot"] == ways["perplexity"] == ways["kl"] == ("" if whole else "streamed")
    dense = run_trial(None, other)
    assert dense.metrics == run_trial(None, context).metrics


@pytest.mark.slow
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


@pytest.mark.parametrize("raw", [[-1.0, 0.5], [0.0, 0.5]])
def test_a_removal_that_helps_is_clamped_and_reported(fresh, raw):
    layers = fresh.loaded.geometry.num_layers
    increases = np.array([raw[0]] + [raw[1]] * (layers - 1))
    losses = {"dense": np.zeros(2), "removed": np.tile(increases[:, None], 2)}
    fresh.cache.put(Samples(16), Need("block_removal", "layer", 2), losses)
    stages = Trial(replace(BLOCKWISE, method="layerwise"), fresh).stages()
    next(stages)
    report = next(stages)
    assert report.metrics == {"clamped_removal_losses": 1.0} and report.tokens == 0
    assert next(stages).metrics["removed_fraction"] == pytest.approx(0.2, abs=0.01)


def test_keys_tell_configurations_models_data_and_protocols_apart(context, tmp_path):
    runs = [
        RUN,
        replace(RUN, seed=1),
        replace(RUN, protocol=replace(RUN.protocol, limit=6)),
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
import torch
torch.set_num_threads(1)
from tune_prune.commands import evaluate
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.store import FolderStore
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import Trial
run = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, EvaluationProtocol(limit=5, perplexity_window=128), 0, "float32")
trial = Trial(PruningConfig("blockwise", 16, 10, 0.2), TrialContext.open(run, sys.argv[1], device="cpu"))
for report in trial.stages():
    if report.stage == "pruning":
        print(json.dumps(trial.record.metrics))
        hidden -= {"lm_eval", "datasets", "pandas"}
trial.write_files(FolderStore(sys.argv[2]))
print(json.dumps(trial.record.to_dict()))
sys.exit(evaluate.main(["--model", "tiny-llama", "--tasks", "boolq", "--limit", "2", "--device", "cpu"]))
"""


@pytest.mark.slow
def test_a_trial_and_an_evaluation_need_no_ray_and_lm_eval_for_items_only(first, run_without, tmp_path):
    hidden = ("ray", "optuna", "tensorboard", "lm_eval", "datasets", "pandas")
    told = run_without(hidden, IN_A_BARE_PROCESS, str(tmp_path / "artifacts"), str(tmp_path / "trial"))
    before, record = (json.loads(line) for line in told.splitlines() if line.startswith("{"))
    here = json.loads(json.dumps(first[0].metrics))
    assert before["removed_fraction"] == pytest.approx(here["removed_fraction"])
    assert not {"acc_mean", "kl_tasks"} & set(before)
    assert record["key"] == first[0].key
    assert record["metrics"].keys() == here.keys()
    for name, value in here.items():
        assert record["metrics"][name] == pytest.approx(value, rel=1e-6, nan_ok=True), name
    assert sorted(os.listdir(tmp_path / "trial")) == sorted(os.listdir(first[1]))
