"""Paper tables: every printed number is the finding's, LaTeX is well formed whatever the text, and paragraphs claim no more
than the statistics carry."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.findings import published_findings, simulated_findings
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render.latex import escape, latex_table
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.paper_tables import PaperTable, tables, write_paragraphs, write_tables
from tune_prune.core.config import ZERO_SHOT_TASKS

CLAIMS = r"\brises\b|\bfalls\b|\bbetter than\b|The methods differ\b|\bcorrelates\b|\bloses\b"
NASTY = r'100% of C:\tmp_x & {y} #1 [a] ~ ^ $5 "q" <b> | *z* --x -1.5 é 模'


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Two models with items and dense baselines, 18 configurations each, two of them failed or stopped."""
    folder = tmp_path_factory.mktemp("simulated")
    return simulated_findings(folder, failed=["taylor-s16-n128"], stopped=["layerwise-s64-n512"])


def from_csv(folder: Path, models: dict[str, Callable[[str, int, int], float]], **columns: object) -> Findings:
    """Findings of results files: a function (method, seq_len, samples) -> accuracy per model; NaN is a failed run."""
    paths = []
    for label, accuracy in models.items():
        grid = itertools.product(("taylor", "layerwise", "blockwise"), (16, 32, 64, 128), (4, 128, 512))
        rows = [
            {"pruning_method": m, "taylor_seq_len": s, "taylor_num_samples": n, "acc_mean": accuracy(m, s, n)}
            for m, s, n in grid
        ]
        frame = pd.DataFrame(rows).assign(pruning_ratio=0.2, **columns)
        frame["output_dir"] = [f"{label}_{index}" for index in frame.index]
        frame["success"] = frame["acc_mean"].notna()
        for task in ZERO_SHOT_TASKS:
            frame[f"acc_{task}"] = frame["acc_mean"]
        paths.append((label, folder / f"{len(paths)}.csv"))
        frame.to_csv(paths[-1][1], index=False)
    return find(read_study([], paths))


def by_name(findings: Findings) -> dict[str, PaperTable]:
    return {table.name: table for table in tables(findings)}


def parsed(cell: str) -> tuple[float, float]:
    """(value, standard error) of a printed cell; NaN for an en dash and where there is no error. A percentage is a fraction."""
    text = cell.removesuffix("†").replace(",", "")
    if text == "–":
        return math.nan, math.nan
    scale = 0.01 if text.endswith("%") else 1.0
    value, _, error = text.removesuffix("%").partition(" ± ")
    return scale * float(value), float(error) if error else math.nan


def assert_prints(table: PaperTable, column: str, values: list[float], errors: list[float] | None = None) -> None:
    """That the column holds these values (and standard errors), to half of the last digit printed."""
    cells = [parsed(cell) for cell in table.frame[column]]
    for part, expected in enumerate([values, errors] if errors is not None else [values]):
        printed = [cell[part] for cell in cells]
        digits = len(str(table.frame[column].iloc[0]).rstrip("†%").rpartition(".")[2])
        half = 0.5001 * 10.0 ** -(digits + 2 * str(table.frame[column].iloc[0]).endswith("%"))
        np.testing.assert_allclose(printed, np.asarray(expected, float), rtol=0, atol=half, equal_nan=True)


def test_cells_are_the_findings(simulated: Findings) -> None:
    made = by_name(simulated)
    found = list(simulated.models.values())
    best = [entry.best for entry in found]
    optimal = made["optimal_configurations"]
    assert_prints(optimal, "Accuracy", [row["acc_mean"] for row in best], [row["acc_mean_stderr"] for row in best])
    fits = [entry.cross_fit for entry in found if entry.cross_fit]
    assert_prints(optimal, "Cross-fitted", [fit.corrected for fit in fits], [fit.stderr for fit in fits])
    dense = [entry.model.baseline["acc_mean"] for entry in found]
    assert_prints(optimal, "Retained", [row["acc_mean"] / whole for row, whole in zip(best, dense, strict=True)])
    sets = [f"{entry.competing['in_confidence_set'].sum()}/{len(entry.competing)}" for entry in found]
    assert list(optimal.frame["Set"]) == sets

    methods = pd.concat([entry.methods for entry in found])
    for column in ("mean", "std", "min", "median"):
        assert_prints(made["methods"], column.capitalize(), list(methods[column]))
    assert_prints(made["methods"], "Best", list(methods["max"]))
    levels = pd.concat([entry.levels["taylor_seq_len"] for entry in found])
    assert_prints(made["seq_len"], "Mean", list(levels["mean"]), list(levels["stderr"]))

    tasks = [pd.concat([e.tasks["acc"], pd.Series([e.best["acc_mean"]])]) for e in found]
    errors = [pd.concat([e.tasks["stderr"], pd.Series([e.best["acc_mean_stderr"]])]) for e in found]
    assert_prints(made["task_accuracies"], "Pruned", list(pd.concat(tasks)), list(pd.concat(errors)))

    trials = made["trials"]
    assert len(trials.frame) == sum(len(entry.model.rows) for entry in found)
    rows = pd.concat([frame for e in found for frame in (e.competing, e.model.rows[~e.model.rows["success"]])])
    assert_prints(trials, "Accuracy", list(rows["acc_mean"]), list(rows["acc_mean_stderr"]))
    assert_prints(trials, "To the best", list(rows["difference_points"]), list(rows["difference_stderr_points"]))
    assert sorted(trials.frame["Status"].unique()) == [
        "complete",
        "failed: out of memory",
        "stopped early: well below the best",
    ]


