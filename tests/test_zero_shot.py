"""Zero-shot scoring against lm-eval's own evaluator and HFLM; slices; task files and their errors."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
import yaml
from lm_eval.api.metrics import mean_stderr
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tune_prune import embedded
from tune_prune.config import ZERO_SHOT_TASKS, EvaluationProtocol
from tune_prune.errors import UserError
from tune_prune.evaluation.item_scores import ItemScore, summarize, write_items
from tune_prune.evaluation.row_scoring import Request, count_tokens, score_requests
from tune_prune.evaluation.task_files import TaskSource, check, fingerprint, stock_definition, task_files
from tune_prune.evaluation.zero_shot import ZeroShotSuite

DATA = Path(os.environ.get("TUNE_PRUNE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
QUIZ_DEFINITION = """\
output_type: multiple_choice
doc_to_text: "{{passage}} Question: {{question}} Answer:"
doc_to_choice: "{{options}}"
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


def byte_tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    """One token per byte, with or without a begin-of-sequence token in front."""
    vocabulary = {"<s>": 0, "</s>": 1}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def unequal_llama(vocab_size: int = 258) -> LlamaForCausalLM:
    """A small Llama whose second layer lost one of its KV groups and most of its channels, as after pruning."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()

    def cut(linear: nn.Linear, rows: slice = slice(None), columns: slice = slice(None)) -> nn.Linear:
        weight = linear.weight.detach()[rows, columns]
        smaller = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        smaller.weight = nn.Parameter(weight.clone())
        return smaller

    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    attention.q_proj = cut(attention.q_proj, rows=slice(16))
    attention.k_proj, attention.v_proj = cut(attention.k_proj, rows=slice(8)), cut(attention.v_proj, rows=slice(8))
    attention.o_proj = cut(attention.o_proj, columns=slice(16))
    mlp.gate_proj, mlp.up_proj = cut(mlp.gate_proj, rows=slice(5)), cut(mlp.up_proj, rows=slice(5))
    mlp.down_proj = cut(mlp.down_proj, columns=slice(5))
    return model


def quiz_items(count: int = 11) -> list[dict]:
    """Items of two to four choices: one-byte choices (equal inputs), long ones, and contexts of many lengths."""
    random = np.random.default_rng(0)
    words = ["red", "a cat", "the blue door", "x", "seven", "water and fire", "no", "I"]
    items = []
    for index in range(count):
        size = int(random.integers(2, 5))
        options = [str(word) for word in random.choice(words, size, replace=False)]
        if index % 3 == 0:
            options = ["a", "b", "c", "d"][:size]
        passage = " ".join(str(word) for word in random.choice(words, int(random.integers(1, 30))))
        items.append({"passage": passage, "question": f"q{index}?", "options": options, "answer": index % size})
    return items


def write_quiz(folder: Path, items: list[dict], definition: str = QUIZ_DEFINITION) -> TaskSource:
    task = folder / "tasks" / "quiz"
    task.mkdir(parents=True, exist_ok=True)
    (task / "task.yaml").write_text(definition, encoding="utf-8")
    (task / "test.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return TaskSource.of(str(folder), embedded=False)


def lm_eval_samples(tmp_path, source, tasks, model, tokenizer, max_length, limit) -> dict[tuple[str, int], dict]:
    """lm-eval's own evaluation with HFLM, its data sets read by its own JSON loader: (task, doc_id) -> sample."""
    for file in task_files(source, tasks):
        splits = {
            "training_split": None,
            "validation_split": None,
            "test_split": None,
            f"{file.split}_split": file.split,
        }
        data = {"data_files": {file.split: str(file.items)}, "cache_dir": str(tmp_path / "cache")}
        definition = {"include": str(file.definition), "task": f"own_{file.name}", "dataset_path": "json"} | splits
        definition |= {"dataset_name": None, "dataset_kwargs": data}
        (tmp_path / f"{file.name}.yaml").write_text(yaml.safe_dump(definition), encoding="utf-8")
    results = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, max_length=max_length, batch_size=4, device="cpu"),
        tasks=[f"own_{name}" for name in tasks],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        limit=limit,
        bootstrap_iters=0,
    )
    return {
        (name, sample["doc_id"]): sample for name in tasks for sample in results["samples"][f"own_{name}"]
    }  # fmt: skip


def score_all(suite: ZeroShotSuite, model: nn.Module, batch_tokens: int | None = None) -> list[ItemScore]:
    return [score for index in range(suite.num_slices) for score in suite.score_slice(model, index, batch_tokens)]


