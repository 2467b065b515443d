"""The model card: every number of the manifest with the right digits, loading lines that load."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from matplotlib.axes import Axes
from statsmodels.stats.proportion import proportion_confint

from tune_prune import embedded
from tune_prune.checkpoint import manifest as manifests
from tune_prune.checkpoint.card import layers_figure, render, write_card
from tune_prune.checkpoint.generation_speed import GenerationSpeed
from tune_prune.checkpoint.layers import Sizes
from tune_prune.checkpoint.manifest import Base, Manifest, WeightFile
from tune_prune.commands.options import CommandLine
from tune_prune.core.config import (
    NOT_REFITTED,
    NOT_TRAINED,
    REFITTED,
    TRAINED,
    ZERO_SHOT_TASKS,
    EvaluationProtocol,
    ModelRun,
    PruningConfig,
)
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.data.perplexity_text import WIKITEXT2
from tune_prune.data.sources import MeasuredOn
from tune_prune.models.geometry import Geometry
from tune_prune.pruning.groups import PruningPlan

HUB_ID = "meta-llama/Meta-Llama-3-8B"
DENSE = Sizes(8_030_261_248, 16_060_522_496, 131_072, 7_504_658_432)
PRUNED = Sizes(6_424_211_456, 12_848_422_912, 104_448, 5_898_608_640)
FILES = {
    "model-00001-of-00002.safetensors": WeightFile(9_974_246_912, "a" * 64),
    "model-00002-of-00002.safetensors": WeightFile(2_874_250_000, "b" * 64),
}
SPEED = {
    "dense": GenerationSpeed(24_512.3, 61.52, 16_532_111_222, 480, 32, 2, 7, "bfloat16", "NVIDIA H200"),
    "pruned": GenerationSpeed(30_640.4, 76.9, 13_225_688_978, 480, 32, 2, 7, "bfloat16", "NVIDIA H200"),
}
METRICS: dict[str, float | None] = {
    "ppl": 10.2345,
    "acc_mean": 0.63124,
    "acc_mean_stderr": 0.00611,
    "chance_acc_mean": 0.357,
    "grad_mean_ratio": 3.0,
    **{f"acc_{task}": 0.6 + place / 100 for place, task in enumerate(ZERO_SHOT_TASKS)},
    **{f"acc_{task}_stderr": 0.0123 for task in ZERO_SHOT_TASKS},
}
BASELINE: dict[str, float | None] = {
    "ppl": 6.137,
    "acc_mean": 0.7021,
    "acc_mean_stderr": 0.0058,
    **{f"acc_{task}": 0.8 for task in ZERO_SHOT_TASKS},
    **{f"acc_{task}_stderr": 0.0111 for task in ZERO_SHOT_TASKS},
}
RUN = ModelRun(
    HUB_ID,
    "llama",
    None,
    "/home/me/text/wiki.train.txt",
    "/home/me/data",
    EvaluationProtocol(limit=1500),
    3,
    "bfloat16",
)
# Layer by layer, of 4 groups and 10 channels: whole, a part, no attention, no MLP, dropped, a part.
GROUPS = ((0, 1, 2, 3), (1, 3), (), (0,), (), (1, 2, 3))
CHANNELS = (tuple(range(10)), (2, 3, 7), tuple(range(9)), (), (), (5,))
PLAN = PruningPlan(GROUPS, CHANNELS, 1_606_052_249, 1_606_049_792, DENSE.params)


def geometry(layers: int = 6, kv_heads: int = 4, width: int = 10) -> Geometry:
    each = ((kv_heads,) * layers, (width,) * layers, (10,) * layers, (3,) * layers, (0,) * layers)
    return Geometry(DENSE.params, 32, 4, 2, *each, (0,))


GEOMETRY = geometry()
BASE = Base(HUB_ID, "llama", "8cde5ca", "0123456789abcdef", "llama", DENSE.params, layers=6)
SIZES = {"dense": DENSE, "pruned": PRUNED}


def manifest(**changed: Any) -> Manifest:
    """The manifest of a pruned Llama of six layers; `changed` are fields."""
    fields: dict[str, Any] = {
        "format": "hf",
        "base": BASE,
        "config": PruningConfig("blockwise", 64, 1256),
        "source": RUN,
        "plan": PLAN,
        "structure": changed.get("plan", PLAN).structure,
        "dropped_layers": (4,),
        "params": PRUNED.params,
        "files": FILES,
        "sizes": SIZES,
        "metrics": METRICS,
        "baseline": BASELINE,
        "speed": SPEED,
        "versions": {"torch": "2.13.0", "transformers": "5.23.0", "tune_prune": "0.1.0"},
        "created": "2026-11-21",
        "schema_version": 1,
    }
    return Manifest(**(fields | changed))


def card(tmp_path: Path, saved_config: dict[str, Any] | None = None, **changed: Any) -> str:
    """The card's text, for a checkpoint with that config.json."""
    if saved_config is not None:
        (tmp_path / "config.json").write_text(json.dumps(saved_config))
    return render(tmp_path, manifest(**changed), GEOMETRY)


