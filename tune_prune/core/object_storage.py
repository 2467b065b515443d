"""A store in object storage, through fsspec: S3 and Google Cloud Storage.

An object is there whole or not at all; on S3 one of up to 5 GiB is put by one request. `put_new` is a conditional request
(If-None-Match: * on S3, ifGenerationMatch=0 on Google's), which pyarrow's file systems do not have. Timeouts, throttling and 5xx
answers are tried again by the client library; what it gives up on becomes one sentence.

The lock of an experiment is an object with a time limit, which who holds it renews. The objects .lock/00000001.json,
.lock/00000002.json, ... are one owner each. Who finds the newest one given back, or not renewed while it watches for as long as
the limit, puts the next if there is none: of several who try one wins. No clocks are compared, as machines' differ. Records are
safe all the same, as none that is finished is ever replaced.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeVar

from tune_prune.core import ending
from tune_prune.core.errors import UserError
from tune_prune.core.files import to_json
from tune_prune.core.storage import ObjectPath, StorageError, Store, held_by, taken

log = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_S = 60.0  # what a killed owner of a lock keeps others waiting for
_LOCKS = ".lock"

_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}  # and the extra of pyproject.toml that has it
_OPTIONS: dict[str, dict[str, Any]] = {
    # One request per object; the rest is botocore's: five tries at what a try may cure, with growing pauses.
    "s3": {"max_concurrency": 1, "config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 5}}},
    "gs": {},
}
# S3 takes 5 GiB in one request, s3fs would send parts from 100 MiB on: those of who is killed stay, unseen, and are paid for.
_PUT: dict[str, dict[str, Any]] = {"s3": {"chunksize": 5 * 2**30}, "gs": {}}
# What the clients raise besides OSError.
_ERRORS = {
    "s3": ("botocore.exceptions.BotoCoreError", "botocore.exceptions.ClientError", "aiohttp.ClientError"),
    "gs": ("gcsfs.retry.HttpError", "google.auth.exceptions.GoogleAuthError", "aiohttp.ClientError"),
}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
}


class ObjectStore(Store):
    """Named contents as the objects whose names begin with `folder`. Raises UserError where the scheme's package is missing, and
    StorageError where the storage refuses or does not answer."""

    folder: ObjectPath
    readers = 16

    def __init__(self, folder: ObjectPath) -> None:
        self.folder = folder
        self._files, self._errors = _client(folder.scheme)
        self._in_one = _PUT[folder.scheme]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)  # a client is of its process

    def path(self, name: str) -> ObjectPath:
        return self.folder / name

    def within(self, name: str) -> ObjectStore:
        return ObjectStore(self.path(name))

    def put(self, name: str, content: bytes | str) -> None:
        data = content.encode() if isinstance(content, str) else content
        self._put(name, lambda path: self._files.pipe_file(path, data, **self._in_one))

    def put_new(self, name: str, content: bytes | str) -> bool:
        data = content.encode() if isinstance(content, str) else content
        try:
            self._put(name, lambda path: self._files.pipe_file(path, data, mode="create", **self._in_one))
        except (FileExistsError, StorageError) as error:
            # A request whose answer was lost is sent again, and finds its own object; S3 may refuse both of two at a time.
            stored = self.get(name)
            if stored is None and isinstance(error, StorageError):
                raise
            return stored == data
        return True

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._try("removed", name, self._files.rm_file)

    def get(self, name: str) -> bytes | None:
        try:
            return self._try("read", name, self._files.cat_file)
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        try:
            return self._try("read", name, self._files.info)["type"] == "file"
        except FileNotFoundError:
            return False

    def names(self, folder: str = "") -> list[str]:
        return [name for name in self._listed(folder, "file") if not _hidden(name)]

    def folders(self, folder: str = "") -> list[str]:
        return [name for name in self._listed(folder, "directory") if not _hidden(name)]

    def _listed(self, folder: str, kind: str) -> list[str]:
        try:
            entries = self._try("listed", folder, lambda path: self._files.ls(path, detail=True, refresh=True))
        except FileNotFoundError:
            return []
        own = self._files._strip_protocol(str(self.path(folder))).rstrip("/")  # some clients list the folder in itself
        places = {entry["name"].rstrip("/") for entry in entries if entry["type"] == kind} - {own}
        return sorted((f"{folder}/" if folder else "") + place.rpartition("/")[2] for place in places)

    def check_writable(self) -> None:
        name = f".writable-{uuid.uuid4().hex}"
        self.put(name, "first")
        conditional = not self.put_new(name, "second")
        self.remove(name)
        if not conditional:
            raise StorageError(
                f"{self.folder} does not know conditional writes (If-None-Match: *), without which two searches could overwrite "
                "each other's results; keep them in a folder, or on storage that has them"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        with _Lease(self).held():
            yield

    def _put(self, name: str, call: Callable[[str], T]) -> T:
        try:
            return self._try("written", name, call)
        except FileNotFoundError as error:
            bucket = f"{self.folder.scheme}://{self.folder.parts[1]}"
            what = f"{self.path(name)} could not be written: there is no {bucket}"
            raise StorageError(f"{what}; create it, or correct --storage-path") from error

    def _try(self, done: str, name: str, call: Callable[[str], T]) -> T:
        """Return what `call` gives for the object `name`. Raises FileNotFoundError, FileExistsError, and StorageError for any other
        failure of the client."""
        path = self.path(name)
        try:
            return call(str(path))
        except (FileNotFoundError, FileExistsError):
            raise
        except self._errors as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
            raise StorageError(f"{path} could not be {done} ({reason}); {self._step(error)}") from error

    def _step(self, error: BaseException) -> str:
        scheme = self.folder.scheme
        kind = type(error).__name__
        if "Credentials" in kind or "Auth" in kind:
            return f"give this machine credentials for {scheme}://, e.g. {_CREDENTIALS[scheme]}"
        if isinstance(error, PermissionError):
            return "use credentials that may read, write, list and delete there, or another --storage-path"
        return "what is recorded is kept: run the same command again when the storage answers"


@cache
def _client(scheme: str) -> tuple[Any, tuple[type[BaseException], ...]]:
    """Return fsspec's file system of a scheme, and the errors that it raises."""
    import fsspec

    try:
        files = fsspec.filesystem(scheme, use_listings_cache=False, **_OPTIONS[scheme])
    except ImportError as error:
        package, extra = _PACKAGES[scheme]
        raise UserError(
            f"{scheme}:// needs the package {package} ({error}); run pip install 'tune_prune[{extra}]'"
        ) from error
    if scheme == "s3":
        files.retries = 2  # times what botocore tries
    else:  # it warns at every request where it may not read what kind of bucket it is, which is nothing to it
        logging.getLogger("gcsfs").setLevel(logging.ERROR)
    kinds = (name.rpartition(".") for name in _ERRORS[scheme])
    return files, (OSError, *(getattr(importlib.import_module(module), name) for module, _, name in kinds))


