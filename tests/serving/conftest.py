"""The table of what was served: printed at the end, and written to results/serving.json."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "results" / "serving.json"
RESULTS = pytest.StashKey[dict[str, Any]]()
COLUMNS = ("family", "shape", "layers", "dtype", "greedy_equal", "difference", "seconds")


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> dict[str, Any]:
    """What the tests fill in: versions by package, rows of the table, and what is impossible."""
    empty: dict[str, Any] = {"date": date.today().isoformat(), "packages": {}, "impossible": [], "rows": []}
    return pytestconfig.stash.setdefault(RESULTS, empty)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    results = terminalreporter.config.stash.get(RESULTS, None)
    if results is None:
        return
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = [COLUMNS, *(tuple(shown(row.get(name)) for name in COLUMNS) for row in results["rows"])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    terminalreporter.section(f"served by {', '.join(map(' '.join, results['packages'].items()))}")
    for row in table:
        terminalreporter.write_line("  ".join(map(str.ljust, row, widths)).rstrip())
    for row in results["rows"]:
        if "error" in row:
            terminalreporter.write_line(f"{row['family']}, {row['shape']}, {row['layers']}: {row['error']}")
    terminalreporter.write_line(f"Not possible: {'; '.join(results['impossible'])}")
    terminalreporter.write_line(f"Written to {FILE}")


def shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:.1e}" if isinstance(value, float) and value < 0.1 else str(value)
