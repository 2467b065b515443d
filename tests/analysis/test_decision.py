"""The first lines of an analysis' screen: who won, what to quote, what to keep; and warnings that say what to do."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.findings import from_csv, published_findings, simulated_findings
from tune_prune.analysis.render.messages import CATALOGUE, format_message
from tune_prune.analysis.statistics import comparison, draws
from tune_prune.analysis.statistics import findings as model_findings
from tune_prune.analysis.verdict import close_calls, decision, verdicts

STEP = r"--[a-z]|Search again|Measure all|Measure them|Quote |use these|analyse that|Add the column|\{step\}"


def test_of_trained_and_untrained_the_better_is_kept(tmp_path: Path) -> None:
    gains = {"blockwise-s64-n512": 0.15, "taylor-s16-n128": 0.15}
    findings = simulated_findings(tmp_path, models=("alpha", "beta"), items=60, trained=gains)
    assert sorted(findings.models) == ["alpha", "alpha+lora", "beta", "beta+lora"]
    text = decision(findings, {label: f"keep {label}" for label in findings.models})
    assert max(map(len, text.splitlines())) <= 100 and not re.search(r"±$|^ *±", text, re.MULTILINE)
    said = " ".join(text.split())
    assert re.findall(r"(\S+): \w+ on \d+ samples of \d+ tokens, trained", said) == ["alpha+lora", "beta+lora"]
    assert said.endswith(
        "keep keep alpha+lora for beta+lora the same with the best_config.json of each and another --output"
    )
    assert "quote" not in said  # the trained were chosen from all, by the same questions


@pytest.mark.parametrize("trained", [1, 2])
def test_a_trained_winner_is_compared_with_all(trained: int, tmp_path: Path) -> None:
    gains = dict.fromkeys(("blockwise-s64-n512", "taylor-s16-n128")[:trained], 0.04)
    findings = simulated_findings(tmp_path, models=("alpha",), items=60, trained=gains)
    verdict = verdicts(findings)["alpha"]
    close, others = len(verdict.marked) - 1, 17 + trained
    assert verdict.winner.model.label == "alpha+lora" and 0 < close < others == len(verdict.rows) - 1
    said = " ".join(decision(findings, {}).split())
    assert said.endswith(f"; {close} of {others} others {'is' if close == 1 else 'are'} too close to call")
    assert said.rpartition("; ")[2] == " ".join(verdict.line.split()).rpartition("; ")[2]


def test_nothing_to_keep_or_to_quote_is_not_spoken_of() -> None:
    assert " ".join(decision(published_findings(), {}).split()) == (
        "best Llama: blockwise on 128 samples of 64 tokens (blockwise-s64-n128): accuracy .5980 ± .0048; 11 of 44 others are too "
        "close to call"
    )


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([0.63], "no other configuration is complete"),
        ([0.63, 0.3], "clearly better than the other one"),
        ([0.63, 0.3, 0.3], "clearly better than all 2 others"),
        ([0.63, 0.629], "the other one is too close to call"),
        ([0.63, 0.629, 0.3], "1 of 2 others is too close to call"),
        ([0.63, 0.629, 0.628], "2 of 2 others are too close to call"),
    ],
)
def test_counts_have_one_form(tmp_path: Path, levels: list[float], said: str) -> None:
    of = dict(zip([("taylor", 32, 128), ("layerwise", 32, 128), ("blockwise", 32, 128)], levels, strict=False))
    found = from_csv(tmp_path, {"M": lambda *key: of.get(key, math.nan)}).models["M"]
    assert close_calls(found) == said


def test_others_of_unknown_error_are_not_counted_as_worse(tmp_path: Path) -> None:
    of = {"taylor": 0.63, "layerwise": 0.3, "blockwise": 0.3}
    findings = from_csv(tmp_path, {"M": lambda method, *rest: of[method] if rest == (32, 128) else math.nan})
    rows = findings.models["M"].eligible
    rows.loc[rows.index[-1], "p_value"] = math.nan
    words = "; clearly better than the other one that could be compared"
    assert decision(findings, {}).replace("\n             ", " ").endswith(words)
    assert " ".join(verdicts(findings)["M"].line.split()).endswith(words)


def test_a_rule_in_use_is_not_advised(tmp_path: Path) -> None:
    findings = simulated_findings(tmp_path, models=("alpha",), items=60)
    found = findings.models["alpha"]
    steps = [replace(found, rule=rule)._other_choice("kl", "perplexity") for rule in ("accuracy", "perplexity")]
    said = [format_message(step) for step in steps]
    assert said == ["choose with tune-prune analysis --rule perplexity", "stay with --rule perplexity"]


def test_every_warning_ends_with_what_to_do() -> None:
    kinds = {kind for kind in CATALOGUE if kind.startswith("worse_")}
    for module in (comparison, draws, model_findings):
        source = Path(module.__file__ or "").read_text(encoding="utf-8")
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            if getattr(call.func, "id", "") == "Message" and isinstance(call.args[0], ast.Constant):
                kinds.add(call.args[0].value)
    warnings = {kind for kind in kinds if not kind.startswith("step_")}  # which are ends
    assert {"edges", "seeds_one", "tasks_at_chance", "no_items", "worse_kl_text"} <= warnings and len(warnings) > 20
    for kind in warnings:
        end = re.split(r"[.:;] ", CATALOGUE[kind]["en"].rstrip("."))[-1]
        assert re.search(STEP, end), (kind, end)
