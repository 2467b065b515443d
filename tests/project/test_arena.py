"""scripts/arena.py: its judge, which knows nothing of tune_prune, finds what tune_prune records; and what it says of bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import arena
import numpy as np
import pytest
import torch
from arena_peers import inputs, scoring, shortgpt
from arena_peers.precision import multiply_in
from scipy import stats
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import tune_prune
from tune_prune import embedded

ITEMS: dict[str, list[dict[str, Any]]] = {
    "arc_easy/test": [
        {
            "question": "Which of these melts?",
            "choices": {"text": ["iron", "ice", "a stone"], "label": list("ABC")},
            "answerKey": "B",
        },
        {"question": "What is red?", "choices": {"text": ["an apple", "milk"], "label": ["1", "2"]}, "answerKey": "1"},
        {"question": "Left out?", "choices": {"text": ["yes", "no"], "label": ["A", "B"]}, "answerKey": "A"},
    ],
    "piqa/validation": [
        {"goal": "Keep a door from slamming.", "sol1": "Put a wedge under it.", "sol2": "Paint it.", "label": 0},
        {"goal": "Cool some milk.", "sol1": "Stand it in the sun.", "sol2": "Stand it in cold water.", "label": 1},
    ],
    "hellaswag/validation": [
        {
            "activity_label": "Baking bread",
            "ctx_a": "A woman [title] kneads dough [substeps] here.",
            "ctx_b": "she",
            "endings": ["shapes it  into a loaf.", "swims to the shore.", "reads it.", "throws it."],
            "label": "0",
        },
        {
            "activity_label": "Mowing",
            "ctx_a": "A man starts a mower.",
            "ctx_b": "",
            "endings": ["He sings.", "He sleeps.", "He mows the grass.", "He swims."],
            "label": "2",
        },
    ],
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for name, items in ITEMS.items():
        file = folder / "tasks" / f"{name}.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"{json.dumps(item)}\n" for item in items), encoding="utf-8")
    (folder / "text").mkdir()
    (folder / "text" / "wikitext2-raw.test.txt").write_text(embedded.perplexity_text()[:6000], encoding="utf-8")
    (folder / "text" / "train.txt").write_text(embedded.calibration_text()[:60000], encoding="utf-8")
    return folder


def test_the_judge_finds_what_tune_prune_records(data: Path, tmp_path: Path) -> None:
    """A pruned checkpoint, measured by tune_prune and, loaded by plain transformers, by the arena: texts, questions, KL."""
    opened = tune_prune.open("tiny-llama", data_dir=data, dtype="float32", perplexity_window=512)
    pruned = opened.prune("magnitude", 0.2)
    measured = pruned.evaluate(2, list(inputs.TASKS))
    pruned.save(tmp_path / "pruned")
    asked = list(inputs.questions(opened.tokenizer, data, 2))
    text = opened.tokenizer(
        "\n\n".join((data / "text" / "wikitext2-raw.test.txt").read_text().splitlines(True)), return_tensors="pt"
    )
    tokens = text["input_ids"][0]
    compared = max(256, -(-len(tokens) // 16))  # as many as tune_prune takes
    with torch.inference_mode():
        dense = scoring.log_probabilities(opened.model, tokens[:compared])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", trust_remote_code=True).float()
    row = scoring.score(model, tokens, asked, dense, 512)
    assert row["parameters"] == pruned.params < opened.params
    assert row["ppl"] == pytest.approx(measured.ppl, rel=1e-4)
    assert np.mean(row["kl"]) == pytest.approx(measured.kl["text"][0], rel=1e-4)
    golds = {(item.task, item.doc_id): item.loglikelihoods[item.gold] for item in measured.items}
    assert row["tasks"] == [task for task in inputs.TASKS for _ in range(2)]
    expected = [golds[task, number] for task in inputs.TASKS for number in range(2)]
    assert row["gold"] == pytest.approx(expected, rel=1e-4)
    accuracies = {(item.task, item.doc_id): item.acc for item in measured.items}
    assert row["right"] == [bool(accuracies[task, number]) for task in inputs.TASKS for number in range(2)]
    mean, _ = arena.of_tasks(row, row["gold"])
    assert mean == pytest.approx(measured.record.metrics["gold_logprob_mean"], rel=1e-4)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2"])
def test_peers_get_the_windows_of_tune_prune_and_the_frequency_that_old_transformers_reads(
    data: Path, tmp_path: Path, model: str
) -> None:
    settings = {"model": model, "data_dir": str(data), "calibration": None, "folder": tmp_path / "dense"}
    settings |= {"samples": 4, "seq_len": 32, "seed": 0, "limit": 1, "perplexity_tokens": 300}
    inputs.write(Namespace(**settings))
    shared = torch.load(tmp_path / "dense" / "inputs.pt")
    tokenizer = tune_prune.open(model).tokenizer
    whole = tokenizer((data / "text" / "train.txt").read_text(), add_special_tokens=False)["input_ids"]
    pieces = {tuple(whole[start : start + 32]) for start in range(0, len(whole) - 31, 32)}
    assert len({tuple(window) for window in shared["windows"].tolist()} & pieces) == 4
    assert len(shared["text"]) == 300 and len(shared["questions"]) == 3
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert (config["rope_theta"], config["model_type"]) == (10000.0, "llama")


def test_peers_get_a_model_of_qwen2_as_one_of_llama(tmp_path: Path) -> None:
    """Biases that are not 0, tied embeddings: the same logits by the plain checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(embedded.model_dir("tiny-qwen2")).float()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias)
    inputs.as_llama(model).save_pretrained(tmp_path / "llama")
    tokens = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(0))
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    torch.testing.assert_close(llama(tokens).logits, model(tokens).logits)
    biases = sum(layer.self_attn.o_proj.bias.numel() for layer in llama.model.layers)
    assert llama.num_parameters() - biases == model.num_parameters()