def _hidden(name: str) -> bool:
    return name.rpartition("/")[2].startswith(".")


class _Lease:
    """The lock of the experiment in `store`."""

    def __init__(self, store: Store) -> None:
        self._store = store.within(_LOCKS)
        self._experiment = store.folder
        self._length = LEASE_S
        self._name = ""
        self._ended = threading.Event()
        self._lost = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises UserError where another search holds it, after waiting for one that may be dead; and where another one has taken
        over, as this process could not renew it in time; what was complete by then is only told."""
        self._take()
        owner = threading.get_ident()
        renewal = threading.Thread(target=self._renew, args=(owner,), name="lease", daemon=True)
        renewal.start()
        complete = False
        try:
            try:
                yield
                complete = True
            finally:
                self._ended.set()
                renewal.join()  # which may still interrupt this one
                if not self._lost:
                    self._attempt("given back", lambda: self._store.put(self._name, self._content(given_back=True)))
        except (KeyboardInterrupt, SystemExit):  # SystemExit: of Ray's handler of SIGTERM
            if not self._lost:
                raise
        if not self._lost:
            return
        taken_over = (
            f"another search has taken over experiment {self._experiment}, as this one could not renew its lock for "
            f"{self._length:g} s; nothing recorded is lost"
        )
        if not complete:
            raise UserError(f"{taken_over}: wait for its end, or stop it and run the same command again")
        log.warning("%s, and this one is complete: the other one writes its tables again", taken_over)

    def _take(self) -> None:
        last, owner = first = self._newest()
        if owner and not owner.get("given_back"):
            log.warning(
                "%s is locked by a search%s that may have been killed: waiting %.0f s",
                self._experiment, held_by(owner), self._length,
            )  # fmt: skip
        end = time.monotonic() + self._length
        while owner and not owner.get("given_back") and time.monotonic() < end:
            time.sleep(self._length / 12)
            last, owner = self._newest()
            if (last, owner) != first and not owner.get("given_back"):  # it lives
                raise UserError(taken(self._experiment, owner))
        self._name = f"{int(last.partition('.')[0] or 0) + 1:08d}.json"
        won = self._store.put_new(self._name, self._content())
        last, owner = self._newest()
        if not won or last != self._name:
            raise UserError(taken(self._experiment, owner))
        for name in self._store.names():
            if name < self._name:
                self._store.remove(name)

    def _renew(self, owner: int) -> None:
        while not self._ended.wait(self._length / 4):
            self._attempt("renewed", lambda: self._renew_once(owner))
            if self._lost:
                return

    def _renew_once(self, owner: int) -> None:
        if self._newest()[0] == self._name:
            self._store.put(self._name, self._content())
            return
        self._lost = True
        if heard := ending.interrupt_signal():
            signal.pthread_kill(owner, heard)  # also where it waits

    def _attempt(self, done: str, call: Callable[[], object]) -> None:
        """Call, and log what goes wrong: a search goes on while its lock cannot be renewed, and its end is what is told."""
        try:
            call()
        except UserError as error:
            log.warning("the lock of %s was not %s: %s", self._experiment, done, error)
        except Exception:  # without its thread the search would go on when another one has taken over
            log.exception("the lock of %s was not %s", self._experiment, done)

    def _content(self, given_back: bool = False) -> str:
        # What tells a renewed lock from the one before is its `renewal`.
        about = {"host": platform.node(), "pid": os.getpid(), "renewal": uuid.uuid4().hex}
        return to_json({**about, "given_back": given_back})

    def _newest(self) -> tuple[str, dict[str, Any]]:
        """Return the name of the last lock, and what it says; "" and nothing where there is none."""
        names = [name for name in self._store.names() if name[:8].isdigit()]
        if not names:
            return "", {}
        try:
            return names[-1], self._store.read(names[-1]) or {}
        except StorageError:
            raise
        except UserError:
            raise UserError(
                f"{self._store.path(names[-1])} is no lock of a search; delete it if none runs on {self._experiment}"
            ) from None
