"""Makes and saves the model of a peer, in its environment: `python -m arena_peers.make MODULE DENSE RATIO OPTIONS TARGET
PRECISION`, the last as precision.py takes it.

MODULE.prune(model, windows, ratio, **OPTIONS) returns the pruned model; OPTIONS is JSON. It is pickled, as peers do, unless the
module says that it is PLAIN: then it is saved as a checkpoint of transformers.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from arena_peers.precision import multiply_in

BATCH = 8  # windows


def accumulate_gradients(model: nn.Module, windows: Tensor) -> None:
    """Leave in every parameter the gradient of the loss of `windows` [samples, T], a sum over batches."""
    for batch in windows.split(BATCH):
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def main(module: str, dense: str, ratio: str, options: str, target: str, precision: str) -> None:
    multiply_in(precision)
    # With sdpa, LLM-Pruner leaves 8 query heads for 2 KV heads; FLAP wants the mask that eager attention is given.
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(dense, attn_implementation="eager")
    model = model.float()  # transformers: from_pretrained returns it in eval mode
    windows = torch.load(Path(dense) / "inputs.pt")["windows"]
    peer = import_module(f"arena_peers.{module}")
    model = peer.prune(model, windows, float(ratio), **json.loads(options))
    model.zero_grad(set_to_none=True)
    folder = Path(target)
    folder.mkdir(exist_ok=True)
    if getattr(peer, "PLAIN", False):
        model.save_pretrained(folder)
    else:
        torch.save(model, folder / "model.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
