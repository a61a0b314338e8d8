"""The position interface. This base class, with every hook a no-op, is NoPE.

One rule decides which hook an encoding uses: a score that factors as f(q, i) . g(k, j) is a query/key
transform (`encode_qk`); only what does not factor is a bias on the scores (`score_bias`).

Shape suffixes: B batch, T query tokens, S keys, C width, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from model.config import Dims


class Span(NamedTuple):
    """Where the tokens of one forward pass stand; built once by GPT and shared by all layers.

    `horizon` is the length this sequence is planned to reach. It is the same for the prefill and for every
    decode step, so that an encoding which depends on the length never changes under a filled cache.
    """

    q: Tensor  # (T,) int64 positions of the new tokens
    k: Tensor  # (S,) int64 positions of all keys, cached ones first; k[-T:] is q
    horizon: int


class PositionEncoding(nn.Module):
    """No positional encoding (Haviv et al. 2022, Kazemnejad et al. 2023), and the interface for all others.

    Encodings hold no float buffers: angles and features are computed from the integers of `Span` in fp32 in
    each forward, so `.bfloat16()` or a checkpoint can never round them.
    """

    max_length: int | None = None  # the length past which the encoding is not defined; None: no limit
    depends_on_horizon = False  # whether `Span.horizon` changes what it gives

    def __init__(self, dims: Dims) -> None:
        super().__init__()

    def for_layer(self, layer: int) -> PositionEncoding:
        """The encoding that block `layer` (0-based) uses."""
        return self

    def embed(self, x_BTC: Tensor, span: Span) -> Tensor:
        """Positions added to the token embeddings (B, T, C) before the first block."""
        return x_BTC

    def prepare(self, span: Span) -> Any:
        """What all layers share in this forward (angles, features, tables), in fp32."""
        return None

    def encode_qk(self, q_BHTD: Tensor, k_BHTD: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        """Transform new queries and keys, before the cache. May widen D; never sees values or other keys."""
        return q_BHTD, k_BHTD

    def score_bias(self, state: Any) -> Tensor | None:
        """A bias (H, T, S) in fp32, added to the scores after q . k / sqrt(D)."""
        return None
