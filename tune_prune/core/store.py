"""The names of an experiment's files, each once (ray_results/README.md says what is in them), and the stores that keep them: named
contents, each complete or absent (tests/store_contract.py), in a folder, also of NFS, or in S3 or Google Cloud Storage.

An object is there whole or not at all; on S3 one of up to 5 GiB is put by one request. `put_new` is a conditional request
(If-None-Match: * on S3, ifGenerationMatch=0 on Google's), which pyarrow's file systems do not have. Timeouts, throttling and 5xx
answers are tried again by the client library; what it gives up on becomes one sentence.

The lock of an experiment is an object with a time limit, which who holds it renews. The objects .lock/00000001.json,
.lock/00000002.json, ... are one owner each. Who finds the newest one given back, or not renewed while it watches for as long as
the limit, puts the next if there is none: of several who try one wins. No clocks are compared, as machines' differ. Records are
safe all the same, as none that is finished is ever replaced.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import platform
import re
import signal
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self, TypeVar

from filelock import FileLock, Timeout

from tune_prune.core import ending
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile, atomic_write_bytes, check_writable, parse_json, to_json

log = logging.getLogger(__name__)

T = TypeVar("T")

EXPERIMENT = "experiment.json"
BASELINES = "baseline.json"
LEDGER = "ledger"
PASSES = "passes"
ATTEMPTS = "attempts"
COST = "cost.json"
STATUS = "status.json"  # what the search that runs, or ran last, has said of itself
SPEED = "speed"  # what tune-prune speed has measured
TENSORBOARD = "tensorboard"
TUNE = "tune"
SAVED_MODELS = "best"

RESULTS = "all_methods_results.csv"
BEST_CONFIG = "global_best_config.json"
BEST_OF_MODEL = "best_config.json"  # of an analysis
METHOD_COMPARISON = "method_comparison.json"
CROSS_MODEL_COMPARISON = "cross_model_comparison.json"

TRIALS = "trials"  # a folder per trial, named by its key, with these files
PLAN = "pruning_plan.json"
PLAN_COMPARISON = "pruning_comparison.json"
GRADIENTS = "gradient_diagnosis.json"
ITEMS = "items.parquet"
KL = "kl.json"


class StorageError(UserError):
    """A request that object storage refused, or did not answer."""


class Store(ABC):
    """Named contents at `folder`, which need not exist yet. A name has "/" between its parts; hidden ones (.x) do not count."""

    folder: Location
    readers = 1  # threads that read many contents sooner

    def path(self, name: str) -> Location:
        """Return where `name` is, for messages."""
        return self.folder / name

    @abstractmethod
    def within(self, name: str) -> Self:
        """Return the contents whose names begin with `name` and a slash."""

    @abstractmethod
    def put(self, name: str, content: bytes | str) -> None:
        """Keep `content` (text as UTF-8) under `name`, in place of what is there. A reader sees the old one or the new one."""

    @abstractmethod
    def put_new(self, name: str, content: bytes | str) -> bool:
        """Keep `content` under `name` if nothing is there yet; return whether it is there now. Of several at a time one wins."""

    def put_all(self, contents: Mapping[str, bytes | str | None]) -> Sequence[Location]:
        """Put each content under its name and return the paths. A content of None removes what an earlier start has left."""
        for name, content in contents.items():
            if content is None:
                self.remove(name)
            else:
                self.put(name, content)
        return [self.path(name) for name, content in contents.items() if content is not None]

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove what is under `name`, if anything is."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """Return what is kept under `name`; None if nothing is. Raises DamagedFile if it cannot be read."""

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object under `name`; None if there is nothing. Raises DamagedFile for anything else."""
        content = self.get(name)
        return None if content is None else parse_json(self.path(name), content)

    @abstractmethod
    def has(self, name: str) -> bool:
        """Say whether something is kept under `name`."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Return the contents of a folder, sorted, as names for `get`; none where there is no such folder. What a killed
        writer left behind (hidden names) does not count."""

    @abstractmethod
    def folders(self, folder: str = "") -> list[str]:
        """Return the folders of a folder, sorted, as names for `within`."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raises UserError or OSError where nothing can be put here; leaves nothing behind."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """Hold the lock, which one search has at a time, whatever machine it runs on; its process's death releases it.
        Raises UserError if another one holds it."""


def held_by(owner: Mapping[str, Any]) -> str:
    """Say who holds a lock, for its message; nothing where that is not known."""
    return f" (process {owner['pid']} on {owner['host']})" if {"pid", "host"} <= set(owner) else ""


def taken(folder: Location, owner: Mapping[str, Any]) -> str:
    """Say why an experiment cannot be locked."""
    return (
        f"another search runs on experiment {folder}{held_by(owner)}; wait for its end, stop it, or start another experiment with "
        "--name"
    )


SCHEMES = ("s3", "gs")  # of objects; file:// is a folder
# Also with a slash too few: a folder named `s3:` would take the results.
_ADDRESS = re.compile(rf"({'|'.join(('file', *SCHEMES))}):", re.IGNORECASE)


class ObjectPath(PurePosixPath):
    """The name of objects, e.g. s3://bucket/prefix: parent, name and "/" as of a folder. It touches no storage."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    __fspath__ = __str__

    def resolve(self) -> ObjectPath:
        return self  # it is absolute

    absolute = expanduser = resolve

    @property
    def scheme(self) -> str:
        return self.parts[0].removesuffix(":")


