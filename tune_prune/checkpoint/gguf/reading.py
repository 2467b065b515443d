"""GGUF files that tune_prune has written, read again with the help of the manifest beside them: every architecture, every family.

The original's config and the plan in the manifest say which model a file holds, and what gguf_file would write of that model says
where each parameter is, in which order and scale. So reading is that mapping turned round. Weights become float32, as the gguf
package makes them of each type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from gguf import ReaderTensor
from transformers import PreTrainedModel

from tune_prune.checkpoint import layers
from tune_prune.checkpoint.gguf.architecture import choose_architecture
from tune_prune.checkpoint.gguf.gguf_file import FileTensor, file_tensors
from tune_prune.checkpoint.manifest import Manifest
from tune_prune.checkpoint.save import write_hf
from tune_prune.core.errors import UserError
from tune_prune.models import fused, loading
from tune_prune.models.catalog import ModelSource
from tune_prune.models.families import Family
from tune_prune.models.gguf import convert, header
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.pruning.surgery import Sketch, cut


def ensure(source: ModelSource, about: Manifest, base: ModelSource) -> None:
    """Have the folder of `source` hold the pruned model of its GGUF file. `about`: the manifest beside the file; `base`: the model
    that it was pruned from, of which config and tokenizer are read. Raises UserError."""
    assert source.file is not None
    convert.ensure(source.file, Path(source.location), lambda file, folder: _write(file, folder, about, base))


def _write(file: Path, folder: Path, about: Manifest, base: ModelSource) -> dict[str, str]:
    """Write the model of a file to `folder`, and return what that was read from."""
    contents, _ = header.contents(file)
    if what := header.cut_off(contents):
        raise UserError(f"GGUF file {file} cannot be read: {what}; copy the whole checkpoint again")
    config = loading.load_config(base)
    config.dtype = torch.float32
    model = loading.meta_model(config)
    family, geometry = loading.config_geometry(config, base)
    fused.take_apart(model, family)
    dense = loading.LoadedModel(base, model, loading.load_tokenizer(base), family, geometry)
    layers.check_plan(about.plan, dense)
    pruned, _ = layers.compact(cut(model, family, about.plan), family)
    weights = stored_weights(file, contents.tensors, pruned.model, family)
    saved = layers.as_saved(Sketch(pruned.model, weights), model, family, dense.geometry, "hf")
    write_hf(dense, saved, folder, convert.SHARD_BYTES)
    return {"file": file.name, "quantization": contents.quantization, "head": ""}


def stored_weights(
    file: Path, stored: Mapping[str, ReaderTensor], pruned: PreTrainedModel, family: Family
) -> LazyWeights:
    """Return the weights of a pruned model, which may be on the meta device, from the tensors of its GGUF file: float32, each read
    when it is asked for. Raises UserError unless the file has exactly its tensors."""
    tensors = {tensor.name: tensor for tensor in file_tensors(pruned, family, choose_architecture(pruned, family))}
    shapes = {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in stored.items()}
    for name in sorted(tensors.keys() | shapes.keys()):
        here, by_manifest = shapes.get(name), tensors[name].shape if name in tensors else None
        if here != by_manifest:
            raise UserError(
                f"GGUF file {file} is not the one that its manifest describes: the shape of {name} is {here}, by the manifest "
                f"{by_manifest}; copy the whole checkpoint again"
            )
    names = {id(p): name for name, p in pruned.named_parameters()}
    makers: dict[str, Callable[[], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        start = 0
        for part in tensor.sources:
            if id(part) in names:
                own, make = names[id(part)], _maker(stored[name], tensor, start, part)
                # Gate and up of experts, which the file has apart, come in this order.
                makers[own] = partial(_stacked, makers[own], make) if tensor.half else make
            start += part.shape[0]
    for name, p in pruned.named_parameters():
        # The norm in front of attention that is gone, which is in no file, or the empty weight beside a bias that is left.
        makers.setdefault(name, partial(torch.ones, p.shape))
    return LazyWeights(makers, lambda name: makers[name]())


def _stacked(gate: Callable[[], torch.Tensor], up: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return gate and up [E, m, H] of experts as [E, 2m, H]."""
    return torch.cat([gate(), up()], dim=1)


def _maker(stored: ReaderTensor, tensor: FileTensor, start: int, part: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what makes the `part` of a tensor from row `start` on, in transformers' order and scale. Of a sum the first part gets
    all."""
    if tensor.added and start:
        return partial(torch.zeros, part.shape)
    make = convert.dequantised(stored, tensor.pair_heads, tensor.plus)
    return lambda: make()[start : start + part.shape[0]] / tensor.scale
