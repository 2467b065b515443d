"""Checkpoints of tiny pruned models, the dense model that each must equal, and processes that have nothing but their files."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.conftest import VARIANTS, build_tiny
from tests.pruning.test_surgery import ALL_CHANNELS, ALL_GROUPS, KEEP_SETS, plan_of, tokens, zeroed
from tune_prune.checkpoint import layers
from tune_prune.checkpoint.manifest import Format
from tune_prune.models import fused
from tune_prune.models.families import FAMILIES
from tune_prune.models.geometry import read_geometry
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import Sketch, cut

ROOT = Path(__file__).resolve().parents[1]
READER = Path(__file__).with_name("checkpoint_reader.py")
FLOAT32_TOLERANCE = 2e-5  # norms behind blocks, as GLM-4 has them, enlarge what little a block puts out

_EIGHTHS = tuple(tuple(range(start, start + width)) for start, width in ((0, 16), (3, 8), (8, 32), (0, 40)))
# Kept groups and channels, layer by layer, as in test_surgery; its sets have the shape "free".
SHAPES = KEEP_SETS | {
    "aligned": (((1, 3), (0,), ALL_GROUPS, (2,)), _EIGHTHS),
    "uniform": (((1, 3), (0, 1), (0, 3), (2, 3)), tuple(tuple(range(start, start + 24)) for start in (0, 16, 5, 9))),
    "whole blocks only": ((ALL_GROUPS, (), ALL_GROUPS, ALL_GROUPS), (ALL_CHANNELS, ALL_CHANNELS, (), ALL_CHANNELS)),
}
STOCK = ("nothing removed", "uniform")  # what a plain config of the family can say
PADDED = ("different in every layer", "both of a middle layer")
THOROUGH = ("both of a middle layer", "uniform")  # loaded in every way, not only once
WHOLE = ("llama", "llama-biases", "qwen2-sliding", "qwen3-biases-tied")  # variants in every shape


@dataclass(frozen=True)
class Case:
    """A checkpoint on disk and the dense model, float32, with what it lacks set to zero."""

    folder: Path
    truth: PreTrainedModel
    plan: PruningPlan
    padded: bool
    stock: bool  # loads without any code
    bfloat16_error: float  # of the dense model's logits


def write_case(folder: Path, variant: str, shape: str, padded: bool = False, **overrides: Any) -> Case:
    """Saves a variant with `overrides` in its config, pruned to a shape; beside it, in case.safetensors, inputs with the logits
    that they must give."""
    model = build_tiny(variant, torch.float32, **overrides)
    plan = plan_of(model, FAMILIES[model.config.model_type], *SHAPES[shape])
    small = as_saved(model, plan, "hf-padded" if padded else "hf")
    small.save_pretrained(folder)
    truth, ids = zeroed(model, plan), tokens()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        expected = {
            "ids": ids,
            "logits": truth(input_ids=ids, use_cache=False).logits,
            "mask": mask,
            "masked_logits": truth(input_ids=ids, attention_mask=mask, use_cache=False).logits,
        }
        in_bfloat16 = copy.deepcopy(truth).to(torch.bfloat16)(input_ids=ids, use_cache=False).logits
        bfloat16_error = (in_bfloat16 - expected["logits"]).abs().max().item()
    save_file(expected, folder / "case.safetensors")
    return Case(folder, truth, plan, padded, padded or type(small) is type(model), bfloat16_error)


def as_saved(model: PreTrainedModel, plan: PruningPlan, fmt: Format = "hf") -> PreTrainedModel:
    """The pruned model as its files describe it."""
    family = FAMILIES[model.config.model_type]
    small, _ = layers.compact(cut(model, family, plan), family)
    saved = layers.as_saved(small, model, family, read_geometry(model, family), fmt)
    return Sketch(*fused.put_together(saved.model, saved.weights, family)).in_memory()


def write_cases(folder: Path) -> dict[str, Case]:
    """Every variant in the shapes that are read thoroughly, some in every shape, and some padded, by "variant/shape[/padded]"."""
    cases = {}
    for variant in VARIANTS:
        for shape in SHAPES if variant in WHOLE else THOROUGH:
            for padded in (False, True) if shape in PADDED else (False,):
                name = f"{variant}/{shape}" + "/padded" * padded
                cases[name] = write_case(folder / name.replace(" ", "_").replace("/", "."), variant, shape, padded)
    return cases


def alone(modules: Path) -> dict[str, str]:
    """The environment of a process that has Hugging Face's cache of code in `modules` and not this package on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return environment | {"HF_MODULES_CACHE": str(modules), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def read_alone(cases: dict[str, Case], modules: Path, how: str) -> dict[str, Any]:
    """Return what tests/checkpoint_reader.py finds out about each case, in a process of its own with `modules`, a new folder, as
    Hugging Face's cache of code. It is told `how`; the package is on its path only where that is "registered"."""
    assert not modules.exists()
    environment = alone(modules)
    if how == "registered":
        environment["PYTHONPATH"] = str(ROOT)
    request = {name: [str(case.folder), name.partition("/")[2] in THOROUGH] for name, case in cases.items()}
    answer = modules.with_suffix(".json")
    done = subprocess.run(
        [sys.executable, "-P", str(READER), how, str(answer)],
        input=json.dumps(request),
        env=environment,
        cwd=modules.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(answer.read_text("utf-8"))
