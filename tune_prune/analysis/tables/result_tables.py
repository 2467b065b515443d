"""Paper tables of what was found: best configurations, their tasks, methods, architecture, impact of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.render import messages
from tune_prune.analysis.statistics.differences import difference
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.analysis.tables.table_data import MARK, MODEL, Column, PaperTable, accuracy_note, paper_table, ratio

MINIMAL_SAMPLES = 4  # calibration samples of the minimal configuration

_METHOD = Column("Method", "method", align="l")
_SEQ_LEN = Column("Seq.", "taylor_seq_len", messages.integer)
_SAMPLES = Column("Samples", "taylor_num_samples", messages.integer)
_PPL = Column("PPL", "ppl", messages.perplexity)


def optimal(findings: Findings) -> PaperTable:
    """The chosen configuration of each model, with what it keeps and how certain the choice is."""
    rows = []
    for label, found in findings.models.items():
        dense = found.model.baseline
        cross_fit = found.cross_fit
        rows.append(
            _configuration(label, found.best)
            | {
                "cross_fitted": cross_fit.corrected if cross_fit else None,
                "cross_fitted_stderr": cross_fit.stderr if cross_fit else None,
                "removed_fraction": found.best["removed_fraction"],
                "dense_acc": dense.get("acc_mean"),
                "dense_acc_stderr": dense.get("acc_mean_stderr"),
                "dense_ppl": dense.get("ppl"),
                "retained": ratio(found.best["acc_mean"], dense.get("acc_mean")),
                "confidence_set": int(found.competing["in_confidence_set"].sum()),
                "complete": len(found.competing),
                "share_of_runs": f"{found.competing['in_confidence_set'].sum()}/{len(found.competing)}",
            }
        )
    columns = [
        *(MODEL, _METHOD, _SEQ_LEN, _SAMPLES),
        Column("Accuracy", "acc_mean", messages.acc, "acc_mean_stderr"),
        Column("Cross-fitted", "cross_fitted", messages.acc, "cross_fitted_stderr", optional=True),
        _PPL,
        Column("Dense", "dense_acc", messages.acc, "dense_acc_stderr", optional=True),
        Column("Dense PPL", "dense_ppl", messages.perplexity, optional=True),
        Column("Retained", "retained", messages.percent, optional=True),
        Column("Set", "share_of_runs"),
    ]
    note = f"Chosen by the rule {findings.rule}: {_rule_words(findings.rule)}. {accuracy_note(findings)} "
    if any(found.cross_fit for found in findings.models.values()):
        note += "Cross-fitted: chosen and scored on different items, so free of selection bias. "
    note += "Set: how many of the complete runs the 95% confidence set of the best holds."
    return paper_table("optimal_configurations", f"Optimal configurations{_ratios(findings)}", note, rows, columns)


def selection_rules(findings: Findings) -> PaperTable:
    """What each rule chooses."""
    rows = []
    for label, found in findings.models.items():
        for rule, names in found.chosen.items():
            for name in names:
                row = _named(found, name)
                top = row["name"] == found.competing.iloc[0]["name"]
                values = {"rule": rule, "params_count": row["params_count"], "most_accurate": top}
                rows.append(_configuration(label, row) | values | {"not_told_apart": _tied(found, row)})
    columns = [
        *(MODEL, Column("Rule", "rule", align="l"), _METHOD, _SEQ_LEN, _SAMPLES),
        Column("Accuracy", "acc_mean", messages.acc, "acc_mean_stderr", bold="most_accurate", dagger="not_told_apart"),
        _PPL,
        Column("Parameters", "params_count", messages.integer, optional=True),
    ]
    rules = dict.fromkeys(row["rule"] for row in rows)
    note = f"{' '.join(f'{rule}: {_rule_words(rule)}.' for rule in rules)} Bold: the most accurate. {MARK}"
    return paper_table("selection_rules", "Configurations chosen by each rule", note, rows, columns)


def tasks(findings: Findings) -> PaperTable:
    """Per-task accuracies of the best configuration, and the dense model's."""
    rows = []
    for label, found in findings.models.items():
        dense = found.model.baseline
        frame = found.tasks.reset_index(names="task")
        for row in frame.to_dict("records"):
            row |= {"model": label, "config": found.best["name"]}
            rows.append(row | {"dense_stderr": dense.get(f"acc_{row['task']}_stderr")})
        mean = {"task": "mean", "acc": found.best["acc_mean"], "stderr": found.best["acc_mean_stderr"]}
        mean |= {"dense": dense.get("acc_mean"), "dense_stderr": dense.get("acc_mean_stderr")}
        mean |= {"retained": ratio(mean["acc"], mean["dense"]), "model": label, "config": found.best["name"]}
        rows.append(mean | {"items": None if frame["items"].isna().any() else frame["items"].sum()})
    columns = [
        *(MODEL, Column("Configuration", "config", align="l"), Column("Task", "task", align="l")),
        Column("Items", "items", messages.integer, optional=True),
        Column("Pruned", "acc", messages.acc, "stderr"),
        Column("Dense", "dense", messages.acc, "dense_stderr", optional=True),
        Column("Retained", "retained", messages.percent, optional=True),
    ]
    note = accuracy_note(findings)
    if any("acc_mean" in found.model.baseline for found in findings.models.values()):
        note += " Retained: pruned over dense accuracy."
    return paper_table("task_accuracies", "Zero-shot accuracy of the best configurations by task", note, rows, columns)


