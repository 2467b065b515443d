"""Every kind of file that a search keeps, damaged in every way: what is computed again is, and what is refused is named.

The files are those of one small search. A cell of the matrix asks what reads such a file: the plan of the next search, the
analysis, `prune`, a worker.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kept_files import ARGV, KEYS, KINDS, NAME, OF_OTHERS, READ, Finished
from tune_prune.commands import flags, search
from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, read_about, read_baselines, write_about, write_baselines
from tune_prune.core.store import FolderStore
from tune_prune.pruning.compensation.recovery import Recovery
from tune_prune.tuning.preflight import make_plan


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    storage = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(storage)
        argv = [*ARGV, "--storage-path", str(storage)]
        assert search.main(argv) == 0
        store = FolderStore(storage / NAME)
        for record in Ledger(store).records()[:2]:  # as of workers that were killed
            Ledger(store).note(replace(record, search_id=f"killed-{record.key}", status="running"), 1.5)
        artifacts = ArtifactStore(storage / "artifacts")
        blocks = [
            f"{name}{block}_{layer}" for name in ("", "sum_") for block in ("attention", "mlp") for layer in range(2)
        ]
        norms = dict.fromkeys(blocks, np.ones(3)) | {"tokens": np.array([8]), "samples": np.array([8])}
        trained = Recovery({"a.weight": (torch.ones(2, 1), torch.ones(1, 2))}, 0.5, 0.25).arrays()
        for kind, arrays in zip(OF_OTHERS, (norms, trained, trained | {"done": np.array(4)}), strict=True):
            artifacts.put(kind, {"of": kind}, arrays)
        yield Finished(storage, make_plan(flags.settings_from(vars(search.parser().parse_args(argv)))))


@pytest.fixture
def finished(whole: Finished, tmp_path: Path) -> Finished:
    """A copy of it."""
    shutil.copytree(whole.storage, tmp_path / "kept")
    return replace(whole, storage=tmp_path / "kept")


@pytest.fixture(autouse=True, scope="module")
def _keys(whole: Finished) -> None:
    for kind in (*KINDS, *OF_OTHERS):
        with np.load(whole.file(kind)) as stored:
            KEYS[kind] = json.loads(str(stored["key"]))


def another(kept: Finished, kind: str) -> bytes:
    """What is whole in another place."""
    store, other = FolderStore(kept.folder), FolderStore(kept.storage / "other")
    if kind == "baseline.json":
        (record,) = read_baselines(store).values()
        write_baselines(other, {"tiny-llama": replace(record, key="0123456789abcdef")})
    elif kind == "experiment.json":
        about = read_about(store) or {}
        for described in (about["models"]["tiny-llama"][name] for name in ("run", "meaning")):
            described["seed"] = described["protocol"]["seed"] = 1
        write_about(other, about)
    elif kind == "global_best_config.json":
        text = kept.file(kind).read_text()
        other.put(kind, re.sub(r'"method": "[a-z]+"', '"method": "random"', text))
    elif kind == "all_methods_results.csv":
        return kept.file(kind).read_bytes().replace(b"taylor", b"random")
    elif kind == "status.json":
        return b'{"state": "ended", "plan": "of another version"}'
    elif kind in ("cost.json", "method_comparison.json"):
        return kept.file("cost.json" if kind == "method_comparison.json" else "method_comparison.json").read_bytes()
    elif kind in ("suite", "items_in_calibration", "dense_states", *OF_OTHERS):  # there is one of them
        return kept.file("perplexity").read_bytes()
    else:
        return kept.file(kind, 1).read_bytes()
    return other.get(kind) or b""


def flipped(kept: Finished, kind: str) -> bytes:
    content = kept.file(kind).read_bytes()
    if kind == "global_best_config.json":
        return content.replace(b'"num_samples": 8', b'"num_samples": 9')
    if kind == "all_methods_results.csv":
        return re.sub(rb",0[.]2,", b",0.3,", content, count=1)
    if kind not in TEXTS:
        return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 4]) + content[len(content) // 2 + 1 :]
    place = re.search(rb"(?<=: )\d", content)  # of the first number
    assert place is not None
    digit = str((int(place[0]) + 1) % 10).encode()
    return content[: place.start()] + digit + content[place.end() :]


def not_a_number(kept: Finished, kind: str) -> bytes:
    content = kept.file(kind).read_bytes()
    if kind == "all_methods_results.csv":
        return re.sub(rb",0[.]\d+,", b",NaN,", content, count=1)
    return re.sub(rb"(?<=: )[\d.e-]+", b"NaN", content, count=1) if kind in TEXTS else np.array(np.nan).tobytes()


def nulls(kept: Finished, kind: str) -> bytes:
    """Other types than were written, and no checksum."""
    if kind not in TEXTS:
        return b"null"
    return json.dumps(dict.fromkeys(set(json.loads(kept.file(kind).read_bytes())) - {"checksum"})).encode()


def unsealed(kept: Finished, kind: str) -> bytes | None:
    """Without its checksum, or those of all that is in it; of what has none nothing else."""
    values = json.loads(kept.file(kind).read_bytes()) if kind in SEALED else {}
    for part in (values, *values.values()):
        if isinstance(part, dict):
            part.pop("checksum", None)
    return json.dumps(values).encode()


SEALED = ("ledger", "baseline.json", "experiment.json", "passes", "attempts", "cost.json")
VIEWS = ("all_methods_results.csv", "global_best_config.json", "method_comparison.json", "cost.json")
TEXTS = [kind for kind in (*READ, *VIEWS) if kind.endswith(".json") or kind in ("ledger", "passes", "attempts")]
DAMAGES: dict[str, Callable[[Finished, str], bytes | None]] = {
    "cut": lambda kept, kind: kept.file(kind).read_bytes()[: kept.file(kind).stat().st_size // 2],
    "empty": lambda kept, kind: b"",
    "text": lambda kept, kind: b'"quota exceeded"',
    "flipped": flipped,
    "of another": another,
    "NaN": not_a_number,
    "nulls": nulls,
    "folder": lambda kept, kind: None,
    "removed": lambda kept, kind: None,
    "unsealed": unsealed,
}
SEEN = {"ledger": "refused", "baseline.json": "refused", "experiment.json": "refused", "passes": "refused"}
SEEN |= {
    "attempts": "refused",
    "cost.json": "left out",
    "status.json": "left out",
    "all_methods_results.csv": "refused",
}
SEEN |= {"items.parquet": "refused", "global_best_config.json": "refused", "pruning_plan.json": "computed again"}
SEEN |= {
    "gradient_diagnosis.json": "refused",
    "pruning_comparison.json": "refused",
    **dict.fromkeys((*KINDS, *OF_OTHERS), "computed again"),
}
OTHERWISE = {
    ("experiment.json", "of another"): "refused: its settings",
    ("passes", "folder"): "unseen",  # it holds no cost
    ("attempts", "folder"): "left out",  # likewise
    # These views have no checksum: what has their form is believed, by who reads them alone, until a search writes them again.
    ("status.json", "flipped"): "unseen",
    **{("all_methods_results.csv", damage): "unseen" for damage in ("flipped", "of another", "NaN")},
    **{(kind, "folder"): "refused" for kind in (*KINDS, *OF_OTHERS)},  # nothing could be stored there
    ("ledger", "folder"): "to be computed again",  # a folder is no record
    # What is not there, is not known to have been, unless something speaks of it:
    **{(kind, "removed"): "to be computed again" for kind in ("ledger", "baseline.json")},
    ("passes", "removed"): "unseen",
    **{(kind, "removed"): "left out" for kind in ("attempts", "items.parquet", "gradient_diagnosis.json")},
    ("pruning_comparison.json", "removed"): "left out",
    **{(kind, "removed"): "lost" for kind in ("cost.json", "status.json")},
}


def refusal(sentence: str, path: Path) -> str:
    """What a sentence refuses: the file, or the settings; else the sentence."""
    if "\n" in sentence or len(sentence) > 700:
        return sentence
    settings = "was made with other settings (tiny-llama: seed was 1, is 0)" in sentence
    gone = f"experiment {path.parent} has results but no {path.name}, which" in sentence
    gone = gone or sentence.startswith(f"--config {path.parent} has no {path.name}: ")
    named = gone or sentence.startswith(f"{path} ") or f"{path} is " in sentence or f"{path}, line " in sentence
    return "refused" if named else "refused: its settings" if settings else sentence


@pytest.mark.slow
@pytest.mark.parametrize("kind", READ)
def test_damage_matrix(kind: str, finished: Finished, caplog: pytest.LogCaptureFixture) -> None:
    path = finished.file(kind)
    content = path.read_bytes()
    assert READ[kind](finished) == "unseen"
    found, expected = {}, {}
    for damage, make in DAMAGES.items():
        if damage == "unsealed" and kind not in SEALED:
            continue
        caplog.clear()
        if (damaged := make(finished, kind)) is None:
            path.unlink()
            if damage == "folder":
                path.mkdir()
        else:
            assert damaged != content
            path.write_bytes(damaged)
        try:
            with caplog.at_level(logging.WARNING):
                found[damage] = READ[kind](finished)
        except UserError as error:
            found[damage] = refusal(str(error), path)
        if found[damage] == "computed again" and damage != "removed":
            assert str(path) in caplog.text and "computed again" in caplog.text
        expected[damage] = OTHERWISE.get((kind, damage), SEEN[kind])
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(content)
    assert found == expected


@pytest.mark.parametrize("damage", DAMAGES)
def test_views_are_written_again(damage: str, finished: Finished, capfd: pytest.CaptureFixture[str]) -> None:
    """The next search reads none of them."""
    contents = {kind: finished.file(kind).read_bytes() for kind in VIEWS}
    for kind, damaged in {kind: DAMAGES[damage](finished, kind) for kind in VIEWS}.items():
        path = finished.folder / kind
        path.unlink()
        if damage == "folder":
            path.mkdir()
        elif damaged is not None:
            path.write_bytes(damaged)
    assert search.main([*ARGV, "--storage-path", str(finished.storage)]) == 0
    error = capfd.readouterr().err
    found = {}
    for kind, content in contents.items():
        path = finished.folder / kind
        if path.is_dir():
            found[kind] = "refused" if f"{path} " in error or f"{kind}: not written: " in error else "lost"
            continue
        now = path.read_bytes()
        if kind == "cost.json":  # with the time that this start has taken
            now, content = (str(sorted(json.loads(one))).encode() for one in (now, content))
        found[kind] = "written again" if now == content else "changed"
    assert found == dict.fromkeys(VIEWS, "refused" if damage == "folder" else "written again")


def test_artifacts_under_each_others_names_change_no_number(
    finished: Finished, capfd: pytest.CaptureFixture[str]
) -> None:
    """And whoever runs the search reads of it."""
    before = {record.key: record.metrics for record in Ledger(FolderStore(finished.folder)).records()}
    dense = read_baselines(FolderStore(finished.folder))["tiny-llama"].metrics
    shutil.rmtree(finished.folder)
    moved = set()
    for kind in KINDS:
        paths = sorted((finished.storage / "artifacts").glob(f"{kind}-*"))
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
            path.write_bytes(content)
            moved |= {path.name} if len(paths) > 1 else set()
    assert search.main([*ARGV, "--storage-path", str(finished.storage)]) == 0
    output = capfd.readouterr()
    said = set(
        re.findall(
            r"cached result \S*/(\S+) is damaged \(it is another artifact under this name\); it is comp",
            output.out + output.err,
        )
    )
    assert said == moved and len(moved) > 10
    assert "warning: cached result" in output.out
    assert {record.key: record.metrics for record in Ledger(FolderStore(finished.folder)).records()} == before
    assert read_baselines(FolderStore(finished.folder))["tiny-llama"].metrics == dense