def assert_equals_lm_eval(tmp_path, source, tasks, model, tokenizer, max_length, limit=None):
    suite = ZeroShotSuite.build(tokenizer, EvaluationProtocol(tasks, limit), source, max_length)
    scores = {(score.task, score.doc_id): score for score in score_all(suite, model)}
    samples = lm_eval_samples(tmp_path, source, tasks, model, tokenizer, max_length, limit)
    assert scores.keys() == samples.keys()
    for key, sample in samples.items():
        expected = [loglikelihood for loglikelihood, _ in sample["filtered_resps"]]
        np.testing.assert_allclose(scores[key].loglikelihoods, expected, rtol=0, atol=2e-4, err_msg=str(key))
        assert (scores[key].acc, scores[key].acc_norm) == (sample["acc"], sample.get("acc_norm")), key


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no real task files at {DATA} (set TUNE_PRUNE_DATA)")
def test_the_seven_tasks_equal_lm_eval(tmp_path):
    folder = DATA / "models" / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, source = AutoTokenizer.from_pretrained(folder), TaskSource.of(str(DATA), embedded=False)
    assert_equals_lm_eval(tmp_path, source, ZERO_SHOT_TASKS, model, tokenizer, max_length=512, limit=12)


def test_the_embedded_tasks_equal_lm_eval(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama"))
    source, model = TaskSource.of(None, embedded=True), unequal_llama(len(tokenizer))
    assert set(source.task_names()) == set(ZERO_SHOT_TASKS)
    assert_equals_lm_eval(tmp_path, source, ZERO_SHOT_TASKS, model, tokenizer, max_length=512, limit=12)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("max_length", [512, 40], ids=["whole", "truncated"])
def test_a_pruned_model_on_own_tasks_equals_lm_eval(tmp_path, bos, max_length):
    source = write_quiz(tmp_path / "set", quiz_items())
    assert_equals_lm_eval(tmp_path, source, ("quiz",), unequal_llama(), byte_tokenizer(bos), max_length)


def test_scores_do_not_depend_on_batches_and_equal_inputs_run_once():
    model = unequal_llama()
    context = np.arange(2, 12, dtype=np.int32)
    requests = [Request(context, np.array([token], dtype=np.int32)) for token in (5, 9, 77)]
    requests.append(Request(np.arange(20, 90, dtype=np.int32), np.arange(30, 40, dtype=np.int32)))
    forwarded = []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, kwargs: forwarded.append(kwargs["input_ids"]), with_kwargs=True
    )
    alone = score_requests(model, requests, batch_tokens=1)
    hook.remove()
    assert [tuple(rows.shape) for rows in forwarded] == [(1, 70), (1, 10)]
    assert count_tokens(requests) == 80
    together = score_requests(model, requests, batch_tokens=10_000)
    np.testing.assert_allclose([score for score, _ in together], [score for score, _ in alone], atol=1e-4)
    log_probs = model(torch.from_numpy(context.astype(np.int64))[None]).logits[0, -1].log_softmax(-1)
    np.testing.assert_allclose([score for score, _ in alone[:3]], log_probs[[5, 9, 77]].tolist(), atol=1e-5)
    best = Request(context, np.array([int(log_probs.argmax())], dtype=np.int32))
    assert [greedy for _, greedy in score_requests(model, [requests[0], best])] == [False, True]


def test_logit_soft_caps_stay():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=2.0,
        initializer_range=1.0,
    )
    model = Gemma2ForCausalLM(config).eval()
    inputs, targets = torch.arange(5, 25), torch.arange(20, 26)
    log_probs = model(inputs[None]).logits[0, -6:].log_softmax(-1)
    ((score, _),) = score_requests(model, [Request(inputs.numpy().astype(np.int32), targets.numpy())])
    assert score == pytest.approx(log_probs[torch.arange(6), targets].sum().item(), abs=1e-4)
    assert model(inputs[None]).logits.shape == (1, 20, 60)  # scoring leaves no hook behind


def test_slices_are_nested_complete_and_seeded(tmp_path):
    source, tokenizer, model = write_quiz(tmp_path, quiz_items()), byte_tokenizer(True), unequal_llama()
    protocol = EvaluationProtocol(("quiz",), slices=(0.1, 0.5, 1.0))

    def drawn(protocol: EvaluationProtocol) -> list[list[int]]:
        suite = ZeroShotSuite.build(tokenizer, protocol, source, 512)
        return [[score.doc_id for score in suite.score_slice(model, index)] for index in range(suite.num_slices)]

    suite = ZeroShotSuite.build(tokenizer, protocol, source, 512)
    assert (suite.num_items, suite.num_slices) == (11, 3)
    parts = drawn(protocol)
    assert [len(part) for part in parts] == [2, 4, 5]  # up to the ceil of 1.1, 5.5 and 11
    order = list(itertools.chain(*parts))
    assert sorted(order) == list(range(11))
    assert drawn(protocol) == parts
    assert drawn(replace(protocol, seed=1)) != parts
    assert [index for part in drawn(replace(protocol, slices=(1.0,))) for index in part] == order
    assert {score.slice for score in suite.score_slice(model, 1)} == {1}


def test_fingerprint_follows_the_items_their_definition_and_lm_eval(tmp_path, monkeypatch):
    items = quiz_items()

    def found(items: list[dict], *definition: str) -> str:
        source = write_quiz(tmp_path, items, *definition)  # the same file each time: nothing may be remembered
        return fingerprint(source, ("quiz",))

    first = found(items)
    changed = [*items[:-1], items[-1] | {"answer": (items[-1]["answer"] + 1) % len(items[-1]["options"])}]
    assert found(changed) != first
    assert found(items, QUIZ_DEFINITION + "# another prompt\n") != first
    assert found(items) == first
    monkeypatch.setattr("importlib.metadata.version", lambda name: "another version")
    assert found(items) != first


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


