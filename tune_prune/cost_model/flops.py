"""Floating-point operations of every stage, from a model's shapes.

A multiplication and an addition are two operations. Per token, with N the weights of the projections, V x H the head, Q
the width of all query heads and T the length of a row (Kaplan et al. 2020, arXiv:2001.08361; PaLM, arXiv:2204.02311,
appendix B):

    forward     2 N  +  4 Q C per layer  +  2 V H where a position is scored
    backward    4 N  +  8 Q C per layer  +  2 V H      gradients of activations everywhere, of weights in projections only

C = (T + 1) / 2 is the mean number of tokens that a token sees. Passes over calibration samples make no logits at a sample's
last position; zero-shot rows leave out the last layer's output projection and MLP where no position is scored. Norms,
rotations, softmax and biases are left out: below 1% at the sizes in use. A sliding window shorter than the rows is counted as
if it were not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tune_prune.models.geometry import Geometry


@dataclass(frozen=True)
class Arithmetic:
    """The shapes of a model that its operations follow from; all layers together."""

    layers: int
    attention_weights: int  # N, of the attention blocks
    mlp_weights: int  # N, of the MLP blocks
    query_width: int  # Q, summed over layers
    head_weights: int  # V x H, also where the head is the embedding
    output_weights: int  # of the attention's output projections, which are part of the attention weights

    @classmethod
    def of(cls, geometry: Geometry, vocab_size: int) -> Arithmetic:
        return cls(
            layers=geometry.num_layers,
            attention_weights=sum(k * c for k, c in zip(geometry.kv_heads, geometry.group_cost, strict=True)),
            mlp_weights=sum(m * c for m, c in zip(geometry.mlp_width, geometry.channel_cost, strict=True)),
            query_width=sum(geometry.kv_heads) * geometry.queries_per_kv * geometry.head_dim,
            head_weights=vocab_size * geometry.hidden_size,
            output_weights=sum(geometry.kv_heads) * geometry.queries_per_kv * geometry.head_dim * geometry.hidden_size,
        )

    @property
    def projection_weights(self) -> int:
        return self.attention_weights + self.mlp_weights

    def pruned(self, removed_params: int) -> Arithmetic:
        """Without `removed_params` of the projections, taken evenly from attention and MLPs."""
        kept = 1 - removed_params / self.projection_weights
        return Arithmetic(
            self.layers,
            round(self.attention_weights * kept),
            round(self.mlp_weights * kept),
            round(self.query_width * kept),
            self.head_weights,
            round(self.output_weights * kept),
        )

    def forward(self, tokens: float, row_length: float, scored: float | None = None) -> float:
        """`tokens` in rows of `row_length`, logits at `scored` positions (None: at all), and of the last layer what they need."""
        if scored is None:
            return self.all_layers(tokens, row_length) + self.head(tokens)
        spared = 2 * (self.mlp_weights + self.output_weights) / self.layers * (tokens - scored)
        return self.all_layers(tokens, row_length) - spared + self.head(scored)

    def gradient(self, tokens: float, row_length: float) -> float:
        """Forward and backward: gradients of the projections' weights."""
        return 3 * self.all_layers(tokens, row_length) + 2 * self.head(tokens * (1 - 1 / row_length))

    def removal(self, samples: int, row_length: int, kinds: Iterable[str]) -> float:
        """Losses of the dense model and without each layer or block of `kinds`, from the hidden states in front of it."""
        tokens = samples * row_length
        whole, attention, head = (
            self.all_layers(tokens, row_length),
            self._attention(tokens, row_length),
            self.head(tokens - samples),
        )
        behind = whole * (self.layers - 1) / 2  # over all layers l: those behind l
        beside = {
            "layer": 0.0,
            "attention": whole - attention,
            "mlp": attention,
        }  # what is left of the layers themselves
        return whole + head + sum(behind + beside[kind] + self.layers * head for kind in kinds)

    def head(self, positions: float) -> float:
        return 2.0 * self.head_weights * positions

    def _attention(self, tokens: float, row_length: float) -> float:
        return (2 * self.attention_weights + 4 * self.query_width * (row_length + 1) / 2) * tokens

    def all_layers(self, tokens: float, row_length: float) -> float:
        """`tokens` in rows of `row_length`, through all layers at every position."""
        return self._attention(tokens, row_length) + 2 * self.mlp_weights * tokens