def test_rotary_angles_are_exact_at_every_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", lambda _: torch.get_float32_matmul_precision())
    before = torch.get_float32_matmul_precision()
    try:
        multiply_in("medium")
        assert torch.get_float32_matmul_precision() == "medium"
        assert LlamaRotaryEmbedding.forward(None) == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_layers_that_change_nothing_go_first() -> None:
    model = LlamaForCausalLM.from_pretrained(embedded.model_dir("tiny-llama"))
    before = sum(p.numel() for p in model.parameters())
    for index in (1, 3):
        for part in (model.model.layers[index].self_attn.o_proj, model.model.layers[index].mlp.down_proj):
            torch.nn.init.zeros_(part.weight)
    windows = torch.randint(3, 500, (4, 16), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=windows).logits
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    pruned = shortgpt.prune(model, windows, 1.5 * layer / before, more=True)
    assert pruned.config.num_hidden_layers == len(pruned.model.layers) == 3
    torch.testing.assert_close(pruned(input_ids=windows, use_cache=False).logits, logits)


def test_errors_of_pairs_are_those_of_scipy() -> None:
    random = np.random.default_rng(0)
    rows = [
        {"tasks": ["a"] * 9, "gold": random.normal(size=9).tolist(), "kl": random.normal(size=8).tolist()}
        for _ in range(2)
    ]
    found = arena.paired(*rows)
    for name in ("gold", "kl"):
        difference = np.subtract(rows[0][name], rows[1][name])
        assert found[name] == pytest.approx((difference.mean(), stats.sem(difference)))
    two = {"tasks": ["a", "a", "b", "b", "b"]}
    mean, error = arena.of_tasks(two, [0.0, 2.0, 3.0, 3.0, 6.0])
    assert (mean, error) == pytest.approx((2.5, np.hypot(stats.sem([0, 2]), stats.sem([3, 3, 6])) / 2))


def test_bad_input_is_refused_in_a_sentence(refused, data: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", data, "--work", tmp_path / "work", "--output", tmp_path / "out")
    assert "--only names sparse; there are dense, " in refused(arena.main, *flags, "--only", "taylor,sparse")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text('{"ratio": 0.3}')
    assert "out is of other settings ({'ratio': 0.3})" in refused(arena.main, *flags, "--only", "dense")


def test_a_peer_is_cloned_at_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a repository that git is told to take for the one on GitHub; a checkout at another commit is refused."""
    upstream = tmp_path / "github" / "them" / "Peer"
    upstream.mkdir(parents=True)

    def git(folder: Path, *words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a")
        return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout

    git(upstream, "init")
    for name in ("first", "second"):
        (upstream / name).write_text(name)
        git(upstream, "add", name)
        git(upstream, "commit", "-m", name)
    config = tmp_path / "gitconfig"
    config.write_text(f'[url "file://{tmp_path}/github/"]\n\tinsteadOf = https://github.com/\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    source = arena.Source("them/Peer", git(upstream, "rev-parse", "HEAD~1").strip(), "src")
    for _ in range(2):
        assert arena.checkout(source, tmp_path / "work") == tmp_path / "work" / "Peer" / "src"
    assert [file.name for file in (tmp_path / "work" / "Peer").iterdir() if file.is_file()] == ["first"]
    git(tmp_path / "work" / "Peer", "checkout", git(upstream, "rev-parse", "HEAD").strip())
    with pytest.raises(tune_prune.UserError, match=f"Peer is at commit .*, and {source.commit} is wanted"):
        arena.checkout(source, tmp_path / "work")


def test_the_page_names_the_code_that_is_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "studies" / "arena.md").read_text(encoding="utf-8")
    sources = {row.source for row in arena.ROWS.values() if row.source}
    assert len(sources) == 3
    for source in sources:
        row = next(line for line in page.splitlines() if f"(https://github.com/{source.repository})" in line)
        assert f"| {source.commit[:7]} |" in row
    versions = dict(package.split("==") for package in arena.PACKAGES)
    assert f"transformers {versions['transformers']}" in page and f"| {versions['torch-pruning']} of PyPI |" in page


@pytest.mark.slow
def test_rows_are_made_once(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A peer without code to fetch and a row of tune_prune, each made and judged in processes of their own; then again."""
    argv = ["--model", "tiny-llama", "--data-dir", str(data), "--work", str(tmp_path / "work"), "--limit", "2"]
    argv += ["--output", str(tmp_path / "out"), "--samples", "4", "--seq-len", "32", "--precision", "medium"]
    argv += ["--only", "shortgpt,taylor"]
    assert arena.main(argv) == 0
    rows = arena.read(tmp_path / "out")
    assert list(rows) == ["dense", "taylor", "shortgpt"]
    assert np.mean(rows["dense"]["kl"]) == pytest.approx(0, abs=1e-6) and np.mean(rows["taylor"]["kl"]) > 0.1
    assert rows["shortgpt"]["parameters"] / rows["dense"]["parameters"] == pytest.approx(0.8445, abs=1e-4)
    assert rows["taylor"]["parameters"] / rows["dense"]["parameters"] == pytest.approx(0.8, abs=0.005)
    assert all(row["cpu_s"] > 0 and row["peak_gib"] > 0.1 for name, row in rows.items() if name != "dense")
    table = capfd.readouterr().out.split("\n\n")[-1].lstrip("\n")
    shutil.rmtree(tmp_path / "work")
    assert arena.main(argv) == 0
    assert capfd.readouterr().out.lstrip("\n") == table
    assert [file.name for file in (tmp_path / "work").iterdir()] == ["settings.json"]
