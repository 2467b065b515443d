"""The plan of a search and whether an experiment may go on: the numbers of a dry run are those of the model's own files, a
change of identity is refused with the difference."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.search_folders import TINY, TINY_FOLDER, data_folder, model_folder
from tests.searches import finished
from tune_prune import embedded
from tune_prune.analysis import export
from tune_prune.analysis.input.reading import study_of_search
from tune_prune.analysis.input.rows import frame
from tune_prune.analysis.input.study import Model
from tune_prune.commands import plan_page, search
from tune_prune.commands.flags import settings_from
from tune_prune.core.config import EvaluationProtocol, Samples
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, write_baselines
from tune_prune.core.machine import Memory
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import FolderStore
from tune_prune.data.task_files import TaskSource
from tune_prune.evaluation.zero_shot import build_suite
from tune_prune.models import catalog, loading
from tune_prune.models.runner import devices
from tune_prune.pruning import shapes
from tune_prune.pruning.methods import Method, load_method
from tune_prune.trial.context import TrialContext
from tune_prune.trial.statistics import needs_of
from tune_prune.trial.trial import prepare
from tune_prune.tuning import experiment, preflight
from tune_prune.tuning import space as search_space
from tune_prune.tuning.memory_bounds import check_memory
from tune_prune.tuning.plan import SearchSettings
from tune_prune.tuning.preflight import make_plan

pytestmark = pytest.mark.usefixtures("nothing_created")

CPUS = len(os.sched_getaffinity(0))
SECONDS = r"[\dhms.]+"


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
    assert "; 2 toy benchmarks (piqa, boolq), at most 10 questions each\n" in out
    assert "stages       importance, removal, pruning, kl, perplexity, zero-shot " in out
    assert ": 6.25% / 12.5% / 25% / 50% / 100% of all questions\n" in out
    assert "a trial takes 1 CPU, 0 GPU and about" in out and f"; {CPUS} at once;" in out
    assert "original; 2 runs of the sample text for each of: gradient, removal (one per seq_len)\n" in out


KEPT = (*TINY, "--storage-path", "kept", "--name", "mine")
STAGES = ("importance", "removal", "pruning", "perplexity", "zero-shot")


def table(out: str) -> dict[str, list[str]]:
    """The cost table of a plan: stage -> times, tokens, FLOPs, time, memory, way."""
    rows = [line.split() for line in out.splitlines()]
    return {row[0]: row[1:] for row in rows if row and row[0] in STAGES and len(row) >= 8}


def test_the_cost_of_a_dry_run(plan_text: Callable[..., str]) -> None:
    """Passes and tokens of the smoke space follow from its YAML file."""
    out = plan_text(*TINY, "--gpus-per-trial", "0")
    space = search_space.load("smoke").values
    lengths, samples = space["seq_len"], max(space["num_samples"])
    cost = table(out)
    assert tuple(cost) == STAGES
    assert cost["importance"][:2] == [str(len(lengths)), f"{sum(lengths) * samples:,}"]
    layers = json.loads((TINY_FOLDER / "config.json").read_text())["num_hidden_layers"]
    removal = sum(lengths) * (samples // 5) * (1 + 3 * layers)  # a layer, its attention, its MLP
    assert cost["removal"][:2] == [str(len(lengths)), f"{removal:,}"]
    assert cost["pruning"][0] == "6" and cost["perplexity"][0] == cost["zero-shot"][0] == "7"
    tokenizer = loading.load_tokenizer(catalog.resolve("tiny-llama"))
    words = len(tokenizer(embedded.perplexity_text(), add_special_tokens=False)["input_ids"])
    assert cost["perplexity"][1] == f"{7 * words:,}"
    requests = build_suite(tokenizer, EvaluationProtocol(), TaskSource.of(None, embedded=True), 512)
    assert cost["zero-shot"][1] == f"{7 * sum(map(requests.tokens_in_slice, range(requests.num_slices))):,}"
    last = next(line for line in out.splitlines() if line.startswith("cost "))
    assert re.search(
        rf"about {SECONDS} to {SECONDS} on {CPUS} workers?, measured at load [\d.]+ of {CPUS} CPUs?$", last
    )
    memory = next(line for line in out.splitlines() if line.startswith("memory "))
    total, process, weights, *_ = (int(number) for number in re.findall(r"(\d+) MiB", memory))
    assert total > process + weights


def test_stopping_early_makes_the_cost_an_upper_bound(plan_text: Callable[..., str]) -> None:
    assert "an upper bound: asha stops trials early" in plan_text(*TINY, "--scheduler", "asha")
    alone, both = (plan_text(*TINY, "--kl-filter", *more) for more in ((), ("--scheduler", "race")))
    assert "scheduler none, KL filter\n" in alone and "an upper bound: the KL filter stops trials early" in alone
    assert "scheduler race, KL filter\n" in both and "race and the KL filter stop trials early" in both


@pytest.mark.slow
def test_bfloat16_on_a_cpu_without_instructions_for_it_is_named(
    plan_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    for speed in (0.2, 6.0):
        monkeypatch.setattr(devices, "bfloat16_speed", lambda speed=speed: speed)
        monkeypatch.setattr(plan_page, "bfloat16_speed", devices.bfloat16_speed)
        shown += [
            "bfloat16 was asked for, but this CPU multiplies matrices 0.2 times as fast" in plan_text(*TINY, *flags)
            for flags in (("--dtype", "bfloat16", "--gpus-per-trial", "0"), ("--gpus-per-trial", "0"))
        ]
    assert shown == [True, False, False, False]


def test_the_default_data_type_is_that_of_the_weights_where_the_cpu_gains_by_it(
    plan_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder that says bfloat16, float16 or float32, on a CPU with instructions for bfloat16 and on one without; --dtype wins."""
    folder, data = model_folder(tmp_path / "stored"), data_folder(tmp_path / "data")
    about = json.loads((folder / "config.json").read_text())
    space = ("--model", str(folder), "--data-dir", str(data), "--calibration", "embedded", "--gpus-per-trial", "0")
    seen = []
    for speed in (6.0, 0.2):
        monkeypatch.setattr(devices, "bfloat16_speed", lambda speed=speed: speed)
        monkeypatch.setattr(plan_page, "bfloat16_speed", devices.bfloat16_speed)
        for stored in ("bfloat16", "float16", "float32", None):
            (folder / "config.json").write_text(json.dumps(about | {"dtype": stored}))
            settings = SearchSettings((str(folder),), "smoke", data_dir=str(data), calibration="embedded", limit=5)
            seen.append(make_plan(replace(settings, gpus_per_trial=0)).models[0].run.dtype)
        assert make_plan(replace(settings, gpus_per_trial=0, dtype="bfloat16")).models[0].run.dtype == "bfloat16"
        (folder / "config.json").write_text(json.dumps(about | {"dtype": "bfloat16"}))
        assert f"weights are stored in bfloat16; this CPU multiplies matrices {speed:.1f} times" in plan_text(
            *space, "--search-space", "smoke", "--limit", "5"
        )
    assert seen == ["bfloat16", "bfloat16", "float32", "float32", *["float32"] * 4]


