"""Models with masked weights: magnitude, Wanda and SparseGPT, the unstructured baselines of every pruning paper, measured as a
search measures its trials.

    python scripts/mask_baselines.py --model smollm2 --data-dir DATA --limit 100 --perplexity-tokens 16384

As many weights are set to zero as structured pruning would remove (--ratio of all parameters, all from the projections, evenly):
the model is no smaller and no faster, so this is what structure costs, and no rival. Masks are made layer by layer on what the
layers before give once they are masked, as in the papers. The masked model is written as a checkpoint, evaluated and removed.

With W [out, in] the weights of a projection, x [in] what goes into it, over all calibration tokens, and s the share that goes:

    magnitude   the smallest |W| of the matrix
    wanda       of every row the smallest |W_ij| ||x_j||                        Sun et al. 2023, arXiv:2306.11695
    sparsegpt   of every 128 columns the smallest W_ij^2 / [H^-1]_jj, H = X X^T + 0.01 mean diag; what goes is made up for by the
                columns behind it                                               Frantar & Alistarh 2023, arXiv:2301.00774
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_common import write_json
from script_tools import COUNT, script_parser, table
from torch import Tensor, nn
from transformers import PreTrainedModel

import tune_prune
from tune_prune.commands.opened import Model
from tune_prune.core import terminal
from tune_prune.core.config import EMBEDDED_DATA
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError
from tune_prune.data import calibration
from tune_prune.data.sources import uses_embedded_data
from tune_prune.evaluation.evaluation import Evaluation
from tune_prune.models import catalog, loading
from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.pruning.passes.batches import batch_size

BLOCK = 128  # columns whose masks SparseGPT chooses at once
DAMPING = 0.01  # of the mean of H's diagonal


def magnitude(weight: Tensor, _: Tensor, share: float) -> Tensor:
    """Return `weight` with its smallest entries at zero."""
    return weight.masked_fill(_smallest(weight.abs().flatten(), share).view_as(weight), 0)


def wanda(weight: Tensor, gram: Tensor, share: float) -> Tensor:
    """Return `weight` [out, in] with zeros in every row; `gram` [in, in]: sum of x x^T."""
    return weight.masked_fill(_smallest(weight.abs() * gram.diagonal().sqrt(), share), 0)


def sparsegpt(weight: Tensor, gram: Tensor, share: float) -> Tensor:
    """Return `weight` [out, in] with zeros, and with what makes up for them; `gram` [in, in]: sum of x x^T, in float32 or
    better."""
    new, hessian = weight.to(gram.dtype).clone(), gram.clone()
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1
    new[:, dead] = 0
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    # Its row j has what is left of the inverse once the columns before j are fixed, over the root of its diagonal.
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    for begin in range(0, new.shape[1], BLOCK):
        end = min(begin + BLOCK, new.shape[1])
        scores = new[:, begin:end] ** 2 / upper.diagonal()[begin:end] ** 2
        gone = _smallest(scores.flatten(), share).view_as(scores)
        errors = torch.zeros_like(scores)
        for j in range(begin, end):
            column = new[:, j].clone()
            new[gone[:, j - begin], j] = 0
            errors[:, j - begin] = (column - new[:, j]) / upper[j, j]
            new[:, j + 1 : end] -= errors[:, j - begin, None] * upper[j, j + 1 : end]
        new[:, end:] -= errors @ upper[begin:end, end:]
    return new.to(weight.dtype)


def _smallest(scores: Tensor, share: float) -> Tensor:
    """Mark the smallest of every row of `scores` [..., n]: that share of n, rounded."""
    count = round(share * scores.shape[-1])
    places = scores.topk(count, largest=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, places, True)


Mask = Callable[[Tensor, Tensor, float], Tensor]
MASKS: dict[str, Mask] = {"magnitude": magnitude, "wanda": wanda, "sparsegpt": sparsegpt}


@torch.no_grad()
def apply(model: PreTrainedModel, family: Family, windows: Tensor, share: float, mask: Mask) -> None:
    """Mask the projections of `model` in place, by calibration `windows` [samples, T]."""
    runner = LayerRunner(model, family)
    step = batch_size(windows.shape[1], runner.device.type)
    batches = {start: windows[start : start + step] for start in range(0, len(windows), step)}
    with terminal.step("masks", lambda: runner.num_layers, "layers") as advance:
        carried = runner.embedded(batches)
        for index, layer in runner.layers():
            linears = family.linears(layer)
            with _grams(linears) as grams:
                for batch in batches:
                    carried.run(layer, index, batch, carried.states[batch])
            for role, linear in linears.items():
                linear.weight.copy_(mask(linear.weight, grams[role], share))
            for batch in batches:
                carried.states[batch] = carried.run(layer, index, batch, carried.states[batch])
            advance(1)


@contextmanager
def _grams(linears: Mapping[str, nn.Linear]) -> Iterator[dict[str, Tensor]]:
    """Collect by role sums of x x^T of what goes into them within the context, in float32 or better."""
    grams: dict[str, Tensor] = {}

    def add(role: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].flatten(0, -2).to(torch.promote_types(args[0].dtype, torch.float32))
            grams[role] = grams[role].addmm_(x.T, x) if role in grams else x.T @ x

        return hook

    handles = [linear.register_forward_pre_hook(add(role)) for role, linear in linears.items()]
    try:
        yield grams
    finally:
        for handle in handles:
            handle.remove()


def share_of(model: PreTrainedModel, family: Family, ratio: float) -> float:
    """Return the share of the projections' weights that is that ratio of all parameters. Raises UserError for too large a ratio."""
    weights = sum(
        linear.weight.numel() for layer in decoder_layers(model, family) for linear in family.linears(layer).values()
    )
    share = ratio * sum(p.numel() for p in model.parameters()) / weights
    if not 0 < share < 1:
        raise UserError(
            f"--ratio {ratio:g} is {share:.0%} of the projections' weights; it must be above 0 and below 100%"
        )
    return share


