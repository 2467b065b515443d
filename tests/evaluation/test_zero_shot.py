"""Zero-shot scoring against lm-eval's own evaluator and HFLM; task files and their errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.quiz import DATA, QUIZ_DEFINITION, byte_tokenizer, quiz_items, score_all, unequal_llama, write_quiz
from tune_prune import embedded
from tune_prune.core.config import ZERO_SHOT_TASKS, EvaluationProtocol
from tune_prune.core.errors import UserError
from tune_prune.data.task_files import TaskSource, task_files, tasks_fingerprint
from tune_prune.evaluation.encoding import encode
from tune_prune.evaluation.engine.prefix_trees import score_items
from tune_prune.evaluation.item_scores import summarize
from tune_prune.evaluation.suite import ZeroShotSuite
from tune_prune.evaluation.zero_shot import build_suite


def lm_eval_samples(tmp_path, source, tasks, model, tokenizer, max_length, limit) -> dict[tuple[str, int], dict]:
    """lm-eval's own evaluation with HFLM, or with the LM that `model` is; its data sets are read by its own JSON loader:
    (task, doc_id) -> sample."""
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
    if not isinstance(model, LM):
        model = HFLM(pretrained=model, tokenizer=tokenizer, max_length=max_length, batch_size=4, device="cpu")
    results = simple_evaluate(
        model,
        tasks=[f"own_{name}" for name in tasks],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        limit=limit,
        bootstrap_iters=0,
    )
    return {
        (name, sample["doc_id"]): sample for name in tasks for sample in results["samples"][f"own_{name}"]
    }  # fmt: skip


def assert_equals_lm_eval(tmp_path, source, tasks, model, tokenizer, max_length, limit=None, asked=1, share=True):
    """`asked`: requests for a choice, the first of which is kept. `share`: whether choices share their prefix."""
    suite = build_suite(tokenizer, EvaluationProtocol(tasks, limit), source, max_length)
    scores = {(score.task, score.doc_id): score for score in score_all(suite, model, share=share)}
    samples = lm_eval_samples(tmp_path, source, tasks, model, tokenizer, max_length, limit)
    assert scores.keys() == samples.keys()
    for key, sample in samples.items():
        expected = [loglikelihood for loglikelihood, _ in sample["filtered_resps"]]
        expected = expected[: len(expected) // asked]
        np.testing.assert_allclose(scores[key].loglikelihoods, expected, rtol=0, atol=2e-4, err_msg=str(key))
        assert share or np.ptp(expected) > 0.1
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


@pytest.mark.parametrize("bos", [True, False])
def test_a_gemma_gets_a_bos_token_as_by_lm_evals_add_bos_token(tmp_path, tiny, bos):
    """Whether its tokenizer adds one by itself or not, there is one."""
    model, tokenizer = (
        tiny("gemma3_text", torch.float32, vocab_size=258, max_position_embeddings=512),
        byte_tokenizer(bos),
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    theirs = HFLM(
        pretrained=model, tokenizer=str(tmp_path / "tokenizer"), add_bos_token=True, max_length=512, device="cpu"
    )
    source = write_quiz(tmp_path / "set", quiz_items())
    expected = lm_eval_samples(tmp_path, source, ("quiz",), theirs, None, 512, limit=None)
    suite = build_suite(tokenizer, EvaluationProtocol(("quiz",), bos=True), source, 512)
    scores = {(score.task, score.doc_id): score.loglikelihoods for score in score_all(suite, model)}
    assert expected.keys() == scores.keys()
    for key, sample in expected.items():
        of_choices = [loglikelihood for loglikelihood, _ in sample["filtered_resps"]]
        np.testing.assert_allclose(scores[key], of_choices, rtol=0, atol=2e-4)


@pytest.mark.parametrize("variant", ["qwen3_5_text", "lfm2", "falcon_h1", "granitemoehybrid"])
def test_layers_that_carry_a_state_score_as_in_lm_eval(tmp_path, tiny, variant):
    """Choices of one item are rows of their own there, padded behind their tokens."""
    tokenizer = AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama"))
    source = TaskSource.of(None, embedded=True)
    model = tiny(variant, torch.float32, vocab_size=len(tokenizer), max_position_embeddings=512)
    assert_equals_lm_eval(tmp_path, source, ("arc_easy",), model, tokenizer, 512, limit=6, share=False)


@pytest.mark.parametrize("add_bos_token", [None, True])
@pytest.mark.parametrize("bos", [True, False])
def test_encoding_is_hflms(tmp_path, monkeypatch, bos, add_bos_token):
    tokenizer = byte_tokenizer(bos)
    tokenizer.save_pretrained(tmp_path)  # HFLM loads it anew, so that it adds what is asked for
    pairs = [("", "alone"), ("", "<s>begins"), ("ends in space  ", "word"), ("<s>has its own", " beginning")]
    pairs += [("a question", " yes"), ("a question", " no"), ("a question", " yes")]
    instances = [Instance("loglikelihood", {}, pair, index, ("quiz", index, 1)) for index, pair in enumerate(pairs)]
    theirs = HFLM(
        pretrained=unequal_llama(), tokenizer=str(tmp_path), add_bos_token=add_bos_token, max_length=512, device="cpu"
    )
    monkeypatch.setattr(theirs, "_loglikelihood_tokens", lambda requests, **_: requests)
    for request, (_, context, continuation) in zip(
        encode(tokenizer, instances, 512, bool(add_bos_token)),
        theirs.loglikelihood(instances, disable_tqdm=True),
        strict=True,
    ):
        assert not add_bos_token or request.inputs.tolist().count(0) == 1
        assert request.inputs.tolist() == (context + continuation)[:-1]
        assert request.targets.tolist() == continuation


def crossing_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, but for words with what stands before them, across spaces: as SuperBPE's."""
    vocabulary = {"<s>": 0} | {character: index for index, character in enumerate("abcdefghijklmnopqrstuvwxyz? ", 1)}
    merges: list[tuple[str, str]] = []
    for word in ("the ground", "the gate", "on"):
        for end in range(1, len(word)):
            vocabulary.setdefault(word[: end + 1], len(vocabulary))
            merges += [pair] if (pair := (word[:end], word[end])) not in merges else []
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def test_an_answer_without_tokens_of_its_own_is_scored_from_where_the_tokens_differ(tmp_path):
    """The word "ground" and that before it are one token, so lm-eval's split leaves the answer none; of "gates" it leaves the s.
    Compared with a plain loop over the model."""
    contexts = {"he sat on the": ["ground", "gates", "floor"], "who was it?": ["nobody", "she", "he"]}
    items = [{"question": text, "options": options, "answer": 0} for text, options in contexts.items()]
    definition = QUIZ_DEFINITION.replace("{{passage}} Question: {{question}} Answer:", "{{question}}")
    tokenizer, model = crossing_tokenizer(), unequal_llama()
    made = build_suite(
        tokenizer, EvaluationProtocol(("quiz",), slices=(1.0,)), write_quiz(tmp_path, items, definition), 512
    )
    expected = {}
    for number, item in enumerate(items):
        for option in item["options"]:
            context, whole = (
                tokenizer(text)["input_ids"] for text in (item["question"], f"{item['question']} {option}")
            )
            start = len(context)
            if len(whole) <= start:
                assert (number, option) == (0, "ground")
                start = next(index for index, token in enumerate(whole) if token != context[index])
                context = whole[:start]
            ids = torch.tensor([context + whole[start:]])
            logprobs = model(ids).logits[0].double().log_softmax(-1)
            expected.setdefault(number, []).append(
                sum(logprobs[i - 1, ids[0, i]].item() for i in range(start, ids.shape[1]))
            )
    assert tokenizer.convert_ids_to_tokens(made.items[0].requests[0].targets) == ["the ground"]
    assert tokenizer.convert_ids_to_tokens(made.items[0].requests[1].targets) == ["s"]
    for suite in (made, ZeroShotSuite.from_arrays(made.arrays(), EvaluationProtocol(("quiz",), slices=(1.0,)))):
        assert (suite.num_crossing, suite.num_items) == (1, 2)
        for score in score_all(suite, model):
            np.testing.assert_allclose(score.loglikelihoods, expected[score.doc_id], rtol=0, atol=2e-4)
            assert score.acc == (int(np.argmax(expected[score.doc_id])) == 0)


