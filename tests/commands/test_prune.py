"""`prune` from a search and from flags: its checkpoints give the search's numbers back; what it prints of them and what it
refuses."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.checkpoint.test_model_card import PLAN, manifest
from tests.pruning.test_shapes import assert_shape
from tests.search_folders import model_folder
from tune_prune import embedded
from tune_prune.checkpoint import save
from tune_prune.checkpoint.card import uses
from tune_prune.checkpoint.manifest import MANIFEST
from tune_prune.commands import prune, search, speed
from tune_prune.core.config import EMBEDDED_DATA, EvaluationProtocol, ModelRun
from tune_prune.core.ledger import write_about
from tune_prune.core.store import FolderStore
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


@pytest.fixture
def sentence(refused: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """A function (*argv) -> the one sentence with which the command refuses, after which nothing has been written."""

    def run(*argv: str | Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        told = refused(prune.main, *argv, begun=True)
        assert sorted(tmp_path.rglob("*")) == before
        return told

    return run


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
    assert trial.record.metrics["ppl"] == record["metrics"]["ppl"]
    assert read(Path(model) / MANIFEST)["measured_on"]["device"] == record["device_name"] == trial.record.device_name
    rows = pyarrow.parquet.read_table(searched.folder / best["output_dir"] / "items.parquet").to_pylist()
    then = {(row["task"], row["doc_id"]): (row["acc"], row["acc_norm"], tuple(row["loglikelihoods"])) for row in rows}
    now = {(item.task, item.doc_id): (item.acc, item.acc_norm, item.loglikelihoods) for item in trial.items}
    assert len(now) == 140 and now == then


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["hf", "hf-padded", "gguf"])
def test_every_format_from_the_command_line(searched, fmt, printed, tmp_path):
    out = tmp_path / "out"
    argv = ("--config", searched.folder, "--model", "tiny-llama", "--output", out, "--format", fmt, "--measure")
    told = printed(prune.main, *argv)
    about = read(out / MANIFEST)
    sizes = about["sizes"]
    assert sizes["pruned"]["params"] < sizes["dense"]["params"] == 158_848 and ("padded" in sizes) == (
        fmt == "hf-padded"
    )
    now, dense = sizes.get("padded", sizes["pruned"]), sizes["dense"]
    assert f"{now['params'] / dense['params']:.1%} of its parameters, " in told
    assert re.search(r"^speed +\S+ .*at prefill .* at decode ", told, re.MULTILINE)
    assert all(values["decode_tokens_per_s"] > 0 for values in about["speed"].values())
    assert {path.suffix for path in out.iterdir() if path.name in about["files"]} == {
        ".gguf" if fmt == "gguf" else ".safetensors"
    }
    if fmt != "gguf":
        assert not torch.isnan(load(out)(torch.arange(8)[None]).logits).any()


@pytest.mark.slow
def test_without_its_trial_the_plan_is_found_again(searched, printed, tmp_path):
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
def test_each_ratio_of_a_search_has_its_best_model(printed, sentence, tmp_path):
    """The passes and the dense baseline are made once, and each ratio is compared in itself."""
    shapes, ratios = ("aligned-16", "uniform"), (0.1, 0.3)
    several = {"seq_len": [16, 32], "pruning_ratio": ratios, "shape": shapes}
    space = write_space(tmp_path, method=["taylor", "random"], **several)
    argv = ("--model", "tiny-llama", "--search-space", space, "--limit", "10", "--scheduler", "race")
    found = run_search(tmp_path, *argv)
    records = [read(path) for path in (found.folder / "ledger").glob("*.json")]
    assert len(records) == 12  # random stands once at each ratio in each shape
    assert len([*(found.folder / "passes").iterdir()]) == 2
    assert set(read(found.folder / "baseline.json")) == {"checksum", "tiny-llama"}
    complete = [record for record in records if record["status"] == "complete"]
    assert {record["config"]["shape"] for record in complete} == set(shapes)
    for record in complete:
        assert_shape(found.folder / "trials" / record["key"], record["config"]["shape"], 64)
    for ratio in ratios:
        label, out = f"tiny-llama@{ratio}", tmp_path / f"out{ratio}"
        own = [record for record in complete if record["config"]["pruning_ratio"] == ratio]
        most = max(own, key=lambda r: (r["metrics"]["acc_mean"], -r["metrics"]["ppl"]))
        best = found.best[label]
        assert (best["key"], best["pruning_ratio"], best["shape"]) == (most["key"], ratio, most["config"]["shape"])
        printed(prune.main, "--config", found.folder, "--model", label, "--output", out)
        assert read(out / MANIFEST)["params"] == most["metrics"]["params_count"]
    assert "holds 2 results" in sentence("--config", found.folder, "--output", tmp_path / "o")


@pytest.mark.slow
def test_another_model_is_not_pruned_by_this_search(searched, sentence, tmp_path):
    other = model_folder(tmp_path / "other", rms_norm_eps=1e-5)
    argv = ["--config", searched.folder, "--model", "tiny-llama", "--output", tmp_path / "o"]
    assert "is not the model that was searched" in sentence(*argv, "--base", other)
    assert "--revision x is for models of the hub, but tiny-llama is an embedded model" in sentence(
        *argv, "--revision", "x"
    )
    assert "is not in" in sentence("--config", searched.folder, "--model", "mistral", "--output", tmp_path / "o")
    told = sentence("--config", searched.folder, "--output", tmp_path / "o")
    assert "holds 4 results" in told and "tiny-llama, tiny-mistral, tiny-qwen2, tiny-qwen3-moe" in told


FINISHED = Path(__file__).parents[1] / "finished"
FLAGS = ("--method", "taylor", "--seq-len", "16", "--num-samples", "8")


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
        own_type = read(out / "config.json")["model_type"]
        assert own_type == ("llama" if shape == "uniform" else "tune_prune_llama")
        assert (out / "modeling_tune_prune.py").is_file() == (shape != "uniform")
        named = read(out / "tokenizer_config.json")["tokenizer_class"]
        assert named == "PreTrainedTokenizerFast"  # by its name in transformers 4
        tokenizer = AutoTokenizer.from_pretrained(out)
        assert len(tokenizer) == len(AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama")))
        assert model.generate(**tokenizer("the", return_tensors="pt"), max_new_tokens=3).shape[1] > 3
    assert len(set(widths["free"])) > 1
    assert {width % 16 for width in widths["aligned"]} == {0}
    assert len(set(widths["uniform"])) == 1
    assert "trust_remote_code" in capfd.readouterr().out


def test_a_plain_config_has_the_names_of_transformers_4(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    base, out = model_folder(tmp_path / "base", rope_parameters=scaling | {"rope_theta": 5e5}), tmp_path / "out"
    argv = ["--model", str(base), *FLAGS, "--calibration", "embedded", "--shape", "uniform", "--output", str(out)]
    assert prune.main(argv) == 0
    config = read(out / "config.json")
    names = {"rope_theta": 5e5, "torch_dtype": "float32", "rope_scaling": scaling}
    assert {name: config.pop(name) for name in names} == names
    again, ids = load(out), torch.arange(300)[None]
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert torch.equal(again(ids).logits, load(out)(ids).logits)


def test_a_plain_gemma_has_the_older_names_of_both_its_rotary_embeddings(tmp_path: Path) -> None:
    kinds = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    AutoConfig.for_model("gemma3_text", rope_parameters=kinds, dtype="float32").save_pretrained(tmp_path)
    save._add_older_names(tmp_path / "config.json")
    config = read(tmp_path / "config.json")
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.pop("rope_parameters") == kinds
    assert config["rope_theta"] == 5e5 and config["rope_local_base_freq"] == 2e4
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == kinds


def test_no_tasks_have_to_be_there(tmp_path: Path) -> None:
    """The text that is measured on is there, which calibration must not read."""
    text = tmp_path / "data" / "text" / "valid.txt"
    text.parent.mkdir(parents=True)
    text.write_text(embedded.calibration_text()[:20_000])
    (text.parent / "wikitext2-raw.test.txt").write_text(embedded.perplexity_text())
    base, out = model_folder(tmp_path / "base"), tmp_path / "out"
    assert prune.main(["--model", str(base), *FLAGS, "--data-dir", str(tmp_path / "data"), "--output", str(out)]) == 0
    assert read(out / MANIFEST)["source"]["calibration"] == str(text)


def test_shards_dtype_and_overwrite(tmp_path: Path, sentence: Callable[..., str]) -> None:
    out = tmp_path / "out"
    argv = ["--model", "tiny-llama", *FLAGS, "--output", str(out), "--dtype", "bfloat16", "--shard-gb", "0.0001"]
    assert prune.main(argv) == 0
    shards = [path.name for path in out.glob("model-*.safetensors")]
    assert len(shards) > 1 and (out / "model.safetensors.index.json").is_file()
    assert sorted(read(out / MANIFEST)["files"]) == sorted(shards)
    first = (out / MANIFEST).read_bytes()
    assert {tensor.dtype for tensor in AutoModelForCausalLM.from_pretrained(out, dtype="auto").parameters()} == {
        torch.bfloat16
    }
    assert "exists" in sentence(*argv)
    assert prune.main([*argv, "--overwrite", "--pruning-ratio", "0.1"]) == 0
    assert (out / MANIFEST).read_bytes() != first
    (out / "adapters").mkdir()
    for name in ("NOTES.md", "small-q4.gguf"):
        (out / name).write_text("mine", encoding="utf-8")
    said = sentence(*argv, "--overwrite")
    assert f"--output {out} holds NOTES.md beside the checkpoint, which would be gone" in said
    assert (out / "NOTES.md").read_text() == "mine" and (out / "adapters").is_dir()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("all I have", encoding="utf-8")
    assert "is not a checkpoint of tune_prune" in sentence(
        "--model", "tiny-llama", *FLAGS, "--overwrite", "--output", mine
    )


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_what_appears_meanwhile_stays(overwrite, tmp_path, monkeypatch, refused):
    out = tmp_path / "out"

    def written(*_: object) -> None:
        out.mkdir()
        (out / "thesis.tex").write_text("all I have", encoding="utf-8")

    monkeypatch.setattr("tune_prune.checkpoint.card.write_card", written)
    said = refused(prune.main, "--model", "tiny-llama", *FLAGS, "--output", out, *overwrite, begun=True)
    assert f"--output {out} " in said and ("not replaced" if overwrite else "exists") in said
    assert (out / "thesis.tex").read_text() == "all I have" and [*tmp_path.iterdir()] == [out]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("tune_prune.checkpoint.card.write_card", broken)
    with pytest.raises(OSError, match="disk full"):
        prune.main(["--model", "tiny-llama", *FLAGS, "--output", str(tmp_path / "deep" / "out")])
    assert [path.name for path in (tmp_path / "deep").iterdir()] == []


def moved_from(experiment: Path, folder: Path) -> None:
    """Let the experiment say that its model was in `folder`."""
    texts = [
        (experiment / name).read_text().replace('"model": "tiny-llama"', f'"model": "{folder}"')
        for name in ("experiment.json", "global_best_config.json")
    ]
    write_about(FolderStore(experiment), json.loads(texts[0]))
    (experiment / "global_best_config.json").write_text(texts[1])


def test_a_dense_model_that_has_moved_is_asked_for(refused: Callable[..., str], tmp_path: Path) -> None:
    """Both commands that take up a search's model ask for it."""
    experiment = Path(shutil.copytree(FINISHED / "storage" / "tiny-llama-20-smoke-limit5", tmp_path / "experiment"))
    moved_from(experiment, tmp_path / "gone")
    for main, more in ((prune.main, ("--output", tmp_path / "out")), (speed.main, ())):
        assert (
            f"tiny-llama, the model that was searched, is not where it was (model folder {tmp_path / 'gone'} does not "
            "exist); name where it is now with --base"
        ) in refused(main, "--config", experiment, *more)
        assert "model folder nowhere/at/all does not exist" in refused(
            main, "--config", experiment, "--base", "nowhere/at/all", *more
        )


