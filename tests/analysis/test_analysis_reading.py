"""Whatever an analysis is given is read: published results files, and experiments in any state; what is wrong is named."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.findings import published_folder
from tune_prune.analysis.export import write_views
from tune_prune.analysis.input import reading
from tune_prune.analysis.input import rows as columns
from tune_prune.analysis.input.reading import read_study, study_of_search
from tune_prune.analysis.input.results_csv import read_results_csv
from tune_prune.analysis.input.study import Model
from tune_prune.analysis.statistics.findings import find
from tune_prune.core.config import ZERO_SHOT_TASKS, EvaluationProtocol, ModelRun, PruningConfig, trial_key
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.ledger import Ledger
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import FolderStore

ODD = TrialRecord("odd", "tiny", {"method": "x"}, "failed")
NAMES = ("taylor-s16-n8", "taylor-s32-n8", "blockwise-s16-n8")


def record(name: str, key: str | None = None, status: Any = "complete", acc: float = 0.5, **fields: Any) -> TrialRecord:
    metrics = {"ppl": 9.0, "acc_mean": acc, "acc_mean_stderr": 0.01, "params_count": 80.0, "removed_fraction": 0.2}
    metrics |= {f"acc_{task}": acc for task in ZERO_SHOT_TASKS} | {"extreme_pruning_layers": 0.0}
    metrics |= {name: 2.0 for name in columns.COLUMNS if name.startswith("grad_")}
    method, seq_len, samples = name.split("-")
    config = asdict(PruningConfig(method, int(seq_len[1:]), int(samples[1:]), **fields))
    outcome = {"metrics": metrics} if status == "complete" else {"reason": "no memory"}
    return TrialRecord(key or key_of(config), "tiny", config, status, **outcome)


def run_of(seed: int) -> ModelRun:
    return ModelRun("/models/tiny", "tiny", None, "wikitext2", None, EvaluationProtocol(), seed, "float32")


def key_of(config: dict[str, Any], seed: int = 0) -> str:
    return trial_key(PruningConfig.from_dict(config), "fingerprint", "texts", run_of(seed))


def experiment(folder: Path, records: Sequence[TrialRecord], seed: int = 0, planned: Sequence[str] = NAMES) -> Path:
    """A folder as a search leaves it: experiment.json, baseline.json, the ledger, the trials' items."""
    run = run_of(seed)
    keys = {key_of(record(name).config, seed): name for name in planned}
    model = {"run": run.to_dict(), "meaning": {"model": "fingerprint", "data": "texts"}, "trial_keys": keys}
    folder.mkdir(parents=True)
    dense = TrialRecord(trial_key(None, "fingerprint", "texts", run), "tiny", {}, "complete", metrics={"acc_mean": 0.7})
    texts = {
        "experiment.json": {"search": "grid", "num_trials": len(planned), "models": {"tiny": model}},
        "baseline.json": {"tiny": dense.to_dict()},
        "cost.json": {"gpu_hours": 1.0},
    }
    for name, values in texts.items():
        atomic_write_text(folder / name, to_json(values))
    for one in (replace(one, key=key_of(one.config, seed)) for one in records):
        Ledger(FolderStore(folder)).write(one)
        items = folder / "trials" / one.key / "items.parquet"
        items.parent.mkdir(parents=True)
        items.touch()
    return folder


def write_table(folder: Path, records: Sequence[TrialRecord]) -> None:
    write_views(FolderStore(folder), records, find(study_of_search(folder, {}, {}, records)))


def only(*folders: Path) -> Model:
    (model,) = read_study(folders, []).models.values()
    return model


def said(model: Model, kind: str | None = None) -> list[str]:
    return [f"{p.where} | {p.what}" for p in model.problems if kind in (None, p.kind)]


KEYS = {name: record(name).key for name in NAMES}
FIRST = f"ledger/{KEYS[NAMES[0]]}.json"


