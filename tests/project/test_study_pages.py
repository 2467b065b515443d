"""Every number of docs/studies, docs/quality.md, docs/gpu.md and README's results is computed from the committed records.

A function under `@said_on(page, count)` yields the `count` parts of that page that have numbers, made from the records alone.
The page of SmolLM2's grid, whose every digit is held, has a file of its own: test_study_page.py.
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

import pandas as pd
import pytest
from quality_table import MEASURES, markdown
from random_items import TASKS, random_items

from tune_prune.evaluation.engine.prefix_trees import count_tokens

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ROOT / "docs" / "studies"
GIB = 2**30
TINY = ("tiny-llama", "tiny-qwen2", "tiny-mistral")
HELD: dict[str, tuple[str, int, Callable[[], Iterator[str]]]] = {}


def said_on(page: str, count: int) -> Callable[[Callable[[], Iterator[str]]], Callable[[], Iterator[str]]]:
    """Register the parts of `page` that a function makes."""

    def register(parts: Callable[[], Iterator[str]]) -> Callable[[], Iterator[str]]:
        HELD[parts.__name__] = page, count, parts
        return parts

    return register


def text(page: str) -> str:
    """Return a page on one line, so that no line break is held."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


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


def perplexities() -> dict[str, list[float]]:
    """Return the perplexity of every draw of the published grid's contenders, by configuration."""
    found: dict[str, list[float]] = {}
    with (STUDIES / "smollm2-135m" / "contenders.csv").open(encoding="utf-8", newline="") as trials:
        for row in csv.DictReader(trials):
            name = f"{row['method']}-s{row['seq_len']}-n{row['num_samples']}"
            found.setdefault(name, []).append(float(row["ppl"]))
    return found


@said_on("docs/studies/quality.md", 17)
def whole_tables() -> Iterator[str]:
    for name in (
        "quality", "quality_draws", "quality_grid", "quality_mixed", "quality_mixed_layerwise", "quality_more_questions",
        "quality_recipe_parts", "quality_scores", "quality_scores_trained", "quality_scores_trained_alone",
        "quality_trained", "quality_trained_layerwise", "quality_two_steps", "quality_two_steps_layerwise",
        "quality_two_steps_trained", "quality_two_steps_trained_layerwise", "quality_uniform",
    ):  # fmt: skip
        yield markdown(record(f"smollm2-135m/{name}"))


@said_on("docs/studies/quality.md", 1)
def means_of_perplexity() -> Iterator[str]:
    drawn = perplexities()
    rows = [row for path in (STUDIES / "smollm2-135m").glob("quality*.json") for row in json.loads(path.read_text())]
    drawn_rows = [row for row in rows if isinstance(row, dict) and row["draws"] > 1 and row["configuration"] in drawn]
    assert len(drawn_rows) == 15
    for row in drawn_rows:
        assert row["ppl"] == pytest.approx(geometric_mean(drawn[row["configuration"]]), rel=1e-12), row
    both = (f"{mean(drawn['taylor-s256-n128']):.4f}" for mean in (geometric_mean, fmean))
    yield "of `taylor-s256-n128` the two are {} and {}.".format(*both)


