"""Models that tune_prune has made smaller, for mlx_lm: every layer with its own widths, or with one of its two blocks alone.

    mlx_lm.generate --model FOLDER --trust-remote-code --prompt "Once upon a time"

config.json names this file as its `model_file`. It needs mlx and mlx_lm (0.32 or later) only, and computes what
modeling_tune_prune.py does in transformers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.llama import MLP
from mlx_lm.models.rope_utils import initialize_rope

# Of the ways to scale rotary embeddings those in which mlx_lm and transformers agree at every length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = {"silu": nn.silu, "gelu_pytorch_tanh": nn.gelu_approx}


class ModelArgs(SimpleNamespace):
    """The fields of config.json."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelArgs:
        return cls(**fields)

    def of_layer(self, index: int) -> ModelArgs:
        """Return the fields as layer `index` has them; its list `skip` names the blocks that are not there."""
        layers = {int(number): fields for number, fields in self.per_layer_config.items()}
        return ModelArgs(**vars(self) | {"skip": []} | layers.get(index, {}))


def is_gemma(args: ModelArgs) -> bool:
    """Return whether norms multiply by 1 + weight, and embeddings by the root of the hidden size."""
    return args.model_type in ("tune_prune_gemma", "tune_prune_gemma3_text")


class GemmaNorm(nn.RMSNorm):
    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 1 + self.weight, self.eps)


def norm(args: ModelArgs, dims: int) -> nn.RMSNorm:
    return (GemmaNorm if is_gemma(args) else nn.RMSNorm)(dims, eps=args.rms_norm_eps)


def scaled(x: mx.array, factor: float) -> mx.array:
    """Return x times `factor`, without an operation where that is 1."""
    return x if factor == 1 else x * factor


