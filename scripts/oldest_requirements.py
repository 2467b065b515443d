"""Print the oldest packages that pyproject.toml admits, for an environment to test in (`make test-oldest`).

    python scripts/oldest_requirements.py > oldest.txt      then pip install --requirement oldest.txt

Of each lower bound the newest patch: `transformers>=5.10` becomes `transformers==5.10.*`, of which there is no 5.10.0.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
BOUND = re.compile(r"(?P<package>[\w.-]+(\[[\w,-]+\])?)(>=(?P<major>\d+)(\.(?P<rest>\d+(\.\d+)*))?)?$")


def oldest(requirement: str) -> str:
    """Return the requirement `package>=version` as `package==version.*`; 17 is 17.0. Raises ValueError for one of another
    form."""
    bound = BOUND.match(requirement.replace(" ", ""))
    if bound is None:
        raise ValueError(f"{requirement!r} is not of the form package>=version")
    return bound["package"] + (f"=={bound['major']}.{bound['rest'] or 0}.*" if bound["major"] else "")


def main() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        print(oldest(requirement))


if __name__ == "__main__":
    main()