@said_on("docs/studies/quality.md", 9)
def the_same_on_a_gpu() -> Iterator[str]:
    whole, drawn = record("h100/smollm2_quality"), perplexities()
    off: dict[tuple[str, str, int], float] = {}
    for table, rows in whole["tables"].items():
        of_cpu = by_name(f"smollm2-135m/{table}")
        for row in rows:
            key = row["model"], row["configuration"]
            assert of_cpu[key]["draws"] == row["draws"] and (*key, row["draws"]) not in off
            cpu = dict(of_cpu[key])
            if row["draws"] > 1 and row["configuration"] in drawn:  # the GPU's record has the arithmetic mean
                cpu["ppl"] = fmean(drawn[row["configuration"]])
            off[*key, row["draws"]] = max(abs(row[measure] / cpu[measure] - 1) for measure in (*MEASURES, "ppl"))
    far = sorted(value for value in off.values() if value >= 0.001)
    assert [sum(value < 0.01 for value in far), len(far)] == [8, 14] and all(value < 0.0112 for value in far[:10])
    assert [f"{100 * value:.2g}" for value in far[10:]] == ["2.2", "13", "14", "16"]
    yield f"{len(off)} rows of the tables above"
    yield f"{len(off) - len(far)} of the {len(off)} are within 0.1%"
    yield "Eight are off by 0.1 to 1%, two by 1.1%"
    (again,) = whole["tables"]["quality_trained"]
    yield "again regains {}%, {}% and {}%".format(*shares(again))
    (steps,) = (row for row in whole["tables"]["quality_two_steps"] if row["configuration"].endswith("-k2"))
    yield "{}%, {}% and {}% of what `taylor-s256-n128` loses".format(*shares(steps))
    seconds = {row["configuration"]: row["seconds"] for row in whole["tables"]["quality"]}
    one = seconds["gate_fisher-s128-n128-least_squares"]
    yield f"`gate_fisher` with a refit took {one:.1f} (242 of one core), in two steps {steps['seconds']:.1f} (2,207)"
    before, since = whole["training_100_steps_s"], whole["training_100_steps_as_a_graph_s"]
    yield f"100 steps of training {min(before):.0f} to {max(before):.0f} before they were graphs (12 to 17 minutes)"
    yield f"and {min(since):.0f} to {max(since):.0f} since"
    first = whole["forecast_of_one_search"]["before"]
    yield f"after {first['took_s']:.0f} seconds, and {first['with_start_s'] - first['took_s']:.0f} before them"


@said_on("docs/studies/quality.md", 4)
def masks() -> Iterator[str]:
    names = {"wanda": "Wanda", "sparsegpt": "SparseGPT"}
    for row in record("smollm2-135m/masks")["rows"]:
        values = " | ".join(f"{row[name]:.3f}" for name in ("kl_text", "kl_tasks", "gold_lost"))
        accuracy = f"{row['accuracy']:.3f} ± {row['accuracy_stderr']:.3f}"
        yield f"| {names.get(row['masks'], row['masks'])} | {values} | {row['ppl']:.2f} | {accuracy} |"


@said_on("docs/studies/quality.md", 22)
def aligned_widths() -> Iterator[str]:
    changes = ["kl_text", "kl_tasks", "gold_logprob_mean", "acc_mean"]
    for model, trials in pd.read_csv(STUDIES / "embedded" / "shapes.csv").groupby("model"):
        by_shape = trials.set_index(["shape", "method", "seed"]).drop(columns="model").sort_index()
        for shape in ("aligned-4", "aligned-8"):
            change = (by_shape.loc[shape] - by_shape.loc["free"]).groupby("seed").mean()
            assert len(change) == 3
            mean, error = change.mean(), change.std() / math.sqrt(3)
            cells = [f"{mean[name]:+.3f} ± {error[name]:.3f}" for name in changes[:3]]
            cells += [f"{100 * mean.acc_mean:+.2f} ± {100 * error.acc_mean:.2f}"]
            removed = by_shape.loc[shape, "removed_fraction"].mean()
            yield f"| {model} | `{shape}` | {' | '.join(cells)} | {removed:.2%} |"
    runs = pd.read_csv(STUDIES / "smollm2-135m" / "shapes.csv", keep_default_na=False)
    for (method, refit), trials in runs.groupby(["method", "compensation"]):
        by_shape = trials.set_index(["shape", "seed"]).drop(columns=["model", "method", "compensation"]).sort_index()
        for shape in ("free", "aligned-64"):
            own = by_shape.loc[shape]
            assert len(own) == 3
            mean, error = own.mean(), own.std() / math.sqrt(3)
            cells = [f"{mean[name]:.{n}f} ± {error[name]:.{n}f}" for name, n in zip(changes, (3, 3, 2), strict=False)]
            cells += [f"{mean.acc_mean:.3f}".lstrip("0"), f"{geometric_mean(own.ppl):.2f}"]
            cells += [f"{mean.removed_fraction:.2%}"]
            yield f"| `{method}` | {'no' if refit == 'none' else 'yes'} | `{shape}` | {' | '.join(cells)} |"
        change = (by_shape.loc["aligned-64"] - by_shape.loc["free"])[["kl_text", "kl_tasks"]]
        yield from (f"{change[name].mean():+.3f} ± {change[name].sem():.3f}" for name in change)


