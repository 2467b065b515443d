"""Measurements that only a GPU gives: a model of Mistral-7B's shape with random weights in bfloat16, stage by stage.

    python scripts/bench_gpu.py                        one GPU of 80 GB or more, nine minutes at most
    python scripts/bench_gpu.py --device cpu --tiny    the same code on a model of toy size

Needs torch, transformers, NumPy and pydantic only: no lm-eval and no data. Token ids are random, and as many as the real tasks have
(random_items.py), so the time of a full evaluation is an estimate for those lengths and rows.

Per stage: seconds (median), tokens, achieved FLOP/s as a share of this device's matmul peak, measured in the same dtype, and
memory beside the model: taken, and what a plan says. FLOPs are 2 for each weight that a token passes, 6 in the gradient pass (4
for the head, whose weights get no gradient); attention scores are left out, which makes the shares a little too low (Kaplan et
al. 2020, arXiv:2001.08361). The pruned model is measured as it is cut (free), as it is measured on GPUs (padded to multiples of 64
channels) and in `--shape aligned`, beside the dense one. Zero-shot: shared prefixes, plain rows, and rows as HFLM runs them.

In the order of their value, each is a JSON line, and in --output, as soon as it has ended; after --limit seconds the process
ends, also where a stage hangs. A stage is repeated while that takes less than a twelfth of the limit.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_common import timed
from gpu_measurements import Slot, device_of, gpu_parser, matmul_peak, memory_beside, synchronise, versions
from make_random_model import config_of
from random_items import HFLM_ROWS, random_items, score_as_hflm
from script_tools import COUNT, table
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from tune_prune.evaluation.engine.prefix_trees import count_tokens, plan_rows, score_items, unsupported_reason
from tune_prune.evaluation.engine.rows import Request, default_batch_tokens
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models.families import Family, family_of
from tune_prune.models.geometry import Geometry, read_geometry
from tune_prune.pruning import padding
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.selection import select
from tune_prune.pruning.statistics import Need, block_removal
from tune_prune.pruning.statistics.taylor import STATISTIC, taylor
from tune_prune.pruning.surgery import Sketch, prune
from tune_prune.tuning.memory import Shapes

RATIO = 0.2


@dataclass
class Bench:
    """The model and what its measurements need."""

    model: PreTrainedModel
    family: Family
    geometry: Geometry
    peak_flops: float  # per second, of a matmul in the model's dtype
    slot: Slot
    args: Any

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def head(self) -> int:
        return self.model.config.vocab_size * self.geometry.hidden_size

    @property
    def shapes(self) -> Shapes:
        return Shapes(self.geometry, self.model.config, self.model.dtype.itemsize, self.device.type)

    def stage(self, name: str, tokens: float, flops: float, call: Callable[[], Any], planned: int | None = None) -> Any:
        """Time `call`, and note its cost under `name`; where the memory does not suffice, or the time, note that. `planned`: bytes
        beside what is there, as a plan says."""
        if not self.slot.begin(name):
            return None
        memory = memory_beside(self.device)
        row: dict[str, Any] = {"stage": name, "tokens": tokens, "flops": flops}
        row |= {} if planned is None else {"planned_bytes": planned}
        results: list[Any] = []

        def synchronised() -> None:
            results.clear()  # what a stage makes is there once
            results.append(call())
            synchronise(self.device)

        def measured() -> dict[str, Any]:
            taken: list[float] = []
            while len(taken) < self.args.repeats and (not taken or sum(taken) + taken[-1] < self.slot.limit / 12):
                taken.append(timed(synchronised)[0])
            middle = statistics.median(taken)
            cost = {"seconds": middle, "first_s": taken[0], "repeats": len(taken), "tokens_per_s": tokens / middle}
            return cost | {"utilisation": flops / middle / self.peak_flops, **memory()}

        self.slot.add(row | dict(self.slot.result_or_reason(measured)))
        return results[0] if results else None


def pruned_models(bench: Bench) -> Iterator[tuple[str, PreTrainedModel, int]]:
    """Yield models that are pruned by random scores, in which the widths of a free shape are as odd as they are: name, model,
    parameters by its plan. One is there at a time."""
    random, geometry = np.random.default_rng(0), bench.geometry
    scores = GroupScores.of_layers(
        [(random.random(k), random.random(m)) for k, m in zip(geometry.kv_heads, geometry.mlp_width, strict=True)]
    ).per_parameter(geometry)
    for name, shape in (("free", "free"), ("padded", "free"), ("aligned", f"aligned-{16 if bench.args.tiny else 256}")):
        plan = select(scores, geometry, RATIO, shape)
        model = bench.stage(f"prune {name}", 0, 0, partial(prune, bench.model, bench.family, plan))
        if model is not None:
            if name == "padded":
                padding.pad(Sketch.of(model), bench.family, padding.MULTIPLE["cuda"]).in_memory()
            yield name, model, plan.total_params - plan.removed_params
        del model


def gradients(bench: Bench) -> None:
    args = bench.args
    windows, layers = _windows(bench), bench.geometry.num_layers
    snapshots = sorted({max(1, args.samples // 4), max(1, args.samples // 2), args.samples})
    flops = windows.numel() * (6 * bench.geometry.prunable_params + 4 * bench.head)
    work = STATISTIC.work([Need("taylor", "", n) for n in snapshots], args.seq_len, layers, bench.device.type)
    bench.stage(
        f"gradients {args.samples} x {args.seq_len}", windows.numel(), flops,
        lambda: taylor(bench.model, bench.family, windows, snapshots),
        bench.shapes.ways([("importance", work)])[0].largest.total,
    )  # fmt: skip


def removals(bench: Bench) -> None:
    args, layers, kinds = bench.args, bench.geometry.num_layers, block_removal.KINDS
    few = _windows(bench)[: max(1, args.samples // 5)]
    # The dense pass, and for every kind each layer's removal runs what stands behind the layer.
    whole = 2 * bench.geometry.prunable_params * (1 + len(kinds) * (layers - 1) / 2)
    heads = 2 * bench.head * (1 + len(kinds) * layers)
    needs = [Need("block_removal", kind, len(few)) for kind in kinds]
    work = block_removal.STATISTIC.work(needs, args.seq_len, layers, bench.device.type)
    bench.stage(
        f"removal {len(few)} x {args.seq_len}, {len(kinds)} kinds", few.numel() * (1 + len(kinds) * layers),
        few.numel() * (whole + heads), lambda: block_removal.removal_losses(bench.model, bench.family, few, kinds),
        bench.shapes.ways([("removal", work)])[0].largest.total,
    )  # fmt: skip


def _windows(bench: Bench) -> torch.Tensor:
    shape = bench.args.samples, bench.args.seq_len
    return torch.randint(bench.model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


class Evaluation:
    """Text and items, and what was found of them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        vocab_size, longest = bench.model.config.vocab_size, int(bench.model.config.max_position_embeddings)
        tokens = bench.args.text_tokens
        self.text = torch.randint(vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))
        self.window = min(2048, longest, tokens)
        by_task = random_items(vocab_size, bench.args.items, min(longest, 1024))
        self.items: list[list[Request]] = [item for task in by_task.values() for item in task]
        self.scored = sum(len(request.targets) for item in self.items for request in item)
        self.batch_tokens = default_batch_tokens(bench.model.config, bench.device.type)
        rows = plan_rows(self.items, share=True).all
        longest_row = max(len(row.tokens) for row in rows)
        planned = bench.shapes.evaluation(0, self.window, tokens, longest_row)
        self.planned = {stage.stage: stage.activations for stage in planned}
        self.answers: list[np.ndarray] = []

    def measure(self, name: str, model: PreTrainedModel, params: int) -> None:
        """Measure perplexity, and zero-shot as a trial has it, of a model of so many parameters."""
        embedding = self.bench.head  # looked up, not multiplied by
        layers = params - 2 * embedding
        flops = 2 * len(self.text) * (layers + embedding)
        call = lambda: perplexity(model, self.text, self.window)  # noqa: E731
        self.bench.stage(f"{name}: perplexity", len(self.text), flops, call, self.planned["perplexity"])
        self.zero_shot(f"{name}: zero-shot", model, layers, True, self.batch_tokens, self.planned["zero_shot"])

    def zero_shot(
        self, name: str, model: PreTrainedModel, layers: int, share: bool, batch: int, planned: int | None = None
    ) -> None:
        tokens = count_tokens(self.items, share)
        flops = 2 * tokens * layers + 2 * self.scored * self.bench.head
        scores = self.bench.stage(name, tokens, flops, lambda: score_items(model, self.items, batch, share), planned)
        if scores is not None and model is self.bench.model:
            self.answers.append(scores.loglikelihoods)

    def other_ways(self) -> None:
        """Score the dense model as HFLM does, and with other batches, without shared prefixes too."""
        bench, plain = self.bench, count_tokens(self.items, False)
        layers = bench.geometry.prunable_params
        as_hflm = bench.stage(
            f"dense: zero-shot as HFLM, {HFLM_ROWS} rows", plain, 2 * plain * (layers + bench.head),
            lambda: score_as_hflm(bench.model, self.items),
        )  # fmt: skip
        if as_hflm is not None:
            self.answers.append(as_hflm)
        for share in (False, True):
            for batch in bench.args.batch_tokens:
                name = f"dense: zero-shot {'shared' if share else 'plain'} {batch}"
                self.zero_shot(name, bench.model, layers, share, batch)

    def summary(self) -> dict[str, Any]:
        return {
            "items": len(self.items),
            "tokens": {"shared": count_tokens(self.items, True), "plain": count_tokens(self.items, False)},
            "largest_difference": float(np.ptp(np.stack(self.answers), axis=0).max()) if self.answers else None,
            "unsupported_reason": unsupported_reason(self.bench.model),
        }