def test_marks(simulated: Findings) -> None:
    """Bold and dagger are the most accurate and those that cannot be told from it, in every model."""
    trials = by_name(simulated)["trials"]
    daggers = [name for name, cell in zip(trials.numbers["name"], trials.frame["Accuracy"], strict=True) if "†" in cell]
    expected = [
        name
        for entry in simulated.models.values()
        for name in entry.competing["name"][entry.competing["in_confidence_set"]][1:]
    ]
    assert expected and daggers == expected
    assert {trials.numbers["name"][row] for row, _ in trials.bold} == {
        entry.competing["name"].iloc[0] for entry in simulated.models.values()
    }


def test_statistics(simulated: Findings) -> None:
    frame = by_name(simulated)["experiment_statistics"].frame.set_index("Statistic")
    pooled = pd.concat([entry.competing["acc_mean"] for entry in simulated.models.values()])
    assert frame.loc["Runs", "All models"] == "36" and frame.loc["Complete", "alpha"] == "16"
    assert frame.loc["Task evaluations", "All models"] == str(32 * 7)
    assert frame.loc["Completeness", "beta"] == f"{100 * 16 / 18:.1f}%"
    for name in ("max", "min", "median", "mean", "std"):
        assert parsed(frame.loc[f"Accuracy: {name}", "All models"])[0] == pytest.approx(
            getattr(pooled, name)(), abs=5e-5
        )
    assert frame.loc["Gradient passes", "All models"] == "6"  # of the experiment, so of no model alone
    assert frame.loc["Gradient passes", "alpha"] == "–"


def test_impact(simulated: Findings, tmp_path: Path) -> None:
    """Losses against the own optimum: with another model's, and with the minimal configuration of 4 samples."""
    impact = by_name(simulated)["configuration_impact"].frame.set_index(["Model", "Setting"])
    assert simulated.transfer_points is not None and simulated.transfer_stderr is not None
    value, error = parsed(impact.loc[("alpha", "optimum of beta"), "Loss (points)"])
    assert value == pytest.approx(simulated.transfer_points.loc["alpha", "beta"], abs=0.005)
    assert error == pytest.approx(simulated.transfer_stderr.loc["alpha", "beta"], abs=0.005)
    assert parsed(impact.loc[("beta", "dense"), "Retained"])[0] == 1

    findings = from_csv(tmp_path, {"M": lambda m, s, n: 0.5 + s / 1000 + n / 10000})
    own = findings.models["M"].best
    minimal = findings.models["M"].competing.query("taylor_num_samples == 4")
    rows = by_name(findings)["configuration_impact"].frame.query("Setting == 'minimal'")
    losses = [parsed(cell) for cell in rows["Loss (points)"]]
    assert [loss for loss, _ in losses] == pytest.approx(list(100 * (own["acc_mean"] - minimal["acc_mean"])), abs=0.005)
    errors = 100 * np.hypot(own["acc_mean_stderr"], minimal["acc_mean_stderr"])
    assert [error for _, error in losses] == pytest.approx(list(errors), abs=0.005)
    assert list(rows["Configuration"]) == list(minimal["name"])