@said_on("docs/studies/quality.md", 24)
def other_ratios() -> Iterator[str]:
    page = (STUDIES / "quality.md").read_text(encoding="utf-8").splitlines()
    for name in ("quality_ratios", "quality_ratios_layerwise"):
        for row in record(f"smollm2-135m/{name}"):
            losses = f"| {row['kl_text']:.3f} | {row['kl_tasks']:.3f} | {row['gold_logprob_mean']:.2f} | "
            (line,) = (line for line in page if losses in line and line.endswith(f"| {row['ppl']:.1f} |"))
            assert f"| {', '.join(shares(row))}% |" in line or row["kl_text_stderr"] == 0
            yield losses


@said_on("docs/studies/quality.md", 2)
def wider_adapters() -> Iterator[str]:
    ranks = record("h100/training_ranks")
    section = (STUDIES / "quality.md").read_text(encoding="utf-8").partition("### Wider adapters")[2]
    rows = {row["configuration"]: row for row in ranks["after_400_steps"]}
    shown = re.findall(r"^\| (\d+) \| ([\d.]+) \| (.*) \|$", section.partition("\n### ")[0], re.MULTILINE)
    assert {f"{rank} {rate}" for rank, rate, _ in shown} == ranks["held_out_of_400_steps"].keys()
    for rank, rate, cells in shown:
        name = "gate_fisher-s128-n256-least_squares-lora-i400"
        row = rows[name + (f"-e{rate}" if rate != "0.001" else "") + (f"-a{rank}" if rank != "8" else "")]
        numbers = [f"{row['kl_text']:.3f}", f"{row['kl_tasks']:.3f}", f"{row['gold_logprob_mean']:.2f}"]
        held_out = ranks["held_out_of_400_steps"][f"{rank} {rate}"]
        assert cells.split(" | ") == [f"{held_out:.2f}", *numbers, f"{', '.join(shares(row, error=False))}%"]
    errors = [draw["recovery_error"] for draw in ranks["held_out_of_1200_steps"].values()]
    assert sorted(error < 1 for error in errors) == [False, False, True]
    for reference, sentence in (
        ("taylor-s256-n128", "{}% of what `{}` loses"),
        ("layerwise-s32-n256", "of `{1}` {0}%"),
    ):
        (row,) = (row for row in ranks["after_1200_steps"][reference] if "lora" in row["configuration"])
        yield sentence.format("{}, {} and {}".format(*shares(row)), reference)


@said_on("docs/studies/embedded/README.md", 3 * 3)
def equal_cost() -> Iterator[str]:
    for one in (row[name] for row in record("embedded/equal_cost") for name in ("reference", "other", "whole")):
        points = f"{one['points']:+.1f} ± {one['stderr_points']:.1f} " if "points" in one else ""
        yield (
            f"| {one['trials']} | {one['tokens'] / 1e6:.2f} | `{one['best']}` | {one['accuracy']:.3f} | "
            f"{one['cross_fitted']:.3f} ± {one['stderr']:.3f} | {points}| {one['lowest_kl_tasks']:.4f} |"
        )


@said_on("docs/studies/embedded/README.md", 3 * 3)
def steps_of_toy_models() -> Iterator[str]:
    rows = by_name("embedded/quality_steps")
    for model in TINY:
        steps = [f"{refit}{k}" for refit in ("", "-least_squares") for k in ("", "-k2", "-k4", "-k8")]
        own = [rows[model, f"taylor-s128-n128{step}"] for step in steps]
        assert {row["draws"] for row in own} == {3} and own[0]["kl_tasks_regained"] == 0
        for measure, name in MEASURES.items():
            label = model if measure == "kl_text" else ""
            yield " | ".join([f"| {label}".rstrip(), name, *(f"{share(row, measure)}%" for row in own[1:])]) + " |"


@said_on("docs/studies/embedded/README.md", 18 + 27)
def every_score_of_toy_models() -> Iterator[str]:
    rows, at_ratios = by_name("embedded/quality"), by_name("embedded/quality_ratios")
    assert [len(rows), len(at_ratios)] == [129, 108]
    assert {row["draws"] for row in (*rows.values(), *at_ratios.values())} == {3}
    page = (STUDIES / "embedded" / "README.md").read_text(encoding="utf-8")
    for name, percent, score in re.findall(r"^\| (tiny-\w+)(?: \| (\d+)%)? \| `(\w+)` \| .* \|$", page, re.MULTILINE):
        model = f"{name}@{int(percent) / 100:g}" if percent else name
        recipes = (f"{score}-s128-n128{refit}{lora}" for lora in ("", "-lora") for refit in ("", "-least_squares"))
        own = [(rows | at_ratios)[model, recipe] for recipe in recipes]
        cells = [f"{share(row, 'kl_tasks')}%" for row in own] + [f"{row['accuracy']:.3f}" for row in own]
        yield f"| {name} |{f' {percent}% |' if percent else ''} `{score}` | {' | '.join(cells)} |"


