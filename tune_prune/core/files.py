"""Files that others read: JSON with non-finite numbers, and writes that a reader sees whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from tune_prune.core.errors import UserError

NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
MAX_NAME, MAX_PATH = 255, 4096  # bytes of a file's or a folder's name and of a path, on most systems

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")  # as atomic_write_bytes names them
# What file systems without hard links answer: FAT, many FUSE mounts, and those on which a folder has a few or its own.
_NO_LINK = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
_COMPUTE_AGAIN = "delete it to have that result computed again, or restore it from a copy"


class DamagedFile(UserError):
    """A file of results that cannot be used: `path`, in `what` the rest of the clause "it is ...", and in `step` what to do."""

    def __init__(self, path: PurePath, what: str, step: str = _COMPUTE_AGAIN) -> None:
        super().__init__(path, what, step)  # what it is made of again in another process
        self.path, self.what, self.step = path, what, step

    def __str__(self) -> str:
        return f"{self.path} is {self.what}; {self.step}"


def cache_folder() -> Path:
    """Return tune_prune's folder in the user's cache folder; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tune_prune"


def is_too_long(path: str) -> bool:
    """Say whether no file or folder can have that path, or one of its parts as its name: both are bounded in bytes."""
    return len(os.fsencode(path)) > MAX_PATH or any(len(os.fsencode(part)) > MAX_NAME for part in path.split("/"))


def utf8_text(content: bytes, name: object, newline: str | None = None) -> str:
    """Return the text of a file, without a byte order mark, its newlines as `open` reads them. Raises UserError for `name`,
    with the place in the file of the first byte that is no UTF-8."""
    start = 3 if content.startswith(b"\xef\xbb\xbf") else 0
    try:
        return io.StringIO(content[start:].decode(), newline).read()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text (byte {start + error.start:,}); write it as UTF-8") from error


def to_json(value: Any, indent: int | None = 2, plain_ascii: bool = False) -> str:
    """Return the text of `value` (plain data or NumPy scalars) as files keep it: sorted keys, indented (None: one line), a newline
    at the end, NaN and infinities as "nan", "inf" and "-inf", which `number` turns back. `plain_ascii`: nothing in it acts on a
    terminal."""
    return json.dumps(_plain(value), sort_keys=True, indent=indent, allow_nan=False, ensure_ascii=plain_ascii) + "\n"


def number(value: Any) -> float | int:
    """Return the number that `to_json` wrote as `value`; ValueError if it is none."""
    if isinstance(value, str) and value in NON_FINITE:
        return NON_FINITE[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is not a number")


def parse_json(path: PurePath, content: bytes | None = None) -> dict[str, Any]:
    """Return the JSON object in the file `path`, or in its `content`. Raises DamagedFile if it holds anything else."""
    try:
        value = json.loads(
            (Path(path).read_bytes() if content is None else content).decode(), parse_constant=_no_number
        )
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DamagedFile(path, "JSON, but not an object {...}")
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path`: a reader sees the old file or the whole new one, even after a power loss."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes, new: bool = False) -> None:
    """Write `content` to `path` as `atomic_write_text` does; `new`: only if there is no such file. Raises OSError with the name of
    the file, FileExistsError where a new one is there already."""
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if new:
            _link(temporary, path)
        else:
            os.replace(temporary, path)
    except OSError as error:  # a write's does not say the file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def check_writable(folder: Path) -> None:
    """Raise OSError unless files can be written to `folder`, or to the folder in which it would be made; leaves nothing there. A
    file is opened: of a read-only file system, and for root of all, the permissions say nothing."""
    places = (folder, *folder.parents)
    existing = next(place for place in places if place.exists())
    if broken := [place for place in places if place.is_symlink() and not place.exists()]:
        raise NotADirectoryError(f"{broken[0]} is a link that leads nowhere")
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing} is a file")
    with tempfile.TemporaryFile(dir=existing):
        pass


def remove_unfinished(folder: Path, older_s: float) -> None:
    """Remove what killed writers have left below `folder` more than `older_s` ago. A younger one may still be written."""
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names if _UNFINISHED.fullmatch(name)):
            with suppress(FileNotFoundError, PermissionError):  # it has gone meanwhile, or is another user's
                if time.time() - path.stat().st_mtime > older_s:
                    path.unlink()


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.replace(temporary, path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if not isinstance(value, (str, int, float, type(None))) and hasattr(value, "item"):
        value = value.item()  # a NumPy scalar
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        os.close(descriptor)
