"""Every scaling against transformers' own tables, the formulas in float64, and the slips that are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.config import UserError
from model.gpt import GPT
from model.position import build, scaling
from model.position.scaling import inverse_frequencies, scaling_of
from tests.conftest import CONTEXT, POSITIONS, VOCAB, dims, read_options, tiny_config, tiny_gpt
from tests.position import checks

SCALINGS = read_options("conf/position/scaling")
ROPE = POSITIONS["rope"]
NEEDED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "ntk": {"factor": 4.0},
    "dynamic_ntk": {"factor": 2.0},
    "yarn": {"factor": 4.0, "beta_fast": 4.0},
    "longrope": {"factor": 4.0, "long_factor": [1.0, 1.5, 2.0, 4.0], "short_factor": [1.0, 1.0, 1.1, 1.2]},
}
every_scaling = pytest.mark.parametrize("name", SCALINGS)


def rope(name: str, **options: Any) -> dict[str, Any]:
    return ROPE | {"scaling": SCALINGS[name] | NEEDED.get(name, {}) | options}


def frequencies(
    name: str, head_dim: int, base: float, horizon: int, original_length: int, **options: Any
) -> tuple[Tensor, float]:
    values = SCALINGS[name] | NEEDED.get(name, {}) | options
    shape = dims(head_dim, 1, 2 * original_length, original_length)
    return scaling_of(values, shape).frequencies(head_dim, base, horizon)


# --- parity with transformers ------------------------------------------------------------------------------

THEIRS = {
    "linear": "linear",
    "dynamic_ntk": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
}


def theirs(
    name: str, head_dim: int, base: float, horizon: int, original_length: int, **options: Any
) -> tuple[Tensor, float]:
    parameters = {"rope_type": THEIRS[name], "rope_theta": base, **options}
    if name in {"yarn", "llama3", "longrope"}:
        parameters["original_max_position_embeddings"] = original_length
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=original_length,
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[THEIRS[name]](config, torch.device("cpu"), seq_len=horizon)


@pytest.mark.parametrize("stretch", [0.5, 1, 1.5, 4, 16])
@pytest.mark.parametrize("original_length", [256, 2048, 8192])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("name", THEIRS)
def test_frequencies_and_attention_factor_are_those_of_transformers(
    name: str, head_dim: int, base: float, original_length: int, stretch: float
) -> None:
    horizon = int(original_length * stretch)
    generator = torch.Generator().manual_seed(head_dim)
    longrope = {
        "short_factor": (1 + torch.rand(head_dim // 2, generator=generator)).tolist(),
        "long_factor": (1 + 8 * torch.rand(head_dim // 2, generator=generator)).tolist(),
    }
    for factor in (1.0, 2.0, 8.0, 32.0):
        options: dict[str, Any] = {"factor": factor}
        if name == "longrope":
            options |= longrope
        if name == "llama3":
            options |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if name == "yarn":
            options |= {"beta_fast": 32.0, "beta_slow": 1.0}
        ours, attention = frequencies(name, head_dim, base, horizon, original_length, **options)
        expected, expected_attention = theirs(name, head_dim, base, horizon, original_length, **options)
        torch.testing.assert_close(ours.float(), expected.float(), rtol=3e-6, atol=0)
        assert attention == pytest.approx(expected_attention, rel=1e-12)


# --- the formulas ------------------------------------------------------------------------------------------


@every_scaling
def test_factor_1_changes_nothing(name: str, monkeypatch: MonkeyPatch) -> None:
    one: dict[str, Any] = {"factor": 1.0} if "factor" in SCALINGS[name] else {}
    if name == "abf":
        monkeypatch.setitem(SCALINGS, "abf", SCALINGS["abf"] | {"base": 10_000.0})
    if name == "longrope":
        one |= {"long_factor": [1.0] * 32, "short_factor": None}
    # dynamic NTK of factor 1 still stretches, by horizon / trained length
    ours, attention = frequencies(name, 64, 10_000.0, 256 if name == "dynamic_ntk" else 512, 256, **one)
    assert torch.equal(ours, inverse_frequencies(64, 10_000.0)) or name in {"yarn", "llama3"}
    torch.testing.assert_close(ours, inverse_frequencies(64, 10_000.0), rtol=1e-15, atol=0)
    assert attention == 1


def test_linear_divides_every_angle_which_is_dividing_positions() -> None:
    ours, attention = frequencies("linear", 64, 10_000.0, 512, 256, factor=4.0)
    assert torch.equal(ours * 4, inverse_frequencies(64, 10_000.0)) and attention == 1
    stretched = build(rope("linear"), dims(64, 1, 256)).prepare(checks.span(1021))
    plain = build(ROPE, dims(64, 1, 256)).prepare(checks.span(256))
    for a, b in zip(stretched, plain, strict=True):
        torch.testing.assert_close(a[::4], b, atol=1e-6, rtol=0)


def test_ntk_leaves_the_highest_frequency_and_divides_the_lowest_by_the_factor() -> None:
    plain = inverse_frequencies(64, 10_000.0)
    ours, _ = frequencies("ntk", 64, 10_000.0, 512, 256, factor=4.0)
    assert ours[0] == plain[0] and ours[-1] == pytest.approx(plain[-1].item() / 4, rel=1e-12)
    assert scaling.stretched_base(10_000.0, 4.0, 64) == pytest.approx(41829.37, abs=0.01)


def test_dynamic_ntk_is_plain_up_to_the_trained_length_and_grows_with_the_horizon() -> None:
    plain = inverse_frequencies(64, 10_000.0)
    for horizon in (1, 255, 256):
        assert torch.equal(frequencies("dynamic_ntk", 64, 10_000.0, horizon, 256)[0], plain)
    ours, _ = frequencies("dynamic_ntk", 64, 10_000.0, 1024, 256, factor=2.0)
    assert ours[-1] == pytest.approx(plain[-1].item() / (2 * 4 - 1), rel=1e-12)


def yarn_in_float64(
    head_dim: int, base: float, length: int, s: float, fast: float, slow: float
) -> list[float]:
    """From the turns of each dimension: kept above `fast`, interpolated below `slow`, both ends certain."""
    found = []
    for i in range(head_dim // 2):
        theta = base ** (-2 * i / head_dim)
        turns = length * theta / (2 * math.pi)
        found.append(theta if turns > fast * 1.6 else theta / s if turns < slow / 1.6 else math.nan)
    return found


def test_yarn_keeps_what_turns_often_and_interpolates_what_does_not() -> None:
    ours, attention = frequencies("yarn", 128, 10_000.0, 8192, 4096, factor=8.0, beta_fast=32.0)
    expected = torch.tensor(yarn_in_float64(128, 10_000.0, 4096, 8.0, 32.0, 1.0), dtype=torch.float64)
    known = ~expected.isnan()
    assert 25 < known.sum() < 60
    torch.testing.assert_close(ours[known], expected[known], rtol=1e-12, atol=0)
    ratio = inverse_frequencies(128, 10_000.0) / ours
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(8) and (ratio.diff() >= -1e-12).all()
    assert attention == pytest.approx(0.1 * math.log(8) + 1)


def test_llama3_keeps_short_waves_and_interpolates_long_ones() -> None:
    ours, _ = frequencies("llama3", 128, 500_000.0, 100_000, 8192, factor=8.0)
    plain = inverse_frequencies(128, 500_000.0)
    wavelength = 2 * math.pi / plain
    assert torch.equal(ours[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    torch.testing.assert_close(ours[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-12, atol=0)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any() and ((ours < plain) & (ours > plain / 8))[between].all()


def test_attention_factor_scales_the_logits_by_its_square() -> None:
    q, k = torch.randn(2, 1, 1, 8, 64, dtype=torch.float64)
    plain, factored = (
        build(rope("yarn", factor=4.0, attention_factor=factor), dims(64, 1, 256)) for factor in (1.0, 1.5)
    )
    logits = []
    for position in (plain, factored):
        a, b = position.encode_qk(q, k, position.prepare(checks.span(8)))
        logits.append(a @ b.transpose(-1, -2))
    torch.testing.assert_close(logits[1], logits[0] * 1.5**2, rtol=1e-6, atol=1e-6)


# --- the slips ---------------------------------------------------------------------------------------------


def yarn_parity() -> None:
    for head_dim in (64, 128):
        test_frequencies_and_attention_factor_are_those_of_transformers("yarn", head_dim, 10_000.0, 2048, 4)


def test_yarn_ramp_reversed_is_caught(monkeypatch: MonkeyPatch) -> None:
    right = scaling.YaRN.frequencies

    def reversed_ramp(self: scaling.YaRN, head_dim: int, base: float, horizon: int) -> tuple[Tensor, float]:
        ours, attention = right(self, head_dim, base, horizon)
        plain = inverse_frequencies(head_dim, base)
        return plain + plain / self.factor - ours, attention

    monkeypatch.setattr(scaling.YaRN, "frequencies", reversed_ramp)
    with pytest.raises(AssertionError):
        yarn_parity()


def test_yarn_betas_swapped_are_caught(monkeypatch: MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"beta_fast=1.0: expected more than beta_slow=32.0; swap them"):
        frequencies("yarn", 64, 10_000.0, 512, 256, beta_fast=1.0, beta_slow=32.0)
    right = scaling.YaRN.__init__

    def swapped(self: scaling.YaRN, *arguments: Any, **options: Any) -> None:
        right(self, *arguments, **options)
        self.beta_fast, self.beta_slow = self.beta_slow, self.beta_fast

    monkeypatch.setattr(scaling.YaRN, "__init__", swapped)
    with pytest.raises((AssertionError, UserError)):
        yarn_parity()


def test_yarn_attention_factor_dropped_is_caught(monkeypatch: MonkeyPatch) -> None:
    right = scaling.YaRN.frequencies
    monkeypatch.setattr(scaling.YaRN, "frequencies", lambda *given: (right(*given)[0], 1.0))
    with pytest.raises(AssertionError):
        yarn_parity()


def test_factor_inside_the_exponent_is_caught(monkeypatch: MonkeyPatch) -> None:
    def inside(self: scaling.Linear, head_dim: int, base: float, horizon: int) -> tuple[Tensor, float]:
        return inverse_frequencies(head_dim, base * self.interpolation), 1.0

    monkeypatch.setattr(scaling.Linear, "frequencies", inside)
    with pytest.raises(AssertionError):
        test_frequencies_and_attention_factor_are_those_of_transformers("linear", 64, 10_000.0, 256, 4)


def test_base_that_changes_between_prefill_and_decode_is_caught(monkeypatch: MonkeyPatch) -> None:
    model = tiny_gpt(rope("dynamic_ntk")).double()
    prepare = type(model.position).prepare
    monkeypatch.setattr(
        type(model.position), "prepare", lambda self, span: prepare(self, span._replace(horizon=len(span.k)))
    )
    with pytest.raises(AssertionError):
        checks.check_decode_equals_forward(model, 2 * CONTEXT)


# --- decoding and state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [CONTEXT - 5, CONTEXT, 3 * CONTEXT])
@every_scaling
def test_decode_equals_full_forward_below_at_and_above_the_trained_length(name: str, length: int) -> None:
    checks.check_decode_equals_forward(tiny_gpt(rope(name)).double(), length)


@pytest.mark.parametrize("position", ["alibi", "learned", "sinusoidal", "rope_nope"])
def test_interpolated_encodings_decode_like_full_forward(position: str) -> None:
    values = POSITIONS[position] | {"scaling": SCALINGS["linear"] | NEEDED["linear"]}
    checks.check_decode_equals_forward(tiny_gpt(values).double(), 3 * CONTEXT)


@pytest.mark.parametrize("kind", ["log_n", "yarn", "drope"])
@pytest.mark.parametrize("position", POSITIONS)
def test_logit_scale_composes_with_every_encoding(position: str, kind: str) -> None:
    model = tiny_gpt(POSITIONS[position], logit_scale=kind).double()
    plain = tiny_gpt(POSITIONS[position]).double()
    plain.load_state_dict(model.state_dict())
    length = CONTEXT if plain.position.max_length else 3 * CONTEXT
    checks.check_decode_equals_forward(model, length)
    ids = torch.randint(VOCAB, (1, length))
    within = ids[:, :CONTEXT]
    torch.testing.assert_close(model(within), plain(within))
    if length > CONTEXT:
        assert (model(ids) - plain(ids))[:, -1].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("log_n", [1.0, 1.0, math.log(1024) / math.log(256)]),
        ("yarn", [(0.1 * math.log(4) + 1) ** 2] * 3),
        ("drope", [1 + 0.412 * math.log(4)] * 3),
    ],
)
def test_logit_scale_by_hand(kind: Any, expected: list[float]) -> None:
    from model.logit_scale import logit_scale

    found = logit_scale(kind, checks.span(1024), 256)
    assert found is not None and found.shape == (1024, 1)
    assert found[[0, 255, 1023], 0].tolist() == pytest.approx(expected)


@every_scaling
def test_all_scalings_share_one_state_dict(name: str) -> None:
    plain = tiny_gpt(ROPE)
    tiny_gpt(rope(name), context_length=4 * CONTEXT, original_length=CONTEXT).load_state_dict(
        plain.state_dict(), strict=True
    )


def test_short_call_after_a_long_one_gives_what_it_gave_before() -> None:
    model = tiny_gpt(rope("dynamic_ntk"))
    short, long = torch.randint(VOCAB, (1, 20)), torch.randint(VOCAB, (1, 100))
    with torch.no_grad():
        before, _, after = model(short), model(long), model(short)
    assert torch.equal(before, after)


def test_ragged_prompts_are_each_as_alone_where_the_encoding_depends_on_the_length() -> None:
    from model.generate import Sampling, generate

    model = tiny_gpt(rope("dynamic_ntk"))
    prompts = [[1, 2, 3], list(range(40)), [7] * 11]
    sampling = Sampling(max_new_tokens=30, temperature=0)

    def texts(prompts: list[list[int]]) -> list[list[int]]:
        steps = list(generate(model, prompts, sampling))
        return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]

    assert texts(prompts) == [texts([prompt])[0] for prompt in prompts]


# --- encodings without frequencies -------------------------------------------------------------------------

LINEAR = {"scaling": SCALINGS["linear"] | {"factor": 4.0}}


def test_interpolated_alibi_divides_distances() -> None:
    plain, stretched = (build(POSITIONS["alibi"] | more, dims(64, 4, 256)) for more in ({}, LINEAR))
    q = torch.zeros(1, 4, 900, 16)
    biases = []
    for position in (plain, stretched):
        a, b = position.encode_qk(q, q, position.prepare(checks.span(900)))
        biases.append((a.double() @ b.double().transpose(-1, -2))[0])
    torch.testing.assert_close(biases[1] * 4, biases[0], rtol=1e-6, atol=1e-4)


def test_interpolated_table_is_read_between_its_rows() -> None:
    position = build(POSITIONS["learned"] | LINEAR, dims(8, 1, 64, 16))
    table = position.table.weight
    assert table.shape == (16, 8) and position.max_length == 64
    x = torch.zeros(1, 64, 8)
    found = position.embed(x, checks.span(64))[0]
    torch.testing.assert_close(found[::4], table)
    torch.testing.assert_close(found[6], (table[1] + table[2]) / 2)
    torch.testing.assert_close(found[63], table[15])  # past the last row there is nothing to go to
    GPT(tiny_config(), VOCAB, build(POSITIONS["learned"] | LINEAR, tiny_config().dims))(
        torch.randint(VOCAB, (1, 4 * CONTEXT))
    )


def test_interpolated_sinusoids_are_those_of_divided_positions() -> None:
    plain, stretched = (build(POSITIONS["sinusoidal"] | more, dims(16, 1, 64)) for more in ({}, LINEAR))
    x = torch.zeros(1, 253, 16)
    torch.testing.assert_close(
        stretched.embed(x, checks.span(253))[0, ::4], plain.embed(x[:, :64], checks.span(64))[0]
    )


@pytest.mark.parametrize("name", ["ntk", "yarn", "llama3", "abf", "dynamic_ntk"])
@pytest.mark.parametrize("position", ["alibi", "learned", "sinusoidal"])
def test_other_scalings_of_encodings_without_frequencies_are_refused(position: str, name: str) -> None:
    values = POSITIONS[position] | {"scaling": SCALINGS[name] | NEEDED.get(name, {})}
    with pytest.raises(UserError, match=r"scales the frequencies of RoPE.*position/scaling=linear"):
        build(values, dims(64, 4, 256))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (rope("linear", factor=0.5), "position.scaling.factor=0.5: expected greater than or equal to 1"),
        (
            rope("linear", faktor=2.0),
            "position.scaling.faktor: unknown key; did you mean position.scaling.factor",
        ),
        (rope("longrope", long_factor=[1.0]), "1 factors for 32 frequencies; give one for each"),
        (rope("llama3", low_freq_factor=9.0), "high_freq_factor=4.0: expected more than low_freq_factor=9.0"),
        (
            ROPE | {"scaling": {"_target_": "os.system", "command": "x"}},
            "expected a Scaling below model.position",
        ),
    ],
)
def test_mistakes_are_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(values, dims(64, 1, 256))