@said_on("docs/studies/embedded/README.md", 9)
def adapters_of_other_ranks() -> Iterator[str]:
    rates = ("0.001", "0.003", "0.01", "0.03")
    for scale, models in record("embedded/training_ranks")["scales"].items():
        for model, errors in models.items():
            for rank in (2, 8, 32):
                cells = " | ".join(f"{errors[f'{rank} {rate}']:.2f}" for rate in rates)
                yield f"| {model} | {scale} | {rank} | {cells} |"
            best = {min(rates, key=lambda rate, own=rank: errors[f"{own} {rate}"]) for rank in (2, 8, 32)}
            assert best == ({"0.003"} if scale == "16 / rank" else {"0.01", "0.003", "0.001"})


@said_on("docs/studies/methods.md", 8)
def shares_of_layers() -> Iterator[str]:
    rows = by_name("embedded/allocation")
    names = {"removal_power: ": "p", "layer_cap: ": "x", "normalization: ": "by_"}
    page = (STUDIES / "methods.md").read_text(encoding="utf-8")
    for method, key, value in re.findall(r"^\| `(\w+)`, `(\w+: )([\w.]+)` \| .* \|$", page, re.MULTILINE):
        base = f"{method}-s128-n128"
        pairs = [(rows[model, f"{base}-{names[key]}{value}"], rows[model, base]) for model in TINY]
        changes = [f"{100 * (own['kl_tasks'] / base['kl_tasks'] - 1):+.0f}" for own, base in pairs]
        if method != "blockwise":  # of which the record has no errors beside itself
            errors = [f"{100 * own['kl_tasks_stderr']:.0f}" for own, _ in pairs]
            changes = [f"{change} ± {error}" for change, error in zip(changes, errors, strict=True)]
        accuracies = [", ".join(f"{row['accuracy']:.3f}"[1:] for row in column) for column in zip(*pairs, strict=True)]
        yield f"| `{method}`, `{key}{value}` | {' | '.join([*(f'{change}%' for change in changes), *accuracies])} |"


@said_on("docs/studies/draws.md", 10)
def winners_of_one_draw() -> Iterator[str]:
    rows = record("embedded/winners_by_draw")
    for row in rows:
        points = f"{row['lost_points']:.2f} | {row['optimistic_points']:.2f}"
        yield f"| {row['model']} | {row['draw']} | `{row['winner']}` | {row['place']} of {row['of']} | {points} |"
    lost, flattered = (fmean(row[name] for row in rows) for name in ("lost_points", "optimistic_points"))
    yield (
        f"{sum(row['place'] == 1 for row in rows)} of {len(rows)} are. On average a winner of one draw loses {lost:.2f} "
        f"points against the winner of three, and its own draw had flattered it by {flattered:.2f}."
    )


def stages(name: str) -> dict[str, dict[str, Any]]:
    return {row["stage"]: row for row in record(f"h100/{name}")["measurements"] if "stage" in row}


def measured() -> dict[str, dict[str, Any]]:
    return {row["measured"]: row for row in record("h100/bench_gpu_plan")["measurements"] if "measured" in row}


@pytest.mark.parametrize(
    ("cells", "count", "rows"),
    [
        (
            r"\| ([\d,]+) \| ([\d.]+) \| [\d,]+ \| (\d+)% \| ([\d.]+) GiB \| ([\d.]+) GiB \|",
            6,
            lambda: (row for row in stages("bench_gpu").values() if "planned_bytes" in row),
        ),
        (
            r"\| (?:[\d,]+|64 rows) \| ([\d,]+) \| ([\d.]+) \| (\d+)% \| ([\d.]+) GiB \|\n",
            11,
            lambda: (
                row
                for name in ("bench_gpu", "bench_gpu_batches")
                for row in stages(name).values()
                if "zero-shot" in row["stage"]
            ),
        ),
    ],
    ids=["stages of a 7B model", "zero-shot rows"],
)
def test_cells_of_the_h100_are_those_of_a_stage(cells: str, count: int, rows: Callable[[], Iterator[dict]]) -> None:
    shown = re.findall(cells, (STUDIES / "h100" / "README.md").read_text(encoding="utf-8"))
    numbers = [
        (
            f"{row['tokens']:,}",
            f"{row['seconds']:.2f}",
            f"{row['utilisation'] * 100:.0f}",
            *(f"{row[name] / GIB:.2f}" for name in ("taken_bytes", "planned_bytes") if name in row),
        )
        for row in rows()
    ]
    assert len(shown) == count and all(any(own[: len(one)] == one for own in numbers) for one in shown)


