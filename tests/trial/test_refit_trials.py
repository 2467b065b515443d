"""A trial with a refit: its stage, what it is measured and kept as, and that what is saved is what was measured."""

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
from tune_prune.core.errors import UserError
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.compensation import refit
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import Trial, run_trial

REFITTED = replace(BLOCKWISE, compensation="least_squares", refit_tokens=4096)


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> TrialContext:
    return open_context(tmp_path_factory.mktemp("artifacts"))


def tokens_of(record, stage: str) -> int:
    return sum(one.tokens for one in record.stages if one.stage == stage)


def test_a_refit_is_a_stage_and_another_measurement_of_the_same_plan(context):
    plain, record, again = (run_trial(config, context) for config in (BLOCKWISE, REFITTED, REFITTED))
    names = list(dict.fromkeys(stage.stage for stage in record.stages))
    assert names == ["importance", "removal", "pruning", "refit", "kl", "perplexity", "zero_shot"]
    assert record.key != plain.key and tokens_of(record, "refit") == 4096
    assert all(tokens_of(record, stage) for stage in ("kl", "perplexity", "zero_shot"))
    assert not any(tokens_of(again, stage) for stage in ("importance", "removal", "kl", "perplexity", "zero_shot"))
    assert again.metrics == record.metrics and tokens_of(again, "refit") == 4096  # its weights are not kept
    for name in ("params_count", "removed_fraction", "extreme_pruning_layers"):
        assert record.metrics[name] == plain.metrics[name]
    assert 0 < record.metrics["refit_error"] < 1 <= record.metrics["refit_blocks"]
    assert record.metrics["kl_text"] < plain.metrics["kl_text"] and record.metrics["ppl"] < plain.metrics["ppl"]
    assert "refit_error" not in plain.metrics and "refit" not in [stage.stage for stage in plain.stages]
    other = run_trial(replace(REFITTED, damping=10.0), context)
    assert other.metrics["ppl"] not in (plain.metrics["ppl"], record.metrics["ppl"])


def test_a_refit_that_changes_nothing_is_the_plain_model(context, monkeypatch):
    plain = run_trial(BLOCKWISE, context)
    monkeypatch.setattr(refit, "MOST_GROWTH", 0.0)  # no weights are small enough
    record = run_trial(replace(REFITTED, damping=0.2), context)
    assert record.metrics == plain.metrics | {"refit_error": 1.0, "refit_blocks": 0.0}
    assert not any(tokens_of(record, stage) for stage in ("kl", "perplexity", "zero_shot"))
    nothing = run_trial(replace(REFITTED, method="random", pruning_ratio=0.0), context)
    assert nothing.metrics["refit_blocks"] == 0 and nothing.metrics["removed_fraction"] == 0


@pytest.mark.parametrize("pruned_whole", [True, False])
def test_a_trial_whose_weights_stay_in_their_files_has_the_same_numbers(context, pruned_whole, tmp_path):
    record = run_trial(REFITTED, context)
    way = Residency(from_files=True, pruned_whole=pruned_whole, states="file")
    streamed = TrialContext.open(context.run, tmp_path / "artifacts", "cpu", way)
    trial = Trial(REFITTED, streamed)
    for _ in trial.stages():
        pass
    found = trial.record
    assert {n: v for n, v in found.metrics.items() if not n.startswith("grad_")} == {
        n: v for n, v in record.metrics.items() if not n.startswith("grad_")
    }
    way_of = {stage.stage: stage.way for stage in found.stages}
    assert way_of["refit"].startswith("streamed")
    assert not list(tmp_path.glob("tmp*"))  # refitted weights lie in a file without a name


@pytest.fixture(scope="module")
def opened() -> tune_prune.Model:
    return tune_prune.open("tiny-qwen2", device="cpu")


def test_what_is_saved_is_what_was_measured(opened, tmp_path):
    pruned = opened.prune("taylor", 0.3, 16, 8, compensation="least_squares", refit_tokens=2048)
    measured = pruned.evaluate(limit=20, tasks="boolq")
    about = pruned.save(tmp_path / "free")
    assert about.refitted and not about.trained and len(about.notes) == 1
    assert (
        about.config.compensation == "least_squares"
        and "--compensation least_squares" in (tmp_path / "free/README.md").read_text()
    )
    saved = tune_prune.open(tmp_path / "free", device="cpu").evaluate(limit=20, tasks="boolq")
    assert saved.ppl == measured.ppl and saved.acc_mean == measured.acc_mean
    plain = opened.prune("taylor", 0.3, 16, 8).evaluate(limit=20, tasks="boolq")
    assert plain.ppl != measured.ppl