def test_a_tokenizer_without_bos_and_eos_is_refused():
    """One of them stands for an empty context, in HFLM, too, which stops with a TypeError."""
    tokenizer = byte_tokenizer(False)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(
        UserError, match=r"the tokenizer has neither bos_token nor eos_token.*; name one in its tokenizer_config"
    ):
        encode(tokenizer, [Instance("loglikelihood", {}, ("a question", " yes"), 0, ("quiz", 0, 1))], 512)


@pytest.mark.parametrize("bos", [True, False])
def test_a_context_of_white_space_alone_is_an_empty_one(bos):
    """HFLM moves it to the answer, and stops with an AssertionError where no token is left before that."""
    model, tokenizer = unequal_llama(), byte_tokenizer(bos)
    pairs = [("\n ", "yes"), ("a longer question", " no")]
    blank, other = encode(tokenizer, [Instance("loglikelihood", {}, pair, 0, ("quiz", 0, 1)) for pair in pairs], 512)
    answer = tokenizer.encode("\n yes", add_special_tokens=False)
    assert blank.targets.tolist() == answer and blank.inputs.tolist() == [tokenizer.bos_token_id, *answer[:-1]]
    log_probs = model(torch.from_numpy(blank.inputs.astype(np.int64))[None]).logits[0].log_softmax(-1)
    expected = log_probs[range(len(answer)), answer].sum().item()
    for beside in ([], [other], [other, other]):
        found = score_items(model, [[blank, *beside]], share=False).loglikelihoods[0]
        assert found == pytest.approx(expected, abs=1e-3)


