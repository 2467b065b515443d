"""Stages of a trial whose memory is measured: `python -m tests.memory_stages taylor` prints the bytes by which the resident
set of its fresh process grows at most."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tune_prune.cost_model.memory import MemoryPlan, plan_memory
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models.families import family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.pruning.statistics import Need
from tune_prune.pruning.statistics.taylor import STATISTIC, taylor

STAGES = {"taylor": 8000, "copies": 2000, "evaluation": 8000}  # with the vocabulary of the model


@dataclass(frozen=True)
class Stage:
    plan: MemoryPlan
    run: Callable[[], Any]


def build(name: str) -> Stage:
    """A Llama of four layers with what the plan says of it and the stage `name`, already run once on few tokens, so that
    what torch itself takes at its first use is there."""
    vocab = STAGES[name]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=512,
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    family = family_of("llama")
    snapshots = [5, 20] if name == "copies" else [20]
    work = STATISTIC.work([Need("taylor", "", n) for n in snapshots], 256, 4, "cpu")
    plan = plan_memory(read_geometry(model, family), config, 4, "cpu", [work], 0, 512, 5 * 512, 64)
    windows = torch.randint(vocab, (20, 256))
    taylor(model, family, windows[:1, :4], [1])
    if name == "evaluation":
        return Stage(plan, lambda: perplexity(model, windows.flatten()[: 5 * 512], 512))
    return Stage(plan, lambda: taylor(model, family, windows, snapshots))


def _resident(name: str) -> int:
    """Bytes of this process that the system tells under `name`."""
    return 1024 * int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    stage = build(sys.argv[1])
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    stage.run()
    print(_resident("VmHWM") - before)
