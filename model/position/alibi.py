"""Attention with linear biases (ALiBi), as extra query and key features."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from model.config import Dims
from model.position.base import PositionEncoding, Span
from model.position.scaling import interpolation_of


def slopes(n_head: int) -> Tensor:
    """Head slopes (H,) in float64. Press et al. 2022, section 3, and their code for other head counts.

    For a power of two, 2^(-8h/n), h = 1 .. n. Otherwise those of the largest power of two p <= n, then every
    second slope of the 2p series.
    """
    power = 2 ** int(math.log2(n_head))
    series = torch.arange(1, power + 1, dtype=torch.float64) * (-8 / power)
    between = torch.arange(1, 2 * power + 1, 2, dtype=torch.float64) * (-8 / (2 * power))
    return torch.exp2(torch.cat((series, between[: n_head - power])))


class ALiBi(PositionEncoding):
    """Press, Smith, Lewis 2022 (arXiv 2108.12409): softmax(q . k / sqrt(D) - m_h (i - j)).

    Softmax ignores a constant per row, so -m (i - j) acts as +m j, which factors: it is a dot product of the
    slope (appended to q) and the position (appended to k), and the fused causal kernel needs no mask. Both
    factors are split into parts that bf16 holds well: positions into 256 * (p // 256) and p % 256, exact to
    65,535; slopes into a high part and a remainder.

    Where attention is not causal the bias is -m |i - j|, which does not factor, and is added to the scores.

    `scaling=linear` divides the distances by its factor (Al-Khateeb et al. 2023, arXiv 2310.13017).
    """

    def __init__(self, dims: Dims, scaling: dict[str, Any] | None = None) -> None:
        super().__init__(dims)
        self.n_head, self.head_dim, self.causal = dims.n_head, dims.head_dim, dims.causal
        self.interpolation = interpolation_of(scaling, dims)

    def prepare(self, span: Span) -> tuple[Tensor, Tensor] | Tensor:
        """Query features (H, 1, 4) and key features (T, 4), or the bias (H, T, S), in fp32."""
        if not self.causal:
            slope_H = (slopes(self.n_head) / self.interpolation).float().to(span.q.device)
            return -slope_H[:, None, None] * (span.q[:, None] - span.k).abs()
        # attention multiplies every score by 1 / sqrt(D); the published bias is not scaled
        slope_H = slopes(self.n_head) * math.sqrt(self.head_dim) / self.interpolation
        high_H = slope_H.to(torch.bfloat16).to(torch.float64)
        query_H4 = torch.stack((high_H, slope_H - high_H, high_H, slope_H - high_H), dim=-1)
        low_T = span.q % 256
        key_T4 = torch.stack((span.q - low_T, span.q - low_T, low_T, low_T), dim=-1)
        return query_H4[:, None].float().to(span.q.device), key_T4.float()

    def encode_qk(
        self, q_BHTD: Tensor, k_BHTD: Tensor, state: tuple[Tensor, Tensor] | Tensor
    ) -> tuple[Tensor, Tensor]:
        if isinstance(state, Tensor):
            return q_BHTD, k_BHTD
        (query_H14, key_T4), shape = state, (*q_BHTD.shape[:-1], 4)
        q_features, k_features = query_H14.to(q_BHTD.dtype), key_T4.to(k_BHTD.dtype)
        q = torch.cat((q_BHTD, q_features.expand(shape)), dim=-1)
        return q, torch.cat((k_BHTD, k_features.expand(shape)), dim=-1)

    def score_bias(self, state: tuple[Tensor, Tensor] | Tensor) -> Tensor | None:
        return state if isinstance(state, Tensor) else None
