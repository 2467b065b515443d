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
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, Qwen3Config

from tests.residencies import in_way
from tune_prune.evaluation.divergence import head_inputs, token_divergences
from tune_prune.evaluation.engine.prefix_trees import score_items
from tune_prune.evaluation.engine.rows import Request
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models.families import family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.loading import LoadedModel
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.models.runner.residency import RESIDENT, WAYS
from tune_prune.pruning.compensation import recovery, refit
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.statistics import Need, load_statistic
from tune_prune.pruning.statistics.block_removal import KINDS
from tune_prune.trial.recipe import Recipe
from tune_prune.tuning.memory import Shapes, StageMemory

RANK = 8  # of adapters
# Statistic and numbers of samples; of an evaluation neither.
STAGES: dict[str, tuple[str, tuple[int, ...]]] = {
    "taylor": ("taylor", (10,)),
    "copies": ("taylor", (5, 10)),
    "taylor by layer": ("taylor", (10,)),
    "fisher": ("fisher", (4,)),
    "gate_fisher": ("gate_fisher", (10,)),
    "gate_fisher by layer": ("gate_fisher", (10,)),
    "kfac": ("kfac", (10,)),
    "kfac by layer": ("kfac", (10,)),
    "removal": ("block_removal", (6,)),
    "input_norms": ("input_norms", (10,)),
    "evaluation": ("", ()),
    "taylor streamed": ("taylor", (10,)),
    "removal streamed": ("block_removal", (12,)),
    "evaluation streamed": ("", ()),
    "refit": ("", ()),
    "refit streamed": ("", ()),
    "recovery": ("", ()),
    "recovery by layer": ("", ()),
    "recovery streamed": ("", ()),
    "steps": ("taylor", (10,)),
    "steps of norms": ("input_norms", (10,)),
    "kl": ("", ()),
    "kl streamed": ("", ()),
    "zero_shot": ("", ()),
    "zero_shot streamed": ("", ()),
    "taylor of Qwen3": ("taylor", (10,)),
    "evaluation of Granite": ("", ()),
    "taylor bfloat16": ("taylor", (10,)),
    "evaluation bfloat16": ("", ()),
}


@dataclass(frozen=True)
class Stage:
    plan: StageMemory
    run: Callable[[], Any]


def build(name: str) -> Stage:
    """A model of four layers, Llama if not said otherwise, with what the plan says of it and the stage `name`, already run once on
    few tokens, so that what torch itself takes at its first use is there."""
    statistic, numbers = STAGES[name]
    vocab = 2000 if name.startswith("copies") else 8000
    families = {"Qwen3": Qwen3Config, "Granite": GraniteConfig}
    config = families.get(name.rpartition(" ")[2], LlamaConfig)(
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
    dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    way = RESIDENT
    if name.endswith("by layer"):
        way = WAYS[1]
    elif name.endswith("streamed"):
        model, way = in_way(model, "streamed")
        mapped = way.weights
        # Read, as from a file, whenever it is asked for, into memory that the library does not own.
        way = replace(way, weights=LazyWeights(mapped, lambda name: torch.from_numpy(mapped[name].clone().numpy())))
    family = family_of(config.model_type)
    shapes = Shapes(read_geometry(model, family), config, dtype.itemsize, "cpu")
    windows = torch.randint(vocab, (20, 256))
    if name.startswith("refit"):
        samples = windows.view(-1, refit.WINDOW)
        whole = PruningPlan.keep_all(read_geometry(model, family))
        plan = replace(whole, kept_groups=((0, 1),) * 4, kept_channels=(tuple(range(900)),) * 4)
        plans = shapes.ways([("refit", refit.work(samples.numel(), 4, "cpu"))])
        (stage,) = next(ways for ways in plans if ways.way.streamed == way.streamed).stages
        refit.least_squares(model, family, plan, samples[:2, :4], 0.1, way)
        return Stage(stage, lambda: refit.least_squares(model, family, plan, samples, 0.1, way))
    if name.startswith("recovery"):
        samples, whole = windows.view(-1, recovery.WINDOW), PruningPlan.keep_all(read_geometry(model, family))
        kept = [tuple(range(700))] * 4
        plan = replace(whole, kept_channels=tuple(kept), removed_params=4 * 324 * 3 * 384)
        steps = (len(samples) - recovery.HELD_OUT) // recovery.ROWS
        plans = shapes.ways([("recovery", recovery.step_work(steps, 4, RANK))], removed_params=plan.removed_params)
        own = (str(way), way.pruned_whole)
        (stage,) = next(ways for ways in plans if (str(ways.way), ways.way.pruned_whole) == own).stages
        dense = LoadedModel(None, model, None, family, read_geometry(model, family), way)
        states = head_inputs(model, list(samples), way.forward_only).view(*samples.shape, -1)

        def train(samples: torch.Tensor, states: torch.Tensor, steps: int) -> Any:
            copy, held = Recipe(plan).to_train(dense)
            return recovery.lora(copy, family, samples, states, steps, 0.001, RANK, 0, held)

        few = torch.cat([samples[:1, :4]] * (recovery.HELD_OUT + 1))
        train(few, states[: len(few), :4], 1)
        return Stage(stage, lambda: train(samples, states.clone(), steps))
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
    work, stepped = found.work(needs, 256, 4, "cpu"), name.startswith("steps")
    plans = shapes.ways([(found.stage, replace(work, of_copy=stepped))])
    (stage,) = next(
        plan for plan in plans if (str(plan.way), plan.way.pruned_whole) == (str(way), way.pruned_whole)
    ).stages
    if stepped:  # of a copy from which hardly anything is gone
        whole = PruningPlan.keep_all(read_geometry(model, family))
        plan = replace(whole, kept_channels=(tuple(range(1000)),) * 4, removed_params=4 * 24 * 3 * 384)
        dense = LoadedModel(None, model, None, family, read_geometry(model, family), way)

        def take(samples: torch.Tensor, needs: list[Need]) -> Any:
            copy, held = Recipe(plan).to_train(dense)
            return found.collect(copy, family, samples, needs, held if found.backward else held.forward_only)

        take(windows[:1, :4], [Need(statistic, "", 1)])
        return Stage(stage, lambda: take(windows, needs))
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