def test_every_format_holds_the_refitted_weights(opened, tmp_path):
    pruned = opened.prune("taylor", 0.3, 16, 8, shape="uniform", compensation="least_squares", refit_tokens=2048)
    refitted = pruned._recipe.changes.refitted
    assert refitted
    pruned.save(tmp_path / "uniform")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "uniform")
    assert type(stock).__name__ == "Qwen2ForCausalLM"
    for name, weight in refitted.items():
        assert torch.equal(stock.get_parameter(name), weight)
    free = opened.prune("taylor", 0.3, 16, 8, compensation="least_squares", refit_tokens=2048)
    free.save(tmp_path / "padded", "hf-padded")
    padded = AutoModelForCausalLM.from_pretrained(tmp_path / "padded")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(padded(tokens).logits, free.model(tokens).logits, rtol=1e-4, atol=1e-4)
    pruned.save(tmp_path / "gguf", "gguf", dtype="float32")
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    held = File(file).tensors
    for name, weight in refitted.items():
        layer, kind = name.split(".")[2], {"o_proj": "attn_output", "down_proj": "ffn_down"}[name.split(".")[-2]]
        assert torch.equal(torch.from_numpy(held[f"blk.{layer}.{kind}.weight"].copy()), weight)


@pytest.mark.slow
def test_a_refit_is_searched_pruned_and_evaluated_as_recorded(printed, tmp_path):
    space = tmp_path / "space.yaml"
    space.write_text(
        "search: grid\nmethod: [taylor]\nseq_len: [16]\nnum_samples: [8]\ncompensation: least_squares\ndamping: [0.1, 0.5]\n"
        "refit_tokens: 2048\n"
    )
    common = ("--limit", "10", "--tasks", "boolq,piqa")
    argv = (
        "--model",
        "tiny-llama",
        "--inline",
        "--search-space",
        space,
        *common,
        "--storage-path",
        tmp_path,
        "--name",
        "one",
    )
    plan = printed(search.main, *argv, "--dry-run", "--verbose")
    assert "stages       importance, pruning, refit, kl, perplexity, zero-shot" in plan
    assert [line.split()[:3] for line in plan.splitlines() if line.startswith("refit ")] == [["refit", "2", "4,096"]]
    printed(search.main, *argv)
    trials = tune_prune.load_results(tmp_path / "one").trials.set_index("damping")
    assert set(trials.index) == {0.1, 0.5} and set(trials["compensation"]) == {"least_squares"}
    assert trials["kl_text"].nunique() == 2 and trials["refit_error"].nunique() == 2
    text = printed(prune.main, "--config", tmp_path / "one", "--output", tmp_path / "small", "--device", "cpu")
    assert "as searched" in text and re.search(r"^repair +2,048 tokens", text, re.MULTILINE)
    said = printed(evaluate.main, "--model", tmp_path / "small", *common, "--device", "cpu")
    assert "difference 0" in said


def test_what_only_a_refit_reads_is_refused_without_one(opened):
    with pytest.raises(
        UserError, match=r"damping is 0\.3, but nothing reads it; leave it out, or give compensation=least_squares"
    ):
        opened.prune("taylor", 0.2, 16, 8, damping=0.3)
    with pytest.raises(UserError, match=r"enough for .* samples of 128; .* were asked"):
        opened.prune("magnitude", 0.2, compensation="least_squares", refit_tokens=100_000_000)


def test_a_context_with_another_cache_refits_to_the_same_weights(context, tmp_path):
    one = Trial(REFITTED, context)
    other = Trial(REFITTED, with_empty_cache(context, tmp_path))
    made = []
    for trial in (one, other):
        for _ in trial.recipe(REFITTED):
            pass
        made.append(trial.made)
    assert made[0].structure == made[1].structure != made[0].plan.structure
    assert all(torch.equal(weight, made[1].changes.refitted[name]) for name, weight in made[0].changes.refitted.items())
