"""Prune and then quantise, or quantise harder? A model and its pruned copy in every type of GGUF file, measured beside each other.

    python scripts/study_quantised.py --model smollm2 --data-dir DATA --work DIR --output FILE.json

Pruned as docs/quality.md recommends: gate_fisher by 128 samples of 128 tokens, 20% of all parameters, the rest refitted by
least squares, shape aligned. Both models are written in float16, and that file is quantised by llama.cpp's own quantiser.
tune_prune dequantises each file and measures it in float32: perplexity, KL to the original, log-probability of right answers.
Run it again to go on: what is in --work is not made again, and what is in --output is not measured again.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_common import machine
from script_tools import COUNT, script_parser, table

import tune_prune
from tune_prune.checkpoint import manifest, quantisation
from tune_prune.checkpoint.gguf import quantiser
from tune_prune.checkpoint.gguf.gguf_file import write_gguf
from tune_prune.commands.flags import output_file
from tune_prune.core import terminal
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, parse_json, to_json
from tune_prune.core.temporary import folder as temporary_folder
from tune_prune.models import loading
from tune_prune.pruning.surgery import Sketch

KINDS = "q8_0,q6_k,q5_k_m,q4_k_m,q3_k_m,q2_k"
FLOAT = "f16"
RECIPE: dict[str, Any] = {
    "method": "gate_fisher",
    "seq_len": 128,
    "num_samples": 128,
    "compensation": "least_squares",
    "shape": "aligned",
}


def dense_file(args: argparse.Namespace, folder: Path) -> Path:
    """Return the GGUF file of the original in float16, written where it is not there."""
    file = folder / "dense-F16.gguf"
    if not file.is_file():
        loaded = tune_prune.open(args.model, data_dir=args.data_dir, dtype="float32").loaded()
        with temporary_folder() as tokenizer:
            loading.original_tokenizer(loaded.source).save_pretrained(tokenizer)
            write_gguf(Sketch.of(loaded.model), loaded.family, tokenizer, file, torch.float16, "dense")
    return file


def pruned_file(args: argparse.Namespace, folder: Path) -> Path:
    """Return the GGUF file of the pruned model in float16, with its manifest beside it; made where it is not there."""
    checkpoint = folder / "pruned-F16"
    if not checkpoint.is_dir():
        model = tune_prune.open(args.model, data_dir=args.data_dir, dtype="float32")
        pruned = model.prune(**RECIPE | {"ratio": args.ratio, "num_samples": args.num_samples})
        pruned.save(checkpoint, "gguf", dtype="float16")
    return next(checkpoint.glob("*.gguf"))


def in_kind(file: Path, folder: Path, kind: str) -> Path:
    """Return that file quantised to `kind`, in a folder of its own with a manifest where `file` has one; made where it is not
    there."""
    if kind == FLOAT:
        return file
    target = folder / f"{file.stem.removesuffix('-F16')}-{kind.upper()}" / f"{kind}.gguf"
    if not target.is_file():
        target.parent.mkdir(exist_ok=True)
        unfinished = target.with_suffix(".unfinished")
        quantiser.quantise(file, unfinished, kind)
        if (about := manifest.read(file.parent)) is not None:
            files = {target.name: manifest.weight_file(unfinished)}
            manifest.write(target.parent, replace(about, files=files, quantization=kind.upper()))
        unfinished.replace(target)
    return target


def measure(args: argparse.Namespace, model: str, kind: str, file: Path) -> dict[str, Any]:
    """Return a row: the file's bytes, and what tune_prune measures of it."""
    opened = tune_prune.open(
        file, data_dir=args.data_dir, dtype="float32", perplexity_tokens=args.perplexity_tokens, base=args.model
    )
    evaluation = opened.evaluate(args.limit, kl=True)
    metrics = evaluation.record.metrics
    names = ("ppl", "kl_text", "kl_text_stderr", "kl_tasks", "kl_tasks_stderr", "acc_mean")
    row = {"model": model, "kind": kind, "bytes": file.stat().st_size, "parameters": opened.params}
    row |= {name: metrics[name] for name in names}
    return row | {"gold_logprob": float(evaluation.tasks["gold_logprob"].mean())}


