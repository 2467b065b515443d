"""scripts/quality_table.py: shares with known errors, and the table of a real search."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
import pandas as pd
import pytest
from making_seconds import MakingSeconds
from quality_table import MEASURES, Losses, main, markdown, regained

from tune_prune.commands import search
from tune_prune.core.config import PruningConfig
from tune_prune.core.ledger import Ledger, PassLog, write_about
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import open_store

WHOLE_TEXT = True

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ROOT / "docs" / "studies"
SMOLLM2 = (STUDIES / "quality.md").read_text(encoding="utf-8")
EMBEDDED = (STUDIES / "embedded" / "README.md").read_text(encoding="utf-8")
MEASURE = "kl_text"


def drawn(rng: np.random.Generator, draws: int, n: int = 150, between: float = 0.0) -> tuple[Losses, Losses]:
    """A reference that loses 1 on average, of which another configuration regains 30%, on the same observations."""
    hard = rng.gamma(2.0, 0.5, n)
    base, other = (
        share * (1 + between * rng.standard_normal((draws, 1))) * hard + 0.1 * rng.standard_normal((draws, n))
        for share in (1.0, 0.7)
    )
    weights = {MEASURE: np.full(n, 1 / n)}
    return Losses({MEASURE: base}, weights), Losses({MEASURE: other}, weights)


@pytest.mark.parametrize(("draws", "between"), [(1, 0.0), (3, 0.0), (8, 0.1)])
def test_intervals_of_two_errors_hold_the_truth_as_often_as_they_say(draws: int, between: float) -> None:
    rng = np.random.default_rng(0)
    found = [regained(*drawn(rng, draws, between=between), MEASURE) for _ in range(600)]
    shares, errors = np.array(found).T
    assert shares.mean() == pytest.approx(0.3, abs=0.01)
    held = np.mean(np.abs(shares - 0.3) < 2 * errors)
    assert held > 0.92
    if draws == 1:  # what differs by chance in a draw is in both errors: of several they are rather too wide
        assert held < 0.985
        assert errors.mean() == pytest.approx(shares.std(), rel=0.15)


def test_a_configuration_beside_itself_regains_nothing() -> None:
    base, _ = drawn(np.random.default_rng(1), 3)
    assert regained(base, base, MEASURE) == (0.0, 0.0)


def test_one_block_has_no_error() -> None:
    share, error = regained(*drawn(np.random.default_rng(1), 1, n=1), MEASURE)
    assert 0 < share < 1 and math.isnan(error)


@pytest.mark.slow
def test_the_table_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(
        "search: grid\nmethod: [taylor]\nseq_len: [16]\nnum_samples: [8]\ncompensation: [none, least_squares]\n"
        "refit_tokens: 2048\nseeds: [0, 1]\nrecovery: [none, lora]\nrecovery_steps: 2\n"
    )
    flags = ("--tasks", "boolq,piqa", "--limit", "20", "--storage-path", str(tmp_path), "--name", "one")
    assert search.main(["--model", "tiny-llama", "--inline", "--search-space", str(space), *flags]) == 0
    capsys.readouterr()
    folder, output = str(tmp_path / "one"), tmp_path / "rows.json"
    assert main([folder, "--reference", "taylor-s16-n8", "--output", str(output)]) == 0
    rows = {row["configuration"]: row for row in json.loads(output.read_text())}
    untrained = {"taylor-s16-n8", "taylor-s16-n8-least_squares-t2048"}
    assert set(rows) == untrained | {f"{name}-lora-i2" for name in untrained}
    base, refitted = rows["taylor-s16-n8"], rows["taylor-s16-n8-least_squares-t2048"]
    assert base["draws"] == refitted["draws"] == 2 and base["kl_text_regained"] == base["kl_text_stderr"] == 0
    for measure in ("kl_text", "kl_tasks", "gold_logprob_mean"):
        assert refitted[f"{measure}_regained"] == pytest.approx(1 - refitted[measure] / base[measure])
    records = [json.loads(path.read_text()) for path in (tmp_path / "one" / "ledger").glob("*.json")]
    passes = {one.get("seed"): one["duration_s"] for one in PassLog(open_store(tmp_path / "one")).read()}
    assert len(passes) == 2  # one of each draw, before the trials
    for name, compensation, recovery in (
        ("taylor-s16-n8", "none", "none"),
        ("taylor-s16-n8-least_squares-t2048", "least_squares", "none"),
        ("taylor-s16-n8-lora-i2", "none", "lora"),
        ("taylor-s16-n8-least_squares-t2048-lora-i2", "least_squares", "lora"),
    ):
        taken = [
            passes[one["config"].get("seed")]
            + sum(s["duration_s"] for s in one["stages"] if s["stage"] in ("pruning", "refit", "recovery"))
            for one in records
            if one["config"].get("compensation", "none") == compensation
            and one["config"].get("recovery", "none") == recovery
        ]
        assert len(taken) == 2 and rows[name]["seconds"] == pytest.approx(np.median(taken))
    mine = [
        one["metrics"]
        for one in records
        if one["config"].get("compensation") == "least_squares" and "recovery" not in one["config"]
    ]
    for measure, mean in (("kl_text", np.mean), ("kl_tasks", np.mean), ("ppl", geometric_mean)):
        assert refitted[measure] == pytest.approx(mean([metrics[measure] for metrics in mine]))
    untrained_part, _, trained_part = capsys.readouterr().out.partition("\n\ntrained:\n\n")
    assert re.findall(r"^\| tiny-llama \| `(\S+)`", untrained_part, re.MULTILINE) == sorted(
        untrained, key=lambda name: rows[name]["kl_tasks"]
    )
    shown = re.findall(r"^\| tiny-llama \| `(\S+)` \| 2 \|.* ([\d.]+) \|$", trained_part, re.MULTILINE)
    assert {name for name, _ in shown} == set(rows) - untrained | {"taylor-s16-n8"}
    assert all(seconds == f"{rows[name]['seconds']:.1f}" for name, seconds in shown)
    space.write_text("search: grid\nmethod: [layerwise]\nseq_len: [16]\nnum_samples: [8]\nseeds: [0, 1]\n")
    two = [str(tmp_path / "two"), "--reference", "taylor-s16-n8", "--output", str(output)]
    # The other's own draw is the seed 1 of these, and its seed 0 theirs
    argv = ["--model", "tiny-llama", "--inline", "--seed", "1", "--search-space", str(space), *flags[:-1], "two"]
    assert search.main(argv) == 0
    assert main([folder, *two]) == 0
    both = {row["configuration"]: row for row in json.loads(output.read_text())}
    assert set(both) == set(rows) | {"layerwise-s16-n8"} and all(both[name] == row for name, row in rows.items())
    assert both["layerwise-s16-n8"]["seconds"] is None  # gradients are from the cache of the first search
    assert re.search(r"`layerwise-s16-n8` .* – \|\n", capsys.readouterr().out)
    assert search.main([*argv[:-1], "less", "--perplexity-tokens", "2000"]) == 0
    assert main([str(tmp_path / "less"), folder, *two[1:]]) == 2
    assert "on other texts than taylor-s16-n8" in capsys.readouterr().err
    assert main([folder, "--reference", "fisher-s16-n8"]) == 2
    assert "fisher-s16-n8 was not measured on tiny-llama" in capsys.readouterr().err


LORA = {"recovery": "lora", "recovery_steps": 2}
TAYLOR = {"method": "taylor", "seq_len": 16, "num_samples": 8}
LAYERWISE = TAYLOR | {"method": "layerwise"}
PASS = {"stage": "importance", "model": "m", "seq_len": 16, "num_samples": 8, "duration_s": 5.0, "tokens": 16 * 8}
# One sample; 3 runs: of the dense model, and without each of two layers.
REMOVAL = {"stage": "removal", "model": "m", "seq_len": 16, "layer": 1, "duration_s": 7.0, "tokens": 16 * 3}


@pytest.mark.parametrize(
    ("config", "stages", "passes", "expected"),
    [
        (TAYLOR, {"importance": (0.1, 0)}, [PASS], 2 + 5),
        (TAYLOR, {"importance": (6.0, 128)}, [], 2 + 6),
        (TAYLOR, {"importance": (0.1, 0)}, [], math.nan),
        (TAYLOR, {"importance": (0.1, 0)}, [PASS | {"num_samples": 16, "tokens": 256}], math.nan),
        (TAYLOR, {"importance": (0.1, 0)}, [PASS | {"tokens": 64}], math.nan),  # it went on with what there was
        (TAYLOR, {"importance": (3.0, 64)}, [], math.nan),
        (
            TAYLOR,
            {"importance": (0.1, 0)},
            [PASS | {"seq_len": 8}, PASS | {"seed": 1}, PASS | {"model": "n"}],
            math.nan,
        ),
        (TAYLOR | {"seed": 1}, {"importance": (0.1, 0)}, [PASS, PASS | {"seed": 1, "duration_s": 4.0}], 2 + 4),
        (LAYERWISE, {"importance": (0.1, 0), "removal": (0.1, 0)}, [PASS, REMOVAL], 2 + 5 + 7),
        (
            LAYERWISE,
            {"importance": (0.1, 0), "removal": (0.1, 0)},
            [PASS, REMOVAL | {"mlp": 1, "tokens": 80}],
            math.nan,
        ),
        (TAYLOR | {"steps": 3}, {"importance": (0.1, 0), "steps": (9.0, 256)}, [PASS], 2 + 5 + 9),
        (TAYLOR | {"steps": 3}, {"importance": (0.1, 0), "steps": (9.0, 128)}, [PASS], math.nan),
        (
            TAYLOR | {"compensation": "least_squares"},
            {"importance": (0.1, 0), "refit": (3.0, 16384)},
            [PASS],
            2 + 5 + 3,
        ),
        # 24 samples and 2 steps of 4, and twice the 16 that are held out, of 128 tokens
        (TAYLOR | LORA, {"importance": (0.1, 0), "recovery": (8.0, 128 * 64)}, [PASS], 2 + 5 + 8),
        (TAYLOR | LORA, {"importance": (0.1, 0), "recovery": (8.0, 128 * 60)}, [PASS], math.nan),
        (TAYLOR | LORA, {"importance": (0.1, 0), "recovery": (0.1, 0)}, [PASS], math.nan),
        ({**TAYLOR, "method": "magnitude"}, {}, [PASS], 2),
    ],
)
def test_seconds_are_known_where_a_record_has_all_of_the_work(
    tmp_path: Path, config: dict[str, Any], stages: dict[str, tuple[float, int]], passes: list[dict], expected: float
) -> None:
    record(tmp_path, "own", config, stages, passes)
    assert MakingSeconds(tmp_path)("own") == pytest.approx(expected, nan_ok=True)


def test_seconds_of_a_trial_that_computed_what_another_shares(tmp_path: Path) -> None:
    steps = TAYLOR | {"steps": 3}
    record(tmp_path, "first", steps, {"importance": (6.0, 128), "steps": (9.0, 256)})
    record(tmp_path, "second", steps | LORA, {"importance": (0.1, 0), "steps": (0.2, 0), "recovery": (8.0, 128 * 64)})
    record(tmp_path, "fewer", TAYLOR | {"num_samples": 4}, {"importance": (0.1, 0)})
    taken = MakingSeconds(tmp_path)
    assert (taken("first"), taken("second")) == (2 + 6 + 9, 2 + 6 + 9 + 8) and math.isnan(taken("fewer"))


def record(
    folder: Path, key: str, config: dict[str, Any], stages: dict[str, tuple[float, int]], passes: Sequence[dict] = ()
) -> None:
    """A trial of a model of two layers, with its `stages` (seconds, tokens) beside two seconds of pruning."""
    store = open_store(folder)
    write_about(store, {"models": {"m": {"geometry": {"mlp_width": [40, 40], "total_params": 1}}}})
    parts = {"pruning": (2.0, 0), "zero_shot": (100.0, 500)} | stages
    made = [{"stage": stage, "duration_s": seconds, "tokens": tokens} for stage, (seconds, tokens) in parts.items()]
    Ledger(store).write(TrialRecord(key, "m", PruningConfig(**config).to_dict(), "complete", stages=made))
    for one in passes:
        about = {name: value for name, value in one.items() if name not in ("stage", "duration_s", "tokens")}
        PassLog(store).write(about, StageReport(one["stage"], one["duration_s"], tokens=one["tokens"]))


def test_the_reference_of_each_model_is_in_both_tables_and_old_rows_have_no_seconds() -> None:
    path = STUDIES / "smollm2-135m" / "quality_ratios.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert "seconds" not in markdown(rows)
    plain, trained = markdown(rows).split("\n\ntrained:\n\n")
    named = [re.findall(r"^\| (\S+) \| `(\S+)`", text, re.MULTILINE) for text in (plain, trained)]
    assert named[0] == [(r["model"], r["configuration"]) for r in rows if "lora" not in r["configuration"]]
    recipe = "gate_fisher-s128-n256-least_squares-t65536-lora-e0.003"
    expected = [(f"smollm2@{r}", name) for r in (0.1, 0.35, 0.5) for name in (recipe, "taylor-s256-n128")]
    assert named[1] == expected
    only = [row for row in rows if "lora" in row["configuration"]]
    assert markdown(only).startswith("trained:\n\n| model |") and markdown(only).count("| model |") == 1
    assert markdown([row | {"seconds": None} for row in rows]).count("| – |") == len(rows) + 3


def perplexities() -> dict[str, list[float]]:
    """Of the published grid's contenders, by configuration, of every draw."""
    found: dict[str, list[float]] = {}
    with (STUDIES / "smollm2-135m" / "contenders.csv").open(encoding="utf-8", newline="") as trials:
        for row in csv.DictReader(trials):
            name = f"{row['method']}-s{row['seq_len']}-n{row['num_samples']}"
            found.setdefault(name, []).append(float(row["ppl"]))
    return found


