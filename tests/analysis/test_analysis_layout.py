"""The published layout: which files, what they say, where nothing can be said, and that a second run replaces the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image

from tests.findings import published_findings, simulated_findings
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.study import Model
from tune_prune.analysis.layout import folder_name, write_layout
from tune_prune.analysis.statistics.differences import read_items
from tune_prune.core.config import PruningConfig

ITEMS = 30
PICTURES = ("gradient_analysis.png", "pruning_ratio.png", "retention_ratio.png")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two simulated models: (findings, output folder, files)."""
    folder = tmp_path_factory.mktemp("layout")
    found = simulated_findings(folder, failed=("taylor-s16-n128",), stopped=("taylor-s16-n512",), items=ITEMS)
    return found, folder / "out", write_layout(found, folder / "out")


def test_the_files_are_those_of_a_published_grid(written: Any) -> None:
    _, output, files = written
    consolidated = ["all_methods_results.csv", "global_best_config.json", "method_comparison.json"]
    best = ["README.txt", "best_config.json", "evaluation/evaluation_results.json"]
    best += ["analysis/gradient_diagnosis.json", "analysis/pruning_comparison.json"]
    best += [f"visualization/{picture}" for picture in PICTURES]
    names = {"cross_model_comparison.json"}
    for model in ("alpha", "beta"):
        names |= {f"consolidated_{model}_20/{name}" for name in consolidated}
        names |= {f"best_{model}_20/{name}" for name in best}
    assert {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()} == names
    assert sorted(path.relative_to(output).as_posix() for path in files) == sorted(names)


def test_the_best_and_its_evidence(written: Any) -> None:
    found, output, _ = written
    alpha = found.models["alpha"]
    entry = read(output / "consolidated_alpha_20" / "global_best_config.json")["models"]["alpha"]
    assert PruningConfig.from_dict(entry).name == entry["name"] == alpha.best["name"]
    assert entry["acc_mean"] == alpha.eligible["acc_mean"].max()
    selection = entry["selection"]
    assert (selection["rule"], selection["chosen"]["accuracy"]) == ("accuracy", [entry["name"]])
    inside = {name for name, p in selection["p_value"].items() if p > 0.05}
    assert set(selection["confidence_set"]) == inside == {entry["name"], *entry["within_noise"]}
    assert selection["basis"] == entry["within_noise_basis"] == "paired"
    assert len(selection["p_value"]) == entry["num_complete_trials"] == 16
    assert selection["cross_fit"]["corrected"] == alpha.cross_fit.corrected
    assert "--model /models/alpha " in entry["command"]
    own = read(output / "best_alpha_20" / "best_config.json")
    assert {name for name in own if own[name] != entry.get(name)} == {"schema_version"}


def test_the_trial_of_the_best_is_found_from_either_file(written: Any) -> None:
    found, output, _ = written
    trial = Path(found.models["beta"].best["output_dir"]).resolve()
    consolidated, best = output / "consolidated_beta_20", output / "best_beta_20"
    entry = read(consolidated / "global_best_config.json")["models"]["beta"]
    assert (consolidated / entry["output_dir"]).resolve() == trial
    assert (best / read(best / "best_config.json")["output_dir"]).resolve() == trial
    for name in ("gradient_diagnosis.json", "pruning_comparison.json"):
        assert read(best / "analysis" / name) == read(trial / name)
    for picture in PICTURES:
        with Image.open(best / "visualization" / picture) as image:
            assert min(image.size) > 100


def test_the_evaluation_of_the_best(written: Any) -> None:
    found, output, _ = written
    values = read(output / "best_alpha_20" / "evaluation" / "evaluation_results.json")
    best, dense = found.models["alpha"].best, found.models["alpha"].model.baseline
    assert values["tasks"]["boolq"]["acc"] == best["acc_boolq"]
    assert values["tasks"]["boolq"]["dense"] == dense["acc_boolq"]
    assert values["tasks"]["boolq"]["retained"] == pytest.approx(best["acc_boolq"] / dense["acc_boolq"])
    assert values["tasks"]["boolq"]["items"] == ITEMS
    assert values["acc_mean"] == pytest.approx(sum(task["acc"] for task in values["tasks"].values()) / 7)
    assert values["retained_accuracy"] == pytest.approx(best["acc_mean"] / dense["acc_mean"])


