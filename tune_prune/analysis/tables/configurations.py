"""Tables of configurations: the best of each model, what each rule chooses, their tasks and sizes, what a repair or a training
changes, and what the choice is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from tune_prune.analysis.input.items import GOLD
from tune_prune.analysis.input.rows import CALIBRATION, plain_values
from tune_prune.analysis.input.study import Message
from tune_prune.analysis.statistics.differences import difference
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.analysis.tables.table import Column, Table, missing
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.kinds import Whole
from tune_prune.core.measures import wilson_stderr

MINIMAL_SAMPLES = 4  # calibration samples of the minimal configuration
_WIDE = 3  # models: losses of more in percent, too, are no table that a page has room for
_LOSS = ("loss_points", "loss_points_stderr")

MODEL = Column("model", "Model", style="model")
CONFIGURATION = Column("name", "Configuration", detail=True, style="name")
CONFIG = Column("config", "Configuration", style="name")
CONFIGURATIONS = Column("n", "Configs", "int", hint="complete ones; runs with other sample text are one")
_RUNS = "how often it was run, each time with other sample text; its scores are means of these runs"
DRAWS = Column("draws", "Runs", "int", hint=_RUNS)


def accuracy_column(task: str, label: str, **style: Any) -> Column:
    """Return the column of the accuracy on a task, or of all ("mean"), in rows with `limits`."""
    limits: dict[str, Any] = {"threshold": f"_threshold_{task}", "items": f"_items_{task}", "single": "_one_draw"}
    return Column(f"acc_{task}", label, "acc", f"acc_{task}_stderr", **limits, **style)


ACCURACY = accuracy_column("mean", "Accuracy", hint="mean over the tasks ± standard error")
MARKED_ACCURACY = replace(ACCURACY, best="tied")
DENSE_ACCURACY = replace(ACCURACY, key="dense_acc", label="Original", stderr="dense_acc_stderr", hint="")
PARAMETERS = Column("params_count", "Parameters", "int")
_SURPRISE = "how much a text surprises the model; lower is better; of several runs the geometric mean"
PERPLEXITY = Column("ppl", "Perplexity", "ppl", hint=_SURPRISE)
_WITHOUT = "accuracy without the tasks on which the original only guesses"
INFORMATIVE = Column(
    "acc_informative", "Informative tasks", "acc", "acc_informative_stderr", detail=True, hint=_WITHOUT
)
_PREDICTIONS = "distance from the original's predictions on"  # nats per token
_MEASURES = {
    GOLD: (
        "Gold logprob",
        "log-probability of the right answers: how likely the model finds them; nearer to 0 is better",
    ),
    "kl_text": ("KL text", f"{_PREDICTIONS} the perplexity text; 0 is identical"),
    "kl_tasks": ("KL tasks", f"{_PREDICTIONS} the tasks' questions with their right answers; 0 is identical"),
}
MEASURE_COLUMNS = tuple(
    Column(name, label, "nats", f"{name}_stderr", detail=True, hint=hint) for name, (label, hint) in _MEASURES.items()
)
TOKENS = Column("tokens", "Tokens", "int", hint="how much sample text making it takes", detail=True, style="more")
RETAINED = Column("retained", "Accuracy retained", "percent", hint="of the original model's accuracy")


def hyperparameter_columns(findings: Findings) -> list[Column]:
    """Return the method, and every hyperparameter with several values (ratio and recovery are in the model's label)."""
    rows = pd.concat([model.rows for model in findings.study.models.values()])
    return [Column("method", "Method", style="setting")] + [
        Column(name, row.name, level_format(name) if pd.api.types.is_numeric_dtype(rows[name]) else "", style="setting")
        for name, row in HYPERPARAMETERS.items()
        if name in rows
        and name not in ("method", "pruning_ratio", "recovery", "seed")
        and (row.required or rows[name].nunique() > 1)
    ]


def level_format(hyperparameter: str) -> str:
    """Return how numbers of a hyperparameter are shown."""
    return "int" if isinstance(HYPERPARAMETERS[hyperparameter].kind, Whole) else "number"


def configuration(result: ModelFindings, row: Any) -> dict[str, Any]:
    """Return what every table holds of a configuration."""
    names = ["name", *(name for name in HYPERPARAMETERS if name in row), "acc_mean", "acc_mean_stderr", "ppl"]
    values = {"model": result.model.label, **{name: row[name] for name in names}, "tied": row["name"] in result.marked}
    values |= {name: row.get(name) for column in MEASURE_COLUMNS for name in (column.key, column.stderr)}
    return values | unread(result, row) | informative(result, row) | draws_of(result, row) | limits(result)


def unread(result: ModelFindings, row: Any) -> dict[str, Any]:
    """Return what no table says of a configuration whose method reads no samples: their number, length and tokens."""
    if row["method"] in result.sampling:
        return {}
    tokens = row["tokens"] - row["seq_len"] * row["num_samples"] * row["steps"]  # of a refit or a training
    return dict.fromkeys(CALIBRATION, pd.NA) | {"tokens": tokens or pd.NA}


def informative(result: ModelFindings, row: Any) -> dict[str, float]:
    """Return what INFORMATIVE shows of a row."""
    return dict(zip((INFORMATIVE.key, INFORMATIVE.stderr), result.informative(row), strict=True))


def draws_of(result: ModelFindings, row: Any) -> dict[str, Any]:
    """Return how many draws of calibration samples a configuration has, and the mark of one; nothing where none has several."""
    known = result.draw_variance is not None
    return {"draws": row["draws"], "_one_draw": known and row["draw_share"] == 1} if known or result.draws else {}


def limits(result: ModelFindings) -> dict[str, float]:
    """Return what columns of accuracies name as `threshold` and `items`, of each task and of the mean."""
    columns = result.guessing[["threshold", "items"]].to_dict()
    return {f"_{column}_{task}": value for column, values in columns.items() for task, value in values.items()}


def accuracy_notes(findings: Findings) -> list[Message]:
    """Return what accuracies and their standard errors are; of each model where they are not the same of all."""
    kinds = {
        label: f"note_accuracy_{result.model.kind}{'_draws' if result.draws else ''}"
        for label, result in findings.models.items()
    }
    if len(set(kinds.values())) == 1:
        return [Message(kind) for kind in set(kinds.values())]
    return [Message("note_of_model", {"model": label, "note": Message(kind)}) for label, kind in kinds.items()]


def window_notes(findings: Findings) -> list[Message]:
    """Return in what windows perplexity was measured, where that is recorded, and on how much of its text, where that is
    bounded."""
    models = findings.study.models
    windows = {label: model.window for label, model in models.items() if model.window}
    notes = [Message("note_window", {"model": label, "window": window}) for label, window in windows.items()]
    if len(set(windows.values())) == 1 and len(windows) == len(models):
        notes = [Message("note_window_all", {"window": window}) for window in set(windows.values())]
    tokens = {label: model.tokens for label, model in models.items() if model.tokens}
    return notes + [Message("note_tokens", {"model": label, "tokens": count}) for label, count in tokens.items()]


def best_configurations(findings: Findings) -> Table:
    """Return the chosen configuration of each model, with what it keeps and how certain the choice is."""
    rows = []
    for result in findings.models.values():
        dense, cross_fit, tied = result.model.baseline, result.cross_fit, len(result.tied)
        values = {
            "cross_fitted": cross_fit.corrected if cross_fit else None,
            "cross_fitted_stderr": cross_fit.stderr if cross_fit else None,
            "removed_fraction": result.best["removed_fraction"],
            "dense_acc": dense.get("acc_mean"),
            "dense_acc_stderr": dense.get("acc_mean_stderr"),
            "dense_ppl": dense.get("ppl"),
            "retained": result.retained(result.best["acc_mean"]),
            "confidence_set": tied,
            "complete": len(result.eligible),
            "share_of_runs": f"{tied - 1} of {result.compared}" if result.compared else None,
        }
        rows.append(configuration(result, result.best) | values)
    columns = [
        *(MODEL, CONFIGURATION, *hyperparameter_columns(findings), DRAWS, ACCURACY),
        Column("cross_fitted", "Cross-fitted", "acc", "cross_fitted_stderr", threshold="_threshold_mean"),
        *(replace(INFORMATIVE, style="wide"), PERPLEXITY),
        *(replace(column, style="wide") for column in MEASURE_COLUMNS),
        *(DENSE_ACCURACY, Column("dense_ppl", "Original's perplexity", "ppl"), RETAINED),
        Column(
            "share_of_runs", "Too close to call", hint="how many others cannot be told from the most accurate (95%)"
        ),
    ]
    notes = [
        Message("note_chosen", {"rule": findings.rule, "meaning": findings.meaning(findings.rule)}),
        *accuracy_notes(findings),
        *[Message("note_cross_fitted")] * any(result.cross_fit for result in findings.models.values()),
        Message("note_confidence_set"),
        *window_notes(findings),
    ]
    ratios = {result.model.ratio for result in findings.models.values()}
    shapes = {result.model.shape for result in findings.models.values()}
    title = "Best configurations"
    if len(ratios) == 1:
        title += f" with {100 * ratios.pop():g}% of all parameters removed"
    if len(shapes) == 1 and shapes != {"free"}:
        title += f", shape {shapes.pop()}"
    return Table("optimal_configurations", title, columns, rows, notes)


def selection_rules(findings: Findings) -> Table:
    """Return what each rule chooses."""
    rows = []
    for result in findings.models.values():
        for rule, names in result.chosen.items():
            for row in map(result.named, names):
                values = {"rule": rule, "params_count": row["params_count"], "tokens": row["tokens"]}
                rows.append(configuration(result, row) | values | unread(result, row))
    columns = [
        *(MODEL, Column("rule", "Rule"), CONFIGURATION, *hyperparameter_columns(findings)),
        *(MARKED_ACCURACY, PERPLEXITY, TOKENS, PARAMETERS),
    ]
    rules = dict.fromkeys(row["rule"] for row in rows)
    notes = [Message("note_rule", {"rule": rule, "meaning": findings.meaning(rule)}) for rule in rules]
    return Table("selection_rules", "Configurations chosen by each rule", columns, rows, notes, best="best_tied")


def task_accuracies(findings: Findings) -> Table:
    """Return the per-task accuracies of the best configuration, and the dense model's."""
    rows = []
    for label, result in findings.models.items():
        for row in result.tasks.reset_index(names="task").to_dict("records"):
            dense_stderr = result.model.baseline.get(f"acc_{row['task']}_stderr")
            says = "no" if row["task"] in result.uninformative else "yes" if row["task"] != "mean" else ""
            row |= {"informative": says if result.uninformative else ""}
            rows.append(row | {"dense_stderr": dense_stderr, "model": label, "config": result.best["name"]})
    columns = [
        *(MODEL, CONFIG, Column("task", "Task"), Column("items", "Questions", "int")),
        Column("acc", "Pruned", "acc", "stderr", threshold="threshold", items="items"),
        Column("dense", "Original", "acc", "dense_stderr", threshold="threshold", items="items"),
        *(RETAINED, Column("chance", "Chance", "acc"), Column("majority", "Majority answer", "acc")),
        Column("informative", "Informative", hint="the original does better than guessing"),
    ]
    title = "Zero-shot accuracy of the best configurations by task"
    return Table("task_accuracies", title, columns, rows, [*accuracy_notes(findings), Message("note_retained")])


def architecture(findings: Findings) -> Table:
    """Return the gradient ratios of each model beside what it is pruned best with."""
    ratios = {f"grad_{name}_ratio": f"{name.capitalize()} ratio" for name in ("mean", "norm", "std", "max")}
    rows = []
    for result in findings.models.values():
        row = configuration(result, result.best) | _geometry(findings, result)
        rows.append(row | {name: result.best.get(name) for name in (*ratios, "extreme_pruning_layers")})
    columns = [
        *(MODEL, Column("layers", "Layers", "int"), Column("total_params", "Parameters", "int")),
        *(Column(name, label, "points") for name, label in ratios.items()),
        Column("extreme_pruning_layers", "Extreme layers", "int"),
        *(*hyperparameter_columns(findings), ACCURACY),
    ]
    notes = [Message("note_architecture"), Message("note_few_models", {"count": len(rows)})]
    return Table("architecture", "Gradient structure and best configuration", columns, rows, notes)


def _geometry(findings: Findings, result: ModelFindings) -> dict[str, Any]:
    """Return the layers and parameters before pruning, where experiment.json tells."""
    label = (result.model.source or {}).get("label")
    for folder in result.model.origins:
        entry = findings.study.experiments.get(folder, {}).get("models", {}).get(label, {})
        if geometry := entry.get("geometry"):
            return {"layers": len(geometry["mlp_width"]), "total_params": geometry["total_params"]}
    return {"layers": None, "total_params": result.model.baseline.get("params_count")}


def of_model(label: str) -> str:
    """Return the key of a model's own column, also where its label is the key of another column: a model may be called name."""
    return f"of_{label}"


def transfer(findings: Findings) -> Table | None:
    """Return the accuracy that each model loses with another's best; None with fewer than two."""
    if findings.transfer is None:
        return None
    losses = findings.transfer.losses
    keys = {label: of_model(label) for label in losses}
    worst = max(1e-9, *(loss.get("loss_points", 0.0) for of_label in losses.values() for loss in of_label.values()))
    rows = []
    for label, result in findings.models.items():
        row: dict[str, Any] = {"model": label, "name": result.best["name"]}
        best = result.best["acc_mean"]
        for other, loss in losses[label].items():
            points, key = loss.get("loss_points"), keys[other]
            row |= {key: points, f"{key}_stderr": loss.get("loss_points_stderr") or None}
            row[f"{key}_percent"] = None if points is None or not best else points / best
            row[f"_{key}"] = max(0.0, points or 0.0) / worst
        rows.append(row)
    columns = [
        *(MODEL, Column("name", "Own best", style="name")),
        *(Column(key, other, "points", f"{key}_stderr", weight=f"_{key}") for other, key in keys.items()),
        *(Column(f"{key}_percent", f"{other}, %", "points", detail=len(keys) > _WIDE) for other, key in keys.items()),
    ]
    title = "Accuracy lost with another model's best configuration"
    return Table("transfer", title, columns, rows, [Message("note_transfer")])


def configuration_impact(findings: Findings) -> Table | None:
    """Return what the choice of configuration is worth: minimal, another model's, for all, own; and the dense model."""
    rows = []
    for label, result in findings.models.items():
        for setting, config, values in _settings(findings, label, result):
            row: dict[str, Any] = {"model": label, "setting": setting, "config": config, **limits(result)}
            row |= {name: values.get(name) for name in ("acc_mean", "acc_mean_stderr", "ppl", *_LOSS)}
            loss, best = row["loss_points"], result.best["acc_mean"]
            row["loss"] = None if missing(loss) or not best else loss / 100 / best
            rows.append(row | {"retained": result.retained(row["acc_mean"])})
    columns = [
        *(MODEL, Column("setting", "Setting"), CONFIG, ACCURACY),
        Column("loss_points", "Points lost", "points", "loss_points_stderr"),
        *(Column("loss", "Loss", "percent"), RETAINED, PERPLEXITY),
    ]
    table = Table("configuration_impact", "Impact of the configuration", columns, rows, [Message("note_impact")])
    return table if len(rows) > len(findings.models) else None  # else there is nothing beside the own optimum


def _settings(findings: Findings, label: str, result: ModelFindings) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Give the setting, the configuration, and its metrics with the losses against the own optimum, as far as they are known."""
    best, dense = result.best, result.model.baseline
    if "acc_mean" in dense:
        yield "dense", "", dense
    for _, row in result.eligible[result.eligible["num_samples"] <= MINIMAL_SAMPLES].iterrows():
        loss = difference(best, row, findings.items)
        yield "minimal", row["name"], {**row, **dict(zip(_LOSS, (loss.points, loss.stderr_points), strict=True))}
    if findings.transfer is not None:
        for other, values in findings.transfer.losses[label].items():
            if other != label:
                yield f"optimum of {other}", values["config"], values
        for_all = findings.transfer.best_for_all
        if for_all["config"] and label in for_all["models"]:
            yield "best for all", for_all["config"], for_all["models"][label]
    yield "own optimum", best["name"], {**best, "loss_points": 0.0}


_WORSE = {"kl_text": "text", "kl_tasks": "questions", GOLD: "right choices"}


def changes(findings: Findings) -> Table | None:
    """Return every configuration with a refit or a training that was measured without it, too, the most accurate first; None if
    there is none."""
    rows = []
    for result in findings.models.values():
        for change in result.changes:
            row = configuration(result, change.after)
            row |= {f"before_{name}": change.before.get(name) for name in ("acc_mean", "acc_mean_stderr", "ppl")}
            for name, shift in change.shifts.items():
                row |= {f"before_{name}": shift.before, name: shift.after}
                row |= {f"{name}_change": shift.change, f"{name}_change_stderr": shift.stderr}
            worse = ", ".join(_WORSE[name] for name in change.worse)
            row |= {"config": change.before["name"]}
            row |= {name: getattr(change, name) for name in ("kind", "draws", "own_text", "gain", "gain_stderr")}
            rows.append(row | {"worse": worse or ("nothing" if change.shifts else "")})
    columns = [
        *(MODEL, CONFIG, Column("kind", "Change")),
        *(c for c in hyperparameter_columns(findings) if HYPERPARAMETERS[c.key].of in ("recovery", "compensation")),
        Column("draws", "Runs", "int", hint="how often both were run, each time with other sample text", detail=True),
        Column("own_text", "Own text", "percent", hint="error that is left on held-out parts of its sample text"),
        Column("before_acc_mean", "Without", "acc", "before_acc_mean_stderr", threshold=ACCURACY.threshold),
        Column("acc_mean", "With", "acc", "acc_mean_stderr", threshold=ACCURACY.threshold),
        Column("gain", "Gain", "points", "gain_stderr", hint="in points, on the same questions"),
        Column("before_ppl", "Perplexity, without", "ppl", detail=True),
        Column("ppl", "Perplexity, with", "ppl", detail=True),
        Column(f"before_{GOLD}", "Gold logprob, without", "nats", detail=True),
        Column(GOLD, "Gold logprob, with", "nats", detail=True),
        Column(f"{GOLD}_change", "Gold logprob, change", "nats", f"{GOLD}_change_stderr", hint="on the same questions"),
        Column("before_kl_text", "KL text, without", "nats", detail=True),
        Column("kl_text", "KL text, with", "nats", detail=True),
        Column("kl_text_change", "KL text, change", "nats", "kl_text_change_stderr", hint="on the same tokens"),
        Column("before_kl_tasks", "KL tasks, without", "nats", detail=True),
        Column("kl_tasks", "KL tasks, with", "nats", detail=True),
        Column("kl_tasks_change", "KL tasks, change", "nats", "kl_tasks_change_stderr", hint="on the same tokens"),
        Column("worse", "Worse on", hint="significantly (95%, all of a model together)"),
    ]
    notes = [*accuracy_notes(findings), Message("note_changes")]
    return Table("changes", "What repair and training change", columns, rows, notes) if rows else None


_VALUES = ("params_count", "acc_mean", "acc_mean_stderr", "ppl")
_KEPT = Column("kept", "Parameters kept", "percent")
_ONE_SIDED = 1.645  # standard errors: 95% of a normal distribution lie above -1.645


def by_size(findings: Findings) -> pd.DataFrame | None:
    """Return accuracy against size, of the models with two pruning ratios or more; None if there is none.

    A row for the dense model, where it is known (ratio 0), and one for the best configuration of each ratio: model (label
    without ratio), config (name), ratio, kept (of the dense parameters), _VALUES, acc_lowest and acc_highest (of draws).
    """
    rows: list[dict[str, Any]] = []
    for series, members in findings.series.items():
        if len({result.model.ratio for result in members}) < 2:
            continue
        dense = next((result.model.baseline for result in members if result.model.baseline), {})
        if "acc_mean" in dense:
            row = {"model": series, "config": "dense", "ratio": 0.0, "kept": 1.0}
            rows.append(row | plain_values(dense, *_VALUES))
        for result in members:
            draws = result.draws.get(result.best.name, result.best.to_frame().T)["acc_mean"]
            row = {"model": series, "acc_lowest": draws.min(), "acc_highest": draws.max()}
            rows.append(row | _values(result, result.best, dense.get("params_count")))
    return pd.DataFrame(rows).astype(dict.fromkeys(_VALUES, "float64")) if rows else None


def _values(result: ModelFindings, row: pd.Series, dense_params: float | None) -> dict[str, Any]:
    values = plain_values(row, *_VALUES)
    kept = 1 - row["removed_fraction"]
    if values["params_count"] and dense_params:
        kept = values["params_count"] / dense_params
    return {"config": row["name"], "ratio": result.model.ratio, "kept": kept, **values}


def accuracy_by_size(findings: Findings) -> Table | None:
    """Return the dense model and the best configuration of each pruning ratio, of models with two ratios or more."""
    rows = by_size(findings)
    if rows is None:
        return None
    columns = [MODEL, Column("ratio", "Pruning ratio", "number"), CONFIG, _KEPT, PARAMETERS, ACCURACY, PERPLEXITY]
    notes = [*accuracy_notes(findings), Message("note_sizes")]
    return Table("accuracy_by_size", "Accuracy against size", columns, rows.to_dict("records"), notes)


def smallest(findings: Findings) -> Table | None:
    """Return the table of rule "smallest": of every pruning ratio the smallest configuration within the bound, or the nearest to
    it, and its difference to the dense model; None by other rules."""
    if findings.rule != "smallest":
        return None
    rows = []
    for series, members in findings.series.items():
        for result in members:
            values = _values(result, result.best, result.model.baseline.get("params_count")) | limits(result)
            if (gap := result.against_dense) is not None:
                values |= {"difference": gap.points, "difference_stderr": gap.stderr_points}
            values |= {"within": Message(f"within_{is_within(result)}"), "chosen": findings.smallest[series] is result}
            rows.append({"model": result.model.label, **values})
    hint = "in points, on the same questions"
    columns = [
        *(MODEL, CONFIG, _KEPT, PARAMETERS, ACCURACY),
        Column("difference", "To original", "points", "difference_stderr", best="chosen", hint=hint),
        Column("within", "Within"),
    ]
    title = f"Smallest within {findings.within:g} points of the original model"
    notes = [Message("note_smallest", {"within": findings.within}), *accuracy_notes(findings)]
    return Table("smallest", title, columns, rows, notes, best="best_smallest")


def is_within(result: ModelFindings) -> str:
    """Say of the best by rule "smallest" "yes" or "no" by its accuracy as measured; "surely" where that is so with 95% confidence
    (one-sided, normal). Where both answered every item alike, the error is as if they had every item right (Wilson)."""
    if not result.chosen["smallest"]:
        return "no"
    gap = result.against_dense
    assert gap is not None  # else nothing is within
    error = gap.stderr_points
    if error == 0:
        of_tasks = [wilson_stderr(items) for items in result.tasks["items"].drop("mean")]
        error = 100 * math.hypot(*of_tasks) / len(of_tasks)
    return "surely" if result.best["margin_points"] >= _ONE_SIDED * error else "yes"


def by_speed(findings: Findings) -> pd.DataFrame | None:
    """Return the configurations whose speed was measured, the most accurate first, behind their dense model; None if there is
    none.

    Columns: series (label without ratio), model, config (name; "dense"), method, _VALUES, kept and kv_kept (of the dense model's
    parameters and KV bytes), kv_bytes_per_token, prefill and decode (times as fast as the dense model; <name>_lowest and
    <name>_highest round), retained, retained_per_second, pareto (whether nothing dominates it), best, tied.
    """
    rows: list[dict[str, Any]] = []
    for series, members in findings.series.items():
        for result in members:
            speeds, dense = result.model.compared_speeds, result.model.baseline
            measured = [row for _, row in result.eligible.iterrows() if row["key"] in speeds]
            if not measured:
                continue
            about = {"series": series, "model": result.model.label, **limits(result)}
            kv_bytes = speeds[measured[0]["key"]].dense_kv_bytes_per_token
            first = about | {"config": "dense", "method": "dense"}
            first |= dict.fromkeys(("kept", "kv_kept", "prefill", "decode"), 1.0)
            first |= {name: dense.get(name) for name in _VALUES} | {"kv_bytes_per_token": kv_bytes, "tied": False}
            retained = result.retained(dense.get("acc_mean"))
            rows.append(first | {"retained": retained, "retained_per_second": retained})
            for row in measured:
                speed, retained = speeds[row["key"]], result.retained(row["acc_mean"])
                values = about | _values(result, row, dense.get("params_count"))
                for name in ("prefill", "decode"):
                    ratio = getattr(speed, name)
                    values |= {name: ratio.value, f"{name}_lowest": ratio.lowest, f"{name}_highest": ratio.highest}
                values |= {"method": row["method"], "tied": row["name"] in result.marked, "retained": retained}
                own_bytes = speed.kv_bytes_per_token
                values |= {"kv_bytes_per_token": own_bytes, "kv_kept": own_bytes / kv_bytes}
                values |= {"retained_per_second": None if retained is None else row["retained_per_second"]}
                values |= {"pareto": row["name"] in result.chosen["pareto"], "best": row["name"] == result.best["name"]}
                rows.append(values)
    return pd.DataFrame(rows).astype(dict.fromkeys(_VALUES, "float64")) if rows else None


def pareto(findings: Findings) -> Table | None:
    """Return accuracy, size and speed of each configuration whose speed was measured."""
    rows = by_speed(findings)
    if rows is None:
        return None
    optimal = [None if pd.isna(one) else Message("within_yes" if one else "within_no") for one in rows["pareto"]]
    hint = "times the original's speed"
    columns = [
        *(MODEL, CONFIG, MARKED_ACCURACY, RETAINED, PERPLEXITY, PARAMETERS),
        Column("kv_bytes_per_token", "KV bytes/token", "int"),
        Column("prefill", "Prefill", "points", hint=hint),
        Column("prefill_lowest", "Prefill, rounds", "points", upper="prefill_highest"),
        Column("decode", "Decode", "points", hint=hint),
        Column("decode_lowest", "Decode, rounds", "points", upper="decode_highest"),
        Column("retained_per_second", "Retained per second", "points", hint="1 for the original model"),
        Column("pareto", "Pareto-optimal"),
    ]
    timed = [result for result in findings.models.values() if result.model.compared_speeds]
    notes = [Message("note_speed"), *map(_conditions, timed), *accuracy_notes(findings), Message("note_retained")]
    records = rows.assign(pareto=optimal).to_dict("records")
    return Table("pareto", "Accuracy, size and speed", columns, records, notes, best="best_tied")


def _conditions(result: ModelFindings) -> Message:
    """Return how the speeds of a model were measured, and how many others there are."""
    record = next(iter(result.model.compared_speeds.values()))
    others = len({one.key for one in result.model.speeds if one.conditions != record.conditions})
    values = {"model": result.model.label, **vars(record.conditions), "graph": record.graph, "others": others}
    return Message("note_speed_conditions_more" if others else "note_speed_conditions", values)
