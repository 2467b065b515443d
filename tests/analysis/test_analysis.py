"""The views of the ledger: columns, ranking, noise, edges, the comparison of methods and models, the final table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tune_prune.analysis.export import write_views
from tune_prune.analysis.input.reading import study_of_search
from tune_prune.analysis.input.rows import frame
from tune_prune.analysis.statistics.differences import difference
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.configurations import by_size
from tune_prune.analysis.verdict import final_table
from tune_prune.core.config import ZERO_SHOT_TASKS, EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.hashing import digest
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import FolderStore

DOCUMENTED_COLUMNS = """
    model method seq_len num_samples output_dir ppl acc_mean acc_boolq acc_piqa acc_hellaswag
    acc_winogrande acc_arc_easy acc_arc_challenge acc_openbookqa params_count pruning_ratio grad_mean_ratio grad_norm_ratio
    grad_std_ratio grad_max_ratio grad_mean_range grad_norm_range extreme_pruning_layers elapsed_time success
"""


def trial(
    name: str,
    acc: float,
    model: str = "tiny",
    status: Any = "complete",
    ppl: float = 10.0,
    stderr: float = 0.01,
    **more: Any,
) -> TrialRecord:
    """A record of the configuration `name`, e.g. taylor-s64-n128; the tasks' mean is `acc`."""
    method, seq_len, samples = name.split("-")
    config = PruningConfig(method, int(seq_len[1:]), int(samples[1:]), **more)
    metrics = {"ppl": ppl, "acc_mean": acc, "acc_mean_stderr": stderr, "params_count": 800.0, "removed_fraction": 0.2}
    for index, task in enumerate(ZERO_SHOT_TASKS):
        metrics |= {f"acc_{task}": acc + (index - 3) / 100, f"acc_{task}_stderr": 0.02}
    return TrialRecord(
        key=digest([asdict(config), model]),
        model=model,
        config=config,
        status=status,
        reason="" if status == "complete" else "out of memory",
        metrics=metrics if status == "complete" else {},
        stages=[StageReport(stage, 0.5, tokens=1) for stage in ("perplexity", "zero_shot", "zero_shot")],
        elapsed_time_s=2.0,
    )


def dense() -> TrialRecord:
    metrics = {"acc_mean": 0.8, "acc_mean_stderr": 0.008, "ppl": 5.0, "params_count": 1000.0}
    return TrialRecord(key="dense", model="tiny", config=None, status="complete", metrics=metrics)


def found(
    folder: Path, records: Sequence[TrialRecord], baselines: Mapping[str, TrialRecord], about: Any = None
) -> Findings:
    """Return the findings of a search at its end."""
    return find(study_of_search(folder, about or {}, baselines, records))


def view(folder: Path, name: str, *records: TrialRecord, **context: Any) -> Any:
    """One of the views of an experiment with these records, read back from its file."""
    write_views(
        FolderStore(folder), records, found(folder, records, context.get("baselines", {}), context.get("about"))
    )
    return json.loads((folder / f"{name}.json").read_text())


def table_of(folder: Path, *records: TrialRecord, top: int = 5, **baselines: TrialRecord) -> str:
    return final_table(found(folder, records, baselines), top)


def test_one_folder_for_all_trials_does_not_make_them_one(tmp_path):
    """Results files of others name the experiment in output_dir."""
    rows = frame([trial("taylor-s16-n8", 0.7), trial("taylor-s32-n8", 0.6)], tmp_path).assign(output_dir="runs")
    gap = difference(rows.iloc[0], rows.iloc[1])
    assert (gap.points, gap.basis) == (pytest.approx(10), "unpaired")
    assert difference(rows.iloc[0], rows.iloc[0]).points == 0


def best_of(folder: Path, *records: TrialRecord) -> dict[str, Any]:
    return view(folder, "global_best_config", *records, baselines={"tiny": dense()})["models"]["tiny"]


def test_columns_begin_with_the_documented_ones(tmp_path: Path) -> None:
    failed = trial("taylor-s16-n8", 0, status="failed")
    rows = frame([trial("taylor-s64-n128", 0.6), failed], tmp_path)
    documented = DOCUMENTED_COLUMNS.split()
    assert list(rows.columns[: len(documented)]) == documented
    first, second = (row for _, row in rows.iterrows())
    assert (first["method"], first["seq_len"], first["num_samples"]) == ("taylor", 64, 128)
    assert (first["zero_shot_duration_s"], first["elapsed_time"]) == (1.0, 2.0)
    assert first["output_dir"] == f"{tmp_path.as_posix()}/trials/{first['key']}"
    assert (bool(first["success"]), bool(second["success"])) == (True, False)
    assert (second["status"], second["reason"]) == ("failed", "out of memory")
    assert second[["ppl", "acc_mean", "params_count"]].isna().all()


