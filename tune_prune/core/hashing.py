"""Plain data as one text, one digest, one seed: equal content gives an equal result on every machine. The seal of JSON objects
that are kept: a checksum of the object and of the name under which it is kept. And what else keys name: code, and versions of
the libraries that compute."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

CHECKSUM = "checksum"  # the field of a sealed object
_CODE: dict[str, tuple[ModuleSpec | None, str]] = {}  # by module: what it was loaded from, which a reload replaces
LIBRARIES = ("torch", "transformers", "tokenizers")  # by whose versions numbers may differ


def canonical_json(value: Any) -> str:
    """The one text of `value` (plain data): sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any, length: int = 16) -> str:
    """A hex digest of `value` (plain data), equal for equal content."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


def sealed(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` (as JSON has them) with the checksum of them and of `name`, under which they are kept: it holds for no other content
    and in no other place."""
    content = {field: value for field, value in values.items() if field != CHECKSUM}
    return content | {CHECKSUM: hashlib.sha256(canonical_json([name, content]).encode()).hexdigest()}


def is_sealed(values: Mapping[str, Any]) -> bool:
    """Whether there is a checksum; files of older versions have none."""
    return CHECKSUM in values


def seed_for(seed: int, purpose: str) -> int:
    """A seed for one purpose, so that no random choice depends on the order in which others are made."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:4], "big")


def public(version: str) -> str:
    """A version without the name of its build: "2.13.0" of "2.13.0+cpu". Keys name the device apart."""
    return version.partition("+")[0]


@cache
def library_versions() -> dict[str, str]:
    """The public versions of LIBRARIES, as they are installed."""
    return {name: public(importlib.metadata.version(name)) for name in LIBRARIES}


def code_digest(module: ModuleType) -> str:
    """A digest of what the code of a module says: comments, docstrings and layout do not count, nor does the version of Python.
    Its file is read once each time that the module is loaded, as what is edited later does not run."""
    spec, known = module.__spec__, _CODE.get(module.__name__)
    if known is None or known[0] is not spec:
        assert module.__file__ is not None
        known = _CODE[module.__name__] = (spec, digest(_plain_code(ast.parse(Path(module.__file__).read_bytes()))))
    return known[1]


def _plain_code(node: Any) -> Any:
    """A syntax tree as plain data, without texts that are statements and without empty fields, which newer Pythons add."""
    if isinstance(node, ast.AST):
        fields = {name: _plain_code(value) for name, value in ast.iter_fields(node) if value not in (None, [])}
        return [type(node).__name__, fields]
    if isinstance(node, list):
        return [_plain_code(one) for one in node if not (isinstance(one, ast.Expr) and _is_text(one.value))]
    return repr(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
