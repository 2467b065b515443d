"""A BOS token in front of every text of a model that wants one, once: windows of sample text, perplexity, KL and questions, and
keys that say so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.trials import RUN, open_context
from tune_prune import embedded
from tune_prune.commands import evaluate
from tune_prune.core.config import PruningConfig, Samples
from tune_prune.data.calibration import windows
from tune_prune.pruning.compensation import recovery
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.statistics import Need
from tune_prune.trial import steps
from tune_prune.trial.context import TrialContext
from tune_prune.trial.measurements import _samples, measure_perplexity
from tune_prune.trial.recipe import Recipe

WINDOW = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., PreTrainedModel]) -> Path:
    """A small Gemma with the tokenizer of the embedded models."""
    path = tmp_path_factory.mktemp("tiny-gemma")
    tokenizer = AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama"))
    tiny("gemma3_text", torch.float32, vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def context(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TrialContext:
    protocol = replace(RUN.protocol, bos=True, perplexity_window=WINDOW, perplexity_tokens=500)
    run = replace(RUN, model=str(folder), label="gemma", data_dir="embedded", protocol=protocol)
    return open_context(tmp_path_factory.mktemp("artifacts"), run)


def whole(context: TrialContext) -> Recipe:
    return Recipe(PruningPlan.keep_all(context.loaded.geometry))


def test_a_sample_is_a_bos_token_and_one_less_of_the_text(context):
    (tokens,) = context.calibration_tokens("embedded")
    bos = context.loaded.tokenizer.bos_token_id
    found = context.windows(Samples(16), 40)
    assert found.shape == (40, 16) and (found[:, 0] == bos).all() and bos not in tokens
    pieces = {tuple(piece.tolist()): place for place, piece in enumerate(tokens.split(15))}
    places = [pieces[tuple(row.tolist())] for row in found[:, 1:]]  # cut at multiples of 15
    assert len(set(places)) == 40 and places != sorted(places)
    assert torch.equal(context.windows(Samples(16), 9), found[:9])
    places = torch.arange(1000)
    assert torch.equal(windows(places, 16, 66, 0, bos=1000)[:, 1:].flatten().sort().values, places[: 66 * 15])


def test_perplexity_is_that_of_plain_transformers(context, folder):
    """All tokens of the text are predicted, none of the BOS tokens."""
    result, _ = measure_perplexity(context, whole(context))
    plain, tokens = AutoModelForCausalLM.from_pretrained(folder), context.perplexity_tokens
    losses = []
    for start in range(0, len(tokens), WINDOW - 1):
        row = torch.cat([torch.tensor([context.loaded.tokenizer.bos_token_id]), tokens[start : start + WINDOW - 1]])
        with torch.no_grad():
            losses.append(F.cross_entropy(plain(row[None]).logits[0, :-1], row[1:], reduction="none").double())
    assert result.num_tokens == len(tokens) == 500
    assert result.mean_loss == pytest.approx(torch.cat(losses).mean().item(), abs=1e-6)


def test_kl_is_taken_behind_one_bos_token(context):
    bos, text = context.loaded.tokenizer.bos_token_id, context.perplexity_tokens
    samples = _samples(context)
    assert torch.equal(torch.cat([sample[1:] for sample in samples["text"]]), text[:256])
    for name, sizes in (("text", {WINDOW}), ("tasks", None)):
        assert all(sample[0] == bos and (sample == bos).sum() == 1 for sample in samples[name])
        assert sizes is None or {len(sample) for sample in samples[name][:-1]} == sizes


def test_refit_and_recovery_take_the_same_windows(context, monkeypatch):
    taken = []
    monkeypatch.setattr(
        TrialContext, "windows", lambda *args, given=TrialContext.windows: taken.append(given(*args)) or taken[-1]
    )
    config = PruningConfig(
        "taylor", 16, 8, compensation="least_squares", refit_tokens=1024, recovery="lora", recovery_steps=1
    )
    plan = PruningPlan.keep_all(context.loaded.geometry)
    kept = replace(plan, kept_channels=(plan.kept_channels[0][:-8], *plan.kept_channels[1:]), removed_params=8 * 96)
    recipe, *_ = steps.refitted(context, kept, config)
    steps.recovered(context, recipe, config)
    assert len(taken) == 2 and all((rows[:, 0] == context.bos).all() for rows in taken)
    assert {rows.shape[1] for rows in taken} <= {128, recovery.WINDOW}


def test_keys_say_it_and_are_the_old_ones_without(context, tmp_path):
    without = TrialContext(
        replace(context.run, protocol=replace(context.run.protocol, bos=False)), context.loaded, context.artifacts
    )
    need = Need("taylor", "", 8)
    pairs = [(one.cache.key(Samples(16), need), one.measurement_key("s"), one._kept.key) for one in (context, without)]
    for said, unsaid in zip(*pairs, strict=True):
        assert json.dumps(said) != json.dumps(unsaid) and "bos" not in json.dumps(unsaid)
    assert {**pairs[1][0], "bos": True} == pairs[0][0] and {**pairs[1][1], "bos": True} == pairs[0][1]
    assert context.key(None) != without.key(None)
    assert context.run.to_dict()["protocol"]["bos"] is True and "bos" not in without.run.to_dict()["protocol"]


def test_commands_say_it(folder, plan_text, printed):
    asked = ["--model", folder, "--limit", "2"]
    data = ["--data-dir", folder.parent / "data"]
    tasks, text = Path(data[1]) / "tasks", Path(data[1]) / "text"
    tasks.parent.mkdir(exist_ok=True)
    text.mkdir(exist_ok=True)
    tasks.symlink_to(Path(embedded.__file__).parent / "tasks")
    (text / "wikitext2-raw.test.txt").write_text(embedded.perplexity_text()[:1000])
    words = "a BOS token begins every window and every question"
    plan = plan_text(*asked, *data, "--search-space", "smoke", "--calibration", "embedded", verbose=False)
    assert f"{folder.name}: {words}" in plan
    assert f"; {words}" in printed(evaluate.main, *asked, *data)
    assert words not in plan_text("--model", "tiny-llama", "--search-space", "smoke", verbose=False)


def test_a_tokenizer_without_one_is_refused(folder, tmp_path, refusal):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("bos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    said = refusal("--model", tmp_path, "--search-space", "smoke", "--calibration", "embedded")
    assert f"a text for {tmp_path.name} has to begin with a BOS token, and its tokenizer has none; name it in" in said
