"""scripts/winners_by_draw.py, on scores whose winners are known."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from winners_by_draw import winners

ROOT = Path(__file__).resolve().parents[2]


def test_the_winner_of_each_draw_has_its_place_among_the_means() -> None:
    scores = {
        ("taylor", 16): (0.60, 0.50, 0.52),
        ("layerwise", 16): (0.55, 0.58, 0.55),
        ("random", 16): (0.4, 0.4, None),
    }
    rows = [
        {
            "model": "m",
            "method": method,
            "seq_len": length,
            "num_samples": 8,
            "seed": seed,
            "acc_mean": score,
            "success": True,
        }
        for (method, length), draws in scores.items()
        for seed, score in zip((None, 1, 2), draws, strict=True)
        if score is not None
    ]
    rows.append({**rows[0], "method": "magnitude", "acc_mean": 0.9, "success": False})
    first, second, third = winners(pd.DataFrame(rows))
    assert (first["winner"], first["place"], first["of"]) == ("taylor-s16-n8", 2, 2)  # random lacks a draw
    assert first["lost_points"] == pytest.approx(100 * ((0.55 + 0.58 + 0.55) - (0.60 + 0.50 + 0.52)) / 3)
    assert first["optimistic_points"] == pytest.approx(100 * (0.60 - 0.54))
    assert [(row["winner"], row["place"]) for row in (second, third)] == [("layerwise-s16-n8", 1)] * 2


def test_configurations_that_differ_in_anything_are_two() -> None:
    scores = {(1, "free"): (0.50, 0.52), (2, "free"): (0.60, 0.61), (1, "uniform"): (0.40, 0.41)}
    rows = [
        {"model": "m", "method": "taylor", "seq_len": 64, "num_samples": 128, "steps": steps, "shape": shape}
        | {"compensation": None, "seed": seed, "acc_mean": score, "success": True}
        for (steps, shape), draws in scores.items()
        for seed, score in zip((None, 1), draws, strict=True)
    ]
    found = winners(pd.DataFrame(rows))
    assert [(row["winner"], row["place"], row["of"]) for row in found] == [("taylor-s64-n128-k2", 1, 3)] * 2
    assert found[0]["optimistic_points"] == pytest.approx(100 * (0.60 - 0.605))


def test_the_page_has_the_winners_that_were_found() -> None:
    page = (ROOT / "docs" / "studies" / "draws.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "docs" / "studies" / "embedded" / "winners_by_draw.json").read_text(encoding="utf-8"))
    for row in rows:
        points = f"{row['lost_points']:.2f} | {row['optimistic_points']:.2f}"
        assert (
            f"| {row['model']} | {row['draw']} | `{row['winner']}` | {row['place']} of {row['of']} | {points} |" in page
        )
    means = {name: sum(row[name] for row in rows) / len(rows) for name in ("lost_points", "optimistic_points")}
    won = sum(row["place"] == 1 for row in rows)
    assert (
        f"{won} of {len(rows)} are. On average a winner of one draw loses {means['lost_points']:.2f} points against the "
        f"winner of three, and its own draw had flattered it by {means['optimistic_points']:.2f}."
    ) in page
