"""report.html: one page with everything inside it, that a person looks at first.

Its first screen is the decision for each model and the evidence for it. Nothing is loaded from anywhere: figures are
embedded, and the page's own Content-Security-Policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import shlex
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tune_prune.analysis import rerun
from tune_prune.analysis.render import messages, templating
from tune_prune.analysis.render.page_cells import Cell, Column, Table, blank, number, words
from tune_prune.analysis.render.page_strip import Strip, in_set, strip
from tune_prune.analysis.statistics.findings import RULES, CrossFit, Findings, Message, ModelFindings
from tune_prune.analysis.tables import page_tables, paper_tables
from tune_prune.analysis.tables.table_data import PaperTable
from tune_prune.core.files import atomic_write_text

_BASIS = {
    "paired": "compared on the same items",
    "unpaired": "compared by the standard error of each alone",
}
_CAPTIONS = {
    "heatmap": "Accuracy by seq_len and num_samples, a panel for each method",
    "methods": "Accuracy by method",
    "seq_len": "Accuracy by seq_len",
    "num_samples": "Accuracy by num_samples",
    "ppl_accuracy": "Perplexity against accuracy",
    "accuracy_cost": "Accuracy against cost",
    "retention": "What the best configuration keeps of each layer",
}
_CARDS_AT_ONCE = 3  # more models, and a table of their decisions stands before the cards
_CSS_PIXELS_PER_DOT = 0.5  # figures are drawn at 200 dots per inch, twice a screen's


@dataclass(frozen=True)
class Card:
    """The decision for one model."""

    id: str
    label: str
    facts: str  # what it rests on, in a line
    found: ModelFindings
    is_most_accurate: bool
    kept: float | None  # accuracy in parts of the dense model's
    cross_fit: CrossFit | None
    compared: str | None  # how; None where no configuration can be compared with another
    not_told_apart: Sequence[str]
    other_rules: Sequence[tuple[str, str, Sequence[str]]]  # rule, what it means, what it chooses
    warnings: Sequence[str]
    strip: Strip


@dataclass(frozen=True)
class Image:
    """A figure of the page; width and height in CSS pixels."""

    uri: str
    caption: str
    name: str
    width: int
    height: int


def write_page(findings: Findings, figures: Sequence[Path], path: Path) -> None:
    """Write the page of `findings` with those of `figures` that are PNGs to `path`, atomically."""
    atomic_write_text(path, render(findings, figures))


def render(findings: Findings, figures: Sequence[Path]) -> str:
    """The page's HTML."""
    environment = templating.environment()
    style, script = ((templating.TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    cards = [_card(index, found) for index, found in enumerate(findings.models.values(), 1)]
    return environment.get_template("report.html.j2").render(
        style=style,
        script=script,
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        findings=findings,
        rule_words=messages.format_message(Message(f"rule_{findings.rule}")),
        counts=_counts(findings),
        shared_warnings=_shared_warnings(cards),
        overview=_overview(cards) if len(cards) > _CARDS_AT_ONCE else None,
        cards=cards,
        images=[_image(figure) for figure in figures if figure.suffix == ".png"],
        trials=page_tables.trials(findings),
        has_tasks=bool(page_tables.task_columns(findings)),
        transfer=page_tables.transfer(findings),
        tables=_tables(findings),
        paper_tables=[_paper_table(table) for table in paper_tables.tables(findings) if not table.long],
        problems=page_tables.problems(findings.study.models.values()),
        problem_kinds=Counter(
            problem.kind.replace("_", " ") for model in findings.study.models.values() for problem in model.problems
        ),
        reproduce=[(label, rerun.command(found.model, found.best)) for label, found in findings.models.items()],
        experiments=[_experiment(folder, about) for folder, about in findings.study.experiments.items()],
        published=[model for model in findings.study.models.values() if model.kind == "published"],
        costs=page_tables.costs(findings),
    )


def _counts(findings: Findings) -> Mapping[str, int]:
    """Trials by status over all models, those of 0 left out; `trials` is their sum."""
    rows = [model.rows for model in findings.study.models.values()]
    statuses = {
        word: sum(int((frame["status"] == status).sum()) for frame in rows)
        for status, word in page_tables.STATUS_WORDS.items()
    }
    return {"trials": sum(map(len, rows))} | {word: count for word, count in statuses.items() if count}


def _card(index: int, found: ModelFindings) -> Card:
    dense, best = found.model.baseline.get("acc_mean", math.nan), found.best
    top = found.competing.iloc[0]
    inside = [row["name"] for row in found.competing.to_dict("records") if in_set(row["in_confidence_set"])]
    others = [name for name in inside if name != best["name"]]
    rules = [(rule, found.chosen[rule]) for rule in RULES if rule in found.chosen and rule != found.rule]
    kind = "published results" if found.model.kind == "published" else "own experiment"
    return Card(
        id=f"model-{index}",
        label=found.model.label,
        facts=f"{len(found.competing)} of {len(found.model.rows)} usable · {kind} · "
        f"{messages.number(100 * found.model.ratio)}% to remove"
        + ("" if found.model.shape == "free" else f" · shape {found.model.shape}"),
        found=found,
        is_most_accurate=bool(best["name"] == top["name"]),
        kept=float(best["acc_mean"] / dense) if dense > 0 else None,
        cross_fit=found.cross_fit,
        compared=_BASIS.get(found.basis),
        not_told_apart=others,
        other_rules=[(rule, messages.format_message(Message(f"rule_{rule}")), names) for rule, names in rules],
        # The set of those not told apart stands on the card by itself.
        warnings=[messages.format_message(remark) for remark in found.warnings if remark.kind != "within_noise"],
        strip=strip(found),
    )


def _shared_warnings(cards: Sequence[Card]) -> list[str]:
    """The sentences that hold for every one of several models: said once."""
    if len(cards) < 2:
        return []
    return [warning for warning in cards[0].warnings if all(warning in card.warnings for card in cards)]


def _overview(cards: Sequence[Card]) -> Table:
    """The decisions, a row for each model."""
    heads = ("Accuracy", "Free of selection bias", "Kept of dense", "Perplexity", "Not told apart")
    rows = []
    for card in cards:
        best, fit = card.found.best, card.cross_fit
        cells = [words(card.label), words(best["name"], style="name")]
        cells.append(number(best["acc_mean"], messages.pm(best["acc_mean"], best["acc_mean_stderr"])))
        cells.append(number(fit.corrected, messages.pm(fit.corrected, fit.stderr)) if fit else blank())
        cells += [number(card.kept, messages.percent(card.kept)), number(best["ppl"], messages.perplexity(best["ppl"]))]
        cells.append(number(len(card.not_told_apart), str(len(card.not_told_apart))) if card.compared else blank())
        rows.append(cells)
    columns = [Column("Model", False), Column("Best configuration", False, "name"), *map(Column, heads)]
    return Table("overview", "The best configuration of each model", columns, rows)


def _image(path: Path) -> Image:
    content = path.read_bytes()
    width, height = struct.unpack(">II", content[16:24])  # of the IHDR chunk, which is the first of every PNG
    known = next((name for name in _CAPTIONS if path.stem == name or path.stem.startswith(f"{name}_")), None)
    of = path.stem.removeprefix(known).removeprefix("_") if known else ""
    caption = (_CAPTIONS[known] if known else path.stem.replace("_", " ")) + (f": {of}" if of else "")
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    scale = _CSS_PIXELS_PER_DOT
    return Image(uri, caption, path.stem, round(width * scale), round(height * scale))


def _tables(findings: Findings) -> list[Table]:
    knobs = dict.fromkeys(knob for found in findings.models.values() for knob in found.levels)
    tables: list[Table | None] = [
        page_tables.methods(findings),
        *(page_tables.levels(findings, knob) for knob in knobs),
    ]
    tables += [page_tables.best_tasks(findings), page_tables.effects(findings), page_tables.correlations(findings)]
    return [table for table in tables if table is not None and table.rows]


_LEADING_NUMBER = re.compile(r"[-−]?[\d,]*\.?\d+(e[-+]?\d+)?")


def _paper_table(table: PaperTable) -> Table:
    """A paper's table as it is printed; columns of numbers sort by the number that a cell begins with."""
    columns = [
        Column(str(name), numeric=align == "r", style="long" if align == "p" else "")
        for name, align in zip(table.frame.columns, table.aligns, strict=True)
    ]

    def cell(row: int, column: int) -> Cell:
        text = str(table.frame.iat[row, column])
        style = "strong" if (row, str(table.frame.columns[column])) in table.bold else ""
        if not columns[column].numeric:
            return words("" if text == messages.MISSING else text, style=style)
        start = _LEADING_NUMBER.match(text)
        return Cell(text, float(start[0].replace(",", "").replace("−", "-")) if start else None, style)

    rows = [[cell(row, column) for column in range(len(columns))] for row in range(len(table.frame))]
    return Table(f"paper-{table.name}", table.title, columns, rows, [table.note] if table.note else [])


def _experiment(folder: Path, about: Mapping[str, Any]) -> Mapping[str, Any]:
    """What experiment.json says, as the page shows it; what it does not say is left out."""
    space = about.get("space", {})
    facts = {
        "Folder": folder.as_posix(),
        "Command": shlex.join(map(str, about.get("command", []))),
        "Source commit": about.get("git_commit"),
        "Search": about.get("search"),
        "Search space": ", ".join(f"{name} {_shown(value)}" for name, value in space.items()),
        "Versions": ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items()),
    }
    models = {}
    for label, model in about.get("models", {}).items():
        run, meaning = model.get("run", {}), model.get("meaning", {})
        protocol = run.get("protocol", {})
        models[label] = {
            "Model": " at ".join(map(str, filter(None, (run.get("model"), run.get("revision"))))),
            "Model fingerprint": meaning.get("model"),
            "Data fingerprint": meaning.get("data"),
            "Calibration text": run.get("calibration"),
            "Task files": run.get("data_dir"),
            "Tasks": ", ".join(protocol.get("tasks", [])),
            "Items per task": "all" if protocol.get("limit", 0) is None else protocol.get("limit"),
            "Perplexity window": protocol.get("perplexity_window"),
            "Evaluation slices": _shown(protocol.get("slices", [])),
            "Seed": run.get("seed"),
            "Arithmetic": run.get("dtype"),
        }
    said = {label: _said(values) for label, values in models.items()}
    return {"name": folder.name, "facts": _said(facts), "models": said}


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return messages.number(value) if isinstance(value, float) else str(value)


def _said(facts: Mapping[str, Any]) -> Mapping[str, str]:
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}