def test_published_grid(tmp_path: Path) -> None:
    """The figures that were published, to the digit; files in full precision."""
    findings = published_findings()
    made = by_name(findings)
    assert list(made["seq_len"].frame["Mean"].str[:5]) == [".4988", ".5345", ".5699", ".5755", ".5805"]
    assert list(made["num_samples"].frame["Mean"].str[:5]) == [".5504", ".5515", ".5537"]
    assert "rises with the calibration sequence length" in made["seq_len"].note
    methods = made["methods"].frame.set_index("Method")
    assert (methods.loc["blockwise", "Mean"], methods.loc["blockwise", "Std"]) == (".5821", ".0178")
    optimal = made["optimal_configurations"].frame.iloc[0]
    assert (optimal["Method"], optimal["Seq."], optimal["Samples"]) == ("blockwise", "64", "128")
    assert (optimal["Accuracy"][:5], optimal["PPL"]) == (".5980", "13.17")
    r = made["correlations"].frame.set_index("Measure")["r"]
    assert list(r[["ppl", "grad_mean_ratio", "extreme_pruning_layers"]]) == ["-.7972", ".6972", "-.2940"]
    assert r["grad_norm_ratio"] == "–"

    paths = write_tables(findings, tmp_path / "tables")
    assert all(path.is_file() for path in paths)
    again = pd.read_csv(tmp_path / "tables" / "methods.csv").set_index("method")
    found = findings.models["Llama"].methods
    assert list(again["mean"]) == list(found["mean"]) and list(again["std_n"]) == list(found["std_n"])
    trials = pd.read_csv(tmp_path / "tables" / "trials.csv")
    assert list(trials["acc_mean"]) == list(findings.models["Llama"].competing["acc_mean"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50% a_b & #1 $x {y}", r"50\% a\_b \& \#1 \$x \{y\}"),
        ("a\\b~c^d", r"a\textbackslash{}b\textasciitilde{}c\textasciicircum{}d"),
        (".5 ± .1†", r".5 $\pm$ .1\textsuperscript{\dag}"),
        ("-0.5 and -.2, seq-64 --limit", r"$-$0.5 and $-$.2, seq-64 -{}-limit"),
        ("Qwen é ß ø", r"Qwen \'{e} \ss{} \o{}"),
        ("模", r"{[}U+6A21]"),
        ("[x] *", r"{[}x] {*}"),
        ("two\nlines\x00", "two lines "),
        ("–", "--"),
    ],
)
def test_escape(text: str, expected: str) -> None:
    assert escape(text) == expected


def check_latex(text: str) -> None:
    """Environments and braces are balanced, and every row of a tabular has as many cells as its preamble has columns."""
    stack: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert not stack
    bare = re.sub(r"\\[\\{}&%$#_^~'\"]", "", text)
    assert bare.count("{") == bare.count("}") and bare.isascii() and bare.count("$") % 2 == 0
    assert not re.search(r"[%#]|(?<=[^$\\\s])_", bare)
    columns = None
    for line in text.splitlines():
        if found := re.match(r"\\begin\{(?:tabular|longtable)\}\{@\{\}(.*)@\{\}\}$", line):
            columns = len(re.findall("[lr]|p{[^}]*}", found[1]))
        elif line.endswith(r" \\") and not line.startswith((r"\multicolumn", r"\caption")):
            assert len(re.findall(r"(?<!\\)&", line)) + 1 == columns, line


def test_latex_and_markdown_are_well_formed(tmp_path: Path) -> None:
    """With a model and a reason that are full of what LaTeX and Markdown read as commands."""

    def accuracy(method: str, seq_len: int, samples: int) -> float:
        return math.nan if (method, seq_len) == ("taylor", 16) else 0.5 + 0.01 * (samples % 7) + 0.0001 * seq_len

    findings = from_csv(tmp_path, {NASTY: accuracy, "B_1": accuracy}, reason=NASTY)
    paths = write_tables(findings, tmp_path / "tables")
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".tex":
            check_latex(text)
        if path.suffix != ".csv":
            assert not re.search(r"\b(nan|None|NaN|NA)\b", text), path
        if path.suffix == ".md":
            rows = [line for line in text.splitlines() if line.startswith("|")]
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, path
    whole = (tmp_path / "tables" / "all_tables.tex").read_text(encoding="utf-8")
    assert whole.startswith(r"\documentclass") and whole.endswith("\\end{document}\n")
    for table in tables(findings):
        assert whole.count(rf"\label{{{table.label}}}") == 1 and latex_table(table) in whole


def test_what_is_missing_is_a_dash(tmp_path: Path) -> None:
    """A single run without perplexity, and a model none of whose runs is complete."""

    def one(method: str, seq_len: int, samples: int) -> float:
        return 0.5 if (method, seq_len, samples) == ("taylor", 16, 128) else math.nan

    findings = from_csv(tmp_path, {"M": one, "lost": lambda *_: math.nan})
    made = by_name(findings)
    assert made["optimal_configurations"].frame.loc[0, "PPL"] == "–"
    assert len(made["trials"].frame) == 2 * 36 and "lost" in made["experiment_statistics"].note
    assert "num_samples" in made and "effects" not in made
    write_paragraphs(findings, tmp_path / "paragraphs.md")
    text = (tmp_path / "paragraphs.md").read_text(encoding="utf-8")
    assert not re.search(rf"{CLAIMS}|\bnan\b|\bNone\b", text)
    assert "No run of lost is complete." in text


