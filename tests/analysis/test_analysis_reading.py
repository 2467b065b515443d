"""Experiments in any state are read, and several together: what is wrong is named, and what is comparable is merged."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.small_experiments import FIRST, KEYS, NAMES, ODD, ROW, csv, experiment, only, record, said, write_table
from tune_prune.analysis.input.reading import read_study
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, put_sealed, read_baselines, write_baselines
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import FolderStore


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


# A file, what is put there (None: it is taken away; a text without a checksum), what is said, and the trials that are read.
DAMAGED: list[tuple[str, str | dict[str, Any] | None, str, int]] = [
    ("baseline.json", None, "it is missing", 3),
    (f"trials/{KEYS[NAMES[0]]}", None, "its items.parquet is missing", 3),
    (FIRST, None, "1 of 3 configurations have no record yet: taylor-s16-n8", 2),
    ("cost.json", '{"gpu_hours": 1.0}', "it is without a checksum", 3),
    ("baseline.json", {"tiny": 3}, "it is not the records of original models", 3),
    (FIRST, {**record(NAMES[0]).to_dict(), "metrics": "text"}, "it is not a trial record", 2),
    ("ledger/odd.json", ODD.to_dict(), "it is of another search", 3),
]


@pytest.mark.parametrize(("name", "content", "expected", "rows"), DAMAGED)
def test_what_is_lost_or_damaged_is_named_and_the_rest_is_read(tmp_path, name, content, expected, rows):
    folder = experiment(tmp_path / "e", [record(one) for one in NAMES])
    file = folder / name
    if content is None:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    elif isinstance(content, str):
        file.write_text(content)
    else:
        put_sealed(FolderStore(folder), name, content)
    model = only(folder)
    assert any(expected in one for one in said(model, "missing")), said(model)
    assert len(model.rows) == rows


@pytest.mark.parametrize("content", [None, "{}"])
def test_trials_of_which_nobody_knows_how_they_were_measured_are_refused(tmp_path, content):
    folder = experiment(tmp_path / "e", [record(one) for one in NAMES])
    path = folder / "experiment.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_study([folder], [])
    what = "it is missing" if content is None else "it is without a checksum"
    assert str(caught.value).startswith(f"{path} says how") and what in str(caught.value)
    assert f"--csv NAME={folder}/all_methods_results.csv" in str(caught.value)
    shutil.rmtree(folder / "ledger")
    assert any(one.startswith(f"{path} | it is ") for one in said(only(folder)))


def test_trials_of_another_search_are_named_and_not_compared(tmp_path: Path) -> None:
    folder = experiment(tmp_path / "e", [record(NAMES[0])], seed=1)
    Ledger(FolderStore(folder)).write(record(NAMES[0], acc=0.6))
    model = only(folder)
    assert (list(model.rows["name"]), list(model.rows["acc_mean"])) == ([NAMES[0]], [0.5])
    assert f"{folder / FIRST} | it is of another search: its key would be " in "".join(said(model))
    dense = TrialRecord(KEYS[NAMES[0]], "tiny", None, "complete", metrics={"acc_mean": 0.9})
    write_baselines(FolderStore(folder), {"tiny": dense})
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


def test_each_ratio_is_a_model_of_its_own(tmp_path: Path) -> None:
    others = [record(NAMES[0], pruning_ratio=0.3), record(NAMES[1], pruning_ratio=0.3)]
    models = read_study([experiment(tmp_path / "e", [record(NAMES[0]), *others])], []).models
    assert {label: (m.base, m.ratio, set(m.rows["name"])) for label, m in models.items()} == {
        "tiny@0.2": ("tiny", 0.2, {NAMES[0]}),
        "tiny@0.3": ("tiny", 0.3, {NAMES[0], NAMES[1]}),
    }
    assert sum("no record yet" in text for model in models.values() for text in said(model)) == 1  # said once


def test_what_one_search_varied_is_compared_and_what_differs_between_searches_is_kept_apart(tmp_path: Path) -> None:
    first = experiment(tmp_path / "a", [record(NAMES[0]), record(NAMES[1], shape="free")])
    second = experiment(tmp_path / "b", [record(NAMES[0], shape="uniform")])
    models = read_study([first, second], []).models
    assert {label: (model.shape, set(model.rows["name"])) for label, model in models.items()} == {
        "tiny free": ("free", {NAMES[0], NAMES[1]}),
        "tiny uniform": ("uniform", {f"{NAMES[0]}-uniform"}),
    }
    varied = [record(NAMES[0], shape=s, removal_divisor=d) for s in ("free", "uniform") for d in (5, 10)]
    searched = only(experiment(tmp_path / "e", varied))
    assert (searched.label, searched.shape, len(searched.rows)) == ("tiny", "free", 4)
    alone = only(second)
    assert (alone.label, alone.shape, alone.ratio) == ("tiny", "uniform", 0.2)


def test_an_experiment_that_searched_less_is_compared_with_the_one_that_searched_more(tmp_path: Path) -> None:
    more = experiment(tmp_path / "a", [record(NAMES[0]), record(NAMES[0], shape="uniform")])
    less = experiment(tmp_path / "b", [record(NAMES[0]), record(NAMES[1])])
    for folders in ((more, less), (less, more)):
        model = only(*folders)
        assert model.label == "tiny" and len(model.rows) == 3 and model.origins == folders
        (again,) = said(model, "duplicate")
        assert again.endswith(f"the same trial as trial {KEYS[NAMES[0]]} of {folders[0]}, which is used")
    at_more = experiment(tmp_path / "c", [record(NAMES[0]), record(NAMES[0], pruning_ratio=0.3)])
    models = read_study([more, at_more], []).models
    assert {label: model.series for label, model in models.items()} == {"tiny@0.2": "tiny", "tiny@0.3": "tiny"}


def test_what_several_versions_have_measured_is_said(tmp_path: Path) -> None:
    one, two, three = (record(name) for name in NAMES)
    one.torch_version, two.torch_version = "2.12.0+cpu", "2.13.0+cu130"
    one.transformers_version = three.transformers_version = "5.22.0"
    three.status, three.torch_version = "failed", "1.0"  # it has no numbers
    folder = experiment(tmp_path / "e", [one, two, three])
    said_of = "measured with several versions of {}, which may give other numbers ({})"
    assert said(only(folder), "note") == [" | " + said_of.format("torch", "2.12.0: 1 trial; 2.13.0: 1 trial")]
    dense = read_baselines(FolderStore(folder))["tiny"]
    told = {"torch_version": "2.13.0", "transformers_version": "5.23.0"}
    write_baselines(FolderStore(folder), {"tiny": replace(dense, **told)})
    assert said(only(folder), "note") == [
        " | " + said_of.format("torch", "2.12.0: 1 trial; 2.13.0: the original model, 1 trial"),
        " | " + said_of.format("transformers", "5.22.0: 1 trial; 5.23.0: the original model"),
    ]
    write_table(tmp_path / "table", [one, two])  # a results file tells them, too
    assert said(only(tmp_path / "table"), "note") == [
        " | " + said_of.format("torch", "2.12.0: 1 trial; 2.13.0: 1 trial")
    ]


def test_trials_of_a_method_that_was_changed_between_them_are_named(tmp_path: Path) -> None:
    """A trial that is there twice, of which one counts, is named as well."""
    what = " | the code of method taylor, or of a statistic of it, was changed between its trials: they may not be of one method"
    records = [record(name) for name in NAMES]
    for one, code in zip(records, ("before", "after", "other"), strict=True):
        one.method_code = code
    assert said(only(experiment(tmp_path / "e", records)), "note") == [what]
    one, again = record(NAMES[0]), record(NAMES[0], acc=0.6)
    one.method_code, again.method_code = "before", "after"
    folders = [experiment(tmp_path / name, [each], planned=NAMES[:1]) for name, each in (("a", one), ("b", again))]
    assert said(only(*folders), "note") == [what]
