"""Speed of models, side by side: prefill and decode in tokens per second, and the most memory each takes.

Seconds of different runs do not compare, on a machine that others use or that gets warm. So all models are measured in
one run and take turns: every round measures each of them once, the first round is a warm-up that does not count, and a
result is the median over the other rounds. What is compared is the ratio of medians.

A turn is a prompt of random tokens (the same for all models): one forward pass with logits of its last position only, as
generate() makes it. Then `new_tokens` forward passes of one token each, greedily with the cache; generate() would add its own
bookkeeping. On a GPU a step is one CUDA graph over a static cache: launched kernel by kernel, a step of a 7B model waits for
the CPU four fifths of its time. Where a step of one of the models cannot be captured, all are launched kernel by kernel.

Tokens per second are those of the whole batch. Peak memory is what the model alone would need: the bytes of its weights, and
the most that was alive at once beyond what was there before the turn. On a GPU torch's allocator tells; on a CPU every tensor
is followed from the operation that made it to its end, as freed memory stays in the resident set.
"""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel, StaticCache

from tune_prune.checkpoint.layers import aligned, row_label
from tune_prune.core import terminal
from tune_prune.core.errors import UserError
from tune_prune.core.speed_records import Relative, relative
from tune_prune.models.runner.devices import captured

log = logging.getLogger(__name__)

_ALIKE = 1.25  # rounds whose ratios differ by less tell that two models are as fast

SEED = 0  # of the prompt

Step = Callable[[], object]  # decodes one token


@dataclass(frozen=True)
class GenerationSpeed:
    """One model's speed, and how it was measured."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    peak_memory_bytes: int | None  # None: measured by an engine's benchmark, which does not tell
    prompt_tokens: int  # really used: a model's position limit shortens what was asked
    new_tokens: int
    batch_size: int
    repeats: int  # rounds whose median this is
    dtype: str  # e.g. bfloat16
    device: str  # the GPU's name, or "CPU, 2 threads"
    graph: bool = False  # whether a decoding step was one CUDA graph
    prefill_s: tuple[float, ...] = ()  # of each round; none in manifests of older versions
    decode_s: tuple[float, ...] = ()  # of all new tokens


@dataclass(frozen=True)
class _Turn:
    prefill_s: float
    decode_s: float
    peak_bytes: int = 0  # beyond what was there before; 0 where this turn did not measure it


def measure(
    models: Mapping[str, PreTrainedModel],
    prompt_tokens: int = 512,
    new_tokens: int = 64,
    batch_size: int = 1,
    repeats: int = 5,
) -> dict[str, GenerationSpeed]:
    """Return the speed of each of `models`, which are loaded, in eval mode and take the same tokens, by name.

    Where prompt and new tokens go beyond max_position_embeddings, the prompt is shortened (and new tokens to half of the
    positions). Raises UserError for a model with room for less than a prompt and a new token, ValueError for a number
    below 1.
    """
    if min(prompt_tokens, new_tokens, batch_size, repeats) < 1:
        raise ValueError(f"{prompt_tokens=}, {new_tokens=}, {batch_size=} and {repeats=} must be at least 1")
    prompt_tokens, new_tokens = lengths([model.config for model in models.values()], prompt_tokens, new_tokens)
    vocabulary = min(int(model.config.vocab_size) for model in models.values())
    prompt = torch.randint(vocabulary, (batch_size, prompt_tokens), generator=torch.Generator().manual_seed(SEED))
    graph = all(_captured(model, prompt) for model in models.values())
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
    turns: dict[str, list[_Turn]] = {name: [] for name in models}
    with terminal.step("speed", lambda: (1 + repeats) * len(models), "turns") as advance:
        for round_number in range(1 + repeats):
            for name, model in models.items():
                turns[name].append(_turn(model, prompt, new_tokens, round_number == 0, graph))
                advance(1)
    return {
        name: GenerationSpeed(
            prefill_tokens_per_s=prompt.numel() / statistics.median(turn.prefill_s for turn in turns[name][1:]),
            decode_tokens_per_s=batch_size * new_tokens / statistics.median(turn.decode_s for turn in turns[name][1:]),
            peak_memory_bytes=sum(p.nbytes for p in model.parameters()) + max(turn.peak_bytes for turn in turns[name]),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            batch_size=batch_size,
            repeats=repeats,
            dtype=str(model.dtype).removeprefix("torch."),
            device=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else f"CPU, {threads}",
            graph=graph,
            prefill_s=tuple(turn.prefill_s for turn in turns[name][1:]),
            decode_s=tuple(turn.decode_s for turn in turns[name][1:]),
        )
        for name, model in models.items()
    }


def lengths(configs: Iterable[PretrainedConfig], prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
    """Return prompt and new tokens that all models of these `configs` have positions for. Raises UserError."""
    limit = min(int(config.max_position_embeddings) for config in configs)
    if limit < 2:
        raise UserError(
            f"max_position_embeddings is {limit}, but a prompt and a new token take 2; do without this model's speed"
        )
    if prompt_tokens + new_tokens > limit:
        new_tokens = min(new_tokens, limit // 2)
        prompt_tokens = min(prompt_tokens, limit - new_tokens)
    return prompt_tokens, new_tokens


def _turn(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int, warm_up: bool, graph: bool) -> _Turn:
    """Time one prefill of `prompt` [batch, time] and `new_tokens` steps, with `graph` as CUDA graphs. On a CPU memory is followed
    in the warm-up, as that takes time; on a GPU after it, when the libraries' workspaces are there."""
    device = model.device
    prompt = prompt.to(device)
    on_gpu = device.type == "cuda"
    if warm_up and not on_gpu:
        with _LiveTensors((*model.parameters(), *model.buffers(), prompt)) as live:
            return _Turn(*_seconds(model, prompt, new_tokens), live.peak_bytes)
    seconds_of = partial(_static_seconds, captured=captured) if graph else _seconds
    if warm_up or not on_gpu:
        return _Turn(*seconds_of(model, prompt, new_tokens))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    seconds = seconds_of(model, prompt, new_tokens)
    return _Turn(*seconds, torch.cuda.max_memory_allocated(device) - before)


