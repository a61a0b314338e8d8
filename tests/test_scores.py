"""Observed attention scores against the formula, and bytes kept for the backward pass against a count by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from model.evaluation.memory import saved_bytes
from model.evaluation.scores import largest_scores
from model.evaluation.speed import token_seconds
from model.position import Span
from tests.conftest import CONTEXT, POSITIONS, VOCAB, tiny_gpt


@pytest.mark.parametrize("kind", ["rope", "none", "alibi"])
def test_largest_scores_are_those_of_every_pair(kind: str) -> None:
    model, windows = tiny_gpt(POSITIONS[kind]), torch.randint(0, 257, (3, 24))
    found = [0.0, 0.0]
    for window in windows:
        span = Span(q=torch.arange(24), k=torch.arange(24), horizon=24)
        state = model.position.prepare(span)
        x = model.position.embed(model.embedding(window[None]), span)
        for block in model.blocks:
            q, k, v = block.attn.project(block.ln_1(x), model.position, state)
            x = block(x, model.position, state, None, None)
            for i in range(24):
                for j in range(i + 1):
                    score = (q[0, :, i] * k[0, :, j]).sum(-1).abs().max().item() / math.sqrt(v.shape[-1])
                    found[i - j >= 16] = max(found[i - j >= 16], score)
    assert largest_scores(model, windows, 16) == pytest.approx(tuple(found), rel=1e-5)


def test_interpolation_reads_far_distances_as_near_ones() -> None:
    """The same token everywhere: distance alone decides, and an even one is read by factor 2 as its half."""
    scaling = {"_target_": "model.position.scaling.Linear", "factor": 2}
    plain, linear = (
        tiny_gpt(POSITIONS["rope"], n_layer=1),
        tiny_gpt(POSITIONS["rope"] | {"scaling": scaling}, n_layer=1),
    )
    linear.load_state_dict(plain.state_dict())
    window = torch.full((1, 64), 7)
    within, beyond = (
        max(largest_scores(model, w, 32)) for model, w in ((plain, window[:, :32]), (linear, window))
    )
    assert within <= beyond * (1 + 1e-5) and beyond < 1.05 * within


def test_windows_no_longer_than_the_trained_length_have_no_far_scores() -> None:
    assert largest_scores(tiny_gpt(POSITIONS["rope"]), torch.randint(0, 257, (1, 16)), 16)[1] == 0


def test_saved_bytes_grow_with_the_batch_and_count_a_dense_bias() -> None:
    precision = partial(torch.autocast, "cpu", torch.bfloat16, enabled=False)
    ids = torch.randint(0, 257, (4, 32))
    sinusoidal, t5 = (tiny_gpt(POSITIONS[kind]) for kind in ("sinusoidal", "t5"))
    small, large = saved_bytes(sinusoidal, ids[:2], precision), saved_bytes(sinusoidal, ids, precision)
    assert 1.8 * small < large < 2.2 * small
    assert saved_bytes(t5, ids, precision) >= large + 2 * 4 * 32 * 32 * 4  # layers, heads, T, S, fp32


def test_saved_bytes_of_one_linear_layer_are_its_input_and_the_softmax() -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(257, 8))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (torch.ones(*ids.shape, 8) * 2.0) @ self.weight.T

    precision = partial(torch.autocast, "cpu", torch.bfloat16, enabled=False)
    found = saved_bytes(Head(), torch.randint(0, 257, (2, 16)), precision)  # type: ignore[arg-type]
    inputs, log_softmax, targets, total_weight = 32 * 8 * 4, 32 * 257 * 4, 32 * 8, 4
    assert found == inputs + log_softmax + targets + total_weight


def test_time_of_a_token_is_that_of_its_model_and_leaves_no_gradient() -> None:
    small, large = tiny_gpt(POSITIONS["rope"], n_layer=1), tiny_gpt(POSITIONS["rope"], n_layer=8)
    ids = torch.randint(VOCAB, (8, CONTEXT))
    precision = partial(torch.autocast, "cpu", enabled=False)
    one, again, eight = token_seconds([(small, ids), (small, ids), (large, ids)], precision)
    assert eight > 2.5 * max(one, again) and one > 0
    assert all(parameter.grad is None for parameter in large.parameters())
