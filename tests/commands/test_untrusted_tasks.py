"""Task files that would run code or that cannot be built, through every door: the plan of a search, a measurement, the API, and
what a worker does. What is refused has run nothing; --trust-tasks lets it run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tune_prune
from tests.quiz import QUIZ_DEFINITION, quiz_items
from tests.search_folders import TINY, data_folder
from tune_prune.commands import evaluate
from tune_prune.core.config import EvaluationProtocol, ModelRun, TrustingRun
from tune_prune.core.errors import UserError
from tune_prune.core.validation import validated
from tune_prune.data import templates
from tune_prune.data.task_files import TaskSource
from tune_prune.evaluation.zero_shot import build_suite
from tune_prune.trial.context import TrialContext

pytestmark = pytest.mark.usefixtures("nothing_created")

ESCAPE = "{{ cycler.__init__.__globals__.os.system('touch " + "ran') }}"
HOSTILE = {
    "a function": (QUIZ_DEFINITION + "process_results: !function evil.go\n", "!function evil.go would run code"),
    "a template": (QUIZ_DEFINITION.replace("{{passage}}", ESCAPE), "SecurityError"),
    "a description": (QUIZ_DEFINITION + f'description: "{ESCAPE}"\n', "SecurityError"),
    "a metric": (QUIZ_DEFINITION + "  - {metric: ./evil}\n", "the metric ./evil"),
    "a file elsewhere": (QUIZ_DEFINITION + "include: ../../../elsewhere.yaml\n", "outside its folder"),
}
EVIL = "import pathlib\npathlib.Path('ran').touch()\n\n\ndef go(doc, results):\n    return {'acc': 1, 'acc_norm': 1}\n"


def quiz_folder(folder: Path, definition: str, items: str | None = None) -> Path:
    task = data_folder(folder) / "tasks" / "quiz"
    task.mkdir()
    (task / "task.yaml").write_text(definition)
    (task / "evil.py").write_text(EVIL)
    (task / "test.jsonl").write_text(items or "".join(json.dumps(item) + "\n" for item in quiz_items(4)))
    (folder.parent / "elsewhere.yaml").write_text("description: x\n")
    return folder


@pytest.mark.parametrize(("definition", "says"), HOSTILE.values(), ids=HOSTILE)
def test_nothing_of_a_task_file_runs(definition, says, refusal, refused, tmp_path) -> None:
    data = quiz_folder(tmp_path / "data", definition)
    flags = ("--data-dir", data, "--tasks", "quiz", "--limit", "2")
    assert says in refusal(*TINY, *flags)
    assert says in refused(evaluate.main, "--model", "tiny-llama", *flags, begun=True)
    with pytest.raises(UserError, match=says):
        tune_prune.open("tiny-llama", data_dir=data).evaluate(2, "quiz")
    run = replace(tune_prune.open("tiny-llama", data_dir=data).run, protocol=EvaluationProtocol(("quiz",), 2))
    context = TrialContext.open(run, tmp_path / "artifacts", "cpu")
    with pytest.raises(UserError, match=says):  # a worker reads the files itself
        _ = context.suite
    assert not (tmp_path / "ran").exists()


def test_trust_lets_it_run(tmp_path, capfd) -> None:
    data = quiz_folder(tmp_path / "data", HOSTILE["a function"][0])
    flags = ["--data-dir", str(data), "--tasks", "quiz", "--limit", "2", "--trust-tasks"]
    assert evaluate.main(["--model", "tiny-llama", *flags]) == 0
    assert (tmp_path / "ran").exists() and "quiz" in capfd.readouterr().out
    found = tune_prune.open("tiny-llama", data_dir=data, trust_tasks=True).evaluate(2, "quiz")
    assert found.acc_mean == 1.0


def test_read_as_data_a_task_asks_the_same(tmp_path) -> None:
    """The requests of the seven embedded tasks as a folder of the user's, read here as data and by lm-eval as it likes: the same
    tokens, bit for bit."""
    data = data_folder(tmp_path / "data")
    tokenizer = tune_prune.open("tiny-llama").tokenizer
    found = [
        build_suite(tokenizer, EvaluationProtocol(limit=9), TaskSource("folder", str(data), trusted), 512).arrays()
        for trusted in (False, True)
    ]
    assert found[0].keys() == found[1].keys() and len(found[0]) > 3
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name], err_msg=name)


def test_only_a_person_can_say_that_files_are_trusted() -> None:
    run = tune_prune.open("tiny-llama", trust_tasks=True).run
    assert run.trusts_tasks and replace(run, seed=1).trusts_tasks and "trust" not in json.dumps(run.to_dict())
    for written in (run.to_dict(), run.to_dict() | {"trusts_tasks": True, "trust_tasks": True}):
        read = validated(ModelRun, written)
        assert not read.trusts_tasks and not isinstance(read, TrustingRun) and read == ModelRun(**vars(run))


GOOD = {"passage": "p", "question": "q?", "options": ["a", "b"], "answer": 0}
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def lines(*changes: dict) -> str:
    return "".join(json.dumps(GOOD | change) + "\n" for change in changes)


# What cannot be built: definition, items, words of the sentence.
UNBUILDABLE = {
    "no such field": (
        QUIZ_DEFINITION.replace("passage", "story"),
        lines({}),
        ["'story' is undefined", "task.yaml", "test.jsonl"],
    ),
    "no such answer": (
        QUIZ_DEFINITION,
        lines({}, {"answer": 2}),
        ["question 1", "right answer 2 is none of its 2 choices"],
    ),
    "no choices": (QUIZ_DEFINITION, lines({"options": []}), ["cannot be built", "doc_to_choice makes []"]),
    "types": (QUIZ_DEFINITION, lines({}, {"answer": "two"}), ["test.jsonl", "values of different types"]),
    "another type": (
        QUIZ_DEFINITION.replace("multiple_choice", "generate_until"),
        lines({}),
        ["is of type generate_until"],
    ),
    "another metric": (QUIZ_DEFINITION.replace("metric: acc,", "metric: f1,"), lines({}), ["has no metric acc"]),
    "a loop without end": (QUIZ_DEFINITION.replace("{{passage}}", LOOP), lines({}), ["did not end within 0.5 s"]),
    "a huge number": (QUIZ_DEFINITION, lines({"more": 10**30}), ["test.jsonl", "no column holds"]),
    "a number of 5,000 digits": (
        QUIZ_DEFINITION,
        '{"a": ' + "1" * 5000 + "}",
        ["line 1", "4300 digits"],
    ),
    "deep items": (
        QUIZ_DEFINITION,
        '{"a": ' + "[" * 100_000,
        ["test.jsonl, line 1", "not JSON (maximum recursion depth"],
    ),
}


@pytest.mark.parametrize(("definition", "items", "words"), UNBUILDABLE.values(), ids=UNBUILDABLE)
def test_a_plan_finds_tasks_that_cannot_be_built(definition, items, words, refusal, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    data = quiz_folder(tmp_path / "data", definition, items)
    sentence = refusal(*TINY, "--data-dir", data, "--tasks", "quiz")
    assert [word for word in words if word not in sentence] == [], sentence
