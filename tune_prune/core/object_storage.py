"""A lock on object storage: an object that says who holds it and until when, renewed while its owner lives.

The objects .lock/00000001.json, .lock/00000002.json, ... are one owner each. Who finds the newest one expired or given back
puts the next, if there is none: of several who try one wins. One that seems expired is watched for a while first, as clocks may
differ or be set: who lives renews it by its own. Records are safe all the same, as none that is finished is ever replaced.

A store in object storage, through fsspec: S3, Google Cloud Storage, or the memory of this process.

An object is there whole or not at all; on S3 one of up to 5 GiB is put by one request. `put_new` is a conditional request
(If-None-Match: * on S3, ifGenerationMatch=0 on Google's), which pyarrow's file systems do not have. Timeouts, throttling and 5xx
answers are tried again by the client library; what it gives up on becomes one sentence.

What a node has read from object storage or put there, kept in a folder of its own: artifacts are read by every process of every
trial, and replaced only by those that hold more samples.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import platform
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tune_prune.core import ending
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile, number, to_json
from tune_prune.core.hashing import digest
from tune_prune.core.storage import FolderStore, ObjectPath, StorageError, Store, held_by, taken

log = logging.getLogger(__name__)

LEASE_S = 60.0  # what a killed owner keeps others waiting for at most
_LOCKS = ".lock"


class Lease:
    """The lock of the experiment in `store`."""

    def __init__(self, store: Store) -> None:
        self._store = store.within(_LOCKS)
        self._experiment = store.folder
        self._length = LEASE_S
        self._number = 0
        self._about = {"host": platform.node(), "pid": os.getpid(), "owner": uuid.uuid4().hex}
        self._ended = threading.Event()
        self._lost = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises UserError where another search holds it, after waiting for one that may be dead; and where another one has taken
        over, as this process could not renew it in time; what was complete by then is only told."""
        self._take()
        self._owner = threading.get_ident()
        renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
        renewal.start()
        complete = False
        try:
            try:
                yield
                complete = True
            finally:
                self._ended.set()
                renewal.join()  # which may still interrupt this one
                self._give_back()
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
        last, owner = self._newest()
        first = last, owner["until"]
        if owner["until"] > 0:  # else it was given back
            # Clocks may differ, or be set: who lives renews it within a quarter of its length, by any clock.
            seconds = min(max(owner["until"] - time.time(), self._length / 2), self._length)
            log.warning(
                "%s is locked by a search%s that may have been killed: waiting up to %.0f s",
                self._experiment, held_by(owner), seconds,
            )  # fmt: skip
            end = time.monotonic() + seconds
            while owner["until"] > 0 and (left := end - time.monotonic()) > 0:
                time.sleep(min(self._length / 12, left))
                last, owner = self._newest()
                if owner["until"] > 0 and (last, owner["until"]) != first:  # it lives
                    raise UserError(taken(self._experiment, owner))
        self._number = last + 1
        won = self._store.put_new(_name(self._number), self._content())
        last, owner = self._newest()
        if not won or last != self._number:
            raise UserError(taken(self._experiment, owner))
        for name in self._store.names():
            if name < _name(self._number):
                self._store.remove(name)

    def _renew(self) -> None:
        while not self._ended.wait(self._length / 4):
            try:
                if self._newest()[0] != self._number:
                    self._lost = True
                    if heard := ending.interrupt_signal():
                        signal.pthread_kill(self._owner, heard)  # also where it waits
                    return
                self._store.put(_name(self._number), self._content())
            except UserError as error:
                log.warning("the lock of %s was not renewed, which is tried again: %s", self._experiment, error)
            except Exception:  # without this thread the search would go on when another one has taken over
                log.exception("the lock of %s was not renewed, which is tried again", self._experiment)

    def _give_back(self) -> None:
        if self._lost:
            return
        try:
            self._store.put(_name(self._number), self._content(until=0.0))
        except UserError as error:  # what has ended the search is what is told
            log.warning("the lock of %s ends by itself in %g s: %s", self._experiment, self._length, error)

    def _content(self, until: float | None = None) -> str:
        return to_json({**self._about, "until": time.time() + self._length if until is None else until})

    def _newest(self) -> tuple[int, Mapping[str, Any]]:
        """The number of the last lock, and what it says; 0 where there is none."""
        names = self._store.names()
        if not names:
            return 0, {"until": 0.0}
        last = names[-1]
        try:
            about = self._store.read(last) or {"until": 0.0}
            return int(last.partition(".")[0]), {**about, "until": number(about["until"])}
        except StorageError:
            raise
        except (KeyError, ValueError):
            raise UserError(
                f"{self._store.path(last)} is no lock of a search; delete it if none runs on {self._experiment}"
            ) from None


def _name(index: int) -> str:
    return f"{index:08d}.json"


T = TypeVar("T")

