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
    shared keys     causal attention whose query heads share keys, given as they are and repeated for each head, in both data types:
                    seconds, and memory beside what goes in and comes out
    shapes          attention on 50 masks of different shape, the first and the second time, with cuDNN's kernels and without
    sharing         tokens per second of two processes at once over those of one: 1 where one fills the GPU, 2 where it does not
    decoding        seconds of a token, launched kernel by kernel and as a CUDA graph
    loading         bytes per second from a disk (two layers, written just before), and of streaming layers from their files
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_common import timed
from bench_gpu import build
from gpu_measurements import Slot, device_of, gpu_parser, versions
from make_random_model import write_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from tune_prune.checkpoint import generation_speed
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models import catalog, loading
from tune_prune.models.families import decoder_layers, family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.loading import map_model
from tune_prune.models.runner.devices import captured
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.pruning.statistics import Need
from tune_prune.pruning.statistics.taylor import STATISTIC, taylor
from tune_prune.tuning.memory import Shapes

WIDTHS = (11_469, 11_472, 11_520)  # 80% of Mistral-7B's 14,336: free, the next multiple of 8, the next of 64
SHARING_S = 5.0


class Bench:
    def __init__(self, args: Any, slot: Slot) -> None:
        self.args = args
        self.slot = slot
        self.device = torch.device(args.device)
        self.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32

    def measurements(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Yield the name and the function of each measurement, in the order of their value."""
        yield "versions", self.versions
        self.model = build(self.args, self.device, self.dtype)
        self.family = family_of(self.model.config.model_type)
        yield "ways", self.ways
        yield "transfers", self.transfers
        yield "widths", self.widths
        yield "shared keys", self.shared_keys
        yield "shapes", self.shapes
        yield "sharing", self.sharing
        yield "decoding", self.decoding
        del self.model
        yield "loading", self.loading

    def versions(self) -> dict[str, Any]:
        query, key, mask = self.attention(64)
        kernels = [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
        runs = []
        for kernel in kernels:
            with sdpa_kernel(kernel), suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
                F.scaled_dot_product_attention(query, key, key, attn_mask=mask)
                runs.append(kernel.name)
        return {**versions(), "masked_attention": runs}

    def seconds(self, run: Callable[[], object]) -> float:
        def synchronised() -> None:
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        return timed(synchronised)[0]

    def forward(self, rows: int, length: int) -> Callable[[], object]:
        ids = torch.randint(self.model.config.vocab_size, (rows, length)).to(self.device)

        @torch.inference_mode()
        def run() -> object:
            return self.model.base_model(input_ids=ids, use_cache=False)

        return run

    def ways(self) -> dict[str, float]:
        samples, length = (4, 32) if self.args.tiny else (64, 256)
        windows, device = torch.randint(self.model.config.vocab_size, (samples, length)), self.device
        geometry = read_geometry(self.model, self.family)
        shapes = Shapes(geometry, self.model.config, self.dtype.itemsize, device.type)
        work = STATISTIC.work([Need("taylor", "", samples)], length, geometry.num_layers, device.type)
        weights = {name: p.cpu() for name, p in self.model.named_parameters(remove_duplicate=False)}
        text = windows.flatten()
        measured: dict[str, float] = {}
        for plan in shapes.ways([("importance", work)]):
            if plan.way.pruned_whole or plan.way.states == "file":
                continue
            way = replace(plan.way, weights=weights if plan.way.from_files else None, device=device)
            name = f"{plan.way}{', host' * (plan.way.states == 'host')}"
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            measured[f"{name} s"] = self.seconds(partial(taylor, self.model, self.family, windows, [samples], way))
            measured[f"{name} planned_bytes"] = plan.largest.total
            if device.type == "cuda":
                measured[f"{name} bytes"] = torch.cuda.max_memory_allocated() - before
            if not way.gradients_by_layer:
                measured[f"{name} perplexity s"] = self.seconds(
                    partial(perplexity, self.model, text, length, residency=way.forward_only)
                )
        return measured

    def transfers(self) -> dict[str, float]:
        """Copy a tensor as large as an MLP projection, as layers are brought and hidden states wait."""
        size = (160, 64) if self.args.tiny else (14_336, 4096)
        there = torch.zeros(size, dtype=self.dtype, device=self.device)
        found = {}
        for name, pinned in (("pageable", False), ("pinned", True)):
            if pinned and self.device.type != "cuda":
                continue
            here = torch.ones(size, dtype=self.dtype, pin_memory=pinned)
            for way, to, source in (("to_device", there, here), ("to_host", here, there)):
                copy = partial(to.copy_, source, non_blocking=pinned)
                self.seconds(copy)
                found[f"{name}_{way}_bytes_per_s"] = here.nbytes / min(self.seconds(copy) for _ in range(5))
        return found

    def widths(self) -> dict[str, float]:
        tokens, hidden = (64, 64) if self.args.tiny else (8192, 4096)
        inputs = torch.randn(tokens, hidden, device=self.device).to(self.dtype)
        found = {}
        for width in (77, 80, 128) if self.args.tiny else WIDTHS:
            up, down = (
                torch.randn(shape, device=self.device).to(self.dtype) for shape in ((width, hidden), (hidden, width))
            )
            run = lambda up=up, down=down: F.linear(F.linear(inputs, up), down)  # noqa: E731
            self.seconds(run)
            seconds = min(self.seconds(run) for _ in range(5))
            found[f"flops_per_s_{width}"] = 4 * tokens * hidden * width / seconds
        return found

    def shared_keys(self) -> dict[str, float]:
        length, found = 64 if self.args.tiny else 2048, {}
        for dtype in (torch.bfloat16, torch.float32):
            query, key = (torch.randn(4, heads, length, 64, device=self.device).to(dtype) for heads in (32, 8))
            for name, keys in (("shared", key), ("repeated", key.repeat_interleave(4, dim=1))):
                run = partial(
                    F.scaled_dot_product_attention, query, keys, keys, is_causal=True, enable_gqa=name == "shared"
                )
                case = f"{str(dtype).removeprefix('torch.')} {name}"
                self.seconds(run)
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated() + query.nbytes
                found[f"{case} s"] = min(self.seconds(run) for _ in range(5))
                if self.device.type == "cuda":
                    found[f"{case} bytes"] = torch.cuda.max_memory_allocated() - before
        return found

    def shapes(self) -> dict[str, float]:
        lengths = range(16, 66) if self.args.tiny else range(100, 900, 16)
        found = {}
        for cudnn in (False, True):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            for turn in ("first", "second"):
                found[f"{turn}_s_{'with' if cudnn else 'without'}_cudnn"] = sum(map(self.attend, lengths))
        loading.set_up_gpu()
        return found

    def attend(self, length: int) -> float:
        """Seconds of a tree's attention: rows of `length` tokens with a mask of their own."""
        query, key, mask = self.attention(-(-length // 8) * 8)
        return self.seconds(lambda: F.scaled_dot_product_attention(query, key, key, attn_mask=mask))

    def attention(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and mask as transformers gives them: keys are repeated for the query heads of their group."""
        query, key = (torch.randn(4, 32, length, 128, device=self.device).to(self.dtype) for _ in range(2))
        return query, key, torch.zeros(4, 1, length, length, device=self.device, dtype=self.dtype).triu_(1)

    def decoding(self) -> dict[str, float]:
        prompt, steps = (
            torch.randint(self.model.config.vocab_size, (1, 64)).to(self.device),
            8 if self.args.tiny else 64,
        )
        ways: dict[str, Callable[..., tuple[float, float]]] = {"eager": generation_speed._seconds}
        if generation_speed._captured(self.model, prompt):
            ways["graph"] = partial(generation_speed._static_seconds, captured=captured)
        return {
            f"{name}_s": min(way(self.model, prompt, steps)[1] for _ in range(2)) / steps for name, way in ways.items()
        }

    def sharing(self) -> dict[str, float]:
        """One of two processes works while the other waits, then both."""
        command = [sys.executable, __file__, "--device", self.args.device, *["--tiny"] * self.args.tiny, "--worker"]
        workers = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(2)]
        self.slot.children += workers
        for worker in workers:  # built and warm
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        alone, together = (sum(self.speeds(some)) for some in (workers[:1], workers))
        for worker in workers:
            worker.communicate()
        return {"tokens_per_s_alone": alone, "tokens_per_s_of_two": together, "ratio": together / alone}

    def loading(self) -> dict[str, float]:
        """The files are in the page cache, as they are for every worker of a node but the first."""
        config = build(self.args, torch.device("meta"), self.dtype).config
        config.num_hidden_layers = 2
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work) / "model"
            write_model(config, folder)
            source, files = catalog.resolve(str(folder)), sum(f.stat().st_size for f in folder.glob("*.safetensors"))
            whole = self.seconds(lambda: loading.load_model(source, torch.bfloat16, self.args.device))
            streamed = map_model(source, torch.bfloat16, self.args.device)
            runner = LayerRunner(streamed.model, streamed.family, streamed.residency)
            layers = sum(
                p.nbytes for layer in decoder_layers(streamed.model, streamed.family) for p in layer.parameters()
            )
            return {
                "whole_bytes_per_s": files / whole,
                "layers_bytes_per_s": layers / self.seconds(lambda: [index for index, _ in runner.layers()]),
            }

    def speeds(self, workers: Sequence[Any]) -> list[float]:
        """Tokens per second of each of the processes, at once."""
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        return [float(worker.stdout.readline()) for worker in workers]

    def work(self) -> None:
        """Run layers of the shape for some seconds, at each word on standard input."""
        self.model = build(self.args, self.device, self.dtype)
        run = self.forward(8, 64 if self.args.tiny else 512)
        self.seconds(run)
        print("ready", flush=True)
        for _ in sys.stdin:
            seconds, times = 0.0, 0
            while seconds < (0.2 if self.args.tiny else SHARING_S):
                seconds, times = seconds + self.seconds(run), times + 1
            print(times * 8 * (64 if self.args.tiny else 512) / seconds, flush=True)


def main(argv: list[str] | None = None) -> None:
    p = gpu_parser(__doc__)
    p.add_argument("--worker", action="store_true", help="one of the processes that `sharing` starts")
    args = p.parse_args(argv)
    device_of(args)
    with Slot("gpu plan", args.limit, args.output) as slot:
        if args.worker:
            slot.begin("worker")
            Bench(args, slot).work()
            return
        for name, function in Bench(args, slot).measurements():
            if not slot.begin(name):
                break
            slot.add({"measured": name, **slot.told(function)})
        slot.finish()
    slot.check()


if __name__ == "__main__":
    main(sys.argv[1:])
