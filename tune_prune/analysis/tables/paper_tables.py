"""The tables of a paper: LaTeX, Markdown and CSV of each, and one document with all. Every number is from the findings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tune_prune.analysis.render.latex import document, latex_table, markdown_table
from tune_prune.analysis.render.paragraphs import write_paragraphs
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables import appendix_tables, effect_tables, result_tables
from tune_prune.analysis.tables.table_data import PaperTable
from tune_prune.core.files import atomic_write_text

__all__ = ["PaperTable", "tables", "write_paragraphs", "write_tables"]

_MAKERS: tuple[Callable[[Findings], PaperTable | None], ...] = (
    *(result_tables.optimal, result_tables.selection_rules, result_tables.tasks, result_tables.methods),
    *(effect_tables.seq_len, effect_tables.num_samples, effect_tables.effects, effect_tables.correlations),
    *(result_tables.architecture, result_tables.impact),
    *(appendix_tables.statistics, appendix_tables.trials, appendix_tables.trial_tasks),
)


def tables(findings: Findings) -> list[PaperTable]:
    """All tables that these findings have rows for; those of the appendix last."""
    made = [maker(findings) for maker in _MAKERS]
    return [table for table in made if table is not None]


def write_tables(findings: Findings, folder: Path) -> list[Path]:
    """Write each table as .tex (to \\input; needs booktabs, and longtable for the appendix), .md and .csv (full precision),
    and all_tables.tex, a document that compiles as it stands. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tables(findings)
    texts = {"all_tables.tex": document(made)}
    for table in made:
        texts[f"{table.name}.tex"] = latex_table(table)
        texts[f"{table.name}.md"] = markdown_table(table)
        texts[f"{table.name}.csv"] = table.numbers.to_csv(index=False, lineterminator="\n")
    for name, text in texts.items():
        atomic_write_text(folder / name, text)
    return [folder / name for name in texts]
