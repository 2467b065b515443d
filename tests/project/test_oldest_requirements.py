"""The environment of `make test-oldest` follows from pyproject.toml."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("oldest_requirements")


def test_every_lower_bound_becomes_a_pin(script, capsys):
    script.main([])
    lines = capsys.readouterr().out.splitlines()
    assert "transformers==5.10.*" in lines and "ray[tune]==2.55.*" in lines and "pyarrow==21.0.*" in lines
    assert all("==" in line for line in lines if line != "types-PyYAML")


@pytest.mark.parametrize(
    "requirement", ["torch<3", "torch~=2.13", "torch>=2.13,<3", "torch>=2.13; python_version<'3.13'"]
)
def test_a_requirement_of_another_form_is_refused(script, requirement):
    with pytest.raises(ValueError, match="is not of the form package>=version"):
        script.oldest(requirement)
