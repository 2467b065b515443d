"""The environment of `make test-oldest` follows from pyproject.toml."""

from __future__ import annotations

import oldest_requirements
import pytest


def test_every_lower_bound_becomes_a_pin(capsys: pytest.CaptureFixture[str]) -> None:
    oldest_requirements.main()
    lines = capsys.readouterr().out.splitlines()
    assert "transformers==5.10.*" in lines and "ray[tune]==2.55.*" in lines and "pyarrow==21.0.*" in lines
    assert all("==" in line for line in lines if line != "types-PyYAML")
    for requirement in ("torch<3", "torch~=2.13", "torch>=2.13,<3", "torch>=2.13; python_version<'3.13'"):
        with pytest.raises(ValueError, match="is not of the form package>=version"):
            oldest_requirements.oldest(requirement)
