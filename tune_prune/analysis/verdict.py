"""The verdict of a search: of each model the one configuration that won, trained or not, and how sure that is; the tables that a
search prints at its end; and the decision of an analysis in sentences, as its screen and the page have them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.input.rows import ranked, without_draw
from tune_prune.analysis.render.messages import format_message, names, note_sentences, pm, printed
from tune_prune.analysis.render.text import fold, text_table
from tune_prune.analysis.statistics.comparison import Comparison, compare, paired_scores
from tune_prune.analysis.statistics.differences import JUDGED
from tune_prune.analysis.statistics.draws import STOPPED_DRAWS, shared
from tune_prune.analysis.statistics.effects import methods_reading
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.analysis.statistics.rules import score
from tune_prune.analysis.tables.configurations import (
    PARAMETERS,
    RETAINED,
    accuracy_notes,
    changes,
    hyperparameter_columns,
    limits,
    of_model,
    transfer,
    window_notes,
)
from tune_prune.analysis.tables.table import Column, Table
from tune_prune.analysis.tables.trial_tables import counts, trials
from tune_prune.core.hashing import seed_for
from tune_prune.core.hyperparameters import HYPERPARAMETERS, RECIPE
from tune_prune.core.measures import ACCURACY_DIGITS, MEASURES

_CHOSEN_BY = {
    "perplexity": ("the lowest perplexity", "ppl"),
    "gold_logprob": ("the highest log-probability of right answers", "nats"),
    "kl": ("the lowest KL, the distance from the original's predictions", "nats"),
}


@dataclass(frozen=True, eq=False)
class Verdict:
    """The verdict on one model with one pruning ratio. `members` are its findings without training and, where there are any, with
    it."""

    model: str  # the label without training
    members: Sequence[ModelFindings]
    rule: str  # one of MEASURES

    @cached_property
    def winner(self) -> ModelFindings:
        """Whose best is the best of all; of equal ones the first, which is not trained."""
        scores = score(pd.DataFrame([result.best for result in self.members]), self.rule)
        return self.members[0 if np.isnan(scores).all() else int(np.nanargmax(scores))]

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The eligible rows of all members, the most accurate first, with the `p_value` of a comparison of all of them."""
        if len(self.members) == 1:
            return self.members[0].eligible
        rows = pd.concat([result.eligible for result in self.members], ignore_index=True)
        order = rows["acc_mean"].astype("float64").round(ACCURACY_DIGITS)
        rows = rows.loc[order.sort_values(ascending=False, kind="stable").index].reset_index(drop=True)
        return rows.assign(p_value=self._compared(rows).p_value)

    def _compared(self, rows: pd.DataFrame) -> Comparison:
        first = self.members[0]
        scores, _ = paired_scores(rows, first.items)
        errors, draws = (rows[name].to_numpy(np.float64) for name in ("acc_mean_stderr", "draw_stderr"))
        of_items = np.sqrt(np.maximum(0, errors**2 - np.nan_to_num(draws) ** 2))
        between = [result.draw_variance for result in self.members]
        control = [result.control_variances.get("acc_mean") for result in self.members]
        return compare(
            rows["acc_mean"].to_numpy(np.float64),
            of_items,
            scores,
            np.random.default_rng(seed_for(first.seed, f"bootstrap of all of {self.model}")),
            spreads=shared(rows, *(next(filter(None, variances), None) for variances in (between, control))),
        )

    @property
    def marked(self) -> set[str]:
        """Names of the most accurate and of what is too close to it to call, as far as errors are known."""
        p_value = self.rows["p_value"]
        return set() if np.isnan(p_value.iloc[0]) else set(self.rows.loc[p_value > 0.05, "name"])

    @property
    def line(self) -> str:
        """`best`, for the screen."""
        result, parts = self.winner, [_accuracy(self.winner)]
        if self.rule == "accuracy":
            comparable = self.marked and self.rows["p_value"].count() > 1
            parts += [close_calls(result, self.rows)] if comparable else []
        else:
            what, form = _CHOSEN_BY[self.rule]
            value = abs(float(score(pd.DataFrame([result.best]), self.rule)[0]))
            shown_value = printed(-value if self.rule == "gold_logprob" else value, form)
            parts = [f"{what}, {shown_value}, as --objective asks", *parts, "the table below goes by accuracy"]
        return fold(f"best         \t{self.model}: {in_words(result)}: {'; '.join(parts)}")


def in_words(result: ModelFindings) -> str:
    """Return the best configuration of a model for a person, e.g. `taylor on 128 samples of 64 tokens, repaired`."""
    best, rows = result.best, result.model.rows
    shown = [name for name in HYPERPARAMETERS if name in rows and best["method"] in methods_reading(rows, name)]
    return without_draw(best["configuration"]).in_words(shown)


