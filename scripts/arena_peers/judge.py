"""Scores a saved model: `python -m arena_peers.judge MODEL DENSE OUTPUT PRECISION`, in the environment that can load it.

MODEL is a folder: a pickled module in model.pt, or a checkpoint of transformers. The dense model's log-probabilities are kept
beside it, so that all rows are compared with the same ones.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from arena_peers.precision import multiply_in
from arena_peers.scoring import Question, log_probabilities, score

KL_TOKENS = 1024


def main(model_folder: str, dense_folder: str, output: str, precision: str) -> None:
    multiply_in(precision)
    folder, dense = Path(model_folder), Path(dense_folder)
    if (folder / "model.pt").is_file():
        model = torch.load(folder / "model.pt", weights_only=False)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).float()
    inputs, kept = torch.load(dense / "inputs.pt"), dense / "log_probabilities.pt"
    if not kept.is_file():  # the row of the dense model is the first
        with torch.inference_mode():
            torch.save(log_probabilities(model, inputs["text"][:KL_TOKENS]), kept)
    row = score(model, inputs["text"], [Question(*one) for one in inputs["questions"]], torch.load(kept))
    row["transformers"] = transformers.__version__
    unfinished = Path(output).with_suffix(".unfinished")
    unfinished.write_text(json.dumps(row), encoding="utf-8")
    os.replace(unfinished, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
