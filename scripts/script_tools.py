"""Tools of all scripts: a parser that shows the script's docstring, and tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from tune_prune.commands.flags import output_file
from tune_prune.core.errors import whole_number

COUNT, FROM_ZERO = whole_number(1, 10**9), whole_number(0, 10**9)  # types of flags


def script_parser(doc: str | None, output: str = "", **options: Any) -> argparse.ArgumentParser:
    """Make a parser whose --help shows `doc`, with --output FILE where `output` says what goes there."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
    if output:
        p.add_argument("--output", type=output_file, metavar="FILE", help=output)
    return p


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows under their head as a Markdown table."""
    first, *others = (f"| {' | '.join(cells).strip()} |" for cells in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *others])


def shown(ppl: float) -> str:
    """Return a perplexity as tables and charts say it."""
    return f"{ppl:.1f}" if ppl < 1000 else f"{ppl:,.0f}"


def table(rows: Iterable[Sequence[object]]) -> str:
    """Format rows (the first is the header) in aligned columns: the first column left, numbers right."""
    texts = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    )


def _cell(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.2f}" if abs(cell) >= 1 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