def build(args: Any, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    config = config_of("mistral-7b")
    if args.tiny:
        shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 512}
        config = MistralConfig(**shape, sliding_window=None, tie_word_embeddings=False)
    torch.manual_seed(0)
    with device:  # weights are drawn where they stay
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def report(bench: Bench, zero_shot: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = [("stage", "tokens", "seconds", "tokens/s", "of peak", "GiB", "planned")]
    for row in bench.slot.lines:
        if "stage" not in row:
            continue
        memory = [f"{row[key] / 2**30:.1f}" if key in row else "" for key in ("taken_bytes", "planned_bytes")]
        share = f"{row['utilisation']:.1%}" if row["flops"] and "seconds" in row else ""
        rate = int(row["tokens_per_s"]) if row["tokens"] and "seconds" in row else ""
        seconds = row.get("seconds", "out of memory" if "out_of_memory" in row else "failed")
        rows.append((row["stage"], int(row["tokens"]), seconds, rate, share, *memory))
    lines = [
        f"{bench.geometry.total_params:,} parameters, {bench.model.dtype} on {bench.device}; matmul peak "
        f"{bench.peak_flops / 1e12:.2f} TFLOP/s",
        table(rows),
        f"{zero_shot['items']:,} items; largest difference of a log-likelihood between these ways "
        f"{zero_shot['largest_difference']} nats",
    ]
    if zero_shot["unsupported_reason"]:
        lines.append(f"prefixes cannot be shared: {zero_shot['unsupported_reason']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    p = gpu_parser(__doc__)
    p.add_argument("--dtype", choices=("bfloat16", "float32"), help="(default: bfloat16, on a CPU float32)")
    p.add_argument(
        "--repeats",
        type=COUNT,
        default=3,
        metavar="N",
        help="of a stage at most, whose median counts (default: %(default)s)",
    )
    p.add_argument(
        "--samples", type=COUNT, default=512, metavar="N", help="of the gradient pass (default: %(default)s)"
    )
    p.add_argument(
        "--seq-len", type=COUNT, default=256, metavar="T", help="of the gradient pass (default: %(default)s)"
    )
    p.add_argument(
        "--text-tokens", type=COUNT, default=65_536, metavar="N", help="for perplexity (default: %(default)s)"
    )
    p.add_argument("--items", type=COUNT, default=200, metavar="N", help="of each task (default: %(default)s)")
    p.add_argument(
        "--batch-tokens", type=lambda text: tuple(map(COUNT, text.split(","))), default=(4096, 8192, 32768), metavar="A,B",
        help="of the zero-shot engine, besides a trial's own (default: %(default)s)",
    )  # fmt: skip
    args = p.parse_args(argv)
    device = device_of(args)
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    about = {"machine": versions(), "device": args.device, "dtype": str(dtype).removeprefix("torch.")}
    with Slot("gpu", args.limit, args.output, about) as slot:
        slot.begin("model")
        peak = matmul_peak(device, dtype, 8192 if args.device == "cuda" else 512)
        model = build(args, device, dtype)
        family = family_of(model.config.model_type)
        bench = Bench(model, family, read_geometry(model, family), peak, slot, args)
        slot.add({"params": bench.geometry.total_params, "matmul_peak_flops": peak, **about})
        gradients(bench)
        evaluation = Evaluation(bench)
        evaluation.measure("dense", model, bench.geometry.total_params)
        for name, pruned, params in pruned_models(bench):
            evaluation.measure(name, pruned, params)
            del pruned  # before the next one comes
        removals(bench)
        evaluation.other_ways()
        zero_shot = evaluation.summary()
        print(report(bench, zero_shot))
        slot.finish(zero_shot=zero_shot)


if __name__ == "__main__":
    main(sys.argv[1:])
