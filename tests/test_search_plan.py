"""The plan of a search and whether an experiment may go on: the numbers of a dry run are those of the model's own files, a
change of meaning is refused with the difference."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.search_folders import TINY, TINY_FOLDER, data_folder, model_folder
from tune_prune import embedded, experiment
from tune_prune.errors import UserError
from tune_prune.evaluation.perplexity import TEXT_FILE
from tune_prune.ledger import Ledger
from tune_prune.preflight import SearchSettings, _check_memory, make_plan
from tune_prune.records import TrialRecord

pytestmark = pytest.mark.usefixtures("nothing_created")


def test_plan_of_a_dry_run(plan_text: Callable[..., str]) -> None:
    """Its numbers are those of the weight file and the config, counted here from the tensors."""
    with safe_open(TINY_FOLDER / "model.safetensors", framework="pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    config = json.loads((TINY_FOLDER / "config.json").read_text())
    heads, kv_heads, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    group = head_dim * hidden * (2 * heads // kv_heads + 2)
    total = sum(sizes.values())
    removable = sum(size for name, size in sizes.items() if "proj" in name) - group

    measured = ("--pruning-ratio", "0.25", "--limit", "10", "--tasks", "piqa,boolq")
    out = plan_text(*TINY, *measured, "--gpus-per-trial", "0", "--cpus-per-trial", "1")
    row = next(line for line in out.splitlines() if line.startswith("tiny-llama "))
    assert row.split()[1:4] == [f"{number:,}" for number in (total, int(0.25 * total), removable)]
    assert f"{kv_heads} x {group:,}" in row and f"{config['intermediate_size']} x {3 * hidden:,}" in row
    assert "3 methods x 2 seq_len x 1 num_samples = 6 configurations a model, 6 trials" in out
    assert "experiment   ray_results/tiny-llama-25-smoke-limit10\n" in out
    assert "2 zero-shot tasks, at most 10 items each" in out and " piqa, boolq\n" in out
    assert "stages       importance, removal, pruning, perplexity, zero-shot 25% / 50% / 100%" in out
    assert "a trial takes CPU 1, GPU 0 and about" in out and f"; {os.cpu_count()} at once;" in out


def test_plan_of_optuna(plan_text: Callable[..., str]) -> None:
    out = plan_text(*TINY, "--search", "optuna", "--num-trials", "4", "--storage-path", "elsewhere", "--name", "mine")
    assert "4 of 6 configurations a model, 4 trials" in out and "experiment   elsewhere/mine\n" in out
    assert not Path("elsewhere").exists()


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """An experiment `kept/mine` of the smoke space with one finished trial."""
    settings = SearchSettings(("tiny-llama",), "smoke", storage_path=str(tmp_path / "kept"), name="mine")
    plan = make_plan(settings)
    experiment.write(plan, ["python"])
    config, key = plan.models[0].trials[0]
    Ledger(plan.experiment_dir / "ledger").write(
        TrialRecord(key=key, model="tiny-llama", config={"method": config.method}, status="complete")
    )
    return plan.experiment_dir


AGAIN = (*TINY, "--storage-path", "kept", "--name", "mine")


def test_an_experiment_goes_on(started: Path, plan_text: Callable[..., str]) -> None:
    assert "kept/mine  (1 of 6 trials are in its ledger)" in plan_text(*AGAIN)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (("--limit", "5"), "limit was None, is 5"),
        (("--seed", "1"), "seed was 0, is 1"),
        (("--tasks", "piqa,boolq"), "tasks was boolq,piqa,hellaswag,"),
        (("--pruning-ratio", "0.3"), "pruning_ratio was 0.2, is 0.3"),
        (("--dtype", "bfloat16"), "dtype was float32, is bfloat16"),
        (("--calibration", "other.txt"), "calibration was embedded, is "),
    ],
)
def test_changed_meaning_is_refused_with_the_difference(
    change: tuple[str, str], difference: str, started: Path, refusal: Callable[..., str]
) -> None:
    Path("other.txt").write_text(embedded.calibration_text())
    before = (started / experiment.FILE).read_bytes()
    if "--dtype" not in change:
        change = (*change, "--gpus-per-trial", "0")  # the weights' type follows the device
    sentence = refusal(*AGAIN, *change, dry=False)
    assert f"(tiny-llama: {difference}" in sentence and "--name" in sentence
    assert sentence.count(" was ") == 2  # the experiment "was made", and the one thing that changed
    assert (started / experiment.FILE).read_bytes() == before


def test_changed_files_are_refused(tmp_path: Path, refusal: Callable[..., str], plan_text: Callable[..., str]) -> None:
    folder, data = model_folder(tmp_path / "m"), data_folder(tmp_path / "data")
    settings = SearchSettings((str(folder),), "smoke", calibration="embedded", data_dir=str(data), name="mine")
    plan = make_plan(settings)
    kept = tmp_path / "kept" / "mine"
    (kept / "ledger").mkdir(parents=True)
    models = {"m": {"meaning": plan.models[0].meaning()}}
    (kept / experiment.FILE).write_text(json.dumps({"models": models}))
    argv = ("--model", folder, *AGAIN[2:], "--calibration", "embedded", "--data-dir", data)
    with (data / TEXT_FILE).open("a") as file:
        file.write("one more line\n")
    plan_text(*argv)  # nothing was computed yet: nothing can be mixed
    (kept / "baseline.json").write_text("{}")
    assert "m: the files of texts or tasks have changed" in refusal(*argv)
    data_folder(tmp_path / "same")
    assert "m: the model's files have changed" in refusal(
        "--model", model_folder(tmp_path / "new" / "m", rms_norm_eps=0.1), *argv[2:-1], tmp_path / "same"
    )


@pytest.mark.parametrize("content", ["{", "[]", '{"models": []}', '{"models": {"tiny-llama": 1}}'])
def test_damaged_experiment_file(content: str, started: Path, refusal: Callable[..., str]) -> None:
    (started / experiment.FILE).write_text(content)
    assert str(started / experiment.FILE) in refusal(*AGAIN)


def test_damaged_ledger_is_known_before_the_search(started: Path, refusal: Callable[..., str]) -> None:
    """Also a record of other trials: the tables at the end would trip over it, hours later."""
    (started / "ledger" / "0123456789abcdef.json").write_text('{"key": ')
    assert "0123456789abcdef.json" in refusal(*AGAIN)


@pytest.mark.parametrize(
    ("trial_gib", "slots", "says"),
    [
        (30, 2, r"needs about 30\.0 GiB.*has 24\.0 GiB"),
        (10, 4, r"4 trials at once.*at most 2 run at once"),
        (10, 2, None),
    ],
)
def test_trials_that_do_not_fit_into_memory_are_refused(trial_gib, slots, says):
    refused = pytest.raises(UserError, match=says) if says else contextlib.nullcontext()
    with refused:
        _check_memory(trial_gib * 2**30, slots, 24 * 2**30)
