"""A store in a folder: the contract, and what it has of its own; and the places that name stores."""

from __future__ import annotations

import errno
import os
import pickle
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.store_contract import StoreContract
from tune_prune.core import files
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile
from tune_prune.core.store import FolderStore, Store, location, open_store


class TestFolder(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FolderStore:
        return FolderStore(tmp_path / "results")

    def test_a_killed_writer_leaves_the_old_content(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        def killed(source: object, target: object) -> None:
            raise KeyboardInterrupt

        store.put("ledger/0f.json", "old")
        monkeypatch.setattr(files.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            store.put("ledger/0f.json", "new")
        assert store.get("ledger/0f.json") == b"old"
        assert [path.name for path in store.path("ledger").iterdir()] == ["0f.json"]

    def test_hidden_files_do_not_count(self, store: Store) -> None:
        """A kill leaves them between a write and its rename."""
        store.put("ledger/0f.json", "{}")
        store.path("ledger/.0f.json.abc.tmp").write_text("{")
        assert store.names("ledger") == ["ledger/0f.json"]

    def test_what_killed_writers_have_left_is_removed(self, store: Store) -> None:
        store.put("trials/0f/plan.json", "{}")
        left, young = (store.path("trials/0f") / f".plan.json.{uuid.uuid4().hex}.tmp" for _ in range(2))
        others = store.path("trials/.plan.json.tmp")
        for path, age_s in ((left, 61), (young, 50), (others, 61), (store.path("trials/0f/plan.json"), 61)):
            path.touch()
            os.utime(path, (time.time() - age_s,) * 2)
        files.remove_unfinished(store.path("trials"), older_s=60)
        assert (left.exists(), young.exists(), others.exists()) == (False, True, True) and store.has(
            "trials/0f/plan.json"
        )
        files.remove_unfinished(store.path("never written"), older_s=60)

    def test_what_cannot_be_read_is_named(self, store: Store) -> None:
        store.put("cost.json/inside", "a folder in its place")
        with pytest.raises(DamagedFile, match=r"cost\.json is unreadable \(Is a directory\)"):
            store.read("cost.json")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", [None, ""])
def test_a_text_is_what_open_reads_and_a_byte_that_is_none_is_counted_from_the_first(tmp_path, mark, newline):
    content = mark + "a\r\nb\rc\n\n\u2028\x0cd \ufeff".encode()
    (tmp_path / "text").write_bytes(content)
    with (tmp_path / "text").open(encoding="utf-8-sig", newline=newline) as file:
        assert files.utf8_text(content, "text", newline) == file.read()
    long = mark + b"\xc3\xa4" * 10_000
    with pytest.raises(UserError, match=rf"^it is not UTF-8 text \(byte {len(long):,}\); write it as UTF-8$"):
        files.utf8_text(long + b"\xe4 ", "it", newline)


def test_locations_are_put_together_as_folders_are(tmp_path: Path) -> None:
    place = location("s3://bucket/results/")
    assert (str(place), str(place / "a" / "b.json")) == ("s3://bucket/results", "s3://bucket/results/a/b.json")
    assert (
        (place / "a").parent == place
        and (place / "a").name == "a"
        and (place / "a").as_posix() == "s3://bucket/results/a"
    )
    assert pickle.loads(pickle.dumps(place)) == place and str(pickle.loads(pickle.dumps(place))) == str(place)
    assert location(f"file://{tmp_path}") == tmp_path == location(str(tmp_path))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"gs:// needs the package gcsfs .*; run pip install 'tune_prune\[gcs\]'"):
        open_store("gs://bucket/results")


@pytest.mark.parametrize("answer", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK])
def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    def link(source: object, target: object) -> None:
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(files.os, "link", link)
    store = FolderStore(tmp_path)
    assert store.put_new("a", "first") and not store.put_new("a", "second") and store.get("a") == b"first"
