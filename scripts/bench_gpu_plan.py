"""Whether a GPU is what plans take it for: what is assumed, beside what is measured, a JSON line each.

    python scripts/bench_gpu_plan.py                        one GPU of 80 GB, a few minutes; a smaller one leaves some out
    python scripts/bench_gpu_plan.py --device cpu --tiny    the same code on a model of toy size

Needs torch, transformers, NumPy and pydantic only. Each line is printed as soon as it is measured, and kept in --output; after
--limit seconds the process ends, also where one hangs, so that a machine lent for ten minutes loses nothing; what fails says
why, and the rest goes on. In the order of their value, of a model of Mistral-7B's shape with random weights:

    versions        of what it is measured with, and the kernels that attention with a mask can take
    ways            a gradient pass and perplexity in every way to hold the model: seconds, and peak memory planned and taken
                    (streamed: weights come from host memory, so that no disk is measured)
    transfers       bytes per second to the GPU and back, from pageable and from pinned memory
    widths          matrix products of MLPs with an odd number of channels against multiples of 8 and of 64
    sharing         tokens per second of two processes at once over those of one: 1 where one fills the GPU, 2 where it does not
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench_common import timed
from bench_gpu import build
from gpu_measurements import Slot, device_of, gpu_parser, memory_beside, synchronise, versions
from torch.nn.attention import SDPBackend, sdpa_kernel

from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models.families import family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.pruning.statistics import Need
from tune_prune.pruning.statistics.taylor import STATISTIC, taylor
from tune_prune.tuning.memory import Shapes

WIDTHS = (11_469, 11_472, 11_520)  # 80% of Mistral-7B's 14,336: free, the next multiple of 8, the next of 64
SHARING_S = 5.0
KERNELS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


class Bench:
    def __init__(self, args: Any, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = build(args, device, self.dtype)

    def seconds(self, run: Callable[[], object]) -> float:
        def synchronised() -> None:
            run()
            synchronise(self.device)

        return timed(synchronised)[0]

    def fastest(self, run: Callable[[], object]) -> float:
        """Return seconds of the fastest of five calls, after one that is not counted."""
        self.seconds(run)
        return min(self.seconds(run) for _ in range(5))

    def versions(self) -> dict[str, Any]:
        """Attention gets query, key and mask as transformers gives them: keys are repeated for the query heads of their group."""
        query, key = (torch.randn(4, 32, 64, 128, device=self.device).to(self.dtype) for _ in range(2))
        mask = torch.zeros(4, 1, 64, 64, device=self.device, dtype=self.dtype).triu_(1)
        runs = []
        for kernel in KERNELS:
            with sdpa_kernel(kernel), suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
                F.scaled_dot_product_attention(query, key, key, attn_mask=mask)
                runs.append(kernel.name)
        return {**versions(), "masked_attention": runs}

    def ways(self) -> dict[str, float]:
        samples, length = (4, 32) if self.args.tiny else (64, 256)
        windows, device = torch.randint(self.model.config.vocab_size, (samples, length)), self.device
        family = family_of(self.model.config.model_type)
        geometry = read_geometry(self.model, family)
        shapes = Shapes(geometry, self.model.config, self.dtype.itemsize, device.type)
        work = STATISTIC.work([Need("taylor", "", samples)], length, geometry.num_layers, device.type)
        weights = {name: p.cpu() for name, p in self.model.named_parameters(remove_duplicate=False)}
        measured: dict[str, float] = {}
        for plan in shapes.ways([("importance", work)]):
            if plan.way.pruned_whole or plan.way.states == "file":
                continue
            way = replace(plan.way, weights=weights if plan.way.from_files else None, device=device)
            name = f"{plan.way}{', host' * (plan.way.states == 'host')}"
            memory = memory_beside(device)
            measured[f"{name} s"] = self.seconds(partial(taylor, self.model, family, windows, [samples], way))
            measured[f"{name} planned_bytes"] = plan.largest.total
            measured |= {f"{name} {key}": value for key, value in memory().items()}
            if not way.gradients_by_layer:
                measured[f"{name} perplexity s"] = self.seconds(
                    partial(perplexity, self.model, windows.flatten(), length, residency=way.forward_only)
                )
        return measured

    def transfers(self) -> dict[str, float]:
        """Copy a tensor as large as an MLP projection, as layers are brought and hidden states wait."""
        size = (160, 64) if self.args.tiny else (14_336, 4096)
        on_device = torch.zeros(size, dtype=self.dtype, device=self.device)
        rates = {}
        for name, pinned in (("pageable", False), ("pinned", True)):
            if pinned and self.device.type != "cuda":
                continue
            on_host = torch.ones(size, dtype=self.dtype, pin_memory=pinned)
            for way, target, source in (("to_device", on_device, on_host), ("to_host", on_host, on_device)):
                seconds = self.fastest(partial(target.copy_, source, non_blocking=pinned))
                rates[f"{name}_{way}_bytes_per_s"] = on_host.nbytes / seconds
        return rates

    def widths(self) -> dict[str, float]:
        tokens, hidden = (64, 64) if self.args.tiny else (8192, 4096)
        inputs = torch.randn(tokens, hidden, device=self.device).to(self.dtype)
        rates = {}
        for width in (77, 80, 128) if self.args.tiny else WIDTHS:
            up, down = (
                torch.randn(shape, device=self.device).to(self.dtype) for shape in ((width, hidden), (hidden, width))
            )
            seconds = self.fastest(lambda up=up, down=down: F.linear(F.linear(inputs, up), down))  # type: ignore[misc]
            rates[f"flops_per_s_{width}"] = 4 * tokens * hidden * width / seconds
        return rates

    def sharing(self) -> dict[str, float]:
        """Compare two processes: one works while the other waits, then both."""
        command = [sys.executable, __file__, "--device", self.args.device, *["--tiny"] * self.args.tiny, "--worker"]
        workers = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(2)]
        for worker in workers:  # built and warm
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        alone, together = (sum(self.speeds(some)) for some in (workers[:1], workers))
        for worker in workers:
            worker.communicate()
        return {"tokens_per_s_alone": alone, "tokens_per_s_of_two": together, "ratio": together / alone}

    def speeds(self, workers: Sequence[Any]) -> list[float]:
        """Return tokens per second of each of the processes, at once."""
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        return [float(worker.stdout.readline()) for worker in workers]

    @torch.inference_mode()
    def work(self) -> None:
        """Run layers of the shape for some seconds, at each word on standard input, whose end is this process's too."""
        ids = torch.randint(self.model.config.vocab_size, (8, 64 if self.args.tiny else 512)).to(self.device)
        run = partial(self.model.base_model, input_ids=ids, use_cache=False)
        self.seconds(run)
        print("ready", flush=True)
        for _ in sys.stdin:
            seconds, times = 0.0, 0
            while seconds < (0.2 if self.args.tiny else SHARING_S):
                seconds, times = seconds + self.seconds(run), times + 1
            print(times * ids.numel() / seconds, flush=True)


def main(argv: list[str] | None = None) -> None:
    p = gpu_parser(__doc__)
    p.add_argument("--worker", action="store_true", help="one of the processes that `sharing` starts")
    args = p.parse_args(argv)
    device = device_of(args)
    with Slot("gpu plan", args.limit, args.output) as slot:
        bench = Bench(args, device)
        if args.worker:
            bench.work()
            return
        for name in ("versions", "ways", "transfers", "widths", "sharing"):
            if not slot.begin(name):
                break
            slot.add({"measured": name, **slot.result_or_reason(getattr(bench, name))})
        slot.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
