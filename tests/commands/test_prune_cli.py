"""`prune` from a real search to checkpoints that give its numbers back, and what it says where something is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.search_folders import model_folder
from tune_prune import embedded, prune, search
from tune_prune.checkpoint.manifest import MANIFEST

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--method", "taylor", "--seq-len", "16", "--num-samples", "8")


def run(*argv: str | Path, module: str = "prune") -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tune_prune.{module}", *map(str, argv)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@dataclass(frozen=True)
class Searched:
    """A finished search with --save-best and what it printed."""

    folder: Path
    printed: str

    @property
    def best(self) -> dict[str, Any]:
        return json.loads((self.folder / "global_best_config.json").read_text(encoding="utf-8"))["models"]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """The three embedded models, six trials each."""
    storage = tmp_path_factory.mktemp("prune")
    models = [flag for name in embedded.MODEL_NAMES for flag in ("--model", name)]
    argv = [
        *models,
        "--search-space",
        "smoke",
        "--limit",
        "20",
        "--storage-path",
        storage,
        "--name",
        "s",
        "--save-best",
    ]
    done = run(*argv, module="search")
    assert done.returncode == 0, done.stdout + done.stderr
    return Searched(storage / "s", done.stdout)


@pytest.fixture
def sentence(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """A function (*argv) -> the one sentence with which that command ends, after which nothing has been written."""

    def refused(*argv: str | Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        code = prune.main([*map(str, argv)])
        told = capfd.readouterr().err
        assert code == 2 and told.count("\n") == 1 and told.startswith("error: "), told
        assert sorted(tmp_path.rglob("*")) == before
        return told

    return refused


# In a process of its own, as a user would: the checkpoint of every model measured again, item by item.
AGAIN = """
import json, sys
from pathlib import Path
import pyarrow.parquet, torch
torch.set_num_threads(1)
from tune_prune.core.config import EvaluationProtocol, ModelRun
from tune_prune.trial.context import TrialContext
from tune_prune.data.sources import EMBEDDED_DATA
from tune_prune.trial.trial import Trial
experiment = Path(sys.argv[1])
for label, best in json.loads((experiment / "global_best_config.json").read_text())["models"].items():
    protocol = EvaluationProtocol(limit=20)
    run = ModelRun(str(experiment / "best" / label), label, None, "embedded", EMBEDDED_DATA, protocol, 0, "float32")
    trial = Trial(None, TrialContext.open(run, experiment / "again" / label, "cpu"))
    for _ in trial.stages():
        pass
    record = json.loads((experiment / "ledger" / f"{best['key']}.json").read_text())
    assert trial.progress.metrics["ppl"] == record["metrics"]["ppl"], label
    rows = pyarrow.parquet.read_table(experiment / best["output_dir"] / "items.parquet").to_pylist()
    then = {(row["task"], row["doc_id"]): (row["acc"], row["acc_norm"], tuple(row["loglikelihoods"])) for row in rows}
    now = {(item.task, item.doc_id): (item.acc, item.acc_norm, item.loglikelihoods) for item in trial.items}
    assert len(now) == 140 and now == then, label
    print("same", label)