@said_on("docs/studies/h100/README.md", 6)
def rates_of_stages() -> Iterator[str]:
    page = text("docs/studies/h100/README.md")
    for row in stages("bench_gpu").values():
        rate = f"| {row['seconds']:.2f} | {int(row['tokens_per_s']):,} | {row['utilisation'] * 100:.0f}% |"
        if "planned_bytes" in row and f"| {row['tokens']:,} {rate}" in page:
            yield rate


@said_on("docs/studies/h100/README.md", 1)
def batches_of_a_small_model() -> Iterator[str]:
    rows = [row for row in record("h100/zero_shot_batches")["measurements"] if row["shape"] == "smollm2-135m"]
    best = {row["batch_tokens"]: min(row["seconds"]) for row in rows}
    yield f"{best[4096]:.2f} seconds at 4,096 tokens, {best[8192]:.2f} at 8,192, {best[16_384]:.2f} at 16,384"


@said_on("docs/studies/h100/README.md", 12)
def recipe() -> Iterator[str]:
    cells = re.findall(r"\| ([\d.]+) \| ([\d.]+) GiB \| [\d.]+ GiB \|\n", (STUDIES / "h100" / "README.md").read_text())
    of_stages = record("h100/recipe")["stages"].values()
    assert set(cells) <= {(f"{row['seconds']:.1f}", f"{row['peak_bytes'] / GIB:.2f}") for row in of_stages}
    yield from (f"| {seconds} | {peak} GiB |" for seconds, peak in cells)


@said_on("docs/studies/h100/README.md", 11)
def ways_and_what_plans_assume() -> Iterator[str]:
    plan = measured()
    ways = plan["ways"]
    for name in {name.rpartition(" ")[0] for name in ways if name.endswith(" s")}:
        if not name.endswith("perplexity"):
            taken, planned = (f"{ways[f'{name} {what}'] / GIB:.2f} GiB" for what in ("bytes", "planned_bytes"))
            label = name.replace(", host", ", hidden states in host memory")
            yield f"| {label} | {ways[f'{name} s']:.1f} s | {taken} | {planned} |"
    widths = [value for name, value in plan["widths"].items() if name != "measured"]
    yield from (f"{value / 1e12:.0f}" for value in widths)
    yield f"{plan['sharing']['ratio']:.2f} of one's tokens per second"
    for kind, digits in (("pageable", 1), ("pinned", 0)):
        yield f"{plan['transfers'][f'{kind}_to_device_bytes_per_s'] / 1e9:.{digits}f} GB/s from {kind}"


@said_on("docs/studies/h100/README.md", 2)
def a_small_model_in_float32() -> Iterator[str]:
    found = record("h100/smollm2_quality")
    page = (STUDIES / "h100" / "README.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| [^|\n]+ \| ([\d.]+) GiB \| [\d.]+ GiB \|\n", page, re.MULTILINE)
    assert sorted(cells) == sorted(f"{peak / GIB:.2f}" for peak in found["peak_bytes"].values())
    before, nine = found["forecast_of_one_search"]["before"], found["forecasts_of_nine_at_once"].values()
    least, most = before["predicted_s"]
    yield f"was to take {least:.0f} to {most:.0f} seconds and took {before['took_s']:.0f} (its start not counted)."
    late = [one["took_s"] / one["predicted_s"][1] for one in nine if one["took_s"] > one["predicted_s"][1]]
    assert all(one["took_s"] >= one["predicted_s"][0] for one in nine)
    yield f"{len(nine) - len(late)} took as long as forecast and {len(late)} up to {max(late):.1f} times as long as the most"