def front_matter(text: str) -> dict[str, Any]:
    _, matter, _ = text.split("---\n", 2)
    return yaml.safe_load(matter)


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head; every row must have as many as the head."""
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (body,) = [part for part in section if part.startswith(f"{heading}\n")]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in body.splitlines() if line.startswith("| ")
    ]
    assert {len(row) for row in rows} == {len(rows[0])}
    return rows[1:]


def code(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_front_matter_and_first_sentence(tmp_path: Path) -> None:
    text = card(tmp_path)
    assert front_matter(text) == {
        "base_model": HUB_ID,
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pruned", "structured-pruning", "tune_prune", "llama"],
    }
    assert "\n# Meta-Llama-3-8B, pruned by 20.0%\n" in text and "8.03B parameters became 6.42B." in text
    assert f"[{HUB_ID}](https://huggingface.co/{HUB_ID}) with **20.0% of its parameters removed**" in text
    stated = {"license": "other", "license_name": "acme-1", "license_link": "https://acme.org/1"}
    local = card(tmp_path, base=replace(BASE, model="my_llama", label="my_llama", license=stated))
    assert "base_model" not in front_matter(local) and "huggingface.co" not in local
    assert front_matter(local).items() >= stated.items()
    assert dict(table(local, "How it was made"))["Licence"] == "[acme-1](https://acme.org/1), that of the base model"


def test_quality_has_every_number_with_its_error(tmp_path: Path) -> None:
    text = card(tmp_path, measured_on=MeasuredOn(protocol=2, text=WIKITEXT2[0], tasks={}))
    rows = table(text, "Quality")
    assert rows[0] == ["Perplexity (lower is better)", "6.14", "10.23", "× 1.67"]
    assert rows[1] == ["**Mean accuracy**", ".7021 ± .0058", ".6312 ± .0061", "89.9%"]
    assert [row[0].partition(" ")[0] for row in rows[2:]] == list(ZERO_SHOT_TASKS)
    assert rows[3] == ["piqa (acc_norm)", ".8000 ± .0111", ".6100 ± .0123", "76.2%"]
    assert "in bfloat16" in text and "raw WikiText-2 test split, in windows of at most 2,048 tokens" in text
    assert "the first 1,500 questions of each of lm-eval's zero-shot tasks (chance: .3570 on average)" in text


MINE = "the text in `text/wikitext2-raw.test.txt`"
# The folder of data, the tasks, the content of the perplexity text, and what the card says of them.
DATA: list[tuple[str | None, tuple[str, ...], str | None, tuple[str, ...]]] = [
    ("/data", ("piqa", "my_quiz"), "0123456789abcdef", ("tasks and of the user's own my_quiz", f"{MINE} (not recognised as")),
    ("/data", ("my_quiz", "mine"), WIKITEXT2[-1], ("of each of the user's own my_quiz, mine", "the raw WikiText-2 test split")),
    (None, ("piqa", "lambada_openai"), None, ("of each of lm-eval's zero-shot tasks", "the raw WikiText-2 test split")),
    ("embedded", ZERO_SHOT_TASKS, None, ("perplexity text embedded in tune_prune", "of the tasks embedded in tune_prune")),
]  # fmt: skip


@pytest.mark.parametrize(("data_dir", "tasks", "content", "said"), DATA)
def test_what_was_measured_on_is_said_by_its_content(
    tmp_path: Path, data_dir: str | None, tasks: tuple[str, ...], content: str | None, said: tuple[str, ...]
) -> None:
    measured = None if content is None else MeasuredOn(protocol=2, text=content, tasks={})
    source = replace(RUN, data_dir=data_dir, protocol=EvaluationProtocol(tasks=tasks))
    text = card(tmp_path, source=source, measured_on=measured)
    assert "accuracy on all questions" in text and all(part in text for part in said)
    begun = replace(source, protocol=replace(source.protocol, bos=True))
    words = "; a BOS token begins every window and every question."
    assert words in card(tmp_path, source=begun, measured_on=measured) and words not in text


def test_an_accuracy_of_one_has_its_interval_and_unknown_numbers_are_dashes(tmp_path: Path) -> None:
    low, high = proportion_confint(240, 240, method="wilson")
    metrics = {"acc_mean": 1.0, "acc_mean_stderr": (high - low) / 2 / 1.959964}  # as the search's final table has it
    text = card(tmp_path, metrics=metrics, baseline=None)
    assert table(text, "Quality")[0][1:3] == ["–", f"1.0000 [{low:.4f}, 1.0000]".replace("0.", ".")]
    assert "± is one standard error; brackets hold Wilson's 95% interval. Measured by" in text
    broken = table(card(tmp_path, metrics={"ppl": float("inf")}, baseline={"ppl": 5.0}), "Quality")
    assert broken == [["Perplexity (lower is better)", "5.00", "inf", "–"]]
    text = card(tmp_path, metrics=None, baseline=None, source=None, speed=None)
    assert "**not measured**" in text and "tune-prune evaluate --model FOLDER" in text
    assert not re.search(r"## Speed|±|wiki|seed|the scores", text, flags=re.IGNORECASE)


def test_sizes_and_speeds(tmp_path: Path) -> None:
    text = card(tmp_path)
    assert table(text, "Size") == [
        ["Parameters", "8,030,261,248", "6,424,211,456", "80.0%"],
        ["On disk", "16.1 GB", "12.8 GB", "80.0%"],
        ["Memory per token of context (KV cache)", "131,072 B", "104,448 B", "79.7%"],
        ["Arithmetic per token (multiply-adds)", "7,504,658,432", "5,898,608,640", "78.6%"],
    ]
    assert table(text, "Speed") == [
        ["Prefill, tokens/s", "24,512", "30,640", "× 1.25"],
        ["Decode, tokens/s", "61.5", "76.9", "× 1.25"],
        ["Peak memory", "16.5 GB", "13.2 GB", "× 0.80"],
    ]
    assert "prompt of 480 tokens, 32 new tokens, batch size 2, median of 7, bfloat16 on NVIDIA H200" in text
    padded = Sizes(7_000_000_000, 14_000_000_000, 131_072, 6_500_000_000)
    sizes = SIZES | {"padded": padded}
    filled = card(tmp_path, {"model_type": "llama"}, format="hf-padded", sizes=sizes, params=padded.params)
    assert table(filled, "Size")[0] == ["Parameters", "8,030,261,248", "7,000,000,000", "87.2%"]
    assert "Without its zeros this model has 6,424,211,456 parameters (80.0%)." in filled and "zeros" not in text


def test_how_it_was_made(tmp_path: Path) -> None:
    text = card(tmp_path)
    made = dict(table(text, "How it was made"))
    assert made.pop("Licence").startswith("unknown: none was found in the base model's card")
    assert made == {
        "Base model": f"`{HUB_ID}`, revision `8cde5ca`, fingerprint `0123456789abcdef`",
        "Method": "`blockwise`",
        "Sample text": "1,256 samples of 64 tokens (removal losses: the first 251, divisor 5) of `wiki.train.txt`, seed 3",
        "Shape": "`free`",
        "Parameters removed": "20.0% asked, 20.00% reached (1,606,049,792 of 8,030,261,248)",
        "Layers": "5 of 6; dropped: 4; without attention: 2; without MLP: 3",
    }
    assert "Made on 2026-11-21 with torch 2.13.0, transformers 5.23.0, tune_prune 0.1.0." in text
    assert "/home/me" not in text  # a card is for publishing


@pytest.mark.parametrize("shape", ["free", "uniform"])
def test_the_command_makes_the_same_configuration(tmp_path: Path, shape: str) -> None:
    refit = {"compensation": "least_squares", "damping": 0.3} if shape == "uniform" else {}
    config = PruningConfig("layerwise", 32, 128, 0.25, removal_divisor=3, shape=shape, **refit)
    text = card(tmp_path, {"dtype": "bfloat16"}, config=config, format="hf-padded")
    program, command, *words = shlex.split(code(text, "sh")[-1].replace("\\\n", " "))
    assert (program, command) == ("tune-prune", "prune")
    args = CommandLine("prune").parse_args(words)
    own = {name: getattr(args, name) for name, row in HYPERPARAMETERS.items() if not row.of_run}
    assert PruningConfig(**{name: value for name, value in own.items() if value is not None}) == config
    assert (args.model, args.revision, args.calibration, args.seed) == (HUB_ID, "8cde5ca", "wiki.train.txt", 3)
    assert (args.dtype, args.format) == ("bfloat16", "hf-padded")


def test_loading_lines_of_each_format_and_that_they_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = code(card(tmp_path, {"auto_map": {"AutoConfig": "a.B"}}), "python")
    assert "trust_remote_code=True" in first and second.startswith("import tune_prune")
    (tmp_path / "config.json").unlink()
    gguf = card(tmp_path, format="gguf", files={"my llama.gguf": FILES[next(iter(FILES))]})
    assert "library_name" not in front_matter(gguf) and front_matter(gguf)["tags"][-1] == "gguf"
    assert code(gguf, "python") == [] and shlex.split(code(gguf, "sh")[0])[:3] == ["llama-cli", "-m", "my llama.gguf"]
    shutil.copytree(embedded.model_dir("tiny-llama"), tmp_path, dirs_exist_ok=True)
    write_card(tmp_path, manifest(), GEOMETRY)
    (lines,) = code((tmp_path / "README.md").read_text(encoding="utf-8"), "python")
    assert "trust_remote_code" not in lines and "tune_prune" not in lines
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(lines, "README.md", "exec"), {})
    assert len(printed.getvalue().split()) > 40


def test_written_files_are_those_of_the_manifest_that_is_read(tmp_path: Path) -> None:
    written = manifest()
    manifests.write(tmp_path, written)
    again = manifests.read(tmp_path)
    assert again is not None
    write_card(tmp_path, written, GEOMETRY)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "layers.png", manifests.MANIFEST]
    first = {name: (tmp_path / name).read_bytes() for name in ("README.md", "layers.png")}
    write_card(tmp_path, again, GEOMETRY)
    assert first == {name: (tmp_path / name).read_bytes() for name in first}
    text = first["README.md"].decode()
    assert "](layers.png)" in text and not re.search(r"\n\n\n|[ \t]\n|\{\{|\}\}|None|nan", text)


def test_the_picture_has_a_bar_for_what_every_layer_kept(tmp_path: Path) -> None:
    def bars(axes: Axes, label: str) -> dict[float, float]:
        containers = [container for container in axes.containers if container.get_label() == label]
        found = [bar for container in containers for bar in container.patches]
        return {round(bar.get_x() + bar.get_width() / 2, 6): bar.get_height() for bar in found}

    upper, lower = layers_figure(manifest(), GEOMETRY).axes
    assert bars(upper, "kept") == dict(enumerate([1.0, 0.5, 0.0, 0.25, 0.0, 0.75]))
    assert bars(lower, "kept") == dict(enumerate([1.0, 0.3, 0.9, 0.0, 0.0, 0.1]))
    for axes, title in ((upper, "KV groups: 41.7% kept"), (lower, "MLP channels: 38.3% kept")):
        assert axes.get_ylim() == (0, 1) and bars(axes, "whole layer dropped") == {4.0: 1.0}
        assert (axes.get_title(loc="left") or axes.get_title()) == title
    said = card(tmp_path)
    assert "KV groups kept: 41.7% in all, from 0.0% (layer 2) to 100.0% (layer 0)" in said
    assert "MLP channels kept: 38.3% in all, from 0.0% (layer 3) to 100.0% (layer 0)." in said


@pytest.mark.parametrize(
    "name", ["<script>x</script>|", "[x](javascript:x)", "a`b```\n```\n# c", "---\nlicense: mit", "\x1b[31m"]
)
def test_names_of_others_act_nowhere(name: str, tmp_path: Path) -> None:
    """A browser makes of names of the model, its revision, its licence and the calibration text what it makes of plain names."""

    def shown(name: str, link: str) -> tuple[str, list[str]]:
        stated = {"license": "other", "license_name": name, "license_link": link}
        base = replace(BASE, model=f"/home/{name}", label=name, revision=name, fingerprint=name, license=stated)
        run = replace(RUN, model=f"/home/{name}", calibration=f"/home/{name}", dtype=name)
        text = card(tmp_path, base=base, source=run)
        assert front_matter(text)["license_name"] == " ".join(name.split()) and "\x1b" not in text
        body = MarkdownIt("commonmark", {"html": True}).enable("table").render(text.split("---\n", 2)[2])
        return body, re.findall(r"<(\w+)|(?:href|src)=\"([^\"]*)", body)

    body, tags = shown(name, "javascript:alert(1)")
    assert tags == shown("plain", "other")[1]
    assert "script>x" not in body.replace("&lt;script&gt;x", "").replace("&lt;/script&gt;", "")
    assert ("a", "") in shown("plain", "https://example.org/licence")[1]


REFIT, BOTH = {"compensation": "least_squares"}, {"compensation": "least_squares", "recovery": "lora"}


@pytest.mark.parametrize(
    ("config", "notes", "words"),
    [
        ({}, [], "Not fine-tuned: no weight was trained"),
        (REFIT, [f"blocks {REFITTED}"], "Not trained after pruning; its remaining weights were repaired"),
        (BOTH, [f"blocks {REFITTED}, and it {TRAINED}"], "Trained after pruning on a little sample text"),
        (BOTH, [f"it {TRAINED}", NOT_REFITTED], "Trained after pruning on a little sample text"),
        (BOTH, [NOT_REFITTED, NOT_TRAINED], "Not fine-tuned: no weight was trained"),
    ],
)
def test_the_card_says_whether_weights_were_trained_and_its_notes(
    config: dict[str, str], notes: list[str], words: str, tmp_path: Path
) -> None:
    """The card goes by what was done, as notes say it, and not by what was asked for."""
    text = card(tmp_path, {}, config=replace(PruningConfig("blockwise", 64, 1256), **config), notes=notes)
    kinds = ("Not fine-tuned", "Not trained after", "Trained after pruning")
    assert f"- {words}" in text and sum(kind in text for kind in kinds) == 1
    assert all(text.count(f"- {note[0].upper()}{note[1:]}.") == 1 for note in notes)
    assert text.count("; not used (Limitations) |") == sum(note in (NOT_REFITTED, NOT_TRAINED) for note in notes)