def row_of(name: str, masked: Evaluation, dense: Evaluation) -> dict[str, Any]:
    """Return a row of what one model has measured; `gold_lost`: in log-probability of right choices, nats, mean of the tasks."""
    lost = dense.tasks["gold_logprob"] - masked.tasks["gold_logprob"]
    kl = masked.kl or {"text": (0.0, 0.0), "tasks": (0.0, 0.0)}  # of the dense model to itself
    row = {"masks": name} | {f"kl_{text}": value for text, (value, _) in kl.items()} | {"gold_lost": float(lost.mean())}
    return row | {"ppl": masked.ppl, "accuracy": masked.acc_mean, "accuracy_stderr": masked.acc_mean_stderr}


@terminal.shown()
def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    names = args.masks.split(",")
    if unknown := [name for name in names if name not in MASKS]:
        raise UserError(f"--masks names {', '.join(unknown)}; there are {', '.join(MASKS)}")
    dense = tune_prune.open(
        args.model, data_dir=args.data_dir, seed=args.seed, dtype="float32", perplexity_tokens=args.perplexity_tokens
    )
    source, embedded = catalog.resolve(args.model, None), uses_embedded_data(dense.run)
    text = calibration.resolve(args.calibration, dense.run.data_dir, source.kind == "embedded")
    bos = calibration.bos_of(dense.tokenizer, dense.run.protocol.bos, dense.label)
    windows = calibration.samples(
        calibration.tokens_of(dense.tokenizer, text), args.seq_len, args.samples, args.seed, bos
    )
    run = replace(dense.run, data_dir=EMBEDDED_DATA if embedded else dense.run.data_dir)
    share = share_of(dense.model, dense.loaded().family, args.ratio)
    scores = dense.evaluate(args.limit, args.tasks)
    rows = [row_of("dense", scores, scores)]
    for name in names:
        loaded = loading.load_model(source, torch.float32, dense.device)  # masks change it
        apply(loaded.model, loaded.family, windows, share, MASKS[name])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            loaded.model.save_pretrained(path)
            loaded.tokenizer.save_pretrained(path)
            masked = Model(replace(run, model=str(path), label=name), dense.device, base=args.model)
            rows.append(row_of(name, masked.evaluate(args.limit, args.tasks, kl=True), scores))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = script_parser(__doc__, "also as JSON")
    parser.add_argument("--model", required=True, metavar="NAME")
    parser.add_argument("--data-dir", metavar="DIR")
    parser.add_argument("--calibration", metavar="TEXT")
    parser.add_argument("--masks", default=",".join(MASKS), metavar="A,B", help="(default: all)")
    parser.add_argument("--ratio", type=float, default=0.2, help="of all parameters (default: 0.2)")
    parser.add_argument("--samples", type=COUNT, default=128, help="of the calibration text (default: 128)")
    parser.add_argument("--seq-len", type=COUNT, default=128, help="tokens of each (default: 128)")
    parser.add_argument("--seed", type=int, default=0, help="of samples and items (default: 0)")
    parser.add_argument("--limit", type=COUNT, metavar="N", help="items of each task (default: all)")
    parser.add_argument("--tasks", metavar="A,B", help="(default: the seven)")
    parser.add_argument("--perplexity-tokens", type=COUNT, metavar="N", help="(default: all)")
    args = parser.parse_args(argv)

    def run() -> None:
        rows = measure(args)
        head = ["masks", "KL text", "KL tasks", "gold lost", "perplexity", "accuracy", "stderr"]
        print(table([head, *(list(row.values()) for row in rows)]))
        write_json(args.output, {"settings": {**vars(args), "output": None}, "rows": rows})

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