def test_a_gpu_that_torch_does_not_see_is_named(
    plan_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = []
    for place, hidden in ((tmp_path / "none", None), (tmp_path, None), (tmp_path, "")):
        monkeypatch.setattr("tune_prune.commands.plan_page.NVIDIA", place)
        if hidden is not None:  # what somebody does who wants the CPUs
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        shown.append("does not see this machine's NVIDIA GPU" in plan_text(*TINY, verbose=False))
    assert shown == [False, True, False]


@pytest.mark.slow
def test_what_is_cached_or_recorded_is_not_counted(tmp_path: Path, plan_text: Callable[..., str]) -> None:
    """After a worker has made the statistics of one seq_len and the requests, only the other seq_len is left, and the
    zero-shot tokens are exact; a trial of the ledger and the baseline are not run again."""
    settings = SearchSettings(
        ("tiny-llama",), "smoke", storage_path=str(tmp_path / "kept"), name="mine", gpus_per_trial=0
    )
    plan = make_plan(settings)
    (model,) = plan.models
    context = TrialContext.open(model.run, tmp_path / "kept" / "artifacts", device="cpu")
    values = plan.space.values
    short = min(values["seq_len"])
    needs = needs_of(config for config in model.configs if config.seq_len == short)
    made = [report.stage for _, report in prepare(context, Samples(short), needs)]
    assert made == ["importance", "removal"]
    tokens = sum(context.suite.tokens_in_slice(index) for index in range(context.suite.num_slices))
    first, *others = model.trials
    store = FolderStore(plan.experiment_dir)
    experiment.write(plan.held, plan, ["python"])
    Ledger(store).write(finished(first))
    write_baselines(store, {"tiny-llama": TrialRecord(context.key(None), "tiny-llama", None, "complete")})

    out = plan_text(*KEPT, "--gpus-per-trial", "0")
    cost = table(out)
    assert cost["importance"][:2] == ["1", f"{max(values['seq_len']) * max(values['num_samples']):,}"]
    assert cost["removal"][0] == "1"
    assert cost["zero-shot"][:2] == ["5", f"{5 * tokens:,}"]
    assert "~" not in out
    for spec in others:
        Ledger(store).write(finished(spec))
    assert "cost         nothing is left to compute" in plan_text(*KEPT, "--gpus-per-trial", "0")


def test_plan_of_optuna(plan_text: Callable[..., str]) -> None:
    out = plan_text(*TINY, "--search", "optuna", "--num-trials", "4", "--storage-path", "elsewhere", "--name", "mine")
    assert "4 of 6 configurations a model, 4 trials" in out and "experiment   elsewhere/mine\n" in out
    assert not Path("elsewhere").exists()


SHAPES = {
    "flag": (
        "",
        ("--shape", "uniform"),
        "uniform",
        "uniform: one MLP width for all layers, and one of 1, 2, 4 KV groups in each",
    ),
    "default number": (
        "",
        ("--shape", "aligned"),
        "aligned-64",
        "aligned: MLP widths in multiples of 64, at least one KV group",
    ),
    "number for the space": ("aligned", ("--align", "8"), "aligned-8", "aligned: MLP widths in multiples of 8, "),
    "flag and space agree": ("uniform", ("--shape", "uniform"), "uniform", "uniform: "),
    "free": ("", (), "free", ""),
}


@pytest.mark.parametrize(("in_space", "flags", "shape", "says"), SHAPES.values(), ids=SHAPES)
def test_plan_of_a_shape(
    in_space: str, flags: tuple[str, ...], shape: str, says: str, plan_text: Callable[..., str]
) -> None:
    text = (search_space.folder() / "smoke.yaml").read_text() + (f"shape: {in_space}\n" if in_space else "")
    Path("mine.yaml").write_text(text)
    out = plan_text("--model", "tiny-llama", "--search-space", "mine.yaml", "--tasks", "piqa", *flags)
    name = "tiny-llama-20-mine" + ("" if shape == "free" else f"-{shape}")
    assert f"experiment   ray_results/{name}\n" in out
    rows = [line for line in out.splitlines() if line.startswith("shape ")]
    assert [row.startswith(f"shape        {says}") for row in rows] == [True] * (shape != "free")


def test_what_is_removable_depends_on_the_shape(plan_text: Callable[..., str]) -> None:
    """Of tiny-llama, 5 layers of 4 KV groups of 3,072 and 64 channels of 192 each."""
    removable = []
    for flags in ((), ("--shape", "aligned", "--align", "16"), ("--shape", "aligned"), ("--shape", "uniform")):
        row = next(line for line in plan_text(*TINY, *flags).splitlines() if line.startswith("tiny-llama "))
        removable.append(int(row.split()[3].replace(",", "")))
    groups = 5 * 3 * 3072
    assert removable == [19 * 3072 + 5 * 64 * 192, groups + 5 * 48 * 192, groups, groups + 5 * 63 * 192]


@pytest.mark.slow
def test_plan_of_several_ratios_and_shapes(plan_text: Callable[..., str]) -> None:
    """Each ratio is a row, and its trials are those of the ratio alone; passes and baseline are shared."""
    text = (search_space.folder() / "smoke.yaml").read_text()
    Path("mine.yaml").write_text(f"{text}\npruning_ratio: [0.1, 0.3]\nshape: [free, aligned-16]\n")
    out = plan_text("--model", "tiny-llama", "--search-space", "mine.yaml", "--gpus-per-trial", "0")
    assert "= 24 configurations a model, 24 trials" in out and "pruning_ratio 0.1, 0.3" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("tiny-llama@")]
    total = int(rows[0][1].replace(",", ""))
    assert [row[0] for row in rows] == ["tiny-llama@0.1", "tiny-llama@0.3"]
    assert [row[2] for row in rows] == [f"{int(ratio * total):,}" for ratio in (0.1, 0.3)]
    cost = table(out)
    assert (cost["importance"][0], cost["pruning"][0], cost["perplexity"][0]) == ("2", "24", "25")
    trials: dict[float, set[object]] = {}
    plan = make_plan(SearchSettings(("tiny-llama",), "mine.yaml", gpus_per_trial=0))
    assert plan.experiment_dir.name == "tiny-llama-10+30-mine-free+aligned-16"
    for spec in plan.trials:
        trials.setdefault(spec.config.pruning_ratio, set()).add(spec)
    Path("mine.yaml").write_text(f"{text}\nshape: [free, aligned-16]\n")
    for ratio, members in trials.items():
        alone = make_plan(SearchSettings(("tiny-llama",), "mine.yaml", pruning_ratio=ratio, gpus_per_trial=0))
        assert set(alone.models[0].trials) == members
    optuna = ("--search", "optuna", "--num-trials", "5")
    Path("mine.yaml").write_text(f"{text}\npruning_ratio: [0.1, 0.3]\n")
    out = plan_text("--model", "tiny-llama", "--search-space", "mine.yaml", *optuna)
    assert "5 of 6 configurations a model and pruning ratio, 10 trials" in out


