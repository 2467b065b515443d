"""A store in object storage, through fsspec: S3, Google Cloud Storage, or the memory of this process.

An object is there whole or not at all; on S3 one of up to 5 GiB is put by one request. `put_new` is a conditional request
(If-None-Match: * on S3, ifGenerationMatch=0 on Google's), which pyarrow's file systems do not have. Timeouts, throttling and 5xx
answers are tried again by the client library; what it gives up on becomes one sentence.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeVar

from tune_prune.core.errors import UserError
from tune_prune.core.storage.contract import StorageError, Store
from tune_prune.core.storage.lease import Lease
from tune_prune.core.storage.location import ObjectPath

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
