"""Writes what all rows of the arena share, as token ids: the calibration windows that tune_prune takes, the perplexity text, the
questions; and the dense model as a plain checkpoint. Run by scripts/arena.py in a process of its own, as only it needs tune_prune.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import tune_prune
from arena_peers.scoring import Question
from tune_prune.core.ending import exit_code
from tune_prune.data import calibration

TASKS = {"arc_easy": "test", "piqa": "validation", "hellaswag": "validation"}  # and the split that is asked


def asked(task: str, item: dict[str, Any]) -> tuple[str, list[str], int]:
    """Return question, choices and index of the right one, in the words of lm-eval's definitions."""
    if task == "arc_easy":
        choices = item["choices"]
        return f"Question: {item['question']}\nAnswer:", choices["text"], choices["label"].index(item["answerKey"])
    if task == "piqa":
        return f"Question: {item['goal']}\nAnswer:", [item["sol1"], item["sol2"]], item["label"]
    begun = f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}"
    return _clean(begun), [_clean(ending) for ending in item["endings"]], int(item["label"])


def _clean(text: str) -> str:
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def questions(tokenizer: PreTrainedTokenizerBase, folder: Path, limit: int) -> Iterator[Question]:
    """Yield the first `limit` questions of each of `TASKS` in `folder`/tasks as token ids."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for task, split in TASKS.items():
        lines = (folder / "tasks" / task / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")
        for line in lines[:limit]:
            question, choices, gold = asked(task, json.loads(line))
            before = len(ids(question))
            whole = [ids(f"{question} {choice}") for choice in choices]
            yield Question(task, [(tokens, len(tokens) - before) for tokens in whole], gold)


def as_llama(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of Qwen2 as one of Llama's, the family that all peers know, with the same weights, to be saved (it has no
    rotary buffers): its biases of queries, keys and values are those of `attention_bias`, that of the output is 0. Others as they
    are."""
    if model.config.model_type != "qwen2":
        return model
    names = set(LlamaConfig().to_dict()) & set(model.config.to_dict()) - {"model_type", "architectures"}
    config = LlamaConfig(**{name: getattr(model.config, name) for name in names}, attention_bias=True)
    state, zeros = model.state_dict(), torch.zeros(config.hidden_size)
    state |= {f"model.layers.{layer}.self_attn.o_proj.bias": zeros.clone() for layer in range(config.num_hidden_layers)}
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    llama.load_state_dict(state, assign=True)
    llama.tie_weights()
    return llama


def write(args: argparse.Namespace) -> None:
    opened = tune_prune.open(args.model, data_dir=args.data_dir, dtype="float32", device="cpu")
    tokenizer, data = opened.tokenizer, Path(args.data_dir)
    text = calibration.tokens_of(tokenizer, calibration.resolve(args.calibration, args.data_dir, False))
    lines = (data / "text" / "wikitext2-raw.test.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    judged = calibration.tokenize(tokenizer, "\n\n".join(line if line.strip() else "" for line in lines))
    as_llama(opened.model).save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    config = args.folder / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    # transformers 4.46 knows the frequency of rotary embeddings by this name only, and takes another where it is absent
    values["rope_theta"] = values["rope_parameters"]["rope_theta"]
    config.write_text(json.dumps(values, indent=2), encoding="utf-8")
    shared = {
        "windows": calibration.samples(text, args.seq_len, args.samples, args.seed),
        "text": judged[: args.perplexity_tokens],
        "questions": [tuple(question) for question in questions(tokenizer, data, args.limit)],
    }
    torch.save(shared, args.folder / "inputs.pt")  # last: there, everything is


if __name__ == "__main__":
    settings = argparse.Namespace(**json.loads(sys.argv[1]))
    settings.folder = Path(settings.folder)
    sys.exit(exit_code(lambda: write(settings)))