def test_shapes_that_are_the_same_for_a_model(refusal: Callable[..., str]) -> None:
    text = (search_space.folder() / "smoke.yaml").read_text()
    Path("mine.yaml").write_text(f"{text}\nshape: [aligned, aligned-64]\n")
    sentence = refusal("--model", "tiny-llama", "--search-space", "mine.yaml")
    assert "shape lists aligned, aligned-64, of which two are the same here" in sentence


def test_a_method_is_asked_about_the_shape_that_nobody_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def uniform_alone(name: str) -> Method:
        return replace(load_method(name), shapes=("uniform",))

    monkeypatch.setattr(preflight, "load_method", uniform_alone)
    make_plan(SearchSettings(("tiny-llama",), "smoke", limit=5, shape="uniform"))
    with pytest.raises(UserError, match="use shape uniform, or another method"):
        make_plan(SearchSettings(("tiny-llama",), "smoke", limit=5))


@pytest.mark.parametrize("shape", ["free", "aligned-16", "uniform", "uniform-8"])
def test_the_command_for_a_row_searches_its_shape(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the analysis prints to run a configuration again is the same trial, of a large model too."""
    if shape == "free":
        monkeypatch.setattr(shapes, "LARGE_PARAMS", 1)
    kind, _, number = shape.partition("-")
    settings = SearchSettings(("tiny-llama",), "smoke", shape=kind, align=int(number) if number else None, limit=5)
    (model,) = make_plan(settings).models
    spec = model.trials[-1]
    rows = frame([TrialRecord(spec.key, "tiny-llama", spec.config, "complete")], tmp_path)
    text = export.command(Model("tiny-llama", rows, source=model.run.to_dict()), rows.iloc[0])
    assert text is not None
    space, again = text.splitlines()
    subprocess.run(["bash", "-c", space], check=True)
    args = search.parser().parse_args(shlex.split(again)[2:])
    assert make_plan(settings_from(vars(args))).trials == (spec,)


def test_large_models_are_aligned_where_no_shape_is_named(
    monkeypatch: pytest.MonkeyPatch, plan_text: Callable[..., str]
) -> None:
    monkeypatch.setattr(shapes, "LARGE_PARAMS", 160_000)  # between tiny-llama and tiny-qwen2
    monkeypatch.setattr(shapes, "LARGE_ALIGN", 8)
    models, names = [], ("tiny-llama", "tiny-qwen2")
    for name in names:
        models += ["--model", name]
    small, large = make_plan(SearchSettings(names, "smoke", limit=5)).models
    assert (small.shapes, large.shapes) == (("free",), ("aligned-8",))
    given = make_plan(SearchSettings(("tiny-qwen2",), "smoke", limit=5, shape="aligned", align=8)).models[0]
    assert given.trials == large.trials
    out = plan_text(*models, "--search-space", "smoke", "--limit", "5")
    assert "free: each layer has its own widths (tiny-llama); on a GPU it took 2.2 times" in out
    assert "aligned: MLP widths in multiples of 8, at least one KV group in every layer (tiny-qwen2)" in out
    assert make_plan(SearchSettings(names, "smoke", limit=5, shape="free")).models[1].shapes == ("free",)
    uniform = make_plan(SearchSettings(names, "smoke", limit=5, shape="uniform")).models
    assert [model.shapes for model in uniform] == [("uniform",), ("uniform-8",)]
    assert make_plan(SearchSettings(names, "smoke", limit=5, align=4)).models[0].shapes == ("aligned-4",)


@pytest.mark.slow
def test_models_of_different_size_get_different_numbers(
    monkeypatch: pytest.MonkeyPatch, plan_text: Callable[..., str]
) -> None:
    monkeypatch.setattr(shapes, "LARGE_PARAMS", 160_000)  # between tiny-llama and tiny-mistral
    monkeypatch.setattr(shapes, "LARGE_ALIGN", 8)
    monkeypatch.setattr(shapes, "SMALL_ALIGN", 16)
    models = ("--model", "tiny-llama", "--model", "tiny-qwen2")
    out = plan_text(*models, "--search-space", "smoke", "--shape", "aligned")
    assert "shape        aligned: MLP widths in multiples of 16 (tiny-llama); 8 (tiny-qwen2), at least" in out
    assert "ray_results/tiny-llama+tiny-qwen2-20-smoke-aligned\n" in out
    out = plan_text(*models, "--search-space", "smoke", "--shape", "aligned", "--align", "4")
    assert "multiples of 4, at least" in out and "-smoke-aligned-4\n" in out


@pytest.mark.parametrize(
    ("trial_gib", "slots", "says"),
    [
        (30, 2, r"needs about 30\.0 GiB.*has 24\.0 GiB"),
        (22, 1, r"needs about 22\.0 GiB of memory and 21\.0 GiB of 24\.0 GiB are free"),
        (10, 4, r"4 trials at once.*21\.0 GiB of 24\.0 GiB are free; let at most 2 run at once"),
        (10, 2, None),
    ],
)
def test_trials_that_do_not_fit_into_memory_are_refused(trial_gib, slots, says):
    refused = pytest.raises(UserError, match=says) if says else contextlib.nullcontext()
    with refused:
        check_memory(trial_gib * 2**30, slots, Memory(24 * 2**30, 21 * 2**30), 4)


def test_draws_and_texts_are_the_trials_of_runs_with_those(
    tmp_path: Path, refusal: Callable[..., str], plan_text: Callable[..., str]
) -> None:
    """By their keys, whichever says them; what is the run's has no name of its own; and each is run again by its command."""
    other, space = tmp_path / "other.txt", tmp_path / "space.yaml"
    other.write_text(embedded.calibration_text()[:20_000])
    lines = ["search: grid", "method: [taylor, magnitude]", "seq_len: 16", "num_samples: 8", "seeds: [0, 2]"]
    space.write_text("\n".join([*lines, f"calibration: [embedded, embedded+{other}]"]))
    settings = SearchSettings(("tiny-llama",), str(space), gpus_per_trial=0, storage_path=str(tmp_path / "kept"))
    plan = make_plan(settings)
    (model,) = plan.models
    models = (experiment.write(plan.held, plan, []).about or {})["models"]
    assert study_of_search(plan.experiment_dir, {"models": models}, {}, []).models["tiny-llama"].seedless == (
        "magnitude",
    )
    names = ["taylor-s16-n8", "magnitude-s16-n8", "taylor-s16-n8-cembedded+other"]
    names += ["taylor-s16-n8-r2", "taylor-s16-n8-r2-cembedded+other"]
    keys = {spec.config.name: spec.key for spec in model.trials}
    assert sorted(keys) == sorted(names)
    space.write_text("\n".join(lines[:4]))
    alone = replace(settings, calibration=f"embedded+{other}", pruning_ratio=0.2)
    (mixed,) = make_plan(alone).models
    assert mixed.run.calibration == f"embedded+{other}"
    assert {spec.config.name: spec.key for spec in mixed.trials}["taylor-s16-n8"] == keys[
        "taylor-s16-n8-cembedded+other"
    ]
    spec = next(spec for spec in model.trials if spec.config.name == names[-1])
    rows = frame([TrialRecord(spec.key, "tiny-llama", spec.config, "complete")], tmp_path)
    again = export.command(Model("tiny-llama", rows, source=model.run.to_dict()), rows.iloc[0])
    assert again is not None
    subprocess.run(["bash", "-c", again.splitlines()[0]], check=True)
    args = search.parser().parse_args(shlex.split(again.splitlines()[1])[2:])
    assert [one.key for one in make_plan(settings_from(vars(args))).trials] == [spec.key]
    config = next(config for config in model.configs if config.name == names[0])  # the mean of its draws
    rows = frame([TrialRecord(key=keys[names[0]], model="tiny-llama", config=config, status="complete")], tmp_path)
    again = export.command(Model("tiny-llama", rows, source=model.run.to_dict()), rows.iloc[0], [0, 2])
    assert again is not None
    subprocess.run(["bash", "-c", again.splitlines()[0]], check=True)
    args = search.parser().parse_args(shlex.split(again.splitlines()[1])[2:])
    both = {keys["taylor-s16-n8"], keys["taylor-s16-n8-r2"]}
    assert {one.key for one in make_plan(settings_from(vars(args))).trials} == both
    space.write_text("\n".join([*lines, f"calibration: [embedded, embedded+{other}]"]))
    out = plan_text("--model", "tiny-llama", "--search-space", space)
    assert "4 runs of the sample text for each of: gradient (one per seq_len, seed, calibration)" in out
    assert "2 texts, each with seeds 0, 2: as many runs" in out and "(equal parts of 2 texts, in turn)" in out
    sentence = refusal("--model", "tiny-llama", "--search-space", space, "--calibration", "c4")
    assert "--calibration is c4, but " in sentence and "list it there, too" in sentence
    assert "--seeds is 0, 1, but" in refusal("--model", "tiny-llama", "--search-space", space, "--seeds", "0,1")
    other.write_text(embedded.calibration_text())
    space.write_text("\n".join([*lines, f"calibration: [embedded, {other}]"]))
    assert "of which two have the same content" in refusal("--model", "tiny-llama", "--search-space", space)