@said_on("docs/studies/h100/README.md", 9)
def a_training_step_as_one_launch() -> Iterator[str]:
    found = record("h100/training_step")
    for row in found["steps"]:
        shape = "SmolLM2-135M" if row["shape"] == "smollm2-135m" else f"{row['layers']} layers of Mistral-7B's"
        plain, graph = (row[way]["s"] for way in ("kernel_by_kernel", "graph"))
        times = f"{1e3 * plain:.0f} ms | {1e3 * graph:.0f} ms | {plain / graph:.1f}"
        yield f"| {shape} | {row['dtype']} | {row['rank']} | {times} |"
    graphs = [row["graph"] for row in found["steps"]]
    more = [(row["graph"]["peak_bytes"] - row["kernel_by_kernel"]["peak_bytes"]) / GIB for row in found["steps"]]
    yield f"{min(more):.2f} to {max(more):.2f} GiB more"
    yield f"took {min(row['first_s'] for row in graphs):.2f} to {max(row['first_s'] for row in graphs):.2f} seconds"
    off = [row["largest_difference"] for row in found["steps"]]
    assert max(off[:2]) < 2.5e-4 and [round(value, 2) for value in off[2:]] == [0.1, 0.25]
    peaks, keys = found["trial_peak_bytes"], found["shared_keys"]
    yield f"took {peaks['8'] / GIB:.2f} GiB of 2.27 planned, of rank 64 {peaks['64'] / GIB:.2f} of 2.54."
    yield f"{1e3 * keys['float32 shared s']:.1f} ms and {keys['float32 shared bytes'] / GIB:.2f} GiB"
    yield f"{1e3 * keys['float32 repeated s']:.1f} ms and nothing more"
    assert not keys["float32 repeated bytes"]
    assert {f"{1e3 * keys[f'bfloat16 {way} s']:.2f}" for way in ("shared", "repeated")} == {"0.22"}


@said_on("docs/studies/h100/README.md", 3)
def the_grid_on_one_h100() -> Iterator[str]:
    """45 trials on all items by the rates of the table; tokens by the items' lengths."""
    by_task = random_items(32_768, 200, 1024)
    shared, plain = (
        sum(TASKS[name].rows / 200 * count_tokens(task, share) for name, task in by_task.items())
        for share in (True, False)
    )
    slow, fast = (
        {name: row["tokens_per_s"] for name, row in stages(bench).items()}
        for bench in ("bench_gpu", "bench_gpu_batches")
    )
    zero_shot = shared / fast["padded: zero-shot"]
    dense, hflm = shared / fast["dense: zero-shot shared 4096"], plain / fast["dense: zero-shot as HFLM, 64 rows"]
    perplexity = 330_000 / fast["padded: perplexity"]  # WikiText-2's test in tokens of a 32k vocabulary
    tokens = (16 + 32 + 64 + 128 + 256) * 512
    gradients = tokens / slow["gradients 512 x 256"]
    removals = tokens / 5 * (1 + 3 * 32) / slow["removal 102 x 256, 3 kinds"]
    trial = zero_shot + perplexity + stages("bench_gpu_batches")["prune padded"]["seconds"]
    minutes = (gradients + removals + 45 * trial + dense + 10) / 60
    yield f"**{minutes:.0f} minutes on one H100**: {gradients / 60:.1f} for the gradient passes, {removals / 60:.1f} for"
    yield f"{trial:.0f} seconds for a trial ({zero_shot:.0f} of zero-shot, {perplexity:.0f} of perplexity)"
    yield f"takes {dense:.0f} seconds, the way HFLM runs it {hflm:.0f} ({hflm / dense:.1f} times as long)"


@said_on("docs/gpu.md", 7)
def what_users_read_of_the_h100() -> Iterator[str]:
    seconds = {name: row["seconds"] for name, row in stages("bench_gpu").items() if "perplexity" in name}
    free, aligned = (seconds[f"{kind}: perplexity"] / seconds["dense: perplexity"] for kind in ("free", "aligned"))
    yield f"takes {aligned:.0%} of the original's time; in shape `free` {free:.1f} times as long"
    plan = measured()
    odd, _, even = sorted(value for name, value in plan["widths"].items() if name != "measured")
    yield f"11,469 channels reach {odd / 1e12:.0f} TFLOP/s, of 11,520 (a multiple of 64) {even / 1e12:.0f}"
    yield f"{plan['sharing']['ratio']:.2f} of one trial's tokens a second"
    pageable, pinned = (plan["transfers"][f"{kind}_to_device_bytes_per_s"] / 1e9 for kind in ("pageable", "pinned"))
    yield f"{pageable:.1f} GB/s, where pinned memory would give {pinned:.0f}"
    gains = [row["kernel_by_kernel"]["s"] / row["graph"]["s"] for row in record("h100/training_step")["steps"]]
    yield f"{min(gains):.1f} to {max(gains):.1f} times as fast"
    page = text("docs/studies/h100/README.md")
    (grid,) = re.findall(r"\*\*(\d+) minutes on one H100\*\*", page)
    ((dense, hflm),) = re.findall(r"takes (\d+) seconds, the way HFLM runs it (\d+)", page)
    yield f"**{grid} minutes** on an H100"
    yield f"takes {dense} seconds, with lm-eval's HFLM {hflm}"


