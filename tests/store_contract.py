"""The contract of a store, which every implementation passes: tests/core/test_store.py and test_object_store.py."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tune_prune.core import store as object_storage
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile
from tune_prune.core.store import Store

HOLD = """
import sys
from tune_prune.core import store as object_storage
from tune_prune.core.store import open_store
object_storage.LEASE_S = float(sys.argv[2])
with open_store(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_search(store: Store, lease_s: float) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock."""
    argv = [sys.executable, "-c", HOLD, str(store.folder), str(lease_s)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


class StoreContract:
    @pytest.fixture
    def short_lease(self, monkeypatch: pytest.MonkeyPatch) -> float:
        monkeypatch.setattr(object_storage, "LEASE_S", 0.8)
        return object_storage.LEASE_S

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """An empty store."""
        raise NotImplementedError

    @pytest.fixture
    def holder(self, store: Store, short_lease: float) -> Iterator[int]:
        """The id of a process that holds the lock."""
        with other_search(store, short_lease) as process:
            yield process.pid

    def test_many_are_put_and_what_is_none_is_removed(self, store: Store) -> None:
        store.put("old", "of an earlier start")
        assert store.put_all({"a/b": "text", "old": None, "never there": None}) == [store.path("a/b")]
        assert (store.get("a/b"), store.get("old"), store.names()) == (b"text", None, [])

    def test_what_is_put_comes_back(self, store: Store) -> None:
        assert store.get("a.json") is None and store.read("a.json") is None
        store.put("a.json", b"\x00\xff")
        store.put("deep/er/b.txt", "ä\u2028\r\n")
        assert (store.get("a.json"), store.get("deep/er/b.txt")) == (b"\x00\xff", "ä\u2028\r\n".encode())
        store.put("a.json", '{"x": [1]}')
        assert store.read("a.json") == {"x": [1]}
        assert store.within("deep/er").get("b.txt") == store.get("deep/er/b.txt")
        assert pickle.loads(pickle.dumps(store)).read("a.json") == {"x": [1]}  # as another process is given it

    def test_names_are_those_of_one_folder(self, store: Store) -> None:
        assert store.names() == store.names("ledger") == []
        for name in ("ledger/b.json", "ledger/a.json", "ledger/deeper/c.json", "top"):
            store.put(name, name)
        assert store.names("ledger") == ["ledger/a.json", "ledger/b.json"]
        assert [store.get(name) for name in store.names("ledger")] == [b"ledger/a.json", b"ledger/b.json"]
        assert store.names() == ["top"] and store.within("ledger").names() == ["a.json", "b.json"]

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000], ids=lambda content: repr(content[:2])
    )
    def test_what_is_no_json_object_is_named(self, store: Store, content: bytes) -> None:
        store.put("cost.json", content)
        with pytest.raises(DamagedFile) as caught:
            store.read("cost.json")
        assert str(caught.value).startswith(f"{store.path('cost.json')} is ")

    def test_concurrent_writers_and_readers(self, store: Store) -> None:
        """Writers of the same names race; a reader in between sees whole contents only."""

        def write_and_read(number: int) -> int:
            store.put(f"ledger/{number % 4}", f"{number:02d}" * 20_000)
            contents = [store.get(name) for name in store.names("ledger")]
            assert all(content is not None and content == content[:2] * 20_000 for content in contents)
            return len(contents)

        with ThreadPoolExecutor(8) as pool:
            assert max(pool.map(write_and_read, range(80))) == 4

    def test_one_of_several_puts_what_is_new(self, store: Store) -> None:
        def put(number: int) -> bool:
            return store.put_new("ledger/0f.json", f"{number}" * 20_000)

        with ThreadPoolExecutor(8) as pool:
            winners = [number for number, won in enumerate(pool.map(put, range(8))) if won]
        assert len(winners) == 1
        assert store.get("ledger/0f.json") == f"{winners[0]}".encode() * 20_000

    def test_what_is_new_replaces_nothing(self, store: Store) -> None:
        assert store.put_new("a", "first") and not store.put_new("a", "second")
        assert store.get("a") == b"first"
        assert store.put_new("a", "first")  # as after an answer that was lost
        store.remove("a")
        assert store.put_new("a", "second") and store.names() == ["a"]

    def test_what_is_there_and_what_is_removed(self, store: Store) -> None:
        store.put("trials/0f/plan.json", "{}")
        store.put("trials/1f/plan.json", "{}")
        assert store.has("trials/0f/plan.json") and not store.has("trials/0f") and not store.has("trials/2f")
        assert store.folders("trials") == ["trials/0f", "trials/1f"] and store.folders() == ["trials"]
        assert store.folders("nowhere") == store.names("trials") == []
        for name in ("trials/0f/plan.json", "never there"):
            store.remove(name)
        assert not store.has("trials/0f/plan.json") and store.has("trials/1f/plan.json")

    def test_to_look_whether_it_can_be_written_leaves_nothing(self, store: Store) -> None:
        store.check_writable()
        assert store.names() == store.folders() == []

    def test_one_search_at_a_time(self, store: Store, holder: int) -> None:
        store.put("a", "kept")
        with pytest.raises(UserError) as caught, store.lock():
            pytest.fail("two hold the lock")
        text = str(caught.value)
        assert f"another search runs on experiment {store.folder}" in text
        assert f"(process {holder} on " in text and "--name" in text and "\n" not in text
        assert store.get("a") == b"kept" and store.names() == ["a"]  # what is there can be read meanwhile

    def test_a_failure_releases_the_lock(self, store: Store) -> None:
        with pytest.raises(ZeroDivisionError), store.lock():
            raise ZeroDivisionError
        with store.lock():
            pass

    def test_a_killed_search_leaves_no_lock(self, store: Store, short_lease: float) -> None:
        with other_search(store, short_lease) as process:
            process.kill()
            process.wait()
        for name in ("a", "b"):
            with store.lock():
                store.put(name, "kept")
        assert store.names() == ["a", "b"]
