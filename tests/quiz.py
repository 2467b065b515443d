"""Shared by the tests of zero-shot evaluation: a task of our own, a byte tokenizer and a small model with unequal layers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tune_prune.data.task_files import TaskSource
from tune_prune.evaluation.item_scores import ItemScore
from tune_prune.evaluation.suite import ZeroShotSuite

DATA = Path(os.environ.get("TUNE_PRUNE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
QUIZ_DEFINITION = """\
output_type: multiple_choice
doc_to_text: "{{passage}} Question: {{question}} Answer:"
doc_to_choice: "{{options}}"
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


def byte_tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    """One token per byte, with or without a begin-of-sequence token in front."""
    vocabulary = {"<s>": 0, "</s>": 1}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def unequal_llama(vocab_size: int = 258) -> LlamaForCausalLM:
    """A small Llama whose second layer lost one of its KV groups and most of its channels, as after pruning."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()

    def cut(linear: nn.Linear, rows: slice = slice(None), columns: slice = slice(None)) -> nn.Linear:
        weight = linear.weight.detach()[rows, columns]
        smaller = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        smaller.weight = nn.Parameter(weight.clone())
        return smaller

    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    attention.q_proj = cut(attention.q_proj, rows=slice(16))
    attention.k_proj, attention.v_proj = cut(attention.k_proj, rows=slice(8)), cut(attention.v_proj, rows=slice(8))
    attention.o_proj = cut(attention.o_proj, columns=slice(16))
    mlp.gate_proj, mlp.up_proj = cut(mlp.gate_proj, rows=slice(5)), cut(mlp.up_proj, rows=slice(5))
    mlp.down_proj = cut(mlp.down_proj, columns=slice(5))
    return model


def quiz_items(count: int = 11) -> list[dict]:
    """Items of two to four choices: one-byte choices (equal inputs), long ones, and contexts of many lengths."""
    random = np.random.default_rng(0)
    words = ["red", "a cat", "the blue door", "x", "seven", "water and fire", "no", "I"]
    items = []
    for index in range(count):
        size = int(random.integers(2, 5))
        options = [str(word) for word in random.choice(words, size, replace=False)]
        if index % 3 == 0:
            options = ["a", "b", "c", "d"][:size]
        passage = " ".join(str(word) for word in random.choice(words, int(random.integers(1, 30))))
        items.append({"passage": passage, "question": f"q{index}?", "options": options, "answer": index % size})
    return items


def write_quiz(folder: Path, items: list[dict], definition: str = QUIZ_DEFINITION) -> TaskSource:
    task = folder / "tasks" / "quiz"
    task.mkdir(parents=True, exist_ok=True)
    (task / "task.yaml").write_text(definition, encoding="utf-8")
    (task / "test.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return TaskSource.of(str(folder), embedded=False)


def score_all(
    suite: ZeroShotSuite, model: nn.Module, batch_tokens: int | None = None, share: bool = True
) -> list[ItemScore]:
    return [
        score for index in range(suite.num_slices) for score in suite.score_slice(model, index, batch_tokens, share)
    ]
