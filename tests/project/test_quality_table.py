"""scripts/quality_table.py: shares with known errors, and the table of a real search."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import pytest
from quality_table import Losses, main, markdown, regained

from tune_prune.commands import search

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
    trained = re.findall(r"^\| tiny-llama \| `(\S+)` \| 2 \|", trained_part, re.MULTILINE)
    assert set(trained) == set(rows) - untrained | {"taylor-s16-n8"}
    space.write_text("search: grid\nmethod: [layerwise]\nseq_len: [16]\nnum_samples: [8]\nseeds: [0, 1]\n")
    two = [str(tmp_path / "two"), "--reference", "taylor-s16-n8", "--output", str(output)]
    # The other's own draw is the seed 1 of these, and its seed 0 theirs
    argv = ["--model", "tiny-llama", "--inline", "--seed", "1", "--search-space", str(space), *flags[:-1], "two"]
    assert search.main(argv) == 0
    assert main([folder, *two]) == 0
    both = {row["configuration"]: row for row in json.loads(output.read_text())}
    assert set(both) == set(rows) | {"layerwise-s16-n8"} and all(both[name] == row for name, row in rows.items())
    capsys.readouterr()
    assert search.main([*argv[:-1], "less", "--perplexity-tokens", "2000"]) == 0
    assert main([str(tmp_path / "less"), folder, *two[1:]]) == 2
    assert "on other texts than taylor-s16-n8" in capsys.readouterr().err
    assert main([folder, "--reference", "fisher-s16-n8"]) == 2
    assert "fisher-s16-n8 was not measured on tiny-llama" in capsys.readouterr().err


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
