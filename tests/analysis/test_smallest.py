"""Rule "smallest": over all pruning ratios the smallest model within some points of the dense one."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.findings import simulated_study
from tune_prune.analysis.figures.figures import accuracy_size
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render.text import text_table
from tune_prune.analysis.statistics.differences import Difference
from tune_prune.analysis.statistics.findings import find
from tune_prune.analysis.tables.configurations import by_size, is_within, smallest
from tune_prune.commands import analysis
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, put_sealed, read_baselines, write_baselines
from tune_prune.core.store import FolderStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search at two ratios: 0.3 for the trials with 16 tokens, which lose 8 points more. The dense model is the best trial's
    twin, with its items."""
    folder = simulated_study(tmp_path_factory.mktemp("study"), models=("alpha",), items=40)
    ledger = Ledger(FolderStore(folder))
    records = {record.config.name: record for record in ledger.records()}
    for record in records.values():
        if record.config.seq_len == 16:
            metrics = record.metrics | {"params_count": 70_000.0, "removed_fraction": 0.3}
            smaller = replace(record, config=replace(record.config, pruning_ratio=0.3), metrics=metrics)
            put_sealed(FolderStore(folder), f"ledger/{record.key}.json", smaller.to_dict())
    best = max(records.values(), key=lambda record: record.metrics["acc_mean"])
    dense = read_baselines(FolderStore(folder))["alpha"]
    accuracies = {name: v for name, v in best.metrics.items() if name.startswith("acc_")}
    write_baselines(FolderStore(folder), {"alpha": replace(dense, metrics=dense.metrics | accuracies)})
    twin = folder / "trials" / dense.key
    twin.mkdir()
    shutil.copy(folder / "trials" / best.key / "items.parquet", twin)
    return folder


def differences(folder: Path, name: str) -> pd.Series:
    """Item by item, the scores of a trial minus those of the dense model."""
    dense = json.loads((folder / "baseline.json").read_text())["alpha"]["key"]
    records = Ledger(FolderStore(folder)).records()
    key = next(record.key for record in records if record.config.name == name)
    tables = [pd.read_parquet(folder / "trials" / one / "items.parquet") for one in (key, dense)]
    own, other = (table.set_index(["task", "doc_id"])["score"].sort_index().astype("float64") for table in tables)
    return own - other


@pytest.mark.parametrize("model_ratio", [0.2, 0.3])
def test_over_all_ratios_the_smallest_within_the_bound_is_chosen(folder: Path, model_ratio: float) -> None:
    rows = find(read_study([folder], [])).models["alpha@0.3"].eligible
    gap = -(rows["margin_points"].max() - 2)  # of the nearest of 0.3
    assert 4 < gap < 14
    found = find(read_study([folder], []), "smallest", within=gap + (0.1 if model_ratio == 0.3 else -0.1))
    chosen = found.smallest["alpha"]
    assert chosen.model.label == f"alpha@{model_ratio:g}"
    assert chosen.best["acc_mean"] == chosen.eligible["acc_mean"].max()
    table = smallest(found)
    assert table is not None
    assert [(row["model"], row["chosen"]) for row in table.rows] == [
        ("alpha@0.2", model_ratio == 0.2),
        ("alpha@0.3", model_ratio == 0.3),
    ]
    assert [row["within"].kind for row in table.rows] == [
        "within_surely",
        f"within_{'yes' if model_ratio > 0.2 else 'no'}",
    ]
    assert [row["kept"] for row in table.rows] == [pytest.approx(0.8), pytest.approx(0.7)]
    apart = differences(folder, table.rows[1]["config"]).groupby("task")
    assert table.rows[1]["difference"] == pytest.approx(100 * apart.mean().mean())
    stderr = math.sqrt(np.sum(apart.var(ddof=1) / apart.count())) / len(apart)
    assert table.rows[1]["difference_stderr"] == pytest.approx(100 * stderr)
    assert table.rows[0]["difference"] == table.rows[0]["difference_stderr"] == 0  # the dense model's twin