def test_the_published_grid(tmp_path: Path) -> None:
    """Read from its folder, from the folder above and as a file: 45 runs, the published best, binomial standard errors."""
    grids = published_folder()
    file = grids / "consolidated_Llama_20" / "all_methods_results.csv"
    model = read_study([grids], []).models["Llama"]
    for folders, csvs in (([file.parent], []), ([], [("Llama", file)]), ([], [("Llama", file.parent)])):
        other = read_study(folders, csvs)
        pd.testing.assert_frame_equal(other.models["Llama"].rows, model.rows)
    assert (len(model.rows), model.ratio, model.kind, model.source) == (45, 0.2, "published", None)
    assert list(model.rows.columns) == [*columns.COLUMNS, "name"]
    assert model.rows["method"].value_counts().to_dict() == {"taylor": 15, "layerwise": 15, "blockwise": 15}
    best = columns.ranked(model.rows).iloc[0]
    assert (best["name"], round(best["acc_mean"], 4), round(best["ppl"], 2)) == ("blockwise-s64-n128", 0.5980, 13.17)
    assert best["acc_boolq"] * 3270 == pytest.approx(2395)  # so its error is that of 2395 in 3270
    assert best["acc_boolq_stderr"] == pytest.approx(math.sqrt(2395 * 875 / 3270**3))
    squares = [best[f"acc_{task}"] * (1 - best[f"acc_{task}"]) / n for task, n in columns.TASK_ITEMS.items()]
    assert best["acc_mean_stderr"] == pytest.approx(math.sqrt(sum(squares)) / 7)
    assert {p.kind for p in model.problems} == {"missing", "not_finite"}
    infinite = [problem for problem in model.problems if problem.kind == "not_finite"]
    assert [problem.where for problem in infinite] == [f"line {line} of {file}" for line in (16, 31, 46)]
    assert all("grad_norm_ratio is inf" in problem.what for problem in infinite)


def test_the_published_method_is_read_from_the_folder_where_its_column_is_missing(tmp_path: Path) -> None:
    path = published_folder() / "consolidated_Llama_20" / "all_methods_results.csv"
    pd.read_csv(path).drop(columns=["pruning_method", "success"]).to_csv(tmp_path / "r.csv", index=False)
    bare, whole = (read_results_csv(file, "Llama") for file in (tmp_path / "r.csv", path))
    pd.testing.assert_frame_equal(bare.rows.drop(columns="where"), whole.rows.drop(columns="where"), check_exact=True)
    # as in search_Llama_20/exp_001_taylor_seq_len16_...
    assert bare.problems[-1].what == "15 rows name no method, only its hyperparameters: taylor is assumed"


def test_our_own_table_reads_back_the_same(tmp_path: Path) -> None:
    records = [
        record("taylor-s64-n128", "00000000123e4560", acc=1 / 3),  # a key of digits that look like a number
        record("blockwise-s16-n8", "00000000123e4561", "stopped_early"),
        record("layerwise-s16-n8", "00000000123e4562", acc=math.nan),
    ]
    records[0].metrics["ppl"] = math.inf
    records[1].reason = 'two\nlines, a comma and "quotes"'
    for one in records:
        (tmp_path / "here" / "trials" / one.key).mkdir(parents=True)
    write_table(tmp_path / "here", records)
    rows = read_results_csv(tmp_path / "here" / "all_methods_results.csv", "tiny").rows
    lines = [where.split(" of ")[0] for where in rows.pop("where")]
    assert lines == ["line 2", "line 3", "line 5"]  # the second one is two lines long
    pd.testing.assert_frame_equal(rows, columns.frame(records, tmp_path / "here"), check_exact=True)
    moved = (tmp_path / "here").rename(tmp_path / "there")
    read = read_results_csv(moved / "all_methods_results.csv", "tiny").rows
    assert list(read["output_dir"]) == [f"{moved.as_posix()}/trials/{one.key}" for one in records]


HEADER = "output_dir,acc_mean,pruning_ratio,extreme_pruning_layers,success,method\n"
FOLDER = "x/exp_001_taylor_seq_len{}_taylor_num_samples128"


def csv(folder: Path, *lines: str, header: str = HEADER) -> Path:
    path = folder / "r.csv"
    path.write_text(header + "".join(f"{line}\n" for line in lines))
    return path


