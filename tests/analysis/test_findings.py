"""From a study to its findings: the published grid, and simulated experiments whose truth is known; several models together."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.findings import from_csv, published_findings, simulated_study, true_accuracy
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.study import Message, Study
from tune_prune.analysis.statistics.differences import difference, transfer
from tune_prune.analysis.statistics.findings import Findings, ModelFindings, find
from tune_prune.analysis.statistics.rules import RULES
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return read_study([simulated_study(tmp_path_factory.mktemp("full"))], [])


@pytest.fixture(scope="module")
def findings(study: Study) -> Findings:
    return find(study)


def kinds(model: ModelFindings) -> set[str]:
    return {message.kind for message in model.warnings}


def test_published_best_comes_with_those_within_noise() -> None:
    model = published_findings().models["Llama"]
    assert model.best["name"] == "blockwise-s64-n128"
    assert (round(model.best["acc_mean"], 4), round(model.best["ppl"], 2)) == (0.5980, 13.17)
    assert (model.basis, model.cross_fit) == ("unpaired", None)
    alike = model.eligible.loc[model.eligible["in_confidence_set"], "name"].tolist()
    assert 5 < len(alike) < 20
    near = ((64, 256), (64, 512), (256, 128), (256, 256), (256, 512))  # less than a third of a standard error behind
    assert {f"blockwise-s{seq_len}-n{samples}" for seq_len, samples in near} < set(alike)
    noise = next(message for message in model.warnings if message.kind == "within_noise")
    assert [noise.values["best"], *noise.values["others"]] == alike
    assert noise.values["points"] == pytest.approx(100 * (0.5980432152155284 - model.eligible["acc_mean"].iloc[1]))
    assert kinds(model) == {"dense_unknown", "edges", "within_noise", "ppl_disagrees", "no_items", "seeds_one"}
    assert model.statistics["task_evaluations"] == 45 * 7
    assert [round(model.statistics[name], 4) for name in ("max", "min", "mean")] == [0.5980, 0.4342, 0.5519]
    assert model.tasks["items"].drop("mean").sum() == model.tasks.loc["mean", "items"] == 20465
    assert model.tasks["retained"].isna().all()


@pytest.mark.parametrize(
    "rule", sorted(set(RULES) - {"gold_logprob", "kl", "smallest", "retained-per-second"})
)  # test_measures.py, test_rules.py
def test_best_follows_the_rule(study: Study, rule: str) -> None:
    for model in find(study, rule).models.values():
        assert model.best["name"] == model.chosen[rule][0]
        assert model.cross_fit is not None
        assert model.cross_fit.naive == pytest.approx(model.best["acc_mean"], abs=1e-9)
        assert sum(model.cross_fit.chosen.values()) == pytest.approx(1)
        if rule == "perplexity":  # other text than the items: nothing to correct
            assert model.best["ppl"] == model.eligible["ppl"].min()
            assert model.cross_fit.chosen == {model.best["name"]: 1.0}
            assert model.cross_fit.corrected == pytest.approx(model.best["acc_mean"], abs=1e-9)
        if rule == "one-standard-error":
            within = -model.eligible["difference_points"] <= model.eligible["difference_stderr_points"]
            assert model.best["tokens"] == model.eligible.loc[within, "tokens"].min()


def test_differences_are_those_of_each_pair(findings: Findings) -> None:
    rows = findings.models["alpha"].eligible
    assert rows["acc_mean"].is_monotonic_decreasing
    assert rows[["difference_points", "difference_stderr_points", "p_value"]].iloc[0].tolist() == [0, 0, 1]
    for _, row in rows.iloc[1:6].iterrows():
        expected = difference(row, rows.iloc[0])
        assert expected.basis == findings.models["alpha"].basis == "paired"
        assert row["difference_points"] == pytest.approx(expected.points, abs=1e-9)
        assert row["difference_stderr_points"] == pytest.approx(expected.stderr_points, rel=1e-9)
    assert rows["in_confidence_set"].equals(rows["p_value"] > 0.05)
    weak = rows["seq_len"] == 16  # 8 points behind in truth
    assert not rows.loc[weak & (rows["method"] == "taylor"), "in_confidence_set"].any()
    truths = [true_accuracy(config, "alpha") for config in rows["configuration"]]
    assert rows["in_confidence_set"].iloc[int(np.argmax(truths))]


def test_cost_of_a_pass_is_the_part_of_its_samples(findings: Findings) -> None:
    rows = findings.models["beta"].eligible.set_index("name")
    assert rows.loc["taylor-s64-n512", "gradient_pass_s"] == pytest.approx(8.0)  # as in the cost.json written
    assert rows.loc["blockwise-s64-n128", "gradient_pass_s"] == pytest.approx(2.0)
    assert rows.loc["blockwise-s64-n128", "tokens"] == 64 * 128


def test_transfer_is_the_paired_difference_to_the_own_best(findings: Findings) -> None:
    assert findings.transfer is not None
    for label, model in findings.models.items():
        losses = findings.transfer.losses[label]
        assert (losses[label]["loss_points"], losses[label]["loss_points_stderr"]) == (0, 0)
        for other, theirs in findings.models.items():
            expected = difference(model.best, model.named(theirs.best["name"]))
            assert losses[other]["loss_points"] == pytest.approx(expected.points)
            assert losses[other]["loss_points_stderr"] == pytest.approx(expected.stderr_points)
    means = [model.eligible.set_index("name")["acc_mean"] for model in findings.models.values()]
    assert findings.transfer is not None and findings.transfer.best_for_all["config"] == (means[0] + means[1]).idxmax()


def test_without_items_errors_are_those_of_each_trial(tmp_path: Path, findings: Findings) -> None:
    model = find(read_study([simulated_study(tmp_path, with_items=False)], [])).models["alpha"]
    paired = findings.models["alpha"]
    assert (model.basis, model.cross_fit) == ("unpaired", None)
    assert "no_items" in kinds(model) - kinds(paired)
    assert model.eligible["name"].tolist() == paired.eligible["name"].tolist()
    alone, together = (rows["difference_stderr_points"].iloc[1:] for rows in (model.eligible, paired.eligible))
    assert (alone > 1.2 * together).all()
    assert alone.iloc[0] == pytest.approx(100 * math.hypot(*model.eligible["acc_mean_stderr"].iloc[:2]))
    assert model.tasks["items"].isna().all()


def test_warnings_follow_from_the_numbers(study: Study) -> None:
    alpha = study.models["alpha"]
    rows = alpha.rows.assign(acc_mean_stderr=1e-4, output_dir="")
    level = rows["seq_len"].map({16: 0.4, 64: 0.6, 256: 0.5}) + rows["num_samples"] / 1e5
    # taylor is best on average, blockwise has the single best; perplexity goes with accuracy
    method = rows["method"].map({"taylor": 0.05, "layerwise": 0.0, "blockwise": 0.01})
    single = 0.042 * (rows["name"] == "blockwise-s64-n512")
    rows = rows.assign(acc_mean=level + method + single, ppl=20 - 10 * (level + method + single))
    at_chance = {"acc_mean": 0.36, "acc_mean_stderr": 0.01, "chance_acc_mean": 0.35}
    changed = replace(alpha, rows=rows, baseline=at_chance)
    model = find(Study({"alpha": changed})).models["alpha"]
    said = {message.kind: message.values for message in model.warnings}
    assert said.keys() == {"dense_at_chance", "edges", "rank_disagrees", "no_items", "seeds_one"}
    assert said["edges"] == {
        "edges": [Message("edge_upper", {"factor": "num_samples", "value": 512})],
        "space": ["num_samples: [512, 1024]"],
    }
    assert said["rank_disagrees"] == {"by_mean": "taylor", "by_max": "blockwise"}
    blind = replace(changed, rows=rows.assign(acc_mean_stderr=math.nan, ppl=math.nan))
    model = find(Study({"alpha": blind})).models["alpha"]
    assert model.basis == "unknown" and model.eligible["in_confidence_set"].all()
    unknown = next(message for message in model.warnings if message.kind == "stderr_unknown")
    assert unknown.values["names"] == model.eligible["name"].tolist()
    tables = all_tables(find(Study({"alpha": blind})))
    compared = {"seq_len", "num_samples"}  # whose levels differ by more than other settings move them
    marked = {
        (table.key, column.key)
        for table in tables.values()
        for column in table.columns
        if table.key not in compared and any(map(column.is_best, table.rows))
    }
    assert not marked  # nothing was compared with the best
    with pytest.raises(UserError, match="needs a finite ppl, which no complete trial of alpha has"):
        find(Study({"alpha": blind}), "perplexity")


@pytest.mark.parametrize(
    ("unknown", "tied", "ruled_out", "share"),
    [
        ("blockwise-s32-n128", ["taylor-s32-n128", "layerwise-s32-n128"], {"taylor-s16-n4"}, "1 of 2"),
        ("taylor-s32-n128", ["taylor-s32-n128"], {"blockwise-s32-n128", "taylor-s16-n4"}, None),
    ],
    ids=["in the middle", "at the top"],
)
def test_what_was_not_compared_is_neither_tied_nor_ruled_out(tmp_path, unknown, tied, ruled_out, share):
    """Four configurations, one of which has lost the accuracy of a task and so its standard error."""
    level = {("taylor", 32, 128): 0.63, ("layerwise", 32, 128): 0.628, ("blockwise", 32, 128): 0.36}
    level[("taylor", 16, 4)] = 0.3
    from_csv(tmp_path, {"M": lambda *key: level.get(key, math.nan)})
    rows = pd.read_csv(tmp_path / "0.csv")
    name = rows["method"] + "-s" + rows["seq_len"].astype(str) + "-n" + rows["num_samples"].astype(str)
    rows.loc[name == unknown, "acc_boolq"] = math.nan
    rows.to_csv(tmp_path / "0.csv", index=False)
    findings = find(read_study([], [("M", tmp_path / "0.csv")]))
    model = findings.models["M"]
    assert model.eligible["name"].iloc[0] == "taylor-s32-n128" and len(model.eligible) == 4
    assert (model.tied, model.ruled_out) == (tied, ruled_out)
    assert model.eligible.set_index("name")["in_confidence_set"][unknown]
    assert {row["share_of_runs"] for row in all_tables(findings)["optimal_configurations"].rows} == {share}
    noise = [message.values["others"] for message in model.warnings if message.kind == "within_noise"]
    assert noise == ([tied[1:]] if tied[1:] else [])


def test_seed_decides_and_other_models_do_not(study: Study, findings: Findings) -> None:
    alone = find(Study({"alpha": study.models["alpha"]}, costs=study.costs))
    assert alone.transfer is None
    first, again = findings.models["alpha"], alone.models["alpha"]
    pd.testing.assert_frame_equal(first.eligible, again.eligible)
    assert first.cross_fit == again.cross_fit
    other = find(study, seed=1).models["alpha"]
    assert not other.eligible["p_value"].equals(first.eligible["p_value"])
    np.testing.assert_allclose(other.eligible["p_value"], first.eligible["p_value"], atol=0.04)


TRAINED = PruningConfig("taylor", 32, 8, recovery="lora", recovery_steps=2)


LONGER = replace(TRAINED, recovery_steps=10)


def rows_of(accuracies: dict[PruningConfig, float]) -> pd.DataFrame:
    common = {"acc_mean_stderr": 0.01, "ppl": 2.0, "output_dir": ""}
    found = [
        {**asdict(one), **common, "name": one.name, "configuration": one, "acc_mean": acc}
        for one, acc in accuracies.items()
    ]
    return pd.DataFrame(found).sort_values("acc_mean", ascending=False, ignore_index=True)


def test_models_that_are_all_trained_are_compared_by_their_trainings() -> None:
    """Not by what each gained most from: another number of steps is another configuration."""
    eligible = {"a": rows_of({TRAINED: 0.90, LONGER: 0.85}), "b": rows_of({TRAINED: 0.8375, LONGER: 0.875})}
    best = {label: found.iloc[0] for label, found in eligible.items()}
    found = transfer(eligible, best, lambda _: None)
    assert found.losses["a"]["b"]["loss_points"] == pytest.approx(5)
    assert found.losses["b"]["a"]["loss_points"] == pytest.approx(3.75)
    assert found.best_for_all["config"] == TRAINED.name and found.best_for_all["num_candidates"] == 2
    assert found.best_for_all["acc_mean"] == pytest.approx((0.90 + 0.8375) / 2)


def test_a_trained_model_is_compared_with_others_by_what_was_trained() -> None:
    untrained = TRAINED.untrained()
    eligible = {"a": rows_of({untrained: 0.8}), "a+lora": rows_of({TRAINED: 0.9, LONGER: 0.85})}
    found = transfer(eligible, {label: rows.iloc[0] for label, rows in eligible.items()}, lambda _: None)
    assert found.losses["a"]["a+lora"]["name"] == untrained.name
    assert found.losses["a+lora"]["a"]["name"] == TRAINED.name
    assert found.best_for_all["config"] is None


def test_ratios_are_not_pooled(tmp_path: Path) -> None:
    study = read_study([simulated_study(tmp_path, items=10)], [])
    label, other = study.models
    study.models[other] = replace(study.models[other], rows=study.models[other].rows.assign(pruning_ratio=0.3))
    rows = {row["statistic"]: row for row in all_tables(find(study))["experiment_statistics"].rows}
    assert math.isnan(rows["max"]["of_All models"]) and rows["max"][f"of_{label}"] > 0.5
