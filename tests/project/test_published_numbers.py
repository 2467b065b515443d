"""Numbers of README and docs are those of the committed records in docs/studies.

A function under `@shown_on(page)` yields parts of that page that have numbers, made from the records alone.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import arena
import front_chart
import pandas as pd
import pytest
import quality_page
import real_models
from PIL import Image
from quality_table import MEASURES, markdown
from script_tools import markdown_table

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ROOT / "docs" / "studies"
GIB = 2**30
TINY = ("tiny-llama", "tiny-qwen2", "tiny-mistral")
PLAIN, TWO_STEPS = "gate_fisher-s128-n128-least_squares", "gate_fisher-s128-n512-least_squares-t131072"
MIXED, BEST = "gate_fisher-s128-n256-least_squares-t65536", f"{TWO_STEPS}-lora-i400-e0.003-k2"
Parts = Callable[[], Iterator[str]]
SHOWN: dict[str, tuple[str, Parts]] = {}


def shown_on(page: str) -> Callable[[Parts], Parts]:
    """Register the parts of `page` that a function makes."""

    def register(parts: Parts) -> Parts:
        SHOWN[parts.__name__] = page, parts
        return parts

    return register


def source(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def text(page: str) -> str:
    """Return a page on one line, so that no line break is held."""
    return " ".join(source(page).split())


def record(path: str) -> Any:
    return json.loads((STUDIES / f"{path}.json").read_text(encoding="utf-8"))


def row_of(path: str, configuration: str, model: str = "smollm2") -> dict[str, Any]:
    """Return the row of a quality table of the study of SmolLM2."""
    (row,) = (r for r in record(f"smollm2-135m/{path}") if (r["configuration"], r["model"]) == (configuration, model))
    return row


def by_name(path: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["model"], row["configuration"]): row for row in record(path)}


def share(row: dict[str, Any], measure: str, error: bool = True) -> str:
    """Return what a row regains of what its reference loses, in percent."""
    stderr = f" ± {100 * row[f'{measure}_stderr']:.0f}" if error else ""
    return f"{100 * row[f'{measure}_regained']:.0f}{stderr}"


def shares(row: dict[str, Any], error: bool = True) -> list[str]:
    return [share(row, measure, error) for measure in MEASURES]


@shown_on("docs/questions.md")
def perplexities_of_questions() -> Iterator[str]:
    ppl = [row_of("quality_ratios", f"{MIXED}-lora-e0.003", f"smollm2@{ratio}")["ppl"] for ratio in (0.1, 0.35, 0.5)]
    yield "{:.1f} at 10%, {:.1f} at 35% and {:.1f} at 50%".format(*ppl)
    ppl = [record("smollm2-135m/dense")["ppl"], row_of("quality_grid", "taylor-s256-n128")["ppl"]]
    ppl += [row_of("quality_draws", PLAIN)["ppl"], row_of("quality_two_steps_trained", BEST)["ppl"]]
    yield from (f" | {value:.1f} |" for value in ppl)
    random = pd.read_csv(STUDIES / "smollm2-135m" / "control.csv")["ppl"]
    yield f"| random removal | {geometric_mean(random):,.0f} |"


@shown_on("docs/quality.md")
def quality_for_users() -> Iterator[str]:
    best, taylor = row_of("quality_draws", PLAIN), row_of("quality_grid", "taylor-s256-n128")
    question, steps = row_of("quality_mixed", MIXED), row_of("quality_two_steps", f"{TWO_STEPS}-k2")
    trained = row_of("quality_two_steps_trained", BEST)
    yield f"the perplexity from {taylor['ppl']:.1f}, the published grid's best, to {best['ppl']:.1f}"
    yield f"{share(row_of('quality_grid', PLAIN), 'kl_text')}% smaller on text"
    yield f"{share(row_of('quality_grid', PLAIN), 'kl_tasks')}% on questions"
    yield f"{best['kl_tasks']:.2f} to {question['kl_tasks']:.2f}"
    yield f"{steps['kl_text']:.2f} on text and {steps['kl_tasks']:.2f} on questions"
    for label, table in (("perplexity (`taylor`)", ""), ("right answers (`layerwise`)", "_layerwise")):
        own = shares(row_of(f"quality_two_steps{table}", f"{TWO_STEPS}-k2"))
        yield f"| best by {label} | {' | '.join(f'{one}%' for one in own)} |"
    yield f"from {steps['ppl']:.1f} to {trained['ppl']:.1f}"


@shown_on("docs/checkpoints.md")
def served_by_vllm() -> Iterator[str]:
    served = record("serving")
    rows = {dtype: [row for row in served["rows"] if row["dtype"] == dtype] for dtype in ("float32", "bfloat16")}
    assert all(row["greedy_equal"] for row in rows["float32"])
    yield f"`make test-serving` runs {len(rows['float32'])} folders"
    most = f"{max(row['difference'] for row in rows['float32']):.1e}".replace("e-0", "e-")
    yield f"log-probabilities differ by {most} nats at most"
    low, high = sorted(row["difference"] for row in rows["bfloat16"])
    yield f"In bfloat16 they differ by {low:.2f} and {high:.2f} nats"


@shown_on("docs/gpu.md")
def rates_of_the_h100_for_users() -> Iterator[str]:
    plan = {row["measured"]: row for row in record("h100/bench_gpu_plan")["measurements"] if "measured" in row}
    odd, _, even = sorted(value for name, value in plan["widths"].items() if name != "measured")
    yield f"{odd / 1e12:.0f} TFLOP/s, of 11,520 (a multiple of 64) {even / 1e12:.0f}"
    yield f"{plan['sharing']['ratio']:.2f} of one trial's tokens a second"
    gains = [row["kernel_by_kernel"]["s"] / row["graph"]["s"] for row in record("h100/training_step")["steps"]]
    yield f"{min(gains):.1f} to {max(gains):.1f} times as fast"


@shown_on("docs/studies/quality.md")
def tables_of_recipes() -> Iterator[str]:
    for path in (STUDIES / "smollm2-135m").glob("quality*.json"):
        if path.stem not in ("quality_rates", "quality_recovery") and "ratios" not in path.stem:
            yield markdown(json.loads(path.read_text(encoding="utf-8")))


@shown_on("docs/studies/quality.md")
def losses_of_scores() -> Iterator[str]:
    for row in record("smollm2-135m/losses")["rows"]:
        cells = []
        for measure, digits in (("kl_text", 3), ("kl_tasks", 3), ("gold", 2)):
            cells.append(f"{row[measure]:.{digits}f}")
            if f"{measure}_change" in row:
                cells[-1] += f" ({row[f'{measure}_change']:+.{digits}f} ± {row[f'{measure}_stderr']:.{digits}f})"
        yield f"| {row['draws']} | {' | '.join(cells)} |"


@shown_on("docs/studies/quality.md")
def masks() -> Iterator[str]:
    names = {"wanda": "Wanda", "sparsegpt": "SparseGPT"}
    for row in record("smollm2-135m/masks")["rows"]:
        values = " | ".join(f"{row[name]:.3f}" for name in ("kl_text", "kl_tasks", "gold_lost"))
        accuracy = f"{row['accuracy']:.3f} ± {row['accuracy_stderr']:.3f}"
        yield f"| {names.get(row['masks'], row['masks'])} | {values} | {row['ppl']:.2f} | {accuracy} |"


@shown_on("docs/studies/quality.md")
def aligned_widths() -> Iterator[str]:
    changes = ["kl_text", "kl_tasks", "gold_logprob_mean", "acc_mean"]
    for model, trials in pd.read_csv(STUDIES / "embedded" / "shapes.csv").groupby("model"):
        by_shape = trials.set_index(["shape", "method", "seed"]).drop(columns="model").sort_index()
        for shape in ("aligned-4", "aligned-8"):
            change = (by_shape.loc[shape] - by_shape.loc["free"]).groupby("seed").mean()
            mean, error = change.mean(), change.std() / math.sqrt(3)
            cells = [f"{mean[name]:+.3f} ± {error[name]:.3f}" for name in changes[:3]]
            cells += [f"{100 * mean.acc_mean:+.2f} ± {100 * error.acc_mean:.2f}"]
            removed = by_shape.loc[shape, "removed_fraction"].mean()
            yield f"| {model} | `{shape}` | {' | '.join(cells)} | {removed:.2%} |"


@shown_on("docs/studies/quality.md")
def other_ratios() -> Iterator[str]:
    for name in ("quality_ratios", "quality_ratios_layerwise"):
        for row in record(f"smollm2-135m/{name}"):
            yield f"| {row['kl_text']:.3f} | {row['kl_tasks']:.3f} | {row['gold_logprob_mean']:.2f} | "


@shown_on("docs/studies/quantised.md")
def quantised_files() -> Iterator[str]:
    for row in record("quantised")["rows"]:
        values = f"{row['ppl']:.2f} | {row['kl_text']:.3f} | {row['kl_tasks']:.3f} | {row['gold_logprob']:.2f}"
        yield f"| {row['model']} | {row['kind'].upper()} | {row['bytes'] / 1e6:.0f} | {values} |"


@shown_on("docs/studies/arena.md")
def arena_of_peers() -> Iterator[str]:
    yield markdown_table(arena.HEAD, arena.lines(STUDIES / "arena"))


@shown_on("docs/quality.md")
def recommended_of_real_models() -> Iterator[str]:
    studies = {one.model: one for one in real_models.read()}
    for model, found in (("gemma3-270m", "gate_fisher-s128-n128-least_squares-t65536"),
                         ("qwen2.5-coder-1.5b", "layerwise-s128-n128-least_squares-t20480")):  # fmt: skip
        rows = studies[model].rows()
        yield "regains {}% on text, {}% on questions and {}% of right answers".format(*shares(rows[found]))
        yield "trained briefly {}%, {}% and {}%".format(*shares(rows[f"{found}-lora"]))
    yield from points_of_the_repair_of_qwen()
    yield from qwen_by_the_best_of_smollm2()


def qwen_by_the_best_of_smollm2() -> Iterator[str]:
    studies = {one.model: one for one in real_models.read()}
    row = studies["qwen2.5-coder-1.5b"].rows()[studies["smollm2"].chosen["grid"]["kl"]]
    assert row["kl_tasks_regained"] < 0 and row["gold_logprob_mean_regained"] < 0
    questions, answers = (share(row, measure).removeprefix("-") for measure in ("kl_tasks", "gold_logprob_mean"))
    yield f"{questions}% more KL on questions than by its own best"
    yield f"its right answers lose {answers}% more log-probability"


def repairs_of_qwen() -> dict[str, str]:
    """Return by ratio how many points of accuracy the repair costs."""
    changes = pd.read_csv(STUDIES / "real_models/qwen2.5-coder-1.5b/changes.csv").query("kind == 'refit'")
    rows = (row for _, row in changes.iterrows())
    return {row["model"].rpartition("@")[2]: f"{-row['gain']:.1f} ± {row['gain_stderr']:.1f}" for row in rows}


@shown_on("README.md")
def points_of_the_repair_of_qwen() -> Iterator[str]:
    yield f"{repairs_of_qwen()['0.2']} points"


@shown_on("docs/studies/real_models.md")
def real_models_judged() -> Iterator[str]:
    studies = real_models.read()
    yield real_models.recommended(studies)
    yield from points_of_the_repair_of_qwen()
    yield from qwen_by_the_best_of_smollm2()
    repairs = repairs_of_qwen()
    yield f"(by {repairs['0.1']} and {repairs['0.3']} points)"
    gemma, qwen = (share(studies[0].rows()[one.chosen["grid"]["kl"]], "kl_text") for one in studies[1:])
    yield f"has {gemma.removeprefix('-')}% or {qwen.removeprefix('-')}% more KL on text"
    for one in studies:  # by hand: its best by right answers
        found = {row["configuration"]: row for row in one.beside["gold_logprob"]}
        cells = [f"{part}%" for step in ("recommended", "trained") for part in shares(found[one.chosen[step]["kl"]])]
        yield f"| `{one.chosen['grid']['gold_logprob']}` | {' | '.join(cells)} |"
    yield real_models.transfer(studies)
    for one in studies:
        yield real_models.of_model(one)
        yield real_models.of_ratios(one)
    yield from map(real_models.searched, real_models.SEARCHED)
    for one in record("real_models/qwen2.5-coder-1.5b/measured_again").values():
        by = {name: value - one["recorded"][name] for name, value in one["measured"].items()}
        accuracy, earlier = (f"{one[kind]['acc_mean']:.4f}" for kind in ("measured", "recorded"))
        if any(by.values()):
            cells = (
                f"{by['ppl']:.3f} | {by['kl_text']:.4f} | {by['kl_tasks']:.4f} | {by['gold_logprob_mean']:+.4f} nats"
            )
            yield f"on another CPU | {cells} | {accuracy}, recorded {earlier} |"
        else:
            yield f"on the same CPU | 0 | 0 | 0 | 0 | {accuracy}, as recorded |"


@shown_on("docs/studies/embedded/README.md")
def equal_cost() -> Iterator[str]:
    for one in (row[name] for row in record("embedded/equal_cost") for name in ("reference", "other", "whole")):
        points = f"{one['points']:+.1f} ± {one['stderr_points']:.1f} " if "points" in one else ""
        yield (
            f"| {one['trials']} | {one['tokens'] / 1e6:.2f} | `{one['best']}` | {one['accuracy']:.3f} | "
            f"{one['cross_fitted']:.3f} ± {one['stderr']:.3f} | {points}| {one['lowest_kl_tasks']:.4f} |"
        )


@shown_on("docs/studies/embedded/README.md")
def steps_of_toy_models() -> Iterator[str]:
    rows = by_name("embedded/quality_steps")
    for model in TINY:
        steps = [f"{refit}{k}" for refit in ("", "-least_squares") for k in ("", "-k2", "-k4", "-k8")][1:]
        for measure, name in MEASURES.items():
            cells = (f"{share(rows[model, f'taylor-s128-n128{step}'], measure)}%" for step in steps)
            yield " | ".join([f"| {model if measure == 'kl_text' else ''}".rstrip(), name, *cells]) + " |"


@shown_on("docs/studies/embedded/README.md")
def every_score_of_toy_models() -> Iterator[str]:
    rows = by_name("embedded/quality") | by_name("embedded/quality_ratios")
    page = source("docs/studies/embedded/README.md")
    for name, percent, score in re.findall(r"^\| (tiny-\w+)(?: \| (\d+)%)? \| `(\w+)` \| .* \|$", page, re.MULTILINE):
        model = f"{name}@{int(percent) / 100:g}" if percent else name
        recipes = (f"{score}-s128-n128{refit}{lora}" for lora in ("", "-lora") for refit in ("", "-least_squares"))
        own = [rows[model, recipe] for recipe in recipes]
        cells = [f"{share(row, 'kl_tasks')}%" for row in own] + [f"{row['accuracy']:.3f}" for row in own]
        yield f"| {name} |{f' {percent}% |' if percent else ''} `{score}` | {' | '.join(cells)} |"


@shown_on("docs/studies/embedded/README.md")
def adapters_of_other_ranks() -> Iterator[str]:
    for scale, models in record("embedded/training_ranks")["scales"].items():
        for model, errors in models.items():
            for rank in (2, 8, 32):
                cells = " | ".join(f"{errors[f'{rank} {rate}']:.2f}" for rate in ("0.001", "0.003", "0.01", "0.03"))
                yield f"| {model} | {scale} | {rank} | {cells} |"


@shown_on("docs/studies/draws.md")
def winners_of_one_draw() -> Iterator[str]:
    for row in record("embedded/winners_by_draw"):
        points = f"{row['lost_points']:.2f} | {row['optimistic_points']:.2f}"
        yield f"| {row['model']} | {row['draw']} | `{row['winner']}` | {row['place']} of {row['of']} | {points} |"


@shown_on("docs/studies/h100/README.md")
def training_steps_of_the_h100() -> Iterator[str]:
    for row in record("h100/training_step")["steps"]:
        shape = "SmolLM2-135M" if row["shape"] == "smollm2-135m" else f"{row['layers']} layers of Mistral-7B's"
        plain, graph = (row[way]["s"] for way in ("kernel_by_kernel", "graph"))
        times = f"{1e3 * plain:.0f} ms | {1e3 * graph:.0f} ms | {plain / graph:.1f}"
        yield f"| {shape} | {row['dtype']} | {row['rank']} | {times} |"


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_what_the_records_say(name: str) -> None:
    page, parts = SHOWN[name]
    shown, on_page = list(parts()), text(page)
    assert shown and [part for part in shown if " ".join(part.split()) not in on_page] == []


def test_stages_of_the_h100_are_those_of_the_records() -> None:
    """Planned memory beside what was measured: the numbers that README's table of GPUs is judged by."""
    cells = re.findall(
        r"\| ([\d,]+) \| ([\d.]+) \| [\d,]+ \| (\d+)% \| ([\d.]+) GiB \| ([\d.]+) GiB \|",
        source("docs/studies/h100/README.md"),
    )
    stages = [row for row in record("h100/bench_gpu")["measurements"] if "planned_bytes" in row]
    assert len(cells) == 6 and set(cells) <= {
        (
            f"{row['tokens']:,}",
            f"{row['seconds']:.2f}",
            f"{row['utilisation'] * 100:.0f}",
            f"{row['taken_bytes'] / GIB:.2f}",
            f"{row['planned_bytes'] / GIB:.2f}",
        )
        for row in stages
    }