def test_the_page_has_the_numbers_that_were_measured() -> None:
    for name in (
        "quality_grid.json", "quality_mixed.json", "quality_mixed_layerwise.json", "quality_draws.json",
        "quality_trained.json", "quality_trained_layerwise.json", "quality_scores.json", "quality_scores_trained.json",
        "quality_scores_trained_alone.json",
        "quality_two_steps.json", "quality_two_steps_layerwise.json", "quality_recipe_parts.json",
        "quality_two_steps_trained.json", "quality_two_steps_trained_layerwise.json",
        "quality_more_questions.json", "quality_uniform.json", "quality.json",
    ):  # fmt: skip
        rows = json.loads((STUDIES / "smollm2-135m" / name).read_text(encoding="utf-8"))
        assert markdown(rows) in SMOLLM2


def test_perplexity_of_several_draws_is_their_geometric_mean() -> None:
    drawn, held = perplexities(), 0
    for path in sorted((STUDIES / "smollm2-135m").glob("quality*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))
        for row in rows if isinstance(rows, list) else []:
            if row["draws"] > 1 and row["configuration"] in drawn:
                assert row["ppl"] == pytest.approx(geometric_mean(drawn[row["configuration"]]), rel=1e-12), path
                held += 1
    assert held == 15
    both = (f"{mean(drawn['taylor-s256-n128']):.4f}" for mean in (geometric_mean, fmean))
    assert "of `taylor-s256-n128` the two are {} and {}.".format(*both) in SMOLLM2


def test_the_page_says_how_far_a_gpu_is_from_the_tables() -> None:
    """Rows of an H100 beside the same ones of a CPU."""
    whole = json.loads((STUDIES / "h100" / "smollm2_quality.json").read_text(encoding="utf-8"))
    found, trained = whole["tables"], whole["training_100_steps_s"]
    off: dict[tuple[str, str, int], float] = {}
    drawn = perplexities()
    for name, rows in found.items():
        record = json.loads((STUDIES / "smollm2-135m" / f"{name}.json").read_text(encoding="utf-8"))
        own = {(row["model"], row["configuration"]): row for row in record}
        for row in rows:
            key = row["model"], row["configuration"]
            assert own[key]["draws"] == row["draws"] and (*key, row["draws"]) not in off
            mine = dict(own[key])
            if row["draws"] > 1 and row["configuration"] in drawn:  # the GPU's record has the arithmetic mean
                mine["ppl"] = fmean(drawn[row["configuration"]])
            off[*key, row["draws"]] = max(abs(row[measure] / mine[measure] - 1) for measure in (*MEASURES, "ppl"))
    page = SMOLLM2.partition("## The same on a GPU")[2]
    page = " ".join(page.partition("\n## ")[0].split())
    near, far = [value for value in off.values() if value < 0.001], sorted(v for v in off.values() if v >= 0.001)
    assert f"{len(off)} rows of the tables above" in page and f"{len(near)} of the {len(off)} are within 0.1%" in page
    assert [sum(value < 0.01 for value in far), len(far)] == [8, 14] and all(value < 0.0112 for value in far[:10])
    assert [f"{100 * value:.2g}" for value in far[10:]] == ["2.2", "13", "14", "16"]
    assert "Eight are off by 0.1 to 1%, two by 1.1%" in page and "and four more" in page
    (again,) = found["quality_trained"]
    shares = [f"{100 * again[f'{m}_regained']:.0f} ± {100 * again[f'{m}_stderr']:.0f}%" for m in MEASURES]
    assert f"again regains {shares[0]}, {shares[1]} and {shares[2]}" in page
    (two,) = (row for row in found["quality_two_steps"] if row["configuration"].endswith("-k2"))
    shares = [f"{100 * two[f'{m}_regained']:.0f} ± {100 * two[f'{m}_stderr']:.0f}%" for m in MEASURES]
    assert f"{shares[0]}, {shares[1]} and {shares[2]} of what `taylor-s256-n128` loses" in page
    seconds = {row["configuration"]: row["seconds"] for row in [*found["quality"], *found["quality_two_steps"]]}
    one, steps = (f"{seconds[name]:.1f}" for name in ("gate_fisher-s128-n128-least_squares", two["configuration"]))
    assert f"`gate_fisher` with a refit took {one} (242 of one core), in two steps {steps} (2,207)" in page
    since = whole["training_100_steps_as_a_graph_s"]
    said = f"100 steps of training {min(trained):.0f} to {max(trained):.0f} before they were graphs (12 to 17 minutes)"
    assert f"{said} and {min(since):.0f} to {max(since):.0f} since" in page
    first = whole["forecast_of_one_search"]["before"]
    assert f"after {first['took_s']:.0f} seconds, and {first['with_start_s'] - first['took_s']:.0f} before them" in page


def test_the_page_has_every_score_of_the_embedded_models_at_every_ratio() -> None:
    rows = json.loads((STUDIES / "embedded" / "quality.json").read_text(encoding="utf-8"))
    measured = {(row["model"], row["configuration"]): row for row in rows}
    assert len(measured) == len(rows) == 129 and {row["draws"] for row in rows} == {3}
    at_ratios = json.loads((STUDIES / "embedded" / "quality_ratios.json").read_text(encoding="utf-8"))
    assert len(at_ratios) == 108 and {row["draws"] for row in at_ratios} == {3}
    measured |= {(row["model"], row["configuration"]): row for row in at_ratios}
    shown = re.findall(r"^\| (tiny-\w+)(?: \| (\d+)%)? \| `(\w+)` \| (.*) \|$", EMBEDDED, re.MULTILINE)
    assert len(shown) == 18 + 27
    for name, percent, score, cells in shown:
        model = f"{name}@{int(percent) / 100:g}" if percent else name
        own = [measured[model, f"{score}-s128-n128{p}"] for p in ("", "-least_squares", "-lora", "-least_squares-lora")]
        shares = [f"{100 * row['kl_tasks_regained']:.0f} ± {100 * row['kl_tasks_stderr']:.0f}%" for row in own]
        assert cells.split(" | ") == shares + [f"{row['accuracy']:.3f}" for row in own]


def test_the_page_has_the_steps_of_the_embedded_models() -> None:
    rows = json.loads((STUDIES / "embedded" / "quality_steps.json").read_text(encoding="utf-8"))
    measured = {(row["model"], row["configuration"]): row for row in rows}
    for model in ("tiny-llama", "tiny-qwen2", "tiny-mistral"):
        steps = [f"{refit}{k}" for refit in ("", "-least_squares") for k in ("", "-k2", "-k4", "-k8")]
        own = [measured[model, f"taylor-s128-n128{step}"] for step in steps]
        assert {row["draws"] for row in own} == {3} and own[0]["kl_tasks_regained"] == 0
        for m, name in MEASURES.items():
            shares = [f"{100 * row[f'{m}_regained']:.0f} ± {100 * row[f'{m}_stderr']:.0f}%" for row in own[1:]]
            label = model if m == "kl_text" else ""
            assert " | ".join([f"| {label}".rstrip(), name, *shares]) + " |" in EMBEDDED


def test_the_page_has_the_other_ratios_and_both_spaces_at_equal_cost() -> None:
    for name in ("quality_ratios.json", "quality_ratios_layerwise.json"):
        for row in json.loads((STUDIES / "smollm2-135m" / name).read_text(encoding="utf-8")):
            losses = f"| {row['kl_text']:.3f} | {row['kl_tasks']:.3f} | {row['gold_logprob_mean']:.2f} | "
            (line,) = (
                line for line in SMOLLM2.splitlines() if losses in line and line.endswith(f"| {row['ppl']:.1f} |")
            )
            shares = (f"{100 * row[f'{m}_regained']:.0f} ± {100 * row[f'{m}_stderr']:.0f}" for m in MEASURES)
            assert f"| {', '.join(shares)}% |" in line or row["kl_text_stderr"] == 0
    rows = json.loads((STUDIES / "embedded" / "equal_cost.json").read_text(encoding="utf-8"))
    assert len(rows) == 3
    for one in (row[name] for row in rows for name in ("reference", "other", "whole")):
        points = f"{one['points']:+.1f} ± {one['stderr_points']:.1f} " if "points" in one else ""
        assert (
            f"| {one['trials']} | {one['tokens'] / 1e6:.2f} | `{one['best']}` | {one['accuracy']:.3f} | "
            f"{one['cross_fitted']:.3f} ± {one['stderr']:.3f} | {points}| {one['lowest_kl_tasks']:.4f} |"
        ) in EMBEDDED


def test_the_methods_page_has_what_sharing_among_layers_changed() -> None:
    page = (STUDIES / "methods.md").read_text(encoding="utf-8")
    rows = json.loads((STUDIES / "embedded" / "allocation.json").read_text(encoding="utf-8"))
    measured = {(row["model"], row["configuration"]): row for row in rows}
    names = {"removal_power: ": "p", "layer_cap: ": "x", "normalization: ": "by_"}
    shown = re.findall(r"^\| `(\w+)`, `(\w+: )([\w.]+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(shown) == 8
    for method, key, value, cells in shown:
        pairs = [
            (measured[model, f"{method}-s128-n128-{names[key]}{value}"], measured[model, f"{method}-s128-n128"])
            for model in ("tiny-llama", "tiny-qwen2", "tiny-mistral")
        ]
        changes = [f"{100 * (own['kl_tasks'] / base['kl_tasks'] - 1):+.0f}" for own, base in pairs]
        if method != "blockwise":  # of which the record has no errors beside itself
            changes = [
                f"{of} ± {100 * own['kl_tasks_stderr']:.0f}" for of, (own, _) in zip(changes, pairs, strict=True)
            ]
        accuracies = (", ".join(f"{row['accuracy']:.3f}"[1:] for row in column) for column in zip(*pairs, strict=True))
        assert cells.split(" | ") == [*(f"{change}%" for change in changes), *accuracies]


def test_the_page_has_the_masks_that_were_measured() -> None:
    page = SMOLLM2.lower()
    masks = json.loads((STUDIES / "smollm2-135m" / "masks.json").read_text(encoding="utf-8"))
    assert [row["masks"] for row in masks["rows"]] == ["dense", "magnitude", "wanda", "sparsegpt"]
    for row in masks["rows"]:
        values = " | ".join(f"{row[name]:.3f}" for name in ("kl_text", "kl_tasks", "gold_lost"))
        accuracy = f"{row['accuracy']:.3f} ± {row['accuracy_stderr']:.3f}"
        assert f"| {row['masks']} | {values} | {row['ppl']:.2f} | {accuracy} |" in page


def test_the_page_says_what_wider_adapters_and_more_steps_gave() -> None:
    found = json.loads((STUDIES / "h100" / "training_ranks.json").read_text(encoding="utf-8"))
    section = SMOLLM2.partition("### Wider adapters")[2].partition("\n### ")[0]
    rows = {row["configuration"]: row for row in found["after_400_steps"]}
    shown = re.findall(r"^\| (\d+) \| ([\d.]+) \| (.*) \|$", section, re.MULTILINE)
    assert {f"{rank} {rate}" for rank, rate, _ in shown} == found["held_out_of_400_steps"].keys()
    for rank, rate, cells in shown:
        name = "gate_fisher-s128-n256-least_squares-lora-i400"
        row = rows[name + (f"-e{rate}" if rate != "0.001" else "") + (f"-a{rank}" if rank != "8" else "")]
        numbers = [f"{row['kl_text']:.3f}", f"{row['kl_tasks']:.3f}", f"{row['gold_logprob_mean']:.2f}"]
        shares = ", ".join(f"{100 * row[f'{measure}_regained']:.0f}" for measure in MEASURES)
        held_out = found["held_out_of_400_steps"][f"{rank} {rate}"]
        assert cells.split(" | ") == [f"{held_out:.2f}", *numbers, f"{shares}%"]
    errors = [draw["recovery_error"] for draw in found["held_out_of_1200_steps"].values()]
    assert sorted(error < 1 for error in errors) == [False, False, True]
    text = " ".join(section.split())
    for reference, said in (("taylor-s256-n128", "{}% of what `{}` loses"), ("layerwise-s32-n256", "of `{1}` {0}%")):
        (row,) = (row for row in found["after_1200_steps"][reference] if "lora" in row["configuration"])
        shares = [f"{100 * row[f'{m}_regained']:.0f} ± {100 * row[f'{m}_stderr']:.0f}" for m in MEASURES]
        assert said.format(f"{shares[0]}, {shares[1]} and {shares[2]}", reference) in text
    scales = json.loads((STUDIES / "embedded" / "training_ranks.json").read_text(encoding="utf-8"))["scales"]
    section = EMBEDDED.partition("## Adapters of other ranks")[2].partition("\n## ")[0]
    for scale, models in scales.items():
        for model, errors in models.items():
            for rank in (2, 8, 32):
                cells = " | ".join(f"{errors[f'{rank} {rate}']:.2f}" for rate in ("0.001", "0.003", "0.01", "0.03"))
                assert f"| {model} | {scale} | {rank} | {cells} |\n" in section
            best = {
                min(("0.001", "0.003", "0.01", "0.03"), key=lambda rate: errors[f"{rank} {rate}"])
                for rank in (2, 8, 32)
            }
            assert best == ({"0.003"} if scale == "16 / rank" else {"0.01", "0.003", "0.001"})


def test_the_page_has_what_aligned_widths_changed() -> None:
    section = SMOLLM2.partition("### In the aligned shape")[2].partition("\n### ")[0]
    changes = ("kl_text", "kl_tasks", "gold_logprob_mean", "acc_mean")
    trials = pd.read_csv(STUDIES / "embedded" / "shapes.csv")
    for model, of_model in trials.groupby("model"):
        by_shape = of_model.set_index(["shape", "method", "seed"]).drop(columns="model").sort_index()
        for shape in ("aligned-4", "aligned-8"):
            change = (by_shape.loc[shape] - by_shape.loc["free"]).groupby("seed").mean()
            assert len(change) == 3
            mean, error = change.mean(), change.std() / math.sqrt(3)
            cells = [f"{mean[name]:+.3f} ± {error[name]:.3f}" for name in changes[:3]]
            cells += [f"{100 * mean.acc_mean:+.2f} ± {100 * error.acc_mean:.2f}"]
            removed = by_shape.loc[shape, "removed_fraction"].mean()
            assert f"| {model} | `{shape}` | {' | '.join(cells)} | {removed:.2%} |" in section
    trials = pd.read_csv(STUDIES / "smollm2-135m" / "shapes.csv", keep_default_na=False)
    for (method, refit), of_score in trials.groupby(["method", "compensation"]):
        by_shape = of_score.set_index(["shape", "seed"]).drop(columns=["model", "method", "compensation"]).sort_index()
        for shape in ("free", "aligned-64"):
            runs = by_shape.loc[shape]
            assert len(runs) == 3
            mean, error = runs.mean(), runs.std() / math.sqrt(3)
            cells = [f"{mean[name]:.{n}f} ± {error[name]:.{n}f}" for name, n in zip(changes, (3, 3, 2), strict=False)]
            cells += [
                f"{mean.acc_mean:.3f}".lstrip("0"),
                f"{geometric_mean(runs.ppl):.2f}",
                f"{mean.removed_fraction:.2%}",
            ]
            row = f"| `{method}` | {'no' if refit == 'none' else 'yes'} | `{shape}` | {' | '.join(cells)} |"
            assert row in section, row
        change = (by_shape.loc["aligned-64"] - by_shape.loc["free"])[["kl_text", "kl_tasks"]]
        for name in change:
            assert f"{change[name].mean():+.3f} ± {change[name].sem():.3f}" in section
