"""Exact properties of each encoding, against float64 formulas and transformers' own implementations."""

from __future__ import annotations

import math

import pytest
import torch

from model.config import GPTConfig, UserError
from model.gpt import GPT
from model.kernels import attend, reference_attend
from model.position import build
from model.position.additive import sinusoids
from model.position.alibi import slopes
from model.position.rotary import Layout, convert_layout, rotate
from model.position.scaling import inverse_frequencies
from tests.conftest import CONTEXT, POSITIONS, VOCAB, dims, encoding, tiny_config, tiny_gpt
from tests.position import checks

ROPE, NONE = POSITIONS["rope"], POSITIONS["none"]


# --- all kinds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), [
    ("none", {}),
    ("rope", {"layout": "half"}),
    ("rope", {"layout": "interleaved"}),
    ("rope", {"base": 500.0}),
    ("alibi", {}),
    ("t5", {}),
    ("t5", {"num_buckets": 8, "max_distance": 64}),
])  # fmt: skip
@pytest.mark.parametrize("n_head", [4, 6, 12])
def test_attention_equals_float64_oracle(name: str, options: dict[str, object], n_head: int) -> None:
    model = tiny_gpt(POSITIONS[name] | options, n_head=n_head, n_embd=n_head * 8)
    checks.check_matches_oracle(model, name, **options)


@pytest.mark.parametrize("name", ["none", "rope", "alibi", "t5"])
def test_relative_encodings_are_shift_invariant(name: str) -> None:
    checks.check_shift_invariant(tiny_gpt(POSITIONS[name]))


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_additive_positions_enter_before_the_first_layer(name: str) -> None:
    checks.check_positions_enter_before_first_layer(tiny_gpt(POSITIONS[name]))


# --- none --------------------------------------------------------------------------------------------------


def test_unmasked_attention_without_position_is_permutation_equivariant() -> None:
    model = tiny_gpt(NONE, causal=False)
    ids, order = torch.randint(VOCAB, (1, 20)), torch.randperm(20)
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, order]), model(ids)[:, order], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("n_layer", "moves"), [(1, False), (2, True)])
def test_one_causal_layer_without_position_ignores_prefix_order(n_layer: int, moves: bool) -> None:
    model = tiny_gpt(NONE, n_layer=n_layer)
    ids = torch.randint(VOCAB, (1, 20))
    shuffled = torch.cat((ids[:, torch.randperm(19)], ids[:, 19:]), 1)
    with torch.no_grad():
        difference = (model(shuffled)[:, -1] - model(ids)[:, -1]).abs().max()
    assert difference > 0.1 if moves else difference < 1e-4


def test_causal_nope_on_a_constant_sequence_gives_one_output_until_a_first_token_differs() -> None:
    model = tiny_gpt(NONE)
    constant = torch.full((1, 20), 7)
    marked = constant.clone()
    marked[0, 0] = 3
    with torch.no_grad():
        same, different = model(constant)[0], model(marked)[0]
    assert (same - same[0]).abs().max() < 1e-4
    assert (different[5] - different[15]).abs().max() > 1e-2


# --- sinusoidal and learned --------------------------------------------------------------------------------


