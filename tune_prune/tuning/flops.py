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

A refit keeps K = share x n of the n inputs of each layer's last projections, o and down, and computes per projection, with P tokens
that it is fitted to and T held out:

    2 n K P  +  2 H n T  +  2 H (n - K) K  +  K^3 / 3  +  2 H K^2      products, two errors, right sides, Cholesky, both triangles
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tune_prune.models.geometry import Geometry
from tune_prune.pruning.statistics import PassWork


@dataclass(frozen=True)
class Arithmetic:
    """The shapes of a model that its operations follow from; all layers together."""

    layers: int
    attention_weights: int  # N, of the attention blocks
    mlp_weights: int  # N, of the MLP blocks
    query_width: int  # Q, summed over layers
    head_weights: int  # V x H, also where the head is the embedding
    output_weights: int  # of the attention's output projections, which are part of the attention weights
    input_squares: int = 0  # widths of what goes into the last projection of each block, squared, all layers together
    group_squares: int = 0  # and those of what one KV group has of it
    input_widths: int = 0  # as they are
    input_cubes: int = 0
    hidden_size: int = 0

    @classmethod
    def of(cls, geometry: Geometry, vocab_size: int) -> Arithmetic:
        widths = [k * geometry.queries_per_kv * geometry.head_dim for k in geometry.kv_heads] + list(geometry.mlp_width)
        return cls(
            layers=geometry.num_layers,
            attention_weights=sum(k * c for k, c in zip(geometry.kv_heads, geometry.group_cost, strict=True)),
            mlp_weights=sum(m * c for m, c in zip(geometry.mlp_width, geometry.channel_cost, strict=True)),
            query_width=sum(geometry.kv_heads) * geometry.queries_per_kv * geometry.head_dim,
            head_weights=vocab_size * geometry.hidden_size,
            output_weights=sum(geometry.kv_heads) * geometry.queries_per_kv * geometry.head_dim * geometry.hidden_size,
            input_squares=sum(n**2 for n in widths),
            group_squares=sum(k * (geometry.queries_per_kv * geometry.head_dim) ** 2 for k in geometry.kv_heads),
            input_widths=sum(widths),
            input_cubes=sum(n**3 for n in widths),
            hidden_size=geometry.hidden_size,
        )

    @property
    def projection_weights(self) -> int:
        return self.attention_weights + self.mlp_weights

    def pruned(self, removed_params: int) -> Arithmetic:
        """Without `removed_params` of the projections, taken evenly from attention and MLPs."""
        kept = 1 - removed_params / self.projection_weights
        names = ("attention_weights", "mlp_weights", "query_width", "output_weights")
        return replace(self, **{name: round(getattr(self, name) * kept) for name in names})

    def forward(self, tokens: float, row_length: float, scored: float | None = None) -> float:
        """`tokens` in rows of `row_length`, logits at `scored` positions (None: at all), and of the last layer what they need."""
        if scored is None:
            return self.all_layers(tokens, row_length) + self.head(tokens)
        spared = 2 * (self.mlp_weights + self.output_weights) / self.layers * (tokens - scored)
        return self.all_layers(tokens, row_length) - spared + self.head(scored)

    def of_pass(self, work: PassWork, row_length: int) -> float:
        """A statistic's pass over rows of `row_length`; where it runs backwards, gradients of activations, and of the projections'
        weights where it sums any. Those of adapters, a few in a hundred, are left out."""
        layers, head = self.layers_of_pass(work, row_length), self.head(work.head_positions)
        return 3 * layers + 2 * head if work.backward else layers + head

    def layers_of_pass(self, work: PassWork, row_length: int) -> float:
        """Operations of the layers in it, with the products of inputs that it sums up and what is fitted by them: of a pass forward
        all of them, of one backwards a third, which with gradients of weights is the forward part."""
        attention, mlp = self._attention(work.attention_tokens, row_length), 2 * self.mlp_weights * work.mlp_tokens
        layers = (attention + mlp) / self.layers
        products: float = 2 * self.input_squares * work.product_tokens
        if work.fitted_share:
            products = products * work.fitted_share + self._fit(work.fitted_share, work.held_tokens)
        if not work.backward:
            return layers + products
        products += 2 * self.group_squares * work.product_tokens
        weights = self.attention_weights * work.attention_tokens + self.mlp_weights * work.mlp_tokens
        unasked = 0 if work.weight_sums else 2 * weights / self.layers
        return layers + (products - unasked) / 3

    def _fit(self, share: float, held_tokens: int) -> float:
        """Operations of fitting all last projections to that share of their inputs once, and of trying it on held-out tokens."""
        errors = 2 * self.hidden_size * self.input_widths * held_tokens
        right = 2 * self.hidden_size * share * (1 - share) * self.input_squares
        return errors + right + share**3 * self.input_cubes / 3 + 2 * self.hidden_size * share**2 * self.input_squares

    def head(self, positions: float) -> float:
        return 2.0 * self.head_weights * positions

    def _attention(self, tokens: float, row_length: float) -> float:
        return (2 * self.attention_weights + 4 * self.query_width * (row_length + 1) / 2) * tokens

    def all_layers(self, tokens: float, row_length: float) -> float:
        """`tokens` in rows of `row_length`, through all layers at every position."""
        return self._attention(tokens, row_length) + 2 * self.mlp_weights * tokens
