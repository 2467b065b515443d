"""Run by test_mlx.py: a program that loads checkpoints as mlx_lm does, where neither tune_prune nor torch is installed.

    python -P mlx_reader.py ANSWER.safetensors        < {"name": "folder", ...}

Each folder has a case.safetensors with `ids` [B, T]. Of each the answer has

    name/logits    of them, [B, T, V]
    name/tokens    the greedy ones behind each row, decoded with a cache, [B, N]
    name/logprobs  of all tokens there, [B, N, V]
    name/batch     the tokens behind all rows at once, the first of them whole and the others without their last three, [B, N]

A folder that mlx_lm refuses is not in it: its error is printed, as JSON by name.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import load_model

NEW_TOKENS = 8


def at_once(model, rows):
    generator = BatchGenerator(model, max_tokens=NEW_TOKENS)
    tokens = {number: [] for number in generator.insert(rows)}
    while any(len(row) < NEW_TOKENS for row in tokens.values()):
        for response in generator.next_generated():
            tokens[response.uid].append(response.token)
    return mx.array([*tokens.values()])


def read(folder):
    model, _ = load_model(folder, trust_remote_code=True)
    ids = mx.load(str(folder / "case.safetensors"))["ids"]
    rows = ids.tolist()
    # In steps of 4 tokens, so that a sliding window is passed while the prompt is read.
    step = {"max_tokens": NEW_TOKENS, "prefill_step_size": 4}
    made = [[*generate_step(mx.array(row), model, **step)] for row in rows]
    return {
        "logits": model(ids),
        "tokens": mx.array([[int(token) for token, _ in one] for one in made]),
        "logprobs": mx.stack([mx.stack([logprobs for _, logprobs in one]) for one in made]),
        "batch": at_once(model, [rows[0], *(row[:-3] for row in rows[1:])]),
    }


assert find_spec("torch") is None and find_spec("tune_prune") is None
answers, errors = {}, {}
for name, folder in json.load(sys.stdin).items():
    try:
        answers |= {f"{name}/{key}": value for key, value in read(Path(folder)).items()}
    except ValueError as error:
        errors[name] = str(error)
mx.save_safetensors(sys.argv[1], answers)
print(json.dumps(errors))
