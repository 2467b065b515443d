"""report.html: one page with everything inside it, that a person looks at first.

Its first screen is the decision for each model and the evidence for it. Nothing is loaded from anywhere: figures are
embedded, and the page's own Content-Security-Policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tune_prune.analysis import rerun
from tune_prune.analysis.render import messages, templating
from tune_prune.analysis.render.rank_plot import rank_plot
from tune_prune.analysis.statistics.findings import RULES, Findings, Message, ModelFindings
from tune_prune.analysis.tables import trial_tables
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.configurations import ratio
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
    "accuracy_size": "Accuracy of the best configurations against the parameters kept",
    "removal_divisor": "Accuracy by removal divisor",
    "retention": "What the best configuration keeps of each layer",
}
_CARDS_AT_ONCE = 3  # more models, and a table of their decisions stands before the cards
_CSS_PIXELS_PER_DOT = 0.5  # figures are drawn at 200 dots per inch, twice a screen's


@dataclass(frozen=True)
class Card:
    """The decision for one model."""

    id: str
    facts: str  # what it rests on, in a line
    found: ModelFindings
    retained: float | None  # accuracy in parts of the dense model's
    compared: str | None  # how; None where no configuration can be compared with another
    tied: Sequence[str]  # statistically, with the most accurate; itself among them where another was chosen
    other_rules: Sequence[tuple[str, str, Sequence[str]]]  # rule, what it means, what it chooses
    warnings: Sequence[str]
    plot: Mapping[str, Any]  # of `rank_plot`


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
    tables = all_tables(findings)
    style, script = ((templating.TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    cards = [_card(index, found) for index, found in enumerate(findings.models.values(), 1)]
    every = [problem for model in findings.study.models.values() for problem in model.problems]
    overview = tables["optimal_configurations"] if len(cards) > _CARDS_AT_ONCE else None
    # The tables by task are columns of the trials on the page, and these and the transfer have sections of their own
    others = [table for key, table in tables.items() if not table.long and key != "transfer" and table is not overview]
    return (
        templating.environment()
        .get_template("report.html.j2")
        .render(
            style=style,
            script=script,
            script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            findings=findings,
            rule_words=messages.format_message(Message(f"rule_{findings.rule}")),
            counts=_counts(findings),
            shared_warnings=_shared_warnings(cards),
            overview=overview,
            cards=cards,
            images=[_image(figure) for figure in figures if figure.suffix == ".png"],
            trials=tables["trials"],
            transfer=tables.get("transfer"),
            tables=others,
            problems=trial_tables.problems(findings),
            problem_kinds=Counter(problem.kind.replace("_", " ") for problem in every),
            reproduce=[(label, rerun.command(found.model, found.best)) for label, found in findings.models.items()],
            experiments=[_experiment(folder, about) for folder, about in findings.study.experiments.items()],
            published=[model for model in findings.study.models.values() if model.kind == "published"],
            costs=trial_tables.costs(findings),
        )
    )


def _counts(findings: Findings) -> Mapping[str, int]:
    """Trials by status over all models, those of 0 left out; `trials` is their sum."""
    rows = [model.rows for model in findings.study.models.values()]
    statuses = {
        word: sum(int((frame["status"] == status).sum()) for frame in rows)
        for status, word in trial_tables.STATUS_WORDS.items()
    }
    return {"trials": sum(map(len, rows))} | {word: count for word, count in statuses.items() if count}


def _card(index: int, found: ModelFindings) -> Card:
    rules = [(rule, found.chosen[rule]) for rule in RULES if rule in found.chosen and rule != found.rule]
    model = found.model
    facts = [f"{len(found.eligible)} of {len(model.rows)} usable"]
    facts.append("published results" if model.kind == "published" else "own experiment")
    facts.append(f"{messages.printed(100 * model.ratio, 'number')}% to remove")
    if model.shape != "free":
        facts.append(f"shape {model.shape}")
    return Card(
        id=f"model-{index}",
        facts=" · ".join(facts),
        found=found,
        retained=ratio(found.best["acc_mean"], model.baseline.get("acc_mean")),
        compared=_BASIS.get(found.basis),
        tied=[name for name in found.tied if name != found.best["name"]],
        other_rules=[(rule, messages.format_message(Message(f"rule_{rule}")), names) for rule, names in rules],
        # The statistically tied stand on the card by themselves.
        warnings=[messages.format_message(remark) for remark in found.warnings if remark.kind != "within_noise"],
        plot=rank_plot(found),
    )


def _shared_warnings(cards: Sequence[Card]) -> list[str]:
    """The sentences that hold for every one of several models: said once."""
    return [text for text in cards[0].warnings if len(cards) > 1 and all(text in card.warnings for card in cards)]


def _image(path: Path) -> Image:
    content = path.read_bytes()
    width, height = struct.unpack(">II", content[16:24])  # of the IHDR chunk, which is the first of every PNG
    known = next((name for name in _CAPTIONS if path.stem == name or path.stem.startswith(f"{name}_")), None)
    of = path.stem.removeprefix(known).removeprefix("_") if known else ""
    caption = (_CAPTIONS[known] if known else path.stem.replace("_", " ")) + (f": {of}" if of else "")
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    width, height = (round(_CSS_PIXELS_PER_DOT * dots) for dots in (width, height))
    return Image(uri, caption, path.stem, width, height)


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
    return messages.printed(value, "number") if isinstance(value, float) else str(value)


def _said(facts: Mapping[str, Any]) -> Mapping[str, str]:
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}