_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}  # and the extra of pyproject.toml that has it
_OPTIONS: dict[str, dict[str, Any]] = {
    # One request per object; the rest is botocore's: five tries at what a try may cure, with growing pauses.
    "s3": {"max_concurrency": 1, "config_kwargs": {"retries": {"mode": "standard", "total_max_attempts": 5}}},
    "gs": {},
    "memory": {},
}
# S3 takes 5 GiB in one request, s3fs would send parts from 100 MiB on: those of who is killed stay, unseen, and are paid for.
_PUT: dict[str, dict[str, Any]] = {"s3": {"chunksize": 5 * 2**30}, "gs": {}, "memory": {}}
# What the clients raise besides OSError.
_ERRORS = {
    "s3": ("botocore.exceptions.BotoCoreError", "botocore.exceptions.ClientError", "aiohttp.ClientError"),
    "gs": ("gcsfs.retry.HttpError", "google.auth.exceptions.GoogleAuthError", "aiohttp.ClientError"),
    "memory": (),
}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
}
_TRIAL = ".writable-"  # what names of objects begin with that only say whether writing works
LEFT_S = 60.0  # after which who has put one is gone
_NEW = threading.Lock()  # the memory of this process has no conditional request


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
        try:
            self._try("written", name, lambda path: self._files.pipe_file(path, data, **self._in_one))
        except FileNotFoundError as error:
            raise self._no_bucket(name) from error

    def put_new(self, name: str, content: bytes | str) -> bool:
        data = content.encode() if isinstance(content, str) else content
        with _NEW:
            try:
                self._try(
                    "written", name, lambda path: self._files.pipe_file(path, data, mode="create", **self._in_one)
                )
                return True
            except FileNotFoundError as error:
                raise self._no_bucket(name) from error
            except (FileExistsError, StorageError) as error:
                # A request whose answer was lost is sent again, and finds its own object; S3 may refuse both of two at a time.
                found = self.get(name)
                if found is None and isinstance(error, StorageError):
                    raise
                return found == data

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
            found = self._try("listed", folder, lambda path: self._files.ls(path, detail=True, refresh=True))
        except FileNotFoundError:
            return []
        own = self._files._strip_protocol(str(self.path(folder))).rstrip("/")  # some clients list the folder in itself
        places = {entry["name"].rstrip("/") for entry in found if entry["type"] == kind} - {own}
        return sorted((f"{folder}/" if folder else "") + place.rpartition("/")[2] for place in places)

    def check_writable(self) -> None:
        for left in self._listed("", "file"):  # by who was killed between the lines below
            if left.startswith(_TRIAL) and time.time() - _written(self.get(left)) > LEFT_S:
                self.remove(left)
        name = f"{_TRIAL}{uuid.uuid4().hex}"
        self.put(name, str(time.time()))
        conditional = not self.put_new(name, "second")
        self.remove(name)
        if not conditional:
            raise StorageError(
                f"{self.folder} does not know conditional writes (If-None-Match: *), without which two searches could overwrite "
                "each other's results; keep them in a folder, or on storage that has them"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        with Lease(self).held():
            yield

    def _try(self, done: str, name: str, call: Callable[[str], T]) -> T:
        """What `call` gives for the object `name`. Raises FileNotFoundError, FileExistsError, and StorageError for any other
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

    def _no_bucket(self, name: str) -> StorageError:
        bucket = f"{self.folder.scheme}://{self.folder.parts[1]}"
        return StorageError(
            f"{self.path(name)} could not be written: there is no {bucket}; create it, or correct --storage-path"
        )


@cache
def _client(scheme: str) -> tuple[Any, tuple[type[BaseException], ...]]:
    """fsspec's file system of a scheme, and what it raises."""
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
    if (
        scheme == "gs"
    ):  # it warns at every request where it may not read what kind of bucket it is, which is nothing to it
        logging.getLogger("gcsfs").setLevel(logging.ERROR)
    kinds = (name.rpartition(".") for name in _ERRORS[scheme])
    return files, (OSError, *(getattr(importlib.import_module(module), name) for module, _, name in kinds))


def _written(content: bytes | None) -> float:
    """When an object of `check_writable` was put; 0 of an older version's, which does not say it, and of one that is gone."""
    try:
        return float(content or b"0")
    except ValueError:
        return 0.0


def _hidden(name: str) -> bool:
    return name.rpartition("/")[2].startswith(".")


# How far somebody is (or removal losses that are complete): an earlier copy of a node would be an older state.
STATES = ("recovery_state-", "removal-")
MAX_BYTES = 4 * 2**30  # of one storage path; what was written first is removed first


def cache_folder() -> Path:
    """Of tune_prune in the user's cache folder; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tune_prune"


class NodeCachedStore(ObjectStore):
    """Objects with copies in `cache_folder()`, but for `STATES`: an old one may hold too few samples, and is never wrong. Where
    that folder cannot be written there are none."""

    def __init__(self, folder: ObjectPath) -> None:
        super().__init__(folder)
        self._near = FolderStore(cache_folder() / "artifacts" / digest(str(folder)))
        _trim(self._near.folder)

    def put(self, name: str, content: bytes | str) -> None:
        super().put(name, content)
        self._keep(name, content)

    def remove(self, name: str) -> None:
        super().remove(name)
        self._near.remove(name)

    def get(self, name: str) -> bytes | None:
        try:
            near = None if name.startswith(STATES) else self._near.get(name)
        except DamagedFile:  # of somebody else, perhaps: what is stored is what counts
            near = None
        if near is not None:
            return near
        content = super().get(name)
        if content is not None:
            self._keep(name, content)
        return content

    def get_anew(self, name: str) -> bytes | None:
        """What is stored now, where the copy that `get` gave was not enough; None where there is no copy."""
        content = super().get(name) if self._near.has(name) else None
        if content is not None:
            self._keep(name, content)
        return content

    def _keep(self, name: str, content: bytes | str) -> None:
        if name.startswith(STATES):
            return
        try:
            self._near.put(name, content)
        except OSError as error:
            log.warning(
                "%s is not cached on this machine (%s), and is fetched again when it is needed", self.path(name), error
            )


def _trim(folder: Path) -> None:
    """Once per process: files of this size are few at a time. Other processes write and trim meanwhile, so any may be gone."""
    files = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if not entry.name.startswith("."):  # what is being written
                    files.append((entry.stat(), Path(entry.path)))
    excess = sum(stat.st_size for stat, _ in files) - MAX_BYTES
    for stat, path in sorted(files, key=lambda file: file[0].st_mtime):
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        excess -= stat.st_size
