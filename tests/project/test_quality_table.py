"""scripts/quality_table.py: shares with known errors, and the table of a real search."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import pytest
from making_seconds import MakingSeconds
from quality_table import Losses, main, markdown, regained

from tune_prune.commands import search
from tune_prune.core.config import PruningConfig
from tune_prune.core.ledger import Ledger, read_passes, write_about, write_pass
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
    passes = {one.get("seed"): one["duration_s"] for one in read_passes(open_store(tmp_path / "one"))}
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
        (TAYLOR, {"importance": (0.1, 0)}, [], math.nan),
        (TAYLOR, {"importance": (0.1, 0)}, [PASS | {"num_samples": 16, "tokens": 256}], math.nan),
        (TAYLOR, {"importance": (0.1, 0)}, [PASS | {"tokens": 64}], math.nan),  # it went on with what there was
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
        (
            TAYLOR | {"compensation": "least_squares"},
            {"importance": (0.1, 0), "refit": (3.0, 16384)},
            [PASS],
            2 + 5 + 3,
        ),
        # 24 samples and 2 steps of 4, and twice the 16 that are held out, of 128 tokens
        (TAYLOR | LORA, {"importance": (0.1, 0), "recovery": (8.0, 128 * 64)}, [PASS], 2 + 5 + 8),
        (TAYLOR | LORA, {"importance": (0.1, 0), "recovery": (8.0, 128 * 60)}, [PASS], math.nan),
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
    made = [StageReport(stage, seconds, tokens=tokens) for stage, (seconds, tokens) in parts.items()]
    Ledger(store).write(TrialRecord(key, "m", PruningConfig(**config), "complete", stages=made))
    for one in passes:
        about = {name: value for name, value in one.items() if name not in ("stage", "duration_s", "tokens")}
        write_pass(store, about, StageReport(one["stage"], one["duration_s"], tokens=one["tokens"]))


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