def at_equal_bytes(rows: list[dict[str, Any]]) -> list[list[object]]:
    """Return for each pruned file the largest dense one that is no larger, beside it; files without one are left out."""
    pairs: list[list[object]] = [["pruned", "MB", "KL text", "KL tasks", "dense", "MB", "KL text", "KL tasks"]]
    for row in rows:
        smaller = [other for other in rows if other["model"] == "dense" and other["bytes"] <= row["bytes"]]
        if row["model"] == "pruned" and smaller:
            pairs.append(
                [one for file in (row, max(smaller, key=lambda other: other["bytes"])) for one in _cells(file)]
            )
    return pairs


def _cells(row: dict[str, Any]) -> list[object]:
    return [row["kind"].upper(), row["bytes"] / 1e6, row["kl_text"], row["kl_tasks"]]


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    for kind in kinds:
        if kind not in quantisation.GGUF_KINDS:
            raise argparse.ArgumentTypeError(f"{kind} is none of {', '.join(quantisation.GGUF_KINDS)}")
        if kind != "q8_0":
            quantisation.llama_quantize(kind)
    return kinds


@terminal.shown()
def study(args: argparse.Namespace) -> None:
    kinds = (FLOAT, *_kinds(args.kinds))
    args.work.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(args, name) for name in ("model", "ratio", "num_samples", "limit", "perplexity_tokens")}
    before: dict[str, Any] = {"settings": settings, "rows": []}
    if args.output.is_file():
        before = parse_json(args.output)
    if before["settings"] != settings:
        raise UserError(f"--output {args.output} is of other settings ({before['settings']}); name another file")
    rows = {(row["model"], row["kind"]): row for row in before["rows"]}
    for kind in kinds:
        for model, make in (("dense", dense_file), ("pruned", pruned_file)):
            if (model, kind) not in rows:
                file = in_kind(make(args, args.work), args.work, kind)
                rows[model, kind] = measure(args, model, kind, file)
                about = {"machine": machine(), "settings": settings, "recipe": RECIPE}
                atomic_write_text(args.output, to_json(about | {"rows": [*rows.values()]}))
                print(f"{model:<7} {kind.upper():<7} measured", flush=True)
    order = [rows[model, kind] for model in ("dense", "pruned") for kind in kinds]
    head = ["model", "type", "MB", "perplexity", "KL text", "KL tasks", "log-prob of right"]
    columns = ("ppl", "kl_text", "kl_tasks", "gold_logprob")
    body = [[row["model"], row["kind"].upper(), row["bytes"] / 1e6, *(row[name] for name in columns)] for row in order]
    print(
        f"\n{table([head, *body])}\n\npruned, and the largest dense file that is no larger\n{table(at_equal_bytes(order))}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--output", type=output_file, required=True, metavar="FILE", help="the rows as JSON")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="where the files are made")
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="(default: smollm2)")
    parser.add_argument("--data-dir", metavar="DIR")
    parser.add_argument("--kinds", default=KINDS, metavar="A,B", help=f"types (default: {KINDS})")
    parser.add_argument("--ratio", type=float, default=0.2, help="of all parameters (default: 0.2)")
    parser.add_argument("--num-samples", type=COUNT, default=128, help="of the sample text (default: 128)")
    parser.add_argument("--limit", type=COUNT, default=40, metavar="N", help="items of each task (default: 40)")
    parser.add_argument("--perplexity-tokens", type=COUNT, default=16384, metavar="N", help="(default: 16384)")
    args = parser.parse_args(argv)
    return exit_code(lambda: study(args))


if __name__ == "__main__":
    sys.exit(main())