Location = Path | ObjectPath


def is_address(text: str) -> bool:
    """Say whether `text` is meant as an address, which `location` knows or refuses, and not as the name of a folder or file."""
    return "://" in text or _ADDRESS.match(text) is not None


def location(text: str | Location) -> Location:
    """Return the place of s3://bucket/prefix, gs://bucket/prefix, file:///folder or a folder. Raises UserError for others."""
    if isinstance(text, (Path, ObjectPath)):
        return text
    if not is_address(text):
        return Path(text)
    scheme, _, rest = text.partition("://")
    if scheme == "file" and rest.startswith("/"):
        return Path(rest)
    if scheme not in SCHEMES or not rest.strip("/"):
        raise UserError(
            f"{text} is no address of results; write s3://bucket/prefix, gs://bucket/prefix, file:///folder or a folder"
        )
    return ObjectPath(text.rstrip("/"))


_LOCK = ".lock"
_LOCK_OWNER = ".lock.json"  # for the message only: it may be that of a search which was killed


class FolderStore(Store):
    """Named contents as the files of `folder`. Workers may write at the same time on any machine that shares it, and a kill at any
    moment loses at most what was being written."""

    folder: Path

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        """Return where `name` is: for messages, and for what writes files of its own (Ray Tune, TensorBoard, checkpoints)."""
        return self.folder / name

    def within(self, name: str) -> FolderStore:
        return FolderStore(self.path(name))

    def put(self, name: str, content: bytes | str) -> None:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, content.encode() if isinstance(content, str) else content)

    def put_new(self, name: str, content: bytes | str) -> bool:
        path, data = self.path(name), content.encode() if isinstance(content, str) else content
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            atomic_write_bytes(path, data, new=True)
        except FileExistsError:
            return self.get(name) == data
        return True

    def put_all(self, contents: Mapping[str, bytes | str | None]) -> list[Path]:
        return [Path(path) for path in super().put_all(contents)]

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def get(self, name: str) -> bytes | None:
        path = self.path(name)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            step = "make it a file that you may read, then run the same command again"  # its content may be whole
            raise DamagedFile(path, f"unreadable ({error.strerror or error})", step) from error

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def names(self, folder: str = "") -> list[str]:
        return self._listed(folder, Path.is_file)

    def folders(self, folder: str = "") -> list[str]:
        return self._listed(folder, Path.is_dir)

    def _listed(self, folder: str, is_kind: Callable[[Path], bool]) -> list[str]:
        root = self.path(folder)
        paths = [path for path in root.iterdir() if is_kind(path)] if root.is_dir() else []
        return sorted(path.relative_to(self.folder).as_posix() for path in paths if not path.name.startswith("."))

    def check_writable(self) -> None:
        check_writable(self.folder)

    @contextmanager
    def lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path(_LOCK), blocking=False)
        try:
            lock.acquire()
        except Timeout as error:
            raise UserError(taken(self.folder, self.read(_LOCK_OWNER) or {})) from error
        try:
            self.put(_LOCK_OWNER, to_json({"host": platform.node(), "pid": os.getpid()}))
            yield
        finally:
            lock.release()