def methods(findings: Findings) -> PaperTable:
    """Pruning methods over all complete runs of each."""
    rows = []
    for label, found in findings.models.items():
        for method, values in found.methods.iterrows():
            best = _named(found, values["best"])
            row = {"model": label, "method": method, **values.drop("best"), "best": values["best"]}
            row |= {"best_acc": best["acc_mean"], "best_acc_stderr": best["acc_mean_stderr"]}
            row |= {"highest_mean": values["mean"] == found.methods["mean"].max()}
            row |= {"highest": values["max"] == found.methods["max"].max(), "not_told_apart": _tied(found, best)}
            rows.append(row)
    columns = [
        *(MODEL, _METHOD, Column("Runs", "n", messages.integer)),
        Column("Mean", "mean", messages.acc, bold="highest_mean"),
        *(
            Column("Std", "std", messages.acc),
            Column("Min", "min", messages.acc),
            Column("Median", "median", messages.acc),
        ),
        Column("Best", "best_acc", messages.acc, "best_acc_stderr", bold="highest", dagger="not_told_apart"),
        Column("Best configuration", "best", align="l"),
    ]
    note = "Accuracy over the complete runs of each method. Std: over runs, with n - 1 (std_n in the CSV file divides by n). "
    note += f"Bold: highest mean and highest best of the model. {MARK}"
    return paper_table("methods", "Pruning methods", note, rows, columns)


def architecture(findings: Findings) -> PaperTable:
    """Gradient ratios of each model beside what it is pruned best with."""
    rows = []
    for label, found in findings.models.items():
        best = found.best
        row = _configuration(label, best) | _geometry(findings, found)
        names = ("grad_mean_ratio", "grad_norm_ratio", "grad_std_ratio", "grad_max_ratio", "extreme_pruning_layers")
        rows.append(row | {name: best.get(name) for name in names})
    columns = [
        MODEL,
        Column("Layers", "layers", messages.integer, optional=True),
        Column("Parameters", "total_params", messages.integer, optional=True),
        *(
            Column(f"{name.capitalize()} ratio", f"grad_{name}_ratio", messages.points, optional=True)
            for name in ("mean", "norm", "std", "max")
        ),
        Column("Extreme", "extreme_pruning_layers", messages.integer, optional=True),
        *(_METHOD, _SEQ_LEN, _SAMPLES, Column("Accuracy", "acc_mean", messages.acc, "acc_mean_stderr")),
    ]
    note = "Ratios: largest over smallest of the layers' gradients at the best configuration, by mean, norm, standard deviation "
    note += "and maximum. Extreme: layers that lose more than half of their MLP channels. "
    count = len(rows)
    note += f"{count} model{'s are' if count > 1 else ' is'} too few to relate architecture and best configuration statistically."
    return paper_table("architecture", "Gradient structure and best configuration", note, rows, columns)


