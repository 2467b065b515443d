"""The two ways of batches of rows through a model: a batch after the other through the whole of it; or, where its weights are
elsewhere, all batches of a block through each layer together, so that a layer is read once per block.

The first gives the same bits as the second and is kept for its speed on small models: by layers the zero-shot stage took 5 to 10%
longer on the embedded models, and 4% on SmolLM2-135M, as shells are made for each slice and entered twice for each batch.

Legend: R rows of a batch, T tokens of its longest row, P scored positions of a batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from tune_prune.evaluation.engine.scored_positions import at_positions, layer_at_positions, values_at
from tune_prune.models.head import Head, NextTokenLosses, head_input
from tune_prune.models.runner.layer_runner import LayerRunner


@dataclass(frozen=True)
class Batch:
    """Holds what a forward pass needs."""

    tokens: Tensor  # [R, T]
    positions: Tensor  # [P] where logits are wanted, counted over all rows
    extra: dict[str, Any]  # attention masks and position ids, where they are not the model's own
    attention: Callable[[], AbstractContextManager[None]]  # within which the layers run


# Of each batch of a block, one after the other: logits [P, V] and None, or what the head is given [P, H] and the head.
Pass = Callable[[Sequence[Batch]], Iterator[tuple[Tensor, Head | None]]]


def whole_model(model: PreTrainedModel, head_in_parts: bool) -> Pass:
    """With `head_in_parts` the head is left to the caller, where it comes last."""
    head = _in_parts(NextTokenLosses(model)) if head_in_parts else None

    def run(block: Sequence[Batch]) -> Iterator[tuple[Tensor, Head | None]]:
        for batch in block:
            with batch.attention(), at_positions(model, batch.positions):
                outcome = _outcome(model, head, model, input_ids=batch.tokens, use_cache=False, **batch.extra)
            yield outcome

    return run


def layer_by_layer(runner: LayerRunner, head_in_parts: bool) -> Pass:
    """Return the pass that runs the model a layer at a time."""

    def run(block: Sequence[Batch]) -> Iterator[tuple[Tensor, Head | None]]:
        batches = dict(enumerate(block))
        carried = runner.embedded(
            {number: batch.tokens for number, batch in batches.items()},
            {number: batch.extra for number, batch in batches.items()},
        )
        for index, layer in runner.layers():
            last = index == runner.num_layers - 1
            for number, batch in batches.items():
                sparse = layer_at_positions(layer, runner.family, batch.positions) if last else nullcontext()
                with batch.attention(), sparse:
                    hidden = carried.run(layer, index, number, carried.states[number])
                carried.states[number] = values_at(hidden, batch.positions) if last else hidden
        with runner.tail() as losses:
            head = _in_parts(losses) if head_in_parts else None
            for number in batches:
                # A row for each position: what stands behind the layers takes each by itself.
                yield _outcome(losses.model, head, losses.forward, carried.states.pop(number)[:, None])

    return run


def _in_parts(losses: NextTokenLosses) -> Head | None:
    return losses.head if losses.separate else None


def _outcome(
    model: PreTrainedModel, head: Head | None, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Tensor, Head | None]:
    if head is None:
        return forward(*args, **kwargs).logits.flatten(0, 1), None
    seen: list[Tensor] = []

    def kept_back(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return hidden[:, :0]

    with head_input(model, kept_back):
        forward(*args, **kwargs)
    return seen[0].flatten(0, 1), head
