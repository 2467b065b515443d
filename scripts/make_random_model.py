"""A model of random weights in the shape of a real one, so that anybody can try the sizes without a download.

    python scripts/make_random_model.py --like mistral-7b --output mistral-random            14.5 GB of bfloat16
    python scripts/make_random_model.py --like llama-3-70b --layers 2 --output two-layers    its first two layers
    tune-prune search --model mistral-random --search-space smoke --data-dir DATA

Written a layer at a time, one safetensors file for each: it takes the memory of one file, not of the model. Weights are normal
with the standard deviation of the family's own initialisation, norms are one; the same seed gives the same bytes. The
tokenizer is a byte-level BPE that was trained on the embedded texts, filled up with tokens that no text makes.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from script_tools import COUNT, FROM_ZERO, script_parser
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast

from tune_prune import embedded
from tune_prune.core.errors import whole_number
from tune_prune.models import loading
from tune_prune.models.families import Family, family_of

# The config.json of published models: model type, then what is not the family's default, but for the stretched positions of
# Llama 3.2.
LLAMA_3: dict[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
LLAMA_3_2 = LLAMA_3 | {"intermediate_size": 8192, "max_position_embeddings": 131_072, "tie_word_embeddings": True}
QWEN_2_5: dict[str, Any] = {"vocab_size": 152_064, "max_position_embeddings": 131_072, "rope_theta": 1e6}
GRANITE_3_3: dict[str, Any] = {
    "vocab_size": 49_159, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "rope_theta": 1e7,
    "tie_word_embeddings": True,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": ("llama", {
        "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
        "tie_word_embeddings": True,
    }),
    "llama-3.2-1b": ("llama", LLAMA_3_2 | {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}),
    "llama-3.2-3b": ("llama", LLAMA_3_2 | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24}),
    "llama-3-8b": ("llama", LLAMA_3 | {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 8192,
    }),
    "llama-3-70b": ("llama", LLAMA_3 | {
        "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "max_position_embeddings": 8192,
    }),
    "mistral-7b": ("mistral", {  # v0.3
        "vocab_size": 32_768, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "sliding_window": None,
    }),
    "qwen2.5-0.5b": ("qwen2", QWEN_2_5 | {
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32_768, "tie_word_embeddings": True,
    }),
    "qwen2.5-1.5b": ("qwen2", QWEN_2_5 | {
        "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }),
    "qwen2.5-7b": ("qwen2", QWEN_2_5 | {
        "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }),
    "qwen2.5-72b": ("qwen2", QWEN_2_5 | {
        "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    }),
    "qwen3-8b": ("qwen3", {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
        "rope_theta": 1e6,
    }),
    "smollm3-3b": ("smollm3", {
        "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "max_position_embeddings": 65_536, "rope_theta": 5e6, "pad_token_id": None,
    }),
    "granite-3.3-2b": ("granite", GRANITE_3_3 | {
        "hidden_size": 2048, "intermediate_size": 8192, "attention_multiplier": 0.015625, "logits_scaling": 8.0,
    }),
    "granite-3.3-8b": ("granite", GRANITE_3_3 | {
        "hidden_size": 4096, "intermediate_size": 12_800, "attention_multiplier": 0.0078125, "logits_scaling": 16.0,
    }),
}  # fmt: skip

DTYPE = torch.bfloat16
# A 16-bit number -> the normal deviate that stands at its place: drawing one takes a look into this table.
NORMAL = torch.special.ndtri((torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16).float()
DRAWN_AT_ONCE = 2**24  # weights
TRAINED_TOKENS = 4096  # the embedded texts hold no more merges that are worth it
END = "<|endoftext|>"


def config_of(name: str, layers: int | None = None, vocab_size: int | None = None) -> PretrainedConfig:
    """Return the config of the published model of that name, with as many layers and tokens as asked for (None: its own)."""
    model_type, values = SHAPES[name]
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": values["rope_theta"]}}
    values = {key: value for key, value in values.items() if key != "rope_theta"} | rope
    changed = {"num_hidden_layers": layers, "vocab_size": vocab_size}
    values |= {key: value for key, value in changed.items() if value is not None}
    return AutoConfig.for_model(model_type, **values, dtype="bfloat16", bos_token_id=0, eos_token_id=0)


def write_model(config: PretrainedConfig, folder: Path, seed: int = 0) -> None:
    """Write a model of `config` with random weights in `folder`. Its index comes last: without it the folder is no model."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = list(_parts(config, family_of(config.model_type)))
    files: dict[str, str] = {}
    for number, shapes in enumerate(parts):
        file = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        tensors = {
            name: _random(name, shape, config.initializer_range, np.random.default_rng([seed, number, index]))
            for index, (name, shape) in enumerate(shapes.items())
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    config.architectures = [type(loading.meta_model(config)).__name__]
    config.save_pretrained(folder)
    _tokenizer(config.vocab_size).save_pretrained(folder)
    index = {"metadata": {"total_size": total_bytes(config)}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def total_bytes(config: PretrainedConfig) -> int:
    return sum(p.numel() for p in loading.meta_model(config).parameters()) * DTYPE.itemsize


def _parts(config: PretrainedConfig, family: Family) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield names and shapes of the tensors of each file: of the embeddings, of every layer, of what stands behind the layers."""
    shapes = {name: tuple(p.shape) for name, p in loading.meta_model(config).named_parameters()}
    prefixes = [f"{family.layers}.{index}." for index in range(config.num_hidden_layers)]
    in_layers = [name.startswith(family.layers) for name in shapes]
    first, end = in_layers.index(True), len(shapes) - in_layers[::-1].index(True)
    names = list(shapes)
    for part in (names[:first], *([n for n in names if n.startswith(prefix)] for prefix in prefixes), names[end:]):
        yield {name: shapes[name] for name in part}


def _random(name: str, shape: tuple[int, ...], std: float, generator: np.random.Generator) -> torch.Tensor:
    """Make ones for a norm, else normal weights."""
    if "norm" in name:
        return torch.ones(shape, dtype=DTYPE)
    table = (std * NORMAL).to(DTYPE).view(torch.int16).numpy()
    bits = np.empty(int(np.prod(shape)), dtype=np.int16)
    for start in range(0, len(bits), DRAWN_AT_ONCE):
        part = bits[start : start + DRAWN_AT_ONCE]
        np.take(table, np.frombuffer(generator.bytes(part.nbytes), dtype="<u2"), out=part, mode="clip")
    return torch.from_numpy(bits).view(DTYPE).view(shape)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab_size` tokens."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=min(vocab_size, TRAINED_TOKENS),
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([embedded.calibration_text(), embedded.perplexity_text()], trainer)
    learnt = json.loads(trained.to_str())["model"]
    vocab = learnt["vocab"] | {f"<unused_{index}>": index for index in range(len(learnt["vocab"]), vocab_size)}
    tokenizer = Tokenizer(BPE(vocab, [tuple(pair) for pair in learnt["merges"]]))
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)


def main(argv: list[str] | None = None) -> None:
    p = script_parser(__doc__)
    p.add_argument("--like", required=True, choices=SHAPES, metavar="NAME", help=", ".join(SHAPES))
    p.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to write, which must not exist")
    p.add_argument("--layers", type=COUNT, metavar="N", help="(default: as many as the model has)")
    p.add_argument(
        "--vocab", type=whole_number(300, 10**9), metavar="N", help="tokens (default: as many as the model has)"
    )
    p.add_argument("--seed", type=FROM_ZERO, default=0, metavar="S", help="of the weights (default: %(default)s)")
    args = p.parse_args(argv)
    config = config_of(args.like, args.layers, args.vocab)
    if args.output.exists():
        p.error(f"--output {args.output} exists; name another folder, or delete it")
    need = total_bytes(config)
    free = shutil.disk_usage(next(path for path in args.output.absolute().parents if path.is_dir())).free
    if need > free:
        p.error(
            f"--output {args.output} needs {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free there; name another place, or "
            "fewer --layers"
        )
    print(f"{args.like}: {need // DTYPE.itemsize:,} parameters, {need / 1e9:.1f} GB", flush=True)
    write_model(config, args.output, args.seed)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
