"""A pruned model as one GGUF file for llama.cpp.

What llama.cpp's graphs lack is written so that the logits stay the same (tests hold files against llama.cpp, prompts and token by
token):
- deci drops what attention adds in a layer without MLP, so such a layer gets an MLP of 32 channels of zeros;
- deci has no place for the output bias of attention that is gone: the MLP before it adds the bias instead;
- openelm needs both blocks in every layer: one head of zeros, or 32 channels of zeros, stand in;
- llama, deci and smollm3 rotate neighbouring rows of a head, transformers rows half a head apart: rows of q and k change places;
- Granite's multipliers are in the weights (`architecture.Scales`);
- Gemma's norms multiply by 1 + weight, and files hold that sum.

Sizes: H hidden, K KV heads, g query heads per KV head, d head dim, M MLP channels; matrices are [out, in], as in torch.
Norms and biases are float32 always. A quantised file wants rows (the M columns of down, the K*g*d of o) of whole blocks
(quantiser.py); write_gguf says where they are not.

Sources: github.com/ggml-org/ggml, docs/gguf.md; llama.cpp as architecture.py says, and src/llama-quant.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tune_prune.checkpoint.gguf import quantiser
from tune_prune.checkpoint.gguf.architecture import (
    Architecture,
    Scales,
    choose_architecture,
    embedding,
    head,
    is_tied,
    parameter,
    rope_of,
)
from tune_prune.checkpoint.gguf.gguf_vocab import read_vocabulary
from tune_prune.checkpoint.layers import LayerWidths, widths
from tune_prune.core import terminal
from tune_prune.core.errors import UserError
from tune_prune.models.families import ATTENTION, Family, decoder_layers
from tune_prune.pruning.surgery import Sketch

_FLOATS = {
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}
STAND_IN = 32  # channels of an MLP of zeros: one block of llama.cpp's quantised types
_NAMES = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
}


_Read = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file: `sources` stacked by rows or, if `added`, their sum, put together when it is written. Those of experts
    are [experts, out, in]."""

    name: str
    sources: tuple[torch.Tensor, ...]  # of the same number of columns
    added: bool = False
    pair_heads: int = 0  # over 0: so many heads, of which row i and row i + d/2 become neighbours
    scale: float = 1.0
    plus: float = 0.0
    half: int | None = None  # of the stacked gate and up of experts: 0 gate, 1 up
    exact: bool = False  # in float32, whatever matrices are in

    @property
    def shape(self) -> tuple[int, ...]:
        if self.half is not None:
            (stacked,) = self.sources
            return (stacked.shape[0], stacked.shape[1] // 2, stacked.shape[2])
        rows = [source.shape[0] for source in self.sources]
        return (rows[0] if self.added else sum(rows), *self.sources[0].shape[1:])

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1 and not self.exact

    def values(self, dtype: torch.dtype, read: _Read) -> torch.Tensor:
        """Return what is written. Raises UserError where a weight is too large for `dtype`."""
        values = [read(source).detach().cpu() for source in self.sources]
        stacked = torch.stack([value.float() for value in values]).sum(0) if self.added else torch.cat(values)
        if self.half is not None:
            stacked = stacked.chunk(2, dim=1)[self.half]
        if self.scale != 1:
            stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32)).mul_(self.scale)
        if self.plus:
            stacked = stacked.float() + self.plus
        if self.pair_heads:  # [heads, 2 halves, d/2, ...] -> [heads, d/2, 2, ...]
            stacked = stacked.unflatten(0, (self.pair_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        written = stacked.to(dtype).contiguous()
        if not torch.isfinite(written).all():
            raise UserError(
                f"{self.name} has weights up to {stacked.abs().max().item():.3g}, and the largest number of {dtype} is "
                f"{torch.finfo(dtype).max:.3g}: write the GGUF file in bf16 or f32"
            )
        return written


def write_gguf(
    pruned: Sketch,
    family: Family,
    tokenizer_dir: Path,
    path: Path,
    dtype: torch.dtype,
    name: str = "tune_prune",
    kind: str | None = None,
) -> tuple[str, ...]:
    """Write a model with the tokenizer of the folder `tokenizer_dir` to `path`, and return what a user should know about
    the file, a sentence each.

    `pruned` is of the family's own class, its empty layers dropped (layers.compact); widths are read off its modules.
    `dtype` is that of the matrices, float16, bfloat16 or float32; `name` is what llama.cpp shows. `kind`: what the matrices are
    quantised to, one of quantisation.GGUF_KINDS; None: they are not. Takes the memory of one tensor. A file that is there is
    replaced once the new one is complete. Raises UserError for what llama.cpp cannot represent.
    """
    model = pruned.model
    if dtype not in _FLOATS:
        raise UserError(f"GGUF files are not written in {str(dtype).removeprefix('torch.')}; give --dtype float32")
    ggml_type, file_type = _FLOATS[dtype]
    architecture = choose_architecture(model, family)
    vocabulary = read_vocabulary(tokenizer_dir, embedding(model).shape[0])
    sizes, read = widths(model, family), _reader(pruned)
    tensors = file_tensors(model, family, architecture)
    unfinished, in_fewer_bits = (path.with_name(f"{path.name}{end}") for end in (".unfinished", ".quantised"))

    def type_of(tensor: FileTensor) -> gguf.GGMLQuantizationType:
        if not tensor.is_matrix:
            return gguf.GGMLQuantizationType.F32
        return quantiser.matrix_type(tensor.shape[1]) if kind == "q8_0" else ggml_type

    writer = gguf.GGUFWriter(unfinished, architecture.name)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "q8_0" else file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_sizes(writer, model, family, architecture, sizes)
    writer.add_layer_norm_rms_eps(_scales(model, family).eps)
    _add_rope(writer, model.config)
    vocabulary.add_to(writer)
    for tensor in tensors:
        block, block_bytes = gguf.GGML_QUANT_SIZES[type_of(tensor)]
        size = math.prod(tensor.shape) // block * block_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=type_of(tensor))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in terminal.over(tensors, "writing", "tensors"):
            values = tensor.values(dtype if tensor.is_matrix else torch.float32, read)
            writer.write_tensor_data(_stored(values, type_of(tensor)))
        writer.close()
        if kind not in (None, "q8_0"):
            quantiser.quantise(unfinished, in_fewer_bits, kind)
            in_fewer_bits.replace(unfinished)
        unfinished.replace(path)
    finally:
        writer.close()
        for file in (unfinished, in_fewer_bits):
            file.unlink(missing_ok=True)
    widths_said = _width_notes(model, family, sizes) if kind is None else quantiser.notes(path, kind)
    return (*_notes(model, family, architecture, sizes), *widths_said, *vocabulary.notes)


def file_tensors(model: PreTrainedModel, family: Family, architecture: Architecture) -> list[FileTensor]:
    """Return every tensor of the file of a pruned model, in order; the model may be on the meta device."""
    tensors = _tensors(model, family, architecture, widths(model, family), _scales(model, family))
    return [replace(one, plus=float(architecture.centred and one.name.endswith("norm.weight"))) for one in tensors]


def _scales(model: PreTrainedModel, family: Family) -> Scales:
    return Scales.of(model, family.head_dim(decoder_layers(model, family)[0]))


def _stored(values: torch.Tensor, ggml_type: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return the numbers of a tensor as the file holds them."""
    if ggml_type == gguf.GGMLQuantizationType.BF16:
        return values.view(torch.int16).numpy()  # numpy has no bfloat16, but its bits
    return np.asarray(gguf.quantize(values.float().numpy(), ggml_type))


def _reader(pruned: Sketch) -> _Read:
    """Return what gives the values of a parameter of the model, and of another tensor itself."""
    names = {id(p): name for name, p in pruned.model.named_parameters()}
    return lambda source: pruned.weights[names[id(source)]] if id(source) in names else source


def _add_sizes(
    writer: gguf.GGUFWriter,
    model: PreTrainedModel,
    family: Family,
    architecture: Architecture,
    sizes: Sequence[LayerWidths],
) -> None:
    head_dim = family.head_dim(decoder_layers(model, family)[0])
    stand_in = int(architecture.fused)  # heads where attention is gone
    per_layer = {
        "head_count": [size.heads or stand_in for size in sizes],
        "head_count_kv": [size.kv_heads or stand_in for size in sizes],
        "feed_forward_length": [size.expert_width or size.channels or STAND_IN for size in sizes],
    }
    for key, values in per_layer.items():
        getattr(writer, f"add_{key}")(values if architecture.per_layer else values[0])
    if architecture.experts:
        writer.add_expert_count(sizes[0].channels)
        writer.add_expert_used_count(model.config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(sizes[0].expert_width)
    writer.add_block_count(len(sizes))
    writer.add_vocab_size(embedding(model).shape[0])
    writer.add_context_length(model.config.max_position_embeddings)
    writer.add_embedding_length(model.config.hidden_size)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if architecture.slides:
        writer.add_sliding_window(model.config.sliding_window)


def _add_rope(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Write the rotary embedding, but for rope_type 'llama3', which is a tensor (`_frequencies`)."""
    rope = rope_of(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        _, scaling = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        factor = rope["factor"] or config.max_position_embeddings / rope["original_max_position_embeddings"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(scaling / (1 + 0.1 * math.log(factor)))  # llama.cpp multiplies by the rest
    if beta := rope.get("llama_4_scaling_beta"):  # of queries, by their position
        writer.add_attn_temperature_scale(beta)


def _frequencies(config: PretrainedConfig) -> torch.Tensor:
    """Return what divides each rotary frequency under rope_type 'llama3': [d/2]."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
    return config.rope_parameters["rope_theta"] ** -exponents / scaled.double()


def _tensors(
    model: PreTrainedModel,
    family: Family,
    architecture: Architecture,
    sizes: Sequence[LayerWidths],
    scales: Scales,
) -> Iterator[FileTensor]:
    """Yield every tensor of the file, in order."""
    layers = decoder_layers(model, family)
    norm = model.get_submodule(f"{family.layers.rpartition('.')[0]}.norm")
    yield FileTensor("token_embd.weight", (embedding(model),), scale=scales.embedding)
    yield FileTensor("output_norm.weight", (cast(torch.Tensor, norm.weight),), scale=scales.last_norm)
    if not is_tied(model):
        yield FileTensor("output.weight", (head(model),))
    if rope_of(model.config)["rope_type"] == "llama3":
        yield FileTensor("rope_freqs.weight", (_frequencies(model.config),))
    for index, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        behind = layers[index + 1] if index + 1 < len(layers) and not sizes[index + 1].kv_heads else None
        if size.kv_heads:
            attention = _attention(layer, family, architecture, size, scales.query)
        else:
            attention = _no_attention(layer, family, architecture, family.head_dim(layers[0]))
        for tensor in (*attention, *_mlp(layer, behind, family, size)):
            yield replace(tensor, name=f"blk.{index}.{tensor.name}")


def _attention(
    layer: nn.Module, family: Family, architecture: Architecture, size: LayerWidths, query_scale: float
) -> Iterator[FileTensor]:
    yield _norm("attn_norm", layer, family.layer_norms[0])
    linear = {role: layer_linear for role, layer_linear in family.linears(layer).items() if role in ATTENTION}
    if architecture.fused:
        yield FileTensor("attn_qkv.weight", tuple(linear.pop(role).weight for role in ("query", "key", "value")))
    heads = {"query": size.heads, "key": size.kv_heads} if architecture.pairs else {}
    for role, projection in linear.items():
        yield from _projection(role, projection, heads.get(role, 0), query_scale if role == "query" else 1.0)
    for name in family.head_norms:
        yield _norm(f"attn_{name}", layer, f"{family.attention}.{name}")
    for norm in family.output_norms[:1]:
        yield _norm("post_attention_norm", layer, norm)


def _no_attention(layer: nn.Module, family: Family, architecture: Architecture, head_dim: int) -> Iterator[FileTensor]:
    """Yield nothing, or one head of zeros."""
    if not architecture.fused:
        return
    norm = _norm("attn_norm", layer, family.layer_norms[0])
    yield norm
    (like,) = norm.sources
    yield FileTensor("attn_qkv.weight", (torch.zeros(3 * head_dim, len(like)),))
    yield FileTensor("attn_output.weight", (torch.zeros(len(like), head_dim),))
    for name in family.head_norms:
        yield FileTensor(f"attn_{name}.weight", (torch.ones(head_dim),))


def _mlp(layer: nn.Module, behind: nn.Module | None, family: Family, size: LayerWidths) -> Iterator[FileTensor]:
    """Yield the tensors of an MLP; `behind` is the next layer if its attention is gone: this MLP adds the output bias that may be
    left of that."""
    norm = _norm("ffn_norm", layer, [name for name in family.layer_norms if name not in family.output_norms][1])
    yield norm
    for name in family.output_norms[1:]:
        yield _norm("post_ffw_norm", layer, name)
    if (mixture := family.mixture(layer)) is not None:
        yield FileTensor("ffn_gate_inp.weight", (mixture.router_weight,), exact=True)
        for half, role in enumerate(("gate", "up")):
            yield FileTensor(f"ffn_{role}_exps.weight", (mixture.gate_up,), half=half)
        yield FileTensor("ffn_down_exps.weight", (mixture.down,))
        return
    if size.channels:
        linear = family.linears(layer)
        yield from _projection("gate", linear["gate"])
        yield from _projection("up", linear["up"])
        yield FileTensor("ffn_down.weight", (linear["down"].weight,))
    else:
        (like,) = norm.sources
        rows = torch.zeros(STAND_IN, len(like))
        yield FileTensor("ffn_gate.weight", (rows,))
        yield FileTensor("ffn_up.weight", (rows,))
        yield FileTensor("ffn_down.weight", (rows.T,))
    paths = family.projections()
    biases = [parameter(layer, f"{paths['down']}.bias")]
    biases += [parameter(behind, f"{paths['output']}.bias")] if behind is not None else []
    if present := tuple(bias for bias in biases if bias is not None):
        yield FileTensor("ffn_down.bias", present, added=True)


def _norm(name: str, layer: nn.Module, path: str) -> FileTensor:
    return FileTensor(f"{name}.weight", (cast(torch.Tensor, layer.get_submodule(path).weight),))


def _projection(role: str, linear: nn.Linear, pair_heads: int = 0, scale: float = 1.0) -> Iterator[FileTensor]:
    yield FileTensor(f"{_NAMES[role]}.weight", (linear.weight,), pair_heads=pair_heads, scale=scale)
    if linear.bias is not None:
        yield FileTensor(f"{_NAMES[role]}.bias", (linear.bias,), pair_heads=pair_heads, scale=scale)


def _notes(
    model: PreTrainedModel, family: Family, architecture: Architecture, sizes: Sequence[LayerWidths]
) -> Iterator[str]:
    if architecture.per_layer:
        alike = len({(size.kv_heads, size.channels) for size in sizes}) == 1
        why = "its heads no longer fill the hidden size" if alike else "its layers differ"
        yield f"{why}, so llama.cpp reads it as architecture {architecture.name}, and other readers of GGUF files may refuse it"
    gone = {"an MLP": f"{STAND_IN} channels"} | ({"attention": "one head"} if architecture.fused else {})
    for what, stand_in in gone.items():
        layers = [str(i) for i, size in enumerate(sizes) if not (size.channels if what == "an MLP" else size.kv_heads)]
        if layers:
            yield f"layers without {what} ({', '.join(layers)}) hold {stand_in} of zeros, as llama.cpp needs one there"
    biases = (parameter(layer, f"{family.projections()['query']}.bias") for layer in decoder_layers(model, family))
    if any(bias is not None and len(bias) != model.config.hidden_size for bias in biases):
        yield "biases of q are not as long as the hidden size: llama-cpp-python 0.3.36 reads that, 0.3.9 refuses the file"


def _width_notes(model: PreTrainedModel, family: Family, sizes: Sequence[LayerWidths]) -> Iterator[str]:
    """Yield what the widths will cost where the file is quantised later."""
    head_dim = family.head_dim(decoder_layers(model, family)[0])
    rows = {
        "MLPs": [size.expert_width or size.channels for size in sizes],
        "attention blocks": [size.heads * head_dim for size in sizes],
    }
    effects = {
        quantiser.K_BLOCK: "become larger types under K-quants",
        quantiser.BLOCK: "stay F16 in every quantised file",
    }
    for block, effect in effects.items():
        for what, lengths in rows.items():
            odd = sum(1 for length in lengths if length % block)
            if odd and model.config.hidden_size % block == 0:  # else the dense model has the same trouble everywhere
                hint = f"; --shape aligned-{block} avoids it" if what == "MLPs" else ""
                yield f"{odd} of {len(sizes)} {what} are no multiple of {block} wide: their last matrices {effect}{hint}"
