"""Stages of a trial whose memory is measured: `python -m tests.memory_stages taylor` prints the bytes by which the resident
set of its fresh process grows at most."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from tests.residencies import in_way
from tune_prune.evaluation.divergence import head_inputs, token_divergences
from tune_prune.evaluation.engine.prefix_trees import score_items
from tune_prune.evaluation.engine.rows import Request
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models.families import family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.models.runner.residency import RESIDENT, WAYS
from tune_prune.pruning.statistics import Need, load_statistic
from tune_prune.pruning.statistics.block_removal import KINDS
from tune_prune.tuning.memory import Shapes, StageMemory

# Statistic and numbers of samples; of an evaluation neither.
STAGES: dict[str, tuple[str, tuple[int, ...]]] = {
    "taylor": ("taylor", (10,)),
    "copies": ("taylor", (5, 10)),
    "taylor by layer": ("taylor", (10,)),
    "taylor streamed": ("taylor", (10,)),
    "removal": ("block_removal", (6,)),
    "removal streamed": ("block_removal", (20,)),
    "input_norms": ("input_norms", (10,)),
    "evaluation": ("", ()),
    "evaluation streamed": ("", ()),
    "kl": ("", ()),
    "zero_shot": ("", ()),
    "zero_shot streamed": ("", ()),
    "taylor of experts": ("taylor", (10,)),
    "taylor of experts by layer": ("taylor", (10,)),
    "expert_outputs of experts": ("expert_outputs", (10,)),
    "evaluation of experts": ("", ()),
}


@dataclass(frozen=True)
class Stage:
    plan: StageMemory
    run: Callable[[], Any]


def build(name: str) -> Stage:
    """A Llama, or a mixture of 8 experts, of four layers with what the plan says of it and the stage `name`, already run once on
    few tokens, so that what torch itself takes at its first use is there."""
    statistic, numbers = STAGES[name]
    vocab = 2000 if name == "copies" else 8000
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    mixture = "of experts" in name
    config = (Qwen3MoeConfig if mixture else LlamaConfig)(
        **(experts if mixture else {}),
        vocab_size=vocab,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    way = RESIDENT
    if name.endswith("by layer"):
        way = WAYS[1]
    elif name.endswith("streamed"):
        model, way = in_way(model, "streamed")
        mapped = way.weights
        # Read, as from a file, whenever it is asked for, into memory that the library does not own.
        way = replace(way, weights=LazyWeights(mapped, lambda name: torch.from_numpy(mapped[name].clone().numpy())))
    family = family_of(config.model_type)
    shapes = Shapes(read_geometry(model, family), config, 4, "cpu")
    windows = torch.randint(vocab, (20, 256))
    if not statistic:
        held = replace(way, from_files=way.streamed)
        _, kl, text, zero_shot = shapes.evaluation(0, 512, 5 * 512, 64, 20 * 64, held)
        if name.startswith("kl"):
            samples = list(windows[:8])
            dense = head_inputs(model, samples, way)
            return Stage(kl, lambda: token_divergences(model, samples, dense, way))
        if name.startswith("zero_shot"):
            rows = [[Request(row[:64].numpy(), row[60:64].numpy()) for row in pair] for pair in windows.split(2)]
            score_items(model, [[Request(row[:4], row[:1]) for row in [windows[0].numpy()]]], residency=way)
            return Stage(zero_shot, lambda: score_items(model, rows, residency=way))
        perplexity(model, windows[0, :4], 4, residency=way)
        return Stage(text, lambda: perplexity(model, windows.flatten()[: 5 * 512], 512, residency=way))
    found = load_statistic(statistic)
    needs = [Need(statistic, kind, n) for kind in (KINDS if statistic == "block_removal" else ("",)) for n in numbers]
    plans = shapes.ways([(found.stage, found.work(needs, 256, 4, "cpu"))])
    own = (str(way), way.pruned_whole)
    (stage,) = next(plan for plan in plans if (str(plan.way), plan.way.pruned_whole) == own).stages
    found.collect(model, family, windows[:1, :4], [Need(statistic, need.kind, 1) for need in needs], way)
    return Stage(stage, lambda: found.collect(model, family, windows, needs, way))


def resident(name: str) -> int:
    """Bytes of this process that the system tells under `name`."""
    return 1024 * int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    stage = build(sys.argv[1])
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    stage.run()
    print(resident("VmHWM") - before)
    gc.freeze()  # the exit would look through torch for garbage
