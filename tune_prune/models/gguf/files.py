"""GGUF files as models: what one is by its content, and the folder in the user's cache that holds its weights as safetensors.
Nothing heavy is imported: `convert` fills the folder."""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, cache_folder, parse_json
from tune_prune.core.hashing import digest

VERSION = 2  # of how files are read: the same file read in another way is another model
RECORD = "gguf.json"  # in the folder: what it was read from
SUFFIX = ".gguf"
FLOATS = ("F32", "F16", "BF16")  # what files call matrices that are not quantised


@dataclass(frozen=True)
class GgufOrigin:
    """A GGUF file that a model was read from."""

    file: str  # its name
    quantization: str  # e.g. Q4_1; F16, BF16 or F32 where it is none
    sha256: str  # of the file

    def __str__(self) -> str:
        return f"{self.file} ({self.quantization}, SHA-256 {self.sha256[:16]}...)"


def folder_of(file: Path) -> Path:
    """Return where the model of a GGUF file is kept as safetensors; it need not exist yet. Named by content, so that a copy of the
    file is the same model. Raises UserError for a file that cannot be read."""
    return _models() / f"{_sha256(file)}-{VERSION}"


def origin(folder: Path, file: str) -> GgufOrigin:
    """Return what the model in `folder` (of `folder_of`, filled) was read from. Raises DamagedFile."""
    return GgufOrigin(Path(file).name, str(parse_json(folder / RECORD)["quantization"]), folder.name.partition("-")[0])


def head(folder: Path) -> str:
    """Return in a clause what became of a head that the file stores though it is the embeddings again; "" of others."""
    return str(parse_json(folder / RECORD)["head"])


def fingerprint(folder: Path) -> str:
    """Return what the model in `folder` is: the file's content, and how it is read."""
    return digest({"gguf": folder.name} | ({"head": "embeddings"} if head(folder) else {}))


def _models() -> Path:
    return cache_folder() / "models"


def _sha256(file: Path) -> str:
    """Return the SHA-256 of all bytes, kept beside the models by the file's state, as gigabytes take seconds."""
    try:
        about = file.stat()
        state = (about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)
        kept = _models() / f"{digest([str(file), *state])}.sha256"
        with contextlib.suppress(OSError, ValueError):  # ValueError: not even text
            if re.fullmatch("[0-9a-f]{64}", text := kept.read_text(encoding="ascii")):
                return text
        with file.open("rb") as content:
            hexdigest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"model file {file} cannot be read ({error.strerror or error}); make it readable, or name another one"
        ) from error
    with contextlib.suppress(OSError):  # `convert` says where nothing can be written
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(kept, hexdigest)
    return hexdigest
