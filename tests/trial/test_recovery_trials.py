"""A trial with a recovery: its stage, what it is measured and kept as, and that what is saved is what was measured."""

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
from tune_prune.data import calibration
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.compensation import recovery, refit
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import run_trial

TRAINED = replace(BLOCKWISE, recovery="lora", recovery_steps=12, recovery_rate=0.003)
BOTH = replace(TRAINED, compensation="least_squares", refit_tokens=4096)
TOKENS = 128 * ((12 * 4 + 16) + 12 * 4 + 2 * 16)  # the dense model's, the steps', and twice those held out


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> TrialContext:
    return open_context(tmp_path_factory.mktemp("artifacts"))


def tokens_of(record, stage: str) -> int:
    return sum(one.tokens for one in record.stages if one.stage == stage)


@pytest.mark.slow
def test_a_recovery_is_a_stage_and_another_measurement_of_the_same_plan(context):
    before = {name: p.clone() for name, p in context.loaded.model.named_parameters()}
    plain, record, both, again = (run_trial(config, context) for config in (BLOCKWISE, TRAINED, BOTH, TRAINED))
    names = list(dict.fromkeys(stage.stage for stage in both.stages))
    assert names == ["importance", "removal", "pruning", "refit", "recovery", "kl", "perplexity", "zero_shot"]
    assert len({plain.key, record.key, both.key}) == 3 and tokens_of(record, "recovery") == TOKENS
    assert not any(stage.tokens for stage in again.stages)  # its adapters are kept, too
    assert again.metrics == record.metrics
    assert record.metrics["params_count"] == plain.metrics["params_count"]
    assert 0 < record.metrics["recovery_error"] < 1 and 0 < both.metrics["recovery_error"] < 1
    for measure in ("kl_text", "kl_tasks", "ppl"):
        assert both.metrics[measure] < record.metrics[measure] < plain.metrics[measure]
    others = [run_trial(replace(TRAINED, **how), context) for how in ({"recovery_rate": 0.001}, {"recovery_rank": 2})]
    assert len({trial.metrics["ppl"] for trial in (plain, record, *others)}) == 4
    for name, p in context.loaded.model.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None and not p.requires_grad


def test_a_training_that_does_not_help_on_held_out_samples_leaves_the_model_as_it_was(context):
    plain, record = run_trial(BLOCKWISE, context), run_trial(replace(TRAINED, recovery_rate=1.0), context)
    assert record.metrics == plain.metrics | {"recovery_error": 1.0}
    assert not any(tokens_of(record, stage) for stage in ("kl", "perplexity", "zero_shot"))
    nothing = run_trial(replace(TRAINED, method="random", pruning_ratio=0.0), context)
    assert nothing.metrics["recovery_error"] == 1 and tokens_of(nothing, "recovery") == 0


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


@pytest.mark.parametrize("pruned_whole", [True, False])
@pytest.mark.slow
def test_a_trial_whose_weights_stay_in_their_files_has_the_same_numbers(context, pruned_whole, tmp_path):
    record = run_trial(BOTH, context)
    way = Residency(from_files=True, pruned_whole=pruned_whole, states="file")
    found = run_trial(BOTH, TrialContext.open(context.run, tmp_path / "artifacts", "cpu", way))
    assert {n: v for n, v in found.metrics.items() if not n.startswith("grad_")} == {
        n: v for n, v in record.metrics.items() if not n.startswith("grad_")
    }
    assert {stage.stage: stage.way for stage in found.stages}["recovery"].startswith("streamed")


@pytest.fixture(scope="module")
def opened() -> tune_prune.Model:
    return tune_prune.open("tiny-qwen2", device="cpu")


STEPS = {"recovery": "lora", "recovery_steps": 5, "recovery_rate": 0.01}


def test_what_is_saved_is_what_was_measured(opened, tmp_path):
    pruned = opened.prune("taylor", 0.3, 16, 8, compensation="least_squares", refit_tokens=2048, **STEPS)
    measured = pruned.evaluate(limit=20, tasks="boolq")
    about = pruned.save(tmp_path / "free")
    (note,) = about.notes
    assert "were repaired" in note and "was trained" in note and about.refitted and about.trained
    card = (tmp_path / "free/README.md").read_text()
    assert "--recovery lora" in card and "| Training | `lora`, 5 steps, learning rate 0.01, rank 8 |" in card
    saved = tune_prune.open(tmp_path / "free", device="cpu").evaluate(limit=20, tasks="boolq")
    assert saved.ppl == measured.ppl and saved.acc_mean == measured.acc_mean
    untrained = opened.prune("taylor", 0.3, 16, 8, compensation="least_squares", refit_tokens=2048)
    assert untrained.evaluate(limit=20, tasks="boolq").ppl > measured.ppl