"""


@pytest.mark.slow
def test_a_saved_best_model_gives_the_searchs_numbers_back(searched: Searched) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", AGAIN, str(searched.folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [word for name in searched.best for word in ("same", name)]
    assert len(searched.best) == 3


@pytest.mark.slow
def test_what_a_search_saves_and_says(searched: Searched) -> None:
    for label, entry in searched.best.items():
        folder = searched.folder / "best" / label
        about = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        assert about["config"]["taylor_seq_len"] == entry["taylor_seq_len"]
        assert about["metrics"]["acc_mean"] == entry["acc_mean"]
        assert about["baseline"]["acc_mean"] == entry["baseline"]["acc_mean"]
        assert about["params"] == entry["params_count"] == sum(p.numel() for p in load(folder).parameters())
        assert f"{entry['params_count']:,}" in searched.printed
        assert str(folder) in searched.printed
    assert not [*searched.folder.glob("best/.*")]


@pytest.mark.slow
def test_the_printed_check_prints_the_recorded_numbers_beside_its_own(searched: Searched) -> None:
    folder = searched.folder / "best" / "tiny-mistral"
    line = next(line for line in searched.printed.splitlines() if line.startswith("check ") and str(folder) in line)
    assert line.split()[1:4] == ["python", "-m", "tune_prune.evaluate"]
    done = run(*line.split()[4:], module="evaluate")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w+) +acc\w* +(\d\.\d{4}) +\S+ +(\d\.\d{4}) +(\S+) ", done.stdout, re.MULTILINE)
    assert len(rows) == 7
    assert all(measured == recorded and difference == "0" for _, measured, recorded, difference in rows)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["hf", "hf-padded", "gguf"])
def test_every_format_from_the_command_line(searched: Searched, fmt: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("--config", searched.folder, "--model", "tiny-llama", "--output", out, "--format", fmt, "--measure")
    assert done.returncode == 0, done.stderr
    about = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    sizes = about["sizes"]
    for name, row in sizes.items():
        line = next(line for line in done.stdout.splitlines() if line.startswith(f"{name} ") and "%" in line)
        for value in (row["params"], row["kv_bytes_per_token"], row["macs_per_token"]):
            assert f" {value:,} " in f"{line} ", (name, line)
    assert sizes["pruned"]["params"] < sizes["dense"]["params"] == 158_848
    assert ("padding " in done.stdout) == ("padded" in sizes) == (fmt == "hf-padded")
    for values in about["speed"].values():
        assert values["prefill_tokens_per_s"] > 0 and values["decode_tokens_per_s"] > 0
    assert "prefill tokens/s" in done.stdout
    assert {path.suffix for path in out.iterdir() if path.name in about["files"]} == {
        ".gguf" if fmt == "gguf" else ".safetensors"
    }
    if fmt != "gguf":
        assert not torch.isnan(load(out)(torch.arange(8)[None]).logits).any()


@pytest.mark.slow
def test_without_its_trial_the_plan_is_found_again(searched: Searched, tmp_path: Path) -> None:
    config = tmp_path / "global_best_config.json"
    shutil.copy(searched.folder / config.name, config)
    for name, source in (("kept", searched.folder), ("again", config)):
        done = run("--config", source, "--model", "tiny-qwen2", "--output", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert ("as searched" in done.stdout) == (name == "kept")
    kept, again = (json.loads((tmp_path / name / MANIFEST).read_text(encoding="utf-8")) for name in ("kept", "again"))
    assert kept["plan"] == again["plan"]
    assert kept["files"] == again["files"]
    assert again["metrics"]["acc_mean"] == kept["metrics"]["acc_mean"]


@pytest.mark.slow
def test_each_ratio_of_a_search_has_its_best_model(tmp_path: Path) -> None:
    """One search over two ratios: the passes and the dense baseline are made once, and each ratio is compared in itself."""
    space = tmp_path / "sizes.yaml"
    space.write_text(
        "search: grid\nmethod: [taylor, random]\ntaylor_seq_len: [16, 32]\ntaylor_num_samples: 8\npruning_ratio: [0.1, 0.3]\n"
    )
    argv = [
        "--model",
        "tiny-llama",
        "--search-space",
        space,
        "--limit",
        "10",
        "--storage-path",
        tmp_path,
        "--name",
        "s",
    ]
    done = run(*argv, "--scheduler", "race", module="search")
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(path.read_text()) for path in (tmp_path / "s" / "ledger").glob("*.json")]
    assert len(records) == 6  # random stands once at each ratio
    assert len([*(tmp_path / "s" / "passes").iterdir()]) == 2
    assert list(json.loads((tmp_path / "s" / "baseline.json").read_text())) == ["tiny-llama"]
    best = Searched(tmp_path / "s", done.stdout).best
    for ratio in (0.1, 0.3):
        label, out = f"tiny-llama@{ratio}", tmp_path / f"out{ratio}"
        own = [r for r in records if r["config"]["pruning_ratio"] == ratio and r["status"] == "complete"]
        most = max(own, key=lambda r: (r["metrics"]["acc_mean"], -r["metrics"]["ppl"]))
        assert (best[label]["key"], best[label]["pruning_ratio"]) == (most["key"], ratio)
        assert run("--config", tmp_path / "s", "--model", label, "--output", out).returncode == 0
        about = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        assert about["params"] == most["metrics"]["params_count"]
        assert about["baseline"] is not None
    assert "holds 2 results" in run("--config", tmp_path / "s", "--output", tmp_path / "o").stderr


@pytest.mark.slow
def test_another_model_is_not_pruned_by_this_search(
    searched: Searched, sentence: Callable[..., str], tmp_path: Path
) -> None:
    other = model_folder(tmp_path / "other", rms_norm_eps=1e-5)
    argv = ["--config", searched.folder, "--model", "tiny-llama", "--output", tmp_path / "o"]
    assert "is not the model that was searched" in sentence(*argv, "--base", other)
    assert "is not in" in sentence("--config", searched.folder, "--model", "mistral", "--output", tmp_path / "o")
    told = sentence("--config", searched.folder, "--output", tmp_path / "o")
    assert "holds 3 results" in told and "tiny-llama, tiny-mistral, tiny-qwen2" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kept_groups": []}, "removes all attention of layer 0"),
        ({"kept_groups": [0, 4]}, "KV groups in layer 0 that tiny-llama does not have"),
        ({"kept_channels": [3, 3]}, "kept_channels is [3, 3]"),
    ],
)
def test_a_plan_that_leaves_no_working_model(
    searched: Searched, sentence: Callable[..., str], tmp_path: Path, change: dict[str, list[int]], word: str
) -> None:
    experiment = tmp_path / "changed"
    shutil.copytree(searched.folder, experiment, ignore=shutil.ignore_patterns("tune", "best", "tensorboard"))
    path = experiment / searched.best["tiny-llama"]["output_dir"] / "pruning_plan.json"
    plan = json.loads(path.read_text(encoding="utf-8"))
    plan["layers"][0] |= change
    path.write_text(json.dumps(plan), encoding="utf-8")
    assert word in sentence("--config", experiment, "--model", "tiny-llama", "--output", tmp_path / "o")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_from_flags_and_shapes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    widths = {}
    for shape in ("free", "aligned", "uniform"):
        out = tmp_path / shape
        align = ["--align", "16"] if shape == "aligned" else []
        argv = ["--model", "tiny-llama", *FLAGS, "--shape", shape, *align, "--output", str(out), "--device", "cpu"]
        assert prune.main(argv) == 0, capfd.readouterr().err
        model = load(out)
        widths[shape] = [
            layer.mlp.gate_proj.out_features for layer in model.model.layers if hasattr(layer.mlp, "gate_proj")
        ]
        own_type = json.loads((out / "config.json").read_text(encoding="utf-8"))["model_type"]
        assert own_type == ("llama" if shape == "uniform" else "tune_prune_llama")
        assert (out / "modeling_tune_prune.py").is_file() == (shape != "uniform")
        named = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))["tokenizer_class"]
        assert named == "PreTrainedTokenizerFast"  # by its name in transformers 4
        tokenizer = AutoTokenizer.from_pretrained(out)
        assert len(tokenizer) == len(AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama")))
        assert model.generate(**tokenizer("the", return_tensors="pt"), max_new_tokens=3).shape[1] > 3
    assert len(set(widths["free"])) > 1
    assert {width % 16 for width in widths["aligned"]} == {0}
    assert len(set(widths["uniform"])) == 1
    assert "trust_remote_code" in capfd.readouterr().out


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["default", "llama3"],
)
def test_a_plain_config_has_the_names_of_transformers_4(rope: dict[str, Any], tmp_path: Path) -> None:
    base, out = model_folder(tmp_path / "base", rope_parameters=rope), tmp_path / "out"
    argv = ["--model", str(base), *FLAGS, "--calibration", "embedded", "--shape", "uniform", "--output", str(out)]
    assert prune.main(argv) == 0
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (config["rope_theta"], config["torch_dtype"]) == (5e5, "float32")
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    assert config["rope_scaling"] == (scaling if rope["rope_type"] == "llama3" else None)
    again = load(out)
    assert again.config.rope_parameters == rope
    del config["rope_theta"], config["rope_scaling"], config["torch_dtype"]
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ids = torch.arange(300)[None]
    assert torch.equal(again(ids).logits, load(out)(ids).logits)


def test_shards_dtype_and_overwrite(tmp_path: Path, sentence: Callable[..., str]) -> None:
    out = tmp_path / "out"
    argv = ["--model", "tiny-llama", *FLAGS, "--output", str(out), "--dtype", "bfloat16", "--shard-gb", "0.0001"]
    assert prune.main(argv) == 0
    shards = [path.name for path in out.glob("model-*.safetensors")]
    assert len(shards) > 1 and (out / "model.safetensors.index.json").is_file()
    assert sorted(json.loads((out / MANIFEST).read_text(encoding="utf-8"))["files"]) == sorted(shards)
    first = (out / MANIFEST).read_bytes()
    assert {tensor.dtype for tensor in AutoModelForCausalLM.from_pretrained(out, dtype="auto").parameters()} == {
        torch.bfloat16
    }
    assert "exists" in sentence(*argv)
    assert prune.main([*argv, "--overwrite", "--pruning-ratio", "0.1"]) == 0
    assert (out / MANIFEST).read_bytes() != first
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("all I have", encoding="utf-8")
    assert "is no checkpoint of this program" in sentence(
        "--model", "tiny-llama", *FLAGS, "--overwrite", "--output", mine
    )


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("tune_prune.checkpoint.card.model_card.write_card", broken)
    with pytest.raises(OSError, match="disk full"):
        prune.main(["--model", "tiny-llama", *FLAGS, "--output", str(tmp_path / "deep" / "out")])
    assert [path.name for path in (tmp_path / "deep").iterdir()] == []


WRONG: dict[str, tuple[list[str], list[str]]] = {
    "nothing": ([], ["--model, --method, --seq-len, --num-samples is missing", "--config"]),
    "half": (["--model", "tiny-llama", "--method", "taylor"], ["--seq-len, --num-samples is missing"]),
    "no config": (["--config", "nope.json"], ["nope.json does not exist", "global_best_config.json"]),
    "both": (["--config", "x", "--method", "taylor"], ["--method does not go with --config"]),
    "base": (["--model", "tiny-llama", *FLAGS, "--base", "x"], ["--base x is for --config"]),
    "method": (
        ["--model", "tiny-llama", "--method", "tailor", "--seq-len", "16", "--num-samples", "8"],
        ["'tailor'", "did you mean 'taylor'"],
    ),
    "model": (["--model", "tiny-lama", *FLAGS], ["'tiny-lama'", "did you mean 'tiny-llama'"]),
    "ratio": (["--model", "tiny-llama", *FLAGS, "--pruning-ratio", "0.9"], ["0.9", "can be removed"]),
    "align": (["--model", "tiny-llama", *FLAGS, "--align", "16"], ["--align 16", "--shape aligned"]),
    "format": (["--model", "tiny-llama", *FLAGS, "--format", "onnx"], ["--format", "'onnx'", "gguf"]),
    "long": (
        ["--model", "tiny-llama", "--method", "taylor", "--seq-len", "4096", "--num-samples", "8"],
        ["4096", "512"],
    ),
}


@pytest.mark.parametrize(("argv", "words"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_sentence(
    argv: list[str], words: list[str], sentence: Callable[..., str], tmp_path: Path
) -> None:
    told = sentence(*argv, "--output", tmp_path / "out")
    for word in words:
        assert word in told


@pytest.mark.parametrize(
    ("text", "word"),
    {
        "no JSON": ("{", "JSON"),
        "another file": ('{"a": 1}', "names no configuration"),
        "half an entry": ('{"models": {"m": {"method": "taylor"}}}', "names no configuration"),
        "no model": ('{"models": {}}', "no"),
        "of a results file": (
            '{"models": {"m": {"method": "taylor", "taylor_seq_len": 16, "taylor_num_samples": 8, "source": null}}}',
            "--seq-len 16",
        ),
    }.values(),
)
def test_a_file_that_is_no_result_of_a_search(
    text: str, word: str, sentence: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "global_best_config.json"
    path.write_text(text, encoding="utf-8")
    assert word in sentence("--config", path, "--output", tmp_path / "out")


def test_help_needs_nothing_heavy(run_without: Callable[..., str]) -> None:
    code = "import sys; sys.argv = ['x', '--help']; from tune_prune import prune; prune.main(sys.argv[1:])"
    told = run_without(("torch", "transformers", "ray", "lm_eval"), f"try:\n  {code}\nexcept SystemExit: pass")
    assert "--format" in told and "--save-best" in search.parser().format_help()
