"""Absolute positions added to the token embeddings: sinusoidal and learned."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from model.config import Dims, UserError
from model.position.base import PositionEncoding, Span
from model.position.scaling import interpolation_of


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
    `scaling=linear` divides positions by its factor.
    """

    def __init__(self, dims: Dims, base: float = 10000.0, scaling: dict[str, Any] | None = None) -> None:
        super().__init__(dims)
        if dims.n_embd % 2:
            raise UserError(f"position=sinusoidal needs an even model.n_embd, not {dims.n_embd}")
        if base <= 1:
            raise UserError(f"position.base={base}: expected a number above 1, such as 10000")
        self.base, self.interpolation = base, interpolation_of(scaling, dims)

    def embed(self, x_BTC: Tensor, span: Span) -> Tensor:
        d = x_BTC.shape[-1]
        return x_BTC * math.sqrt(d) + sinusoids(span.q / self.interpolation, d, self.base).to(x_BTC.dtype)


class Learned(PositionEncoding):
    """A trained table of `context_length` rows, added to the embeddings (GPT-2). Not defined beyond it.

    `scaling=linear` reads the table of the original length at position / factor, between two rows linearly.
    """

    def __init__(self, dims: Dims, scaling: dict[str, Any] | None = None) -> None:
        super().__init__(dims)
        self.interpolation = interpolation_of(scaling, dims)
        rows = dims.context_length if self.interpolation == 1 else dims.original_length
        self.max_length = int(rows * self.interpolation)
        self.table = nn.Embedding(rows, dims.n_embd)

    def embed(self, x_BTC: Tensor, span: Span) -> Tensor:
        if self.interpolation == 1:
            return x_BTC + self.table(span.q).to(x_BTC.dtype)
        place_T = span.q.double() / self.interpolation
        low_T = place_T.long()
        high_T = (low_T + 1).clamp(max=self.table.num_embeddings - 1)
        weight_T1 = (place_T - low_T).to(self.table.weight.dtype)[:, None]
        return x_BTC + torch.lerp(self.table(low_T), self.table(high_T), weight_T1).to(x_BTC.dtype)
