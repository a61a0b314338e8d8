"""What must hold for every encoding, as functions, so that test_classic_bugs can show each one failing."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from model.cache import KVCache
from model.gpt import GPT
from model.kernels import reference_attend
from model.position import Span
from tests.conftest import CONTEXT, VOCAB


def span(T: int, offset: int = 0, horizon: int | None = None) -> Span:
    k = torch.arange(offset + T)
    return Span(k[offset:], k, horizon or offset + T)


def oracle_scores(name: str, q_HTD: Tensor, k_HTD: Tensor, **options: Any) -> Tensor:
    """Scores (H, T, T) in float64 straight from the papers' formulas, before the causal mask."""
    q, k = q_HTD.double(), k_HTD.double()
    H, T, D = q.shape
    distance = torch.arange(T)[:, None] - torch.arange(T)[None]
    if name == "rope":
        base, layout = options.get("base", 10000.0), options.get("layout", "half")
        scores = torch.zeros(H, T, T, dtype=torch.float64)
        for i in range(D // 2):
            a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + D // 2)
            angle = distance.double() * base ** (-2 * i / D)
            # Re[q conj(k) e^{i (n - m) theta}], Su et al. eq. 12
            same = q[:, :, None, a] * k[:, None, :, a] + q[:, :, None, b] * k[:, None, :, b]
            cross = q[:, :, None, a] * k[:, None, :, b] - q[:, :, None, b] * k[:, None, :, a]
            scores += same * angle.cos() + cross * angle.sin()
        return scores / math.sqrt(D)
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    if name == "alibi":
        power = 2 ** math.floor(math.log2(H))
        slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
        slopes += [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)][: H - power]
        scores = scores - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance
    if name == "t5":
        scores = scores + options["table"].double().T[:, t5_buckets(T, **options)[distance.clamp(min=0)]]
    return scores


def t5_buckets(T: int, num_buckets: int = 32, max_distance: int = 128, **_: Any) -> Tensor:
    """Buckets (T,) of the distances 0 .. T - 1: each its own up to E, then E + floor(E log(d / E) / log(M / E))."""
    E, distance = num_buckets // 2, torch.arange(T)
    beyond = (distance.clamp(min=1).double() / E).log() / math.log(max_distance / E) * E
    # 1e-9: a logarithm that is an integer may come out just below it
    logarithmic = (E + (beyond + 1e-9).floor().long()).clamp(max=num_buckets - 1)
    return torch.where(distance < E, distance, logarithmic)


def check_decode_equals_forward(model: GPT, length: int = CONTEXT, tolerance: float = 1e-10) -> None:
    """Cached decode, token by token, in chunks, mixed, gives the logits of one full forward.

    To be asked of a model in float64, where no processor's order of summation matters.
    """
    ids = torch.randint(VOCAB, (2, length))
    with torch.no_grad():
        full = model(ids, horizon=length)
        for sizes in (
            [1] * length,
            [7] * length,
            [length],
            [length // 2, 1, 3, 1] + [1, 2] * length,
            [3, 4] + [1] * length,
        ):
            cache, parts, start = KVCache(model.config.n_layer, length), [], 0
            for size in sizes:
                if start < length:
                    parts.append(model(ids[:, start : start + size], cache, length))
                    start += size
            assert cache.length == length
            torch.testing.assert_close(torch.cat(parts, 1), full, atol=tolerance, rtol=tolerance)


def check_no_leak(model: GPT, length: int = CONTEXT) -> None:
    """Changing token t changes no logit before t, and does change those at t."""
    ids = torch.randint(VOCAB, (1, length))
    with torch.no_grad():
        before = model(ids)
        for t in (1, length // 2, length - 1):
            changed = ids.clone()
            changed[0, t] = (ids[0, t] + 1) % VOCAB
            after = model(changed)
            torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-6, rtol=1e-6)
            assert (after[:, t] - before[:, t]).abs().max() > 1e-3


class Fixed(nn.Module):
    """Stands in for the q, k and v projection: gives the tensors it was made with."""

    def __init__(self, *qkv_BHTD: Tensor) -> None:
        super().__init__()
        self.qkv = torch.cat([x.transpose(1, 2).flatten(-2) for x in qkv_BHTD], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.qkv


def attention_output(model: GPT, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the first block's own attention module makes of raw q, k, v (B, H, T, D)."""
    position, attention = model.position.for_layer(0), copy.deepcopy(model.blocks[0].attn)
    attention.qkv, attention.proj = Fixed(q, k, v), nn.Identity()
    output = attention(torch.zeros(q.shape[0], q.shape[2], 1), position, position.prepare(span(q.shape[2])))
    return output.unflatten(-1, q.shape[1:4:2]).transpose(1, 2)


def check_matches_oracle(model: GPT, name: str, **options: Any) -> None:
    """Attention equals softmax of the paper's scores in float64, times the untouched values."""
    H, D = model.config.n_head, model.config.n_embd // model.config.n_head
    if name == "t5":
        options["table"] = model.position.table.weight.detach()
    for T in (1, 7, CONTEXT, 300):
        q, k, v = torch.randn(3, 1, H, T, D)
        scores = oracle_scores(name, q[0], k[0], **options)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        expected = scores.masked_fill(future, -math.inf).softmax(-1) @ v[0].double()
        torch.testing.assert_close(
            attention_output(model, q, k, v)[0].double(), expected, atol=3e-5, rtol=3e-5
        )


def check_shift_invariant(model: GPT) -> None:
    """A relative encoding gives the same scores wherever the sequence starts."""
    H, T, D = model.config.n_head, 16, model.config.n_embd // model.config.n_head
    q, k = torch.randn(2, 1, H, T, D)
    v = torch.randn(1, H, T, D)
    position = model.position.for_layer(0)
    outputs = []
    for offset in (0, 5, 40):
        state = position.prepare(span(T, offset))
        bias = position.score_bias(state)
        near = None if bias is None else bias[..., offset:]
        outputs.append(reference_attend(*position.encode_qk(q, k, state), v, bias_HTS=near))
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], atol=2e-4, rtol=2e-4)


def check_positions_enter_before_first_layer(model: GPT) -> None:
    """With additive positions, what the first block reads already depends on them."""
    seen: list[Tensor] = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(torch.zeros(1, 4, dtype=torch.long))
    hook.remove()
    assert (seen[0][0, 0] - seen[0][0, 3]).abs().max() > 1e-3


def check_angles_are_fp32(model: GPT) -> None:
    """A bf16 model rotates by angles as exact as an fp32 one: within bf16's rounding of the result alone."""
    model.to(torch.bfloat16)
    position = model.position.for_layer(0)
    D = model.config.n_embd // model.config.n_head
    T = 4096
    q = torch.zeros(1, model.config.n_head, T, D, dtype=torch.bfloat16)
    q[..., : D // 2] = 1.0  # the first of each pair, in the half layout
    rotated, _ = position.encode_qk(q, q, position.prepare(span(T)))
    angles = torch.arange(T, dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(0, D, 2, dtype=torch.float64) / D
    )
    expected = torch.cat((angles.cos(), angles.sin()), -1)
    assert (rotated[0, 0].double() - expected).abs().max() < 4e-3