def output_bias(args: ModelArgs) -> bool:
    """Return whether the last projection of attention has a bias, too: GLM-4's has none."""
    return getattr(args, "attention_bias", False) and args.model_type != "tune_prune_glm4"


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, dim = args.num_attention_heads, args.num_key_value_heads, args.head_dim
        bias = getattr(args, "attention_bias", False)
        qkv_bias = bias or args.model_type == "tune_prune_qwen2"  # which always has them, and no field that says so
        self.q_proj = nn.Linear(args.hidden_size, self.heads * dim, bias=qkv_bias)
        self.k_proj = nn.Linear(args.hidden_size, self.kv_heads * dim, bias=qkv_bias)
        self.v_proj = nn.Linear(args.hidden_size, self.kv_heads * dim, bias=qkv_bias)
        self.o_proj = nn.Linear(self.heads * dim, args.hidden_size, bias=output_bias(args))
        self.normed = args.model_type in ("tune_prune_qwen3", "tune_prune_gemma3_text")
        if self.normed:
            self.q_norm, self.k_norm = (norm(args, dim) for _ in range(2))
        self.scale = getattr(args, "attention_multiplier", getattr(args, "query_pre_attn_scalar", dim) ** -0.5)
        rope = args.rope_parameters
        if "rope_type" not in rope:  # one for each kind of layer
            rope = rope[args.layer_types[index]]
        if rope["rope_type"] not in ROPE_TYPES:
            raise ValueError(f"rotary embeddings of the type {rope['rope_type']} are not among {', '.join(ROPE_TYPES)}")
        # Of Ministral-3: queries grow with the logarithm of their position.
        self.growth, self.unscaled = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        self.rotated = bool(getattr(args, "no_rope_layers", {index: 1})[index])
        rotated, pairs = int(dim * rope.get("partial_rotary_factor", 1)), args.model_type == "tune_prune_glm4"
        self.rope = initialize_rope(rotated, rope["rope_theta"], pairs, rope, args.max_position_embeddings)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x [batch, time, hidden] -> the same shape; `cache` gets the keys and values of these positions."""
        batch, time, _ = x.shape
        q = self.q_proj(x).reshape(batch, time, self.heads, -1)
        k = self.k_proj(x).reshape(batch, time, self.kv_heads, -1)
        v = self.v_proj(x).reshape(batch, time, self.kv_heads, -1)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(0, 2, 1, 3) for part in (q, k, v))  # [batch, heads, time, head_dim]
        offset = 0 if cache is None else cache.offset
        if self.rotated:
            q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        if self.growth:
            # The rows of a batch may begin at places of their own, below 0 where they are filled up on the left.
            positions = mx.maximum(mx.arange(time) + mx.array(offset).reshape(-1, 1), 0)
            growth = 1 + self.growth * mx.log(1 + positions // self.unscaled)
            q = q * growth[:, None, :, None].astype(q.dtype)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, time, -1))


class GemmaMLP(MLP):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.activation = ACTIVATIONS[getattr(args, "hidden_activation", None) or args.hidden_act]

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class RemovedBlock(nn.Module):
    """What is left of a block whose parts are all gone: nothing, or the bias of its last projection, under its old name."""

    def __init__(self, projection: str, dims: int, bias: bool) -> None:
        super().__init__()
        self.projection = projection if bias else None
        if bias:
            self[projection] = nn.Module()
            self[projection].bias = mx.zeros(dims)

    def __call__(self, x: mx.array, *_: Any) -> mx.array:
        return mx.zeros_like(x) if self.projection is None else mx.broadcast_to(self[self.projection].bias, x.shape)


class Layer(nn.Module):
    def __init__(self, args: ModelArgs, index: int) -> None:
        super().__init__()
        widths, dims = args.of_layer(index), args.hidden_size
        kind = getattr(args, "layer_types", {index: "full_attention"})[index]
        kinds = ("tune_prune_mistral", "tune_prune_ministral3", "tune_prune_phi3")
        slides = kind == "sliding_attention" or args.model_type in kinds
        self.window = args.sliding_window if slides else None
        self.residual_multiplier = getattr(args, "residual_multiplier", 1)
        self.input_layernorm, self.post_attention_layernorm = norm(args, dims), norm(args, dims)
        # Also behind each block, where Gemma 3 and GLM-4 call them otherwise.
        self.four_norms = args.model_type == "tune_prune_gemma3_text"
        if self.four_norms:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(args, dims), norm(args, dims)
        self.norms_behind = args.model_type == "tune_prune_glm4"
        if self.norms_behind:
            self.post_self_attn_layernorm, self.post_mlp_layernorm = norm(args, dims), norm(args, dims)
        self.attends = "attention" not in widths.skip
        self.self_attn = Attention(widths, index) if self.attends else RemovedBlock("o_proj", dims, output_bias(args))
        self.mlp = (
            (GemmaMLP if is_gemma(args) else MLP)(widths)
            if "mlp" not in widths.skip
            else RemovedBlock("down_proj", dims, getattr(args, "mlp_bias", False))
        )

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if self.four_norms:
            x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), mask, cache))
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if self.norms_behind:
            x = x + self.post_self_attn_layernorm(self.self_attn(self.input_layernorm(x), mask, cache))
            return x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))
        x = x + scaled(self.self_attn(self.input_layernorm(x), mask, cache), self.residual_multiplier)
        return x + scaled(self.mlp(self.post_attention_layernorm(x)), self.residual_multiplier)


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embedding_multiplier = (
            args.hidden_size**0.5 if is_gemma(args) else getattr(args, "embedding_multiplier", 1)
        )
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Layer(args, index) for index in range(args.num_hidden_layers)]
        self.norm = norm(args, args.hidden_size)

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        x = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        x = scaled(x, self.embedding_multiplier)
        caches = iter(cache or [None] * len(self.layers))
        masks: dict[int | None, Any] = {}  # by window
        for layer in self.layers:
            place = next(caches) if layer.attends else None
            if layer.attends and layer.window not in masks:
                masks[layer.window] = create_attention_mask(x, place, window_size=layer.window)
            x = layer(x, masks.get(layer.window), place)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.model = Decoder(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        """Token ids [batch, time] -> logits [batch, time, vocabulary]."""
        x = self.model(inputs, cache, input_embeddings)
        logits = self.model.embed_tokens.as_linear(x) if self.args.tie_word_embeddings else self.lm_head(x)
        logits = scaled(logits, 1 / getattr(self.args, "logits_scaling", 1))
        cap = getattr(self.args, "final_logit_softcapping", None)
        return mx.tanh(logits / cap) * cap if cap else logits

    @property
    def layers(self) -> list[Layer]:
        return self.model.layers

    def make_cache(self) -> list[Any]:
        """Return an empty cache for each layer with an attention, as mlx_lm asks for them."""
        windows = [layer.window for layer in self.layers if layer.attends]
        return [KVCache() if window is None else RotatingKVCache(max_size=window) for window in windows]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Cut fused projections apart, and leave out weights without elements: of a removed block's last projection the bias alone
        counts."""
        apart = {}
        for name, weight in weights.items():
            block, _, matrix = name.removesuffix(".weight").rpartition(".")
            rows = len(weight)
            if matrix == "qkv_proj":
                attention = self.layers[int(block.split(".")[2])].self_attn
                groups = attention.heads + 2 * attention.kv_heads
                ends = [rows * count // groups for count in (attention.heads, attention.heads + attention.kv_heads)]
                parts = dict(zip(("q_proj", "k_proj", "v_proj"), mx.split(weight, ends), strict=True))
            elif matrix == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), mx.split(weight, 2), strict=True))
            else:
                apart[name] = weight
                continue
            apart |= {f"{block}.{part}.weight": weight for part, weight in parts.items()}
        return {name: weight for name, weight in apart.items() if weight.size}