PLAIN, TWO_STEPS = "gate_fisher-s128-n128-least_squares", "gate_fisher-s128-n512-least_squares-t131072"
MIXED, BEST = "gate_fisher-s128-n256-least_squares-t65536", f"{TWO_STEPS}-lora-i400-e0.003-k2"


@said_on("docs/quality.md", 17)
def quality_for_users() -> Iterator[str]:
    best, taylor = row_of("quality_draws", PLAIN), row_of("quality_grid", "taylor-s256-n128")
    question, steps = row_of("quality_mixed", MIXED), row_of("quality_two_steps", f"{TWO_STEPS}-k2")
    trained = row_of("quality_two_steps_trained", BEST)
    yield f"the perplexity from {taylor['ppl']:.1f}, the published grid's best, to {best['ppl']:.1f}"
    yield f"{share(row_of('quality_grid', PLAIN), 'kl_text')}% smaller on text"
    yield f"{share(row_of('quality_grid', PLAIN), 'kl_tasks')}% on questions"
    yield f"falls from {best['kl_tasks']:.2f} to {question['kl_tasks']:.2f}"
    yield f"On text it is {question['kl_text']:.2f}, from {best['kl_text']:.2f}"
    yield f"is {steps['kl_text']:.2f} on text and {steps['kl_tasks']:.2f} on questions"
    yield f"takes {steps['seconds'] / 60:.0f} minutes"
    for label, table in (("perplexity (`taylor`)", ""), ("right answers (`layerwise`)", "_layerwise")):
        own = shares(row_of(f"quality_two_steps{table}", f"{TWO_STEPS}-k2"))
        yield f"| best by {label} | {' | '.join(f'{one}%' for one in own)} |"
    yield f"[from {steps['ppl']:.1f} to {trained['ppl']:.1f}]"
    yield "Of `taylor`'s damage {}, {} and {}% are then undone".format(*shares(trained, error=False))
    layerwise = shares(row_of("quality_two_steps_trained_layerwise", BEST), error=False)
    yield "of `layerwise`'s {}, {} and {}%".format(*layerwise)
    at = {
        ratio: [row_of("quality_ratios", f"{MIXED}{lora}", f"smollm2@{ratio}")["ppl"] for lora in ("", "-lora-e0.003")]
        for ratio in (0.35, 0.5)
    }
    yield "At 35% they bring the perplexity from {:.1f} to {:.1f}, at 50% from {:.1f} to {:.1f}".format(
        *at[0.35], *at[0.5]
    )
    recipes = [row["accuracy"] for row in record("smollm2-135m/quality")]
    dense = record("smollm2-135m/dense")["acc_mean"]
    yield f"{min(recipes):.3f} to {max(recipes):.3f}, and the original has {dense:.3f}".replace("0.", ".")
    yield f"In [one table of {('seven', 'eight')[len(recipes) - 7]} recipes]"
    free, uniform = (
        row_of("quality_uniform", f"gate_fisher-s128-n256{shape}-least_squares-t65536-lora-e0.003")
        for shape in ("", "-uniform")
    )
    more = [100 * (uniform[name] / free[name] - 1) for name in ("kl_text", "kl_tasks")]
    yield f"[{more[0]:.0f}% more distance on text and {more[1]:.0f}% on questions]"
    yield f"keep a distance of {record('smollm2-135m/masks')['rows'][-1]['kl_text']:.2f} on text"


@pytest.mark.parametrize("name", HELD)
def test_the_page_says_what_the_records_say(name: str) -> None:
    page, count, parts = HELD[name]
    said = list(parts())
    assert len(said) == count
    on_page = text(page)
    assert [part for part in said if " ".join(part.split()) not in on_page] == []