def test_no_records_give_empty_views(tmp_path: Path) -> None:
    assert view(tmp_path, "global_best_config", baselines={"tiny": dense()})["models"] == {}
    assert (tmp_path / "all_methods_results.csv").read_text().count("\n") == 1
    assert "tiny: 0 trials" in table_of(tmp_path, tiny=dense())


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([trial("taylor-s16-n8", 0.5), trial("taylor-s32-n8", 0.6)], "taylor-s32-n8"),
        ([trial("taylor-s16-n8", 0.6, ppl=11.0), trial("taylor-s32-n8", 0.6, ppl=10.9)], "taylor-s32-n8"),
        ([trial("taylor-s16-n8", 0.6, ppl=math.nan), trial("taylor-s32-n8", 0.6, ppl=1e9)], "taylor-s32-n8"),
        ([trial("taylor-s16-n64", 0.6), trial("taylor-s32-n16", 0.6), trial("taylor-s128-n8", 0.6)], "taylor-s32-n16"),
        ([trial("taylor-s16-n8", 0.6), trial("blockwise-s16-n8", 0.6)], "blockwise-s16-n8"),
        ([trial("taylor-s16-n8", math.nan), trial("taylor-s32-n8", 0.1)], "taylor-s32-n8"),
        ([trial("taylor-s16-n8", 0.9, status="failed"), trial("taylor-s32-n8", 0.1)], "taylor-s32-n8"),
        ([replace(trial("taylor-s16-n8", 0.9), status="stopped_early"), trial("taylor-s32-n8", 0.5)], "taylor-s32-n8"),
        ([trial("taylor-s16-n8", 0.5, ppl=math.inf)], "taylor-s16-n8"),
    ],
    ids=["accuracy", "then ppl", "unknown ppl last", "then cost", "then name", "nan", "failed", "stopped", "inf ppl"],
)
def test_selection_rule_and_ties(tmp_path: Path, records: list[TrialRecord], expected: str) -> None:
    assert best_of(tmp_path, *records)["name"] == expected
    assert best_of(tmp_path, *reversed(records))["name"] == expected


def test_best_entry_can_be_run_again_and_names_its_evidence(tmp_path: Path) -> None:
    records = [trial("taylor-s64-n128", 0.6), trial("taylor-s16-n8", 0.4), trial("taylor-s16-n16", 0, status="failed")]
    run = ModelRun("/models/tiny", "tiny", None, "wikitext2", None, EvaluationProtocol(("boolq",)), 0, "float32")
    about = {"models": {"tiny": {"run": json.loads(json.dumps(run.to_dict()))}}}
    file = view(tmp_path, "global_best_config", *records, baselines={"tiny": dense()}, about=about)
    entry = file["models"]["tiny"]
    assert (file["schema_version"], file["selection_rule"]) == (3, "accuracy")
    assert PruningConfig.from_dict(entry) == PruningConfig("taylor", 64, 128)
    assert (entry["method"], entry["key"]) == ("taylor", records[0].key)
    assert entry["source"] == about["models"]["tiny"]["run"]
    assert entry["retained_accuracy"] == pytest.approx(0.6 / 0.8)
    assert entry["baseline"] == dense().metrics
    assert list(entry["tasks"]) == sorted(ZERO_SHOT_TASKS)
    assert entry["tasks"]["boolq"] == {"acc": pytest.approx(0.57), "stderr": 0.02}
    assert entry["edges"] == [
        {"hyperparameter": "seq_len", "value": 64, "edge": "upper"},
        {"hyperparameter": "num_samples", "value": 128, "edge": "upper"},
    ]


def test_a_model_whose_trials_all_failed_is_listed(tmp_path: Path) -> None:
    failed = trial("taylor-s16-n8", 0, status="failed")
    assert view(tmp_path, "global_best_config", failed)["models_without_complete_trial"] == ["tiny"]
    assert view(tmp_path, "method_comparison", failed)["models"]["tiny"]["taylor"]["best"] is None
    assert "no complete trial" in table_of(tmp_path, failed)


def test_method_comparison(tmp_path: Path) -> None:
    records = [trial(f"taylor-s{s}-n8", acc) for s, acc in ((16, 0.4), (32, 0.5), (64, 0.9))]
    records += [trial("taylor-s128-n8", 0, status="failed"), trial("blockwise-s16-n8", 0.7)]
    methods = view(tmp_path, "method_comparison", *records)["models"]["tiny"]
    taylor = methods["taylor"]
    assert (taylor["n"], taylor["n_failed_or_stopped"], taylor["min"], taylor["max"]) == (3, 1, 0.4, 0.9)
    assert (taylor["mean"], taylor["std"]) == (pytest.approx(0.6), pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2)))
    assert taylor["best"]["name"] == "taylor-s64-n8"
    assert (methods["blockwise"]["n"], methods["blockwise"]["std"]) == (1, None)


