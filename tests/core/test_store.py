"""The contract of a store: every implementation passes `StoreContract`; and what each of them has of its own."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from tests.s3_server import Server, forget_clients
from tune_prune.core import files
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile
from tune_prune.core.ledger import Ledger
from tune_prune.core.records import TrialRecord
from tune_prune.core.storage import lease, node_cache, objects
from tune_prune.core.storage.contract import StorageError
from tune_prune.core.storage.node_cache import NodeCachedStore
from tune_prune.core.store import FolderStore, ObjectPath, Store, location, open_store

HOLD = """
import sys
from tune_prune.core.storage import lease
from tune_prune.core.store import open_store
lease.LEASE_S = float(sys.argv[2])
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


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(lease, "LEASE_S", 0.8)
    return lease.LEASE_S


class StoreContract:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """One with nothing in it."""
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


class BetweenProcesses(StoreContract):
    def test_a_killed_search_leaves_no_lock(self, store: Store, short_lease: float) -> None:
        with other_search(store, short_lease) as process:
            process.kill()
            process.wait()
        for name in ("a", "b"):
            with store.lock():
                store.put(name, "kept")
        assert store.names() == ["a", "b"]


class LeaseContract(StoreContract):
    """What only a lock by lease can do wrong."""

    @pytest.fixture
    def ignored(self) -> Iterator[None]:
        """As what a shell starts in the background ignores the first."""
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        yield
        for number, handler in before.items():
            signal.signal(number, handler)

    @pytest.mark.usefixtures("ignored")
    @pytest.mark.parametrize(
        ("heard", "end"),
        [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, KeyboardInterrupt), (signal.SIGTERM, SystemExit)],
    )  # the last is Ray's
    def test_who_could_not_renew_leaves(
        self, store: Store, short_lease: float, heard: signal.Signals, end: type[BaseException]
    ) -> None:
        def hear(*_: object) -> None:
            raise end

        signal.signal(heard, hear)

        def work() -> None:
            with store.lock():
                store.within(".lock").put("00000009.json", '{"until": 0}')
                time.sleep(5 * short_lease)
                pytest.fail("two searches run on one experiment")

        with pytest.raises(UserError, match=r"another search has taken over .* nothing recorded is lost"):
            work()
        with store.lock():  # the other one's is given back
            assert store.within(".lock").names() == ["00000010.json"]

    @pytest.mark.usefixtures("ignored")
    def test_who_is_complete_without_its_lock_says_so(
        self, store: Store, short_lease: float, caplog: pytest.LogCaptureFixture
    ) -> None:
        with store.lock():
            store.within(".lock").put("00000009.json", '{"until": 0}')
            time.sleep(short_lease / 2)
        assert "has taken over" in caplog.text and "this one is complete" in caplog.text
        assert store.within(".lock").names()[-1] == "00000009.json"  # which is not given back by this one

    def test_a_renewal_that_fails_unexpectedly_is_told_and_tried_again(
        self, store: Store, short_lease: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with store.lock(), monkeypatch.context() as patched:
            first = store.within(".lock").get("00000001.json")
            patched.setattr(lease.Lease, "_newest", lambda _: 1 // 0)
            time.sleep(short_lease / 2)
            assert store.within(".lock").get("00000001.json") == first
            patched.undo()
            time.sleep(short_lease / 2)
            assert store.within(".lock").get("00000001.json") != first
        assert "was not renewed, which is tried again" in caplog.text and "ZeroDivisionError" in caplog.text

    def test_a_clock_that_is_set_does_not_lose_the_lock(
        self, store: Store, short_lease: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with store.lock():
            hour_ago = SimpleNamespace(time=lambda: time.time() - 3600, sleep=time.sleep, monotonic=time.monotonic)
            with monkeypatch.context() as patched:
                patched.setattr(lease, "time", hour_ago)
                time.sleep(short_lease / 2)
            with pytest.raises(UserError, match="another search runs"), store.lock():
                pytest.fail("two searches run on one experiment")

    def test_of_two_that_find_it_free_one_gets_it(self, store: Store, short_lease: float) -> None:
        def hold(number: int) -> bool:
            try:
                with store.lock():
                    time.sleep(2 * short_lease)
            except UserError:
                return False
            return True

        with ThreadPoolExecutor(3) as pool:
            assert sorted(pool.map(hold, range(3))) == [False, False, True]

    def test_what_is_no_lock_is_named(self, store: Store) -> None:
        store.within(".lock").put("00000001.json", '{"until": "later"}')
        with pytest.raises(UserError, match=r"00000001\.json is no lock of a search; delete it"), store.lock():
            pytest.fail("held")


class TestFolder(BetweenProcesses):
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
        """What a kill leaves behind between a write and its rename."""
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

    def test_what_may_not_be_read_is_not_to_be_deleted(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
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


class TestMemory(LeaseContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"memory://{uuid.uuid4().hex}/results")

    @pytest.fixture
    def holder(self, store: Store, short_lease: float) -> Iterator[int]:
        """No other process sees it."""
        with store.lock():
            yield os.getpid()


class TestS3(BetweenProcesses, LeaseContract):
    def test_records_are_read_at_once(self, store: Store) -> None:
        ledger = Ledger(store)
        config = {"method": "taylor", "seq_len": 16, "num_samples": 8}
        records = [TrialRecord(f"{number:02d}", "m", config, "failed") for number in range(20)]
        for record in records:
            ledger.write(record)
        store.put("ledger/07.json", "{")
        found, damaged = ledger.readable()
        assert found == [record for record in records if record.key != "07"]
        assert [error.path for error in damaged] == [store.path("ledger/07.json")]

    @pytest.fixture
    def store(self, s3: Server) -> Store:
        return open_store(f"{s3.bucket()}/results")

    def test_what_a_server_cannot_do_at_once_is_tried_again(self, store: Store) -> None:
        assert store.put_new("flaky-1", "a") and store.get("flaky-1") == b"a"
        store.put("flaky-2", "b")
        assert store.get("flaky-2") == b"b"

    @pytest.fixture
    def own_client(self) -> Iterator[None]:
        """Clients of this test are not for others."""
        yield
        forget_clients()

    def test_what_it_never_does_is_a_sentence(
        self, store: Store, own_client: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(objects._OPTIONS["s3"]["config_kwargs"]["retries"], "total_max_attempts", 2)
        forget_clients()
        with pytest.raises(StorageError) as caught:
            open_store(store.folder).put("down", "b")
        text = str(caught.value)
        assert text.startswith(f"{store.path('down')} could not be written (Reduce your rate.") and "\n" not in text
        assert text.endswith("what is recorded is kept: run the same command again when the storage answers")

    def test_a_bucket_that_is_not_there(self, s3: Server) -> None:
        store = open_store("s3://no-such-bucket/results")
        assert store.get("a") is None and store.names() == []
        for put in (store.put, store.put_new):
            with pytest.raises(
                StorageError, match=r"there is no s3://no-such-bucket; create it, or correct --storage-path"
            ):
                put("a", "b")

    def test_no_credentials(
        self, store: Store, own_client: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
        forget_clients()
        with pytest.raises(
            StorageError, match=r"could not be read \(Unable to locate credentials\); give this machine"
        ):
            open_store(store.folder).get("a")

    def test_what_was_put_though_the_answer_was_lost(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        client = objects._client("s3")[0]
        put = client.pipe_file

        def unanswered(path: str, data: bytes, mode: str = "") -> None:
            put(path, data, mode=mode)
            raise TimeoutError("the connection was lost")

        monkeypatch.setattr(client, "pipe_file", unanswered)
        assert store.put_new("a", "mine") and not store.put_new("a", "another's")
        monkeypatch.setattr(client, "pipe_file", lambda *_, **__: (_ for _ in ()).throw(TimeoutError("no route")))
        with pytest.raises(StorageError, match=r"b could not be written \(no route\)"):
            store.put_new("b", "mine")

    def test_a_body_that_is_cut_off_is_a_sentence(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        def cut(*_: object, **__: object) -> None:
            raise aiohttp.ClientPayloadError("Response payload is not completed")

        monkeypatch.setattr(objects._client("s3")[0], "cat_file", cut)
        with pytest.raises(StorageError, match=r"a could not be read \(Response payload is not completed\); what is"):
            store.get("a")

    def test_a_server_without_conditional_writes(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        overwrite = objects._client("s3")[0].pipe_file
        monkeypatch.setattr(objects._client("s3")[0], "pipe_file", lambda path, data, mode="": overwrite(path, data))
        with pytest.raises(StorageError, match=r"does not know conditional writes"):
            store.check_writable()

    def test_who_was_killed_while_it_looked_leaves_nothing(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its object goes with a later start; not that of one that looks at the same time."""
        monkeypatch.setattr(store, "remove", lambda name: None)
        store.check_writable()
        monkeypatch.undo()
        store.put(".writable-of-an-older-version", "first")
        store.put("a", "kept")
        kept = {".writable-of-an-older-version", "a"}
        (young,) = set(store._listed("", "file")) - kept
        store.check_writable()
        assert set(store._listed("", "file")) == {young, "a"}
        monkeypatch.setattr(objects, "LEFT_S", -1.0)
        store.check_writable()
        assert store._listed("", "file") == ["a"]

    def test_a_machine_keeps_what_never_changes(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        one, other = (NodeCachedStore(ObjectPath(store.folder)) for _ in range(2))
        one.put("a.npz", b"abc")
        assert store.get("a.npz") == b"abc"
        store.put("b.npz", b"def")
        assert one.get("b.npz") == b"def" and one.get("never") is None
        for name in ("a.npz", "b.npz"):
            store.remove(name)  # so that they can only come from here
        assert (other.get("a.npz"), other.get("b.npz")) == (b"abc", b"def")
        monkeypatch.setattr(node_cache, "MAX_BYTES", 3)
        assert NodeCachedStore(ObjectPath(store.folder)).get("a.npz") is None and other.get("b.npz") == b"def"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "hdfs://host/x",
            r"hdfs://host/x is of a scheme that results cannot be kept on; .* file://, s3://, gs://, memory://",
        ),
        ("s3://", r"names no bucket; write e\.g\. s3://bucket/prefix"),
        ("file://x", r"with three slashes"),
        (
            "s3:/bucket/x",
            r"s3:/bucket/x is neither .*; write s3://bucket/x, or \./s3:/bucket/x for a folder of that name",
        ),
        ("GS:bucket", r"write gs://bucket, or"),
        ("file:/x", r"write file:///x, or"),
    ],
)
def test_what_is_no_location_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        location(text)


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


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: object, target: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files.os, "link", link)
    store = FolderStore(tmp_path)
    assert store.put_new("a", "first") and not store.put_new("a", "second") and store.get("a") == b"first"


def test_a_node_s_cache_is_trimmed_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that goes between the listing and the look at it, one that is being written, one that cannot be removed."""
    for name in ("a.npz", "b.npz", ".c.npz.0f.tmp"):
        (tmp_path / name).write_bytes(b"abc")
    (tmp_path / "gone.npz").symlink_to(tmp_path / "no file")
    (tmp_path / "folder").mkdir()
    os.utime(tmp_path / "folder", (0, 0))
    monkeypatch.setattr(node_cache, "MAX_BYTES", 0)
    node_cache._trim(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".c.npz.0f.tmp", "folder", "gone.npz"]
    node_cache._trim(tmp_path / "never written")