def test_sinusoids_match_the_formula() -> None:
    table = sinusoids(torch.arange(50), 8, 10000.0)
    for position in (0, 1, 7, 49):
        for i in range(4):
            angle = position / 10000 ** (2 * i / 8)
            assert table[position, 2 * i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoid_of_a_shifted_position_is_a_rotation() -> None:
    table, k = sinusoids(torch.arange(100), 16, 10000.0).double(), 13
    inverse = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    sin, cos = (k * inverse).sin(), (k * inverse).cos()
    for position in (0, 5, 60):
        s, c = table[position, 0::2], table[position, 1::2]
        torch.testing.assert_close(table[position + k, 0::2], s * cos + c * sin, atol=1e-5, rtol=0)
        torch.testing.assert_close(table[position + k, 1::2], c * cos - s * sin, atol=1e-5, rtol=0)


def test_sinusoid_similarity_depends_on_distance_alone() -> None:
    table = sinusoids(torch.arange(64), 32, 10000.0).double()
    assert float(table[5] @ table[8]) == pytest.approx(float(table[20] @ table[23]), abs=1e-5)


def test_sinusoidal_scales_embeddings_by_sqrt_d_and_adds_unit_sinusoids() -> None:
    x = torch.randn(2, 6, 32)
    embedded = encoding("sinusoidal").embed(x, checks.span(6))
    expected = x * math.sqrt(32) + sinusoids(torch.arange(6), 32, 10000.0)
    torch.testing.assert_close(embedded, expected)


def test_learned_adds_the_row_of_each_position() -> None:
    learned, x = encoding("learned"), torch.randn(2, 6, 32)
    embedded = learned.embed(x, checks.span(6, offset=3))
    torch.testing.assert_close(embedded, x + learned.table.weight[3:9])


def test_gpt2_small_learned_table_has_786432_parameters() -> None:
    learned = build(
        POSITIONS["learned"],
        dims(768, 12, 1024),
    )
    assert sum(p.numel() for p in learned.parameters()) == 786_432


def test_gpt2_small_has_the_published_size() -> None:
    config = GPTConfig(n_layer=12, n_head=12, n_embd=768, context_length=1024, bias=True)
    with torch.device("meta"):
        model = GPT(config, 50257, build(POSITIONS["learned"], config.dims))
    assert model.parameter_count() == 124_439_808


def test_learned_positions_are_refused_beyond_their_table() -> None:
    model = tiny_gpt(POSITIONS["learned"])
    with pytest.raises(UserError, match="not defined beyond 32"):
        model(torch.zeros(1, CONTEXT + 1, dtype=torch.long))


# --- rope --------------------------------------------------------------------------------------------------


def test_rope_worked_example() -> None:
    """d = 4, base 10000, m = 3, n = 7: angles 3, 0.03 and 7, 0.07."""
    position = build(
        ROPE | {"layout": "interleaved"},
        dims(4, 1, 8),
    )
    cos, sin = position.prepare(checks.span(8))
    angles = torch.atan2(sin, cos)
    wrapped = math.atan2(math.sin(7), math.cos(7))
    torch.testing.assert_close(angles[3], torch.tensor([3.0, 0.03]), atol=1e-6, rtol=0)
    torch.testing.assert_close(angles[7], torch.tensor([wrapped, 0.07]), atol=1e-6, rtol=0)
    q, k = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, -1.0, 2.0, 1.0])
    score = rotate(q, cos[3], sin[3], "interleaved") @ rotate(k, cos[7], sin[7], "interleaved")
    a, b = complex(1, 2) * complex(0.5, 1), complex(3, 4) * complex(2, -1)  # q conj(k), pair by pair
    expected = (a * complex(math.cos(-4), math.sin(-4)) + b * complex(math.cos(-0.04), math.sin(-0.04))).real
    assert float(score) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_score_depends_on_distance_alone_and_norms_are_kept(layout: Layout) -> None:
    angles = torch.arange(200, dtype=torch.float64)[:, None] * inverse_frequencies(16, 10000.0)
    cos, sin = angles.cos(), angles.sin()
    q, k = torch.randn(2, 16, dtype=torch.float64)
    rotated_q, rotated_k = (
        rotate(q.expand(200, 16), cos, sin, layout),
        rotate(k.expand(200, 16), cos, sin, layout),
    )
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm().expand(200))
    scores = rotated_q @ rotated_k.T
    for distance in (0, 3, 50):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_rope_leaves_values_alone() -> None:
    """With all scores equal, attention returns the plain mean of the values."""
    model = tiny_gpt(ROPE)
    v = torch.randn(1, 4, 10, 8)
    zeros = torch.zeros_like(v)
    mean = v.cumsum(2) / torch.arange(1, 11)[:, None]
    torch.testing.assert_close(checks.attention_output(model, zeros, zeros, v), mean)


