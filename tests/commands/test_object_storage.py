"""A search on object storage: killed in the middle of a write, gone on with, and the same bits as in a folder; what reads it; and
what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from compare_results import compare
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tune_prune
from tests.s3_server import Server
from tune_prune.commands import analysis, evaluate, prune, search
from tune_prune.core import store as object_storage
from tune_prune.core.ledger import Ledger
from tune_prune.core.store import LEDGER, FolderStore, Store, open_store

WHOLE_TEXT = True

SPACE = "search: grid\nmethod: [taylor, magnitude]\nseq_len: 16\nnum_samples: [8, 16]\n"
LEASE_S = 1.0
pytestmark = pytest.mark.slow  # a search on a server, killed

WITH_SHORT_LEASE = f"""
import sys
from tune_prune.commands import search
from tune_prune.core import store as object_storage
object_storage.LEASE_S = {LEASE_S}
search.main(sys.argv[1:])
"""


def copied(store: Store, folder: Path, name: str = "") -> Path:
    """The contents of a store as files."""
    for one in store.names(name):
        content = store.get(one)
        assert content is not None
        FolderStore(folder).put(one, content)
    for one in store.folders(name):
        copied(store, folder, one)
    return folder


@dataclass(frozen=True)
class Searched:
    argv: list[str]  # without where
    folder: Path  # of the search that was left alone
    storage: str  # where the one that was killed has gone on


@pytest.fixture(scope="module", autouse=True)
def short_lease() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_storage, "LEASE_S", LEASE_S)
        yield


@pytest.fixture(scope="module")
def searched(s3: Server, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    here = tmp_path_factory.mktemp("object_storage")
    (here / "space.yaml").write_text(SPACE)
    argv = [
        "--model",
        "tiny-llama",
        "--search-space",
        str(here / "space.yaml"),
        "--limit",
        "3",
        "--inline",
        "--name",
        "one",
    ]
    assert search.main([*argv, "--storage-path", str(here)]) == 0
    written = sorted((here / "one" / LEDGER).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    first, second = (path.stem for path in written[:2])
    storage = f"{s3.bucket()}/results"
    s3.stall(f"{LEDGER}/{second}")
    killed = [sys.executable, "-c", WITH_SHORT_LEASE, *argv, "--storage-path", storage]
    with subprocess.Popen(killed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        s3.wait_for_stalled()
        process.kill()
        process.wait()
        s3.go()
    kept = [record.key for record in Ledger(open_store(f"{storage}/one")).records()]
    assert kept == [first]
    assert search.main([*argv, "--storage-path", storage]) == 0
    return Searched(argv, here / "one", f"{storage}/one")


def test_the_same_bits_as_in_a_folder(searched: Searched, tmp_path: Path) -> None:
    copy = copied(open_store(searched.storage), tmp_path / "one")
    result = compare(searched.folder, copy)
    assert [sentence for row in result.values() for sentence in row["sentences"]] == []
    assert result["records"]["equal"] == 4 and result["items"]["equal"] == 4 and result["tables"]["equal"] == 1
    first, second = (sorted(place.glob("*/*/*/*tfevents*")) for place in (searched.folder, copy))
    assert len(first) == 3 and [path.parts[-3:-1] for path in first] == [path.parts[-3:-1] for path in second]
    for one, other in zip(first, second, strict=True):
        curves = [EventAccumulator(str(path)).Reload() for path in (one, other)]
        tags = [tag for tag in curves[0].Tags()["scalars"] if not tag.startswith("duration_s/")]
        assert curves[0].Tags() == curves[1].Tags() and len(tags) > 5
        for tag in tags:
            values = [[(event.step, event.value) for event in curve.Scalars(tag)] for curve in curves]
            assert values[0] == values[1]


def test_nothing_is_left_to_do(searched: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    storage = searched.storage.removesuffix("/one")
    assert search.main([*searched.argv, "--storage-path", storage, "--dry-run"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"{searched.storage} (3 of 3 trials are done)" in told


def test_who_reads_a_folder_reads_it(searched: Searched, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, here = (tune_prune.load_results(place) for place in (searched.storage, searched.folder))
    assert there.best.equals(here.best) and str(there) == str(here)
    output = tmp_path / "results"
    assert analysis.main([searched.storage, "--output", str(output)]) == 0
    assert f"from {searched.storage}" in capsys.readouterr().out
    best = json.loads(next(output.glob("best_*/best_config.json")).read_text())
    own = json.loads((searched.folder / "global_best_config.json").read_text())["models"]["tiny-llama"]
    assert {name: best[name] for name in own} == own | {"output_dir": f"{searched.storage}/{own['output_dir']}"}
    assert len(list(output.glob("best_*/visualization/*.png"))) >= 2  # from the trial's files
    argv = ["--config", searched.storage, "--output", str(tmp_path / "pruned")]
    assert prune.main(argv) == 0
    told = capsys.readouterr().out
    assert ", as searched\n" in told
    record = f"{searched.storage}-record.json"
    assert evaluate.main(["--model", str(tmp_path / "pruned"), "--limit", "5", "--output", record]) == 0
    ppl = json.loads(open_store(record.rpartition("/")[0]).get("one-record.json") or b"")["metrics"]["ppl"]
    assert ppl == pytest.approx(there.best["ppl"].iloc[0], rel=1e-6)
