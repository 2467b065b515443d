"""Files that a search keeps, damaged: what is computed again is, what is refused is named, and no number changes.

What a checksum sees is in tests/core/test_ledger.py and test_artifacts.py; here it is asked who reads a file of a whole search.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.search_folders import TINY
from tune_prune.commands import prune_request, results, search
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, read_baselines
from tune_prune.core.store import FolderStore

ARGV = (*TINY, "--limit", "4", "--tasks", "boolq,piqa", "--gpus-per-trial", "0", "--inline", "--name", "damaged")
KINDS = ("suite", "items_in_calibration", "importance", "removal", "dense_states", "kl", "perplexity", "zero_shot")
VIEWS = ("all_methods_results.csv", "global_best_config.json", "method_comparison.json", "cost.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of a finished search."""
    storage = tmp_path_factory.mktemp("whole")
    assert search.main([*ARGV, "--storage-path", str(storage)]) == 0
    return storage


@pytest.fixture
def storage(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "kept"))


def flip(path: Path) -> None:
    """Change the first digit behind the middle of a file, or a bit of what is no text."""
    content = path.read_bytes()
    digit = re.compile(rb"\d").search(content, len(content) // 2) if path.suffix == ".json" else None
    place = digit.start() if digit else len(content) // 2
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


@pytest.mark.parametrize("name", ["ledger/*.json", "baseline.json", "experiment.json", "passes/*.json"])
def test_a_search_does_not_go_on_with_a_damaged_record(name: str, storage: Path, refused) -> None:
    path = next((storage / "damaged").glob(name))
    flip(path)
    assert f"{path} is " in refused(search.main, *ARGV, "--storage-path", storage, begun=True)


def test_items_that_are_not_those_of_their_trial_are_refused(storage: Path) -> None:
    path = next((storage / "damaged" / "trials").glob("*/items.parquet"))
    flip(path)
    with pytest.raises(UserError, match=re.escape(str(path))):
        results.load(storage / "damaged")


def test_a_plan_that_is_not_that_of_its_trial_is_found_again(storage: Path, caplog) -> None:
    experiment = storage / "damaged"
    best = json.loads((experiment / "global_best_config.json").read_text())["models"]["tiny-llama"]
    assert prune_request.from_config(str(experiment), None).plan is not None
    flip(path := experiment / best["output_dir"] / "pruning_plan.json")
    assert prune_request.from_config(str(experiment), None).plan is None
    assert str(path) in caplog.text and "computed again" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "folder", "removed"])
def test_views_are_written_again(damage: str, storage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The next search reads none of them."""
    contents = {name: (storage / "damaged" / name).read_bytes() for name in VIEWS}
    for name, content in contents.items():
        (path := storage / "damaged" / name).unlink()
        if damage == "folder":
            path.mkdir()
        elif damage == "cut":
            path.write_bytes(content[: len(content) // 2])
    assert search.main([*ARGV, "--storage-path", str(storage)]) == 0
    error = capfd.readouterr().err
    for name, content in contents.items():
        path = storage / "damaged" / name
        if damage == "folder":
            assert f"{path} " in error or f"{name}: not written: " in error
        elif name != "cost.json":  # which has the time that this start has taken
            assert path.read_bytes() == content


def test_artifacts_under_each_others_names_change_no_number(storage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever runs the search reads of it."""
    store = FolderStore(storage / "damaged")
    before = {record.key: record.metrics for record in Ledger(store).records()}
    dense = read_baselines(store)["tiny-llama"].metrics
    shutil.rmtree(store.folder)
    moved = set()
    for kind in KINDS:
        paths = sorted((storage / "artifacts").glob(f"{kind}-*"))
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
            path.write_bytes(content)
        moved |= {path.name for path in paths if len(paths) > 1}
    assert search.main([*ARGV, "--storage-path", str(storage)]) == 0
    output = capfd.readouterr()
    told = r"cached result \S*/(\S+) is damaged \(it is another artifact under this name\); it is comp"
    assert set(re.findall(told, output.out + output.err)) == moved and len(moved) > 10
    assert {record.key: record.metrics for record in Ledger(store).records()} == before
    assert read_baselines(store)["tiny-llama"].metrics == dense
