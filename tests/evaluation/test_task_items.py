"""Items, definitions and tasks that cannot be asked are named: a sentence, no item left out in silence."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from tests.quiz import QUIZ_DEFINITION, byte_tokenizer, quiz_items, write_quiz
from tune_prune.core.config import EvaluationProtocol
from tune_prune.core.errors import UserError
from tune_prune.data.task_files import TaskSource, check_tasks
from tune_prune.evaluation import zero_shot
from tune_prune.evaluation.encoding import encode
from tune_prune.evaluation.zero_shot import build_suite

GOOD = {"passage": "p", "question": "q?", "options": ["a", "b"], "answer": 0}


SEVERAL = QUIZ_DEFINITION.replace("doc_to_target: answer", "doc_to_target: answers")
MUTUAL = "  - {metric: acc_mutual_info, aggregation: mean, higher_is_better: true}\n"
BY_COUNT = QUIZ_DEFINITION.replace(
    "doc_to_target: answer", 'doc_to_target: "{{answers[0] if answers|length == 1 else answers}}"'
)


@pytest.mark.parametrize(
    ("definition", "answers", "says"),
    [
        (SEVERAL, [["b"]], r"question 0: the right answers \['b'\] are no numbers of its 2 choices, which begin with 0"),
        (SEVERAL, [[0, 1], [1, 2]], r"question 1: the right answers \[1, 2\] are no numbers of its 2 choices"),
        (SEVERAL, [[]], r"question 0: the right answers \[\] are no numbers of its 2 choices"),
        (SEVERAL + MUTUAL, [[0, 1]], r"question 0 cannot be judged by the task's metrics \(ValueError: .* leave out metrics other"),
        (BY_COUNT, [[0], [0, 1]], r"question 1 cannot be judged by the task's metrics \(ValueError: .*; correct it"),
    ],
)  # fmt: skip
def test_right_answers_that_cannot_be_judged_are_named_before_anything_is_scored(tmp_path, definition, answers, says):
    source = write_quiz(tmp_path, [GOOD | {"answers": several} for several in answers], definition)
    with pytest.raises(UserError, match=says):
        build_suite(byte_tokenizer(True), EvaluationProtocol(("quiz",)), source, 512)


def test_a_rule_of_its_own_reads_right_answers_as_it_likes(tmp_path):
    rule = "process_results: !function judge.by_text\n"
    source = write_quiz(tmp_path, [GOOD | {"answers": ["b", "c"]}, GOOD | {"answers": []}], SEVERAL + rule)
    (tmp_path / "tasks" / "quiz" / "judge.py").write_text(
        "def by_text(doc, results):\n    right = doc['options'][results[0][0] < results[1][0]] in doc['answers']\n"
        "    return {'acc': right, 'acc_norm': right}\n"
    )
    source, protocol = replace(source, trusted=True), EvaluationProtocol(("quiz",))
    assert len(build_suite(byte_tokenizer(True), protocol, source, 512).items) == 2


@pytest.mark.parametrize(
    ("name", "judged", "says"),
    [
        (
            "quiz",
            "{'acc': 0.25}",
            r"task 'quiz' judges a question by acc 0\.25; .* right \(1\) or wrong \(0\) are compared",
        ),
        ("quiz", "{'acc': 1, 'acc_norm': float('nan')}", r"task 'quiz' judges a question by acc_norm nan"),
        ("piqa", "{'acc': 1}", r"task 'piqa' is judged without acc_norm, by which .*; give its folder another name"),
    ],
)
def test_a_judgement_that_no_outcome_can_keep_is_refused(tmp_path, name, judged, says):
    """Every item of lm-eval's truthfulqa_mc2 would count as right, whatever share of it is."""
    source = write_quiz(tmp_path, [GOOD], QUIZ_DEFINITION + "process_results: !function judge.by_share\n")
    (tmp_path / "tasks" / "quiz" / "judge.py").write_text(f"def by_share(doc, results):\n    return {judged}\n")
    (tmp_path / "tasks" / "quiz").rename(tmp_path / "tasks" / name)
    with pytest.raises(UserError, match=says):
        build_suite(byte_tokenizer(True), EvaluationProtocol((name,)), replace(source, trusted=True), 512)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["", "[1, 2]"], r"test\.jsonl, line 2: list where an object is needed"),
        (
            [json.dumps(GOOD), json.dumps(GOOD | {"answer": 2})],
            r"question 1: the right answer 2 is none of its 2 choices",
        ),
        (
            [json.dumps(GOOD), json.dumps(GOOD | {"answer": "two"})],
            r"test\.jsonl: a field has values of different types",
        ),
        (
            [json.dumps(GOOD | {"options": []})],
            r"task 'quiz' cannot be built from .*task\.yaml .*, in the definition or in question 0\); correct",
        ),
        (
            [json.dumps(GOOD), json.dumps(GOOD | {"options": ["a", None]})],
            r"makes \['a', None\], and a list of texts is needed, in question 1\)",
        ),
        ([json.dumps(GOOD), json.dumps(GOOD | {"options": None})], r"test\.jsonl .*null, or missing, in question 1\)"),
        (
            [json.dumps(GOOD | {"options": ["a" * 600, "b"]})],
            r"question 0: the answer ' aaa.*' is 601 tokens.* at most 512",
        ),
    ],
)
def test_bad_items_are_named(tmp_path, lines, says):
    source = write_quiz(tmp_path, [])
    (tmp_path / "tasks" / "quiz" / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match=says) as caught:
        build_suite(byte_tokenizer(True), EvaluationProtocol(("quiz",)), source, 512)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("context", ["", "a question"])
