"""Train what pruning has left towards the dense model's predictions: knowledge distillation (Hinton et al. 2015, arXiv:1503.02531,
at temperature 1) into low-rank adapters of all projections (LoRA, Hu et al. 2021, arXiv:2106.09685, by PEFT), which are merged.

    loss     mean over tokens of KL(dense || pruned) of the next token's distribution
    W' = W + ALPHA / rank * B A      A [rank, in], B [out, rank], float32; B begins at 0. So one rate suits any rank
    a step   ROWS calibration samples, in their order and then again from the first; AdamW without weight decay; the rate rises over
             WARM_UP steps and falls to 0 by a cosine

The dense model is there as what its head is given at those tokens [samples, T, H]: logits of both are made beside each other, a
part at a time. Gradients are those of `pruning.passes.gradient_pass`, so the pruned model is held as it is for any other gradients:
as a whole, or a layer at a time, where its weights may stay in files. Nothing but the adapters is trained: no new weights and no
new biases.

What was trained on a little text may not hold for other text. So some samples are held out, and where the divergence on those does
not fall the model stays as it was.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel

from tune_prune.core import terminal
from tune_prune.core.artifact_cache import KEEP_EVERY_S
from tune_prune.core.hashing import seed_for
from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.runner.devices import captured
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.passes.gradient_pass import Sums, gradient_pass, gradient_work, no_gradients
from tune_prune.pruning.statistics import PassWork
from tune_prune.pruning.surgery import Updates

VERSION = 1  # raise when the weights that come out change their meaning
ALPHA = 16
WINDOW = 128  # tokens of a sample
ROWS = 4  # samples of a step
HELD_OUT = 16  # samples
WARM_UP = 10  # steps

log = logging.getLogger(__name__)

State = dict[str, np.ndarray]
_BASE, _INTO, _OUT = ".base_layer", ".lora_A.default", ".lora_B.default"


@dataclass(frozen=True)
class Recovery:
    """`updates`: of the projections' weights, by parameter name. KL(dense || pruned) on held-out samples, in nats per token, before
    and after."""

    updates: Updates
    before: float
    after: float

    @classmethod
    def from_arrays(cls, arrays: State) -> Recovery:
        """Make a recovery from its `arrays`. Raises KeyError or ValueError."""
        updates = {
            name: (torch.from_numpy(arrays[f"out-{index}"]), torch.from_numpy(arrays[f"into-{index}"]))
            for index, name in enumerate(arrays["names"].tolist())
        }
        return cls(updates, float(arrays["before"]), float(arrays["after"]))

    def arrays(self) -> State:
        """Return arrays for the artifact cache."""
        arrays = {"names": np.array(list(self.updates)), "before": np.array(self.before), "after": np.array(self.after)}
        for index, (out, into) in enumerate(self.updates.values()):
            arrays |= {f"out-{index}": out.numpy(), f"into-{index}": into.numpy()}
        return arrays

    @property
    def used(self) -> bool:
        return self.after < self.before

    @property
    def error(self) -> float:
        """Return what is left of the divergence on held-out samples: 1 where nothing was gained."""
        return self.after / self.before if self.used else 1.0


def lora(
    model: PreTrainedModel,
    family: Family,
    windows: Tensor,
    dense: Tensor,
    steps: int,
    rate: float,
    rank: int,
    seed: int,
    residency: Residency,
    kept: State | None = None,
    keep: Callable[[State], object] = id,
) -> Recovery:
    """Train adapters of the pruned `model`, into which they are put: it cannot be used afterwards. `windows` [samples, T], of which
    the last HELD_OUT are held out; `dense` [samples, T, H]: what the dense model's head is given there. `rate`: the largest
    learning rate; `rank`: of the adapters; `seed`: of their first values. `keep` is given the state of the training every
    KEEP_EVERY_S seconds; `kept`: such a state, from which it goes on, with the same result."""
    training = _Training(model, family, residency, steps, rate, rank, seed)
    runner = training.runner
    fitted, held = (slice(None, -HELD_OUT), slice(-HELD_OUT, None))
    if kept is None:
        before = _divergence(runner, windows[held], dense[held])
    else:
        before = float(kept["before"])
        training.restore(kept)
    samples, targets, saved = windows[fitted], dense[fitted], time.monotonic()
    with terminal.step("training", lambda: steps, "steps", lambda: training.done) as advance, terminal.shown(None):
        while training.done < steps:
            rows = torch.arange(training.done * ROWS, (training.done + 1) * ROWS) % len(samples)
            training.step(samples[rows], targets[rows])
            advance(1)
            if time.monotonic() - saved > KEEP_EVERY_S and training.done < steps:
                keep(training.state() | {"before": np.array(before)})
                saved = time.monotonic()
    return Recovery(training.updates(), before, _divergence(runner, windows[held], dense[held]))


def work(steps: int, num_layers: int, rank: int) -> list[PassWork]:
    """Return what so many steps compute: passes without gradients, of the dense model and over held-out samples before and after,
    with the logits that need none; and those with gradients, without what adapters add."""
    one, samples = step_work(steps, num_layers, rank), samples_of(steps) + 2 * HELD_OUT
    tokens, heads = samples * WINDOW, 2 * 2 * HELD_OUT * WINDOW  # of both models, before and after
    heads += steps * one.head_positions  # of the dense model, to which a step compares
    forward = PassWork(tokens, tokens * num_layers, tokens * num_layers, heads, one.batch_tokens, WINDOW)
    counts = ("tokens", "attention_tokens", "mlp_tokens", "head_positions")
    return [forward, replace(one, **{name: steps * getattr(one, name) for name in counts})]


def step_work(steps: int, num_layers: int, rank: int) -> PassWork:
    """Return what one of so many steps computes, with adapters of that rank."""
    one = gradient_work([ROWS], WINDOW, num_layers, ROWS, 0)
    return replace(one, adapter_rank=rank, waiting_tokens=samples_of(steps) * WINDOW)


def samples_of(steps: int) -> int:
    """Count the calibration samples that so many steps take, where the text has as many."""
    return steps * ROWS + HELD_OUT


class _Training:
    """A model with adapters, and how far their training has come."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        residency: Residency,
        steps: int,
        rate: float,
        rank: int,
        seed: int,
    ) -> None:
        from peft import LoraConfig, inject_adapter_in_model  # imports for seconds

        self.done, self._scale = 0, ALPHA / rank
        names = sorted({".".join(path.rsplit(".", 2)[-2:]) for path in family.projections().values()})
        config = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=names, init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an older name
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # of a block of which a bias is left
            # PEFT takes projections of a mixture for its stacked experts, which get no adapters.
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match")
            inject_adapter_in_model(config, model)
        model.eval()
        dtype = torch.promote_types(model.dtype, torch.float32)
        generator = torch.Generator().manual_seed(seed_for(seed, "adapters"))
        self.adapters: dict[str, nn.Parameter] = {}
        for name, p in model.named_parameters():
            if not _is_adapter(name):
                continue
            first = torch.zeros(p.shape, dtype=dtype)
            if _INTO in name:  # as PEFT's own, which is that of a linear layer
                bound = 1 / math.sqrt(max(1, p.shape[1]))  # a bias is left of a block that is gone: no inputs
                first.uniform_(-bound, bound, generator=generator)
            value = nn.Parameter(first.to(residency.device if p.is_meta else p.device), requires_grad=False)
            module, _, attribute = name.rpartition(".")
            if not p.is_meta:
                setattr(model.get_submodule(module), attribute, value)
            self.adapters[name] = value
        if residency.weights is not None:
            residency = replace(residency, weights=_with_adapters(model, residency.weights, self.adapters))
        self.runner = LayerRunner(model, family, residency)
        # On a GPU most of a small model's step is its launches, which are saved; a model over several has no one stream of them.
        at_once = self.runner.device.type == "cuda" and not residency.by_layer and residency.gpus == 1
        self._graph: _Graph | None = None
        self._tried = not at_once
        self._optimizer = AdamW(self.adapters.values(), weight_decay=0.0)
        self._rate = lambda step: rate * _share(step, steps)

    def step(self, samples: Tensor, dense: Tensor) -> None:
        """Make one step on samples [ROWS, T]."""
        for p, gradient in zip(self.adapters.values(), self._gradients(samples, dense), strict=True):
            p.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(self.done)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.done += 1

    def _gradients(self, samples: Tensor, dense: Tensor) -> Iterable[Tensor]:
        if not self._tried:
            self._tried = True
            try:
                self._graph = _Graph(self.runner, samples, dense)
            except RuntimeError as error:  # of CUDA; also where it does not fit
                log.warning(
                    "training is launched kernel by kernel: no CUDA graph of a step (%s)", str(error).splitlines()[0]
                )
        if self._graph is not None:
            return self._graph(samples, dense)
        count = len(samples)
        layers = gradient_pass(self.runner, samples, [count], _Gradients, count, dense)[count]
        return (gradient for layer in layers for gradient in layer)

    def state(self) -> State:
        """Return where the training stands, to go on from there."""
        state = {"done": np.array(self.done)}
        moments = self._optimizer.state
        for index, p in enumerate(self.adapters.values()):
            parts = {"value": p, "first": moments[p]["exp_avg"], "second": moments[p]["exp_avg_sq"]}
            state |= {f"{name}-{index}": part.detach().cpu().numpy().copy() for name, part in parts.items()}
        return state

    def restore(self, kept: State) -> None:
        self.done = done = int(kept["done"])
        for index, p in enumerate(self.adapters.values()):
            p.copy_(torch.from_numpy(kept[f"value-{index}"]))
            self._optimizer.state[p] = {
                "step": torch.tensor(float(done)),
                "exp_avg": torch.from_numpy(kept[f"first-{index}"]).to(p.device),
                "exp_avg_sq": torch.from_numpy(kept[f"second-{index}"]).to(p.device),
            }

    def updates(self) -> Updates:
        updates = {}
        for name, p in self.adapters.items():
            if _OUT in name:
                into = self.adapters[name.replace(_OUT, _INTO)]
                updates[name.replace(_OUT, "")] = (self._scale * p.detach()).cpu(), into.detach().cpu()
        return updates


