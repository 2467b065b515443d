"""What the first house left (commit fc31438) is still read: an experiment and a pruned checkpoint.

Made by these commands, and kept without tune/, tensorboard/ and the card's picture:

    python -m tune_prune.search --model tiny-llama --search-space smoke --limit 5
    python -m tune_prune.prune --config ray_results/tiny-llama-20-smoke-limit5 --output pruned

The truth is what was recorded then. It holds to the last bit where numbers come from the files, and up to rounding where a
model is run again, on whatever machine this is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file

from tune_prune.checkpoint import manifest
from tune_prune.commands import analysis as command
from tune_prune.commands import evaluate, prune, search
from tune_prune.core.files import to_json
from tune_prune.core.hyperparameters import renamed

WHOLE_TEXT = True

HERE = Path(__file__).parent
NAME = "tiny-llama-20-smoke-limit5"
SEARCH = ("--model", "tiny-llama", "--search-space", "smoke", "--limit", "5", "--gpus-per-trial", "0")
# The window of then: today an embedded model's is another.
SEARCH += ("--inline", "--perplexity-window", "2048", "--storage-path")


def read(path: Path) -> Any:
    """A JSON file with the names of hyperparameters as they are now."""
    return json.loads(path.read_text(encoding="utf-8"), object_hook=renamed)


def ledger(experiment: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: read(path) for path in sorted((experiment / "ledger").glob("*.json"))}


RECORDED = ledger(HERE / "storage" / NAME)
SINCE = {
    "search_id",
    "device_name",
    "torch_version",
    "transformers_version",
    "method_code",
    "files",
    "checksum",
    "failure",
}  # fields that a record has had since


def as_then(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in SINCE}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE / "storage", tmp_path / "storage"))


@pytest.mark.slow
def test_it_is_analysed(storage: Path, tmp_path: Path) -> None:
    assert len(RECORDED) == 6
    before = contents(storage)
    assert command.main([str(storage / NAME), "--output", str(tmp_path / "results")]) == 0
    assert contents(storage) == before
    rows = pd.read_csv(tmp_path / "results" / "consolidated_tiny-llama_20" / "all_methods_results.csv").set_index("key")
    assert set(rows.index) == set(RECORDED)
    for key, record in RECORDED.items():
        for name in ("acc_mean", "acc_mean_stderr", "ppl", "acc_boolq", "removed_fraction"):
            assert rows.loc[key, name] == record["metrics"][name], (key, name)


def test_it_is_pruned_from(storage: Path, tmp_path: Path) -> None:
    assert prune.main(["--config", str(storage / NAME), "--output", str(tmp_path / "pruned"), "--device", "cpu"]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (HERE / "pruned", tmp_path / "pruned"))
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    told_before, told_after = (read(folder / "tune_prune.json") for folder in (HERE / "pruned", tmp_path / "pruned"))
    assert told_after["base"].pop("license") == {"license": "apache-2.0"}  # stated since
    assert told_after["base"].pop("gguf") is None  # likewise
    for told in (told_before, told_after):  # since then a task of which no or every item is right has Wilson's error
        for metrics in (told["metrics"], told["baseline"]):
            for name in [name for name in metrics if name.endswith("_stderr")]:
                del metrics[name]
    assert {name for name in told_before if told_before[name] != told_after.get(name)} <= {"created", "versions"}


def test_it_goes_on_and_has_nothing_to_do(storage: Path) -> None:
    before = contents(storage / NAME)
    assert search.main([*SEARCH, str(storage), "--dry-run"]) == 0
    assert contents(storage / NAME) == before
    assert search.main([*SEARCH, str(storage)]) == 0
    after = contents(storage / NAME)
    assert {path for path in before if path.parts[0] == "trials" and before[path] != after[path]} == set()
    assert {key: as_then(record) for key, record in ledger(storage / NAME).items()} == RECORDED
    old, new = (read(folder / NAME / "baseline.json") for folder in (HERE / "storage", storage))
    assert {label: as_then(record) for label, record in new.items()} == old
    for path in (storage / NAME / "passes").iterdir():
        assert as_then(read(path)) == read(HERE / "storage" / NAME / "passes" / path.name)
    for name, changed in {"global_best_config.json": ("baseline", "edges"), "method_comparison.json": ()}.items():
        old, new = (read(folder / NAME / name)["models"]["tiny-llama"] for folder in (HERE / "storage", storage))
        assert without_errors({key: new[key] for key in old if key not in changed}) == without_errors(
            {key: value for key, value in old.items() if key not in changed}
        ), name


def test_it_is_upgraded_by_the_next_search_and_proves_itself_then(storage: Path, capfd: Any) -> None:
    folder, key = storage / NAME, "23a0c4b2250fa417"
    assert search.main([*SEARCH, str(storage)]) == 0
    sealed = contents(folder)
    for path in sealed:
        if path.parts[0] in ("ledger", "passes", "experiment.json", "cost.json"):
            assert len(read(folder / path)["checksum"]) == 64, path
    files = read(folder / "ledger" / f"{key}.json")["files"]
    assert set(files) == {path.name for path in sealed if path.parent.name == key and path.parts[0] == "trials"}
    assert all(hashlib.sha256(sealed[Path("trials", key, name)]).hexdigest() == files[name] for name in files)
    assert search.main([*SEARCH, str(storage)]) == 0
    again = contents(folder)
    assert {path for path in sealed if again[path] != sealed[path]} <= {Path("cost.json"), Path(".lock.json")}
    items = folder / "trials" / key / "items.parquet"
    items.write_bytes(sealed[Path("trials", "63ac8dd214385784", "items.parquet")])
    about = read(folder / "experiment.json")
    del about["checksum"]  # as where an older version has gone on
    (folder / "experiment.json").write_text(json.dumps(about), encoding="utf-8")
    capfd.readouterr()
    assert search.main([*SEARCH, str(storage)]) == 2
    assert (
        f"error: {items} is not the file that its trial wrote; delete {folder}/ledger/{key}.json"
        in capfd.readouterr().err
    )


def test_a_record_of_then_is_held_against_its_items_and_its_key(storage: Path, capfd: Any) -> None:
    path = storage / NAME / "ledger" / "23a0c4b2250fa417.json"
    whole = path.read_text()
    mean = '"acc_mean": 0.8285714285714285'
    assert whole.count(mean) == 1
    for change, says in {
        (
            '"acc_arc_easy": 0.6',
            '"acc_arc_easy": 0.8',
        ): "acc_mean is 0.8285714285714285; it must be the mean of its tasks",
        (
            '"acc_arc_easy": 0.6',
            '"acc_arc_easy": 0.8',
            mean,
            '"acc_mean": 0.8571428571428571',
        ): "its acc_arc_easy is 0.8, theirs 0.6; delete it",
        ('"taylor_num_samples": 8', '"taylor_num_samples": 9'): "is of another search: its key would be ",
        ('"method": "blockwise"', '"method": "block"'): "is of another search: its key would be ",
        (
            '"pruning_ratio": 0.2',
            '"pruning_ratio": 7',
        ): "a record whose configuration is not possible (pruning_ratio is 7",
    }.items():
        assert whole.count(change[0]) == 1
        changed = whole
        for old, new in zip(change[::2], change[1::2], strict=True):
            changed = changed.replace(old, new)
        path.write_text(changed)
        before = contents(storage)
        assert search.main([*SEARCH, str(storage)]) == 2
        error = capfd.readouterr().err
        assert error.startswith(f"error: {path} is ") and says in error and error.count("\n") == 1, error
        assert {one for one, content in contents(storage).items() if before.get(one) != content} <= LOCK


LOCK = {Path(NAME, ".lock"), Path(NAME, ".lock.json")}


def without_errors(value: Any) -> Any:
    """Of 5 items a task some have all right, which has a standard error since, and so has the mean."""
    if not isinstance(value, dict):
        return value
    return {key: without_errors(part) for key, part in value.items() if key not in ("acc_mean_stderr", "stderr")}


@pytest.mark.slow
def test_it_runs_what_is_missing_anew(storage: Path) -> None:
    """What its cache holds does not say which versions of torch and transformers have computed it."""
    key = "23a0c4b2250fa417"  # blockwise-s16-n8: both statistics
    (storage / NAME / "ledger" / f"{key}.json").unlink()
    shutil.rmtree(storage / NAME / "trials" / key)
    assert search.main([*SEARCH, str(storage)]) == 0
    again = ledger(storage / NAME)
    assert {name: as_then(record) for name, record in again.items() if name != key} == {
        name: record for name, record in RECORDED.items() if name != key
    }
    metrics, recorded = again[key]["metrics"], RECORDED[key]["metrics"]  # there are more since
    assert {name: metrics[name] for name in recorded} == pytest.approx(recorded, rel=1e-5)
    tokens = {stage["stage"]: stage["tokens"] for stage in again[key]["stages"]}
    assert tokens["importance"] == tokens["removal"] == 0 < min(tokens["perplexity"], tokens["zero_shot"])
    for name in ("importance", "removal"):  # each measured again, before the trial, at the one length
        before, after = (len(list((at / NAME / "passes").glob(f"{name}-*"))) for at in (HERE / "storage", storage))
        assert after == before + 1, name
    for name in ("pruning_plan.json", "pruning_comparison.json"):
        path = Path(NAME, "trials", key, name)
        assert read(storage / path) == read(HERE / "storage" / path), name


def test_its_manifest_is_written_as_it_was() -> None:
    about = manifest.read(HERE / "pruned")
    assert about is not None
    expected = read(HERE / "pruned" / manifest.MANIFEST)
    expected["base"] |= {"license": {}, "gguf": None}  # fields of newer ones: unknown
    assert json.loads(to_json(about.to_dict())) == expected


def test_its_checkpoint_is_measured_as_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    argv = ["--model", str(HERE / "pruned"), "--limit", "5", "--device", "cpu", "--output", str(record)]
    assert evaluate.main(argv) == 0
    out = capsys.readouterr().out
    assert "recorded 8.89" in out and "is not compared" not in out
    measured, recorded = read(record)["metrics"], RECORDED["637f69f5dd037ef2"]["metrics"]
    assert measured["ppl"] == pytest.approx(recorded["ppl"], rel=1e-5)
    accuracies = [name for name in recorded if name.startswith("acc_")]
    assert len(accuracies) == 16 and all(measured[name] == recorded[name] for name in accuracies)