def test_the_charts_and_table_of_real_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert front_chart.main(["--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed in source("README.md")
    for name, shown in (("front_chart", printed), ("transfer", real_models.transfer(real_models.read()))):
        picture = f"{name}.png"
        with Image.open(ROOT / "docs" / "figures" / picture) as committed, Image.open(tmp_path / picture) as drawn:
            assert committed.info["Description"] == drawn.info["Description"] == shown  # else draw it again
            assert committed.size == drawn.size
    # By hand: the trials of a row, from their CSV file
    studies = STUDIES / "real_models"
    trials = {name: pd.read_csv(studies / name / "judged.csv") for name in real_models.TITLES}
    taylor = geometric_mean(trials["smollm2"].query("method == 'taylor'").ppl)
    assert f"| SmolLM2-135M -20% | 22.5 | {taylor:.1f} `taylor` |" in printed
    assert "Random removal ends above 1,000" in text("README.md")
    assert min(rows.query("method == 'random'").ppl.min() for rows in trials.values()) > 1000


def test_the_first_table_of_recipes() -> None:
    printed = quality_page.table()
    assert printed in source("docs/quality.md")
    # By hand: the runs of a row, from the CSV file of its trials
    runs = pd.read_csv(STUDIES / "smollm2-135m" / "contenders.csv").query("method == 'taylor' and num_samples == 128")
    cells = f"{geometric_mean(runs.ppl):.1f} | {runs.kl_text.mean():.2f} | {runs.kl_tasks.mean():.2f} | {len(runs)} |"
    assert f"(`taylor`) | {cells}" in printed


# The study of SmolLM2's grid
STUDY = STUDIES / "smollm2-135m"
ABLE = ("piqa", "hellaswag", "arc_easy")  # tasks on which the dense model tells right from wrong
STEPS = {"of one draw": "grid", "of three draws": "contenders", "at a ratio": "ratios"}
# Heading of a table, the measure in comparisons.csv, its sign on the page, its digits
GAP_COLUMNS = {
    "KL, text": ("kl_text", 1, 3),
    "KL, tasks": ("kl_tasks", 1, 3),
    "lost, nats": ("gold_logprob", -1, 2),
    "accuracy to dense, points": ("accuracy", 1, 1),
}


def trials_of(step: str) -> list[dict[str, str]]:
    return list(csv.DictReader((STUDY / f"{step}.csv").read_text(encoding="utf-8").splitlines()))


def mean_cell(column: str, trials: list[dict[str, Any]]) -> str | None:
    """Return what a table says under a heading that is a mean of runs."""
    if column == "right answer, nats":
        return f"{fmean(float(row['gold_logprob_mean']) for row in trials):.2f}"
    if column == "perplexity":
        return f"{geometric_mean([float(row['ppl']) for row in trials]):,.2f}"
    tasks = {"accuracy, three tasks": [f"acc_{task}" for task in ABLE], "accuracy, seven": ["acc_mean"]}.get(column)
    return tasks and f"{fmean(float(row[task]) for row in trials for task in tasks):.4f}".removeprefix("0")


def test_cells_of_the_study_are_those_of_its_trials_and_comparisons() -> None:
    gaps = {(r["step"], float(r["ratio"]), r["first"], r["second"], r["measure"]): r for r in trials_of("comparisons")}
    page, held = (STUDY / "README.md").read_text(encoding="utf-8").split("\n## Go on")[0], 0
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        (kind, *columns), _, *rows = [
            [part.strip() for part in line.strip("|").split("|")] for line in block.splitlines()
        ]
        for first, *cells in rows if kind in STEPS else ():
            name, _, removed = first.strip("`").partition("` at ")
            ratio, step = float(removed.rstrip("%")) / 100 if removed else 0.2, STEPS[kind]
            step = "control" if name.startswith("random") else step
            own = [row for row in trials_of(step) if float(row["pruning_ratio"]) == ratio]
            own = [row for row in own if f"{row['method']}-s{row['seq_len']}-n{row['num_samples']}" == name]
            runs: list[dict[str, Any]] = [record("smollm2-135m/dense")] if name == "dense" else own
            for column, cell in zip(columns, cells, strict=True):
                expected = mean_cell(column, runs)
                if column in GAP_COLUMNS and name != "dense":
                    measure, sign, digits = GAP_COLUMNS[column]
                    gap = gaps[step, ratio, name, "dense", measure]
                    expected = f"{sign * float(gap['value']):.{digits}f} ± {float(gap['stderr']):.{digits}f}"
                if expected is not None:
                    assert cell == expected, (kind, first, column)
                    held += 1
    assert held > 90