class _Graph:
    """Gradients of a step, of samples [ROWS, T], as one CUDA graph: what the pass does at once, without its launches."""

    def __init__(self, runner: LayerRunner, samples: Tensor, dense: Tensor) -> None:
        losses, device = runner.losses, runner.device
        self.given = samples.to(device, copy=True), dense.to(device, copy=True)

        def step() -> None:
            for p in sums.all:  # a graph's gradients are its own
                p.grad = None
            losses.backward(self.given[0], dense=self.given[1])
            self.gradients = [p.grad / len(samples) for p in sums.all if p.grad is not None]

        layers = decoder_layers(runner.model, runner.family)
        with no_gradients(runner.parameters), _Gradients(runner.family, layers) as sums:
            self.replay = captured(step)

    def __call__(self, samples: Tensor, dense: Tensor) -> list[Tensor]:
        for old, new in zip(self.given, (samples, dense), strict=True):
            old.copy_(new)
        self.replay()
        return self.gradients


def _with_adapters(model: nn.Module, weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> LazyWeights:
    """Return the weights of `model` with adapters, from those of the model without them."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]

    def find(name: str) -> Tensor:
        return adapters[name] if name in adapters else weights[name.replace(_BASE, "")]

    return LazyWeights(names, find)


def _share(step: int, steps: int) -> float:
    """Return the part of the largest learning rate that step number `step`, from 0, of so many steps takes."""
    rising = min(WARM_UP, steps)
    return (step + 1) / rising if step < rising else 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


def _is_adapter(name: str) -> bool:
    return _INTO in name or _OUT in name


class _Gradients(Sums[list[Tensor]]):
    """Gradients of the adapters of `layers`, in their order, summed up over batches."""

    def __init__(self, family: Family, layers: Iterable[nn.Module]) -> None:
        self.adapters = [[p for name, p in layer.named_parameters() if _is_adapter(name)] for layer in layers]

    def __enter__(self) -> _Gradients:
        for p in self.all:
            p.requires_grad_(True)
        return self

    def __exit__(self, *_: object) -> None:
        for p in self.all:
            p.requires_grad_(False)
            p.grad = None

    @property
    def all(self) -> list[Tensor]:
        return [p for layer in self.adapters for p in layer]

    def copy(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.all]

    def restore(self, saved: Sequence[Tensor | None]) -> None:
        for p, gradient in zip(self.all, saved, strict=True):
            p.grad = gradient

    def results(self, num_samples: int) -> list[list[Tensor]]:
        return [[p.grad / num_samples for p in layer if p.grad is not None] for layer in self.adapters]


@torch.inference_mode()
def _divergence(runner: LayerRunner, windows: Tensor, dense: Tensor) -> float:
    """Return the mean KL(dense || own) in nats of what is predicted at every token of `windows`."""
    total = 0.0
    batches = {start: windows[start : start + ROWS] for start in range(0, len(windows), ROWS)}
    for block in runner.blocks(batches):
        states = runner.forward(block)
        with runner.tail() as tail:
            for start, samples in block.items():
                inside = torch.ones_like(samples, dtype=torch.bool)
                wanted = dense[start : start + len(samples)].flatten(0, 1)
                total += float(tail.divergences(states.pop(start), inside, wanted).double().sum())
    return total / windows.numel()
