"""Task files of others: a definition is read as data, and a template is rendered where it can do no harm. Both are held against
lm-eval itself, which reads and renders the same ones without a bound."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import lm_eval.utils
import pytest
from lm_eval.tasks._yaml_loader import load_yaml

from tune_prune.core.config import ZERO_SHOT_TASKS
from tune_prune.core.errors import UserError
from tune_prune.data import templates
from tune_prune.data.task_definition import USED, followed, read_definition
from tune_prune.data.task_files import TaskSource, read_items, stock_definition, task_files, tasks_fingerprint
from tune_prune.data.templates import TemplateError, TemplateProcess

PLAIN = "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: [a, b]\ndoc_to_target: 0\n"

# What is put behind a plain definition (or, with the word alone, is the whole of it), and words of the sentence.
REFUSED = {
    "function": ("process_results: !function evil.go", ["line 5", "!function evil.go", "--trust-tasks"]),
    "Python object": ("description: !!python/object/apply:os.system [id]", ["line 5", "os.system", "--trust-tasks"]),
    "Python name": ("description: !!python/name:os.system", ["line 5", "os.system", "--trust-tasks"]),
    "file elsewhere": ("include: /etc/passwd", ["includes /etc/passwd", "outside its folder", "--trust-tasks"]),
    "link to elsewhere": ("include: link.yaml", ["link.yaml", "outside its folder"]),
    "file that is not there": ("include: gone.yaml", ["gone.yaml", "not there"]),
    "a link that leads to itself": ("include: loop.yaml", ["loop.yaml", "not there"]),
    "code of a data set": ("custom_dataset: evil.go", ["custom_dataset", "plain data", "--trust-tasks"]),
    "code of documents": ("process_docs: evil.go", ["process_docs", "docs/data.md"]),
    "a file of prompts": ("use_prompt: prompts.yaml:first", ["use_prompt"]),
    "unsafe code": ("unsafe_code: true", ["unsafe_code"]),
    "a program as metric": ("metric_list: [{metric: ./evil}]", ["metric ./evil", "a program", "--trust-tasks"]),
    "a metric of the hub": ("metric_list: [{metric: acc, hf_evaluate: true}]", ["acc with hf_evaluate", "a program"]),
    "a list as text": ("description: [1]", ["description is [1]", "a text"]),
    "no mapping": ("- 1", ["not valid YAML"]),
    "deep": ("description: " + "[" * 90_000, ["not valid YAML", "recursion depth"]),
    "aliases": (
        "metadata: [&a0 [1, 1], " + ", ".join(f"&a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)) + "]",
        ["aliases (*) are read with --trust-tasks alone"],
    ),
    "merges": (
        "metadata: [&a {k: v}, {<<: [*a, *a]}]",
        ["not valid YAML", "aliases (*) are read with --trust-tasks alone"],
    ),
    "a value in itself": ("metadata: &a [*a]", ["aliases (*) are read with --trust-tasks alone"]),
    "long": ("description: " + "x" * 100_000, ["bytes", "at most 100,000"]),
    "a huge number": ("repeats: 1" + "0" * 5000, ["not valid YAML"]),
}


@pytest.mark.parametrize(("addition", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_data_is_refused_in_a_sentence(addition: str, words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "tasks" / "quiz"
    folder.mkdir(parents=True)
    (folder / "task.yaml").write_text(f"{PLAIN}{addition}\n")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ngo = Task = None\n")
    (tmp_path / "secret.yaml").write_text("description: secret\n")
    (folder / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        read_definition(folder / "task.yaml")
    sentence = str(caught.value)
    assert [word for word in words if word not in sentence] == [] and "\n" not in sentence, sentence
    assert time.monotonic() - started < 5 and len(sentence) < 700 and not (tmp_path / "ran").exists()


def test_plain_definitions_are_read_as_lm_eval_reads_them(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("description: from base\ntarget_delimiter: ' -> '\nmetadata: {version: 1}\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "more.yaml").write_text("include: ../other.yaml\ngen_prefix: so\n")
    (tmp_path / "other.yaml").write_text("fewshot_delimiter: x\ndescription: from other\n")
    own = tmp_path / "task.yaml"
    own.write_text(f"include: [base.yaml, below/more.yaml]\ntask: quiz\ntest_split: test\n{PLAIN}")
    paths = [own, *(task.definition for task in task_files(TaskSource.of(None, embedded=True), ZERO_SHOT_TASKS))]
    assert len(paths) == 8
    for path in paths:
        expected = load_yaml(path, resolve_func=False)
        assert read_definition(path) == {name: value for name, value in expected.items() if name in USED}
        assert followed(path)[0] == expected
    assert read_definition(own)["description"] == "from other"


def test_fingerprints_follow_what_a_definition_includes_and_runs(tmp_path: Path) -> None:
    folder = tmp_path / "tasks" / "quiz"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text('{"question": "q"}\n')

    def found(**files: str) -> str:
        for name, content in files.items():
            (folder / name.replace("_", ".")).write_text(content)
        return tasks_fingerprint(TaskSource.of(str(tmp_path), embedded=False), ("quiz",))

    plain = found(task_yaml=PLAIN)
    assert found(utils_py="go = 1\n", base_yaml="description: a\n") == plain  # of neither does the definition speak
    including = found(task_yaml=f"{PLAIN}include: base.yaml\n")
    assert found(base_yaml="description: b\n") not in (plain, including)
    running = found(task_yaml=f"{PLAIN}process_results: !function utils.go\n")
    assert found(utils_py="go = 2\n") not in (plain, running)
    common = tmp_path / "tasks" / "common"  # lm-eval looks for a function beside the file that names it
    common.mkdir()
    (common / "base.yaml").write_text("doc_to_text: !function prompts.ask\n")
    (common / "prompts.py").write_text("ask = 1\n")
    above = found(task_yaml=f"{PLAIN}include: ../common/base.yaml\n")
    (common / "prompts.py").write_text("ask = 2\n")
    assert found() != above


def test_templates_say_what_they_say_in_lm_eval() -> None:
    process = TemplateProcess()
    compared = 0
    for source, names in [(TaskSource.of(None, embedded=True), ZERO_SHOT_TASKS)]:
        for task in task_files(source, names):
            items = read_items(task.items)[:5]
            for path in (task.definition, stock_definition(task.name)):
                values = followed(path)[0]
                for part in ("doc_to_text", "doc_to_target", "doc_to_choice"):
                    template = values.get(part)
                    for item in items if isinstance(template, str) and template not in items[0] else ():
                        try:
                            expected = lm_eval.utils.apply_template(template, item)
                        except Exception as error:  # noqa: BLE001  # what it raises is compared
                            with pytest.raises(TemplateError, match=type(error).__name__):
                                process.render(template, item)
                        else:
                            assert process.render(template, item) == expected
                            compared += 1
    assert compared > 60
    for template in ("{{a | regex_replace('[0-9]', '#')}}\n", "{{b.c[0]}}{{d is none}}", "{{'%s' % a}}{{a.format(1)}}"):
        doc = {"a": "x1 {0} y2", "b": {"c": ["ä", 2]}, "d": None}
        assert process.render(template, doc) == lm_eval.utils.apply_template(template, doc)


# A template, and what ends it.
HOSTILE = {
    "a program": ("{{ cycler.__init__.__globals__.os.system('touch ran') }}", "SecurityError.*--trust-tasks"),
    "a change of the item": ("{{ options.append(1) }}", "SecurityError"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "a loop without end": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "did not end within",
    ),
    "a huge number": ("{{ 7 ** (10 ** 9) }}", "did not end within"),
    "a pattern without end": ("{{ ('a' * 40 ~ '!') | regex_replace('(a+)+$', '') }}", "did not end within"),
    "a huge text": ("{{ 'x' * 10 ** 11 }}", "MemoryError"),
    "a text that doubles": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "MemoryError|did not end within",
    ),
    "a long text": ("{{ 'x' * 1000001 }}", "1,000,001 characters, and 1,000,000 is the most"),
    "a macro without end": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "a deep template": ("{{" + "(" * 9999 + "1" + ")" * 9999 + "}}", "RecursionError"),
    "no such field": ("{{ missing }}", "UndefinedError: 'missing' is undefined"),
}


@pytest.fixture(scope="module")
def impatient() -> TemplateProcess:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "SECONDS", 0.5)
        yield TemplateProcess()


@pytest.mark.parametrize(("template", "ends"), HOSTILE.values(), ids=HOSTILE)
def test_a_template_does_no_harm(template, ends, impatient, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TemplateError) as caught:
        impatient.render(template, {"options": [0]})
    assert re.search(ends, str(caught.value)) and "\n" not in str(caught.value), str(caught.value)
    assert impatient.render("{{ options }}", {"options": [0]}) == "[0]"  # the next one is rendered
    assert list(tmp_path.iterdir()) == []


def test_many_slow_templates_end_too(monkeypatch) -> None:
    monkeypatch.setattr(templates, "CPU_SECONDS", 1)
    monkeypatch.setattr(templates, "SECONDS", 60.0)  # of one, on a busy machine
    process = TemplateProcess()
    slow = "{% for i in range(99) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{{ a }}"
    with pytest.raises(TemplateError, match="the templates did not end within 1 s of CPU time"):
        print([process.render(slow, {"a": number}) for number in range(1000)])


def test_the_process_ends_with_its_owner(monkeypatch) -> None:
    owner = TemplateProcess()
    assert owner.render("{{a}}", {"a": 1}) == "1"
    process = owner._process
    assert isinstance(process, subprocess.Popen) and process.poll() is None
    del owner
    assert process.wait(10) == 0


ASKS = """
import time
from tune_prune.data.templates import TemplateProcess
process = TemplateProcess()
print(process.render("{{a}}", {"a": 1}), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_is_not_for_the_process_which_ends_with_its_parent(number) -> None:
    asks = subprocess.Popen(
        [sys.executable, "-c", ASKS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert asks.stdout is not None and asks.stdout.readline() == "1\n"
    os.killpg(asks.pid, number)  # as a terminal does
    said = asks.communicate(timeout=20)[1]  # until nobody has its stderr, which the process has, too
    assert asks.returncode == -number and "template_process" not in said