def test_a_file_with_few_columns(tmp_path: Path) -> None:
    path = csv(
        tmp_path,
        f"{FOLDER.format(16)},0.43,0.19437,6.0,True,taylor",
        f"{FOLDER.format(32)},,,,False,taylor",
        f"{FOLDER.format(64)},0.45,0.2,1,True,taylor",
        f"{FOLDER.format(16)},0.99,0.2,1,True,taylor",
        f"{FOLDER.format(32)},0.44,0.2,1,True,taylor",
        f"{FOLDER.format(128)},nan,0.2,1,True,blockwise",
    )
    model = read_study([], [("M", path)]).models["M"]
    rows = model.rows.set_index("name")
    first = rows.loc["taylor-s16-n128"]
    assert columns.config_of(first) == PruningConfig("taylor", 16, 128, 0.2)  # .19437 falls short of the others' .2
    assert first[["acc_mean", "removed_fraction"]].to_list() == [0.43, 0.19437]  # the first row of its configuration
    assert rows.loc["taylor-s32-n128", "status"] == "complete"  # its second run; the first one failed
    assert said(model, "duplicate") == [
        f"line 3 of {path} | taylor-s32-n128 again, as in line 6 of {path}, which is used",
        f"line 5 of {path} | taylor-s16-n128 again, as in line 2 of {path}, which is used",
    ]
    assert said(model, "not_finite") == [f"line 7 of {path} | blockwise-s128-n128: acc_mean is nan: it is not eligible"]
    assert len(columns.ranked(model.rows)) == 3


def test_what_a_file_does_not_say(tmp_path: Path) -> None:
    """No success, no ratio, no mean, no method, but seven tasks; and the dense model as a row of its own."""
    tasks = ",".join(f"acc_{task}" for task in ZERO_SHOT_TASKS)
    header = f"output_dir,{tasks},method\n"
    rows = [
        f"search_M_blockwise_20/{FOLDER.format(16)},.1,.2,.3,.4,.5,.6,.7,",
        f"{FOLDER.format(16)},.1,.2,.3,.4,.5,.6,,",
        ",.7,.7,.7,.7,.7,.7,.7,dense",
    ]
    model = read_study([], [("M", csv(tmp_path, *rows, header=header))]).models["M"]
    assert list(model.rows["method"]) == ["blockwise", "taylor"]
    assert list(model.rows["success"]) == [True, False]
    assert model.rows["acc_mean"][0] == pytest.approx(0.4)
    assert model.ratio == 0.2
    assert any("pruning_ratio" in text for text in said(model, "note"))
    assert model.baseline["acc_mean"] == pytest.approx(0.7)
    assert model.baseline["acc_boolq_stderr"] == pytest.approx(math.sqrt(0.21 / 3270))


