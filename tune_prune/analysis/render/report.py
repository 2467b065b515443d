"""final_analysis_report.txt: the decision and its evidence on the first screen, then the tables of each model.

Its sentences are messages of the catalogue and its tables those of all_tables, so that every language says the same.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from tune_prune.analysis.render.messages import (
    LANGUAGES,
    format_message,
    label,
    note_sentences,
    number,
    percent,
    perplexity,
    pm,
)
from tune_prune.analysis.render.text import COLUMNS, pad, text_table, width, wrap
from tune_prune.analysis.statistics.findings import Findings, Message, ModelFindings
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.configurations import ratio
from tune_prune.analysis.tables.table import Table, missing
from tune_prune.core.config import HYPERPARAMETERS
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text

SHOWN_PROBLEMS = 5  # on the first screen; the appendix has all of them
_LABEL = 17  # columns of the names of the entries
_TOP = 5
_RULE = "=" * COLUMNS + "\n"


def write_report(findings: Findings, path: Path, language: str = "en") -> None:
    """Write the report to `path`, atomically: UTF-8, at most 100 columns. UserError for an unknown language."""
    atomic_write_text(path, report(findings, language))


def report(findings: Findings, language: str = "en") -> str:
    """The text of the report in "en" or "zh"."""
    if language not in LANGUAGES:
        raise UserError(f"the report's language is {language!r}; it must be one of {', '.join(LANGUAGES)}")
    return _Report(findings, language).text()


class _Report:
    def __init__(self, findings: Findings, language: str) -> None:
        self.findings = findings
        self.language = language
        self.tables = all_tables(findings)
        self.say = partial(format_message, language=language)
        self.problems = {name: _problems(found) for name, found in findings.models.items()}

    def message(self, kind: str, **values: Any) -> str:
        return self.say(Message(kind, values))

    def text(self) -> str:
        findings = self.findings
        rule = {"rule": findings.rule, "meaning": Message(f"rule_{findings.rule}")}
        parts = [_heading(self.message("report_title")), "\n", wrap(self.message("report_intro", **rule))]
        parts += [self._decision(name, found) for name, found in findings.models.items()]
        if findings.without:
            parts.append("\n" + wrap(self.message("report_without", names=findings.without)))
        parts += [self._sections(name, found) for name, found in findings.models.items()]
        parts += [self._across(), self._appendix()]
        return re.sub(r"\n{3,}", "\n\n", "".join(parts)).rstrip("\n") + "\n"

    def _entry(self, name: str, text: str) -> str:
        """A named value; its text hangs beside the name."""
        return wrap(text, "  " + pad(label(name, self.language), _LABEL), " " * (_LABEL + 2))

    def _table(self, table: Table, *keys: str, notes: bool = True) -> str:
        """The table with the columns `keys`, or all that are short, and what is to be said of it."""
        if keys:
            table = table.pick(*keys)
        text = text_table(table, self.language) + "\n" if table.rows else ""
        said = note_sentences(table, self.language, best="*", tied="~") if notes else []
        return text + (wrap(" ".join(said), "  ") + "\n" if said else "")

    def _decision(self, name: str, found: ModelFindings) -> str:
        """What a reader must know of one model."""
        model, best, statistics = found.model, found.best, found.statistics
        shape = "" if model.shape == "free" else Message("report_shape", {"shape": model.shape})
        counts = {"runs": statistics["runs"], "complete": statistics["complete"]}
        title = self.message("report_model", label=name, ratio=number(100 * model.ratio), shape=shape, **counts)
        columns = [column for column in self.tables["trials"].columns if column.key in HYPERPARAMETERS]
        settings = [f"{c.key} {best['pruning_method' if c.key == 'method' else c.key]}" for c in columns]
        accuracy, dense = pm(best["acc_mean"], best["acc_mean_stderr"]), model.baseline.get("acc_mean")
        retained = ratio(best["acc_mean"], dense)
        kind = "report_accuracy_alone" if retained is None else "report_accuracy"
        ppl, dense_ppl = best["ppl"], model.baseline.get("ppl")
        lines = [
            self._entry("Best", self.message("report_best", name=best["name"], settings=settings)),
            self._entry("Accuracy", self.message(kind, accuracy=accuracy, retained=retained, dense=dense)),
            self._entry("Cross-fitted", self._cross_fitted(found)),
            self._entry(
                "Perplexity",
                perplexity(ppl) if missing(dense_ppl) else self.message("report_perplexity", ppl=ppl, dense=dense_ppl),
            ),
            self._entry("Tied", self._tied(found)),
        ]
        if found.warnings:
            lines.append(f"  {self.message('report_warnings')}\n")
            lines += [wrap(self.say(warning), "  - ") for warning in found.warnings]
        kinds = Counter(problem.kind for problem in model.problems)
        said = [Message("report_problems", {"count": n, "kind": Message(f"problem_{k}")}) for k, n in kinds.items()]
        problems = self.problems[name]
        if len(problems) > SHOWN_PROBLEMS:
            said.append(Message("report_see_appendix"))
        lines.append(self._entry("Input", self.message("report_list", items=said or [Message("report_no_problem")])))
        lines += [wrap(problem, "  - ") for problem in problems if len(problems) <= SHOWN_PROBLEMS]
        return "\n" + _heading(title) + "".join(lines)

    def _cross_fitted(self, found: ModelFindings) -> str:
        fit = found.cross_fit
        if fit is not None:
            accuracy = pm(fit.corrected, fit.stderr)
            return self.message("report_cross_fitted", accuracy=accuracy, folds=fit.folds, repeats=fit.repeats)
        alone = len(found.eligible) == 1
        return self.message(f"report_cross_fitted_{'alone' if alone else 'unknown'}", count=len(found.eligible))

    def _tied(self, found: ModelFindings) -> str:
        others, tied = len(found.eligible) - 1, found.tied[1:]
        if not others or found.basis == "unknown":
            return self.message("report_tied_unknown" if others else "report_tied_alone")
        paired = Message("report_paired") if found.basis == "paired" else ""
        top = found.eligible["name"].iloc[0]
        outside = "" if found.best["name"] in (top, *tied) else Message("report_outside")
        values = {"count": len(tied), "others": others, "top": top, "names": tied, "outside": outside, "paired": paired}
        return self.message("report_tied" if tied else "report_tied_none", **values)

    def _sections(self, name: str, found: ModelFindings) -> str:
        """The tables of one model."""
        own = {key: table.of(name) for key, table in self.tables.items() if table.columns[0].key == "model"}
        parts = [f"\n{_RULE}{wrap(name)}{_RULE}\n", self._section(1), self._table(own["methods"])]
        parts.append(wrap(self.message("report_runs", **found.statistics), "  ") + "\n")
        parts.append(self._section(2))
        parts += [self._table(own[HYPERPARAMETERS[factor].short]) for factor in found.levels]
        if "effects" in own:
            parts.append(self._table(own["effects"]))
        else:
            parts.append(wrap(self.message("note_importance_none", model=name), "  ") + "\n")
        parts.append(self._section(3))
        if "correlations" in own:
            parts.append(self._table(own["correlations"], "measure", "n", "r", "passes", "r_passes", "low"))
            reasons = dict.fromkeys(self.say(item.reason) for item in found.correlations if item.reason is not None)
            parts += [wrap(reason, "  - ") for reason in reasons]
        parts.append(self._section(4))
        extreme = own.get("extreme_layers")
        parts.append(self._table(extreme) if extreme else wrap(self.message("report_not_recorded"), "  "))
        trials = own["trials"]
        ranked = [row for row in trials.rows if row["rank"] is not None]
        first = [row for row in ranked if row["rank"] <= _TOP or (row["ppl_rank"] or _TOP + 1) <= _TOP]
        count = min(_TOP, sum(row["ppl_rank"] is not None for row in ranked))
        parts.append(self._section(5))
        if count > 1:
            agreeing = sum(row["rank"] <= _TOP and (row["ppl_rank"] or _TOP + 1) <= _TOP for row in ranked)
            parts.append(wrap(self.message("report_agreeing", count=count, agreeing=agreeing), "  "))
        trials = trials.with_rows(first)
        parts.append(self._table(trials, "name", "acc_mean", "rank", "ppl", "ppl_rank", notes=False))
        return "".join([*parts, self._section(6), self._detail(found, own)])

    def _section(self, number: int) -> str:
        return "\n" + _heading(self.message(f"section_{number}"), "-")

    def _detail(self, found: ModelFindings, own: dict[str, Table]) -> str:
        best = found.best
        calibration = {
            "samples": best["taylor_num_samples"],
            "seq_len": best["taylor_seq_len"],
            "tokens": best["tokens"],
        }
        size = {"params": best["params_count"], "removed": best["removed_fraction"]}
        parts = [
            self._entry("Calibration", self.message("report_calibration", **calibration)),
            self._entry("Size", self.message("report_size", **size)),
            self._entry("Trial", best["output_dir"] or self.message("report_no_folder")),
            "\n" + self._table(own["task_accuracies"], "task", "acc", "dense", "retained", "items"),
            self._table(own["selection_rules"], "rule", "name", "acc_mean", "ppl", "tokens"),
        ]
        if found.basis != "unknown" and len(found.eligible) > 1:
            kind = "report_set_paired" if found.basis == "paired" else "report_set_unpaired"
            parts.append(wrap(self.message(kind, count=len(found.eligible)), "  "))
            tied = [row for row in own["trials"].rows if row["most_accurate"] or row["not_told_apart"]]
            keys = ("name", "acc_mean", "difference_points", "p_best", "ppl", "tokens")
            parts.append(self._table(own["trials"].with_rows(tied), *keys))
        if found.cross_fit:
            shares = sorted(found.cross_fit.chosen.items(), key=lambda item: (-item[1], item[0]))
            texts = [f"{name} {percent(share)}" for name, share in shares]
            parts.append(wrap(self.message("report_folds", folds=found.cross_fit.folds, shares=texts), "  "))
        return "".join(parts)

    def _across(self) -> str:
        parts = [f"\n{_RULE}{wrap(self.message('section_7'))}{_RULE}"]
        if "transfer" not in self.tables:
            return "".join([*parts, wrap(self.message("report_one_model"), "  ")])
        keys = ("model", "name", "acc_mean", "retained", "ppl", "share_of_runs")
        parts.append(self._table(self.tables["optimal_configurations"], *keys))
        if "accuracy_by_size" in self.tables:
            parts.append(self._table(self.tables["accuracy_by_size"]))
        parts.append(self._table(self.tables["transfer"]))
        best = self.findings.best_for_all
        if best is None or best["config"] is None:
            return "".join([*parts, wrap(self.message("report_none_for_all"), "  ")])
        values = {"config": best["config"], "accuracy": best["acc_mean"], "count": best["num_candidates"]}
        parts.append(wrap(self.message("report_best_for_all", **values), "  "))
        impact = self.tables["configuration_impact"]
        rows = [row for row in impact.rows if row["setting"] == "best for all"]
        parts.append(self._table(impact.with_rows(rows), "model", "acc_mean", "loss_points", "ppl", notes=False))
        return "".join(parts)

    def _appendix(self) -> str:
        many = {name: problems for name, problems in self.problems.items() if len(problems) > SHOWN_PROBLEMS}
        parts = [f"\n{_RULE}{wrap(self.message('report_appendix'))}{_RULE}"] if many else []
        for name, problems in many.items():
            parts += [wrap(name), *(wrap(problem, "  - ") for problem in problems)]
        return "".join(parts)


def _heading(title: str, rule: str = "=") -> str:
    return wrap(title) + rule * min(width(title), COLUMNS) + "\n"


def _problems(found: ModelFindings) -> list[str]:
    """What is to be said of each place, in the order in which they were found."""
    by_place: dict[str, list[str]] = {}
    for problem in found.model.problems:
        by_place.setdefault(problem.where, []).append(problem.what)
    return [": ".join(filter(None, (where, ", ".join(what)))) for where, what in by_place.items()]
