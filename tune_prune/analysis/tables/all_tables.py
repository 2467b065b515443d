"""Every table of the findings, and their files: LaTeX, Markdown and CSV of each, and one document with all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from tune_prune.analysis.render.files import PACKAGES, csv_text, document, latex_table, markdown_table
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables import configurations, hyperparameters, trial_tables
from tune_prune.analysis.tables.table import Table
from tune_prune.core.store import FolderStore


@lru_cache(maxsize=1)  # report, page and files have the same
def all_tables(findings: Findings) -> Mapping[str, Table]:
    """Return all tables that these findings have rows for, by their keys; those of the appendix last."""
    made = [
        configurations.best_configurations(findings),
        configurations.smallest(findings),
        configurations.accuracy_by_size(findings),
        configurations.pareto(findings),
        configurations.changes(findings),
        configurations.selection_rules(findings),
        trial_tables.draws(findings),
        configurations.task_accuracies(findings),
        hyperparameters.methods(findings),
        hyperparameters.method_pairs(findings),
        *hyperparameters.levels(findings),
        hyperparameters.effects(findings),
        hyperparameters.correlations(findings),
        hyperparameters.extreme_layers(findings),
        configurations.architecture(findings),
        configurations.transfer(findings),
        configurations.configuration_impact(findings),
        trial_tables.statistics(findings),
        trial_tables.trials(findings),
        trial_tables.trial_tasks(findings),
        trial_tables.measures(findings),
    ]
    return {table.key: table for table in made if table is not None}


def write_tables(findings: Findings, folder: Path) -> list[Path]:
    """Write each table as .tex (to \\input; its first line says with which packages), .md and .csv (full precision), and
    all_tables.tex, a document that compiles as it stands. Returns the paths."""
    made = all_tables(findings)
    texts = {"all_tables.tex": document(list(made.values()))}
    for key, table in made.items():
        tex = f"% The document needs {PACKAGES}\n{latex_table(table)}"
        texts |= {f"{key}.tex": tex, f"{key}.md": markdown_table(table), f"{key}.csv": csv_text(table)}
    return FolderStore(folder).put_all(texts)