def test_with_confidence_it_holds_above_1_64_standard_errors(folder: Path) -> None:
    study = read_study([folder], [])
    gap = find(study, "smallest").models["alpha@0.3"].against_dense
    assert gap is not None and gap.stderr_points > 0
    for errors, expected in ((1.6, "within_yes"), (1.7, "within_surely")):
        table = smallest(find(study, "smallest", within=-gap.points + errors * gap.stderr_points))
        assert table is not None and table.rows[1]["within"].kind == expected


def test_none_within_is_said_with_the_nearest(folder: Path) -> None:
    study = read_study([folder], [])
    only = type(study)({"alpha": study.models["alpha@0.3"]})
    with pytest.raises(
        UserError, match=r"no configuration of alpha is within 1 points of the original model: the nearest, "
    ) as told:
        find(only, "smallest", within=1)
    (name, ratio, points) = re.findall(
        r"nearest, (\S+) with (\d+)% removed, differs by (-[\d.]+) ± [\d.]+ points", str(told.value)
    )[0]
    assert (ratio, name) == ("30", find(only).models["alpha"].best["name"])
    assert float(points) == pytest.approx(100 * differences(folder, name).groupby("task").mean().mean(), abs=0.006)


def test_without_a_dense_model_nothing_is_within(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("method,seq_len,num_samples,acc_mean,success\ntaylor,16,8,.5,True\n")
    with pytest.raises(
        UserError, match="needs the original model's accuracy, which is not known of M; give --baseline M=ACCURACY"
    ):
        find(read_study([], [("M", path)]), "smallest")
    path.write_text(
        "method,seq_len,num_samples,acc_mean,success,pruning_ratio\ntaylor,16,8,.5,True,.2\ntaylor,16,8,.4,True,.3\n"
    )
    found = find(read_study([], [("M", path)], [("M", 0.51)]), "smallest")
    assert found.smallest["M"].model.label == "M@0.2"
    table, sizes = smallest(found), by_size(found)
    assert table is not None and sizes is not None
    assert [row["within"].kind for row in table.rows] == ["within_yes", "within_no"]  # nobody knows how surely
    assert "-1.00" in text_table(table) and "±" not in text_table(table)
    assert accuracy_size(sizes).axes  # which has no error bars


def test_it_is_on_the_screen_in_the_reports_and_in_the_exported_configuration(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for drawing in ("figures.figures.draw_all", "layout.draw_best"):  # which take seconds
        monkeypatch.setattr(f"tune_prune.analysis.{drawing}", lambda *arguments, **options: [])
    assert analysis.main([str(folder), "--rule", "smallest", "--within", "20", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"alpha@0\.3 +\S+-s16-n\d+ +70\.0% +\.\d+ ± \.\d+ +-\d+\.\d\d ± \d\.\d\d\* +yes \(95%\)\n", out)
    assert (
        "chosen by --rule smallest: fewest parameters of those within 20 points of the original model's accuracy "
        in " ".join(out.split())
    )
    for name in ("report.html", "final_analysis_report.txt", "tables/smallest.md"):
        assert "yes (95%)" in (tmp_path / name).read_text(), name
    entry = json.loads((tmp_path / "best_alpha_30" / "best_config.json").read_text())
    assert PruningConfig.from_dict(entry).pruning_ratio == 0.3
    selection = entry["selection"]
    assert (selection["within_points"], selection["is_within"], selection["smallest_of_all_ratios"]) == (
        20,
        "surely",
        True,
    )
    assert selection["to_dense"]["basis"] == "paired"
    other = json.loads((tmp_path / "best_alpha_20" / "best_config.json").read_text())["selection"]
    assert not other["smallest_of_all_ratios"]


def test_equal_answers_to_a_few_items_are_no_proof(folder: Path) -> None:
    """The best trial is the dense model's twin: 0 points apart, item by item, which 280 items do not prove to within 0.1."""
    for within, said in [(0.0, "yes"), (0.1, "yes"), (5.0, "surely")]:
        findings = find(read_study([folder], []), "smallest", within=within)
        (found,) = (
            one for one in findings.models.values() if one.best["difference_points"] == 0 and one.model.ratio == 0.2
        )
        assert found.against_dense == Difference(0.0, 0.0, "paired") and is_within(found) == said