def test_what_guards_refuse_is_said_and_in_no_card(opened, tmp_path, monkeypatch):
    """A training that gains nothing on held-out samples, and refits of which none is used, leave the model as it was cut."""
    asked = {"recovery": "lora", "recovery_steps": 3, "recovery_rate": 1.0}
    cut = opened.prune("magnitude", 0.3)
    monkeypatch.setattr(refit, "_solved", lambda *_: None)
    pruned = opened.prune("magnitude", 0.3, compensation="least_squares", refit_tokens=2048, **asked)
    assert all(torch.equal(p, cut.model.get_parameter(name)) for name, p in pruned.model.named_parameters())
    assert cut.notes == [] and pruned.notes == [NOT_REFITTED, NOT_TRAINED]
    about = pruned.save(tmp_path / "free")
    assert about.notes == pruned.notes and not about.trained and not about.refitted
    card = (tmp_path / "free/README.md").read_text()
    assert "Not fine-tuned: no weight was trained after pruning." in card and "Trained after pruning" not in card
    assert card.count("; not used (Limitations) |") == 2 and all(note[1:] in card for note in pruned.notes)
    monkeypatch.undo()
    assert opened.prune("magnitude", 0.3, compensation="least_squares", refit_tokens=2048).save(tmp_path / "b").refitted


@pytest.mark.slow
def test_every_format_holds_the_trained_weights(opened, tmp_path):
    pruned = opened.prune("taylor", 0.3, 16, 8, shape="uniform", **STEPS)
    pruned.save(tmp_path / "uniform")
    stock, names = AutoModelForCausalLM.from_pretrained(tmp_path / "uniform"), pruned._recipe.changes.updates
    assert type(stock).__name__ == "Qwen2ForCausalLM" and len(names) == 7 * opened.geometry.num_layers
    cut = opened.prune("taylor", 0.3, 16, 8, shape="uniform").model
    for name, p in pruned.model.named_parameters():
        assert torch.equal(stock.get_parameter(name), p)
        assert torch.equal(cut.get_parameter(name), p) is (name not in names)
    free = opened.prune("taylor", 0.3, 16, 8, **STEPS)
    free.save(tmp_path / "padded", "hf-padded")
    padded = AutoModelForCausalLM.from_pretrained(tmp_path / "padded")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(padded(tokens).logits, free.model(tokens).logits, rtol=1e-4, atol=1e-4)
    pruned.save(tmp_path / "gguf", "gguf", dtype="float32")
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    held, parts = File(file).tensors, {"down_proj": "ffn_down", "gate_proj": "ffn_gate", "v_proj": "attn_v"}
    for layer in range(opened.geometry.num_layers):
        for own, kind in parts.items():
            (name,) = (name for name in names if f"layers.{layer}." in name and own in name)
            weight = torch.from_numpy(held[f"blk.{layer}.{kind}.weight"].copy())
            assert torch.equal(weight, pruned.model.get_parameter(name))


@pytest.mark.slow
def test_a_recovery_is_searched_pruned_and_evaluated_as_recorded(printed, tmp_path):
    space = tmp_path / "space.yaml"
    space.write_text(
        "search: grid\nmethod: [taylor]\nseq_len: [16]\nnum_samples: [8]\nrecovery: [none, lora]\nrecovery_steps: 6\n"
        "recovery_rate: [0.003, 0.01]\n"
    )
    common = ("--limit", "10", "--tasks", "boolq,piqa")
    stored = ("--storage-path", tmp_path, "--name", "one")
    argv = ("--model", "tiny-llama", "--inline", "--search-space", space, *common, *stored)
    plan = printed(search.main, *argv, "--dry-run", "--verbose")
    assert "stages       importance, pruning, recovery, kl, perplexity, zero-shot" in plan
    tokens = 128 * 2 * (6 * 4 + 16 + 2 * 16 + 6 * 4)
    assert [line.split()[:3] for line in plan.splitlines() if line.startswith("recovery ")] == [
        ["recovery", "2", f"{tokens:,}"]
    ]
    printed(search.main, *argv)
    trials = tune_prune.load_results(tmp_path / "one").trials
    assert sorted(trials["recovery"]) == ["lora", "lora", "none"] and trials["kl_text"].nunique() == 3
    best = ("--config", tmp_path / "one", "--model", "tiny-llama+lora")
    text = printed(prune.main, *best, "--output", tmp_path / "small", "--device", "cpu")
    assert "as searched" in text and re.search(
        r"^training +already done by the search, which has kept it$", text, re.MULTILINE
    )  # found where the search left it
    said = printed(evaluate.main, "--model", tmp_path / "small", *common, "--device", "cpu")
    assert "difference 0" in said


def test_what_only_a_recovery_reads_is_refused_without_one(opened):
    with pytest.raises(
        UserError, match=r"recovery_steps is 5, but nothing reads it; leave it out, or give recovery=lora"
    ):
        opened.prune("taylor", 0.2, 16, 8, recovery_steps=5)


def test_of_many_texts_the_last_may_hold_fewer_samples(tmp_path):
    """Sample i is of text i mod k: of the twenty that a training needs at least two are of the last of seven texts."""
    text = calibration.load_text("embedded")
    ends = tune_prune.open("tiny-llama").tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    files, begin = [tmp_path / f"{index}.txt" for index in range(7)], 0
    for file in files:
        end = begin + 20 + 128 * (4 if file != files[-1] else 2)
        file.write_text(text[ends[begin][0] : ends[end][0]], encoding="utf-8")
        begin = end
    model = tune_prune.open("tiny-llama", calibration="+".join(map(str, files)))
    found = model.prune("magnitude", recovery="lora", recovery_steps=2)
    assert found._recipe.steps["recovery"]["steps"] == 2
