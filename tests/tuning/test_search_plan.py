"""The plan of a search: its numbers are those of the model's own files, of the trials and of what is left to do; in ten lines and
as a whole."""

from __future__ import annotations

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
from transformers import AutoConfig, AutoModelForCausalLM

from tests.search_folders import TINY, TINY_FOLDER, data_folder, model_folder
from tests.searches import finished
from tune_prune import embedded
from tune_prune.analysis import export
from tune_prune.analysis.input.rows import frame
from tune_prune.analysis.input.study import Model
from tune_prune.commands import plan_page, search
from tune_prune.commands.flags import settings_from
from tune_prune.commands.options import CommandLine
from tune_prune.core.config import EvaluationProtocol, Samples
from tune_prune.core.ledger import Ledger, write_baselines
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import FolderStore
from tune_prune.data.task_files import TaskSource
from tune_prune.evaluation.zero_shot import build_suite
from tune_prune.models import catalog, loading
from tune_prune.models.runner import devices
from tune_prune.pruning import shapes
from tune_prune.trial.context import TrialContext
from tune_prune.trial.statistics import needs_of
from tune_prune.trial.trial import prepare
from tune_prune.tuning import experiment
from tune_prune.tuning import space as search_space
from tune_prune.tuning.plan import ModelPlan, Plan, SearchSettings
from tune_prune.tuning.preflight import make_plan
from tune_prune.tuning.work import TrialSpec

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
    assert "plan         tiny-llama: 6 ways to prune it by 25%, each tested; " in out
    assert "results      ray_results/tiny-llama-25-smoke-limit10\n" in out
    assert "; 2 toy benchmarks (piqa, boolq), at most 10 questions each\n" in out
    assert "a trial takes 1 CPU, 0 GPU and about" in out and f"; {CPUS} at once;" in out


FEW = (*TINY, "--tasks", "piqa")
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
    memory = next(line for line in out.splitlines() if line.startswith("peak "))
    total, process, weights, *_ = (int(number) for number in re.findall(r"(\d+) MiB", memory))
    assert total > process + weights


def test_stopping_early_makes_the_cost_an_upper_bound(plan_text: Callable[..., str]) -> None:
    assert "an upper bound: asha stops trials early" in plan_text(*FEW, "--scheduler", "asha")
    alone, both = (plan_text(*FEW, "--kl-filter", *more) for more in ((), ("--scheduler", "race")))
    assert "scheduler none, KL filter\n" in alone and "an upper bound: the KL filter stops trials early" in alone
    assert "scheduler race, KL filter\n" in both and "race and the KL filter stop trials early" in both


