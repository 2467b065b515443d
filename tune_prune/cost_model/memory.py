"""Peak memory of one trial, part by part, from the shapes of its model and of its batches.

A worker holds the dense model all the time. Beside it stands the larger of two things:

    statistics      the largest pass: float32 sums of the projections' gradients (twice where a snapshot falls inside a batch),
                    what every layer saves for its backward pass, and a part of the logits with what their log-softmax
                    leaves; of a forward pass one layer's activations and the hidden states that it carries (of all removed
                    models at once)
    evaluation      the pruned projections (all else is shared with the dense model) and the largest batch of perplexity
                    windows or zero-shot rows

Saved per token and layer under sdpa attention, with H hidden size, Q width of the query heads, M channels: inputs of the
projections 2 H + Q + M, queries, keys, values and output of the kernel 4 Q, the MLP's inner products 3 M, and the float32
inputs of two norms 2 H (compare Korthikanti et al., arXiv:2205.05198, who count the layers of a GPT).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers.configuration_utils import PretrainedConfig

from tune_prune.evaluation.engine.rows import default_batch_tokens
from tune_prune.evaluation.perplexity import windows_at_once
from tune_prune.models.geometry import Geometry
from tune_prune.models.head import MAX_LOGIT_ELEMENTS
from tune_prune.pruning.padding import most_bytes
from tune_prune.pruning.statistics import PassWork

# A worker that has done a trial of a tiny model: Python, torch, transformers, lm-eval and Ray; on a GPU the CUDA context.
PROCESS_BYTES = {"cpu": 550 * 2**20, "cuda": 600 * 2**20}
SCORED_SHARE = 0.75  # of a zero-shot batch's positions, at most: piqa's
SOFTMAX_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # float32 log-softmax of zero-shot rows held at once
FLOAT32 = 4
# What an allocator holds over what is counted of a gradient pass's tensors: on a CPU 0.97 to 1.26 in 24 fresh processes.
FRAGMENTATION = {"cpu": 1.35, "cuda": 1.2}
# The same of an evaluation, where layers and logits are counted as if they stood there together: on CPUs 0.6 to 1.86 in some 50
# fresh processes on two machines.
EVALUATION_SLACK = {"cpu": 2.3, "cuda": 1.2}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one trial. The passes for its statistics and the evaluation do not overlap."""

    process: int  # without any model
    weights: int  # dense model
    accumulators: int  # sums of gradients
    statistics_activations: int  # 0 where it needs none
    pruned: int  # projections of the pruned model, with what they are padded with
    evaluation_activations: int

    @property
    def total(self) -> int:
        statistics = self.accumulators + self.statistics_activations
        return self.process + self.weights + max(statistics, self.pruned + self.evaluation_activations)


def plan_memory(
    geometry: Geometry,
    config: PretrainedConfig,
    itemsize: int,
    device: str,
    passes: Iterable[PassWork],
    removed_params: int,
    window: int,
    text_tokens: int,
    longest_row: int,
) -> MemoryPlan:
    """Memory of a trial on `device` ("cpu" or "cuda") in weights of `itemsize` bytes.

    `passes`: those that its statistics take. `window`: tokens of a perplexity window; `text_tokens`: of its
    text. `longest_row`: of the longest zero-shot item.
    """
    h, vocab = geometry.hidden_size, config.vocab_size
    q = max(geometry.kv_heads) * geometry.queries_per_kv * geometry.head_dim
    m = max(geometry.mlp_width)
    projections = sum(
        k * group + width * channel
        for k, group, width, channel in zip(
            geometry.kv_heads, geometry.group_cost, geometry.mlp_width, geometry.channel_cost, strict=True
        )
    )
    largest = h * max(q, m)  # weights of a projection

    saved = geometry.num_layers * (itemsize * (2 * h + 5 * q + 4 * m) + FLOAT32 * 2 * h)
    backward = itemsize * (3 * h + 4 * q + 4 * m)  # gradients inside one layer
    inner = itemsize * (max(3 * m, 6 * q) + 3 * h) + FLOAT32 * 2 * h
    activations = accumulators = 0
    for work in passes:
        tokens = work.batch_tokens
        # Logits, their log-softmax and two gradients of a part; they are gone before the first layer's backward pass.
        scores = (
            min(MAX_LOGIT_ELEMENTS[device], tokens * vocab) * (itemsize + 3 * FLOAT32) if work.head_positions else 0
        )
        if work.backward:
            need = tokens * saved + max(scores, tokens * backward) + 2 * largest * itemsize
        else:
            need = tokens * (inner + work.carried * h * itemsize) + scores
        activations = max(activations, need)
        accumulators = max(accumulators, work.weight_sums * projections * max(FLOAT32, itemsize))

    positions = window * max(1, min(windows_at_once(window, config, device), text_tokens // window))
    at_once = min(positions, max(1, MAX_LOGIT_ELEMENTS[device] // vocab))  # positions whose logits are there at a time
    # They come when the layers are done, but the allocator has kept some of the layers' blocks.
    perplexity = positions * inner + at_once * vocab * (itemsize + 2 * FLOAT32) // 2
    tokens = max(default_batch_tokens(config, device), longest_row)
    scored = int(SCORED_SHARE * tokens) if device == "cuda" else longest_row  # a CPU takes few logits at once
    masks = tokens * longest_row * (8 + 4 + itemsize)  # made from distances in int64
    logits = min(SOFTMAX_ELEMENTS[device], scored * vocab)  # those of all positions are there at once on a CPU only
    zero_shot = tokens * inner + masks + FLOAT32 * logits
    zero_shot += itemsize * (logits if device == "cuda" else scored * vocab)
    return MemoryPlan(
        process=PROCESS_BYTES[device],
        weights=geometry.total_params * itemsize,
        accumulators=accumulators,
        statistics_activations=int(FRAGMENTATION[device] * activations),
        pruned=(projections - removed_params) * itemsize + most_bytes(geometry.channel_cost, itemsize, device),
        evaluation_activations=int(EVALUATION_SLACK[device] * max(perplexity, zero_shot)),
    )
