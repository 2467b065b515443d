"""Tokenizers as other people save them: what the plan of a search, its trials and its report say of them, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

import tune_prune
from tests.search_folders import data_folder, model_folder
from tune_prune.commands import search
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, read_baselines
from tune_prune.core.store import FolderStore
from tune_prune.data import calibration
from tune_prune.evaluation import zero_shot
from tune_prune.evaluation.kept_suite import end_token

FLAGS = ("--search-space", "control", "--calibration", "embedded", "--tasks", "piqa,boolq", "--limit", "3")


def tokenizer_folder(folder: Path, post_processor: processors.PostProcessor | None = None, added: str = "") -> Path:
    """A copy of tiny-llama whose tokenizer has that post-processor, and a token that its embeddings lack."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder(folder))
    if post_processor is not None:
        tokenizer._tokenizer.post_processor = post_processor
    if added:
        tokenizer.add_tokens([added])
    tokenizer.save_pretrained(folder)
    return folder


def ends(text: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=text, special_tokens=[("<s>", 1), ("</s>", 2)])


@pytest.mark.parametrize(
    ("post_processor", "token"),
    [
        (None, None),
        (ends("<s> $A"), None),
        (ends("$A </s>"), "</s>"),
        (ends("<s> $A </s>"), "</s>"),
        (processors.RobertaProcessing(("<unk>", 0), ("<s>", 1)), "<unk>"),  # a separator
    ],
)
def test_the_token_that_ends_every_text(post_processor, token, tmp_path: Path) -> None:
    assert end_token(AutoTokenizer.from_pretrained(tokenizer_folder(tmp_path / "m", post_processor))) == token


def test_a_search_says_that_its_answers_stand_behind_eos_and_asks_lm_eval_once(tmp_path, monkeypatch, capsys):
    """The plan and the trials have the same items as tokens: those of one call of lm-eval, which a dry run leaves nowhere."""
    calls, build = [], zero_shot.build_suite
    monkeypatch.setattr(zero_shot, "build_suite", lambda *asked: calls.append(asked) or build(*asked))
    model, data = tokenizer_folder(tmp_path / "m", ends("<s> $A </s>")), data_folder(tmp_path / "data")
    argv = ["--model", str(model), *FLAGS, "--data-dir", str(data), "--inline", "--gpus-per-trial", "0"]
    argv += ["--storage-path", str(tmp_path / "r"), "--name", "one"]
    assert search.main([*argv, "--dry-run"]) == 0
    assert not (tmp_path / "r").exists() and len(calls) == 1
    assert search.main([*argv, "--verbose"]) == 0
    assert len(calls) == 2
    short, plan = capsys.readouterr().out.split("\ndry run: nothing was started\n")
    plan, _, end = plan.partition("[prepare 1/")
    note = "the tokenizer ends every text with </s>, also before an answer, so accuracies say nothing"
    assert f"warning      m: {note}" in plan and f"warning      m: {note}" in short and f"note: m: {note}" in end
    assert "  ! The tokenizer ends every text with a special token" in end
    store = FolderStore(tmp_path / "r" / "one")
    (trial,), dense = Ledger(store).records(), read_baselines(store)["m"]
    for record in (trial, dense):
        assert record.metrics["items_after_eos"] == 6 and record.notes[0].startswith(note)
    tokens = sum(stage.tokens for one in (trial, dense) for stage in one.stages if stage.stage == "zero_shot")
    assert re.search(rf"^zero-shot +2 +{tokens:,} ", plan, re.MULTILINE)
    found = tune_prune.load_results(tmp_path / "r" / "one")
    assert found.findings.models["m"].warnings[0].kind == "items_after_eos"


def test_token_ids_that_the_model_does_not_know_are_refused_by_every_command(refusal, tmp_path, monkeypatch):
    model, data = tokenizer_folder(tmp_path / "m", added="zzz"), data_folder(tmp_path / "data")
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    says = f"the tokenizer of m gives the token id {size} in {{}}, but vocab_size in its config.json is {size}; use"
    asked = ("--model", model, *FLAGS, "--data-dir", data)
    tune_prune.open(model, data_dir=data).evaluate(1, "piqa")
    text, task = data / "text" / "wikitext2-raw.test.txt", data / "tasks" / "piqa" / "test.jsonl"
    known = text.read_text(), task.read_text()
    text.write_text("a zzz " + known[0])
    with pytest.raises(UserError, match=says.format("the perplexity text")):
        tune_prune.open(model, data_dir=data).evaluate(1, "piqa")
    assert says.format("the perplexity text") in refusal(*asked)
    assert says.format("the perplexity text") in refusal(*asked, "--perplexity-tokens", "300")
    text.write_text(known[0] + " zzz")
    tune_prune.open(model, data_dir=data, perplexity_tokens=300).evaluate(1, "piqa")  # it is not read
    text.write_text(known[0])
    item = json.loads(known[1].split("\n")[0])
    task.write_text(json.dumps(item | {"goal": f"{item['goal']} zzz"}) + "\n")
    assert says.format("task 'piqa'") in refusal(*asked)
    task.write_text(known[1])
    monkeypatch.setattr(calibration, "load_text", lambda source: "a zzz " * 5000)
    assert says.format("calibration text embedded") in refusal(*asked)
    # Of the hub it is read when a pass begins.
    with pytest.raises(UserError, match=says.format("calibration text wikitext2")):
        tune_prune.open(model, data_dir=data, calibration="wikitext2").prune("taylor", 0.2, 16, 8)
