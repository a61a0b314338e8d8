"""Which attention kernel runs; the only place that knows. Shapes alone decide."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


def attend(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSE: Tensor,
    *,
    bias_HTS: Tensor | None = None,
    causal: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q . k / sqrt(E) + bias) v as (B, H, T, E). The T queries are the last T of the S positions.

    q and k may be wider than v (D >= E): an encoding may append features, which the head dimension E of v
    leaves out of the scale. `bias_HTS` takes the dense path; without one the fused kernel needs no mask.
    """
    T, S, D, E = q_BHTD.shape[-2], k_BHSD.shape[-2], q_BHTD.shape[-1], v_BHSE.shape[-1]
    # the fused kernels want one width for q, k and v
    v_BHSD = F.pad(v_BHSE, (0, D - E)) if D > E else v_BHSE
    mask = None
    if bias_HTS is not None:
        mask = bias_HTS.to(q_BHTD.dtype)
        if causal:
            future_TS = torch.ones(T, S, dtype=torch.bool, device=q_BHTD.device).triu(S - T + 1)
            mask = mask.masked_fill(future_TS, -math.inf)
    elif causal and 1 < T < S:
        # is_causal aligns a rectangle at the top left: query 0 would see key 0 only
        mask = causal_lower_right(T, S)
    y_BHTD = F.scaled_dot_product_attention(
        q_BHTD,
        k_BHSD,
        v_BHSD,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None and 1 < T == S,
        scale=1 / math.sqrt(E),
    )
    return y_BHTD[..., :E]


def reference_attend(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSE: Tensor,
    *,
    bias_HTS: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """The formula of `attend`, spelt out in float64: the oracle that tests compare kernels with."""
    q, k, v = q_BHTD.double(), k_BHSD.double(), v_BHSE.double()
    scores_BHTS = q @ k.transpose(-1, -2) / math.sqrt(v.shape[-1])
    if bias_HTS is not None:
        scores_BHTS = scores_BHTS + bias_HTS.double()
    if causal:
        T, S = scores_BHTS.shape[-2:]
        future_TS = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
        scores_BHTS = scores_BHTS.masked_fill(future_TS, -math.inf)
    return scores_BHTS.softmax(-1) @ v