def impact(findings: Findings) -> PaperTable | None:
    """What the choice of configuration is worth: minimal, another model's, for all, own; and the dense model."""
    rows = [row for label, found in findings.models.items() for row in _impact(findings, label, found)]
    if len(rows) == len(findings.models):  # nothing beside the own optimum
        return None
    columns = [
        *(MODEL, Column("Setting", "setting", align="l"), Column("Configuration", "config", align="l")),
        Column("Accuracy", "acc_mean", messages.acc, "acc_mean_stderr", bold="own"),
        Column("Loss (points)", "loss_points", messages.points, "loss_points_stderr"),
        Column("Loss", "loss", messages.percent),
        Column("Retained", "retained", messages.percent, optional=True),
        _PPL,
    ]
    note = "Loss: accuracy below the model's own optimum, in points and as a part of it. Retained: of the dense model's accuracy. "
    note += f"Bold: own optimum. {messages.MISSING}: not measured on that model."
    return paper_table("configuration_impact", "Impact of the configuration", note, rows, columns)


def _impact(findings: Findings, label: str, found: ModelFindings) -> Iterator[dict[str, Any]]:
    dense, best = found.model.baseline, found.best

    def entry(setting: str, config: str, values: Any, loss: float, stderr: Any, percent: float) -> dict[str, Any]:
        row = {"model": label, "setting": setting, "config": config, "own": setting == "own optimum"}
        row |= {name: values.get(name) for name in ("acc_mean", "acc_mean_stderr", "ppl")}
        row |= {"loss_points": loss, "loss_points_stderr": stderr, "loss": percent}
        return row | {"retained": ratio(row["acc_mean"], dense.get("acc_mean"))}

    if "acc_mean" in dense:
        yield entry("dense", "", dense, np.nan, None, np.nan)
    minimal = found.competing[found.competing["taylor_num_samples"] <= MINIMAL_SAMPLES]
    for _, row in minimal.iterrows():
        loss = difference(best, row)
        yield entry("minimal", row["name"], row, loss.points, loss.stderr_points, loss.points / 100 / best["acc_mean"])
    if findings.transfer_points is not None and findings.transfer_percent is not None:
        for other, owner in findings.models.items():
            if other == label:
                continue
            name = owner.best["name"]
            points = findings.transfer_points.loc[label, other]
            stderr = None if findings.transfer_stderr is None else findings.transfer_stderr.loc[label, other]
            percent = findings.transfer_percent.loc[label, other] / 100
            row = _named(found, name) if not pd.isna(points) else {}
            yield entry(f"optimum of {other}", name, row, points, stderr, percent)
    for_all = findings.best_for_all
    if for_all is not None and for_all.get("config") is not None:
        name, row = for_all["config"], for_all["models"][label]
        stderr = row["loss_points_stderr"]
        yield entry("best for all", name, row, row["loss_points"], stderr, row["loss_points"] / 100 / best["acc_mean"])
    yield entry("own optimum", best["name"], best, 0.0, None, 0.0)


def _configuration(label: str, row: Any) -> dict[str, Any]:
    """What every table says of a configuration."""
    names = ("name", "taylor_seq_len", "taylor_num_samples", "acc_mean", "acc_mean_stderr", "ppl")
    return {"model": label, "method": row["pruning_method"], **{name: row[name] for name in names}}


def _named(found: ModelFindings, name: str) -> pd.Series:
    return found.competing[found.competing["name"] == name].iloc[0]


def _tied(found: ModelFindings, row: pd.Series) -> bool:
    """Whether a configuration other than the most accurate cannot be told from it."""
    return bool(row["in_confidence_set"]) and row["name"] != found.competing.iloc[0]["name"]


def _geometry(findings: Findings, found: ModelFindings) -> dict[str, Any]:
    """Layers and parameters before pruning, where experiment.json tells."""
    source = found.model.source or {}
    for folder in found.model.origins:
        entry = findings.study.experiments.get(folder, {}).get("models", {}).get(source.get("label"), {})
        if geometry := entry.get("geometry"):
            return {"layers": len(geometry["mlp_width"]), "total_params": geometry["total_params"]}
    return {"layers": None, "total_params": found.model.baseline.get("params_count")}


def _ratios(findings: Findings) -> str:
    ratios = {found.model.ratio for found in findings.models.values()}
    shapes = {found.model.shape for found in findings.models.values()}
    shape = f", shape {shapes.pop()}" if len(shapes) == 1 and shapes != {"free"} else ""
    return (
        f" with {messages.number(100 * ratios.pop())}% of all parameters removed{shape}" if len(ratios) == 1 else shape
    )


def _rule_words(rule: str) -> str:
    return messages.SENTENCES[f"rule_{rule}"]["en"]
