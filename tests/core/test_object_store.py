"""A store in object storage: the contract, and what a server may do to it, on an S3 server in a process of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.s3_server import Server, forget_clients
from tests.store_contract import StoreContract
from tune_prune.core import store as object_storage
from tune_prune.core.errors import UserError
from tune_prune.core.store import StorageError, Store, open_store


class TestS3(StoreContract):
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

    def test_what_it_never_does_is_a_sentence(self, store, own_client, monkeypatch):
        monkeypatch.setitem(object_storage._OPTIONS["s3"]["config_kwargs"]["retries"], "total_max_attempts", 2)
        forget_clients()
        with pytest.raises(StorageError) as caught:
            open_store(store.folder).put("down", "b")
        text = str(caught.value)
        assert text.startswith(f"{store.path('down')} could not be written (Reduce your rate.") and "\n" not in text
        assert text.endswith("run the same command again when the storage answers: what is recorded is kept")

    def test_a_bucket_that_is_not_there(self, s3: Server) -> None:
        store = open_store("s3://no-such-bucket/results")
        assert store.get("a") is None and store.names() == []
        for put in (store.put, store.put_new):
            with pytest.raises(
                StorageError, match=r"there is no s3://no-such-bucket; create it, or correct --storage-path"
            ):
                put("a", "b")

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

    def test_a_server_without_conditional_writes(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        overwrite = object_storage._client("s3")[0].pipe_file
        monkeypatch.setattr(object_storage._client("s3")[0], "pipe_file", lambda path, data, **_: overwrite(path, data))
        with pytest.raises(StorageError, match=r"does not know conditional writes"):
            store.check_writable()

    @pytest.fixture
    def ignored(self) -> Iterator[None]:
        """Ignore signals, as a program that a shell starts in the background does."""
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        yield
        for number, handler in before.items():
            signal.signal(number, handler)

    @pytest.mark.usefixtures("ignored")
    @pytest.mark.parametrize(
        ("heard", "end"),
        [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, KeyboardInterrupt), (signal.SIGTERM, SystemExit)],
    )  # the last is Ray's
    def test_who_could_not_renew_leaves(self, store, short_lease, heard, end):
        def hear(*_: object) -> None:
            raise end

        signal.signal(heard, hear)

        def work() -> None:
            with store.lock():
                store.within(".lock").put("00000009.json", '{"given_back": true}')
                time.sleep(5 * short_lease)
                pytest.fail("two searches run on one experiment")

        with pytest.raises(UserError, match=r"another search has taken over .* nothing recorded is lost"):
            work()
        with store.lock():  # the other one's is given back
            assert store.within(".lock").names() == ["00000010.json"]

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
