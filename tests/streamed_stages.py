"""Memory of passes over a model whose weights stay in their files: `python -m tests.streamed_stages 10` prints, for a model of so
many layers, the bytes by which each stage lets the resident set of this process grow at most."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tests.memory_stages import resident
from tune_prune.checkpoint.manifest import Provenance
from tune_prune.checkpoint.save import save_checkpoint
from tune_prune.core.config import PruningConfig
from tune_prune.evaluation.divergence import head_inputs, token_divergences
from tune_prune.evaluation.engine.prefix_trees import score_items
from tune_prune.evaluation.engine.rows import Request
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models.catalog import resolve
from tune_prune.models.loading import LoadedModel, map_model
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.models.runner.residency import Residency
from tune_prune.models.weight_files import write_weights
from tune_prune.pruning.compensation import recovery
from tune_prune.pruning.compensation.refit import least_squares
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.statistics.block_removal import KINDS, removal_losses
from tune_prune.pruning.statistics.taylor import taylor
from tune_prune.trial.recipe import Recipe

HIDDEN, CHANNELS, VOCABULARY = 768, 2048, 1000
LAYER_BYTES = 4 * (3 * HIDDEN * HIDDEN + 3 * HIDDEN * CHANNELS)  # in float32; half of the query heads share their keys


def write_model(folder: Path, num_layers: int) -> None:
    """Random weights, in files of two layers."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=CHANNELS,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        dtype="float32",
    )
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    model.save_pretrained(folder, state_dict={})
    write_weights(folder, model, LazyWeights(shapes, lambda name: 0.02 * torch.randn(shapes[name])), 2 * LAYER_BYTES)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def stages(dense: LoadedModel, folder: Path) -> dict[str, Callable[[], Any]]:
    model, family, how = dense.model, dense.family, dense.residency
    windows = torch.randint(VOCABULARY, (8, 32))
    rows = [[Request(row.numpy(), row[-4:].numpy()) for row in pair] for pair in windows.split(2)]
    kept = PruningPlan.keep_all(dense.geometry)
    plan = PruningPlan(kept.kept_groups, tuple(width[::2] for width in kept.kept_channels), 0, 0, kept.total_params)
    origin = Provenance(config=PruningConfig("random", 16, 8, 0.2))
    return {
        "gradients": lambda: taylor(model, family, windows, [8], how),
        "removals": lambda: removal_losses(model, family, windows[:2], KINDS, how),
        "refit": lambda: least_squares(model, family, plan, windows, 0.1, how),
        "perplexity": lambda: perplexity(model, windows.flatten(), 64, residency=how),
        "kl": lambda: token_divergences(model, list(windows), head_inputs(model, list(windows), how), how),
        "zero-shot": lambda: score_items(model, rows, residency=how),
        "checkpoint": lambda: save_checkpoint(dense, Recipe(plan), origin, folder / "pruned"),
        "GGUF file": lambda: save_checkpoint(dense, Recipe(plan), origin, folder / "gguf", "gguf"),
        "recovery": lambda: recover(dense, plan),  # the last: it imports PEFT
    }


def recover(dense: LoadedModel, plan: PruningPlan) -> Any:
    samples = torch.randint(VOCABULARY, (recovery.HELD_OUT + recovery.ROWS, 32))
    states = head_inputs(dense.model, list(samples), dense.residency).view(*samples.shape, -1)
    copy, held = Recipe(plan).to_train(dense)
    return recovery.lora(copy, dense.family, samples, states, 1, 0.001, 8, 0, held)


def growth(num_layers: int) -> dict[str, int]:
    """Bytes of every stage, over those that the process had before the first one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", num_layers)
        residency = Residency(states="file")
        dense = map_model(resolve(str(folder / "model")), torch.float32, "cpu", residency)
        taylor(
            dense.model, dense.family, torch.zeros((1, 2), dtype=torch.long), [1], dense.residency
        )  # torch's own first use
        found = {}
        before = resident("VmRSS")
        for stage, run in stages(dense, folder).items():
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
            run()
            found[stage] = resident("VmHWM") - before
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(growth(int(sys.argv[1]))))
    gc.freeze()  # the exit would look through torch for garbage