@pytest.mark.parametrize(("speed", "fast"), [(6.0, True), (0.2, False)])
def test_the_default_data_type_is_that_of_the_weights_where_the_cpu_gains_by_it(
    speed: float, fast: bool, plan_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder that says bfloat16, float16 or float32, on a CPU with instructions for bfloat16 or without; --dtype wins."""
    folder, data = model_folder(tmp_path / "stored"), data_folder(tmp_path / "data")
    monkeypatch.setattr(devices, "bfloat16_speed", lambda: speed)
    monkeypatch.setattr(plan_page, "bfloat16_speed", lambda: speed)
    where = {"data_dir": str(data), "calibration": "embedded", "limit": 5, "gpus_per_trial": 0, "tasks": ("piqa",)}
    settings = SearchSettings((str(folder),), "smoke", **where)
    about, seen = json.loads((folder / "config.json").read_text()), {}
    for stored in ("float32", "float16", "bfloat16"):
        (folder / "config.json").write_text(json.dumps(about | {"dtype": stored}))
        seen[stored] = make_plan(settings).models[0].run.dtype
    half = "bfloat16" if fast else "float32"
    assert seen == {"float32": "float32", "float16": half, "bfloat16": half}
    assert make_plan(replace(settings, dtype="bfloat16")).models[0].run.dtype == "bfloat16"
    argv = ("--model", str(folder), "--data-dir", str(data), "--calibration", "embedded", "--gpus-per-trial", "0")
    out = plan_text(*argv, "--search-space", "smoke", "--limit", "5", "--tasks", "piqa")
    assert f"weights are stored in bfloat16; this CPU multiplies matrices {speed:.1f} times" in out


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
    assert "optuna tries 4 of 6 ways to prune it by 20%" in out and "results      elsewhere/mine\n" in out
    assert not Path("elsewhere").exists()


SHAPES = {
    "flag": (
        "",
        ("--shape", "uniform"),
        "uniform",
        "uniform: loads in whatever loads the family",
    ),
    "default number": (
        "",
        ("--shape", "aligned"),
        "aligned-64",
        "aligned-64: fast on a GPU",
    ),
    "number for the space": ("aligned", ("--align", "8"), "aligned-8", "aligned-8: fast on a GPU"),
    "GPUs": (
        "",
        ("--tensor-parallel", "2", "--align", "3"),
        "aligned-3-tp2",
        "aligned-3-tp2: for vLLM on 2 GPUs; fast on a GPU",
    ),
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
    assert f"results      ray_results/{name}\n" in out
    rows = [line for line in out.splitlines() if line.startswith("shape ")]
    assert [row.startswith(f"shape        {says}") for row in rows] == [True] * (shape != "free")


@pytest.mark.slow
def test_plan_of_several_ratios_and_shapes(plan_text: Callable[..., str]) -> None:
    """Each ratio is a row, and its trials are those of the ratio alone; passes and baseline are shared."""
    text = (search_space.folder() / "smoke.yaml").read_text()
    Path("mine.yaml").write_text(f"{text}\npruning_ratio: [0.1, 0.3]\nshape: [free, aligned-16]\n")
    out = plan_text("--model", "tiny-llama", "--search-space", "mine.yaml", "--gpus-per-trial", "0")
    assert "12 ways to prune it by 10% and 30%, each tested; 24 trials" in out and "pruning_ratio 0.1, 0.3" in out
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
    assert "optuna tries 5 of 6 ways to prune it by 10% and 30%, each tested; 10 trials" in out


def rerun(model: ModelPlan, spec: TrialSpec, folder: Path, *draws: int) -> Plan:
    """The plan of what the analysis prints to run the configuration of a trial again, or all of its draws."""
    rows = frame([TrialRecord(spec.key, "tiny-llama", spec.config, "complete")], folder)
    text = export.command(Model("tiny-llama", rows, source=model.run.to_dict()), rows.iloc[0], draws)
    assert text is not None
    space, again = text.splitlines()
    subprocess.run(["bash", "-c", space], check=True)
    return make_plan(settings_from(vars(CommandLine("search").parse_args(shlex.split(again)[2:]))))


@pytest.mark.parametrize("shape", ["free", "uniform-8"])
def test_the_command_for_a_row_searches_its_shape(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model's shape, which nobody named, is searched again, too."""
    if shape == "free":
        monkeypatch.setattr(shapes, "LARGE_PARAMS", 1)
    kind, _, number = shape.partition("-")
    settings = SearchSettings(
        ("tiny-llama",), "smoke", shape=kind, align=int(number) if number else None, tasks=("piqa",)
    )
    (model,) = make_plan(settings).models
    assert rerun(model, model.trials[-1], tmp_path).trials == (model.trials[-1],)


def test_large_models_are_aligned_where_no_shape_is_named(
    monkeypatch: pytest.MonkeyPatch, plan_text: Callable[..., str]
) -> None:
    monkeypatch.setattr(shapes, "LARGE_PARAMS", 160_000)  # between tiny-llama and tiny-qwen2
    monkeypatch.setattr(shapes, "LARGE_ALIGN", 8)
    models, names = [], ("tiny-llama", "tiny-qwen2")
    for name in names:
        models += ["--model", name]
    small, large = make_plan(SearchSettings(names, "smoke", tasks=("piqa",), limit=5)).models
    assert (small.shapes, large.shapes) == (("free",), ("aligned-8",))
    given = make_plan(
        SearchSettings(("tiny-qwen2",), "smoke", tasks=("piqa",), limit=5, shape="aligned", align=8)
    ).models[0]
    assert given.trials == large.trials
    out = plan_text(*models, "--search-space", "smoke", "--limit", "5", "--tasks", "piqa")
    assert (
        "free: any widths, for transformers, vLLM and llama.cpp; slow on a GPU" in out and "aligned-8: fast on" in out
    )
    assert make_plan(SearchSettings(names, "smoke", tasks=("piqa",), limit=5, shape="free")).models[1].shapes == (
        "free",
    )
    uniform = make_plan(SearchSettings(names, "smoke", tasks=("piqa",), limit=5, shape="uniform")).models
    assert [model.shapes for model in uniform] == [("uniform",), ("uniform-8",)]
    assert make_plan(SearchSettings(names, "smoke", tasks=("piqa",), limit=5, align=4)).models[0].shapes == (
        "aligned-4",
    )


def test_draws_and_texts_are_the_trials_of_runs_with_those(tmp_path: Path, refusal: Callable[..., str]) -> None:
    """Keys are equal whether the space or the run says draw and text; each trial is run again by its printed command."""
    other, space = tmp_path / "other.txt", tmp_path / "space.yaml"
    other.write_text(embedded.calibration_text()[:20_000])
    lines = ["search: grid", "method: [taylor, magnitude]", "seq_len: 16", "num_samples: 8", "seeds: [0, 2]"]
    whole = "\n".join([*lines, f"calibration: [embedded, embedded+{other}]"])
    space.write_text(whole)
    kept = {"gpus_per_trial": 0, "storage_path": str(tmp_path / "kept"), "tasks": ("piqa",)}
    settings = SearchSettings(("tiny-llama",), str(space), **kept)
    (model,) = make_plan(settings).models
    names = ["taylor-s16-n8", "magnitude-s16-n8", "taylor-s16-n8-cembedded+other"]
    names += ["taylor-s16-n8-r2", "taylor-s16-n8-r2-cembedded+other"]
    trials = {spec.config.name: spec for spec in model.trials}
    assert sorted(trials) == sorted(names)
    space.write_text("\n".join(lines[:4]))
    (mixed,) = make_plan(replace(settings, calibration=f"embedded+{other}", pruning_ratio=0.2)).models
    keys = {spec.config.name: spec.key for spec in mixed.trials}
    assert keys["taylor-s16-n8"] == trials["taylor-s16-n8-cembedded+other"].key
    assert [one.key for one in rerun(model, trials[names[-1]], tmp_path).trials] == [trials[names[-1]].key]
    both = {trials["taylor-s16-n8"].key, trials["taylor-s16-n8-r2"].key}
    assert {one.key for one in rerun(model, trials[names[0]], tmp_path, 0, 2).trials} == both
    space.write_text(whole)
    sentence = refusal("--model", "tiny-llama", "--search-space", space, "--calibration", "c4")
    assert "--calibration is c4, but " in sentence and "list it there, too" in sentence
    other.write_text(embedded.calibration_text())
    space.write_text("\n".join([*lines, f"calibration: [embedded, {other}]"]))
    assert "of which two have the same content" in refusal("--model", "tiny-llama", "--search-space", space)


# --- ten lines


def rows_of(out: str) -> dict[str, str]:
    """name -> what it says, of a plan whose rows are lines."""
    rows = [(line[:12].strip(), line[13:]) for line in out.partition("\n\ndry run")[0].splitlines()]
    assert all(name for name, _ in rows), out
    return dict(rows)


def test_ten_lines_answer_what_is_asked_first(plan_text: Callable[..., str]) -> None:
    rows = rows_of(plan_text(*TINY, "--gpus-per-trial", "0", "--inline", verbose=False))
    assert list(rows) == ["plan", "time", "memory", "model", "sample text", "tests", "results", "details"]
    (model,) = make_plan(SearchSettings(("tiny-llama",), "smoke", gpus_per_trial=0, inline=True)).models
    count, total = len(model.trials), model.geometry.total_params
    assert rows["plan"] == f"tiny-llama: {count} ways to prune it by 20%, each tested; one after the other"
    assert re.fullmatch(rf"{SECONDS} to {SECONDS}; by the speed measured here", rows["time"])
    assert re.fullmatch(r"\S+ [MG]iB a trial: fits \(\S+ [MGT]iB are free\)", rows["memory"])
    assert rows["model"] == f"{total:,} parameters, {int(0.2 * total):,} of them to go"
    assert rows["tests"] == "perplexity on the embedded text; 7 toy benchmarks, all questions"
    assert rows["results"] == "ray_results/tiny-llama-20-smoke" and rows["details"].startswith("--verbose ")


def test_one_count_stands_everywhere(plan_text: Callable[..., str]) -> None:
    """12 ways of each of two models, and the training of two more of each: neither 24 nor 14."""
    argv = ("--model", "tiny-llama", "--model", "tiny-qwen2", "--search-space", "recommended", "--tasks", "piqa")
    out = plan_text(*argv, "--recover", "2", verbose=False)
    says = "2 models: 12 ways to prune each by 20%, each tested; then the 2 most promising of each model get a short training"
    assert f"plan         {says}; at most 28 trials; " in out
    whole = plan_text(*argv, "--recover", "2")
    assert "12 ways to prune each by 20%" in whole and "at most 28 trials" in whole


@pytest.mark.parametrize(
    ("lines", "flags", "says"),
    [
        ("seeds: [0, 1]", (), "2 ways to prune it by 20%, each tested 2 times, with other sample text; 4 trials; "),
        ("", ("--draws", "3"), "each tested once; those that could be the best up to 3 times, "),
        ("pruning_ratio: [0.1, 0.3]", (), "2 ways to prune it by 10% and 30%, each tested; 4 trials; "),
        ("", ("--search", "optuna", "--num-trials", "1"), "optuna tries 1 of 2 ways to prune it by 20%, each tested; "),
    ],
)
def test_what_is_tested_how_often(lines: str, flags: tuple[str, ...], says: str, plan_text: Callable[..., str]) -> None:
    Path("mine.yaml").write_text(f"search: grid\nmethod: [taylor, random]\nseq_len: 16\nnum_samples: 8\n{lines}\n")
    out = plan_text("--model", "tiny-llama", "--search-space", "mine.yaml", "--tasks", "piqa", *flags, verbose=False)
    assert says in rows_of(out)["plan"]


@pytest.mark.parametrize(
    ("lines", "width", "warns"),
    [
        ("compensation: [none, least_squares]\nrefit_tokens: [1024, 4096]", 1500, True),
        ("compensation: least_squares\nrefit_tokens: [1500, 4096]", 1500, False),
        ("", 20_000, False),  # more than a repair would take that is not made
    ],
)
def test_a_repair_by_fewer_tokens_than_an_mlp_is_wide_is_warned_of(
    lines: str, width: int, warns: bool, plan_text: Callable[..., str], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "wide", intermediate_size=width)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    Path("mine.yaml").write_text(f"search: grid\nmethod: taylor\nseq_len: 16\nnum_samples: 8\n{lines}\n")
    data = ("--data-dir", str(data_folder(tmp_path / "data")), "--calibration", "embedded", "--tasks", "piqa")
    out = plan_text("--model", str(folder), "--search-space", "mine.yaml", *data, verbose=False)
    said = " ".join(out.split())
    line = "wide: a repair by 1,024 tokens gains little, as an MLP is wider (1,500); set refit_tokens to 3,000 or more"
    assert (said.count("warning"), said.count(line)) == (warns, warns)


@pytest.mark.parametrize("flag", [(), ("--verbose",)])
def test_no_line_is_wider_than_a_screen(flag: tuple[str, ...], printed: Callable[..., str], tmp_path: Path) -> None:
    folder, data = model_folder(tmp_path / "a-model-with-a-name-that-is-rather-long"), data_folder(tmp_path / "data")
    argv = ("--model", folder, "--data-dir", data, "--search-space", "extended", "--shape", "aligned", "--dry-run")
    out = printed(search.main, *argv, "--calibration", "embedded", *flag)
    assert max(map(len, out.splitlines())) <= plan_page.WIDTH, out
