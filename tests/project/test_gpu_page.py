"""docs/studies/h100/README.md says what its records say, and docs/gpu.md what it takes from there."""

from __future__ import annotations

import re
from typing import Any

from bench_gpu import WIKITEXT_TOKENS
from random_items import TASKS, random_items

from tests.tuning.test_memory_on_a_gpu import STUDY, record
from tune_prune.evaluation.engine.prefix_trees import count_tokens

PAGE = (STUDY / "README.md").read_text(encoding="utf-8")
SHORT = (STUDY.parents[1] / "gpu.md").read_text(encoding="utf-8")
GIB = 2**30


def rows(name: str) -> dict[str, dict[str, Any]]:
    return {row["stage"]: row for row in record(name)["measurements"] if "stage" in row}


def test_stages_of_a_7b_model():
    """Seconds, tokens per second, share of the peak and memory, as the table has them."""
    cells = re.findall(r"\| ([\d,]+) \| ([\d.]+) \| ([\d,]+) \| (\d+)% \| ([\d.]+) GiB \| ([\d.]+) GiB \|", PAGE)
    found = {
        (
            f"{row['tokens']:,}", f"{row['seconds']:.2f}", f"{int(row['tokens_per_s']):,}", f"{row['utilisation'] * 100:.0f}",
            f"{row['taken_bytes'] / GIB:.2f}", f"{row['planned_bytes'] / GIB:.2f}",
        )
        for row in rows("bench_gpu").values()
        if "planned_bytes" in row
    }  # fmt: skip
    assert len(cells) == 6 and set(cells) <= found


def test_zero_shot_rows():
    cells = re.findall(r"\| (?:[\d,]+|64 rows) \| ([\d,]+) \| ([\d.]+) \| (\d+)% \| ([\d.]+) GiB \|\n", PAGE)
    found = {
        (
            f"{row['tokens']:,}",
            f"{row['seconds']:.2f}",
            f"{row['utilisation'] * 100:.0f}",
            f"{row['taken_bytes'] / GIB:.2f}",
        )
        for name in ("bench_gpu", "bench_gpu_batches")
        for stage, row in rows(name).items()
        if "zero-shot" in stage
    }
    assert len(cells) == 11 and set(cells) <= found


def test_batches_of_a_small_model():
    found = {
        row["batch_tokens"]: min(row["seconds"])
        for row in record("zero_shot_batches")["measurements"]
        if row["shape"] == "smollm2-135m"
    }
    said = f"{found[4096]:.2f} seconds at\n4,096 tokens, {found[8192]:.2f} at 8,192, {found[16_384]:.2f} at 16,384"
    assert said in PAGE


def test_recipe_and_ways():
    stages = record("recipe")["stages"].values()
    cells = re.findall(r"\| ([\d.]+) \| ([\d.]+) GiB \| [\d.]+ GiB \|\n", PAGE)
    assert len(cells) == 12
    assert set(cells) <= {(f"{row['seconds']:.1f}", f"{row['peak_bytes'] / GIB:.2f}") for row in stages}
    measured = {row["measured"]: row for row in record("bench_gpu_plan")["measurements"] if "measured" in row}
    ways, names = measured["ways"], {name.rpartition(" ")[0] for name in measured["ways"] if name.endswith(" s")}
    for name in names - {name for name in names if name.endswith("perplexity")}:
        taken, planned = (f"{ways[f'{name} {what}'] / GIB:.2f} GiB" for what in ("bytes", "planned_bytes"))
        row = f"| {name.replace(', host', ', hidden states in host memory')} | {ways[f'{name} s']:.1f} s | {taken} | {planned} |"
        assert row in PAGE
    widths = {name.rpartition("_")[2]: value for name, value in measured["widths"].items() if name != "measured"}
    assert all(f"{value / 1e12:.0f}" in PAGE for value in widths.values()) and len(widths) == 3
    assert f"{measured['sharing']['ratio']:.2f} of one's tokens per second" in PAGE
    transfers = measured["transfers"]
    assert f"{transfers['pageable_to_device_bytes_per_s'] / 1e9:.1f} GB/s from pageable" in PAGE
    assert f"{transfers['pinned_to_device_bytes_per_s'] / 1e9:.0f} GB/s from pinned" in PAGE


def test_a_small_model_in_float32():
    found = record("smollm2_quality")
    cells = re.findall(r"^\| [^|\n]+ \| ([\d.]+) GiB \| [\d.]+ GiB \|\n", PAGE, re.MULTILINE)
    assert sorted(cells) == sorted(f"{peak / GIB:.2f}" for peak in found["peak_bytes"].values())
    before, nine = found["forecast_of_one_search"]["before"], found["forecasts_of_nine_at_once"].values()
    least, most = before["predicted_s"]
    assert (
        f"was to take {least:.0f} to {most:.0f}\n  seconds and took {before['took_s']:.0f} (its start not counted)."
        in PAGE
    )
    late = [one["took_s"] / one["predicted_s"][1] for one in nine if one["took_s"] > one["predicted_s"][1]]
    assert all(one["took_s"] >= one["predicted_s"][0] for one in nine)
    said = f"{len(nine) - len(late)} took as long as forecast and {len(late)} up to {max(late):.1f} times as long as the most"
    assert said in PAGE