def verdicts(findings: Findings) -> dict[str, Verdict]:
    """Return the verdicts by the model's label without training."""
    members: dict[str, list[ModelFindings]] = {}
    for result in findings.models.values():
        members.setdefault((result.untrained or result).model.label, []).append(result)
    rule = findings.rule if findings.rule in MEASURES else "accuracy"
    return {label: Verdict(label, results, rule) for label, results in members.items()}


def winners(findings: Findings) -> Mapping[str, str]:
    """Return by the model's label without training the label of the findings whose best has won: the model's own, or that of its
    training."""
    return {label: verdict.winner.model.label for label, verdict in verdicts(findings).items()}


def folder_name(label: str) -> str:
    """Return a name for the pruned model of that label that needs no quotes in a shell and that a hub takes:
    tiny-llama-0.3-pruned."""
    plain = re.sub(r"[^\w.-]+", "-", label, flags=re.ASCII).strip("-.")
    return f"{plain or 'model'}-pruned"


_INDENT = 13  # columns before the text of a line
_SHOWN = 20  # models that a line names


def decision(findings: Findings, keep: Mapping[str, str]) -> str:
    """Return the best of each model, the number to quote, and the command that keeps the first (`keep`: by label)."""
    every = verdicts(findings).values()
    winners = [one.winner for one in every]
    verdict = {result.model.label: one for one in every for result in one.members}
    if findings.rule == "smallest":
        winners = list(findings.smallest.values())
    lines = [("", f"{result.model.label}: {sentence(result, verdict[result.model.label].rows)}") for result in winners]
    lines[0] = ("best", lines[0][1])
    if findings.rule != "accuracy":
        lines.append(("", f"chosen by --rule {findings.rule}: {format_message(findings.meaning(findings.rule))}"))
    alone = [one for one in winners if len(verdict[one.model.label].members) == 1]  # others were chosen from more
    fits = {f" for {one.model.label}": one.cross_fit for one in alone if one.cross_fit is not None}
    if scores := [f"{pm(fit.corrected, fit.stderr)}{of * (len(winners) > 1)}" for of, fit in fits.items()]:
        quoted = names(scores, most=_SHOWN)
        lines.append(("", f"quote {quoted} in a paper: cross-fitted, without the luck of being chosen"))
    text = [_folded(f"{head:{_INDENT}}\t{line}") for head, line in lines]
    able = [result.model.label for result in winners if result.model.label in keep]
    text += [f"{'keep':{_INDENT}}{keep[label]}" for label in able[:1]]  # in one line, to be copied
    if others := able[1:]:
        rest = "the same with the best_config.json of each and another --output"
        text.append(f"{'':{_INDENT}}for {names(others, most=_SHOWN)} {rest}")
    return "\n".join(text)


def _folded(line: str) -> str:
    """Fold a text into lines of a screen, none of which ends inside a number and its error."""
    return fold(line.replace(" ± ", "_±_")).replace("_±_", " ± ")


def sentence(result: ModelFindings, compared: pd.DataFrame) -> str:
    """Return the configuration that was chosen, its accuracy and what it keeps, and how many others of those that were `compared`
    (`Verdict.rows`) are too close to call."""
    return f"{in_words(result)} ({result.best['name']}): {_accuracy(result)}; {close_calls(result, compared)}"


def _accuracy(result: ModelFindings) -> str:
    best, retained = result.best, result.retained(result.best["acc_mean"])
    runs = f" (mean of {best['draws']} runs with other sample text)" if best["draws"] > 1 else ""
    share = "" if retained is None else f", {printed(retained, 'percent')} of the original's"
    return f"accuracy {pm(best['acc_mean'], best['acc_mean_stderr'])}{runs}{share}"


def close_calls(result: ModelFindings, rows: pd.DataFrame | None = None) -> str:
    """Return how many of the others in `rows` (None: its own) cannot be told from the most accurate (95%), as a clause."""
    rows = result.eligible if rows is None else rows
    top, p_value, compared = rows["name"].iloc[0], rows["p_value"], int(rows["p_value"].count()) - 1
    if len(rows) == 1:
        return "no other configuration is complete"
    if math.isnan(p_value.iloc[0]) or not compared:
        return "standard errors are missing, so it is open which others are too close to call"
    tied = [name for name in rows.loc[p_value > 0.05, "name"] if name != top]
    chosen, one = result.best["name"], compared == 1
    if chosen == top and not tied:
        of_those = "" if compared == len(rows) - 1 else " that could be compared"
        return f"clearly better than {'the other one' if one else f'all {compared} others'}{of_those}"
    of_all = "the other one" if one and tied else f"{len(tied) or 'none'} of {compared} others"
    whom = "" if chosen == top else f" with the most accurate, {top}"
    apart = "" if chosen in (top, *tied) else "; the chosen one is not among them"
    return f"{of_all} {'is' if len(tied) < 2 else 'are'} too close to call{whom}{apart}"


_OF_ORIGINAL = replace(RETAINED, label="Of original")  # its accuracy; short, as tables on the screen have 100 columns
# Ends of the kinds of warnings that a search shows.
_ON_SCREEN = (
    *("_at_chance", "_devices", "items_in_calibration", "items_after_eos", "one_draw_leads"),
    *(f"worse_{name}" for name in JUDGED),
)


