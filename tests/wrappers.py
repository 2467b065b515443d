"""Tiny models that read images, with a language model of a family inside: in folders as their repositories are, and what must
come out of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from tests.conftest import SIZES, VARIANTS
from tests.pruning.test_surgery import ALL_GROUPS, HEAD_DIM, QUERIES_PER_KV
from tune_prune import embedded
from tune_prune.models.stored_experts import stored_buffers, stored_tensors
from tune_prune.pruning.groups import PruningPlan

IMAGE = 40  # the token in whose place a part of an image stands: none of test_surgery's
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "head_dim": 8, "patch_size": 4, "image_size": 16,
}  # fmt: skip
SIGLIP: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 16,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
    "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 16, "use_clipped_linears": True,
    "standardize": True,
}  # fmt: skip
GEMMA4_AUDIO: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16,
}  # fmt: skip
UNIFIED_VISION: dict[str, Any] = {
    "patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16,
}  # fmt: skip
# The wrapper, the variant inside, and its own fields, by a name.
WRAPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral3": ("mistral3", "mistral", {"vision_config": PIXTRAL, "image_token_index": IMAGE}),
    "mistral3-ministral3": ("mistral3", "ministral3", {"vision_config": PIXTRAL, "image_token_index": IMAGE}),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {"vision_config": SIGLIP, "mm_tokens_per_image": 4, "image_token_index": IMAGE},
    ),
    "gemma4": (
        "gemma4",
        "gemma4_text",
        {"vision_config": GEMMA4_VISION, "audio_config": GEMMA4_AUDIO, "image_token_id": IMAGE},
    ),
    "gemma4_unified": (
        "gemma4_unified",
        "gemma4_unified_text",
        {"vision_config": UNIFIED_VISION, "audio_config": {"audio_embed_dim": 16}, "image_token_id": IMAGE},
    ),
    "qwen3_5": (
        "qwen3_5",
        "qwen3_5_text",
        {"vision_config": QWEN, "image_token_id": IMAGE, "vision_start_token_id": 4},
    ),
    "mistral3-tied": ("mistral3", "ministral3-sliding-tied", {"vision_config": PIXTRAL, "image_token_index": IMAGE}),
}


def build_wrapper(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model, as conftest.build_tiny makes them."""
    model_type, variant, fields = WRAPPED[name]
    family, inside = VARIANTS[variant]
    text = SIZES | inside | {"model_type": family}
    fields = fields | {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type, **fields), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter_name, p in model.named_parameters():
        values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        mean = 0 if name == "gemma3" else 1  # of norms' weights: theirs multiply by 1 more
        p.data.copy_(mean + 0.3 * values if "norm" in parameter_name else values / p.shape[-1] ** 0.5)
    for buffer_name, buffer in stored_buffers(model).items():  # of Gemma 4: factors and bounds
        values = 1 + 0.3 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64)
        buffer.copy_(-values if buffer_name.endswith("_min") else values)
    return model.eval().requires_grad_(False)


def write_wrapper(
    folder: Path, name: str, dtype: torch.dtype = torch.float64, as_named: bool = False
) -> PreTrainedModel:
    """Write that model and a tokenizer; its files name tensors as those of the hub do, or (`as_named`) as transformers does."""
    model = build_wrapper(name, dtype)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama")).save_pretrained(folder)
    if as_named:
        save_file(
            {name: p.clone() for name, p in stored_tensors(model)}, folder / "model.safetensors", {"format": "pt"}
        )
    return model


def zeroed_inside(whole: PreTrainedModel, plan: PruningPlan) -> PreTrainedModel:
    """The model with the o and down columns of all groups at zero that `plan` removes."""
    reference, width = copy.deepcopy(whole), QUERIES_PER_KV * HEAD_DIM
    layers = reference.model.language_model.layers
    for layer, groups, channels in zip(layers, plan.kept_groups, plan.kept_channels, strict=True):
        for group in set(ALL_GROUPS) - set(groups) if any(plan.kept_groups) else ():  # else attention stays whole
            layer.self_attn.o_proj.weight[:, group * width : (group + 1) * width] = 0
        down = layer.mlp.down_proj
        down.weight[:, sorted(set(range(down.in_features)) - set(channels))] = 0
    return reference


def image_inputs(name: str) -> dict[str, Tensor]:
    """An image of 4 x 4 patches, merged into four, and a text around it."""
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ids = torch.tensor([[7, 8, IMAGE, IMAGE, IMAGE, IMAGE, 9, 10, 11]])
    if name == "qwen3_5":  # a row for each patch, of which two frames have the same
        patches = pixels.view(16, 48).repeat(1, 2)
        about = {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == IMAGE).int()}
        return {"input_ids": ids, "pixel_values": patches, **about}
    if name.startswith("gemma4"):  # 4 x 4 patches that the tower merges, or 2 x 2 of four times the size
        side = 4 if name == "gemma4" else 2
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)[None]
        about = {"image_position_ids": places, "mm_token_type_ids": (ids == IMAGE).int()}
        return {"input_ids": ids, "pixel_values": pixels.view(1, side**2, -1), **about}
    # Gemma's text sees the whole image at once, wherever it stands.
    further = (
        {"token_type_ids": (ids == IMAGE).long()} if "gemma3" in name else {"image_sizes": torch.tensor([[16, 16]])}
    )
    return {"input_ids": ids, "pixel_values": pixels, **further}


def stored(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's file."""
    return load_file(folder / "model.safetensors")
