"""Tools of the benchmarks: models to measure, real data, medians, JSON and what the machine is.

A benchmark measures both sides in one run and reports ratios: seconds of different runs do not compare on a machine that
others use too. A model is named by `--model`: an embedded one, `stories260K`, `smollm2`, a folder, or a size of `SIZES`, a Llama of
random weights with the GPT-2 tokenizer or the beginning of it.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from script_tools import COUNT, FROM_ZERO, script_parser
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from tune_prune import __version__, embedded
from tune_prune.commands.flags import task_names
from tune_prune.core.config import ZERO_SHOT_TASKS, EvaluationProtocol, ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.machine import cpus
from tune_prune.data import calibration
from tune_prune.data.perplexity_text import TEXT_FILE
from tune_prune.models import catalog, loading

# Parameters of the decoder layers, which every token passes, by name; the embeddings (50,257 tokens, tied) are as large again
# at 20M, but only scored positions pass them. hidden size, layers, query heads, KV heads, MLP channels, tokens.
# "4k" has 21M in all, and a head of a tenth of its layers: nearer to 7B models (2% for Mistral, 7% for Llama-3 and Qwen2.5).
GPT2_VOCAB = 50_257
SIZES = {
    "0.05M": (48, 2, 4, 2, 128, GPT2_VOCAB),
    "5M": (256, 6, 8, 4, 768, GPT2_VOCAB),
    "20M": (512, 8, 8, 4, 1152, GPT2_VOCAB),
    "20M-4k": (512, 8, 8, 4, 1024, 4096),
    "35M": (576, 10, 9, 3, 1536, GPT2_VOCAB),
    "50M": (640, 10, 10, 5, 1920, GPT2_VOCAB),
}
END = "<|endoftext|>"


def data_dir() -> Path:
    """Return the folder of real task files, texts and models. Raises UserError where there is none."""
    folder = Path(os.environ.get("TUNE_PRUNE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not (folder / "tasks").is_dir():
        raise UserError(f"no real data at {folder}; set TUNE_PRUNE_DATA to a folder with tasks/, text/ and models/")
    return folder.resolve()


def random_model(folder: Path, size: str) -> None:
    """Write a Llama of random weights (float32, tied embeddings, 2048 positions) of a size of `SIZES` to `folder`, with GPT-2's
    byte-level BPE or with as many of its first merges as make the size's tokens."""
    hidden, layers, heads, kv_heads, intermediate, vocab_size = SIZES[size]
    files = data_dir() / "models" / "gpt2-tokenizer"
    vocab, merges = BPE.read_file(str(files / "vocab.json"), str(files / "merges.txt"))
    # The last merges go, and the tokens that they make; the end token stays the last.
    if left_out := len(vocab) - vocab_size:
        merges = merges[:-left_out]
        tokens = sorted(vocab, key=vocab.__getitem__)[: -left_out - 1]
        vocab = {token: index for index, token in enumerate([*tokens, END])}
    bpe = Tokenizer(BPE(vocab, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END, eos_token=END)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Subject:
    """A model to measure: `location` is what `--model` of the program takes, `data` what its `--data-dir` takes."""

    name: str
    location: str
    data: str | None  # None: the embedded tasks and texts
    dtype: str = "float32"

    def run(self, tasks: tuple[str, ...] = ZERO_SHOT_TASKS, limit: int | None = None, **protocol: Any) -> ModelRun:
        if self.data is None:
            protocol = {"perplexity_window": embedded.TRAINED_TOKENS} | protocol
        return ModelRun(
            model=self.location,
            label=self.name,
            revision=None,
            calibration=calibration.resolve(None, self.data, self.data is None),
            data_dir=self.data,
            protocol=EvaluationProtocol(tasks=tasks, limit=limit, **protocol),
            seed=0,
            dtype=self.dtype,
        )


def subject(name: str, work: Path, limit: int = 0, dtype: str = "float32") -> Subject:
    """Return the model of that name; one of random weights is made in `work`. Raises UserError for an unknown name.

    With a `limit` of items per task the perplexity text of the real data is cut to the same share, so that the parts of a
    trial keep their weights.
    """
    if name in embedded.MODEL_NAMES:
        return Subject(name, name, None, dtype)
    local = "/" in name and (Path(name) / "config.json").is_file()
    if not local and name not in ("stories260K", "smollm2", *SIZES):
        known = ", ".join([*embedded.MODEL_NAMES, "stories260K", "smollm2", *SIZES])
        raise UserError(f"--model {name!r} is no model of the benchmarks; known: {known}, or a folder: DIR/MODEL")
    data = str(_cut_data(work / f"data-{limit}", limit) if limit else data_dir())
    if local:
        return Subject(Path(name).name, name, data, dtype)
    if name == "smollm2":
        return Subject(name, catalog.resolve(name).name, data, dtype)
    if name == "stories260K":
        return Subject(name, str(data_dir() / "models" / name), data, dtype)
    folder = work / f"random-{name}"
    if not folder.exists():
        random_model(folder, name)
    return Subject(folder.name, str(folder), data, dtype)


def _cut_data(folder: Path, limit: int) -> Path:
    """Make a copy of the real data with a perplexity text cut to the share of the items that `limit` leaves."""
    if folder.exists():
        return folder
    real = data_dir()
    (folder / "text").mkdir(parents=True)
    (folder / "tasks").symlink_to(real / "tasks")
    files = (real / "tasks").glob("*/*.jsonl")
    rows = [sum(1 for line in path.read_text(encoding="utf-8").split("\n") if line.strip()) for path in files]
    share = sum(min(limit, count) for count in rows) / sum(rows)
    for path in (real / "text").iterdir():
        if path.name != TEXT_FILE.name:
            (folder / "text" / path.name).symlink_to(path)
    text = (real / TEXT_FILE).read_text(encoding="utf-8")
    (folder / TEXT_FILE).write_text(text[: max(2000, round(share * len(text)))], encoding="utf-8")
    return folder


def sizes_of(run: ModelRun) -> dict[str, int]:
    """Return parameters of the decoder layers and of everything, layers and hidden size."""
    _, geometry = loading.config_geometry(loading.load_config(catalog.resolve(run.model)))
    return {
        "layer_params": geometry.prunable_params,
        "params": geometry.total_params,
        "layers": geometry.num_layers,
        "hidden_size": geometry.hidden_size,
    }


def benchmark_parser(doc: str | None, models: Sequence[str], repeats: int, limit: int) -> argparse.ArgumentParser:
    """Make a parser of the flags that benchmarks share; `models`, `repeats` and `limit` are defaults."""
    p = script_parser(doc, "write the numbers as JSON, too")
    p.add_argument(
        "--model", type=lambda text: tuple(text.split(",")), default=tuple(models), metavar="A,B",
        help="embedded models, stories260K, smollm2, DIR/MODEL, or random weights: "
        f"{', '.join(SIZES)} (default: {','.join(models)})",
    )  # fmt: skip
    p.add_argument(
        "--repeats", type=COUNT, default=repeats, metavar="N",
        help="of each measurement, whose median counts (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--limit", type=FROM_ZERO, default=limit, metavar="N", help="items per task, 0: all (default: %(default)s)"
    )
    p.add_argument("--tasks", type=task_names, default=ZERO_SHOT_TASKS, metavar="A,B")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    return p


def measure_models(
    benchmark: str,
    args: argparse.Namespace,
    measure: Callable[[Subject, argparse.Namespace, Path], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """Measure every model that is asked for, print its report, and write all numbers to --output; these."""
    results = []
    with tempfile.TemporaryDirectory() as work:
        for name in args.model:
            results.append(measure(subject(name, Path(work), args.limit, args.dtype), args, Path(work)))
            print(report(results[-1]), end="\n\n", flush=True)
    asked = {"benchmark": benchmark, "dtype": args.dtype, "limit": args.limit, "repeats": args.repeats}
    values = {**asked, "models": results}
    write_json(args.output, values)
    return values


def title(result: dict[str, Any]) -> str:
    layers, params = result["layer_params"] / 1e6, result["params"] / 1e6
    return f"{result['model']}: {layers:.2f}M parameters in layers, {params:.2f}M in all"


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and result of one call."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def median_times(calls: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Return median seconds of each call and its last result. The calls take turns, so that a slow minute of the machine falls on
    all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    results: dict[str, Any] = {}
    for _ in range(repeats):
        for name, call in calls.items():
            taken, results[name] = timed(call)
            seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}, results


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    return {
        "cpus": cpus(),
        "processor": platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "tune_prune": __version__,
    }


def write_json(path: Path | None, values: dict[str, Any]) -> None:
    """Write `values` and the machine to `path`, if there is one."""
    if path is not None:
        atomic_write_text(path, to_json({"machine": machine(), **values}))
        print(f"\nwritten to {path}")
