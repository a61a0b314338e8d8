"""The attention scores that a model gives, before the softmax, at distances within and beyond its window."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from model.attention import CausalSelfAttention
from model.gpt import GPT

WINDOWS = 16


@torch.no_grad()
def largest_scores(model: GPT, windows_WT: Tensor, trained_length: int) -> tuple[float, float]:
    """The largest |q k| / sqrt(d) over layers, heads and windows (W, T), at two ranges of distance.

    The first is of keys nearer than `trained_length`, the second of those as far or farther (0 where a window has
    none). What an encoding puts into queries and keys is in it, as RoPE and ALiBi do; a dense bias is not. Chen
    et al. 2023 (arXiv 2306.15595, section 2.2) ask whether scores stay bounded beyond the window.
    """
    T = windows_WT.shape[1]
    place_T = torch.arange(T, device=windows_WT.device)
    distance_TS = place_T[:, None] - place_T
    near, far = (distance_TS >= 0) & (distance_TS < trained_length), distance_TS >= trained_length
    found = [0.0, 0.0]

    def watch(layer: CausalSelfAttention, arguments: tuple[Any, ...]) -> None:
        x_BTC, position, state, _, scale = arguments
        q_BHTD, k_BHTD, v_BHTD = layer.project(x_BTC, position, state, scale)
        for q_TD, k_TD in zip(q_BHTD[0].float(), k_BHTD[0].float(), strict=True):
            score_TS = (q_TD @ k_TD.T).abs() / math.sqrt(v_BHTD.shape[-1])
            for side, mask_TS in enumerate((near, far)):
                found[side] = max(found[side], float((score_TS * mask_TS).max()))

    hooks = [block.attn.register_forward_pre_hook(watch) for block in model.blocks]  # type: ignore[union-attr]
    try:
        for window_T in windows_WT:
            model.hidden(window_T[None])
    finally:
        for hook in hooks:
            hook.remove()
    return found[0], found[1]
