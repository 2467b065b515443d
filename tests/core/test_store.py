"""The contract of a store: every implementation passes `StoreContract`; and the files of a folder."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tune_prune.core import files
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile
from tune_prune.core.store import FolderStore


class StoreContract:
    OPEN: str  # an expression that opens a store on sys.argv[1], for other processes

    @pytest.fixture
    def store(self, tmp_path: Path) -> FolderStore:
        """One on `tmp_path / "results"`, with nothing in it."""
        raise NotImplementedError

    @pytest.fixture
    def other_search(self, store: FolderStore) -> Iterator[subprocess.Popen[str]]:
        """A process that holds the lock."""
        code = (
            f"import sys, time\nfrom tune_prune.core.store import *\nwith {self.OPEN}.lock():\n"
            "    print('held', flush=True)\n    sys.stdin.read()"
        )
        argv = [sys.executable, "-c", code, str(store.folder)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
            process.kill()

    def test_many_are_put_and_what_is_none_is_removed(self, store: FolderStore) -> None:
        store.put("old", "of an earlier start")
        assert store.put_all({"a/b": "text", "old": None, "never there": None}) == [store.path("a/b")]
        assert (store.get("a/b"), store.get("old"), store.names()) == (b"text", None, [])

    def test_what_is_put_comes_back(self, store: FolderStore) -> None:
        assert store.get("a.json") is None and store.read("a.json") is None
        store.put("a.json", b"\x00\xff")
        store.put("deep/er/b.txt", "ä\u2028\r\n")
        assert (store.get("a.json"), store.get("deep/er/b.txt")) == (b"\x00\xff", "ä\u2028\r\n".encode())
        store.put("a.json", '{"x": [1]}')
        assert store.read("a.json") == {"x": [1]}
        assert store.within("deep/er").get("b.txt") == store.get("deep/er/b.txt")

    def test_names_are_those_of_one_folder(self, store: FolderStore) -> None:
        assert store.names() == store.names("ledger") == []
        for name in ("ledger/b.json", "ledger/a.json", "ledger/deeper/c.json", "top"):
            store.put(name, name)
        assert store.names("ledger") == ["ledger/a.json", "ledger/b.json"]
        assert [store.get(name) for name in store.names("ledger")] == [b"ledger/a.json", b"ledger/b.json"]
        assert store.names() == ["top"] and store.within("ledger").names() == ["a.json", "b.json"]

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000], ids=lambda content: repr(content[:2])
    )
    def test_what_is_no_json_object_is_named(self, store: FolderStore, content: bytes) -> None:
        store.put("cost.json", content)
        with pytest.raises(DamagedFile) as caught:
            store.read("cost.json")
        assert str(caught.value).startswith(f"{store.path('cost.json')} is ")

    def test_concurrent_writers_and_readers(self, store: FolderStore) -> None:
        """Writers of the same names race; a reader in between sees whole contents only."""

        def write_and_read(number: int) -> int:
            store.put(f"ledger/{number % 4}", f"{number:02d}" * 20_000)
            contents = [store.get(name) for name in store.names("ledger")]
            assert all(content is not None and content == content[:2] * 20_000 for content in contents)
            return len(contents)

        with ThreadPoolExecutor(8) as pool:
            assert max(pool.map(write_and_read, range(80))) == 4

    def test_one_search_at_a_time(self, store: FolderStore, other_search: subprocess.Popen[str]) -> None:
        store.put("a", "kept")
        with pytest.raises(UserError) as caught, store.lock():
            pytest.fail("two hold the lock")
        text = str(caught.value)
        assert f"another search runs on experiment {store.folder}" in text
        assert f"(process {other_search.pid} on " in text and "--name" in text and "\n" not in text
        assert store.get("a") == b"kept" and store.names() == ["a"]  # what is there can be read meanwhile

    def test_a_killed_search_leaves_no_lock(self, store: FolderStore, other_search: subprocess.Popen[str]) -> None:
        other_search.kill()
        other_search.wait()
        for name in ("a", "b"):
            with store.lock():
                store.put(name, "kept")
        assert store.names() == ["a", "b"]

    def test_a_failure_releases_the_lock(self, store: FolderStore) -> None:
        with pytest.raises(ZeroDivisionError), store.lock():
            raise ZeroDivisionError
        with store.lock():
            pass


class TestFolder(StoreContract):
    OPEN = "FolderStore(sys.argv[1])"

    @pytest.fixture
    def store(self, tmp_path: Path) -> FolderStore:
        return FolderStore(tmp_path / "results")

    def test_a_killed_writer_leaves_the_old_content(self, store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def killed(source: object, target: object) -> None:
            raise KeyboardInterrupt

        store.put("ledger/0f.json", "old")
        monkeypatch.setattr(files.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            store.put("ledger/0f.json", "new")
        assert store.get("ledger/0f.json") == b"old"
        assert [path.name for path in store.path("ledger").iterdir()] == ["0f.json"]

    def test_hidden_files_do_not_count(self, store: FolderStore) -> None:
        """What a kill leaves behind between a write and its rename."""
        store.put("ledger/0f.json", "{}")
        store.path("ledger/.0f.json.abc.tmp").write_text("{")
        assert store.names("ledger") == ["ledger/0f.json"]

    def test_what_cannot_be_read_is_named(self, store: FolderStore) -> None:
        store.put("cost.json/inside", "a folder in its place")
        with pytest.raises(DamagedFile, match=r"cost\.json is unreadable \(Is a directory\)"):
            store.read("cost.json")

    def test_what_may_not_be_read_is_not_to_be_deleted(
        self, store: FolderStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The record of somebody else's search may be whole."""

        def forbidden(path: Path) -> bytes:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        store.put("ledger/0f.json", "{}")
        monkeypatch.setattr(Path, "read_bytes", forbidden)
        with pytest.raises(DamagedFile) as caught:
            store.read("ledger/0f.json")
        assert str(caught.value) == (
            f"{store.path('ledger/0f.json')} is unreadable (Permission denied); make it a file that you may read, then run the "
            "same command again"
        )
