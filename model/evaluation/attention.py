"""Where a model attends: entropy and distance by layer, inside and outside the trained window."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from model.attention import CausalSelfAttention
from model.gpt import GPT

ROWS = 256  # queries whose weights are held at once


@torch.no_grad()
def attention_statistics(model: GPT, windows_WT: Tensor, trained_length: int) -> list[dict[str, Any]]:
    """A row per layer and side of the trained window, means over windows (W, T), heads and queries.

    `entropy` is in nats, `distance` in tokens; `of_uniform` and `distance_of_uniform` are their ratios to those of
    attending to all keys alike, which are ln(i + 1) and i / 2 for query i. The first query, which has one key,
    is left out.
    """
    T = windows_WT.shape[1]
    totals = torch.zeros(model.config.n_layer, 4, T, dtype=torch.float64)

    def watch(layer: CausalSelfAttention, arguments: tuple[Any, ...]) -> None:
        x_BTC, position, state, _, scale = arguments
        q_BHTD, k_BHTD, v_BHTD = layer.project(x_BTC, position, state, scale)
        totals[layer.layer] += _statistics(q_BHTD, k_BHTD, position.score_bias(state), v_BHTD.shape[-1]).cpu()

    hooks = [block.attn.register_forward_pre_hook(watch) for block in model.blocks]  # type: ignore[union-attr]
    try:
        for window_T in windows_WT:
            model.hidden(window_T[None])
    finally:
        for hook in hooks:
            hook.remove()
    means = totals / len(windows_WT)
    sides = {"inside": slice(1, trained_length), "outside": slice(trained_length, T)}
    return [
        {"layer": layer, "side": side}
        | dict(
            zip(
                ("entropy", "of_uniform", "distance", "distance_of_uniform"),
                means[layer, :, part].mean(-1).tolist(),
                strict=True,
            )
        )
        for layer in range(model.config.n_layer)
        for side, part in sides.items()
        if part.start < (part.stop if side == "outside" else min(part.stop, T))
    ]


def _statistics(q_BHTD: Tensor, k_BHTD: Tensor, bias_HTS: Tensor | None, head_dim: int) -> Tensor:
    """The four numbers of each query, (4, T) in float64, means over heads."""
    T = q_BHTD.shape[2]
    place_T = torch.arange(T, device=q_BHTD.device)
    parts = []
    for first in range(0, T, ROWS):
        i_t = place_T[first : first + ROWS]
        scores = q_BHTD[0, :, first : first + ROWS].float() @ k_BHTD[0].float().transpose(-1, -2)
        scores = scores / math.sqrt(head_dim)
        if bias_HTS is not None:
            scores = scores + bias_HTS[:, first : first + ROWS]
        weights = scores.masked_fill(place_T > i_t[:, None], -math.inf).softmax(-1)
        entropy_t = -torch.xlogy(weights, weights).sum(-1).mean(0)
        distance_t = (weights * (i_t[:, None] - place_T)).sum(-1).mean(0)
        uniform_t = (i_t + 1).double().log().clamp(min=1e-9)
        parts.append(
            torch.stack(
                (entropy_t, entropy_t / uniform_t, distance_t, distance_t / (i_t / 2).clamp(min=0.5))
            ).double()
        )
    return torch.cat(parts, 1)
