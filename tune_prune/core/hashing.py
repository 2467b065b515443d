"""Digests and seeds of plain data, equal on every machine for equal content; the seal of JSON objects that are kept; and what else
keys name: code, and versions of the libraries that compute."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tune_prune.core.files import to_json

_CODE: dict[str, tuple[ModuleSpec | None, str]] = {}  # by module: what it was loaded from, which a reload replaces
LIBRARIES = ("torch", "transformers", "tokenizers")  # by whose versions numbers may differ


def canonical_json(value: Any) -> str:
    """Return the one text of `value` (plain data): sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any, length: int = 16) -> str:
    """Return a hex digest of `value` (plain data), equal for equal content."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


_SEAL = re.compile(rb'\{\n  "checksum": "([0-9a-f]{64})",')


def sealed(name: str, values: Mapping[str, Any]) -> str:
    """Return the JSON text of `values`, which begins with a checksum of the rest and of `name`, under which it is kept: it holds
    for no other content and in no other place. `values` are not empty."""
    text = to_json(values)
    return f'{{\n  "checksum": "{_checksum(name, text.encode())}",{text[1:]}'


def unsealed(name: str, content: bytes) -> bytes:
    """Return the text that `sealed` was made of. Raises ValueError, a clause "it is ...", for what was not sealed as `name`."""
    seal = _SEAL.match(content)
    if seal is None:
        raise ValueError("without a checksum (made by an older version, or changed by hand)")
    text = b"{" + content[seal.end() :]
    if _checksum(name, text) != seal[1].decode():
        raise ValueError("damaged or of another place (its checksum does not match)")
    return text


def _checksum(name: str, text: bytes) -> str:
    return hashlib.sha256(name.encode() + b"\n" + text).hexdigest()


def seed_for(seed: int, purpose: str) -> int:
    """Return a seed for one purpose, so that no random choice depends on the order in which others are made."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:4], "big")


def public(version: str) -> str:
    """Return a version without the name of its build: "2.13.0" of "2.13.0+cpu". Keys name the device apart."""
    return version.partition("+")[0]


@cache
def library_versions() -> dict[str, str]:
    """Return the public versions of LIBRARIES, as they are installed."""
    return {name: public(importlib.metadata.version(name)) for name in LIBRARIES}


def code_digest(module: ModuleType) -> str:
    """Return a digest of what the code of a module says: comments, docstrings and layout do not count, nor does the version
    of Python. Its file is read once each time that the module is loaded, as what is edited later does not run."""
    spec, known = module.__spec__, _CODE.get(module.__name__)
    if known is None or known[0] is not spec:
        assert module.__file__ is not None
        known = _CODE[module.__name__] = (spec, digest(_plain_code(ast.parse(Path(module.__file__).read_bytes()))))
    return known[1]


def _plain_code(node: Any) -> Any:
    """Return a syntax tree as plain data, without texts that are statements and empty fields, which newer Pythons add."""
    if isinstance(node, ast.AST):
        fields = {name: _plain_code(value) for name, value in ast.iter_fields(node) if value not in (None, [])}
        return [type(node).__name__, fields]
    if isinstance(node, list):
        texts = [
            one for one in node if isinstance(one, ast.Expr) and isinstance(getattr(one.value, "value", None), str)
        ]
        return [_plain_code(one) for one in node if one not in texts]
    return repr(node)
