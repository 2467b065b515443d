"""The embedded world: files as the scripts make them, items fair and unseen, models that know the answers."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch
from embedded_world import corpus, items
from transformers import AutoModelForCausalLM, AutoTokenizer

from tune_prune import embedded
from tune_prune.core.config import ZERO_SHOT_TASKS, EvaluationProtocol
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models.catalog import resolve
from tune_prune.tuning.plan import SearchSettings
from tune_prune.tuning.resolve import model_run

WHOLE_TEXT = True
REAL_FIELDS = {
    "boolq": {"question", "passage", "answer"},
    "piqa": {"goal", "sol1", "sol2", "label"},
    "hellaswag": {"activity_label", "ctx_a", "ctx_b", "ctx", "endings", "label"},
    "winogrande": {"sentence", "option1", "option2", "answer"},
    "arc_easy": {"question", "choices", "answerKey"},
    "arc_challenge": {"question", "choices", "answerKey"},
    "openbookqa": {"question_stem", "choices", "answerKey"},
}


def stored_items(task: str) -> list[items.Item]:
    lines = (embedded.tasks_dir() / task / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama"))


def words(text: str) -> str:
    """Text with one space between tokens, so that substrings are token sequences."""
    return " " + " ".join(re.findall(r"\w+|[^\w\s]", text)) + " "


@pytest.mark.parametrize("task", ZERO_SHOT_TASKS)
def test_items_have_the_real_fields_and_balanced_answers(task):
    rows = stored_items(task)
    assert len(rows) >= 200
    assert all(set(row) == REAL_FIELDS[task] for row in rows)
    counts = Counter(items.gold_index(task, row) for row in rows)
    assert len(counts) == len(items.requests(task, rows[0])) and len(set(counts.values())) == 1
    assert len({items.solved(task, row) for row in rows}) == len(rows)
    assert all(len(set(items.requests(task, row))) == len(counts) for row in rows)


@pytest.mark.parametrize("task", ZERO_SHOT_TASKS)
def test_stored_items_are_what_the_generator_makes(task):
    rows = stored_items(task)
    assert rows == items.evaluation_items(task, len(rows))


@pytest.fixture(scope="module")
def seen_text() -> str:
    """The stored texts and the beginning of the training text."""
    documents = corpus.documents(corpus.SEEDS["train"])
    train = "".join(words(next(documents)) for _ in range(20_000))
    return train + "".join(
        words(line) for line in (embedded.calibration_text() + embedded.perplexity_text()).splitlines()
    )


@pytest.mark.parametrize("task", ZERO_SHOT_TASKS)
def test_no_item_with_its_answer_occurs_in_the_corpus(task, seen_text):
    for row in stored_items(task):
        assert words(items.solved(task, row)) not in seen_text


def test_perplexity_text_is_not_calibration_text():
    assert embedded.calibration_text().startswith(next(corpus.documents(corpus.SEEDS["calibration"])) + "\n")
    # Stories are long enough not to repeat by chance; short solved items may.
    stories = {line for line in embedded.perplexity_text().splitlines() if len(line.split()) > 40}
    assert len(stories) > 50 and not stories & set(embedded.calibration_text().splitlines())


def sampled_accuracy(model, tokenizer, task: str, every: int) -> float:
    """Share of right answers (highest log-likelihood) on each `every`-th item."""
    rows = stored_items(task)[::every]
    right = 0
    for row in rows:
        scores = []
        for context, continuation in items.requests(task, row):
            prefix, rest = (tokenizer(text)["input_ids"] for text in (context, continuation))
            logits = model(input_ids=torch.tensor([prefix + rest])).logits[0, len(prefix) - 1 : -1]
            scores.append(logits.log_softmax(-1).gather(1, torch.tensor(rest)[:, None]).sum().item())
        right += scores.index(max(scores)) == items.gold_index(task, row)
    return right / len(rows)


@pytest.mark.parametrize("name", embedded.MODEL_NAMES)
def test_models_know_the_answers(name, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(embedded.model_dir(name)).eval()
    with torch.inference_mode():
        accuracy = [sampled_accuracy(model, tokenizer, task, every=12) for task in ZERO_SHOT_TASKS]
    assert sum(accuracy) / len(accuracy) > 0.75


@pytest.mark.parametrize("name", embedded.MODEL_NAMES)
def test_perplexity_is_measured_at_a_length_that_the_models_were_trained_on(name, tokenizer):
    """Beyond it they extrapolate: what a pruned model loses there says little about pruning."""
    run = model_run(SearchSettings((name,)), name, resolve(name), "float32")
    window = run.protocol.perplexity_window
    assert window == 128
    asked = model_run(SearchSettings((name,), perplexity_window=64), name, resolve(name), "float32")
    assert asked.protocol.perplexity_window == 64
    assert EvaluationProtocol().perplexity_window == 2048  # of all others
    tokens = torch.tensor(tokenizer(embedded.perplexity_text(), add_special_tokens=False)["input_ids"][:4096])
    model = AutoModelForCausalLM.from_pretrained(embedded.model_dir(name)).eval()
    trained, beyond = (perplexity(model, tokens, length).ppl for length in (window, 512))
    assert trained < 4 and beyond > 1.5 * trained
