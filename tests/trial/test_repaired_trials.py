"""Trials with a refit, a recovery or both: their stages, what they are measured and kept as, and that what is saved is what was
measured."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import tune_prune
from tests.gguf_reading import File
from tests.trials import BLOCKWISE, open_context, with_empty_cache
from tune_prune.commands import evaluate, prune, search
from tune_prune.core.config import NOT_REFITTED, NOT_TRAINED
from tune_prune.core.errors import UserError
from tune_prune.core.records import TrialRecord
from tune_prune.data import calibration
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.compensation import recovery, refit
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import run_trial

REFITTED = replace(BLOCKWISE, compensation="least_squares", refit_tokens=4096)
TRAINED = replace(BLOCKWISE, recovery="lora", recovery_steps=12, recovery_rate=0.003)
BOTH = replace(TRAINED, compensation="least_squares", refit_tokens=4096)
TOKENS = 128 * ((12 * 4 + 16) + 12 * 4 + 2 * 16)  # the dense model's, the steps', and twice those held out
MEASURING = ("kl", "perplexity", "zero_shot")
# Of a model that is opened and pruned in Python.
BOTH_HERE = {
    "compensation": "least_squares",
    "refit_tokens": 2048,
    "recovery": "lora",
    "recovery_steps": 5,
    "recovery_rate": 0.01,
}


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> TrialContext:
    return open_context(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def opened() -> tune_prune.Model:
    return tune_prune.open("tiny-qwen2", device="cpu")


def stages(record: TrialRecord) -> list[str]:
    return list(dict.fromkeys(stage.stage for stage in record.stages))


def tokens_of(record: TrialRecord, *names: str) -> int:
    return sum(one.tokens for one in record.stages if one.stage in names)


def test_a_refit_is_a_stage_and_another_measurement_of_the_same_plan(context):
    plain, record, again = (run_trial(config, context) for config in (BLOCKWISE, REFITTED, REFITTED))
    assert stages(record) == ["importance", "removal", "pruning", "refit", *MEASURING]
    assert record.key != plain.key and tokens_of(record, "refit") == 4096
    assert all(tokens_of(record, stage) for stage in MEASURING)
    assert again.metrics == record.metrics and not tokens_of(again, "importance", "removal", *MEASURING)
    assert tokens_of(again, "refit") == 4096  # its weights are not kept
    for name in ("params_count", "removed_fraction", "extreme_pruning_layers"):
        assert record.metrics[name] == plain.metrics[name]
    assert 0 < record.metrics["refit_error"] < 1 <= record.metrics["refit_blocks"]
    assert record.metrics["kl_text"] < plain.metrics["kl_text"] and record.metrics["ppl"] < plain.metrics["ppl"]
    other = run_trial(replace(REFITTED, damping=10.0), context)
    assert other.metrics["ppl"] not in (plain.metrics["ppl"], record.metrics["ppl"])


@pytest.mark.slow
def test_a_recovery_is_a_stage_and_another_measurement_of_the_same_plan(context):
    before = {name: p.clone() for name, p in context.loaded.model.named_parameters()}
    plain, record, both, again = (run_trial(config, context) for config in (BLOCKWISE, TRAINED, BOTH, TRAINED))
    assert stages(both) == ["importance", "removal", "pruning", "refit", "recovery", *MEASURING]
    assert len({plain.key, record.key, both.key}) == 3 and tokens_of(record, "recovery") == TOKENS
    assert not any(stage.tokens for stage in again.stages)  # its adapters are kept, too
    assert again.metrics == record.metrics and record.metrics["params_count"] == plain.metrics["params_count"]
    assert 0 < record.metrics["recovery_error"] < 1 and 0 < both.metrics["recovery_error"] < 1
    for measure in ("kl_text", "kl_tasks", "ppl"):
        assert both.metrics[measure] < record.metrics[measure] < plain.metrics[measure]
    others = [run_trial(replace(TRAINED, **how), context) for how in ({"recovery_rate": 0.001}, {"recovery_rank": 2})]
    assert len({trial.metrics["ppl"] for trial in (plain, record, *others)}) == 4
    for name, p in context.loaded.model.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None and not p.requires_grad


def test_what_does_not_help_leaves_the_model_as_it_was(context, monkeypatch):
    """Refits of which no weights are small enough, a training that gains nothing on held-out samples; and nothing removed."""
    plain = run_trial(BLOCKWISE, context)
    monkeypatch.setattr(refit, "MOST_GROWTH", 0.0)
    refitted = run_trial(replace(REFITTED, damping=0.2), context)
    trained = run_trial(replace(TRAINED, recovery_rate=1.0), context)
    assert refitted.metrics == plain.metrics | {"refit_error": 1.0, "refit_blocks": 0.0}
    assert trained.metrics == plain.metrics | {"recovery_error": 1.0}
    assert not tokens_of(refitted, *MEASURING) and not tokens_of(trained, *MEASURING)
    nothing = run_trial(replace(BOTH, method="random", pruning_ratio=0.0), context)
    assert nothing.metrics["refit_blocks"] == 0 and nothing.metrics["recovery_error"] == 1
    assert tokens_of(nothing, "recovery") == 0


@pytest.mark.slow
def test_what_an_interrupted_training_has_done_is_not_done_again(context, monkeypatch, tmp_path):
    whole, fresh = run_trial(TRAINED, context), with_empty_cache(context, tmp_path)
    monkeypatch.setattr(recovery, "KEEP_EVERY_S", -1.0)
    put = fresh.artifacts.put

    def killed(kind, key, arrays):
        put(kind, key, arrays)
        if kind == "recovery_state" and int(arrays["done"]) == 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fresh.artifacts, "put", killed)
        with pytest.raises(KeyboardInterrupt):
            run_trial(TRAINED, fresh)
    record = run_trial(TRAINED, with_empty_cache(context, tmp_path))
    assert tokens_of(record, "recovery") == TOKENS - 128 * 8 * 4 and record.metrics == whole.metrics
    assert not list(tmp_path.rglob("recovery_state-*")) and list(tmp_path.rglob("recovery-*"))


@pytest.mark.parametrize(
    ("config", "pruned_whole"), [(REFITTED, False), pytest.param(BOTH, True, marks=pytest.mark.slow)]
)
def test_a_trial_whose_weights_stay_in_their_files_has_the_same_numbers(context, config, pruned_whole, tmp_path):
    way = Residency(from_files=True, pruned_whole=pruned_whole, states="file")
    streamed = TrialContext.open(context.run, tmp_path / "artifacts", "cpu", way)
    one, other = (run_trial(config, where) for where in (context, streamed))
    metrics = [{name: v for name, v in each.metrics.items() if not name.startswith("grad_")} for each in (one, other)]
    assert metrics[0] == metrics[1]
    assert {stage.stage: stage.way for stage in other.stages}["refit"].startswith("streamed")
    assert not list(tmp_path.glob("tmp*"))  # refitted weights lie in a file without a name


def test_what_is_saved_is_what_was_measured(opened, tmp_path):
    pruned = opened.prune("taylor", 0.3, 16, 8, **BOTH_HERE)
    measured = pruned.evaluate(limit=20, tasks="boolq")
    about = pruned.save(tmp_path / "free")
    (note,) = about.notes
    assert "were repaired" in note and "was trained" in note and about.refitted and about.trained
    card = (tmp_path / "free/README.md").read_text()
    assert "--recovery lora" in card and "| Training | `lora`, 5 steps, learning rate 0.01, rank 8 |" in card
    assert "--compensation least_squares" in card
    saved = tune_prune.open(tmp_path / "free", device="cpu").evaluate(limit=20, tasks="boolq")
    assert saved.ppl == measured.ppl and saved.acc_mean == measured.acc_mean
    untrained = opened.prune("taylor", 0.3, 16, 8, compensation="least_squares", refit_tokens=2048)
    assert untrained.evaluate(limit=20, tasks="boolq").ppl > measured.ppl


def test_what_guards_refuse_is_said_and_in_no_card(opened, tmp_path, monkeypatch):
    cut = opened.prune("magnitude", 0.3)
    monkeypatch.setattr(refit, "_solved", lambda *_: None)
    pruned = opened.prune("magnitude", 0.3, **BOTH_HERE | {"recovery_steps": 3, "recovery_rate": 1.0})
    assert all(torch.equal(p, cut.model.get_parameter(name)) for name, p in pruned.model.named_parameters())
    assert cut.notes == [] and pruned.notes == [NOT_REFITTED, NOT_TRAINED]
    about = pruned.save(tmp_path / "free")
    assert about.notes == pruned.notes and not about.trained and not about.refitted
    card = (tmp_path / "free/README.md").read_text()
    assert "Not fine-tuned: no weight was trained after pruning." in card and "Trained after pruning" not in card
    assert card.count("; not used (Limitations) |") == 2 and all(note[1:] in card for note in pruned.notes)


@pytest.mark.slow
def test_every_format_holds_the_repaired_weights(opened, tmp_path):
    pruned = opened.prune("taylor", 0.3, 16, 8, shape="uniform", **BOTH_HERE)
    changes = pruned._recipe.changes
    changed = {*changes.refitted, *changes.updates}
    assert changes.refitted and len(changes.updates) == 7 * opened.geometry.num_layers
    pruned.save(tmp_path / "uniform")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "uniform")
    assert type(stock).__name__ == "Qwen2ForCausalLM"
    cut = opened.prune("taylor", 0.3, 16, 8, shape="uniform").model
    for name, p in pruned.model.named_parameters():
        assert torch.equal(stock.get_parameter(name), p)
        assert torch.equal(cut.get_parameter(name), p) is (name not in changed)
    free = opened.prune("taylor", 0.3, 16, 8, **BOTH_HERE)
    free.save(tmp_path / "padded", "hf-padded")
    padded, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "padded"), torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(padded(tokens).logits, free.model(tokens).logits, rtol=1e-4, atol=1e-4)
    pruned.save(tmp_path / "gguf", "gguf", dtype="float32")
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    held = File(file).tensors
    for layer in range(opened.geometry.num_layers):
        for own, kind in (("mlp.down_proj", "ffn_down"), ("mlp.gate_proj", "ffn_gate"), ("self_attn.v_proj", "attn_v")):
            weight = torch.from_numpy(held[f"blk.{layer}.{kind}.weight"].copy())
            assert torch.equal(weight, pruned.model.get_parameter(f"model.layers.{layer}.{own}.weight"))


@pytest.mark.slow
def test_a_repair_is_searched_pruned_and_evaluated_as_recorded(printed, tmp_path):
    space = tmp_path / "space.yaml"
    space.write_text(
        "search: grid\nmethod: [taylor]\nseq_len: [16]\nnum_samples: [8]\ncompensation: least_squares\ndamping: [0.1, 0.5]\n"
        "refit_tokens: 2048\nrecovery: [none, lora]\nrecovery_steps: 6\n"
    )
    common = ("--limit", "10", "--tasks", "boolq,piqa")
    stored = ("--storage-path", tmp_path, "--name", "one")
    argv = ("--model", "tiny-llama", "--inline", "--search-space", space, *common, *stored)
    plan = printed(search.main, *argv, "--dry-run", "--verbose")
    rows = [line.split()[:3] for line in plan.splitlines() if line.startswith(("refit ", "recovery "))]
    assert rows == [["refit", "4", f"{4 * 2048:,}"], ["recovery", "2", f"{128 * 2 * (6 * 4 + 16 + 2 * 16 + 6 * 4):,}"]]
    printed(search.main, *argv)
    trials = tune_prune.load_results(tmp_path / "one").trials
    assert sorted(trials["recovery"]) == ["lora", "lora", "none", "none"] and trials["kl_text"].nunique() == 4
    best = ("--config", tmp_path / "one", "--model", "tiny-llama+lora")
    text = printed(prune.main, *best, "--output", tmp_path / "small", "--device", "cpu")
    assert "as searched" in text and re.search(r"^repair +2,048 tokens", text, re.MULTILINE)
    assert re.search(r"^training +already done by the search, which has kept it$", text, re.MULTILINE)
    assert "difference 0" in printed(evaluate.main, "--model", tmp_path / "small", *common, "--device", "cpu")


def test_a_refit_of_more_tokens_than_the_text_has_is_refused(opened):
    with pytest.raises(UserError, match=r"enough for .* samples of 128; .* were asked"):
        opened.prune("magnitude", 0.2, compensation="least_squares", refit_tokens=100_000_000)


def test_of_many_texts_the_last_may_hold_fewer_samples(tmp_path):
    """Sample i is of text i mod k: of the twenty that a training needs at least two are of the last of seven texts."""
    text, tokenizer = calibration.load_text("embedded"), tune_prune.open("tiny-llama").tokenizer
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    files, begin = [tmp_path / f"{index}.txt" for index in range(7)], 0
    for file in files:
        end = begin + 20 + 128 * (4 if file != files[-1] else 2)
        file.write_text(text[ends[begin][0] : ends[end][0]], encoding="utf-8")
        begin = end
    model = tune_prune.open("tiny-llama", calibration="+".join(map(str, files)))
    trained = model.prune("magnitude", recovery="lora", recovery_steps=2)
    assert trained._recipe.steps["recovery"]["steps"] == 2
