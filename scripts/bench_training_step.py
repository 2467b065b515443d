"""A step of a training (`recovery: lora`): its kernels launched one by one, and as one CUDA graph, which a GPU is given.

    python scripts/bench_training_step.py                        one GPU of 16 GB, half a minute
    python scripts/bench_training_step.py --device cpu --tiny    the same code on a model of toy size, without a graph

Random weights of SmolLM2-135M's shape and of eight layers of Mistral-7B's; 4 samples of 128 tokens, towards random hidden states.
Needs PEFT, besides what bench_gpu.py needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
from bench_common import table, timed, write_json
from gpu_measurements import device_of
from make_random_model import config_of
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from tune_prune.commands.flags import output_file
from tune_prune.models.families import family_of
from tune_prune.models.runner.residency import RESIDENT
from tune_prune.pruning.compensation import recovery

STEPS = 20


@dataclass(frozen=True)
class Case:
    """A shape of make_random_model with that many layers (None: its own), "" for one of toy size; `rank`: of the adapters."""

    shape: str
    layers: int | None
    dtype: torch.dtype
    rank: int

    def config(self) -> PretrainedConfig:
        if self.shape:
            return config_of(self.shape, self.layers)
        return LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=256
        )


CASES = (
    Case("smollm2-135m", None, torch.float32, 8),
    Case("smollm2-135m", None, torch.float32, 64),
    Case("smollm2-135m", None, torch.bfloat16, 8),
    Case("mistral-7b", 8, torch.bfloat16, 8),
)


@dataclass
class Run:
    """`seconds` of each step, the first with its capture; the adapters that came out."""

    seconds: list[float]
    peak_bytes: int
    adapters: list[Tensor]

    def values(self) -> dict[str, float]:
        return {"s": median(self.seconds[3:]), "first_s": self.seconds[0], "peak_bytes": self.peak_bytes}


def train(case: Case, device: torch.device, graph: bool) -> Run:
    config = case.config()
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=case.dtype, attn_implementation="sdpa").eval()
    training = recovery._Training(model, family_of(config.model_type), RESIDENT, STEPS, 1e-3, case.rank, seed=0)
    training._tried = training._tried or not graph
    shape = (STEPS, recovery.ROWS, recovery.WINDOW)
    windows = torch.randint(config.vocab_size, shape)
    dense = torch.randn(*shape, config.hidden_size).to(case.dtype)

    def step(index: int) -> None:
        training.step(windows[index], dense[index])
        if device.type == "cuda":
            torch.cuda.synchronize()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(partial(step, index))[0] for index in range(STEPS)]
    if graph and device.type == "cuda" and training._graph is None:
        raise SystemExit("error: no step could be captured")
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Run(seconds, peak, [p.detach().cpu() for p in training.adapters.values()])


def difference(one: Run, other: Run) -> float:
    """The largest of an adapter, over its largest value: sums of products are added up in another order."""
    return max(
        float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))
        for a, b in zip(one.adapters, other.adapters, strict=True)
    )


def main(argv: Sequence[str]) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--tiny", action="store_true", help="a model of toy size, to try the code")
    p.add_argument("--output", type=output_file, metavar="FILE", help="write the numbers there, as JSON")
    args = p.parse_args(argv)
    device, found = device_of(args), []
    rows: list[tuple[object, ...]] = [("shape", "layers", "weights", "rank", "ms one by one", "as a graph", "ratio")]
    for case in (Case("", None, torch.float32, 8),) if args.tiny else CASES:
        plain, graph = (train(case, device, graph) for graph in (False, True))
        about = asdict(case) | {
            "layers": case.config().num_hidden_layers,
            "dtype": str(case.dtype).removeprefix("torch."),
        }
        values = {"kernel_by_kernel": plain.values(), "graph": graph.values()}
        found.append({**about, **values, "largest_difference": difference(plain, graph)})
        ms = [1e3 * run.values()["s"] for run in (plain, graph)]
        rows.append((*about.values(), f"{ms[0]:.1f}", f"{ms[1]:.1f}", f"{ms[0] / ms[1]:.1f}"))
    print(table(rows))
    write_json(args.output, {"benchmark": "training_step", "steps": found})


if __name__ == "__main__":
    main(sys.argv[1:])
