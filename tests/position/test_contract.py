"""The contract, over every YAML in conf/position: a new encoding is covered by adding its file."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from model import attention
from model.gpt import GPT
from model.kernels import reference_attend
from model.position import build
from tests.conftest import CONTEXT, POSITIONS, VOCAB, tiny_config, tiny_gpt
from tests.position import checks

every_position = pytest.mark.parametrize("name", POSITIONS)


@every_position
def test_cached_decode_equals_full_forward(name: str) -> None:
    model = tiny_gpt(POSITIONS[name], n_layer=4).double()
    checks.check_decode_equals_forward(model)
    if model.position.max_length is None:
        checks.check_decode_equals_forward(model, length=3 * CONTEXT)


@every_position
def test_cached_decode_equals_full_forward_in_bf16(name: str) -> None:
    model = tiny_gpt(POSITIONS[name]).to(torch.bfloat16)
    checks.check_decode_equals_forward(model, tolerance=0.15)


@every_position
def test_no_leak_from_later_tokens(name: str) -> None:
    checks.check_no_leak(tiny_gpt(POSITIONS[name], n_layer=4))


@every_position
def test_holds_no_float_buffers(name: str) -> None:
    model = tiny_gpt(POSITIONS[name])
    assert [name for name, buffer in model.named_buffers() if buffer.is_floating_point()] == []


@every_position
def test_prepare_does_not_depend_on_model_dtype(name: str) -> None:
    model = tiny_gpt(POSITIONS[name])
    position = model.position.for_layer(0)
    with torch.no_grad():  # a learned table is a weight, and rounded as all weights are
        for parameter in position.parameters():
            parameter.copy_(parameter.bfloat16())
    before = position.prepare(checks.span(CONTEXT))
    after = copy.deepcopy(position).bfloat16().prepare(checks.span(CONTEXT))
    if before is not None:
        tensors = before if isinstance(before, tuple) else (before,)
        for a, b in zip(tensors, after if isinstance(after, tuple) else (after,), strict=True):
            assert a.dtype == b.dtype == torch.float32
            assert torch.equal(a, b)


@every_position
def test_works_in_bf16_autocast_and_gives_gradients_to_every_parameter(name: str) -> None:
    model = tiny_gpt(POSITIONS[name], n_layer=4).train()
    ids = torch.randint(VOCAB, (2, CONTEXT + 1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, parameter_name


@every_position
@pytest.mark.parametrize(("n_layer", "n_head", "n_embd", "vocab"), [(4, 4, 256, 2049), (6, 6, 768, 50257)])
def test_initial_loss_is_within_2_percent_of_uniform(
    name: str, n_layer: int, n_head: int, n_embd: int, vocab: int
) -> None:
    config = tiny_config(n_layer=n_layer, n_head=n_head, n_embd=n_embd, context_length=64)
    model = GPT(config, vocab, build(POSITIONS[name], config.dims))
    ids = torch.randint(vocab, (4, 65))
    with torch.no_grad():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert abs(float(loss) / math.log(vocab) - 1) < 0.02


@every_position
def test_lengths_do_not_leak_into_later_calls(name: str) -> None:
    model = tiny_gpt(POSITIONS[name])
    longest = CONTEXT if model.position.max_length else 100
    short, long = torch.randint(VOCAB, (1, 20)), torch.randint(VOCAB, (1, longest))
    with torch.no_grad():
        first = model(short)
        model(long)
        assert torch.equal(model(short), first)


@every_position
def test_head_counts_that_are_not_powers_of_two(name: str) -> None:
    checks.check_decode_equals_forward(tiny_gpt(POSITIONS[name], n_head=6, n_embd=48).double())


@every_position
def test_trains_to_overfit_one_batch(name: str) -> None:
    config = tiny_config()
    model = GPT(config, VOCAB, build(POSITIONS[name], config.dims))
    ids = torch.randint(VOCAB, (2, CONTEXT + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.2


@every_position
def test_whole_model_equals_the_float64_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels against softmax(q . k / sqrt(D) + bias) v spelt out, through all layers."""
    model, ids = tiny_gpt(POSITIONS[name], n_layer=4), torch.randint(VOCAB, (2, CONTEXT))
    with torch.no_grad():
        fast = model(ids)
        monkeypatch.setattr(
            attention,
            "attend",
            lambda *qkv, bias_HTS, causal, dropout: reference_attend(*qkv, bias_HTS=bias_HTS),
        )
        exact = copy.deepcopy(model).double()(ids)
    torch.testing.assert_close(fast.double(), exact, atol=1e-4, rtol=1e-4)