ROW = f"{FOLDER.format(16)},0.5,0.2,1,True,taylor"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "its first line is empty"),
        ("a,b\n1,2\n", "no column acc_mean"),
        (f"acc_mean,acc_mean\n{ROW}\n", "line 1 names the column 'acc_mean' twice"),
        (f"{HEADER}{ROW}\n{ROW},5\n", "line 3 has 7 columns and the first line 6"),
        (f"{HEADER}{ROW}\nx,'0.5\n", "line 3 has 2 columns"),
        (f'{HEADER}{ROW}\n"x,0.5\n', "line 3 cannot be read as CSV"),
        (f"{HEADER}{ROW}\n\n{ROW.replace('0.5', 'good')}\n", "line 4, column acc_mean: 'good' is not a number"),
        (HEADER + ROW.replace("0.5", "59.8") + "\n", "line 2, column acc_mean: '59.8' is not from 0 to 1"),
        (
            HEADER + ROW.replace("0.2,1,", "0.2,1.5,") + "\n",
            "column extreme_pruning_layers: '1.5' is not a whole number",
        ),
        (HEADER + ROW.replace("True", "maybe") + "\n", "line 2, column success: 'maybe' is neither True nor False"),
        (HEADER + ROW.replace("0.2,", "20,") + "\n", "line 2: pruning_ratio is 20.0; it must be"),
        (f"{HEADER}{ROW}\nsomewhere,0.5,0.2,1,True,taylor\n", "line 3, column seq_len: it is missing"),
        (f"{HEADER}{ROW}\nsomewhere,0.5,0.2,1,True,\n", "line 3, column method: it is missing"),
        (f"model,{HEADER}a,{ROW}\nb,{ROW}\n", "holds 2 models (a, b)"),
        (f"shape,{HEADER}square,{ROW}\n", "line 2: shape is 'square'"),
        (f"status,{HEADER}failed,{ROW}\n", "line 2, column status: 'failed' does not go with success True"),
        ("\xff\xfe\x00", "cannot be read as a CSV file"),
        (None, "cannot be read as a CSV file"),
    ],
)
def test_a_bad_file_is_named_with_line_and_column(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "r.csv"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as caught:
        read_study([], [("M", path)])
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_experiment(tmp_path: Path) -> None:
    failed = record("taylor-s32-n8", status="failed")
    folder = experiment(tmp_path / "e", [record("taylor-s16-n8"), failed])
    study = read_study([folder, folder / "."], [])
    model = study.models["tiny"]
    assert (study.experiments[folder]["search"], study.costs[folder]) == ("grid", {"gpu_hours": 1.0})
    assert (model.baseline["acc_mean"], model.source and model.source["model"]) == (0.7, "/models/tiny")
    assert sorted(model.rows["name"]) == ["taylor-s16-n8", "taylor-s32-n8"]
    assert said(model) == [
        f"{folder} | 1 of 3 configurations have no record yet: blockwise-s16-n8",
        f"trial {failed.key} of {folder} | taylor-s32-n8: failed: no memory",
    ]


@pytest.mark.parametrize(
    ("name", "text", "expected", "rows"),
    [
        ("baseline.json", None, "{file} | it is missing", 3),
        ("trials", None, "no trial has an items.parquet", 3),
        (f"trials/{KEYS[NAMES[0]]}", None, f"trial {KEYS[NAMES[0]]} of {{folder}} | its items.parquet is missing", 3),
        (FIRST, None, "1 of 3 configurations have no record yet: taylor-s16-n8", 2),
        ("ledger", None, "3 of 3 configurations have no record yet", 0),
        ("baseline.json", "[]", "{file} | it is JSON, but not an object", 3),
        ("baseline.json", '{"tiny": 3}', "{file} | it is not a trial record", 3),
        ("cost.json", "", "{file} | it is not valid JSON", 3),
        ("cost.json", "[1]", "{file} | it is JSON, but not an object", 3),
        ("cost.json", '{"gpu_hours": "many"}', "{file} | it is not an account of costs (gpu_hours is 'many'", 3),
        ("cost.json", '{"gradient_passes": "5"}', "{file} | it is not an account of costs (gradient_passes is '5'", 3),
        (
            "cost.json",
            '{"seconds_per_stage": null}',
            "{file} | it is not an account of costs (seconds_per_stage is None",
            3,
        ),
        ("cost.json", '{"gpu_hours": NaN}', "{file} | it is not valid JSON (NaN", 3),
        (FIRST, '{"key": "key-tay', "{file} | it is not valid JSON", 2),
        (FIRST, to_json(record(NAMES[1]).to_dict()), "{file} | it is the record of another", 2),
        (FIRST, to_json({**record(NAMES[0]).to_dict(), "metrics": "text"}), "{file} | it is not a trial record", 2),
        ("ledger/odd.json", to_json(ODD.to_dict()), "{file} | it is a record whose configuration is not possible", 3),
    ],
)
def test_what_is_lost_or_damaged_is_named_and_the_rest_is_read(
    tmp_path: Path, name: str, text: str | None, expected: str, rows: int
) -> None:
    folder = experiment(tmp_path / "e", [record(one) for one in NAMES])
    file = folder / name
    if text is not None:
        file.write_text(text)
    else:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    model = only(folder)
    expected = expected.replace("{file}", str(file)).replace("{folder}", str(folder))
    assert any(expected in one for one in said(model, "missing")), said(model)
    assert len(model.rows) == rows


NULLS = [{name: None} for name in ("models", "search", "space", "versions", "command", "settings")]
NULLS += [{"models": {"tiny": None}}, *({"models": {"tiny": {name: None}}} for name in ("run", "meaning", "geometry"))]


@pytest.mark.parametrize("values", [None, *NULLS], ids=str)
def test_trials_of_which_nobody_knows_how_they_were_measured_are_refused(
    tmp_path: Path, values: dict[str, Any] | None
) -> None:
    folder = experiment(tmp_path / "e", [record(one) for one in NAMES])
    path = folder / "experiment.json"
    if values is None:
        path.unlink()
    else:
        path.write_text(to_json(values))
    with pytest.raises(UserError) as caught:
        read_study([folder], [])
    what = "it is missing" if values is None else "it is not the description of an experiment"
    assert str(caught.value).startswith(f"{path} says how") and what in str(caught.value)
    assert f"--csv NAME={folder}/all_methods_results.csv" in str(caught.value)
    shutil.rmtree(folder / "ledger")
    assert any(one.startswith(f"{path} | it is ") for one in said(only(folder)))


def test_trials_of_another_search_are_named_and_not_compared(tmp_path: Path) -> None:
    """As an older version left them, which went on with another seed where experiment.json had been deleted."""
    folder = experiment(tmp_path / "e", [record(NAMES[0])], seed=1)
    Ledger(FolderStore(folder)).write(record(NAMES[0], acc=0.6))
    model = only(folder)
    assert (list(model.rows["name"]), list(model.rows["acc_mean"])) == ([NAMES[0]], [0.5])
    assert f"{folder / FIRST} | it is of another search: its key would be " in "".join(said(model))
    dense = TrialRecord(KEYS[NAMES[0]], "tiny", {}, "complete", metrics={"acc_mean": 0.9})
    (folder / "baseline.json").write_text(to_json({"tiny": dense.to_dict()}))
    model = only(folder)
    assert model.baseline == {} and f"{folder / 'baseline.json'} | it is of another search" in "".join(said(model))


def test_an_experiment_that_kept_only_its_table(tmp_path: Path) -> None:
    folder = experiment(tmp_path / "e", [record(name) for name in NAMES])
    for items in folder.glob("trials/*/items.parquet"):
        items.unlink()
    write_table(folder, Ledger(FolderStore(folder)).records())
    whole = only(folder)
    shutil.rmtree(folder / "ledger")
    model = only(folder)
    assert any("the trials are those of all_methods_results.csv" in text for text in said(model))
    assert sorted(model.rows["name"]) == sorted(whole.rows["name"])


def test_folders_of_one_model_are_merged(tmp_path: Path) -> None:
    first = experiment(tmp_path / "a", [record(NAMES[0]), record(NAMES[1], status="failed")])
    second = experiment(tmp_path / "b", [record(NAMES[0]), record(NAMES[1]), record(NAMES[2])])
    for model in (only(first, second), only(tmp_path)):
        assert len(model.rows) == 3
        assert model.rows["success"].all()
        assert model.origins == (first, second)
        assert said(model, "duplicate") == [
            f"trial {KEYS[NAMES[1]]} of {first} | the same trial as trial {KEYS[NAMES[1]]} of {second}, which is used",
            f"trial {KEYS[NAMES[0]]} of {second} | the same trial as trial {KEYS[NAMES[0]]} of {first}, which is used",
        ]


def test_what_was_measured_otherwise_is_kept_apart(tmp_path: Path) -> None:
    first = experiment(tmp_path / "a", [record(NAMES[0])])
    other_seed = experiment(tmp_path / "b", [record(NAMES[0])], seed=1)
    path = csv(tmp_path, ROW)
    models = read_study([first, other_seed], [("tiny", path)]).models
    assert list(models) == ["tiny (a)", "tiny (b)", "tiny (csv)"]
    assert {len(model.rows) for model in models.values()} == {1}
    assert all("it is a model of its own" in model.problems[0].what for model in models.values())
    assert list(models["tiny (b)"].rows["model"]) == ["tiny (b)"]


def test_a_lost_baseline_does_not_separate_what_was_measured_alike(tmp_path: Path) -> None:
    first = experiment(tmp_path / "a", [record(NAMES[0])])
    second = experiment(tmp_path / "b", [record(NAMES[1])])
    (second / "baseline.json").unlink()  # what was measured is then known from experiment.json
    assert len(only(first, second).rows) == 2


def test_each_ratio_is_a_model_of_its_own(tmp_path: Path) -> None:
    others = [record(NAMES[0], pruning_ratio=0.3), record(NAMES[1], pruning_ratio=0.3)]
    models = read_study([experiment(tmp_path / "e", [record(NAMES[0]), *others])], []).models
    assert {label: (m.base, m.ratio, set(m.rows["name"])) for label, m in models.items()} == {
        "tiny@0.2": ("tiny", 0.2, {NAMES[0]}),
        "tiny@0.3": ("tiny", 0.3, {NAMES[0], NAMES[1]}),
    }
    assert sum("no record yet" in text for model in models.values() for text in said(model)) == 1  # said once


def test_what_one_search_varied_is_compared_and_what_differs_between_searches_is_kept_apart(tmp_path: Path) -> None:
    """Shapes and removal divisors; and free shapes are those from before there were others."""
    old = record(NAMES[0])
    del old.config["shape"]
    first = experiment(tmp_path / "a", [old, record(NAMES[1], shape="free")])
    second = experiment(tmp_path / "b", [record(NAMES[0], shape="uniform")])
    third = experiment(tmp_path / "d", [record(NAMES[0], removal_divisor=10, shape="uniform")])
    models = read_study([first, second, third], []).models
    assert {label: (model.shape, set(model.rows["name"])) for label, model in models.items()} == {
        "tiny free/5": ("free", {NAMES[0], NAMES[1]}),
        "tiny uniform/5": ("uniform", {f"{NAMES[0]}-uniform"}),
        "tiny uniform/10": ("uniform", {f"{NAMES[0]}-d10-uniform"}),
    }
    varied = [record(NAMES[0], shape=s, removal_divisor=d) for s in ("free", "uniform") for d in (5, 10)]
    searched = only(experiment(tmp_path / "e", varied))
    assert (searched.label, searched.shape, len(searched.rows)) == ("tiny", "free", 4)
    alone = only(second)
    assert (alone.label, alone.shape, alone.ratio) == ("tiny", "uniform", 0.2)


def test_a_removal_divisor_that_few_rows_give_is_the_usual_one_in_the_others(tmp_path: Path) -> None:
    header = "method,seq_len,num_samples,removal_divisor,acc_mean\n"
    rows = ("layerwise,16,8,2,.5", "layerwise,16,8,,.6", "layerwise,32,8,2,.4", "layerwise,32,8,5,.3")
    study = read_study([], [("a", csv(tmp_path, *rows, header=header))])
    assert study.models["a"].rows["removal_divisor"].tolist() == [2, 5, 2, 5]
    assert list(find(study).models["a"].levels["removal_divisor"].index) == [2, 5]


def test_shapes_of_a_results_file(tmp_path: Path) -> None:
    """Its column says them; where it is missing or empty they are free."""
    shapes = ("", "free", "uniform")
    lines = [f"{shape},{FOLDER.format(16 * 2**i)},0.4,0.2,1,True,taylor" for i, shape in enumerate(shapes)]
    path = csv(tmp_path, *lines, header=f"shape,{HEADER}")
    assert list(read_results_csv(path, "M").rows["shape"]) == ["free", "free", "uniform"]
    without = csv(tmp_path, lines[0].removeprefix(","))
    assert list(read_results_csv(without, "M").rows["shape"]) == ["free"]


def test_what_is_no_experiment(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.csv").touch()
    (tmp_path / "bare" / "ledger").mkdir(parents=True)
    refusals = {"empty": "is not an experiment", "file.csv": "--csv Model=", "no": "not a folder", "bare": "no trial"}
    for name, expected in refusals.items():
        with pytest.raises(UserError, match=expected):
            read_study([tmp_path / name], [])


def test_models_come_in_the_order_they_were_named(tmp_path: Path) -> None:
    path = csv(tmp_path, ROW)
    copy = tmp_path / "copy.csv"
    copy.write_text(path.read_text())
    folder = experiment(tmp_path / "e", [record(NAMES[0])])
    assert list(read_study([folder], [("b", path), ("a", copy), ("b", path)]).models) == ["tiny", "b", "a"]
    models = read_study([], [("b", path), ("a", path)]).models  # the same rows under two names are two models
    assert {label: len(model.rows) for label, model in models.items()} == {"b": 1, "a": 1}


def test_methods_that_take_no_gradients_miss_none() -> None:
    whole = dict.fromkeys(reading._CHECKED, 1.0) | {"success": True, "status": "complete", "reason": ""}
    without = whole | {name: math.nan for name in whole if name.startswith("grad_")}
    rows = [
        values | {"method": method, "name": f"{method}-{index}", "where": ""}
        for index, (method, values) in enumerate([("taylor", whole), ("taylor", without), ("random", without)])
    ]
    (problem,) = reading._of_rows(pd.DataFrame(rows))
    assert problem.kind == "not_finite" and problem.what.startswith("taylor-1: grad_")