OWN_RULES = {
    "several right answers": QUIZ_DEFINITION.replace("answer\nmetric", '"{{[answer, 0]}}"\nmetric'),
    "mutual information": QUIZ_DEFINITION
    + "  - {metric: acc_mutual_info, aggregation: mean, higher_is_better: true}\n",
    "greedy answer": QUIZ_DEFINITION.replace("multiple_choice", "loglikelihood")
    .replace("doc_to_target: answer", 'doc_to_target: " {{options[answer]}}"')
    .replace('doc_to_choice: "{{options}}"\n', "")
    .replace("  - {metric: acc_norm, aggregation: mean, higher_is_better: true}\n", ""),
    "a function": QUIZ_DEFINITION + "process_results: !function judge.by_first_choice\n",
}


@pytest.mark.parametrize("definition", OWN_RULES.values(), ids=OWN_RULES)
def test_tasks_with_other_rules_keep_lm_evals_judgement(tmp_path, definition):
    source = replace(write_quiz(tmp_path / "set", quiz_items(), definition), trusted="!function" in definition)
    (tmp_path / "set" / "tasks" / "quiz" / "judge.py").write_text(
        "def by_first_choice(doc, results):\n    return {'acc': results[0][0] < -20, 'acc_norm': results[-1][0] < -30}\n"
    )
    asked = 2 if "mutual" in definition else 1
    assert_equals_lm_eval(tmp_path, source, ("quiz",), unequal_llama(), byte_tokenizer(True), 512, asked=asked)
    suite = build_suite(byte_tokenizer(True), EvaluationProtocol(("quiz",)), source, 512)
    assert suite.arrays() is None
    items, options = score_all(suite, unequal_llama()), [len(item["options"]) for item in quiz_items()]
    choices = [1 if "loglikelihood" in definition else options[item.doc_id] for item in items]
    assert [len(item.loglikelihoods) for item in items] == choices
    blind = [0.0 if count == 1 else np.nan if "[answer, 0]" in definition else 1 / count for count in choices]
    assert summarize(items)["chance_acc_mean"] == pytest.approx(np.mean(blind), nan_ok=True)


def test_fingerprint_follows_the_items_their_definition_and_lm_eval(tmp_path, monkeypatch):
    items = quiz_items()

    def found(items: list[dict], *definition: str) -> str:
        source = write_quiz(tmp_path, items, *definition)  # the same file each time: nothing may be remembered
        return tasks_fingerprint(source, ("quiz",))

    first = found(items)
    changed = [*items[:-1], items[-1] | {"answer": (items[-1]["answer"] + 1) % len(items[-1]["options"])}]
    assert found(changed) != first
    assert found(items, QUIZ_DEFINITION + "# another prompt\n") != first
    assert found(items) == first
    monkeypatch.setattr("importlib.metadata.version", lambda name: "another version")
    assert found(items) != first
