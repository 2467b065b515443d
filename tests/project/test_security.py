"""SECURITY.md, point by point: each has the tests that hold it, and each of these is there. Points that no other file tests are
tested here."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tune_prune
from tests.search_folders import model_folder
from tune_prune.commands import prune, search
from tune_prune.core.errors import UserError
from tune_prune.data import template_process, templates
from tune_prune.models import loading
from tune_prune.models.catalog import resolve

ROOT = Path(__file__).resolve().parents[2]
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")

HERE, RAY = "project/test_security.py", "tuning/test_tuning.py"
FOLLOWED, ODD = "commands/test_followed_search.py", "commands/test_bad_inputs.py"
HELD_BY = {
    "Code of a model": [
        f"{HERE}::test_no_code_of_a_model_runs",
        f"{HERE}::test_no_call_lets_code_of_a_model_run",
        "commands/test_engine_speed.py::test_code_that_is_not_ours_is_not_run",
    ],
    "Weights": [f"{HERE}::test_a_pickle_of_weights_runs_nothing"],
    "GGUF files": [
        "models/test_gguf_models.py::test_damaged_files_are_refused",
        "models/test_gguf_models.py::test_what_would_be_another_model_is_refused",
    ],
    "Sizes": [f"{HERE}::test_huge_configs_are_refused_at_once"],
    "Task definitions": [
        "data/test_task_definition.py::test_what_is_not_data_is_refused_in_a_sentence",
        "commands/test_untrusted_tasks.py::test_nothing_of_a_task_file_runs",
    ],
    "Templates": [
        "data/test_task_definition.py::test_a_template_does_no_harm",
        "data/test_task_definition.py::test_many_slow_templates_end_too",
        f"{HERE}::test_limits_of_templates_hold",
    ],
    "Trust in task files": [
        "commands/test_untrusted_tasks.py::test_trust_lets_it_run",
        "commands/test_untrusted_tasks.py::test_only_a_person_can_say_that_files_are_trusted",
    ],
    "Items and texts": [
        "commands/test_untrusted_tasks.py::test_a_plan_finds_tasks_that_cannot_be_built",
        "commands/test_bad_inputs.py::test_broken_data_is_refused",
        "commands/test_bad_inputs.py::test_unusable_calibration_texts",
    ],
    "Stored results": ["core/test_artifacts.py::test_a_pickle_in_an_artifact_is_not_run"],
    "Spreadsheets": [
        "analysis/test_hostile_labels.py::test_spreadsheets_calculate_nothing",
        "analysis/test_hostile_labels.py::test_results_files_come_back_unchanged",
    ],
    "Markdown, model cards and LaTeX": [
        "analysis/test_hostile_labels.py::test_markdown_shows_what_was_named",
        "analysis/test_hostile_labels.py::test_latex_prints_what_was_named",
        "checkpoint/test_model_card.py::test_names_of_others_act_nowhere",
    ],
    "The page": [
        "analysis/test_page.py::test_nothing_is_loaded_and_only_its_own_script_may_run",
        "analysis/test_page.py::test_names_from_outside_are_only_text",
    ],
    "Terminals": [
        "analysis/test_hostile_labels.py::test_a_terminal_is_not_spoken_to",
        f"{HERE}::test_everything_is_printed_by_one_function",
        f"{ODD}::test_names_of_files_do_not_act_on_a_terminal",
        f"{FOLLOWED}::test_a_log_of_failures_and_an_interrupt",
    ],
    "Names": [
        f"{HERE}::test_long_names_are_refused_in_a_sentence",
        "analysis/test_hostile_labels.py::test_names_that_no_folder_can_have",
    ],
    "Checkpoints": [f"{HERE}::test_checkpoints_hold_no_code_but_three_files"],
    "Secrets": [f"{HERE}::test_secrets_stay_out", f"{FOLLOWED}::test_no_secret_is_written"],
    "Uploads": [
        "commands/test_upload.py::test_a_pruned_model_is_uploaded_in_one_commit_privately_and_without_paths",
        "commands/test_upload.py::test_what_cannot_be_uploaded_is_said_before_the_work",
    ],
    "Overwriting": [
        f"{HERE}::test_nothing_else_is_overwritten",
        "commands/test_bad_lines.py::test_a_bad_line_is_told_what_to_write",
        f"{ODD}::test_only_a_study_is_replaced_by_a_study",
    ],
    "Ports": [f"{RAY}::test_a_local_ray_is_for_this_process_alone_and_its_workers_are_as_nice_as_other_programs"],
    "Temporary folders": [
        "core/test_ending.py::test_a_signal_ends_a_command_with_its_code_and_what_to_do",
        "tuning/test_ray_start.py::test_whatever_ends_a_search_its_ray_leaves_nothing",
    ],
    "Clusters": ["tuning/test_cluster.py::test_a_cluster_with_a_token_lets_nobody_in_without_it"],
    "Telemetry": [f"{HERE}::test_telemetry_is_off", f"{FOLLOWED}::test_nothing_is_asked_over_the_network"],
}


def test_every_point_is_held_by_tests() -> None:
    points = re.findall(r"^- \*\*(.+?)\*\*", SECURITY, re.MULTILINE)
    assert points == list(HELD_BY) and len(points) > 15
    for tests in HELD_BY.values():
        for test in tests:
            file, _, name = test.partition("::")
            tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
            assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, test


EVIL = "import pathlib\npathlib.Path({ran!r}).touch()\n\n\nclass Any:\n    pass\n"


@pytest.mark.parametrize("model_type", ["llama", "made_up", None])
def test_no_code_of_a_model_runs(model_type: str | None, tmp_path: Path) -> None:
    """The type is known or unknown, or the code is in the tokenizer of a whole model."""
    named = {"AutoConfig": "evil.Any", "AutoModelForCausalLM": "evil.Any", "AutoTokenizer": ["evil.Any", "evil.Any"]}
    folder = model_folder(tmp_path / "m", auto_map=named, **({"model_type": model_type} if model_type else {}))
    (folder / "evil.py").write_text(EVIL.format(ran=str(tmp_path / "ran")))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    other = tokenizer | {"auto_map": named} | ({} if model_type else {"tokenizer_class": "Any"})
    (folder / "tokenizer_config.json").write_text(json.dumps(other))
    if model_type == "llama":
        assert tune_prune.open(folder).loaded().model.config.model_type == "llama"
    else:
        with pytest.raises(UserError):
            tune_prune.open(folder).loaded()
    assert not (tmp_path / "ran").exists()


def test_no_call_lets_code_of_a_model_run() -> None:
    """Whatever loads by transformers says trust_remote_code=False, and nothing says True; torch.load reads plain tensors alone."""
    loads = {"AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "_tokenizer_class"}
    found = 0
    for path in sorted((ROOT / "tune_prune").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            said = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert said.get("trust_remote_code", "False") == "False", path
            called = ast.unparse(node.func)
            assert called != "torch.load" or said.get("weights_only") == "True", path
            assert called not in ("eval", "exec", "yaml.unsafe_load", "yaml.full_load"), path
            if called.endswith((".from_pretrained", ".from_config")) and called.split(".")[0].split("(")[0] in loads:
                found += 1
                assert said.get("trust_remote_code") == "False", f"{path}: {called}"
    assert found >= 4


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.mkdir, (self.path,))


def test_a_pickle_of_weights_runs_nothing(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": _Bomb(str(tmp_path / "ran"))}, folder / "pytorch_model.bin")
    with pytest.raises(UserError) as caught:
        loading.load_model(resolve(str(folder)), torch.float32, "cpu")
    assert "pickle" in str(caught.value) and "save_pretrained" in str(caught.value)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(_Bomb(str(tmp_path / "ran"))))
    assert (tmp_path / "ran").exists()  # the bomb is one


HUGE = {
    "layers": ({"num_hidden_layers": 1_000_000}, "num_hidden_layers 1e+06, and 1,000 is the most"),
    "layers without end": ({"num_hidden_layers": 10**15}, "num_hidden_layers 1e+15"),
    "layers of another family": ({"model_type": "gpt2", "n_layer": 1_000_000}, "n_layer 1e+06"),
    "width": ({"hidden_size": 10**12}, "hidden_size 1e+12"),
    "a deep value": ({"rope_scaling": "DEEP"}, "config.json"),
}


@pytest.mark.parametrize(("changes", "says"), HUGE.values(), ids=HUGE)
def test_huge_configs_are_refused_at_once(changes: dict, says: str, tmp_path: Path, refused) -> None:
    folder = model_folder(tmp_path / "m", **changes)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"DEEP"', "[" * 100_000 + "]" * 100_000))
    sentence = refused(search.main, "--model", folder, "--search-space", "smoke", "--dry-run")
    assert says in sentence and len(sentence) < 600, sentence


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300, "a/" * 2500, "./" + "x" * 300, "剪/" * 1200])
def test_long_names_are_refused_in_a_sentence(name: str, refused, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = refused(search.main, "--model", name, "--dry-run")
    assert "letters, which no file can be named by" in sentence and len(sentence) < 400, sentence
    hostile = model_folder(tmp_path / "red\x1b[31m")
    assert "no control characters" in (shown := refused(search.main, "--model", hostile, "--dry-run"))
    assert "\x1b" not in shown
    for flag in ("--data-dir", "--storage-path", "--calibration", "--search-space"):
        sentence = refused(search.main, "--model", "tiny-llama", flag, name, "--dry-run")
        assert len(sentence) < 12_000
    assert list(tmp_path.iterdir()) == [hostile]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose layers differ, made where secrets are in the environment and in the path."""
    folder = tmp_path_factory.mktemp("of_anna") / "saved"
    base = model_folder(folder.parent / "base")
    (base / "LICENSE.py").write_text("a program that a class file could name")
    (base / "LICENSE").write_text("a licence")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret123")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "aws_secret123")
        tune_prune.open(base).prune("magnitude").save(folder)
    return folder