@torch.inference_mode()
def _seconds(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Return the seconds of the prefill, and of all decoding steps. The model makes the cache that its layers need (a
    DynamicCache)."""
    started = _now(model.device)
    output = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    prefilled = _now(model.device)
    for _ in range(new_tokens):
        token = output.logits[:, -1:].argmax(dim=-1)  # [batch, 1]
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    return prefilled - started, _now(model.device) - prefilled


def _captured(model: PreTrainedModel, prompt: torch.Tensor) -> bool:
    """Return whether its decoding steps can be CUDA graphs: tried, as that is up to what transformers does in a step."""
    kinds = getattr(model.config, "layer_types", None) or []
    sliding = "sliding_attention" in kinds or (not kinds and getattr(model.config, "sliding_window", None) is not None)
    if model.device.type != "cuda" or sliding:
        return False
    try:
        _static_seconds(model, prompt.to(model.device), 1, captured)
    except RuntimeError as error:  # of CUDA; also where the cache does not fit
        log.warning(
            "decoding is launched kernel by kernel: no CUDA graph could be made (%s)", str(error).splitlines()[0]
        )
        return False
    return True


@torch.inference_mode()
def _static_seconds(
    model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int, captured: Callable[[Step], Step]
) -> tuple[float, float]:
    """Return seconds as `_seconds` does, with a static cache, whose tensors stay where they are, and a step that `captured` may run
    once and then gives in the form that is timed."""
    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + new_tokens + 1)
    started = _now(model.device)
    logits = model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    prefilled = _now(model.device)
    token = logits[:, -1:].argmax(dim=-1)  # [batch, 1]

    def step() -> None:
        token.copy_(model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(dim=-1))

    timed = captured(step)
    begun = _now(model.device)
    for _ in range(new_tokens):
        timed()
    return prefilled - started, _now(model.device) - begun


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _LiveTensors(TorchDispatchMode):
    """Follows every tensor that is made while it is active: `now_bytes` of them are alive, `peak_bytes` were at most.

    Views and changes in place are no new memory. `existing` tensors were there before."""

    def __init__(self, existing: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._alive = {tensor.untyped_storage().data_ptr() for tensor in existing}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size and address not in self._alive:
            self._alive.add(address)
            self.now_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            weakref.finalize(storage, self._freed, address, size)

    def _freed(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.now_bytes -= size


def speed_table(rows: Mapping[str, GenerationSpeed]) -> str:
    """Return the speeds of several models in aligned columns, each number with its ratio to the first row's (the original) and the
    lowest and highest ratio of a round, and a line that says what was measured."""
    names = list(rows)
    first = rows[names[0]]
    table = [["", *map(row_label, names)]]
    for title, field, seconds in (
        ("prefill tokens/s", "prefill_tokens_per_s", "prefill_s"),
        ("decode tokens/s", "decode_tokens_per_s", "decode_s"),
        ("peak memory bytes", "peak_memory_bytes", ""),
    ):
        values = [getattr(rows[name], field) for name in names]
        if None in values:
            continue
        table.append([title, *(rate(value) for value in values)])
        table.append(["", *(f"{value / values[0]:.2f}x" for value in values)])
        rounds = [getattr(one, seconds) if seconds else () for one in rows.values()]
        if all(rounds) and len(rows) > 1:
            table.append(["", "", *(spread(relative(rounds[0], seconds_of)) for seconds_of in rounds[1:])])
    return "\n".join([*aligned([list(row) for row in zip(*table, strict=True)]), conditions(first)])


def verdict_of(rows: Mapping[str, GenerationSpeed]) -> str:
    """Return the line `speed` for the screen: the last of several models beside the first, in words."""
    first, last = (list(rows.values())[place] for place in (0, -1))
    ratios = []
    for name in ("prefill", "decode"):
        rounds = [getattr(one, f"{name}_s") for one in (first, last)]
        value = getattr(last, f"{name}_tokens_per_s") / getattr(first, f"{name}_tokens_per_s")
        ratios.append(relative(*rounds) if all(rounds) else Relative(value, value, value))
    return f"speed        {verdict(*ratios)}"


def verdict(prefill: Relative, decode: Relative) -> str:
    """Return both in words: 12% faster at prefill (reading the prompt), about as fast at decode (writing the answer)."""
    return f"{in_words(prefill)} at prefill (reading the prompt), {in_words(decode)} at decode (writing the answer)"


def in_words(ratio: Relative) -> str:
    """Return how fast beside the original; where some rounds were faster and others slower, neither is said."""
    if ratio.lowest <= 1 <= ratio.highest:
        return "about as fast" if ratio.highest < _ALIKE * ratio.lowest else "not clearly faster or slower"
    if abs(ratio.value - 1) < 0.005:
        return "about as fast"
    if ratio.value >= 2:
        return f"{ratio.value:.1f} times as fast"
    return f"{ratio.value - 1:.0%} faster" if ratio.value > 1 else f"{1 - ratio.value:.0%} slower"


def kinds_note(rows: Mapping[str, GenerationSpeed]) -> str | None:
    """Return a sentence on models whose numbers are of different kinds, such as bfloat16 and int8; None for models of one kind."""
    kinds = {name: one.dtype for name, one in rows.items()}
    if len(set(kinds.values())) < 2:
        return None
    said = ", ".join(f"{row_label(name)} {kind}" for name, kind in kinds.items())
    return f"{said}: not the pruning alone makes the difference in speed"


def spread(ratio: Relative) -> str:
    """Return the range from the lowest to the highest ratio of a round."""
    return f"({ratio.lowest:.2f} to {ratio.highest:.2f})"


def rate(value: float) -> str:
    """Return a measured number with what is worth printing: 12,345, 123, 12.3."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def conditions(speed: GenerationSpeed) -> str:
    """Return how a speed was measured, as one line."""
    return (
        f"prompt of {speed.prompt_tokens:,} tokens, {speed.new_tokens:,} new tokens, batch size {speed.batch_size}, "
        f"median of {speed.repeats}, {speed.dtype} on {speed.device}"
        + (", decoded by CUDA graphs" if speed.graph else "")
    )
