"""Every benchmark runs at its smallest setting and says what must hold on any machine: counts, equalities, no mismatch.
How long anything took is nobody's business here."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tune_prune import embedded
from tune_prune.core.config import ZERO_SHOT_TASKS
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models import catalog
from tune_prune.models.loading import load_model
from tune_prune.pruning.statistics.block_removal import KINDS, removal_losses
from tune_prune.pruning.statistics.taylor import taylor

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DATA = Path(os.environ.get("TUNE_PRUNE_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA} (set TUNE_PRUNE_DATA)")


def positive(*values: float) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)


@pytest.mark.slow
def test_passes(bench: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "tiny-llama", "--threads", "1", "--repeats", "1", "--num-samples", "4,5,10"]
    values = bench("passes", *argv, "--seq-len", "8,16,24,32,48")
    assert values["configurations"] == 45  # methods x seq_len x num_samples, as many as of the published grid
    (model,) = values["models"]
    gradient, removal = model["gradient"], model["removal"]
    assert gradient["passes"] == {"shared": 5, "per_trial": 45, "ratio": 9.0}
    assert gradient["samples"] == {"shared": 5 * 10, "per_trial": 3 * 5 * 19, "ratio": 5.7}
    assert gradient["tokens"]["shared"] == 10 * (8 + 16 + 24 + 32 + 48)
    assert gradient["bit_equal"] is True
    assert removal["passes"] == {"shared": 5, "per_trial": 30, "ratio": 6.0}
    assert removal["largest_difference"] < 1e-5
    layers = model["layers"]
    # By hand at one seq_len: removal samples are 1, 1 and 2; kinds are layer alone, then attention and mlp.
    shared, alone = 2 * (layers + 3 * layers * (layers - 1) / 2), 4 * (2 * layers + 3 * layers * (layers - 1))
    assert removal["token_layers"]["ratio"] == pytest.approx(alone / shared)
    assert positive(*(part["seconds"][way] for part in (gradient, removal) for way in ("shared", "per_trial")))
    out = capsys.readouterr().out
    assert "equals a direct pass bit for bit" in out and "the same bits in every way" in out
    ways = model["ways"]
    assert list(ways["seconds"]) == list(ways["ratio"]) and set(ways["ratio"]) == {"whole", "by layer", "streamed"}
    for ratio, clock in (("ratio", "seconds"), ("cpu_ratio", "cpu_seconds")):
        for way, value in ways[ratio].items():
            assert value == pytest.approx(ways[clock][way] / ways[clock]["whole"]) and value > 0
    assert ways["bit_equal"] is True


@needs_data
def test_ways_alone_of_a_model_in_a_folder_and_their_difference(
    bench: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("bench_passes")
    real = module.taylor

    def wrong(model: Any, family: Any, windows: Any, snapshots: list[int], way: Any) -> Any:
        return real(model, family, windows.flip(0) if way.streamed else windows, snapshots, way)

    monkeypatch.setattr(module, "taylor", wrong)
    folder = embedded.model_dir("tiny-llama")
    argv = ["--threads", "1", "--repeats", "1", "--seq-len", "16", "--num-samples", "2,4", "--only-ways"]
    (model,) = bench("passes", "--model", str(folder), *argv)["models"]
    assert model["model"] == "tiny-llama" and "gradient" not in model and model["ways"]["bit_equal"] is False
    assert "importances DIFFER between the ways" in capsys.readouterr().out


def test_passes_tell_a_difference(bench: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("bench_passes")
    real = module.taylor

    def wrong(model: Any, family: Any, windows: Any, snapshots: list[int], *way: Any) -> Any:
        return real(model, family, windows if len(snapshots) > 1 else windows.flip(0), snapshots, *way)

    monkeypatch.setattr(module, "taylor", wrong)
    argv = ["--model", "tiny-llama", "--threads", "1", "--repeats", "1", "--seq-len", "16", "--num-samples", "2,4"]
    assert bench("passes", *argv)["models"][0]["gradient"]["bit_equal"] is False


def check_engine(values: dict[str, Any], items: int, tasks: tuple[str, ...] = ZERO_SHOT_TASKS) -> None:
    (model,) = values["models"]
    assert set(model["tasks"]) == set(tasks)
    for name, task in model["tasks"].items():
        assert task["items"] == items
        assert task["answers"]["largest_difference"] < 2e-4
        assert task["answers"]["acc_differs"] == task["answers"]["acc_norm_differs"] == 0
        tokens = task["tokens"]
        # Without sharing ours forwards what HFLM does; sharing never forwards more, padding never less.
        assert tokens["shared"] <= tokens["plain"] == tokens["hflm"] <= tokens["hflm_padded"], name
        assert positive(*task["seconds"].values())
    whole = model["all"]
    assert whole["tokens"]["hflm"] > whole["tokens"]["shared"] and whole["token_ratio"] > 1
    assert positive(whole["speedup"], whole["speedup_in_slices"], model["seconds_in_slices"])
    files = model["whole_files"]
    counted = {way: sum(task[way] for task in files["tasks"].values()) for way in ("shared", "plain")}
    assert files["at_hand"] == counted | {"ratio": counted["plain"] / counted["shared"]}
    if model["model"] == "tiny-llama":  # the embedded tasks are whole
        assert "hellaswag_whole" not in files
        return
    scale = 10_042 / files["tasks"]["hellaswag"]["items"]
    part = {way: files["tasks"]["hellaswag"][way] for way in counted}
    scaled = {way: counted[way] - part[way] + scale * part[way] for way in counted}
    assert files["hellaswag_whole"]["ratio"] == pytest.approx(scaled["plain"] / scaled["shared"])


def test_engine(bench: Callable[..., dict[str, Any]]) -> None:
    argv = ["--model", "tiny-llama", "--limit", "4", "--count-limit", "6", "--repeats", "1", "--threads", "1"]
    check_engine(bench("engine", *argv, "--batch-sizes", "2,4"), 4)


@needs_data
@pytest.mark.slow
def test_engine_on_real_files(bench: Callable[..., dict[str, Any]]) -> None:
    argv = ["--model", "stories260K", "--limit", "4", "--repeats", "1", "--threads", "1", "--batch-sizes", "2,4"]
    check_engine(bench("engine", *argv, "--tasks", "openbookqa,hellaswag"), 4, ("openbookqa", "hellaswag"))


@pytest.mark.slow
def test_grid(bench: Callable[..., dict[str, Any]]) -> None:
    argv = [
        "--model",
        "tiny-llama",
        "--search-space",
        "smoke",
        "--sample",
        "2",
        "--limit",
        "4",
        "--tasks",
        "boolq,piqa",
    ]
    values = bench("grid", *argv, "--slots", "2", "--inline")
    (model,) = values["models"]
    assert (model["trials"], model["published_trials_run"]) == (6, 2)
    assert model["mismatches"] == []
    assert positive(model["search_seconds"], model["published_seconds"], *model["parts"].values())
    assert model["ratio"] == pytest.approx(model["published_seconds"] / model["search_seconds"])
    assert model["own_kernels_parts"].keys() == model["parts"].keys()
    assert model["own_kernels_parts"]["unused removal"] == 0
    for part in ("load", "pruning", "zero_shot", "start and imports"):  # what both ways do alike is measured once
        assert model["own_kernels_parts"][part] == model["parts"][part]


def test_the_published_way_finds_what_the_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importance, removal losses and perplexity of the published loops, which the grid's benchmark times."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    way = importlib.import_module("published_way")
    loaded = load_model(catalog.resolve("tiny-qwen2"), torch.float32, "cpu")  # its projections have biases
    windows = torch.randint(loaded.model.config.vocab_size, (11, 12), generator=torch.Generator().manual_seed(5))
    groups, own = way.gradient_pass(loaded, windows), taylor(loaded.model, loaded.family, windows, [11])[11].groups
    for published, searched in zip((*groups.attention, *groups.mlp), (*own.attention, *own.mlp), strict=True):
        np.testing.assert_allclose(published, searched, rtol=1e-4)
    assert not any(p.requires_grad or p.grad is not None for p in loaded.model.parameters())
    losses, removal = (
        way.removal_passes(loaded, windows, KINDS),
        removal_losses(loaded.model, loaded.family, windows, KINDS),
    )
    np.testing.assert_allclose(losses.pop("dense")[0], removal.dense, rtol=1e-5)
    for kind in KINDS:
        np.testing.assert_allclose(losses[kind], removal.removed[kind], rtol=1e-5)
    text = windows.flatten()[:101]  # its last window has one token, which counts nowhere
    assert way.perplexity(loaded.model, text, 20) == pytest.approx(perplexity(loaded.model, text, 20).ppl, rel=1e-5)


def test_grid_tells_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    differences = importlib.import_module("bench_grid").differences
    search = {"taylor-s16-n8": {"acc_boolq": 0.5, "acc_piqa": 0.25, "ppl": 10.0}}
    same = {"config": "taylor-s16-n8", "metrics": {"acc_boolq": 0.5, "ppl": 10.0001}}
    assert differences([same], search) == []
    other = {"config": "taylor-s16-n8", "metrics": {"acc_boolq": 0.5, "acc_piqa": 0.26}}
    assert [line.split(":")[1].split()[0] for line in differences([same, other], search)] == ["acc_piqa"]


@pytest.mark.slow
def test_overhead(bench: Callable[..., dict[str, Any]]) -> None:
    argv = ["--model", "tiny-llama", "--trials", "1", "--limit", "3", "--num-samples", "8", "--search-space", ""]
    values = bench("overhead", *argv, "--memory-trials", "12", "--memory-limit", "1", "--threads", "1")
    (model,) = values["in_process"]
    assert [row["part"] for row in model["parts"]] == ["passes", "baseline", "trial 1"]
    for row in model["parts"]:
        assert positive(row["wall"], row["forward"], row["outside"])
        assert row["wall"] == pytest.approx(sum(row[name] for name in ("forward", "backward", "softmax", "outside")))
        assert (row["backward"] > 0) == (row["part"] == "passes")
    assert 0 < model["outside_share"] < model["outside_share_with_softmax"] < 1
    memory = values["memory"]
    assert [int(trial) for trial in memory["resident_bytes"]] == [10, 12]
    assert memory["tensor_bytes"]["largest"] == memory["tensor_bytes"]["first"]  # trials leave no tensor behind
    assert values["commands"] == []


@pytest.mark.slow
def test_overhead_of_a_search(bench: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    space = tmp_path / "two_trials.yaml"
    space.write_text("search: grid\nmethod: taylor\nseq_len: 16\nnum_samples: [4, 8]\n", encoding="utf-8")
    argv = [
        "--search-space",
        str(space),
        "--model",
        "tiny-llama",
        "--trials",
        "0",
        "--limit",
        "3",
        "--tasks",
        "boolq",
        "--memory-trials",
        "0",
    ]
    searches = bench("overhead", *argv, "--threads", "1")["commands"]
    assert [search["way"] for search in searches] == ["Ray", "--inline"]
    for search in searches:
        assert search["trials"] == 2
        assert 0 < search["stage_seconds"] < search["wall"] * search["slots"]
        assert 0 < search["start"] < search["wall"] and 0 < search["outside_share"] < 1


@needs_data
@pytest.mark.slow
def test_racing(bench: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    values = bench("racing", "--grids", "1")
    rules = values["simulated"]
    for name, found in rules.items():
        assert 0 < found["tokens"] <= found["largest_tokens"] <= 1, name
        assert found["cases"] == 1 and found["same_winner"] <= found["same_or_within_noise"], name
    assert "1 grids of 45 trials" in capsys.readouterr().out


@needs_data
def test_random_models_are_what_they_are_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    common = importlib.import_module("bench_common")
    made = common.subject("0.05M", tmp_path)
    sizes = common.sizes_of(made.run())
    assert 0.04e6 < sizes["layer_params"] < 0.06e6
    for name, (hidden, layers, heads, kv_heads, channels, _) in common.SIZES.items():
        head = hidden // heads
        params = layers * (2 * hidden * head * (heads + kv_heads) + 3 * hidden * channels)
        assert hidden % heads == heads % kv_heads == 0
        assert 0.9 <= params / (float(name.partition("M")[0]) * 1e6) <= 1.1, (name, params)
    again = common.random_model(tmp_path / "again", *common.SIZES["0.05M"])
    assert (again / "model.safetensors").read_bytes() == (Path(made.location) / "model.safetensors").read_bytes()


@needs_data
def test_a_cut_vocabulary_is_the_beginning_of_the_whole_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    common = importlib.import_module("bench_common")
    whole, cut = (
        AutoTokenizer.from_pretrained(common.random_model(tmp_path / str(size), 48, 2, 4, 2, 128, size))
        for size in (None, 1000)
    )
    assert (len(whole), len(cut)) == (50_257, 1000)
    text = "Structured pruning takes out whole parts.\n\nDéjà vu – 42!"
    assert cut.decode(cut(text)["input_ids"]) == text
    assert len(cut(text)["input_ids"]) > len(whole(text)["input_ids"])
    pieces = {token: index for token, index in whole.get_vocab().items() if index < 999}
    assert cut.get_vocab() == pieces | {common.END: 999}


@needs_data
def test_a_limit_cuts_the_text_as_it_cuts_the_items(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    cut = Path(importlib.import_module("bench_common").subject("stories260K", tmp_path, limit=100).data)
    text, whole = (folder / "text" / "wikitext2-raw.test.txt" for folder in (cut, DATA))
    rows = [len(path.read_text(encoding="utf-8").strip().split("\n")) for path in DATA.glob("tasks/*/*.jsonl")]
    share = 100 * len(rows) / sum(rows)  # every file has more than 100
    assert len(text.read_text(encoding="utf-8")) == pytest.approx(share * len(whole.read_text(encoding="utf-8")), abs=1)
    assert (cut / "tasks" / "piqa" / "validation.jsonl").is_file()
    assert {path.name for path in (cut / "text").iterdir()} == {path.name for path in (DATA / "text").iterdir()}
