"""Refit the last projection of every cut block, o of attention and down of the MLP, so that what stays makes up for what is gone.

With a [n] the inputs of that projection in the dense model, W [H, n] its weights, K the inputs that stay and R those that go, the
new weights W' [H, K] minimise, over calibration tokens t,

    sum_t q_t || W_R a_R + W_K a_K - W' a_K ||^2 + lambda || W' - W_K ||^2        lambda = damping * mean of diag G_KK
    W' = W_K + W_R G_RK (G_KK + lambda I)^-1                                       G = sum_t q_t a a^T  [n, n]
    q_t = 1 / mean(h^2)                                                            h [H] the residual stream behind the block
        = 1 / (mean(h^2) mean(u^2))                       where a norm takes what the projection puts out, u [H], into the stream

One shot: every block is fitted to the inputs that it has in the dense model, in one forward pass, one layer's G at a time (a ridge
regression towards the old weights; without q and damping the update of Optimal Brain Surgeon for a group, Hassibi & Stork 1993, as
ZipLM has it, Kurtic et al. 2023, arXiv:2302.04089). The weights q say what the next RMSNorm makes of an error: without them the few
tokens with massive activations (Sun et al. 2024, arXiv:2402.17762) decide alone, which can destroy a model.

What is fitted to little text may not hold for other text. So the last eighth of the windows is left out of G, and a block whose
error on those does not fall keeps its old weights; so does one whose weights would grow beyond twice their norm at ten and a
hundred times the damping, too. There are no new biases, so checkpoints stay those of the family.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tune_prune.core import terminal
from tune_prune.models.families import Family
from tune_prune.models.runner.hidden_states import SpilledStates
from tune_prune.models.runner.layer_runner import LayerRunner, hidden_states
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.passes.batches import batch_size
from tune_prune.pruning.statistics import PassWork
from tune_prune.pruning.surgery import kept_members, planned_layers, weight_name

VERSION = 1  # raise when the weights that come out change their meaning
LAST = ("output", "down")  # projections, by role
WINDOW = 128  # tokens of a sample
HELD_OUT = 8  # the last of so many parts of the windows
MOST_GROWTH = 2.0  # of the norm of a projection's weights
DAMPINGS = (1, 10, 100)  # times what was asked for
STRIPS = 8  # of columns, by which the lower half of a symmetric product is computed


@dataclass(frozen=True)
class BlockRefit:
    """A refit of one block. Errors: the part of its weighted squared output that the missing inputs made, before, and what of it
    the refit leaves, both on held-out windows."""

    layer: int
    role: str  # output or down
    before: float
    after: float
    used: bool  # else the block keeps its old weights


@dataclass(frozen=True)
class Refit:
    """`weights`: those that take the place of cut ones [H, kept], on the CPU or in a file, by parameter name."""

    weights: Mapping[Hashable, Tensor]
    blocks: tuple[BlockRefit, ...]

    @property
    def error(self) -> float:
        """Return the mean over cut blocks of what is left of their error on held-out windows: 1 where nothing was gained."""
        left = [block.after / block.before if block.used else 1.0 for block in self.blocks]
        return sum(left) / len(left) if left else 1.0


@torch.no_grad()
def least_squares(
    model: PreTrainedModel,
    family: Family,
    plan: PruningPlan,
    windows: Tensor,
    damping: float,
    residency: Residency = RESIDENT,
) -> Refit:
    """Return the refit of what `plan` leaves of the dense `model`, on calibration `windows` [samples, WINDOW], at least two.
    Weights are in the model's dtype; sums are in float32, float64 of a float64 model. Raises ValueError if the plan is for another
    model."""
    runner = LayerRunner(model, family, residency)
    cut = [
        {role: kept for role, kept in kept_members(layer, family, *rest).items() if role in LAST and len(kept)}
        for layer, *rest in planned_layers(model, family, plan)
    ]
    last = max((index for index, roles in enumerate(cut) if roles), default=-1)
    fitted, step = fitted_windows(len(windows)), batch_size(windows.shape[1], runner.device.type)
    batches = {
        (start, min(start + step, end)): windows[start : min(start + step, end)]
        for begin, end in ((0, fitted), (fitted, len(windows)))
        for start in range(begin, end, step)
    }
    # Where the model's own weights stay in their files there is no room for these.
    weights: MutableMapping[Hashable, Tensor] = {}
    if residency.weights is not None:
        weights = SpilledStates(torch.device("cpu"))
    blocks = []
    with terminal.step("repair", lambda: last + 1, "layers") as advance:
        carried = runner.embedded(batches)
        for index, layer in runner.layers(range(last + 1)) if last >= 0 else ():
            linears = family.linears(layer)
            inputs_of = {role: _Inputs(kept, linears[role].in_features) for role, kept in cut[index].items()}
            with _watched(family, layer, inputs_of) as watch:
                for batch in batches:
                    watch.held = batch[0] >= fitted
                    carried.states[batch] = carried.run(layer, index, batch, carried.states[batch])
            for role, inputs in inputs_of.items():
                block, weight = _fit(linears[role], inputs, damping, index, role)
                blocks.append(block)
                if weight is not None:
                    weights[weight_name(family, index, role)] = weight.cpu()
            inputs_of.clear()
            advance(1)
    return Refit(weights, tuple(blocks))


def windows_of(tokens: int, longest: int) -> tuple[int, int]:
    """Return how long the windows are that hold so many tokens, and how many there are; a model takes rows of `longest` tokens."""
    length = min(WINDOW, longest)
    return length, tokens // length


def fitted_windows(count: int) -> int:
    """Return how many of so many windows a refit is made of; the others are held out."""
    return count - max(1, count // HELD_OUT)


def work(tokens: int, num_layers: int, device: str, kept: float = 1.0) -> PassWork:
    """Return what a refit by so many tokens computes on "cpu" or "cuda", where every block is cut to that share of its inputs."""
    held = tokens // HELD_OUT
    return PassWork(
        tokens=tokens,
        attention_tokens=tokens * num_layers,
        mlp_tokens=tokens * num_layers,
        head_positions=0,
        batch_tokens=min(tokens, batch_size(WINDOW, device) * WINDOW),
        row_tokens=WINDOW,
        product_tokens=tokens - held,
        fitted_share=kept,
        held_tokens=held,
    )


def computed_share(kept: float) -> float:
    """Return the share of the products of all inputs with each other that is computed where that share of the inputs stays."""
    return kept - kept**2 * (1 - 1 / STRIPS) / 2


class _Inputs:
    """Inputs that go into one projection of `width`, token by token, each times sqrt(q): those that stay, and then the others."""

    def __init__(self, kept: Tensor, width: int) -> None:
        stays = torch.zeros(width, dtype=torch.bool)
        stays[kept] = True
        self.kept, self.gone = (torch.nonzero(which).flatten() for which in (stays, ~stays))
        self.gram: Tensor | None = None  # [n, K], of whose first K rows the lower half is filled in: they are symmetric
        self.held: list[Tensor] = []  # [tokens, n]

    def add(self, inputs: Tensor, residual: Tensor, held: bool, normed: Tensor | None = None) -> None:
        """Add `inputs` [B, T, n]; `residual` [B, T, H], the stream behind the block; `normed` [B, T, H], what the projection puts
        out where a norm stands behind it."""
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        energy = residual.to(dtype).square().mean(-1).flatten()
        if normed is not None:
            energy *= normed.to(dtype).square().mean(-1).flatten()
        order = torch.cat([self.kept, self.gone]).to(inputs.device)
        scaled = inputs.flatten(0, 1)[:, order].to(dtype) * torch.where(energy > 0, energy.rsqrt(), 0)[:, None]
        if held:
            self.held.append(scaled)
            return
        count = len(self.kept)
        if self.gram is None:
            self.gram = scaled.new_zeros(len(order), count)
        ends = [count * strip // STRIPS for strip in range(STRIPS + 1)]
        for begin, end in itertools.pairwise(ends):
            self.gram[begin:, begin:end].addmm_(scaled[:, begin:].T, scaled[:, begin:end])


@dataclass
class _Watch:
    """State that hooks of a layer pass on to each other. `given` [B, T, H]: the residual stream that the layer is given; `down`:
    what goes into down, and what comes out where a norm stands behind it."""

    held: bool = False
    given: Tensor | None = None
    down: tuple[Tensor, Tensor | None] | None = None


@contextmanager
def _watched(family: Family, layer: nn.Module, inputs_of: Mapping[str, _Inputs]) -> Iterator[_Watch]:
    """Add up, within the context, what goes into the projections of `inputs_of`. Every family's layer adds what o puts out, scaled
    or normed or not, to the residual stream that it was given, and gives the stream behind its MLP."""
    watch, parts, scale = _Watch(), family.linears(layer), getattr(layer, "residual_multiplier", 1.0)  # of Granite
    norms = dict(zip(LAST, map(layer.get_submodule, family.output_norms), strict=False))

    def begin(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        watch.given = args[0]

    def attention(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert watch.given is not None
        added = norms["output"](output) if norms else output
        stream = watch.given.to(added.device) + (added if scale == 1 else scale * added)
        inputs_of["output"].add(args[0], stream, watch.held, output if norms else None)

    def mlp(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        watch.down = args[0], output if norms else None

    def end(_: nn.Module, __: tuple[Tensor, ...], output: Tensor | tuple[Tensor]) -> None:
        assert watch.down is not None
        inputs, normed = watch.down
        inputs_of["down"].add(inputs, hidden_states(output), watch.held, normed)
        watch.down = None

    handles = [layer.register_forward_pre_hook(begin)]
    if "output" in inputs_of:
        handles.append(parts["output"].register_forward_hook(attention))
    if "down" in inputs_of:
        handles += [parts["down"].register_forward_hook(mlp), layer.register_forward_hook(end)]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def _fit(linear: nn.Linear, inputs: _Inputs, damping: float, layer: int, role: str) -> tuple[BlockRefit, Tensor | None]:
    """Return what came of one block, and its new weights [H, K] where they are better."""
    gram, held = inputs.gram, torch.cat(inputs.held)
    assert gram is not None
    weight, count = linear.weight.to(gram.dtype), len(inputs.kept)
    old, gone = (weight[:, columns.to(weight.device)] for columns in (inputs.kept, inputs.gone))
    missing = held[:, count:] @ gone.T
    before = float(missing.square().sum())
    new = _solved(gram, old, gone, damping)
    if new is None:
        return BlockRefit(layer, role, before, before, False), None
    new = new.to(linear.weight.dtype)
    change = new.to(gram.dtype) - old
    after = float((missing - held[:, :count] @ change.T).square().sum())
    used = after < before
    return BlockRefit(layer, role, before, after, used), new if used else None


def _solved(gram: Tensor, old: Tensor, gone: Tensor, damping: float) -> Tensor | None:
    """Return W' [H, K] of the module's formula from W_K and W_R; None where no damping gives finite weights that do not grow too
    much."""
    count = old.shape[1]
    wanted = gone @ gram[count:]
    for times in DAMPINGS:
        damped = gram[:count].clone()
        damped.diagonal().add_(damping * times * damped.diagonal().mean())
        factor, failed = torch.linalg.cholesky_ex(damped)  # of the lower half
        del damped
        if not failed:
            new = old + torch.cholesky_solve(wanted.T, factor).T
            if bool(new.isfinite().all()) and new.norm() <= MOST_GROWTH * old.norm():
                return new
    return None
