"""What only a GPU shows: a model of Mistral-7B's shape with random weights in bfloat16, stage by stage.

    python scripts/bench_gpu.py                        one GPU of 80 GB or more, a few minutes
    python scripts/bench_gpu.py --device cpu --tiny    the same code on a model of toy size

Needs torch, transformers and NumPy only: no lm-eval and no data. Token ids are random; the numbers of choices and the
lengths of prefixes and answers follow the real task files (GPT-2 tokens, first 400 items a task, log-normal), so the time
of a full evaluation is an estimate for those lengths and rows.

Per stage: seconds (median), peak memory, tokens, and achieved FLOP/s as a share of this device's matmul peak, measured in
the same dtype. FLOPs are 2 for each weight that a token passes, 6 in the gradient pass (4 for the head, whose weights get no
gradient); attention scores are left out, which makes the shares a little too low (Kaplan et al. 2020, arXiv:2001.08361).
Zero-shot: shared prefixes, plain rows, and rows as HFLM runs them: 64 at once, logits at every position.

Every stage is a line, and in --output, as soon as it has ended: a run that is cut off keeps what it has measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bench_common import benchmark_parser, median_times, table, write_json
from make_random_model import config_of
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.evaluation.engine.prefix_trees import count_tokens, score_items, unsupported_reason
from tune_prune.evaluation.engine.rows import Request
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models.families import Family, family_of
from tune_prune.models.geometry import Geometry, read_geometry
from tune_prune.models.loading import set_up_gpu
from tune_prune.pruning.selection import select
from tune_prune.pruning.statistics.block_removal import KINDS, removal_losses
from tune_prune.pruning.statistics.taylor import Importance, taylor
from tune_prune.pruning.surgery import prune

HFLM_ROWS = 64
WIKITEXT_TOKENS = 330_000  # of the WikiText-2 test in tokens of a 32k vocabulary
GRID_SEQ_LEN, GRID_SAMPLES, GRID_TRIALS = (16, 32, 64, 128, 256), 512, 45  # the published grid


class Lengths(NamedTuple):
    """What the items of a task look like, in tokens: mean, and spread of the logarithm."""

    rows: int
    choices: int
    prefix: float
    prefix_spread: float
    answer: float  # what a choice adds to the prefix; 0: one token, which is only predicted
    answer_spread: float


TASKS = {
    "boolq": Lengths(3270, 2, 139, 0.48, 0, 0),
    "piqa": Lengths(1838, 2, 22, 0.48, 14, 1.11),
    "hellaswag": Lengths(10042, 4, 30, 0.32, 13, 0.49),
    "winogrande": Lengths(1267, 2, 15, 0.29, 6, 0.45),
    "arc_easy": Lengths(2376, 4, 28, 0.44, 3, 0.82),
    "arc_challenge": Lengths(1172, 4, 32, 0.47, 4.5, 0.83),
    "openbookqa": Lengths(500, 4, 12, 0.58, 2, 0.70),
}


@dataclass
class Bench:
    """The model and what its measurements need."""

    model: PreTrainedModel
    family: Family
    geometry: Geometry
    peak_flops: float  # per second, of a matmul in the model's dtype
    repeats: int
    rows: list[dict[str, Any]]
    output: Path | None = None  # of the stages so far

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def head(self) -> int:
        return self.model.config.vocab_size * self.geometry.hidden_size

    def stage(self, name: str, tokens: float, flops: float, call: Callable[[], Any]) -> Any:
        """Time `call`, and note its cost under `name`; where the memory does not suffice, note that."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        row: dict[str, Any] = {"stage": name, "tokens": tokens, "flops": flops, "out_of_memory": False}
        try:
            seconds, results = median_times({name: self._synchronised(call)}, self.repeats)
        except torch.OutOfMemoryError:
            self._note(row | {"out_of_memory": True})
            return None
        row |= {"seconds": seconds[name], "tokens_per_s": tokens / seconds[name]}
        row["utilisation"] = flops / seconds[name] / self.peak_flops
        if self.device.type == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
        self._note(row)
        return results[name]

    def _note(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        said = "out of memory" if row["out_of_memory"] else f"{row['seconds']:.3g} s"
        print(f"{row['stage']}: {said}", flush=True)
        if self.output is not None:
            atomic_write_text(self.output, to_json({"benchmark": "gpu", "complete": False, "stages": self.rows}))

    def _synchronised(self, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            result = call()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return result

        return run


def matmul_peak(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of the product of two square matrices of `size`: the median of five, after two that are not counted."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def multiply() -> None:
        torch.matmul(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(2):
        multiply()
    seconds, _ = median_times({"matmul": multiply}, 5)
    return 2 * size**3 / seconds["matmul"]


def random_items(vocab_size: int, per_task: int, longest: int) -> dict[str, list[list[Request]]]:
    """`per_task` items of each task in its proportions; no request is longer than `longest`."""
    random = np.random.default_rng(0)

    def length(mean: float, spread: float, most: int) -> int:
        drawn = random.lognormal(np.log(mean) - spread**2 / 2, spread) if mean else 0
        return min(most, max(1, round(drawn)))

    result: dict[str, list[list[Request]]] = {}
    for name, task in TASKS.items():
        result[name] = []
        for _ in range(per_task):
            prefix = random.integers(vocab_size, size=length(task.prefix, task.prefix_spread, longest // 2))
            item = []
            for _ in range(task.choices):
                answer = random.integers(vocab_size, size=1 + length(task.answer, task.answer_spread, longest // 2 - 1))
                if not task.answer:
                    answer = answer[:1]
                item.append(Request(np.concatenate([prefix, answer[:-1]]), answer))
            result[name].append(item)
    return result


@torch.inference_mode()
def score_as_hflm(model: PreTrainedModel, items: list[list[Request]]) -> np.ndarray:
    """Log-likelihoods [n] by HFLM's way: equal inputs once, longest first, logits of every position, softmax in float32."""
    requests = [request for item in items for request in item]
    sharing: dict[bytes, list[int]] = {}
    for index, request in enumerate(requests):
        sharing.setdefault(request.inputs.tobytes(), []).append(index)
    rows = sorted(sharing.values(), key=lambda members: -len(requests[members[0]].inputs))
    found = np.zeros(len(requests))
    for start in range(0, len(rows), HFLM_ROWS):
        batch = rows[start : start + HFLM_ROWS]
        ids = np.zeros((len(batch), len(requests[batch[0][0]].inputs)), dtype=np.int64)
        for row, members in enumerate(batch):
            inputs = requests[members[0]].inputs
            ids[row, : len(inputs)] = inputs
        logits = model(input_ids=torch.from_numpy(ids).to(model.device)).logits
        log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        for row, members in enumerate(batch):
            for request, index in ((requests[index], index) for index in members):
                at = slice(len(request.inputs) - len(request.targets), len(request.inputs))
                targets = torch.from_numpy(request.targets).to(model.device)
                found[index] = log_probs[row, at].gather(1, targets[:, None]).sum().item()
    return found


def prune_stages(bench: Bench, args: Any) -> PreTrainedModel | None:
    """Gradient pass, removal pass and pruning; gives the pruned model, None where the gradients do not fit."""
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(
        bench.model.config.vocab_size, (args.samples, args.seq_len), generator=generator, dtype=torch.long
    )
    tokens, layers = windows.numel(), bench.geometry.num_layers
    snapshots = [max(1, args.samples // 4), max(1, args.samples // 2), args.samples]
    flops = tokens * (6 * bench.geometry.prunable_params + 4 * bench.head)
    found: dict[int, Importance] = bench.stage(
        f"gradients {args.samples} x {args.seq_len}", tokens, flops,
        lambda: taylor(bench.model, bench.family, windows, snapshots),
    )  # fmt: skip
    few = windows[: max(1, args.samples // 5)]
    kinds = KINDS if args.kinds == "all" else tuple(args.kinds.split(","))
    # The dense pass, and for every kind each layer's removal runs what stands behind the layer.
    whole = 2 * bench.geometry.prunable_params * (1 + len(kinds) * (layers - 1) / 2)
    heads = 2 * bench.head * (1 + len(kinds) * layers)
    bench.stage(
        f"removal {len(few)} x {args.seq_len}, {len(kinds)} kinds", few.numel() * (1 + len(kinds) * layers),
        few.numel() * (whole + heads), lambda: removal_losses(bench.model, bench.family, few, kinds),
    )  # fmt: skip
    if not found:
        return None
    scores = found[args.samples].groups.per_parameter(bench.geometry)
    plan = select(scores, bench.geometry, 0.2)
    return bench.stage("prune 20%", 0, 0, lambda: prune(bench.model, bench.family, plan))


def evaluate_stages(bench: Bench, pruned: PreTrainedModel | None, args: Any) -> dict[str, Any]:
    """Perplexity of both models and zero-shot of the dense one; gives tokens and scaling of the zero-shot items."""
    vocab_size, longest = bench.model.config.vocab_size, int(bench.model.config.max_position_embeddings)
    text = torch.randint(vocab_size, (args.text_tokens,), generator=torch.Generator().manual_seed(1))
    window = min(2048, longest, args.text_tokens)
    flops = 2 * args.text_tokens * (bench.geometry.prunable_params + bench.head)
    bench.stage("perplexity", args.text_tokens, flops, lambda: perplexity(bench.model, text, window))
    if pruned is not None:
        weights = sum(parameter.numel() for parameter in pruned.parameters()) - bench.head  # but the embedding
        flops = 2 * args.text_tokens * weights
        bench.stage("pruned: perplexity", args.text_tokens, flops, lambda: perplexity(pruned, text, window))

    by_task = random_items(vocab_size, args.items, min(longest, 1024))
    items = [item for task in by_task.values() for item in task]
    scored = sum(len(request.targets) for item in items for request in item)
    refused = unsupported_reason(bench.model)
    answers: list[np.ndarray] = []
    for share in (True, False):
        tokens = count_tokens(items, share)
        flops = 2 * tokens * bench.geometry.prunable_params + 2 * scored * bench.head
        for batch_tokens in args.batch_tokens:
            name = f"zero-shot {'shared' if share else 'plain'} {batch_tokens}"
            found = bench.stage(
                name, tokens, flops,
                lambda share=share, n=batch_tokens: score_items(bench.model, items, n, share),  # type: ignore[misc]
            )  # fmt: skip
            if found is not None:
                answers.append(found.loglikelihoods)
    plain = count_tokens(items, False)
    flops = 2 * plain * (bench.geometry.prunable_params + bench.head)
    as_hflm = bench.stage(
        f"zero-shot as HFLM, {HFLM_ROWS} rows", plain, flops, lambda: score_as_hflm(bench.model, items)
    )
    if as_hflm is not None:
        answers.append(as_hflm)

    whole = {
        share: sum(TASKS[name].rows / args.items * count_tokens(task, share) for name, task in by_task.items())
        for share in (True, False)
    }
    return {
        "items": len(items),
        "tokens": {"shared": count_tokens(items, True), "plain": plain},
        "whole_tokens": {"shared": whole[True], "plain": whole[False]},
        "largest_difference": float(np.ptp(np.stack(answers), axis=0).max()) if answers else float("nan"),
        "unsupported_reason": refused,
    }


def projection(bench: Bench, zero_shot: dict[str, Any], args: Any) -> dict[str, float]:
    """Seconds of a full evaluation and of the 45-trial grid on one such device, from the measured rates."""

    def best(prefix: str) -> float:
        rates = [row["tokens_per_s"] for row in bench.rows if row["stage"].startswith(prefix) and "seconds" in row]
        return max(rates, default=float("nan"))

    ours = zero_shot["whole_tokens"]["shared"] / best("zero-shot shared")
    hflm = zero_shot["whole_tokens"]["plain"] / best("zero-shot as HFLM")
    text = WIKITEXT_TOKENS / best("perplexity")
    pruning = next((row["seconds"] for row in bench.rows if row["stage"].startswith("prune")), float("nan"))
    tokens = sum(GRID_SEQ_LEN) * GRID_SAMPLES
    gradients = tokens / best("gradients")
    kinds = len(KINDS) if args.kinds == "all" else len(args.kinds.split(","))
    removals = tokens / 5 * (1 + kinds * bench.geometry.num_layers) / best("removal")
    return {
        "zero_shot_s": ours,
        "zero_shot_hflm_s": hflm,
        "zero_shot_speedup": hflm / ours,
        "perplexity_s": text,
        "gradient_passes_s": gradients,
        "removal_passes_s": removals,
        "grid_minutes": (gradients + removals + GRID_TRIALS * (pruning + text + ours) + text + ours) / 60,
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


def report(bench: Bench, zero_shot: dict[str, Any], projected: dict[str, float]) -> str:
    rows: list[tuple[object, ...]] = [("stage", "tokens", "seconds", "tokens/s", "of peak", "memory GiB")]
    for row in bench.rows:
        if row["out_of_memory"]:
            rows.append((row["stage"], int(row["tokens"]), "out of memory", "", "", ""))
            continue
        share = f"{row['utilisation']:.1%}" if row["flops"] else ""
        memory = f"{row['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in row else ""
        rate = int(row["tokens_per_s"]) if row["tokens"] else ""
        rows.append((row["stage"], int(row["tokens"]), row["seconds"], rate, share, memory))
    p = projected
    lines = [
        f"{bench.geometry.total_params:,} parameters, {bench.model.dtype} on {bench.device}; matmul peak "
        f"{bench.peak_flops / 1e12:.2f} TFLOP/s",
        table(rows),
        f"{zero_shot['items']:,} items; largest difference of a log-likelihood between these ways "
        f"{zero_shot['largest_difference']:.2g} nats",
        f"projected: full zero-shot {p['zero_shot_s']:.0f} s (as HFLM {p['zero_shot_hflm_s']:.0f} s, "
        f"{p['zero_shot_speedup']:.1f}x), perplexity {p['perplexity_s']:.0f} s, gradient passes of the grid "
        f"{p['gradient_passes_s']:.0f} s, removal passes {p['removal_passes_s']:.0f} s, grid of 45 trials "
        f"{p['grid_minutes']:.0f} min",
    ]
    if zero_shot["unsupported_reason"]:
        lines.append(f"prefixes cannot be shared: {zero_shot['unsupported_reason']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = benchmark_parser(__doc__, [])
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument(
        "--dtype", default=None, choices=("bfloat16", "float32"), help="(default: bfloat16, on a CPU float32)"
    )
    p.add_argument("--tiny", action="store_true", help="a model of toy size, to try the code")
    p.add_argument("--samples", type=int, default=512, metavar="N", help="of the gradient pass (default: %(default)s)")
    p.add_argument("--seq-len", type=int, default=256, metavar="T", help="of the gradient pass (default: %(default)s)")
    p.add_argument("--kinds", default="attention,mlp,layer", metavar="A,B", help="removals (default: %(default)s)")
    p.add_argument("--text-tokens", type=int, default=65_536, metavar="N", help="for perplexity (default: %(default)s)")
    p.add_argument("--items", type=int, default=200, metavar="N", help="of each task (default: %(default)s)")
    p.add_argument(
        "--batch-tokens", type=lambda text: tuple(map(int, text.split(","))), default=(4096, 8192, 16384, 32768),
        metavar="A,B", help="of the zero-shot engine (default: %(default)s)",
    )  # fmt: skip
    args = p.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: torch finds no GPU here; try the code with --device cpu --tiny")
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    if args.device == "cuda":
        set_up_gpu()  # as workers have it
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    peak = matmul_peak(device, dtype, 8192 if args.device == "cuda" else 512)
    model = build(args, device, dtype)
    family = family_of(model.config.model_type)
    bench = Bench(model, family, read_geometry(model, family), peak, args.repeats, [], args.output)
    # The pruned copy stays while the dense model is measured: a trial holds both.
    pruned = prune_stages(bench, args)
    zero_shot = evaluate_stages(bench, pruned, args)
    if pruned is None:
        raise SystemExit(f"error: the gradient pass does not fit into the memory of {device}; use a larger GPU")
    projected = projection(bench, zero_shot, args)
    print(report(bench, zero_shot, projected))
    values = {
        "benchmark": "gpu",
        "complete": True,
        "params": bench.geometry.total_params,
        "dtype": str(dtype).removeprefix("torch."),
        "device": args.device,
        "matmul_peak_flops": peak,
        "stages": bench.rows,
        "zero_shot": zero_shot,
        "projection": projected,
    }
    write_json(args.output, values)
    return values


if __name__ == "__main__":
    main(sys.argv[1:])
