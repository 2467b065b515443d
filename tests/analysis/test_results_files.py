"""Results files are read: published ones, our own, and those that lack much; a bad one is named with line and column."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pandas as pd
import pytest

from tests.findings import published_folder
from tests.small_experiments import FOLDER, HEADER, ROW, csv, record, said, write_table
from tune_prune.analysis.input import rows as columns
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.results_csv import read_results_csv
from tune_prune.core.config import TASK_ITEMS, ZERO_SHOT_TASKS, PruningConfig
from tune_prune.core.errors import UserError

SHORT = "method,seq_len,num_samples"


def test_the_published_grid(tmp_path: Path) -> None:
    """Read from its folder, from the folder above and as a file: 45 runs, the published best, binomial standard errors."""
    grids = published_folder()
    file = grids / "consolidated_Llama_20" / "all_methods_results.csv"
    model = read_study([grids], []).models["Llama"]
    for folders, csvs in (([file.parent], []), ([], [("Llama", file)]), ([], [("Llama", file.parent)])):
        other = read_study(folders, csvs)
        pd.testing.assert_frame_equal(other.models["Llama"].rows, model.rows)
    assert (len(model.rows), model.ratio, model.kind, model.source) == (45, 0.2, "published", None)
    assert list(model.rows.columns) == [*columns.COLUMNS, "configuration", "name"]
    assert model.rows["method"].value_counts().to_dict() == {"taylor": 15, "layerwise": 15, "blockwise": 15}
    best = columns.ranked(model.rows).iloc[0]
    assert (best["name"], round(best["acc_mean"], 4), round(best["ppl"], 2)) == ("blockwise-s64-n128", 0.5980, 13.17)
    assert best["acc_boolq"] * 3270 == pytest.approx(2395)  # so its error is that of 2395 in 3270
    assert best["acc_boolq_stderr"] == pytest.approx(math.sqrt(2395 * 875 / 3270**3))
    squares = [best[f"acc_{task}"] * (1 - best[f"acc_{task}"]) / n for task, n in TASK_ITEMS.items()]
    assert best["acc_mean_stderr"] == pytest.approx(math.sqrt(sum(squares)) / 7)
    assert {p.kind for p in model.problems} == {"missing", "not_finite"}
    infinite = [problem for problem in model.problems if problem.kind == "not_finite"]
    assert [problem.where for problem in infinite] == [f"line {line} of {file}" for line in (16, 31, 46)]
    assert all("grad_norm_ratio is inf" in problem.what for problem in infinite)


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
    assert first["configuration"] == PruningConfig("taylor", 16, 128, 0.2)  # .19437 falls short of the others' .2
    assert first[["acc_mean", "removed_fraction"]].to_list() == [0.43, 0.19437]  # the first row of its configuration
    assert rows.loc["taylor-s32-n128", "status"] == "complete"  # its second run; the first one failed
    assert said(model, "duplicate") == [
        f"line 3 of {path} | taylor-s32-n128 again, as in line 6 of {path}, which is used",
        f"line 5 of {path} | taylor-s16-n128 again, as in line 2 of {path}, which is used",
    ]
    assert said(model, "not_finite") == [f"line 7 of {path} | blockwise-s128-n128: acc_mean is nan: it is not compared"]
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "its first line is empty"),
        (f"acc_mean,acc_mean\n{ROW}\n", "line 1 names the column 'acc_mean' twice"),
        (f"{HEADER}{ROW}\n{ROW},5\n", "line 3 has 7 columns and the first line 6"),
        (
            f"{SHORT},acc_mean\ntaylor,16,8,0,5\n",
            "line 2 has 5 columns and the first line 4; correct it (a number has a decimal",
        ),
        ("method;seq_len;num_samples;ppl;acc_mean\ntaylor;16;8;9.5;0,61\n", "column acc_mean: '0,61' is not a number"),
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
        (f"model,{HEADER}a,{ROW}\nb,{ROW}\n", "holds 2 models (a, b)"),
        (f"shape,{HEADER}square,{ROW}\n", "line 2: shape is 'square'"),
        (f"status,{HEADER}failed,{ROW}\n", "line 2, column status: 'failed' does not go with success True"),
        ("\xff\xfe\x00", "is not UTF-8 text (byte 0)"),
    ],
)
def test_a_bad_file_is_named_with_line_and_column(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as caught:
        read_study([], [("M", path)])
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


PLAIN = f"{SHORT},ppl,acc_mean\ntaylor,16,128,9.5,0.61\ntaylor,64,128,9.1,0.62\nblockwise,64,128,9.2,0.60\n"


def with_row_numbers(text: str) -> str:
    """Write the index, too, as `DataFrame.to_csv` does."""
    header, *rows = text.splitlines()
    return "\n".join([f",{header}", *(f"{number},{row}" for number, row in enumerate(rows))])


@pytest.mark.parametrize(
    "text",
    [
        with_row_numbers(PLAIN),
        PLAIN.replace("\n", ",\n"),  # a spreadsheet's empty column
        PLAIN.replace(",", ";"),
        PLAIN.replace(",", "\t"),
        PLAIN.replace(",", ";").replace(".", ","),
        with_row_numbers(PLAIN).replace(",", ";").replace(".", ","),
        re.sub(r"(\d)\.(\d+)", r'"\1,\2"', PLAIN),
        PLAIN.replace("ppl", "perplexity"),
        "\ufeff" + PLAIN.replace("\n", "\r\n"),
    ],
    ids=["row numbers", "empty column", "semicolons", "tabs", "decimal commas", "all", "quotes", "perplexity", "BOM"],
)  # fmt: skip
def test_a_file_as_other_programs_write_it_is_read_as_the_plain_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "plain.csv").write_text(PLAIN)
    (tmp_path / "other.csv").write_text(text, encoding="utf-8", newline="")
    plain, other = (read_results_csv(tmp_path / f"{name}.csv", "M") for name in ("plain", "other"))
    pd.testing.assert_frame_equal(other.rows.drop(columns="where"), plain.rows.drop(columns="where"), check_exact=True)
    assert [problem.what for problem in other.problems] == [problem.what for problem in plain.problems]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [((0.2, 0.21), {0.2: 2, 0.21: 2}), ((0.2, 0.18), {0.2: 2, 0.18: 2}), ((0.2,), {0.2: 2}), ((0.1994,), {0.2: 2})],
)
def test_what_falls_short_of_a_ratio_joins_it_and_no_other(ratios, expected, tmp_path):
    rows = [
        {
            "method": "taylor",
            "seq_len": 64,
            "num_samples": samples,
            "acc_mean": 0.5,
            "pruning_ratio": ratio,
            "success": True,
        }
        for ratio, samples in itertools.product(ratios, (128, 256))
    ]
    path = tmp_path / "ratios.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    study = read_study([], [("M", path)])
    assert {model.ratio: len(model.rows) for model in study.models.values()} == expected


def test_a_mean_that_is_not_that_of_its_tasks_is_said(tmp_path: Path) -> None:
    tasks = ",".join(f"acc_{task}" for task in ZERO_SHOT_TASKS)
    rows = [
        "taylor,16,8,.9,.1,.2,.3,.4,.5,.6,.7",
        "taylor,32,8,.4,.1,.2,.3,.4,.5,.6,.7",
        "taylor,64,8,.4004,.1,.2,.3,.4,.5,.6,.7",
        "taylor,128,8,.4,,.2,.3,.4,.5,.6,.7",  # one of its tasks is lost
    ]
    header = f"{SHORT},acc_mean,{tasks}\n"
    model = read_study([], [("M", csv(tmp_path, *rows, header=header))]).models["M"]
    (note,) = (text for text in said(model, "note") if "the mean of" in text)
    assert note.endswith(
        "acc_mean of 1 of 4 rows is not the mean of their tasks (line 2: 0.9, and 0.4 by its tasks); it is taken as it is"
    )
    for extra, mean in (("acc_own", ".475"), ("acc_own", ".4"), ("more", ".4")):  # over all tasks or the seven
        path = csv(tmp_path, f"taylor,16,8,{mean},.1,.2,.3,.4,.5,.6,.7,1.0", header=f"{header[:-1]},{extra}\n")
        assert not any("the mean of" in text for text in said(read_study([], [("M", path)]).models["M"], "note"))
    path = csv(tmp_path, "taylor,16,8,.9,.1", header=f"{SHORT},acc_mean,acc_boolq\n")  # one of its tasks
    assert not any("the mean of" in text for text in said(read_study([], [("M", path)]).models["M"], "note"))
