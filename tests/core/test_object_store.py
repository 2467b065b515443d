"""A store in object storage: the contract, and what a server may do to it, on an S3 server in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.s3_server import Server, forget_clients
from tests.store_contract import BetweenProcesses, LeaseContract
from tune_prune.core import object_storage
from tune_prune.core.ledger import Ledger
from tune_prune.core.object_storage import NodeCachedStore
from tune_prune.core.records import TrialRecord
from tune_prune.core.storage import StorageError
from tune_prune.core.store import ObjectPath, Store, open_store


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

    @pytest.mark.slow
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
        monkeypatch.setitem(object_storage._OPTIONS["s3"]["config_kwargs"]["retries"], "total_max_attempts", 2)
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

    def test_a_large_object_is_one_request(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """s3fs would send parts from 100 MiB on."""
        requests = []

        async def sent(name: str, **content: object) -> dict[str, str]:
            requests.append((name, content.get("IfNoneMatch")))
            return {"UploadId": "1", "ETag": "2"}

        monkeypatch.setattr(object_storage._client("s3")[0], "_call_s3", sent)
        data = bytes(100 * 2**20)
        store.put("a", data)
        assert store.put_new("b", data)
        assert requests == [("put_object", None), ("put_object", "*")]

    def test_what_was_put_though_the_answer_was_lost(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        client = object_storage._client("s3")[0]
        put = client.pipe_file

        def unanswered(path: str, data: bytes, mode: str = "", **_: object) -> None:
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

        monkeypatch.setattr(object_storage._client("s3")[0], "cat_file", cut)
        with pytest.raises(StorageError, match=r"a could not be read \(Response payload is not completed\); what is"):
            store.get("a")

    def test_a_server_without_conditional_writes(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        overwrite = object_storage._client("s3")[0].pipe_file
        monkeypatch.setattr(object_storage._client("s3")[0], "pipe_file", lambda path, data, **_: overwrite(path, data))
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
        monkeypatch.setattr(object_storage, "LEFT_S", -1.0)
        store.check_writable()
        assert store._listed("", "file") == ["a"]

    def test_a_machine_keeps_no_state_of_what_goes_on_elsewhere(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        machines = []
        for name in ("one", "other"):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
            machines.append(NodeCachedStore(ObjectPath(store.folder)))
        one, other = machines
        for kind in ("recovery_state", "removal"):
            name = f"{kind}-0123456789abcdef.npz"
            one.put(name, b"step 300")
            assert other.get(name) == b"step 300"
            other.put(name, b"step 800")
            assert one.get(name) == b"step 800"
            other.remove(name)
            assert one.get(name) is None and one.get_anew(name) is None

    def test_a_machine_keeps_what_never_changes(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        one, other = (NodeCachedStore(ObjectPath(store.folder)) for _ in range(2))
        one.put("a.npz", b"abc")
        assert store.get("a.npz") == b"abc"
        store.put("b.npz", b"def")
        assert one.get("b.npz") == b"def" and one.get("never") is None
        for name in ("a.npz", "b.npz"):
            store.remove(name)  # so that they can only come from here
        assert (other.get("a.npz"), other.get("b.npz")) == (b"abc", b"def")
        monkeypatch.setattr(object_storage, "MAX_BYTES", 3)
        assert NodeCachedStore(ObjectPath(store.folder)).get("a.npz") is None and other.get("b.npz") == b"def"