def test_an_answer_without_tokens_is_named(context):
    asked = Instance("loglikelihood", {}, (context, ""), 0, ("quiz", 7, 1))
    with pytest.raises(UserError, match=r"'quiz', question 7: the answer '' has no tokens, .*; correct it"):
        encode(byte_tokenizer(True), [asked], 512)


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        (QUIZ_DEFINITION.replace("metric: acc,", "metric: exact_match,"), "has no metric acc"),
        (QUIZ_DEFINITION.replace("multiple_choice", "generate_until"), "is of type generate_until"),
        (
            QUIZ_DEFINITION + 'target_delimiter: "\\ud83d\\ude00"\n',
            r"question 0 is asked with '\\ud83d\\ude00', a character in halves; write the whole character",
        ),
    ],
)
def test_bad_definitions_are_named(tmp_path, definition, says):
    source = write_quiz(tmp_path, [GOOD], definition)
    with pytest.raises(UserError, match=says) as caught:
        build_suite(byte_tokenizer(True), EvaluationProtocol(("quiz",)), source, 512)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("label", ["", ', "label": null'])
def test_items_of_a_stock_task_need_its_fields(tmp_path, label):
    (tmp_path / "tasks" / "boolq").mkdir(parents=True)
    items = tmp_path / "tasks" / "boolq" / "validation.jsonl"
    items.write_text('{"passage": "p", "question": "q"' + label + "}\n")
    source = TaskSource.of(str(tmp_path), embedded=False)
    with pytest.raises(UserError, match=r"validation\.jsonl, line 1: no field label, or null in it"):
        build_suite(byte_tokenizer(True), EvaluationProtocol(("boolq",)), source, 512)


def test_a_choice_of_a_stock_task_that_is_null_is_named(tmp_path):
    (tmp_path / "tasks" / "arc_easy").mkdir(parents=True)
    good = {"question": "a stone", "choices": {"text": ["sinks", "floats"], "label": ["A", "B"]}, "answerKey": "A"}
    bad = good | {"choices": {"text": ["sinks", None], "label": ["A", "B"]}}
    lines = "\n".join(map(json.dumps, (good, bad)))
    (tmp_path / "tasks" / "arc_easy" / "test.jsonl").write_text(lines)
    with pytest.raises(UserError, match="task 'arc_easy', question 1: the choice None is no text; correct it"):
        build_suite(byte_tokenizer(True), EvaluationProtocol(("arc_easy",)), TaskSource.of(str(tmp_path), False), 512)


def test_check_names_everything_that_is_missing(tmp_path):
    source = write_quiz(tmp_path, [GOOD])
    (tmp_path / "tasks" / "own").mkdir()
    check_tasks(source, ("quiz",))
    with pytest.raises(UserError) as caught:
        check_tasks(source, ("quiz", "boolq", "own", "arc_easy"))
    for file in ("boolq/validation.jsonl", "own/task.yaml", "arc_easy/test.jsonl"):
        assert file in str(caught.value)
    with pytest.raises(UserError, match=r"'winogrand' is not in .*did you mean 'winogrande'"):
        check_tasks(source, ("winogrand",))
    with pytest.raises(UserError, match="is not a folder"):
        check_tasks(TaskSource.of(str(tmp_path / "absent"), embedded=False), ("boolq",))


def test_tasks_of_the_hub_are_asked_without_examples_and_groups_are_named(tmp_path, monkeypatch):
    items = tmp_path / "items.jsonl"
    items.write_text("".join(json.dumps(item) + "\n" for item in quiz_items()), encoding="utf-8")
    data = {"data_files": {"train": str(items), "test": str(items)}, "cache_dir": str(tmp_path / "cache")}
    splits = {"training_split": "train", "fewshot_split": "train", "test_split": "test"}
    hub = yaml.safe_load(QUIZ_DEFINITION) | {"dataset_path": "json", "dataset_kwargs": data, "tag": "tagged"} | splits
    (tmp_path / "quiz.yaml").write_text(yaml.safe_dump(hub | {"task": "own_quiz", "num_fewshot": 2}))
    (tmp_path / "group.yaml").write_text(yaml.safe_dump({"group": "own_group", "task": ["own_quiz"]}))
    monkeypatch.setattr(
        zero_shot, "TaskManager", partial(TaskManager, include_path=str(tmp_path), include_defaults=False)
    )
    source, tokenizer = TaskSource.of(None, embedded=False), byte_tokenizer(True)
    suite = build_suite(tokenizer, EvaluationProtocol(("own_quiz",)), source, 2048)
    own = build_suite(tokenizer, EvaluationProtocol(("quiz",)), write_quiz(tmp_path / "set", quiz_items()), 2048)
    for one, other in zip(suite.items, own.items, strict=True):
        assert [r.inputs.tolist() for r in one.requests] == [r.inputs.tolist() for r in other.requests]
    for name in ("own_group", "tagged"):
        with pytest.raises(UserError, match=f"task '{name}' is a group of lm-eval's tasks; name its tasks instead"):
            build_suite(tokenizer, EvaluationProtocol((name,)), source, 2048)
    with pytest.raises(UserError, match="task 'own_qui' is unknown to lm-eval; close names: own_quiz"):
        build_suite(tokenizer, EvaluationProtocol(("own_qui",)), source, 2048)
