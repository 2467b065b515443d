"""Suites: nested slices, judgement without lm-eval against lm-eval's, the way through arrays, and what is kept of the items."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from lm_eval.api.metrics import mean_stderr

from tests.quiz import DATA, byte_tokenizer, quiz_items, score_all, unequal_llama, write_quiz
from tune_prune import embedded
from tune_prune.core.config import ZERO_SHOT_TASKS, EvaluationProtocol
from tune_prune.data.task_files import TaskSource
from tune_prune.embedded import tasks_dir
from tune_prune.evaluation import zero_shot
from tune_prune.evaluation.item_scores import ItemScore, summarize
from tune_prune.evaluation.suite import RequestScores, ZeroShotSuite
from tune_prune.evaluation.zero_shot import build_suite


def random_scores(suite: ZeroShotSuite, index: int) -> RequestScores:
    """Log-likelihoods so coarse that many choices are equally likely, some of them undefined or impossible."""
    random = np.random.default_rng(index)
    count = sum(len(item.requests) for item in suite._slices[index].items)
    values = -random.integers(1, 6, size=count).astype(np.float64)
    values[random.random(count) < 0.02] = np.nan
    values[random.random(count) < 0.02] = -np.inf
    return RequestScores(values, random.random(count) < 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["embedded", "real"])
def test_judgement_without_lm_eval_is_lm_evals(place):
    if place == "real" and not DATA.is_dir():
        pytest.skip(f"no real task files at {DATA} (set TUNE_PRUNE_DATA)")
    source = TaskSource.of(str(DATA), embedded=place == "embedded")
    protocol = EvaluationProtocol(limit=80)
    suite = build_suite(byte_tokenizer(True), protocol, source, 4096)
    with zero_shot._quiet():
        tasks = {task.task_name: task for task in zero_shot._load_tasks(source, protocol)}
    documents = {(name, i.doc_id): i.doc for name, task in tasks.items() for i in task.instances}
    hits = 0
    for index in range(suite.num_slices):
        scores = random_scores(suite, index)
        pairs = iter(zip(scores.loglikelihoods.tolist(), scores.greedy.tolist(), strict=True))
        for score in suite.judge(index, scores):
            mine = [next(pairs) for _ in score.loglikelihoods]
            judged = tasks[score.task].process_results(documents[score.task, score.doc_id], mine)
            assert (score.acc, score.acc_norm) == (judged["acc"], judged.get("acc_norm")), score
            assert score.slice == index and score.loglikelihoods == pytest.approx([v for v, _ in mine], nan_ok=True)
            hits += score.acc != score.acc_norm is not None
    assert hits > 10  # the two accuracies were not the same thing
    assert next(pairs, None) is None


@pytest.mark.parametrize("place", ["embedded", pytest.param("real", marks=pytest.mark.slow)])
def test_a_suite_travels_as_arrays(tmp_path, place):
    if place == "real" and not DATA.is_dir():
        pytest.skip(f"no real task files at {DATA} (set TUNE_PRUNE_DATA)")
    protocol = EvaluationProtocol(limit=60)
    suite = build_suite(byte_tokenizer(True), protocol, TaskSource.of(str(DATA), embedded=place == "embedded"), 4096)
    np.savez(tmp_path / "suite.npz", **suite.arrays())
    with np.load(tmp_path / "suite.npz", allow_pickle=False) as stored:
        copy = ZeroShotSuite.from_arrays(dict(stored), protocol)
    assert (copy.num_items, copy.num_slices, copy.items_per_task) == (420, 5, dict.fromkeys(ZERO_SHOT_TASKS, 60))
    for index in range(suite.num_slices):
        assert copy.tokens_in_slice(index) == suite.tokens_in_slice(index) < suite.tokens_in_slice(index, share=False)
        scores = random_scores(suite, index)
        assert repr(copy.judge(index, scores)) == repr(suite.judge(index, scores))  # repr: nan is nan
        for mine, theirs in zip(copy._slices[index].items, suite._slices[index].items, strict=True):
            assert [r.inputs.tolist() for r in mine.requests] == [r.inputs.tolist() for r in theirs.requests]
            assert [r.targets.tolist() for r in mine.requests] == [r.targets.tolist() for r in theirs.requests]


def test_slices_are_nested_complete_and_seeded(tmp_path):
    source, tokenizer, model = write_quiz(tmp_path, quiz_items()), byte_tokenizer(True), unequal_llama()
    protocol = EvaluationProtocol(("quiz",), slices=(0.1, 0.5, 1.0))

    def drawn(protocol: EvaluationProtocol) -> list[list[int]]:
        suite = build_suite(tokenizer, protocol, source, 512)
        return [[score.doc_id for score in suite.score_slice(model, index)] for index in range(suite.num_slices)]

    suite = build_suite(tokenizer, protocol, source, 512)
    assert (suite.num_items, suite.num_slices) == (11, 3)
    parts = drawn(protocol)
    assert [len(part) for part in parts] == [2, 4, 5]  # up to the ceil of 1.1, 5.5 and 11
    order = list(itertools.chain(*parts))
    assert sorted(order) == list(range(11))
    assert drawn(protocol) == parts
    assert drawn(replace(protocol, seed=1)) != parts
    assert [index for part in drawn(replace(protocol, slices=(1.0,))) for index in part] == order
    assert {score.slice for score in suite.score_slice(model, 1)} == {1}


def test_summary_has_lm_evals_standard_errors():
    outcomes = {"boolq": [1, 0, 1, 1, 0, 1, 1], "piqa": [0, 0, 1, 0], "mine": [1, 1, 0]}
    items = [
        ItemScore(task, index, 0, acc=float(hit), acc_norm=None, loglikelihoods=(-1.0, -2.0), gold=0)
        for task in ("boolq", "mine")
        for index, hit in enumerate(outcomes[task])
    ]
    items += [  # piqa goes by acc_norm, whatever its acc is
        ItemScore("piqa", index, 0, acc=1.0, acc_norm=float(hit), loglikelihoods=(-1.0,) * 4, gold=0)
        for index, hit in enumerate(outcomes["piqa"])
    ]
    summary = summarize(items)
    for task, hits in outcomes.items():
        assert summary[f"acc_{task}"] == pytest.approx(np.mean(hits))
        assert summary[f"acc_{task}_stderr"] == pytest.approx(mean_stderr(hits))
    assert summary["acc_mean"] == pytest.approx(np.mean([np.mean(hits) for hits in outcomes.values()]))
    assert summary["chance_acc_mean"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3)
    errors = [mean_stderr(hits) for hits in outcomes.values()]
    assert summary["acc_mean_stderr"] == pytest.approx(math.hypot(*errors) / 3)
    assert math.isnan(summarize(items[:1])["acc_boolq_stderr"])


def test_the_right_choice_s_log_probability_is_that_of_plain_transformers(tmp_path):
    source, tokenizer, model = write_quiz(tmp_path, quiz_items()), byte_tokenizer(True), unequal_llama()
    scores = score_all(build_suite(tokenizer, EvaluationProtocol(("quiz",)), source, 512), model)
    expected = []
    for item in quiz_items():
        context = f"{item['passage']} Question: {item['question']} Answer:"
        ids = torch.tensor([tokenizer(f"{context} {item['options'][item['answer']]}").input_ids])
        log_probs = model(ids).logits[0].log_softmax(dim=-1)
        first = len(tokenizer(context).input_ids)
        expected.append(sum(log_probs[i - 1, ids[0, i]].item() for i in range(first, ids.shape[1])))
    metrics = summarize(scores)
    for name in ("quiz", "mean"):
        assert metrics[f"gold_logprob_{name}"] == pytest.approx(np.mean(expected), abs=1e-5)
        error = np.std(expected, ddof=1) / math.sqrt(len(expected))
        assert metrics[f"gold_logprob_{name}_stderr"] == pytest.approx(error, abs=1e-5)


def test_items_without_a_single_right_choice_have_no_gold_log_probability():
    def item(task: str, gold: int, *values: float) -> ItemScore:
        return ItemScore(task, 0, 0, 1.0, None, values, gold)

    items = [item("a", 1, -1.0, -2.0), item("a", -1, -50.0, -60.0), item("a", 0, -4.0, -9.0), item("b", 0, -8.0)]
    metrics = summarize([*items, item("unclear", -1, -1.0)])
    found = {name: value for name, value in metrics.items() if name.startswith("gold_logprob")}
    assert {name: value for name, value in found.items() if value == value} == {
        "gold_logprob_a": -3.0, "gold_logprob_a_stderr": 1.0, "gold_logprob_b": -8.0, "gold_logprob_mean": -5.5,
    }  # fmt: skip
    assert set(found) - {"gold_logprob_b_stderr", "gold_logprob_mean_stderr"} == {
        *("gold_logprob_a", "gold_logprob_a_stderr", "gold_logprob_b", "gold_logprob_mean")
    }
    assert not any("gold" in name for name in summarize([item("unclear", -1, -1.0)]))
    assert summarize([item("a", 0, -math.inf), item("a", 0, -1.0)])["gold_logprob_a"] == -math.inf


def test_items_in_a_text_are_counted_with_their_right_answers_alone():
    tokenizer = byte_tokenizer(True)
    suite = build_suite(tokenizer, EvaluationProtocol(limit=6), TaskSource("embedded", str(tasks_dir().parent)), 4096)

    def text(items, right):
        requests = [item.requests[item.gold if right else (item.gold + 1) % len(item.requests)] for item in items]
        return "\n\n".join(tokenizer.decode([*request.inputs, request.targets[-1]], True) for request in requests)

    def count(*texts):
        return suite.items_in([torch.tensor(tokenizer(text)["input_ids"]) for text in texts], tokenizer)

    assert count(text(suite.items, True)) == len(suite.items) == 42
    assert count(text(suite.items, False)) == 0
    assert count(embedded.calibration_text()) == 0  # of the same world, but no item of it
    first, second = suite.items[:5], suite.items[3:9]
    assert (
        count(text(first, True).replace(" ", "\n ") + "\n", text(second, True)) == 9
    )  # each once, whatever the white space
    assert count(text(first, True)[1:]) == 4 and count(text(first, True)[:-1]) == 4  # each of them whole