def test_the_table_can_be_analysed_again(written: Any) -> None:
    found, output, _ = written
    again = read_study([output], []).models
    assert list(again) == ["alpha", "beta"]
    rows = found.study.models["alpha"].rows
    columns = [name for name in rows if name != "output_dir"]
    pd.testing.assert_frame_equal(again["alpha"].rows[columns], rows[columns], check_exact=True)
    for label, model in again.items():  # the dense model, and what it takes to run a trial again
        before = found.study.models[label]
        assert (model.baseline, model.source) == (before.baseline, before.source) and model.baseline
    items = read_items(again["alpha"].rows["output_dir"][0])
    assert items is not None and len(items) == 7 * ITEMS  # the trial's folder is found from there


def test_nothing_is_invented_for_a_published_grid(tmp_path: Path) -> None:
    write_layout(published_findings(), tmp_path)
    best = read(tmp_path / "best_Llama_20" / "best_config.json")
    assert (best["name"], best["source"], best["command"], best["baseline"]) == ("blockwise-s64-n128", None, None, None)
    assert len(best["selection"]["confidence_set"]) > 1
    assert best["selection"]["cross_fit"] is None
    assert not list((tmp_path / "best_Llama_20").glob("analysis/*"))
    readme = (tmp_path / "best_Llama_20" / "README.txt").read_text()
    assert "analysis/gradient_diagnosis.json: the trial's folder is not there" in readme
    assert len(pd.read_csv(tmp_path / "consolidated_Llama_20" / "all_methods_results.csv")) == 45


def test_files_of_an_earlier_best_do_not_stay(tmp_path: Path) -> None:
    found = simulated_findings(tmp_path, models=("alpha",), items=ITEMS)
    output = tmp_path / "out"
    write_layout(found, output)
    (output / "best_alpha_20" / "notes.txt").write_text("mine")
    trial = Path(found.models["alpha"].best["output_dir"])
    (trial / "gradient_diagnosis.json").unlink()
    (trial / "pruning_comparison.json").write_text("{")
    write_layout(found, output)
    best = output / "best_alpha_20"
    assert not list(best.glob("analysis/*")) and not list(best.glob("visualization/*"))
    assert "pruning_comparison.json: damaged: " in (best / "README.txt").read_text()
    assert (best / "notes.txt").read_text() == "mine"
    written = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    for path, content in written.items():
        path.write_bytes(content[: len(content) // 2])
    write_layout(found, output)  # what is damaged is written again
    assert {path for path, content in written.items() if path.read_bytes() != content} == {best / "notes.txt"}
    assert not list(output.rglob("*.tmp"))


def test_folder_names() -> None:
    def named(label: str, ratio: float, taken: set[str], shape: str = "free") -> str:
        return folder_name(Model(label, pd.DataFrame({"pruning_ratio": [ratio], "shape": [shape]})), taken)

    taken: set[str] = set()
    assert named("Llama", 0.2, taken) == "Llama_20"
    assert named("Llama@0.3", 0.3, taken) == "Llama_30"
    assert named("meta/../Llama 3", 0.29, taken) == "meta-..-Llama-3_29"
    assert named("llama", 0.2, taken) == "llama-2_20"
    assert named("../..", 0.125, taken) == "model_12.5"
    # an analysis of each shape leaves the others' alone
    assert named("Llama", 0.2, taken, "uniform") == "Llama-uniform_20"
    assert named("Llama aligned-64@0.2", 0.2, taken, "aligned-64") == "Llama-aligned-64_20"
