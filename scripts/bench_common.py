"""What the benchmarks share: models to measure, real data, medians, aligned tables, JSON and what the machine is.

A benchmark measures both sides in one run and reports ratios: seconds of different runs do not compare on a machine that
others use too. A model is named by `--model`: an embedded one, `stories260K`, `smollm2`, a folder, or a size of `SIZES`, a Llama of
random weights with the GPT-2 tokenizer or the beginning of it.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from tune_prune import __version__, embedded
from tune_prune.commands.flags import output_file
from tune_prune.core.config import ZERO_SHOT_TASKS, EvaluationProtocol, ModelRun
from tune_prune.core.errors import UserError, whole_number
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
COUNT, FROM_ZERO = whole_number(1, 10**9), whole_number(0, 10**9)  # types of flags
END = "<|endoftext|>"
HELLASWAG_ROWS = 10_042  # of its validation split, of which the files at hand hold a part


def data_dir() -> Path:
    """The folder of real task files, texts and models. Raises UserError where there is none."""
    folder = Path(os.environ.get("TUNE_PRUNE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not (folder / "tasks").is_dir():
        raise UserError(f"no real data at {folder}; set TUNE_PRUNE_DATA to a folder with tasks/, text/ and models/")
    return folder.resolve()


def random_model(
    folder: Path,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab_size: int | None = None,
    tokenizer_dir: Path | None = None,
    seed: int = 0,
) -> Path:
    """A Llama of random weights (float32, tied embeddings, 2048 positions) in `folder`, which is made if need be, with the
    byte-level BPE of `tokenizer_dir` (vocab.json and merges.txt; None: GPT-2's of `data_dir`), or with as many of its first
    merges as make `vocab_size` tokens."""
    tokenizer_dir = tokenizer_dir or data_dir() / "models" / "gpt2-tokenizer"
    vocab, merges = BPE.read_file(str(tokenizer_dir / "vocab.json"), str(tokenizer_dir / "merges.txt"))
    left_out = len(vocab) - (vocab_size or len(vocab))
    if left_out:  # the last merges and the tokens that they make; the end token stays the last
        merges = merges[:-left_out]
        kept = sorted(vocab, key=vocab.__getitem__)[: -left_out - 1]
        vocab = {token: index for index, token in enumerate([*kept, END])}
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
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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


def subject(name: str, work: Path, limit: int = 0) -> Subject:
    """The model of that name; one of random weights is made in `work`. Raises UserError for an unknown name.

    With a `limit` of items per task the perplexity text of the real data is cut to the same share, so that the parts of a
    trial keep their weights.
    """
    if name in embedded.MODEL_NAMES:
        return Subject(name, name, None)
    if "/" in name and (Path(name) / "config.json").is_file():
        return Subject(Path(name).name, name, str(_cut_data(work / f"data-{limit}", limit) if limit else data_dir()))
    if name not in ("stories260K", "smollm2", *SIZES):
        known = ", ".join([*embedded.MODEL_NAMES, "stories260K", "smollm2", *SIZES])
        raise UserError(f"--model {name!r} is no model of the benchmarks; known: {known}, or a folder: DIR/MODEL")
    data = _cut_data(work / f"data-{limit}", limit) if limit else data_dir()
    if name == "smollm2":
        return Subject(name, catalog.resolve(name).name, str(data))
    if name == "stories260K":
        return Subject(name, str(data_dir() / "models" / name), str(data))
    folder = work / f"random-{name}"
    if not folder.exists():
        random_model(folder, *SIZES[name])
    return Subject(f"random-{name}", str(folder), str(data))


def _cut_data(folder: Path, limit: int) -> Path:
    """The real data with a perplexity text cut to the share of the items that `limit` leaves."""
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
    """Parameters of the decoder layers and of everything, layers and hidden size."""
    _, geometry = loading.config_geometry(loading.load_config(catalog.resolve(run.model)))
    return {
        "layer_params": geometry.prunable_params,
        "params": geometry.total_params,
        "layers": geometry.num_layers,
        "hidden_size": geometry.hidden_size,
    }


def benchmark_parser(
    doc: str | None, models: Sequence[str], repeats: int = 3, threads: bool = True
) -> argparse.ArgumentParser:
    """With the flags that benchmarks share; `models` and `repeats` are defaults, `threads` asks for --threads."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--model",
        type=lambda text: tuple(text.split(",")),
        default=tuple(models),
        metavar="A,B",
        help="embedded models, stories260K, smollm2, DIR/MODEL, or random weights: "
        f"{', '.join(SIZES)} (default: {','.join(models)})",
    )
    p.add_argument(
        "--repeats",
        type=COUNT,
        default=repeats,
        metavar="N",
        help="of each measurement, whose median counts (default: %(default)s)",
    )
    if threads:
        p.add_argument("--threads", type=COUNT, default=cpus(), metavar="N", help="of torch (default: %(default)s)")
    p.add_argument("--output", type=output_file, metavar="FILE", help="write the numbers as JSON, too")
    return p


def add_dtype(p: argparse.ArgumentParser) -> None:
    """--dtype, of weights and activations on both sides."""
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")


def counts(text: str) -> tuple[int, ...]:
    """A type of a flag, for argparse: counts with commas between them."""
    return tuple(map(COUNT, text.split(",")))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of one call."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def median_times(calls: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds of each call and its last result. The calls take turns, so that a slow minute of the machine falls on
    all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    results: dict[str, Any] = {}
    for _ in range(repeats):
        for name, call in calls.items():
            taken, results[name] = timed(call)
            seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}, results


def table(rows: Iterable[Sequence[object]]) -> str:
    """Rows (the first is the header) in aligned columns: the first column left, numbers right."""
    texts = [[_shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    )


def _shown(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.2f}" if abs(cell) >= 1 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


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
    """`values` and the machine, to `path` if there is one."""
    if path is not None:
        atomic_write_text(path, to_json({"machine": machine(), **values}))
        print(f"\nwritten to {path}")