def test_rope_half_layout_equals_transformers_llama() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128)
    )
    q, k = torch.randn(2, 2, 4, 100, 16)
    cos, sin = theirs(q, torch.arange(100)[None])
    ours = encoding("rope", dims(64, 4, 128), layout="half")
    for a, b in zip(
        ours.encode_qk(q, k, ours.prepare(checks.span(100))),
        apply_rotary_pos_emb(q, k, cos, sin),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_rope_interleaved_layout_equals_transformers_gptj() -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions

    q = torch.randn(1, 50, 4, 16)  # (B, T, H, D) there
    sin, cos = create_sinusoidal_positions(50, 16)[None].chunk(2, dim=-1)
    theirs = apply_rotary_pos_emb(q, sin, cos)
    ours = encoding(
        "rope",
        dims(64, 4, 64),
        layout="interleaved",
    )
    rotated, _ = ours.encode_qk(q.transpose(1, 2), q.transpose(1, 2), ours.prepare(checks.span(50)))
    torch.testing.assert_close(rotated.transpose(1, 2), theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("source", "target"), [("interleaved", "half"), ("half", "interleaved")])
def test_converted_projections_give_the_same_scores_in_the_other_layout(
    source: Layout, target: Layout
) -> None:
    model = tiny_gpt(ROPE | {"layout": source}, bias=True)
    other = tiny_gpt(ROPE | {"layout": target}, bias=True)
    other.load_state_dict(model.state_dict())
    ids = torch.randint(VOCAB, (1, 20))
    with torch.no_grad():
        for block in other.blocks:
            for parameter in (block.attn.qkv.weight, block.attn.qkv.bias):
                q, k, v = parameter.chunk(3)
                parameter.copy_(torch.cat((convert_layout(q, 8, target), convert_layout(k, 8, target), v)))
        torch.testing.assert_close(other(ids), model(ids), atol=1e-5, rtol=1e-5)
        q_weight = model.blocks[0].attn.qkv.weight.chunk(3)[0]
        assert torch.equal(convert_layout(convert_layout(q_weight, 8, target), 8, source), q_weight)


def test_rope_angles_stay_fp32_in_a_bf16_model() -> None:
    checks.check_angles_are_fp32(tiny_gpt(ROPE, n_head=2, n_embd=128))


def test_rope_in_bf16_rotates_adjacent_positions_differently() -> None:
    position = encoding("rope", dims(64, 1, 64)).bfloat16()
    q = torch.ones(1, 1, 4096, 64, dtype=torch.bfloat16)
    rotated = position.encode_qk(q, q, position.prepare(checks.span(4096)))[0][0, 0]
    assert (rotated[1:] != rotated[:-1]).any(-1).all()


def test_rope_needs_an_even_head_dimension() -> None:
    with pytest.raises(UserError, match="even head dimension"):
        build(ROPE, tiny_config(n_head=4, n_embd=36).dims)


# --- alibi -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_head", "expected"), [
    (3, [0.0625, 0.00390625, 0.25]),
    (4, [0.25, 0.0625, 0.015625, 0.00390625]),
    (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
    (8, [2.0**-h for h in range(1, 9)]),
    (12, [2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    (16, [2 ** (-h / 2) for h in range(1, 17)]),
])  # fmt: skip
def test_alibi_slopes_are_the_published_ones(n_head: int, expected: list[float]) -> None:
    torch.testing.assert_close(slopes(n_head), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("n_head", [4, 6, 8, 12, 16])
def test_alibi_equals_transformers_bloom(n_head: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 50), n_head, torch.float32).view(n_head, 50)  # m * j
    torch.testing.assert_close(slopes(n_head).float()[:, None] * torch.arange(50), theirs)


def alibi_bias(n_head: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """The bias (H, T, S) that the features make, in float64: zero content, so the scores are the bias."""
    position = encoding("alibi", dims(64 * n_head, n_head, 64)).to(dtype)
    zeros = torch.zeros(1, n_head, length, 64, dtype=dtype)
    q, k = position.encode_qk(zeros, zeros, position.prepare(checks.span(length)))
    return (q.double() @ k.double().transpose(-1, -2))[0] / 8


@pytest.mark.parametrize("length", [16, 17, 15, 64])
def test_alibi_weight_falls_with_distance_in_every_head(length: int) -> None:
    assert (alibi_bias(12, length, torch.float32)[:, -1].diff(dim=-1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alibi_bias_of_near_keys_is_distinct_and_exact_at_4096(dtype: torch.dtype) -> None:
    bias = alibi_bias(8, 4096, dtype)[:, -1, -64:]
    assert (bias.diff(dim=-1) > 0).all()
    exact = -slopes(8)[:, None] * torch.arange(63, -1, -1)
    torch.testing.assert_close(bias - bias[:, -1:], exact, atol=2e-2, rtol=0)


def test_alibi_bias_is_not_divided_by_sqrt_d() -> None:
    torch.testing.assert_close(alibi_bias(8, 2, torch.float32)[:, 1, 1], slopes(8), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scaling", [None, {"_target_": "model.position.scaling.Linear", "factor": 4.0}])
def test_alibi_without_a_causal_mask_falls_with_distance_to_both_sides(
    scaling: dict[str, object] | None,
) -> None:
    model = tiny_gpt(POSITIONS["alibi"] | {"scaling": scaling}, causal=False, n_head=6, n_embd=48)
    q, k, v = torch.randn(3, 1, 6, 50, 8)
    distance = (torch.arange(50)[:, None] - torch.arange(50)).abs() / (4 if scaling else 1)
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(8) - slopes(6)[:, None, None] * distance
    ours = checks.attention_output(model, q, k, v).double()
    torch.testing.assert_close(ours, scores.softmax(-1) @ v.double(), atol=3e-5, rtol=3e-5)


# --- kernels and mixtures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 9), (4, 9), (9, 9)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("wider", [0, 4])
def test_attend_equals_reference(T: int, S: int, biased: bool, wider: int) -> None:
    q, k, v = torch.randn(2, 3, T, 8 + wider), torch.randn(2, 3, S, 8 + wider), torch.randn(2, 3, S, 8)
    bias = torch.randn(3, T, S) if biased else None
    expected = reference_attend(q, k, v, bias_HTS=bias)
    torch.testing.assert_close(attend(q, k, v, bias_HTS=bias).double(), expected, atol=1e-5, rtol=1e-5)


def test_per_layer_mix_uses_rope_in_three_layers_and_none_in_the_fourth() -> None:
    model = tiny_gpt(POSITIONS["rope_nope"], n_layer=8)
    kinds = [type(model.position.for_layer(layer)).__name__ for layer in range(8)]
    assert kinds == ["Rotary", "Rotary", "Rotary", "PositionEncoding"] * 2


def test_per_layer_with_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean rope"):
        build(POSITIONS["rope_nope"] | {"pattern": ["rop"]}, tiny_config().dims)


def test_per_layer_with_learned_keeps_its_limit() -> None:
    kinds = {"learned": POSITIONS["learned"], "rope": ROPE}
    mixed = build(
        POSITIONS["rope_nope"] | {"pattern": ["learned", "rope"], "kinds": kinds}, tiny_config().dims
    )
    assert mixed.max_length == CONTEXT
