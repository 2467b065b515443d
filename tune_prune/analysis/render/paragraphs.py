"""paragraphs.md: draft text for the set-up, results and findings of a paper. Every number in it is computed.

A sentence states something where a test carries it: that a configuration is worse, where it is outside the
confidence set of the best; a trend where `effects.trend` found one; a difference of two methods where `method_pairs` did; a
correlation where its interval leaves out zero. Elsewhere it says that the data do not show it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from tune_prune.analysis.cost import passes
from tune_prune.analysis.input.rows import VERSIONS
from tune_prune.analysis.render.messages import WORDS
from tune_prune.analysis.render.templating import TEMPLATES, markdown_environment
from tune_prune.analysis.statistics.effects import FACTORS, MIN_ROWS
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.statistics.rules import BY_TEXT
from tune_prune.analysis.tables.hyperparameters import trend_message
from tune_prune.analysis.tables.table import missing
from tune_prune.analysis.tables.trial_tables import statistics
from tune_prune.core.config import OTHER_TEXT, ZERO_SHOT_METRIC, reads_embedded_data
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.kinds import texts_of
from tune_prune.core.terminal import markdown

_NAMED = {"method", "seq_len", "num_samples", "shape", "calibration"}  # in sentences of their own
_ASKED = {"calibration", "data_dir", "dtype", "model", "protocol", "revision", "seed"}  # of a run
_FILE = "text/wikitext2-raw.test.txt"  # of the user's data, whatever is in it
_TEXTS = {
    "wikitext2": "the test split of WikiText-2 [@merity2017wikitext]",
    "other": OTHER_TEXT.format(file=_FILE),
    "unknown": f"the text in {_FILE}",
    "embedded": "the text embedded in tune_prune",
}  # that perplexity is measured on


def paragraphs(findings: Findings) -> tuple[str, str]:
    """Return the draft (Markdown, with references as `[@key]`), and a BibTeX file with what it refers to."""
    table = statistics(findings)
    last = table.columns[-1].key  # stands for all
    totals = {row["statistic"]: row[last] for row in table.rows if not missing(row[last])}
    template = markdown_environment().get_template("paragraphs.md.j2")
    text = template.render(
        findings=findings,
        totals=totals,
        setup=_setup(findings),
        metrics=ZERO_SHOT_METRIC,
        task_references=WORDS["task_references"],
        trend_message=trend_message,
        passes=passes,
        by_text=BY_TEXT,
        least=MIN_ROWS,
    )
    entries = (TEMPLATES / "references.bib").read_text(encoding="utf-8").split("\n\n")
    cited = [entry for entry in entries if f"@{entry.partition('{')[2].partition(',')[0]}" in text]
    return text, "\n\n".join(entry.strip() for entry in cited) + "\n"


def _setup(findings: Findings) -> dict[str, Any]:
    """Return what was searched and how it was measured, over all models."""
    models = [result.model for result in findings.models.values()]
    eligible = pd.concat([result.eligible for result in findings.models.values()])
    runs = [
        (one, source)
        for one in findings.models.values()
        if (source := one.model.source) is not None and set(source) >= _ASKED
    ]
    sources = [source for _, source in runs]
    embedded = [reads_embedded_data(source["model"], source["data_dir"]) for source in sources]
    perplexity_texts = {  # WikiText-2 where that is known of their content
        "embedded" if is_embedded else "wikitext2" if source["data_dir"] is None else one.model.text or "unknown"
        for (one, source), is_embedded in zip(runs, embedded, strict=True)
    }
    about = list(findings.study.experiments.values())
    tasks = [f"acc_{task}" for task in dict.fromkeys(task for model in models for task in model.tasks)]
    texts = {text or source["calibration"] for one, source in runs for text in one.trials["calibration"].fillna("")}
    seeds = {int(seed) for one, source in runs for seed in one.trials["seed"].fillna(source["seed"])}
    measured_by = {f"{name.removesuffix('_version')} {v}" for name in VERSIONS for v in eligible[name] if v}
    versions = {f"{name} {version}" for entry in about for name, version in entry.get("versions", {}).items()}
    return {
        "embedded": embedded,
        "on_ray": [entry for entry in about if not (entry.get("settings") or {}).get("inline")],
        "adaptive": any(entry.get("search") == "optuna" for entry in about),
        "devices": sorted(set(eligible["device_name"]) - {""}),
        "reserved": _reserved(eligible),
        "machines": eligible.loc[eligible["host"] != "", "host"].nunique(),
        "versions": sorted(versions | measured_by),
        "ratios": sorted({model.ratio for model in models}),
        "shapes": sorted({model.shape for model in models}),
        "kinds": {model.kind for model in models},
        "binomial": any(model.binomial for model in models),
        "stated": any(model.kind == "published" and not model.binomial for model in models),
        "certain": (eligible[tasks].isin([0, 1])).any(axis=None),
        "draws": any(result.draws for result in findings.models.values()),
        "bases": {result.basis for result in findings.models.values() if len(result.eligible) > 1},
        "removed": eligible["removed_fraction"].dropna(),
        "methods": [WORDS["methods"].get(name) or markdown(name) for name in sorted(eligible["method"].unique())],
        "seq_lens": sorted(eligible["seq_len"].unique()),
        "num_samples": sorted(eligible["num_samples"].unique()),
        "recipe": _recipe(findings),
        "trained": [label for label, result in findings.models.items() if result.model.trained],
        "calibration": sorted({"+".join(Path(text).name for text in texts_of(one)) for one in texts}),
        "dtype": sorted({source["dtype"] for source in sources}),
        "seed": sorted(map(str, seeds)),
        "texts": [words for name, words in _TEXTS.items() if name in perplexity_texts],
        "windows": sorted({model.window for model in models if model.window}),
        "bounds": sorted({tokens for model in models if (tokens := model.tokens)}),
        "begun": sorted({one.model.label for one, source in runs if source["protocol"].get("bos")}),
        "most_windows": sorted({source["protocol"]["perplexity_window"] for source in sources}),
    }


def _recipe(findings: Findings) -> dict[str, list[Any]]:
    """Return the other hyperparameters that were varied or are not at their default, by label, with their levels; those of a refit
    or a recovery where there is one."""
    recipe: dict[str, list[Any]] = {}
    for name in FACTORS:
        row = HYPERPARAMETERS[name]
        rows = [one.reading(name) for one in findings.models.values() if name in one.eligible]
        levels = sorted({level for of_model in rows for level in of_model[name].dropna()})
        if name not in _NAMED and levels and (levels != [row.default] or row.of):
            recipe[row.label] = levels
    return recipe


def _reserved(eligible: pd.DataFrame) -> list[str]:
    """Return what a trial had for itself, as recorded: "4 CPUs and 1 GPU"; none where it is not known."""
    amounts = eligible[["cpus", "gpus"]].dropna().drop_duplicates().sort_values(["gpus", "cpus"])
    texts = []
    for row in amounts.to_dict("records"):
        named = [(row["cpus"], "CPU"), (row["gpus"], "GPU")]
        texts.append(" and ".join(f"{n:g} {name}{'' if n == 1 else 's'}" for n, name in named if n))
    return texts
