"""Absolute positions added to the token embeddings: sinusoidal and learned."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from model.config import Dims, UserError
from model.position.base import PositionEncoding, Span


def sinusoids(positions_T: Tensor, n_embd: int, base: float) -> Tensor:
    """PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(the same). Returns (T, n_embd) in fp32.

    Vaswani et al. 2017, section 3.5.
    """
    exponents = torch.arange(0, n_embd, 2, dtype=torch.float64) / n_embd
    angles = positions_T.float()[:, None] * (base**-exponents).float().to(positions_T.device)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class Sinusoidal(PositionEncoding):
    """Vaswani et al. 2017, section 3.5: x * sqrt(d) + PE, fixed and defined at every length.

    Without the factor sqrt(d) (their section 3.4) unit sinusoids would drown token embeddings of standard
    deviation 0.02; Press et al. keep it in the baseline that ALiBi is compared with, and so do we.
    """

    def __init__(self, dims: Dims, base: float = 10000.0) -> None:
        super().__init__(dims)
        if dims.n_embd % 2:
            raise UserError(f"position=sinusoidal needs an even model.n_embd, not {dims.n_embd}")
        if base <= 1:
            raise UserError(f"position.base={base}: expected a number above 1, such as 10000")
        self.base = base

    def embed(self, x_BTC: Tensor, span: Span) -> Tensor:
        d = x_BTC.shape[-1]
        return x_BTC * math.sqrt(d) + sinusoids(span.q, d, self.base).to(x_BTC.dtype)


class Learned(PositionEncoding):
    """A trained table of `context_length` rows, added to the embeddings (GPT-2). Not defined beyond it."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.max_length = dims.context_length
        self.table = nn.Embedding(dims.context_length, dims.n_embd)

    def embed(self, x_BTC: Tensor, span: Span) -> Tensor:
        return x_BTC + self.table(span.q).to(x_BTC.dtype)