def test_items_are_kept_as_a_table(tmp_path):
    suite = ZeroShotSuite.build(
        byte_tokenizer(True), EvaluationProtocol(("quiz",)), write_quiz(tmp_path, quiz_items()), 512
    )
    scores = score_all(suite, unequal_llama())
    write_items(scores, tmp_path / "items.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "items.parquet").to_pylist()
    assert [(row["doc_id"], row["slice"], row["score"]) for row in rows] == [(s.doc_id, s.slice, s.acc) for s in scores]
    for row, item in zip(rows, scores, strict=True):
        assert tuple(row["loglikelihoods"]) == item.loglikelihoods
        assert row["gold"] == quiz_items()[row["doc_id"]]["answer"]
        assert row["acc"] == float(np.argmax(row["loglikelihoods"]) == row["gold"])


GOOD = {"passage": "p", "question": "q?", "options": ["a", "b"], "answer": 0}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([json.dumps(GOOD), "{not json"], r"test\.jsonl, line 2: not JSON"),
        (["", "[1, 2]"], r"test\.jsonl, line 2: list where an object is needed"),
        ([" "], r"test\.jsonl has no items"),
        ([json.dumps(GOOD), json.dumps(GOOD | {"answer": 2})], r"item 1: the right answer 2 is none of its 2 choices"),
        (
            [json.dumps(GOOD), json.dumps(GOOD | {"answer": "two"})],
            r"test\.jsonl: a field has values of different types",
        ),
        ([json.dumps(GOOD | {"options": []})], r"task 'quiz' cannot be built from .*task\.yaml"),
        ([json.dumps(GOOD | {"options": ["a" * 600, "b"]})], r"'quiz': the answer ' aaa.*' is 601 tokens.* 1 to 512"),
    ],
)
def test_bad_items_are_named(tmp_path, lines, says):
    source = write_quiz(tmp_path, [])
    (tmp_path / "tasks" / "quiz" / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match=says) as caught:
        ZeroShotSuite.build(byte_tokenizer(True), EvaluationProtocol(("quiz",)), source, 512)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        (QUIZ_DEFINITION.replace("metric: acc,", "metric: exact_match,"), "has no metric acc"),
        (QUIZ_DEFINITION.replace("multiple_choice", "generate_until"), "is of type generate_until"),
        ("output_type: [", "cannot be built"),
    ],
)
def test_bad_definitions_are_named(tmp_path, definition, says):
    source = write_quiz(tmp_path, [GOOD], definition)
    with pytest.raises(UserError, match=says) as caught:
        ZeroShotSuite.build(byte_tokenizer(True), EvaluationProtocol(("quiz",)), source, 512)
    assert "\n" not in str(caught.value)


def test_items_of_a_stock_task_need_its_fields(tmp_path):
    (tmp_path / "tasks" / "boolq").mkdir(parents=True)
    (tmp_path / "tasks" / "boolq" / "validation.jsonl").write_text('{"passage": "p", "question": "q"}\n')
    source = TaskSource.of(str(tmp_path), embedded=False)
    with pytest.raises(UserError, match=r"validation\.jsonl, line 1: no field label"):
        ZeroShotSuite.build(byte_tokenizer(True), EvaluationProtocol(("boolq",)), source, 512)


def test_check_names_everything_that_is_missing(tmp_path):
    source = write_quiz(tmp_path, [GOOD])
    (tmp_path / "tasks" / "own").mkdir()
    check(source, ("quiz",))
    with pytest.raises(UserError) as caught:
        check(source, ("quiz", "boolq", "own", "arc_easy"))
    for file in ("boolq/validation.jsonl", "own/task.yaml", "arc_easy/test.jsonl"):
        assert file in str(caught.value)
    with pytest.raises(UserError, match=r"'winogrand' is not in .*did you mean 'winogrande'"):
        check(source, ("winogrand",))
    with pytest.raises(UserError, match="is no folder"):
        check(TaskSource.of(str(tmp_path / "absent"), embedded=False), ("boolq",))


def test_check_does_not_import_lm_eval(tmp_path):
    write_quiz(tmp_path, [GOOD])
    program = (
        "import sys; from tune_prune.evaluation.task_files import TaskSource, check, stock_definition\n"
        f"check(TaskSource.of({str(tmp_path)!r}, False), ('quiz',)); stock_definition('piqa')\n"
        "assert not {'lm_eval', 'torch', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).resolve().parents[1])


@pytest.mark.parametrize("name", ZERO_SHOT_TASKS)
def test_stock_definitions_are_lm_evals(name):
    definition = stock_definition(name)
    assert f"task: {name}\n" in definition.read_text(encoding="utf-8")


def test_no_hub_points_to_data_dir(monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"'boolq' could not be loaded from the hub \(ConnectionError\).*--data-dir"):
        ZeroShotSuite.build(byte_tokenizer(True), EvaluationProtocol(("boolq",)), TaskSource.of(None, False), 512)
