"""final_analysis_report.txt: the decision and its evidence on the first screen, then the tables of each model.

templates/report.txt.j2 says it in English; the catalogue of messages has the other languages.
"""

from __future__ import annotations

import re

from tune_prune.analysis.input.study import Message
from tune_prune.analysis.render.messages import LANGUAGES, note_sentences, printed
from tune_prune.analysis.render.templating import environment
from tune_prune.analysis.render.text import COLUMNS, fold, text_table, width
from tune_prune.analysis.statistics.cross_fit import CrossFit
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.table import Table
from tune_prune.analysis.tables.trial_tables import problem_counts
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS

SHOWN_PROBLEMS = 5  # on the first screen; the appendix has all of them


def report(findings: Findings, language: str = "en") -> str:
    """Return the text of the report in "en" or "zh", of at most 100 columns. UserError for an unknown language."""
    if language not in LANGUAGES:
        raise UserError(f"the report's language is {language!r}; it must be one of {', '.join(LANGUAGES)}")

    def show(table: Table, notes: bool = True) -> str:
        """Return the table, if it has rows, and its notes."""
        sentences = " ".join(note_sentences(table, language, best="*") if notes else [])
        return (text_table(table, language) if table.rows else "") + (f"\n  {sentences}\n" if sentences else "")

    problems = {label: _problems(result) for label, result in findings.models.items()}
    kinds = {label: problem_counts(result.model.problems) for label, result in findings.models.items()}
    template = environment(language).get_template("report.txt.j2")
    text = template.render(
        findings=findings,
        tables=all_tables(findings),
        hyperparameters=HYPERPARAMETERS,
        kinds=kinds,
        problems=problems,
        appendix=[label for label, texts in problems.items() if len(texts) > SHOWN_PROBLEMS],
        page_width=COLUMNS,
        Message=Message,
        shares=_shares,
        show=show,
        width=width,
    )
    text = re.sub(r"(?<=[\u2e80-\uff60]) (?=[\u2e80-\uff60])", "", text)  # Chinese has no blanks between words
    return re.sub(r"\n{3,}", "\n\n", "\n".join(map(fold, text.splitlines()))).strip("\n") + "\n"


def _shares(fit: CrossFit) -> list[str]:
    """Return how often each configuration is chosen, the most frequent first."""
    shares = sorted(fit.chosen.items(), key=lambda item: (-item[1], item[0]))
    return [f"{name} {printed(share, 'percent')}" for name, share in shares]


def _problems(result: ModelFindings) -> list[str]:
    """Return the problems of each place, in the order in which they were found."""
    by_place: dict[str, list[str]] = {}
    for problem in result.model.problems:
        by_place.setdefault(problem.where, []).append(problem.what)
    texts = (": ".join(filter(None, (where, ", ".join(what)))) for where, what in by_place.items())
    return [" ".join(text.split()) for text in texts]