def final_table(findings: Findings, top: int = 5) -> str:
    """Return per model, trained or not: the original, the best configuration of each method and the `top` best; then the models
    compared. Lines have 100 columns at most."""
    every, by_label = trials(findings), verdicts(findings)
    tables = {label: _best_trials(findings, verdict, every, top) for label, verdict in by_label.items()}
    blocks = []
    for label in sorted({*tables, *findings.without}):
        if label in findings.without:
            model = findings.study.models[label]
            nothing = STOPPED_DRAWS if len(ranked(model.rows)) else "no complete trial"
            blocks.append(f"{label}: {counts(model)}\n  {nothing}\n")
            continue
        warnings = [m for one in by_label[label].members for m in one.warnings if m.kind.endswith(_ON_SCREEN)]
        said = dict.fromkeys(f"  ! {format_message(message)}\n" for message in warnings)
        blocks.append(f"{tables[label].title}\n{text_table(tables[label])}{''.join(said)}")
    if (across := _across(findings, [verdict.winner.model.label for verdict in by_label.values()])) is not None:
        blocks.append(f"{across.title}\n{text_table(across)}")
    changed = changes(findings)
    if changed is not None and (trained := [row for row in changed.rows if row["kind"] == "training"]):
        steps = [column.key for column in changed.columns if (row := RECIPE.get(column.key)) and row.of == "recovery"]
        keys = ("before_acc_mean", "acc_mean", "gain", "kl_text_change", "kl_tasks_change", "worse")
        shown = changed.pick("model", "config", *steps, *keys)
        blocks.append(f"What training changes, gain in points\n{text_table(shown.with_rows(trained))}")
    notes = [note for table in tables.values() for note in note_sentences(table, best="*")]
    text = "\n".join([*blocks, " ".join(dict.fromkeys(notes))])
    return "\n".join(map(fold, text.splitlines()))


def _best_trials(findings: Findings, verdict: Verdict, every: Table, top: int) -> Table:
    """Return the first rows of the table of its trials, below one for the original."""
    ranks = {name: place for place, name in enumerate(verdict.rows["name"], 1)}
    rows: list[dict[str, Any]] = [
        {
            **row,
            "rank": ranks[row["name"]],
            "tied": row["name"] in verdict.marked,
            "training": "yes" if result.model.trained else "–",
        }
        for result in verdict.members
        for row in every.of(result.model.label).rows
        if row["rank"] is not None
    ]
    rows.sort(key=lambda row: row["rank"])
    first = {(row["method"], row["training"]): row["rank"] for row in reversed(rows)}
    few = len(rows) <= 2 * top
    shown = [row for row in rows if few or row["rank"] <= top or row["rank"] == first[row["method"], row["training"]]]
    result, parts = verdict.members[0], [counts(one.model) for one in verdict.members]
    title = f"{verdict.model}: {'; trained: '.join(parts)}"
    if len(shown) < len(rows):
        title += f"; the best of each method and the {top} best"
    names = [column.key for column in hyperparameter_columns(findings)]
    reading = {name: methods_reading(result.model.rows, name) for name in names}
    made: list[dict[str, Any]] = [{"method": "original", **result.model.baseline}] if result.model.baseline else []
    made += [row | {name: None for name in names if row["method"] not in reading[name]} for row in shown]
    made = [{**row, "retained": result.retained(row.get("acc_mean")), **limits(result)} for row in made]
    columns = [*every.pick(*names, "ppl", "draws", "acc_mean").columns, _OF_ORIGINAL, PARAMETERS]
    if len(parts) > 1:
        columns.insert(len(names), Column("training", "Training", style="setting"))
    notes = [*accuracy_notes(findings), *window_notes(findings)]
    return replace(every, title=title, columns=columns, rows=made, notes=notes)


def _across(findings: Findings, labels: Collection[str]) -> Table | None:
    """Return what the models of these labels lose with each other's best, in points, also with the best single configuration for
    all; None with fewer than two."""
    table = transfer(findings)
    if table is None or findings.transfer is None or len(labels) < 2:
        return None
    for_all, title = findings.transfer.best_for_all, f"{table.title}, in points; –: not tried"
    rows = [row for row in table.rows if row["model"] in labels]
    table = replace(table.pick("model", "name", *map(of_model, labels)), title=title, rows=rows)
    losses = [for_all["models"].get(row["model"], {}) if for_all["config"] else {} for row in rows]
    if not any(losses):
        return table
    column = Column("loss_points", f"Best for all: {for_all['config']}", "points", "loss_points_stderr")
    values = [{name: loss.get(name) for name in ("loss_points", "loss_points_stderr")} for loss in losses]
    rows = [{**row, **loss} for row, loss in zip(rows, values, strict=True)]
    return replace(table, columns=[*table.columns, column], rows=rows)
