"""scripts/real_models.py: which configurations stand in its tables, and beside what."""

from __future__ import annotations

from typing import Any

import real_models
from quality_table import MEASURES


def row(model: str, name: str, regained: float = 0.0) -> dict[str, Any]:
    parts = {measure: 1.0 for measure in MEASURES} | {f"{measure}_regained": regained for measure in MEASURES}
    errors = {f"{measure}_stderr": 0.01 for measure in MEASURES}
    return {"model": model, "configuration": name, "ppl": 20.0, "accuracy": 0.5} | parts | errors


def study(model: str, own: str, *others: tuple[str, float]) -> real_models.Study:
    """A study: `own` is the best of its grid by KL, "both" by right answers; `others` were judged, too, and regain so much."""
    judged = [row(model, own), row(model, "both", 0.1), *(row(model, name, regained) for name, regained in others)]
    ratio = row(f"{model}@0.1", "both", 0.3)
    chosen = {
        "grid": {"kl": own, "gold_logprob": "both"},
        "recommended": {"kl": "new", "gold_logprob": "new"},
        "trained": {"kl": "new-lora", "gold_logprob": "new-lora"},
    }
    judged += [row(model, name, 0.4) for name in ("new", "new-lora", real_models.RANDOM)]
    beside = {"kl": [*judged, ratio], "gold_logprob": judged}
    return real_models.Study(model, model.upper(), 0.2, {"ppl": 10.0, "acc_mean": 0.6}, chosen, beside)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_what_was_judged_stands_once_with_all_its_reasons() -> None:
    titles = {line[1].strip("`"): line[0] for line in cells(real_models.of_model(study("a", "mine", ("theirs", -0.2))))}
    assert titles == {
        "": "original",
        "mine": "best of the published grid, by KL",
        "both": "best of the published grid, by right answers",
        "new": "recommended, by KL and right answers",
        "new-lora": "recommended, trained, by KL and right answers",
        "theirs": "best of another model's grid",
        real_models.RANDOM: "random removal",
    }


def test_other_ratios_stand_by_themselves() -> None:
    (line,) = cells(real_models.of_ratios(study("a", "mine")))
    assert line[:2] == ["a@0.1", "`both`"] and line[-3:] == ["30 ± 1%"] * 3


def test_transfer_is_of_what_another_model_chose() -> None:
    one, other = study("a", "mine", ("theirs", -0.2)), study("b", "theirs")
    found = {(line[0], line[1]): (line[4], *line[5:]) for line in cells(real_models.transfer([one, other]))}
    assert found == {
        ("A", "KL"): ("`theirs`", *["-20 ± 1%"] * 3),
        ("A", "right answers"): ("`both`", *["the same"] * 3),
        ("B", "KL"): ("`mine`", *["not judged yet"] * 3),
        ("B", "right answers"): ("`both`", *["the same"] * 3),
    }
    assert real_models.transfer([one]) == ""
