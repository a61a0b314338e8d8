"""Each classic position bug, put in on purpose, makes the check that names it fail."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import model.attention
import model.gpt
import model.position.alibi
import model.position.rotary
from model.position import Span
from model.position.additive import Learned, Sinusoidal
from model.position.rotary import Rotary
from tests.conftest import POSITIONS, tiny_gpt
from tests.position import checks

Patch = pytest.MonkeyPatch


def test_layouts_mixed(monkeypatch: Patch) -> None:
    right = model.position.rotary.rotate
    monkeypatch.setattr(
        model.position.rotary,
        "rotate",
        lambda x, c, s, layout: right(x, c, s, "interleaved" if layout == "half" else "half"),
    )
    with pytest.raises(AssertionError):
        checks.check_matches_oracle(tiny_gpt(POSITIONS["rope"]), "rope")


def test_layout_of_queries_differs_from_that_of_keys(monkeypatch: Patch) -> None:
    def mixed(self: Rotary, q: Any, k: Any, state: Any) -> Any:
        return tuple(
            model.position.rotary.rotate(x, *state, layout) for x, layout in ((q, "half"), (k, "interleaved"))
        )

    monkeypatch.setattr(Rotary, "encode_qk", mixed)
    with pytest.raises(AssertionError):
        checks.check_shift_invariant(tiny_gpt(POSITIONS["rope"]))


def test_values_rotated(monkeypatch: Patch) -> None:
    gpt = tiny_gpt(POSITIONS["rope"])
    right = model.attention.attend

    def rotating(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return right(
            q, k, gpt.position.encode_qk(v, v, gpt.position.prepare(checks.span(v.shape[2])))[0], **options
        )

    monkeypatch.setattr(model.attention, "attend", rotating)
    with pytest.raises(AssertionError):
        checks.check_matches_oracle(gpt, "rope")


@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "learned", "sinusoidal", "rope_nope"])
def test_cache_offset_forgotten(monkeypatch: Patch, name: str) -> None:
    monkeypatch.setattr(model.gpt, "Span", lambda q, k, horizon: Span(torch.arange(len(q)), k, horizon))
    with pytest.raises(AssertionError):
        checks.check_decode_equals_forward(tiny_gpt(POSITIONS[name]).double())


def test_rectangular_mask_aligned_at_the_top_left(monkeypatch: Patch) -> None:
    def top_left(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    monkeypatch.setattr(model.attention, "attend", top_left)
    with pytest.raises(AssertionError):
        checks.check_decode_equals_forward(tiny_gpt(POSITIONS["none"]).double())


@pytest.mark.parametrize("kind", [Sinusoidal, Learned])
def test_positions_added_after_the_first_layer(monkeypatch: Patch, kind: type) -> None:
    gpt = tiny_gpt(POSITIONS[kind.__name__.lower()])
    embed = gpt.position.embed
    monkeypatch.setattr(gpt.position, "embed", lambda x, span: x)
    gpt.blocks[0].register_forward_hook(lambda _, inputs, output: embed(output, checks.span(output.shape[1])))
    with pytest.raises(AssertionError):
        checks.check_positions_enter_before_first_layer(gpt)


@pytest.mark.parametrize("n_head", [6, 12])
@pytest.mark.parametrize("bug", ["geometric", "exponent off by one", "extra heads first"])
def test_wrong_slope_series(monkeypatch: Patch, n_head: int, bug: str) -> None:
    power = 2 ** int(math.log2(n_head))
    wrong = {
        "geometric": [2 ** (-8 * h / n_head) for h in range(1, n_head + 1)],
        "exponent off by one": [2 ** (-8 * h / power) for h in range(n_head)],
        "extra heads first": [2 ** (-8 * h / (2 * power)) for h in range(1, n_head + 1)],
    }[bug]
    gpt = tiny_gpt(POSITIONS["alibi"], n_head=n_head, n_embd=8 * n_head)
    checks.check_matches_oracle(gpt, "alibi")
    monkeypatch.setattr(model.position.alibi, "slopes", lambda n: torch.tensor(wrong, dtype=torch.float64))
    with pytest.raises(AssertionError):
        checks.check_matches_oracle(gpt, "alibi")


def test_alibi_sign_flipped(monkeypatch: Patch) -> None:
    right = model.position.alibi.slopes
    monkeypatch.setattr(model.position.alibi, "slopes", lambda n: -right(n))
    with pytest.raises(AssertionError):
        checks.check_matches_oracle(tiny_gpt(POSITIONS["alibi"]), "alibi")


def test_alibi_bias_divided_by_sqrt_d(monkeypatch: Patch) -> None:
    right = model.position.alibi.slopes
    monkeypatch.setattr(model.position.alibi, "slopes", lambda n: right(n) / math.sqrt(8))
    with pytest.raises(AssertionError):
        checks.check_matches_oracle(tiny_gpt(POSITIONS["alibi"]), "alibi")


@pytest.mark.parametrize("where", ["frequencies", "positions"])
def test_angles_in_bf16(monkeypatch: Patch, where: str) -> None:
    def rounded(self: Rotary, span: Span) -> Any:
        inverse = model.position.scaling.inverse_frequencies(self.head_dim, self.base).float()
        positions = span.q.float()
        if where == "frequencies":
            inverse = inverse.bfloat16().float()
        else:
            positions = positions.bfloat16().float()
        angles = positions[:, None] * inverse
        return angles.cos(), angles.sin()

    monkeypatch.setattr(Rotary, "prepare", rounded)
    with pytest.raises(AssertionError):
        checks.check_angles_are_fp32(tiny_gpt(POSITIONS["rope"], n_head=2, n_embd=128))


def test_attention_sees_the_future(monkeypatch: Patch) -> None:
    right = model.attention.attend
    monkeypatch.setattr(
        model.attention, "attend", lambda *args, **options: right(*args, **(options | {"causal": False}))
    )
    with pytest.raises(AssertionError):
        checks.check_no_leak(tiny_gpt(POSITIONS["none"]))