def test_each_ratio_of_a_search_is_compared_in_itself(tmp_path: Path) -> None:
    accuracies = {0.2: {"taylor-s16-n8": 0.7, "taylor-s32-n8": 0.6}, 0.3: {"taylor-s16-n8": 0.4, "taylor-s32-n8": 0.5}}
    records = [
        trial(name, acc, pruning_ratio=ratio) for ratio, accs in accuracies.items() for name, acc in accs.items()
    ]
    for record in records:
        record.metrics["params_count"] = 1000 * (1 - record.config.pruning_ratio)
    best = view(tmp_path, "global_best_config", *records, baselines={"tiny": dense()})["models"]
    chosen = {
        label: (entry["name"], entry["pruning_ratio"], entry["baseline"]["acc_mean"]) for label, entry in best.items()
    }
    assert chosen == {"tiny@0.2": ("taylor-s16-n8", 0.2, 0.8), "tiny@0.3": ("taylor-s32-n8", 0.3, 0.8)}
    methods = view(tmp_path, "method_comparison", *records)["models"]
    assert {label: entry["taylor"]["n"] for label, entry in methods.items()} == {"tiny@0.2": 2, "tiny@0.3": 2}
    assert set(pd.read_csv(tmp_path / "all_methods_results.csv")["model"]) == {"tiny"}
    across = view(tmp_path, "cross_model_comparison", *records)  # what a ratio loses with the other's configuration
    assert across["transfer"]["tiny@0.3"]["tiny@0.2"]["loss_points"] == pytest.approx(10)
    assert (across["best_for_all"]["pruning_ratio"], across["best_for_all"]["num_candidates"]) == (None, 2)
    text = table_of(tmp_path, *records, tiny=dense())
    assert "tiny@0.2: 2 trials (2 complete)" in text and "tiny@0.3: 2 trials (2 complete)" in text
    table = all_tables(found(tmp_path, records, {"tiny": dense()}))["accuracy_by_size"]
    rows = [tuple(row[key] for key in ("model", "ratio", "kept", "acc_mean")) for row in table.rows]
    assert rows == [("tiny", 0, 1, 0.8), ("tiny", 0.2, 0.8, 0.7), ("tiny", 0.3, 0.7, 0.5)]
    one_ratio = found(tmp_path, records[:2], {"tiny": dense()})
    assert by_size(one_ratio) is None and "accuracy_by_size" not in all_tables(one_ratio)


def test_final_table(tmp_path: Path) -> None:
    records = [
        trial("taylor-s64-n128", 0.6123),
        trial("taylor-s16-n128", 0.61),
        trial("blockwise-s256-n512", 0.4, ppl=math.inf),
        trial("random-s16-n8", 0.2, ppl=4e9),
        trial("layerwise-s16-n8", 0, status="failed"),
    ]
    title, header, _, *rows = table_of(tmp_path, *records, top=2, tiny=dense()).splitlines()
    assert title == "tiny: 5 trials (4 complete, 1 failed)"
    assert header.split() == [
        "Method",
        "seq_len",
        "num_samples",
        "Perplexity",
        "Accuracy",
        "Of",
        "original",
        "Parameters",
    ]
    assert [row.split() for row in rows[:5]] == [
        ["original", "–", "–", "5.00", ".8000", "±", ".0080", "100.0%", "1,000"],
        ["taylor", "64", "128", "10.00", ".6123", "±", ".0100*", "76.5%", "800"],
        ["taylor", "16", "128", "10.00", ".6100", "±", ".0100*", "76.2%", "800"],
        ["blockwise", "256", "512", "inf", ".4000", "±", ".0100", "50.0%", "800"],
        ["random", "16", "8", "4e+09", ".2000", "±", ".0100†", "25.0%", "800"],
    ]
    one = table_of(tmp_path, *records, top=1, tiny=dense())
    assert "; the best of each method and the 1 best" in one and ".6100" not in one


def test_final_table_is_aligned_and_narrow(tmp_path: Path) -> None:
    labels = ("m" * 150, *(f"a-label-like-{number}" for number in range(5)))
    names = [f"{method}-s131072-n1000000" for method in ("taylor", "a" * 60)]
    records = [trial(name, 0.5, label) for label in labels for name in names]
    for record in records:
        record.metrics["params_count"] = 8_030_261_248.0
    text = table_of(tmp_path, *records)
    assert max(map(len, text.splitlines())) <= 100
    table = [line for line in text.splitlines() if "8,030,261,248" in line]
    assert len(table) == 2 * len(labels)  # one a method
    assert len(set(map(len, table))) == 1
