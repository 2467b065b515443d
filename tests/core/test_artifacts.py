"""The cache of shared statistics: what is put comes back bit for bit, a damaged file does not count, writes are atomic."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from tune_prune.core import artifact_cache
from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.errors import UserError
from tune_prune.core.hashing import canonical_json, library_versions

KEY = {"model": "abc", "seq_len": 16, "nested": {"b": 1, "a": [1, 2]}}
ARRAYS = {"scores": np.linspace(0, 1, 50), "empty": np.empty((0, 3)), "odd": np.array([np.nan, np.inf, -0.0])}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


def test_what_is_put_comes_back_bit_for_bit(store):
    assert store.get("importance", KEY, dict) is None
    store.put("importance", KEY, ARRAYS)
    found = ArtifactStore(store.folder).get("importance", KEY, dict)  # as another process would read it
    assert found is not None and found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes()


def test_the_name_is_the_meaning(store):
    same = {"nested": {"a": [1, 2], "b": 1}, "seq_len": 16, "model": "abc"}
    assert store.path("importance", same) == store.path("importance", KEY)
    assert store.path("removal", KEY) != store.path("importance", KEY)
    assert store.path("importance", KEY | {"seq_len": 17}) != store.path("importance", KEY)
    store.put("importance", KEY, ARRAYS)
    assert store.get("removal", KEY, dict) is None and store.get("importance", KEY | {"seq_len": 17}, dict) is None
    with np.load(store.path("importance", KEY)) as stored:
        key = json.loads(str(stored["key"]))  # for people who look
    libraries = {name: metadata.version(name).partition("+")[0] for name in ("torch", "transformers", "tokenizers")}
    assert key == KEY | {"libraries": libraries}


def test_what_other_versions_have_computed_is_not_taken(store, monkeypatch):
    store.put("importance", KEY, ARRAYS)
    now = library_versions()
    monkeypatch.setattr(artifact_cache, "library_versions", lambda: now | {"torch": "0.1"})
    assert store.get("importance", KEY, dict) is None
    store.put("importance", KEY, {"scores": np.zeros(2)})
    monkeypatch.undo()
    found = store.get("importance", KEY, dict)
    assert found is not None and found["scores"].tobytes() == ARRAYS["scores"].tobytes()  # both are kept


def flipped(raw: bytes, place: int) -> bytes:
    return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]


def damages(raw: bytes) -> dict[str, bytes]:
    middle = raw.index(ARRAYS["scores"].tobytes()) + 100
    return {
        "half": raw[: len(raw) // 2],
        "zeros": bytes(len(raw)),
        "flipped bit": flipped(raw, middle),
        "flipped bit in the directory": flipped(raw, raw.index(b"PK\x01\x02") + 10),
        "flipped bit in the checksum": flipped(raw, len(raw) - 1),
    }


KINDS = ("half", "zeros", "flipped bit", "flipped bit in the directory", "flipped bit in the checksum")


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_said_to_be_damaged_and_written_anew(store, caplog, kind):
    store.put("importance", KEY, ARRAYS)
    path = store.path("importance", KEY)
    path.write_bytes(damages(path.read_bytes())[kind])
    with caplog.at_level(logging.WARNING):
        assert store.get("importance", KEY, dict) is None
    assert path.name in caplog.text and "damaged" in caplog.text
    store.put("importance", KEY, ARRAYS)
    assert store.get("importance", KEY, dict)["scores"].tobytes() == ARRAYS["scores"].tobytes()


def test_what_is_wrong_with_the_command_is_no_damage(store, caplog):
    """A reader's UserError, such as a task file that is missing, is told, and nothing is computed again for it."""

    def read(found):
        raise UserError("no such task; correct --tasks")

    store.put("suite", KEY, ARRAYS)
    with pytest.raises(UserError, match="no such task"):
        store.get("suite", KEY, read)
    assert not caplog.text


def test_a_pickle_in_an_artifact_is_not_run(store, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    write(store, whole(scores=np.array([Bomb()], dtype=object)))  # of this kind and key, so that all of it is read
    assert store.get("importance", KEY, dict) is None
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert (tmp_path / "ran").exists()  # the bomb is one


def write(store, arrays, place=KEY):
    """A whole file with the right checksum that holds `arrays`, under the name of an importance of `place`."""
    archive = io.BytesIO()
    np.savez(archive, **arrays)
    store.folder.mkdir(exist_ok=True)
    content = archive.getvalue()
    store.path("importance", place).write_bytes(content + hashlib.sha256(content).digest())


WHOLE_KEY = KEY | {"libraries": library_versions()}


def whole(**changes):
    return {"kind": np.array("importance"), "key": np.array(canonical_json(WHOLE_KEY)), **ARRAYS} | changes


OTHERS = {
    "of another key": whole(key=np.array(canonical_json(WHOLE_KEY | {"seq_len": 17}))),
    "of another kind": whole(kind=np.array("input_norms")),
    "of objects": whole(scores=np.array([{}], dtype=object)),
    "without an array": {name: array for name, array in whole().items() if name != "odd"},
    "without anything": {},
}


@pytest.mark.parametrize("arrays", OTHERS.values(), ids=OTHERS)
def test_a_file_with_a_right_checksum_and_wrong_contents_is_computed_again(store, caplog, arrays):
    def read(found):
        return {name: found[name] for name in ARRAYS}

    write(store, arrays)
    assert store.get("importance", KEY, read) is None
    assert "is damaged (" in caplog.text and "it is computed again" in caplog.text
    write(store, whole())
    assert store.get("importance", KEY, read).keys() == ARRAYS.keys()


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(store, monkeypatch):
    store.put("importance", KEY, ARRAYS)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.put("importance", KEY, {"scores": np.zeros(3)})
    assert store.get("importance", KEY, dict)["scores"].tobytes() == ARRAYS["scores"].tobytes()
    assert [path.name for path in store.folder.iterdir()] == [store.path("importance", KEY).name]
