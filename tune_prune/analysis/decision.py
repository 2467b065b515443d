"""The decision of an analysis in sentences: the first lines of its screen, and the same words on the page."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from tune_prune.analysis.render.messages import format_message, names, pm, printed
from tune_prune.analysis.render.text import fold
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.analysis.verdict import clearly_better, in_words, verdicts

_INDENT = 13  # columns before the text of a line
_SHOWN = 20  # models that a line names


def decision(findings: Findings, keep: Mapping[str, str]) -> str:
    """The best of each model, the number to quote, and the command that keeps the first (`keep`: by label)."""
    every = verdicts(findings).values()
    winners, verdict = [one.winner for one in every], {own.model.label: one for one in every for own in one.members}
    if findings.rule == "smallest":
        winners = list(findings.smallest.values())
    lines = [("", f"{found.model.label}: {sentence(found, verdict[found.model.label].rows)}") for found in winners]
    lines[0] = ("best", lines[0][1])
    if findings.rule != "accuracy":
        lines.append(("", f"chosen by --rule {findings.rule}: {format_message(findings.meaning(findings.rule))}"))
    alone = [one for one in winners if len(verdict[one.model.label].members) == 1]  # others were chosen from more
    fits = {f" for {one.model.label}": one.cross_fit for one in alone if one.cross_fit is not None}
    if scores := [f"{pm(fit.corrected, fit.stderr)}{of * (len(winners) > 1)}" for of, fit in fits.items()]:
        quoted = names(scores, most=_SHOWN)
        lines.append(("", f"quote {quoted} in a paper: cross-fitted, without the luck of being chosen"))
    text = [_folded(f"{head:{_INDENT}}\t{line}") for head, line in lines]
    able = [found.model.label for found in winners if found.model.label in keep]
    text += [f"{'keep':{_INDENT}}{keep[label]}" for label in able[:1]]  # in one line, to be copied
    if others := able[1:]:
        rest = "the same with the best_config.json of each and another --output"
        text.append(f"{'':{_INDENT}}for {names(others, most=_SHOWN)} {rest}")
    return "\n".join(text)


def _folded(line: str) -> str:
    """In lines of a screen, none of which ends inside a number and its error."""
    return fold(line.replace(" ± ", "_±_")).replace("_±_", " ± ")


def sentence(found: ModelFindings, compared: pd.DataFrame) -> str:
    """The configuration that was chosen, its accuracy and what it keeps, and how many others of those that were `compared`
    (`Verdict.rows`) are too close to call."""
    best, retained = found.best, found.retained(found.best["acc_mean"])
    kept = "" if retained is None else f", {printed(retained, 'percent')} of the original's"
    accuracy = pm(best["acc_mean"], best["acc_mean_stderr"])
    return f"{in_words(found)} ({best['name']}): accuracy {accuracy}{kept}; {close_calls(found, compared)}"


def close_calls(found: ModelFindings, rows: pd.DataFrame | None = None) -> str:
    """How many of the others in `rows` (None: its own) cannot be told from the most accurate (95%), as a clause."""
    rows = found.eligible if rows is None else rows
    top, p_value, compared = rows["name"].iloc[0], rows["p_value"], int(rows["p_value"].count()) - 1
    if len(rows) == 1:
        return "no other configuration is complete"
    if math.isnan(p_value.iloc[0]) or not compared:
        return "standard errors are missing, so it is open which others are too close to call"
    tied = [name for name in rows.loc[p_value > 0.05, "name"] if name != top]
    chosen, one = found.best["name"], compared == 1
    if chosen == top and not tied:
        return clearly_better(compared, len(rows) - 1)
    of_all = "the other one" if one and tied else f"{len(tied) or 'none'} of {compared} others"
    whom = "" if chosen == top else f" with the most accurate, {top}"
    apart = "" if chosen in (top, *tied) else "; the chosen one is not among them"
    return f"{of_all} {'is' if len(tied) < 2 else 'are'} too close to call{whom}{apart}"
