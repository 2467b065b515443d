"""Makes everything tune_prune/embedded holds: texts, task items, tokenizer and the four trained models.

    python scripts/train_embedded_models.py                      all of it, five to ten minutes a model on one CPU core
    python scripts/train_embedded_models.py --data-only          texts, items and tokenizer, seconds
    python scripts/train_embedded_models.py --model tiny-qwen2   one model

Seeds and steps are fixed, so texts and items are the same on every machine; weights may differ in the last digits.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from embedded_world import corpus, items
from script_tools import COUNT, script_parser
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

from tune_prune import embedded

CALIBRATION_TOKENS = 165_000
PERPLEXITY_TOKENS = 25_000
ITEMS_PER_TASK = 240

BATCH_ROWS = 8
ROW_TOKENS = embedded.TRAINED_TOKENS
LEARNING_RATE = 4e-3
BETAS = (0.9, 0.98)
WARMUP_STEPS = 100
BOS_RATE = 0.5  # so that a model works with and without a beginning-of-sequence token


class Recipe(NamedTuple):
    config_class: type
    layers: int
    intermediate_size: int  # of a mixture: of each expert
    seed: int
    experts: int = 0  # in every layer, of which a token takes two


STEPS = 5000
RECIPES = {
    "tiny-llama": Recipe(LlamaConfig, layers=5, intermediate_size=64, seed=11),
    "tiny-qwen2": Recipe(Qwen2Config, layers=6, intermediate_size=56, seed=12),
    "tiny-mistral": Recipe(MistralConfig, layers=6, intermediate_size=48, seed=13),
    "tiny-qwen3-moe": Recipe(Qwen3MoeConfig, layers=5, intermediate_size=12, seed=14, experts=8),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make one token per word, punctuation mark and line end; spaces vanish, so a continuation starts a new token."""
    split = Regex(r"\n|\w+|[^\w\s]")
    documents = corpus.documents(seed=0)
    words: set[str] = set()
    for _ in range(30_000):
        words.update(token for token, _ in Split(split, "removed", invert=True).pre_tokenize_str(next(documents)))
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", "\n", *sorted(words)])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Split(split, "removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        model_max_length=512,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, config_class: type) -> None:
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 and 5 both know
    if config_class in (Qwen2Config, Qwen3MoeConfig):
        # AutoTokenizer of transformers 5 gives every Qwen model Qwen2's own BPE, which turns this text into nothing,
        # unless an entry claims code of its own; that code is then skipped (untrusted) and the class above taken.
        settings["auto_map"] = {"AutoTokenizer": ["", ""]}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def token_ids(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[list[int]]:
    return tokenizer(documents, add_special_tokens=False)["input_ids"]


def text_of(seed: int, tokenizer: PreTrainedTokenizerFast, tokens: int) -> str:
    """Return the first documents of this seed that together hold at least `tokens` tokens, one a line."""
    lines: list[str] = []
    count = 0
    for document in corpus.documents(seed):
        lines.append(document + "\n")
        count += len(token_ids(tokenizer, lines[-1:])[0])
        if count >= tokens:
            return "".join(lines)
    raise AssertionError("documents are endless")


def write_data(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name, tokens in (("calibration", CALIBRATION_TOKENS), ("perplexity", PERPLEXITY_TOKENS)):
        text = text_of(corpus.SEEDS[name], tokenizer, tokens)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    for task in items.MAKERS:
        lines = [json.dumps(item) + "\n" for item in items.evaluation_items(task, ITEMS_PER_TASK)]
        (folder / "tasks" / task).mkdir(parents=True, exist_ok=True)
        (folder / "tasks" / task / "test.jsonl").write_text("".join(lines), encoding="utf-8")
    for name, recipe in RECIPES.items():
        save_tokenizer(tokenizer, folder / "models" / name, recipe.config_class)


def training_rows(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[list[int]]:
    """Yield endless rows of ROW_TOKENS + 1 tokens, each starting with a document."""
    rng = random.Random(seed)
    documents = corpus.documents(corpus.SEEDS["train"])
    row: list[int] = []
    while True:
        for ids in token_ids(tokenizer, [next(documents) + "\n" for _ in range(1000)]):
            if not row and rng.random() < BOS_RATE:
                row = [tokenizer.bos_token_id]
            row += ids
            if len(row) > ROW_TOKENS:
                yield row[: ROW_TOKENS + 1]
                row = []


def build_model(name: str, vocabulary_size: int) -> PreTrainedModel:
    recipe = RECIPES[name]
    options: dict[str, Any] = {
        "vocab_size": vocabulary_size,
        "hidden_size": 64,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    if recipe.config_class is MistralConfig:
        options["sliding_window"] = None
    if recipe.experts:
        options |= {
            "head_dim": 8,
            "moe_intermediate_size": recipe.intermediate_size,
            "num_experts": recipe.experts,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        }
    torch.manual_seed(recipe.seed)
    return AutoModelForCausalLM.from_config(recipe.config_class(**options), attn_implementation="sdpa")


def train(name: str, tokenizer: PreTrainedTokenizerFast, steps: int) -> PreTrainedModel:
    model = build_model(name, len(tokenizer))
    rows = training_rows(tokenizer, RECIPES[name].seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.01)
    warmup = min(WARMUP_STEPS, max(1, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {parameters:,} parameters, {steps} steps", flush=True)
    # Of a mixture also the loss that has its router use all experts alike.
    routed = {"output_router_logits": True} if RECIPES[name].experts else {}
    start = time.perf_counter()
    total = 0.0
    for step in range(1, steps + 1):
        batch = torch.tensor([next(rows) for _ in range(BATCH_ROWS)])
        output = model(input_ids=batch[:, :-1], use_cache=False, **routed)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch[:, 1:].flatten())
        total += loss.item()
        if routed:
            loss = loss + model.config.router_aux_loss_coef * output.aux_loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 500 == 0:
            print(f"  step {step}: loss {total / 500:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
            total = 0.0
    return model.eval()


@torch.inference_mode()
def accuracies(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Return plain accuracy of each task (highest log-likelihood); one option at a time, for a quick look after training."""

    def log_likelihood(context: str, continuation: str) -> float:
        prefix, rest = token_ids(tokenizer, [context, continuation])
        logits = model(input_ids=torch.tensor([prefix + rest])).logits[0, len(prefix) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(rest)[:, None]).sum().item()

    result = {}
    for task in items.MAKERS:
        right = 0
        for item in items.evaluation_items(task, ITEMS_PER_TASK):
            scores = [log_likelihood(*request) for request in items.requests(task, item)]
            right += scores.index(max(scores)) == items.gold_index(task, item)
        result[task] = right / ITEMS_PER_TASK
    return result


def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=embedded.MODEL_NAMES, default=list(embedded.MODEL_NAMES))
    parser.add_argument(
        "--out", type=Path, default=embedded.tasks_dir().parent, help="folder to write to (default: the package)"
    )
    parser.add_argument("--steps", type=COUNT, default=STEPS, help="of training (default: %(default)s)")
    parser.add_argument("--data-only", action="store_true", help="write texts, items and tokenizer, train nothing")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    write_data(arguments.out, tokenizer)
    if arguments.data_only:
        return
    torch.set_num_threads(1)  # the models are too small to gain from more
    for name in arguments.model:
        model = train(name, tokenizer, arguments.steps)
        model.save_pretrained(arguments.out / "models" / name)
        scores = accuracies(model, tokenizer)
        tasks = "  ".join(f"{task} {accuracy:.3f}" for task, accuracy in scores.items())
        print(f"  {name}: mean {sum(scores.values()) / len(scores):.3f}  {tasks}")


if __name__ == "__main__":
    main()
