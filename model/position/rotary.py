"""Rotary position embedding (RoPE)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from model.config import Dims, UserError
from model.position.base import PositionEncoding, Span
from model.position.scaling import scaling_of

Layout = Literal["interleaved", "half"]


def rotate(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, layout: Layout) -> Tensor:
    """Rotate each channel pair of x (..., T, D) by its angle; computed in fp32, returned in x's dtype.

    Pairs are (2i, 2i + 1) for 'interleaved' (Su et al. eq. 34) and (i, i + D/2) for 'half' (GPT-NeoX, Llama
    as published by Hugging Face).
    """
    if layout == "interleaved":
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    rotated = (first * cos_TF - second * sin_TF, second * cos_TF + first * sin_TF)
    both = torch.stack(rotated, dim=-1).flatten(-2) if layout == "interleaved" else torch.cat(rotated, dim=-1)
    return both.to(x.dtype)


def convert_layout(weight: Tensor, head_dim: int, to: Layout) -> Tensor:
    """Reorder the output rows of a q or k projection (H * D, ...) so that it suits the other layout.

    Scores are unchanged when the q and the k projection (and their biases) are both converted: the layouts
    differ by a fixed permutation of the channels of a head.
    """
    per_head = weight.unflatten(0, (-1, head_dim))
    shape = (head_dim // 2, 2) if to == "half" else (2, head_dim // 2)
    return per_head.unflatten(1, shape).transpose(1, 2).flatten(1, 2).flatten(0, 1)


class Rotary(PositionEncoding):
    """Su et al. 2021 (RoFormer, arXiv 2104.09864), eq. 34: q and k are rotated by position, values never.

    The score of positions n and m then depends on n - m alone. Frequencies are computed in float64 and
    angles in fp32, from integer positions, in every forward. `scaling` carries it past the trained length.
    """

    def __init__(
        self,
        dims: Dims,
        base: float = 10000.0,
        layout: Layout = "half",
        scaling: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(dims)
        if dims.head_dim % 2:
            raise UserError(
                f"position=rope rotates channel pairs and needs an even head dimension, not {dims.head_dim}; "
                f"choose model.n_embd / model.n_head even"
            )
        if base <= 1:
            raise UserError(f"position.base={base}: expected a number above 1, such as 10000")
        self.head_dim, self.base, self.layout = dims.head_dim, base, layout
        self.scaling = scaling_of(scaling, dims)
        self.depends_on_horizon = self.scaling.depends_on_horizon
        self.scaling.frequencies(dims.head_dim, base, dims.context_length)  # says now what does not fit

    def prepare(self, span: Span) -> tuple[Tensor, Tensor]:
        """cos and sin, each (T, head_dim / 2) in fp32, times the scaling's attention factor."""
        inverse, attention_factor = self.scaling.frequencies(self.head_dim, self.base, span.horizon)
        angles_TF = span.q.to(torch.float32)[:, None] * inverse.to(span.q.device, torch.float32)
        return angles_TF.cos() * attention_factor, angles_TF.sin() * attention_factor

    def encode_qk(
        self, q_BHTD: Tensor, k_BHTD: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        cos_TF, sin_TF = state
        return rotate(q_BHTD, cos_TF, sin_TF, self.layout), rotate(k_BHTD, cos_TF, sin_TF, self.layout)
