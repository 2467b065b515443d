"""`prune` from a real search to checkpoints that give its numbers back, and what it says where something is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.pruning.test_shapes import assert_shape
from tests.search_folders import model_folder
from tune_prune import embedded
from tune_prune.checkpoint.manifest import MANIFEST
from tune_prune.commands import evaluate, prune, search
from tune_prune.core.config import EMBEDDED_DATA, EvaluationProtocol, ModelRun
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import Trial


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Searched:
    """A finished search and what it printed."""

    folder: Path
    printed: str

    @property
    def best(self) -> dict[str, Any]:
        return read(self.folder / "global_best_config.json")["models"]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def write_space(folder: Path, **values: Any) -> Path:
    path = folder / "space.json"  # JSON is YAML, too
    path.write_text(json.dumps({"search": "grid", "num_samples": 8} | values), encoding="utf-8")
    return path


def run_search(storage: Path, *argv: str | Path) -> Searched:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert search.main([*map(str, argv), "--inline", "--storage-path", str(storage), "--name", "s"]) == 0
    return Searched(storage / "s", told.getvalue())


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """The three embedded models, two trials each, and their best checkpoints."""
    storage = tmp_path_factory.mktemp("prune")
    models = [flag for name in embedded.MODEL_NAMES for flag in ("--model", name)]
    space = write_space(storage, method=["taylor", "blockwise"], seq_len=32)
    return run_search(storage, *models, "--search-space", space, "--limit", "20", "--save-best")


@pytest.mark.slow
@pytest.mark.parametrize("label", embedded.MODEL_NAMES)
def test_a_saved_best_model_gives_the_searchs_numbers_back(searched: Searched, label: str, tmp_path: Path) -> None:
    """The checkpoint measured again, item by item."""
    protocol, best = EvaluationProtocol(limit=20, perplexity_window=128), searched.best[label]
    model = str(searched.folder / "best" / label)
    run = ModelRun(model, label, None, "embedded", EMBEDDED_DATA, protocol, 0, "float32")
    trial = Trial(None, TrialContext.open(run, tmp_path, "cpu"))
    for _ in trial.stages():
        pass
    record = read(searched.folder / "ledger" / f"{best['key']}.json")
    assert trial.progress.metrics["ppl"] == record["metrics"]["ppl"]
    rows = pyarrow.parquet.read_table(searched.folder / best["output_dir"] / "items.parquet").to_pylist()
    then = {(row["task"], row["doc_id"]): (row["acc"], row["acc_norm"], tuple(row["loglikelihoods"])) for row in rows}
    now = {(item.task, item.doc_id): (item.acc, item.acc_norm, item.loglikelihoods) for item in trial.items}
    assert len(now) == 140 and now == then


@pytest.mark.slow
def test_what_a_search_saves_and_says(searched: Searched) -> None:
    assert len(searched.best) == 3
    for label, entry in searched.best.items():
        folder = searched.folder / "best" / label
        about = read(folder / MANIFEST)
        assert about["config"]["seq_len"] == entry["seq_len"]
        assert about["metrics"]["acc_mean"] == entry["acc_mean"]
        assert about["baseline"]["acc_mean"] == entry["baseline"]["acc_mean"]
        assert about["params"] == entry["params_count"] == sum(p.numel() for p in load(folder).parameters())
        assert f"{entry['params_count']:,}" in searched.printed
        assert str(folder) in searched.printed
    assert not [*searched.folder.glob("best/.*")]


@pytest.mark.slow
def test_the_printed_check_prints_the_recorded_numbers_beside_its_own(
    searched: Searched, printed: Callable[..., str]
) -> None:
    folder = searched.folder / "best" / "tiny-mistral"
    line = next(line for line in searched.printed.splitlines() if " evaluate   " in line and str(folder) in line)
    assert line.split()[1:3] == ["tune-prune", "evaluate"]
    told = printed(evaluate.main, *line.split()[3:])
    rows = re.findall(r"^(\w+) +acc(?:_norm)? +(\S+) ± \S+ +(\S+) +(\S+) ", told, re.MULTILINE)
    assert re.search(r"^result       accuracy .*, both as recorded; the original's accuracy is ", told, re.MULTILINE)
    assert len(rows) == 7
    assert all(measured == recorded and difference == "0" for _, measured, recorded, difference in rows)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["hf", "hf-padded", "gguf"])
def test_every_format_from_the_command_line(
    searched: Searched, fmt: str, printed: Callable[..., str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = ("--config", searched.folder, "--model", "tiny-llama", "--output", out, "--format", fmt, "--measure")
    told = printed(prune.main, *argv)
    about = read(out / MANIFEST)
    sizes = about["sizes"]
    now = sizes.get("padded", sizes["pruned"])
    names = {
        "parameters": "params",
        "memory per token of context": "kv_bytes_per_token",
        "arithmetic per token": "macs_per_token",
    }
    shares = (f"{now[name] / sizes['dense'][name]:.1%} of its {words}" for words, name in names.items())
    assert f"\n             {', '.join(shares)}\n" in told
    on_disk = sum(file["bytes"] for file in about["files"].values())
    assert f"{on_disk / sizes['dense']['weight_bytes']:.1%} of the original's " in told
    assert sizes["pruned"]["params"] < sizes["dense"]["params"] == 158_848
    assert (" of the parameters are zeros\n" in told) == ("padded" in sizes) == (fmt == "hf-padded")
    assert re.search(r"^speed +\S+ .*at prefill .* at decode ", told, re.MULTILINE)
    for values in about["speed"].values():
        assert values["prefill_tokens_per_s"] > 0 and values["decode_tokens_per_s"] > 0
    assert "prefill tokens/s" in told
    assert {path.suffix for path in out.iterdir() if path.name in about["files"]} == {
        ".gguf" if fmt == "gguf" else ".safetensors"
    }
    if fmt != "gguf":
        assert not torch.isnan(load(out)(torch.arange(8)[None]).logits).any()


@pytest.mark.slow
def test_without_its_trial_the_plan_is_found_again(
    searched: Searched, printed: Callable[..., str], tmp_path: Path
) -> None:
    config = tmp_path / "global_best_config.json"
    shutil.copy(searched.folder / config.name, config)
    for name, source in (("kept", searched.folder), ("again", config)):
        told = printed(prune.main, "--config", source, "--model", "tiny-qwen2", "--output", tmp_path / name)
        assert ("as searched" in told) == (name == "kept")
    kept, again = (read(tmp_path / name / MANIFEST) for name in ("kept", "again"))
    assert kept["plan"] == again["plan"]
    assert kept["files"] == again["files"]
    assert again["metrics"]["acc_mean"] == kept["metrics"]["acc_mean"]


@pytest.mark.slow
def test_each_ratio_of_a_search_has_its_best_model(
    printed: Callable[..., str], sentence: Callable[..., str], tmp_path: Path
) -> None:
    """One search over two ratios and two shapes: the passes and the dense baseline are made once, and each ratio is compared
    in itself."""
    shapes, ratios = ("aligned-16", "uniform"), (0.1, 0.3)
    several = {"seq_len": [16, 32], "pruning_ratio": ratios, "shape": shapes}
    space = write_space(tmp_path, method=["taylor", "random"], **several)
    argv = ("--model", "tiny-llama", "--search-space", space, "--limit", "10", "--scheduler", "race")
    found = run_search(tmp_path, *argv)
    records = [read(path) for path in (found.folder / "ledger").glob("*.json")]
    assert len(records) == 12  # random stands once at each ratio in each shape
    assert len([*(found.folder / "passes").iterdir()]) == 2
    assert list(read(found.folder / "baseline.json")) == ["tiny-llama"]
    complete = [record for record in records if record["status"] == "complete"]
    assert {record["config"]["shape"] for record in complete} == set(shapes)
    for record in complete:
        assert_shape(found.folder / "trials" / record["key"], record["config"]["shape"], 64)
    header, *rows = (found.folder / "all_methods_results.csv").read_text().splitlines()
    column = header.split(",").index("shape")
    assert sorted(row.split(",")[column] for row in rows) == sorted(6 * shapes)
    for ratio in ratios:
        label, out = f"tiny-llama@{ratio}", tmp_path / f"out{ratio}"
        own = [record for record in complete if record["config"]["pruning_ratio"] == ratio]
        most = max(own, key=lambda r: (r["metrics"]["acc_mean"], -r["metrics"]["ppl"]))
        best = found.best[label]
        assert (best["key"], best["pruning_ratio"], best["shape"]) == (most["key"], ratio, most["config"]["shape"])
        assert best["name"].endswith(f"-{best['shape']}") and best["name"] in found.printed
        printed(prune.main, "--config", found.folder, "--model", label, "--output", out)
        about = read(out / MANIFEST)
        assert about["params"] == most["metrics"]["params_count"]
        assert about["baseline"] is not None
    assert "holds 2 results" in sentence("--config", found.folder, "--output", tmp_path / "o")


@pytest.mark.slow
def test_another_model_is_not_pruned_by_this_search(
    searched: Searched, sentence: Callable[..., str], tmp_path: Path
) -> None:
    other = model_folder(tmp_path / "other", rms_norm_eps=1e-5)
    argv = ["--config", searched.folder, "--model", "tiny-llama", "--output", tmp_path / "o"]
    assert "is not the model that was searched" in sentence(*argv, "--base", other)
    assert "--revision x is for models of the hub, but tiny-llama is an embedded model" in sentence(
        *argv, "--revision", "x"
    )
    assert "is not in" in sentence("--config", searched.folder, "--model", "mistral", "--output", tmp_path / "o")
    told = sentence("--config", searched.folder, "--output", tmp_path / "o")
    assert "holds 3 results" in told and "tiny-llama, tiny-mistral, tiny-qwen2" in told


def as_of_an_older_version(experiment: Path, key: str) -> None:
    """Without checksums, by which no plan can be proven."""
    for file in (experiment / "experiment.json", experiment / "ledger" / f"{key}.json"):
        values = {name: value for name, value in read(file).items() if name not in ("checksum", "files")}
        file.write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kept_groups": []}, "removes all attention of layer 0"),
        ({"kept_groups": [0, 4]}, "KV groups in layer 0 that tiny-llama does not have"),
    ],
)
def test_a_plan_that_leaves_no_working_model(
    searched: Searched, sentence: Callable[..., str], tmp_path: Path, change: dict[str, list[int]], word: str
) -> None:
    experiment = tmp_path / "changed"
    shutil.copytree(searched.folder, experiment, ignore=shutil.ignore_patterns("tune", "best", "tensorboard"))
    path = experiment / searched.best["tiny-llama"]["output_dir"] / "pruning_plan.json"
    plan = read(path)
    plan["layers"][0] |= change
    path.write_text(json.dumps(plan), encoding="utf-8")
    as_of_an_older_version(experiment, path.parent.name)
    assert word in sentence("--config", experiment, "--model", "tiny-llama", "--output", tmp_path / "o")


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True], ids=["", "of an older version"])
def test_a_damaged_plan_is_computed_again(
    searched: Searched, tmp_path: Path, old: bool, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    experiment = tmp_path / "changed"
    shutil.copytree(searched.folder, experiment, ignore=shutil.ignore_patterns("tune", "best", "tensorboard"))
    path = experiment / searched.best["tiny-llama"]["output_dir"] / "pruning_plan.json"
    plan = read(path)
    damaged = plan | {"layers": [plan["layers"][0] | {"kept_channels": [3, 3]}, *plan["layers"][1:]]}
    path.write_text(json.dumps(damaged), encoding="utf-8")
    if old:
        as_of_an_older_version(experiment, path.parent.name)
    argv = ["--config", str(experiment), "--model", "tiny-llama", "--output", str(tmp_path / "o"), "--device", "cpu"]
    assert prune.main(argv) == 0
    assert f"{path} is " in caplog.text and "the plan is computed again" in caplog.text
    assert ", chosen by embedded text in float32\n" in capfd.readouterr().out
    layers = read(tmp_path / "o" / "tune_prune.json")["plan"]["layers"]
    assert layers == plan["layers"]
