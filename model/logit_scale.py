"""Attention logits that grow with length, so that attention over more keys stays as sharp. For any encoding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.config import LogitScale
from model.position.base import Span


def logit_scale(kind: LogitScale, span: Span, original_length: int) -> Tensor | None:
    """By what q . k of each query is multiplied, (T, 1) in fp32; None for not at all. 1 within the original length.

    log_n: max(1, ln(i + 1) / ln L) for query i (0-based): Chiang and Cholak 2022 (arXiv 2202.12172), 5.3.
    With s = horizon / L, yarn: (0.1 ln s + 1)^2, Peng et al. 2023 (arXiv 2309.00071), eq. 22; drope: 1 + 0.412 ln s,
    fitted to models from scratch (arXiv 2512.12167). A bias of the encoding, such as ALiBi's, is not multiplied.
    """
    if kind == "none":
        return None
    if kind == "log_n":
        return ((span.q + 1).float().log() / math.log(original_length)).clamp(min=1)[:, None]
    stretch = math.log(max(span.horizon / original_length, 1))
    scale = (0.1 * stretch + 1) ** 2 if kind == "yarn" else 1 + 0.412 * stretch
    return torch.full((len(span.q), 1), scale, device=span.q.device)
