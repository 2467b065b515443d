"""Tiny trained models with their corpus and tasks, so that every part of a search runs with no network and no GPU.

Made by scripts/train_embedded_models.py and kept in the package: models/<name>/ (config, safetensors weights,
tokenizer), tasks/<task>/ (task.yaml for lm-eval and test.jsonl), calibration.txt and perplexity.txt. Imports nothing
heavy.
"""

from __future__ import annotations

from pathlib import Path

from tune_prune.core.config import EMBEDDED_MODELS as MODEL_NAMES
from tune_prune.core.errors import UserError, did_you_mean

TRAINED_TOKENS = 128  # of a training sample: what the models see beyond them they have never seen

_HERE = Path(__file__).resolve().parent


def model_dir(name: str) -> Path:
    """Folder of an embedded model in Hugging Face format, tokenizer included. An unknown name is a UserError."""
    if name not in MODEL_NAMES:
        raise UserError(f"{name!r} is not an embedded model; {did_you_mean(name, MODEL_NAMES)}")
    return _HERE / "models" / name


def tasks_dir() -> Path:
    """Folder with one folder per zero-shot task: task.yaml and test.jsonl."""
    return _HERE / "tasks"


def calibration_text() -> str:
    """At least 160,000 tokens of the corpus, one document a line; shares no document seed with the perplexity text."""
    return (_HERE / "calibration.txt").read_text(encoding="utf-8")


def perplexity_text() -> str:
    """About 25,000 tokens of the corpus, one document a line."""
    return (_HERE / "perplexity.txt").read_text(encoding="utf-8")
