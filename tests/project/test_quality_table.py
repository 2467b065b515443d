"""scripts/quality_table.py: shares with known errors, and the table of a real search."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from quality_table import MEASURES, Losses, main, markdown, regained

from tune_prune import search

ROOT = Path(__file__).resolve().parents[2]
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
    for measure in ("kl_text", "kl_tasks", "ppl"):
        assert refitted[measure] == pytest.approx(np.mean([metrics[measure] for metrics in mine]))
    assert "| `taylor-s16-n8` | 2 |" in capsys.readouterr().out
    space.write_text("search: grid\nmethod: [layerwise]\nseq_len: [16]\nnum_samples: [8]\nseeds: [0, 1]\n")
    two = [str(tmp_path / "two"), "--reference", "taylor-s16-n8", "--output", str(output)]
    argv = ["--model", "tiny-llama", "--inline", "--search-space", str(space), *flags[:-1], "two"]
    assert search.main(argv) == 0
    assert main([folder, *two]) == 0
    both = {row["configuration"]: row for row in json.loads(output.read_text())}
    assert set(both) == set(rows) | {"layerwise-s16-n8"} and all(both[name] == row for name, row in rows.items())
    assert search.main([*argv[:-1], "less", "--perplexity-tokens", "2000"]) == 0
    assert main([str(tmp_path / "less"), folder, *two[1:]]) == 2
    assert "on other texts than taylor-s16-n8" in capsys.readouterr().err
    assert main([folder, "--reference", "fisher-s16-n8"]) == 2
    assert "fisher-s16-n8 was not measured on tiny-llama" in capsys.readouterr().err


def test_the_pages_have_the_numbers_that_were_measured() -> None:
    page = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    for name in (
        "quality_grid.json", "quality_mixed.json", "quality_mixed_layerwise.json", "quality_draws.json",
        "quality_trained.json", "quality_trained_layerwise.json", "quality.json",
    ):  # fmt: skip
        rows = json.loads((ROOT / "docs" / "studies" / "smollm2-135m" / name).read_text(encoding="utf-8"))
        assert markdown(rows) in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for row in rows:
        if "+questions" in row["configuration"]:  # on that page alone
            continue
        method, _, refitted = row["configuration"].partition("-s128-n128")
        name = f"| `{method}`{', `compensation: least_squares`' if refitted else ''} | "
        (line,) = (line for line in readme.splitlines() if line.startswith(name) and line.count("|") == 8)
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        assert cells[::2] == [f"{row['kl_text']:.3f}", f"{row['kl_tasks']:.3f}", f"{row['gold_logprob_mean']:.2f}"]
        shares = [f"{100 * row[f'{m}_regained']:.0f} ± {100 * row[f'{m}_stderr']:.0f}%" for m in MEASURES]
        assert cells[1::2] == (["", "", ""] if method == "taylor" and not refitted else shares)


def test_the_page_has_every_score_of_the_embedded_models() -> None:
    page = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "docs" / "studies" / "embedded" / "quality.json").read_text(encoding="utf-8"))
    measured = {(row["model"], row["configuration"]): row for row in rows}
    assert len(measured) == len(rows) == 129 and {row["draws"] for row in rows} == {3}
    shown = re.findall(r"^\| (tiny-\w+) \| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(shown) == 18
    for model, score, cells in shown:
        own = [measured[model, f"{score}-s128-n128{p}"] for p in ("", "-least_squares", "-lora", "-least_squares-lora")]
        shares = [f"{100 * row['kl_tasks_regained']:.0f} ± {100 * row['kl_tasks_stderr']:.0f}%" for row in own]
        assert cells.split(" | ") == shares + [f"{row['accuracy']:.3f}" for row in own]


def test_the_page_has_the_other_ratios_and_both_spaces_at_equal_cost() -> None:
    page, studies = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8"), ROOT / "docs" / "studies"
    for name in ("quality_ratios.json", "quality_ratios_layerwise.json"):
        for row in json.loads((studies / "smollm2-135m" / name).read_text(encoding="utf-8")):
            losses = f"| {row['kl_text']:.3f} | {row['kl_tasks']:.3f} | {row['gold_logprob_mean']:.2f} | "
            (line,) = (line for line in page.splitlines() if losses in line and line.endswith(f"| {row['ppl']:.1f} |"))
            shares = (f"{100 * row[f'{m}_regained']:.0f} ± {100 * row[f'{m}_stderr']:.0f}" for m in MEASURES)
            assert f"| {', '.join(shares)}% |" in line or row["kl_text_stderr"] == 0
    rows = json.loads((studies / "embedded" / "equal_cost.json").read_text(encoding="utf-8"))
    assert len(rows) == 3
    for one in (row[name] for row in rows for name in ("reference", "other", "whole")):
        points = f"{one['points']:+.1f} ± {one['stderr_points']:.1f} " if "points" in one else ""
        assert (
            f"| {one['trials']} | {one['tokens'] / 1e6:.2f} | `{one['best']}` | {one['accuracy']:.3f} | "
            f"{one['cross_fitted']:.3f} ± {one['stderr']:.3f} | {points}| {one['lowest_kl_tasks']:.4f} |"
        ) in page


def test_the_methods_page_has_what_sharing_among_layers_changed() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "docs" / "studies" / "embedded" / "allocation.json").read_text(encoding="utf-8"))
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
    page = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8").lower()
    masks = json.loads((ROOT / "docs" / "studies" / "smollm2-135m" / "masks.json").read_text(encoding="utf-8"))
    assert [row["masks"] for row in masks["rows"]] == ["dense", "magnitude", "wanda", "sparsegpt"]
    for row in masks["rows"]:
        values = " | ".join(f"{row[name]:.3f}" for name in ("kl_text", "kl_tasks", "gold_lost"))
        accuracy = f"{row['accuracy']:.3f} ± {row['accuracy_stderr']:.3f}"
        assert f"| {row['masks']} | {values} | {row['ppl']:.2f} | {accuracy} |" in page