LARGE = {"head_dim": 128}
OWN = {"auto_map": {"AutoConfig": "a.B"}}
WHOLE = replace(PLAN, kept_groups=((0, 1), (1, 3), (0,), (0,), (), (1, 2, 3)))


def of(folder: Path, config: dict[str, object] | None = None, **changed: object) -> dict[str, str]:
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return dict(uses(folder, manifest(**changed), "my model"))


def test_vllm_is_named_where_every_layer_has_attention(tmp_path: Path) -> None:
    trust = ["vllm", "serve", "my model", "--trust-remote-code"]
    assert shlex.split(of(tmp_path, OWN | LARGE, plan=WHOLE)["serve"]) == trust
    assert shlex.split(of(tmp_path, LARGE, plan=WHOLE)["serve"]) == trust[:-1]
    assert shlex.split(of(tmp_path, LARGE, format="hf-padded")["serve"]) == trust[:-1]
    bare = of(tmp_path, OWN | LARGE)["serve"]  # of six layers one is dropped, and another one has no attention
    assert bare == "not with vLLM, as layer 2 lost all attention: save it with --format vllm"
    assert shlex.split(of(tmp_path, OWN | LARGE, format="vllm")["serve"]) == trust
    assert "serve" not in of(tmp_path, OWN | {"head_dim": 16}, plan=WHOLE)  # vLLM refuses such heads
    assert "serve" in of(tmp_path, OWN | {"hidden_size": 4096, "num_attention_heads": 32}, plan=WHOLE)
    qwen2 = LARGE | {"model_type": "qwen2", "hidden_size": 1280}
    for heads, more in ((10, []), (8, ["--model-impl", "transformers"])):
        line = of(tmp_path, qwen2 | {"num_attention_heads": heads}, plan=WHOLE)["serve"]
        assert shlex.split(line) == [*trust[:-1], *more]
    about = manifest(plan=WHOLE)
    of_two = replace(about, config=replace(about.config, shape="aligned-8-tp2"))
    (tmp_path / "config.json").write_text(json.dumps(OWN | LARGE))
    assert shlex.split(dict(uses(tmp_path, of_two, "my model"))["serve"]) == [*trust, "--tensor-parallel-size", "2"]


@pytest.mark.parametrize("shape", ["free", "uniform"])
def test_the_line_to_try_it_writes_text(shape: str, tmp_path: Path, printed: Callable[..., str]) -> None:
    out = tmp_path / "small"
    told = printed(prune.main, "--model", "tiny-llama", "--method", "magnitude", "--shape", shape, "--output", out)
    (line,) = re.findall(r"^next +try +(.+)$", told, re.MULTILINE)
    program, flag, code = shlex.split(line)
    assert (program, flag) == ("python", "-c") and ("trust_remote_code" in code) == (shape == "free")
    with contextlib.redirect_stdout(io.StringIO()) as written:
        exec(code, {})
    assert written.getvalue().startswith("[{'generated_text': 'Once upon a time")
