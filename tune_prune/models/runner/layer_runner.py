"""A decoder run part by part: embedding, each decoder layer, head.

    runner = LayerRunner(model, family, residency)
    for block in runner.blocks(batches):                        batches: {key: tokens [B, T]}
        states = runner.forward(block)                          {key: hidden states [B, T, H] behind the last layer}
        with runner.tail() as losses:
            losses(block[key], states[key])                     [B, T - 1]

One way for the arithmetic: with everything on the device, a block is one batch and the layers are the model's own, and a pass
costs what the model's forward pass costs. With weights elsewhere a block is many batches, and each layer comes once for them.

What a family does around and between its layers is the model's own doing: its forward pass runs on the tokens with stubs in the
layers' places, which record what each layer is given besides the hidden states (masks, rotary embeddings); and once more on
what the last layer gave, for what stands behind the layers. So numbers are those of the whole model, bit for bit on a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.runner.hidden_states import KeptStates, SpilledStates
from tune_prune.models.runner.layer_weights import give_back, layers_in_turn, on_device, shared
from tune_prune.models.runner.residency import RESIDENT, Residency

# Hidden states that are carried together where every layer has to be brought: 2 GB at a hidden size of 4,096 in bfloat16.
BLOCK_TOKENS = 2**18

Key = TypeVar("Key", bound=Hashable)

# What the model gives a layer besides the hidden states.
_Call = tuple[tuple[Any, ...], dict[str, Any]]


def hidden_states(output: Tensor | tuple[Tensor]) -> Tensor:
    """Return the hidden states that a layer gives, of some families in a tuple."""
    return output[0] if isinstance(output, tuple) else output


class _AllRecorded(Exception):
    """Ends a forward pass whose rest is not wanted."""


class _Stub(nn.Module):
    """Stands where a decoder layer stands and does what it is told."""

    def __init__(self, layer: nn.Module, run: Callable[[Tensor, _Call], Tensor], returns_tuple: bool) -> None:
        super().__init__()
        self.run = run
        self.returns_tuple = returns_tuple
        if hasattr(layer, "attention_type"):  # some versions of transformers ask the layer which mask it wants
            self.attention_type = layer.attention_type

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        output = self.run(hidden, (args, kwargs))
        return (output,) if self.returns_tuple else output


class Carried:
    """Batches on their way through the layers. `states`: hidden states [B, T, H] by any key, at first by the batches' keys. Where
    layers attend to keys and values of others, these stand behind the hidden states [B, T, H + 2Kd + ...] until the last layer, so
    that gradients of states are theirs, too. `inputs`: what layers are given of each token besides, by (batch, number)."""

    def __init__(
        self,
        states: MutableMapping[Hashable, Tensor],
        inputs: MutableMapping[Hashable, Tensor],
        shared_states: str = "",
    ) -> None:
        self.states = states
        self._inputs = inputs
        self._shared_states = shared_states
        self._kept: dict[Any, torch.Size] = {}  # of keys and values, as layers make them: [K, d] by what names them
        self._calls: dict[Hashable, list[_Call]] = {}  # a batch's key -> of every layer
        self._latest: dict[torch.Size, list[_Call]] = {}

    def add(self, key: Hashable, hidden: Tensor, calls: list[_Call]) -> None:
        self.states[key] = hidden
        self._hidden_size = hidden.shape[-1]
        for index, (args, _) in enumerate(calls):
            if args and args[0] is not None:
                (self._inputs[key, index],) = args
        calls = [((), kwargs) for _, kwargs in calls]
        # Batches of one shape are mostly given the same: masks and rotary embeddings are kept once.
        known = self._latest.get(hidden.shape)
        self._calls[key] = self._latest[hidden.shape] = known if known is not None and _equal(known, calls) else calls

    def run(self, layer: nn.Module, index: int, key: Hashable, hidden: Tensor) -> Tensor:
        """Return what `layer`, number `index`, makes of `hidden` as a state of the batch `key`."""
        _, kwargs = self._calls[key][index]
        args = (self._inputs[key, index],) if (key, index) in self._inputs else ()
        if self._shared_states not in kwargs:
            return hidden_states(layer(hidden, *args, **kwargs))
        hidden, shared = self._apart(hidden, kwargs[self._shared_states])
        hidden = hidden_states(layer(hidden, *args, **kwargs | {self._shared_states: shared}))
        if index == len(self._calls[key]) - 1:
            return hidden
        for name, (keys, _) in shared.items():
            self._kept.setdefault(name, keys.transpose(1, 2).shape[2:])
        parts = (part.transpose(1, 2).flatten(2).to(hidden.device) for pair in shared.values() for part in pair)
        return torch.cat([hidden, *parts], dim=-1)

    def _apart(self, state: Tensor, empty: MutableMapping[Any, Any]) -> tuple[Tensor, MutableMapping[Any, Any]]:
        """Return the hidden states of a state, and in a mapping of the kind of `empty` the keys and values [B, K, T, d]."""
        sizes, shared = [self._hidden_size], copy.copy(empty)
        for size in self._kept.values():  # the first ones, as so many layers have made them
            sizes += [size.numel()] * 2 if sum(sizes) < state.shape[-1] else []
        hidden, *parts = (part.contiguous() for part in state.split(sizes, dim=-1))
        for (name, size), *pair in zip(self._kept.items(), parts[::2], parts[1::2], strict=False):
            shared[name] = tuple(part.unflatten(-1, size).transpose(1, 2) for part in pair)
        return hidden, shared


class LayerRunner:
    """Runs `model` by layers, without changing it; it may be on the meta device where `residency` names weights."""

    def __init__(self, model: PreTrainedModel, family: Family, residency: Residency = RESIDENT) -> None:
        self.model = model
        self.family = family
        self.residency = residency
        self._layers = decoder_layers(model, family)

    @property
    def device(self) -> torch.device:
        """The device on which layers run; the first of several."""
        return self.residency.device or self.model.device

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model, once each."""
        return list(self.model.parameters())

    @cached_property
    def losses(self) -> NextTokenLosses:
        """The losses of the model as a whole, which has its weights."""
        return NextTokenLosses(self.model)

    def blocks(self, batches: Mapping[Key, Tensor], states: int = 1) -> Iterator[dict[Key, Tensor]]:
        """Yield the `batches` (key -> tokens [B, T]) in their order, in groups that go through the layers together; so many hidden
        `states` are carried for each of their tokens."""
        limit = self.residency.block_tokens
        if limit is None:
            limit = 0 if self.residency.weights is None else BLOCK_TOKENS
        limit >>= self.residency.halvings
        block: dict[Key, Tensor] = {}
        tokens = 0
        for key, samples in batches.items():
            if block and states * (tokens + samples.numel()) > limit:
                yield block
                block, tokens = {}, 0
            block[key] = samples
            tokens += samples.numel()
        if block:
            yield block

    def states(self) -> MutableMapping[Hashable, Tensor]:
        """Make an empty place for hidden states."""
        if self.residency.states == "file":
            return SpilledStates(self.device)
        return KeptStates(None if self.residency.states == "device" else self.device)

    def embedded(self, batches: Mapping[Key, Tensor], extra: Mapping[Key, Mapping[str, Any]] | None = None) -> Carried:
        """Embed the batches, in front of layer 0. `extra`: what else the model is given with one (masks, position ids)."""
        carried = Carried(self.states(), self.states(), self.family.shared_states)
        with self._start() as start:
            for key, samples in batches.items():
                carried.add(key, *start(samples.to(self.device), **(extra or {}).get(key, {})))
        return carried

    def layers(self, order: Sequence[int] | None = None) -> Iterator[tuple[int, nn.Module]]:
        """Yield number and layer, for the numbers in `order` (None: all, from the first). Where weights are elsewhere, a layer
        is a copy that holds them only until the next is asked for."""
        order = range(self.num_layers) if order is None else order
        if self.residency.weights is None:
            return ((index, self._layers[index]) for index in order)
        prefix = f"{self.family.layers}."
        return layers_in_turn(self._layers, self.residency.weights, prefix, order, self.device)

    def forward(self, block: Mapping[Key, Tensor]) -> MutableMapping[Hashable, Tensor]:
        """Return what the last layer gives, by the batches' keys."""
        carried = self.embedded(block)
        for index, layer in self.layers():
            for key in block:
                carried.states[key] = carried.run(layer, index, key, carried.states[key])
        return carried.states

    @contextmanager
    def tail(self) -> Iterator[NextTokenLosses]:
        """Bring what stands behind the layers, for losses of what the last layer gives: `losses(samples, hidden states)`."""
        if self.residency.weights is None:
            yield self._resident_tail
        else:
            tables = (module for module in self.model.modules() if isinstance(module, nn.Embedding))
            with self._brought(*tables) as parameters:
                yield self._make_tail(parameters)

    @contextmanager
    def _start(self) -> Iterator[Callable[..., tuple[Tensor, list[_Call]]]]:
        """Bring what stands in front of the layers, as a function: samples, and what else the model is given -> their
        embedding, and what every layer is given."""
        if self.residency.weights is None:
            yield self._resident_start
        else:
            with self._brought(self.model.get_output_embeddings()) as parameters:
                yield self._make_start(parameters)

    @cached_property
    def _resident_start(self) -> Callable[..., tuple[Tensor, list[_Call]]]:
        return self._make_start({})

    @cached_property
    def _resident_tail(self) -> NextTokenLosses:
        return self._make_tail({})

    def _make_start(self, parameters: Mapping[int, nn.Parameter]) -> Callable[..., tuple[Tensor, list[_Call]]]:
        inputs: list[Tensor] = []
        calls: list[_Call] = []
        last = self.num_layers

        def record(hidden: Tensor, call: _Call) -> Tensor:  # without `self`: a circle would hold the model's weights
            inputs.append(hidden)
            calls.append(call)
            if len(calls) == last:
                raise _AllRecorded
            return hidden

        shell = self._shell(parameters, record)

        def start(samples: Tensor, **extra: Any) -> tuple[Tensor, list[_Call]]:
            with suppress(_AllRecorded):
                shell(input_ids=samples, use_cache=False, **extra)
            recorded = inputs[0], [*calls]
            inputs.clear()
            calls.clear()
            return recorded

        return start

    def _make_tail(self, parameters: Mapping[int, nn.Parameter]) -> NextTokenLosses:
        given: list[Tensor] = []
        shell = self._shell(parameters, lambda *_: given[0])
        per_layer = getattr(self.model.config, "hidden_size_per_layer_input", 0)

        def forward(states: Tensor) -> Any:
            given[:] = [states]
            # What the layers are given of each token: else it would be looked up by what stands for embeddings here.
            inputs = {"per_layer_inputs": torch.zeros(())} if per_layer else {}
            try:
                return shell(inputs_embeds=states, use_cache=False, **inputs)
            finally:
                given.clear()

        size = 2 * self.model.config.hidden_size
        probe = torch.linspace(-1, 1, size, dtype=self.model.dtype, device=self.device).view(1, 2, -1)
        return NextTokenLosses(shell, forward, probe)

    def _shell(self, parameters: Mapping[int, nn.Parameter], run: Callable[[Tensor, _Call], Tensor]) -> PreTrainedModel:
        """Make the model without its layers, with `parameters` in the places of its own, by their ids."""
        memo: dict[int, object] = {**shared(self.model), **parameters}
        if self.residency.weights is not None:
            memo |= {id(buffer): buffer.to(self.device) for buffer in self.model.buffers()}
        stubs = (_Stub(layer, run, self.family.returns_tuple) for layer in self._layers)
        memo[id(self._layers)] = nn.ModuleList(stubs)
        return copy.deepcopy(self.model, memo)

    @contextmanager
    def _brought(self, *without: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
        """Bring the parameters outside the layers and `without`, on the device, by the ids of the model's own."""
        assert self.residency.weights is not None
        others = {id(module) for part in (self._layers, *without) for module in part.modules()}
        needed = {
            id(p)
            for module in self.model.modules()
            if id(module) not in others
            for p in module.parameters(recurse=False)
        }
        parameters = {
            id(p): on_device(self.residency.weights[name], self.device)
            for name, p in self.model.named_parameters()
            if id(p) in needed
        }
        try:
            yield parameters
        finally:
            for p in parameters.values():
                p.data = p.data.new_empty(0)  # now, and not when the last module that has it is found to be garbage
            give_back()


def _equal(one: object, other: object) -> bool:
    """Return whether two calls, or parts of them, are the same in every bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(_equal(*pair) for pair in zip(one, other, strict=True))
    return one is other or (type(one) is type(other) and bool(one == other))