def test_a_training_step_as_one_launch():
    found = record("training_step")
    for row in found["steps"]:
        shape = "SmolLM2-135M" if row["shape"] == "smollm2-135m" else f"{row['layers']} layers of Mistral-7B's"
        plain, graph = (row[way]["s"] for way in ("kernel_by_kernel", "graph"))
        cells = (
            shape,
            row["dtype"],
            row["rank"],
            f"{1e3 * plain:.0f} ms",
            f"{1e3 * graph:.0f} ms",
            f"{plain / graph:.1f}",
        )
        assert f"| {' | '.join(map(str, cells))} |\n" in PAGE
    more = [(row["graph"]["peak_bytes"] - row["kernel_by_kernel"]["peak_bytes"]) / GIB for row in found["steps"]]
    assert f"{min(more):.2f} to {max(more):.2f} GiB more" in PAGE
    firsts, off = (
        [row["graph"]["first_s"] for row in found["steps"]],
        [row["largest_difference"] for row in found["steps"]],
    )
    assert f"took {min(firsts):.2f} to {max(firsts):.2f} seconds" in PAGE
    assert max(off[:2]) < 2.5e-4 and [round(value, 2) for value in off[2:]] == [0.1, 0.25]
    peaks = found["trial_peak_bytes"]
    assert f"took {peaks['8'] / GIB:.2f} GiB of 2.27 planned, of rank 64 {peaks['64'] / GIB:.2f} of 2.54." in PAGE
    keys = found["shared_keys"]
    assert f"{1e3 * keys['float32 shared s']:.1f} ms and {keys['float32 shared bytes'] / GIB:.2f} GiB" in PAGE
    assert f"{1e3 * keys['float32 repeated s']:.1f} ms and nothing more" in PAGE and not keys["float32 repeated bytes"]
    assert {f"{1e3 * keys[f'bfloat16 {way} s']:.2f}" for way in ("shared", "repeated")} == {"0.22"}


def test_forecast_of_the_grid():
    """45 trials on all items, by the rates of the table; tokens by the items' lengths."""
    by_task = random_items(32_768, 200, 1024)
    whole = {
        share: sum(TASKS[name].rows / 200 * count_tokens(task, share) for name, task in by_task.items())
        for share in (True, False)
    }
    slow, fast = rows("bench_gpu"), rows("bench_gpu_batches")
    zero_shot = whole[True] / fast["padded: zero-shot"]["tokens_per_s"]
    dense = whole[True] / fast["dense: zero-shot shared 4096"]["tokens_per_s"]
    hflm = whole[False] / fast["dense: zero-shot as HFLM, 64 rows"]["tokens_per_s"]
    text = WIKITEXT_TOKENS / fast["padded: perplexity"]["tokens_per_s"]
    tokens = (16 + 32 + 64 + 128 + 256) * 512
    gradients = tokens / slow["gradients 512 x 256"]["tokens_per_s"]
    removals = tokens / 5 * (1 + 3 * 32) / slow["removal 102 x 256, 3 kinds"]["tokens_per_s"]
    trial = zero_shot + text + fast["prune padded"]["seconds"]
    minutes = (gradients + removals + 45 * trial + dense + 10) / 60
    assert (
        f"**{minutes:.0f} minutes on one H100**: {gradients / 60:.1f}\nfor the gradient passes, {removals / 60:.1f} for"
        in PAGE
    )
    assert f"{trial:.0f} seconds for a trial ({zero_shot:.0f} of zero-shot, {text:.0f} of perplexity)" in PAGE
    assert f"takes {dense:.0f} seconds, the way HFLM runs it {hflm:.0f} ({hflm / dense:.1f} times as long)" in PAGE


def test_the_short_page_says_what_the_study_says():
    seconds = {name: row["seconds"] for name, row in rows("bench_gpu").items() if "perplexity" in name}
    free, aligned = (seconds[f"{kind}: perplexity"] / seconds["dense: perplexity"] for kind in ("free", "aligned"))
    assert f"takes {aligned:.0%} of the original's time; in shape `free` {free:.1f} times as long" in SHORT
    measured = {row["measured"]: row for row in record("bench_gpu_plan")["measurements"] if "measured" in row}
    odd, _, even = sorted(value for name, value in measured["widths"].items() if name != "measured")
    assert f"11,469 channels reach {odd / 1e12:.0f} TFLOP/s, of 11,520 (a multiple of 64) {even / 1e12:.0f}" in SHORT
    assert f"{measured['sharing']['ratio']:.2f} of one trial's tokens a second" in SHORT
    pageable, pinned = (measured["transfers"][f"{way}_to_device_bytes_per_s"] / 1e9 for way in ("pageable", "pinned"))
    assert f"{pageable:.1f} GB/s, where pinned memory would give {pinned:.0f}" in SHORT
    gains = [row["kernel_by_kernel"]["s"] / row["graph"]["s"] for row in record("training_step")["steps"]]
    assert f"{min(gains):.1f} to {max(gains):.1f} times as fast" in SHORT
    (grid,) = re.findall(r"\*\*(\d+) minutes on one H100\*\*", PAGE)
    ((dense, hflm),) = re.findall(r"takes (\d+) seconds, the way HFLM runs it (\d+)", PAGE)
    assert f"**{grid} minutes** on an H100" in SHORT and f"takes {dense} seconds, with lm-eval's HFLM {hflm}" in SHORT
