"""Where results are kept: a folder (`Path`), or the beginning of names in a bucket (`ObjectPath`), which `location` tells apart."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from tune_prune.core.errors import UserError

SCHEMES = ("s3", "gs", "memory")  # of objects; file:// is a folder
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
    """Whether `text` is meant as an address, and not as the name of a folder or file: `location` knows it, or refuses it."""
    return "://" in text or _ADDRESS.match(text) is not None


def location(text: str | Location) -> Location:
    """What `text` names: s3://bucket/prefix, gs://bucket/prefix, memory://prefix, file:///folder or a folder. Raises UserError for
    another scheme, for one without a bucket, and for an address with a slash too few."""
    if isinstance(text, (Path, ObjectPath)):
        return text
    scheme, separator, rest = str(text).partition("://")
    if not separator:
        if mistyped := _ADDRESS.match(text):  # a folder named `s3:` would take the results
            scheme, place = mistyped[1].lower(), text[mistyped.end() :].lstrip("/")
            right = f"{scheme}://{'/' * (scheme == 'file')}{place}"
            raise UserError(
                f"{text} is neither a folder nor an address; write {right}, or ./{text} for a folder of that name"
            )
        return Path(text)
    if scheme == "file":
        if not rest.startswith("/"):
            raise UserError(
                f"{text} is no folder's address; write file:///folder, with three slashes, or the folder alone"
            )
        return Path(rest)
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in ("file", *SCHEMES))
        raise UserError(f"{text} is of a scheme that results cannot be kept on; name a folder or use one of {known}")
    if not rest.strip("/"):
        raise UserError(f"{text} names no bucket; write e.g. {scheme}://bucket/prefix")
    return ObjectPath(str(text).rstrip("/"))