LEASE_S = 60.0  # what a killed owner of a lock keeps others waiting for
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
        return self._listed(folder, "file")

    def folders(self, folder: str = "") -> list[str]:
        return self._listed(folder, "directory")

    def _listed(self, folder: str, kind: str) -> list[str]:
        try:
            entries = self._try("listed", folder, lambda path: self._files.ls(path, detail=True, refresh=True))
        except FileNotFoundError:
            return []
        itself = self._files._strip_protocol(str(self.path(folder))).rstrip(
            "/"
        )  # some clients list the folder in itself
        places = {entry["name"].rstrip("/") for entry in entries if entry["type"] == kind} - {itself}
        names = (place.rpartition("/")[2] for place in places)
        return sorted((f"{folder}/" if folder else "") + name for name in names if not name.startswith("."))

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

    def lock(self) -> AbstractContextManager[None]:
        return _Lease(self).held()

    def _put(self, name: str, call: Callable[[str], T]) -> T:
        try:
            return self._try("written", name, call)
        except FileNotFoundError as error:
            raise StorageError(
                f"{self.path(name)} could not be written: there is no {self.folder.scheme}://{self.folder.parts[1]}; create it, or "
                "correct --storage-path"
            ) from error

    def _try(self, done: str, name: str, call: Callable[[str], T]) -> T:
        """Return `call` of the object `name`. Raises FileNotFoundError, FileExistsError, and else StorageError."""
        path = self.path(name)
        try:
            return call(str(path))
        except (FileNotFoundError, FileExistsError):
            raise
        except self._errors as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
            raise StorageError(
                f"{path} could not be {done} ({reason}); check the credentials for {self.folder.scheme}://, and run the same "
                "command again when the storage answers: what is recorded is kept"
            ) from error


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


class _Lease:
    """The lock of the experiment in `store`."""

    def __init__(self, store: Store) -> None:
        self._store, self._experiment = store.within(_LOCK), store.folder
        self._length = LEASE_S
        self._name = ""
        self._ended = threading.Event()
        self._lost = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises UserError where another search holds it, after waiting for one that may be dead; and where another one has taken
        over, as this process could not renew it in time."""
        self._take()
        renewal = threading.Thread(target=self._renew, args=(threading.get_ident(),), name="lease", daemon=True)
        renewal.start()
        try:
            try:
                yield
            finally:
                self._ended.set()
                renewal.join()  # which may still interrupt this one
        except (KeyboardInterrupt, SystemExit):  # SystemExit: of Ray's handler of SIGTERM
            if not self._lost:
                raise
        finally:
            if not self._lost:
                self._try("given back", lambda: self._store.put(self._name, self._content(given_back=True)))
        if self._lost:
            raise UserError(
                f"another search has taken over experiment {self._experiment}, as this one could not renew its lock for "
                f"{self._length:g} s; nothing recorded is lost: wait for its end, or stop it and run the same command again"
            )

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
        while not self._lost and not self._ended.wait(self._length / 4):
            self._try("renewed", lambda: self._renew_once(owner))

    def _renew_once(self, owner: int) -> None:
        if self._newest()[0] == self._name:
            self._store.put(self._name, self._content())
            return
        self._lost = True
        if number := ending.interrupt_signal():
            signal.pthread_kill(owner, number)  # also where it waits

    def _try(self, done: str, call: Callable[[], object]) -> None:
        """Call, and log what goes wrong: a search goes on while its lock cannot be renewed."""
        try:
            call()
        except UserError as error:
            log.warning("the lock of %s was not %s: %s", self._experiment, done, error)
        except Exception:  # without its thread the search would go on when another one has taken over
            log.warning("the lock of %s was not %s", self._experiment, done, exc_info=True)

    def _content(self, given_back: bool = False) -> str:
        # What tells a renewed lock from the one before is its `renewal`.
        about = {"host": platform.node(), "pid": os.getpid(), "renewal": uuid.uuid4().hex}
        return to_json({**about, "given_back": given_back})

    def _newest(self) -> tuple[str, dict[str, Any]]:
        """Return the name of the last lock, and what it says; "" and nothing where there is none. Raises DamagedFile."""
        names = [name for name in self._store.names() if name[:8].isdigit()]
        return (names[-1], self._store.read(names[-1]) or {}) if names else ("", {})


def open_store(place: str | Location) -> Store:
    """Return the store of a folder, or of s3://bucket/prefix and what else `location` knows. Raises UserError."""
    where = location(place)
    return ObjectStore(where) if isinstance(where, ObjectPath) else FolderStore(where)


def read_file(place: Location) -> bytes | None:
    """Return the content of a file or object; None if there is none. Raises UserError where it cannot be read."""
    return open_store(place.parent).get(place.name)


def open_file(place: Location) -> BinaryIO:
    """Open a file or object for reading. Raises OSError, as for a file, or UserError."""
    if isinstance(place, Path):
        return place.open("rb")
    content = read_file(place)
    if content is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
    return io.BytesIO(content)
