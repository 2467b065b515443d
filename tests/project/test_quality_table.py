"""scripts/quality_table.py: shares with known errors, and the table of a real search."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import pytest
from quality_table import Losses, main, regained

from tune_prune.commands import search

WHOLE_TEXT = True

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
    argv = ["--model", "tiny-llama", "--inline", "--search-space", str(space), "--tasks", "boolq,piqa", "--limit", "20"]
    assert search.main([*argv, "--storage-path", str(tmp_path), "--name", "one"]) == 0
    capsys.readouterr()
    output = tmp_path / "rows.json"
    assert main([str(tmp_path / "one"), "--reference", "taylor-s16-n8", "--output", str(output)]) == 0
    rows = {row["configuration"]: row for row in json.loads(output.read_text())}
    refit = "taylor-s16-n8-least_squares-t2048"
    assert set(rows) == {"taylor-s16-n8", refit, "taylor-s16-n8-lora-i2", f"{refit}-lora-i2"}
    base, refitted = rows["taylor-s16-n8"], rows[refit]
    assert base["draws"] == refitted["draws"] == 2 and base["kl_text_regained"] == base["kl_text_stderr"] == 0
    for measure in ("kl_text", "kl_tasks", "gold_logprob_mean"):
        assert refitted[f"{measure}_regained"] == pytest.approx(1 - refitted[measure] / base[measure])
    records = [json.loads(path.read_text()) for path in (tmp_path / "one" / "ledger").glob("*.json")]
    configs = ("least_squares", "none")
    own = [
        one for one in records if (one["config"].get("compensation"), one["config"].get("recovery", "none")) == configs
    ]
    for measure, mean in (("kl_text", np.mean), ("kl_tasks", np.mean), ("ppl", geometric_mean)):
        assert refitted[measure] == pytest.approx(mean([one["metrics"][measure] for one in own]))
    assert "`taylor-s16-n8-lora-i2` | 2 |" in capsys.readouterr().out.partition("\n\ntrained:\n\n")[2]