def test_paragraphs_of_noise_claim_nothing(tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    noise = {key: generator.normal(0.5, 0.002) for key in itertools.product(("a", "b"), range(36))}
    counters = {label: itertools.count() for label in "ab"}
    findings = from_csv(
        tmp_path,
        {label: lambda m, s, n, label=label: noise[label, next(counters[label])] for label in "ab"},  # type: ignore[misc]
        ppl=generator.normal(13, 1, 36),
    )
    for found in findings.models.values():  # otherwise this data does not test what it should
        assert found.competing["in_confidence_set"].all() and found.effects is not None
        assert all(trend.direction == "flat" for trend in found.trends.values())
        assert found.effects.loc["method", "p"] > 0.05
        assert all(entry.low is None or entry.low < 0 < entry.high for entry in found.correlations if entry.high)
    write_paragraphs(findings, tmp_path / "paragraphs.md")
    text = (tmp_path / "paragraphs.md").read_text(encoding="utf-8")
    assert not re.search(CLAIMS, text)
    assert "not decided by these data" in text and "do not show that methods differ" in text
    assert not by_name(findings)["seq_len"].bold


def test_paragraphs_say_what_is_significant(tmp_path: Path) -> None:
    """Effects of a few points over almost no noise."""
    generator = np.random.default_rng(0)
    order = {"taylor": 0.0, "layerwise": 0.03, "blockwise": 0.06}

    def accuracy(method: str, seq_len: int, samples: int) -> float:
        return 0.4 + order[method] + 0.02 * math.log2(seq_len / 16) + generator.normal(0, 0.001)

    def falling(method: str, seq_len: int, samples: int) -> float:
        return 0.9 - accuracy(method, seq_len, samples)

    findings = from_csv(tmp_path, {"up": accuracy, "down": falling})
    write_paragraphs(findings, tmp_path / "paragraphs.md")
    up, down = (
        (tmp_path / "paragraphs.md").read_text(encoding="utf-8").partition("# Findings")[2].split("**down.**")[:2]
    )
    assert "Accuracy rises with the calibration sequence length" in up and "Accuracy falls" not in up
    assert "Accuracy falls with the calibration sequence length" in down
    assert "The methods differ (F(" in up and "blockwise has the highest mean" in up
    assert "taylor has the highest mean" in down
    text = (tmp_path / "paragraphs.md").read_text(encoding="utf-8")
    outside = int((~findings.models["up"].competing["in_confidence_set"]).sum())
    assert outside > 20 and f"The other {outside} are ruled out as the best" in text
    assert findings.transfer_points is not None and findings.transfer_percent is not None
    loss, percent = (frame.loc["up", "down"] for frame in (findings.transfer_points, findings.transfer_percent))
    assert re.search(rf"up loses {loss:.2f} ± \d\.\d\d points, {percent:.1f}% of its accuracy", text)


def test_paragraphs_of_experiments(simulated: Findings, tmp_path: Path) -> None:
    """The cross-fitted score beside the naive one, the size of the confidence set, correlations with n and interval."""
    write_paragraphs(simulated, tmp_path / "paragraphs.md")
    text = (tmp_path / "paragraphs.md").read_text(encoding="utf-8")
    for found in simulated.models.values():
        assert found.cross_fit is not None
        assert f"{found.cross_fit.corrected:.4f}"[1:] in text and f"{found.cross_fit.naive:.4f}"[1:] in text
        inside = int(found.competing["in_confidence_set"].sum())
        assert f"The confidence set of the best holds {inside} configurations" in text
        ppl = next(entry for entry in found.correlations if entry.column == "ppl")
        low, high = (f"{bound:.4f}".replace("0.", ".", 1) for bound in (ppl.low, ppl.high) if bound is not None)
        assert f"over {ppl.n} runs, 95% interval {low} to {high}" in text
    assert "36 runs and 224 task evaluations; 32 runs (88.9%) are complete, 2 failed, 2 were stopped early" in text


def test_paragraphs_under_another_rule(tmp_path: Path) -> None:
    """The most accurate stays the subject of the test; what the rule chooses instead stands beside it."""
    findings = simulated_findings(tmp_path, rule="one-standard-error", items=60)
    found = next(entry for entry in findings.models.values() if entry.best["name"] != entry.competing["name"].iloc[0])
    write_paragraphs(findings, tmp_path / "paragraphs.md")
    text = (tmp_path / "paragraphs.md").read_text(encoding="utf-8")
    assert f"By the rule one-standard-error, {found.best['name']} is chosen instead" in text
    assert f"runs is {found.competing['name'].iloc[0]}, with an accuracy" in text