def test_checkpoints_hold_no_code_but_three_files(saved: Path) -> None:
    programs = {path.name for path in saved.iterdir() if path.suffix == ".py"}
    assert programs == {"configuration_tune_prune.py", "modeling_tune_prune.py", "mlx_tune_prune.py"}
    for name in programs:
        assert (saved / name).read_bytes() == (ROOT / "tune_prune" / "models" / "pruned" / name).read_bytes()
    others = {"LICENSE", "README.md", "layers.png", "config.json", "generation_config.json", "tune_prune.json"}
    assert {path.name for path in saved.iterdir()} - programs == others | {
        "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip


def test_secrets_stay_out(saved: Path) -> None:
    for path in saved.iterdir():
        content = path.read_bytes()
        assert b"secret123" not in content, path
        if path.name == "README.md":
            assert b"of_anna" not in content


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("/", "is a mount point"),
        ("/proc/x", "/proc/x cannot be made"),
        ("folder", "is not a checkpoint"),
        ("file", "not a folder"),
    ],
)
def test_nothing_else_is_overwritten(output: str, says: str, refused, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("kept")
    flags = ("--model", "tiny-llama", "--method", "magnitude", "--output", output, "--overwrite")
    assert says in refused(prune.main, *flags)
    assert (tmp_path / "folder" / "thesis.tex").read_text() == "years" and (tmp_path / "file").read_text() == "kept"


def test_everything_is_printed_by_one_function() -> None:
    """`say` spells out what would act, and nothing that a command prints goes around it but lines for other programs."""
    found = {
        f"{path.parent.name}/{path.name}"
        for path in (ROOT / "tune_prune").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and "embedded" not in path.parts
    }
    printable = {"core/terminal.py", "core/ending.py"}
    constant = {"core/parser.py"}  # versions
    to_their_parents = {"data/template_process.py"}
    assert found - printable - constant <= to_their_parents


def test_limits_of_templates_hold() -> None:
    """They are those that SECURITY.md states, and a lower limit of the machine stays."""
    assert (template_process.MAX_MEMORY, template_process.MAX_TEXT) == (2**30, 10**6)
    assert (templates.SECONDS, templates.CPU_SECONDS) == (10, 5 * 60)
    command = [sys.executable, "-m", "tune_prune.data.template_process", "10", "300"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -t 60; exec "$@"', "bash", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=json.dumps(["{{ a }} b", {"a": 1}]) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {"text": "1 b"}


def test_telemetry_is_off() -> None:
    code = "import os, tune_prune.tuning; print(os.environ['RAY_USAGE_STATS_ENABLED'])"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_USAGE_STATS_ENABLED"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0\n"
