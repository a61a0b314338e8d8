"""T5's bias: its buckets against transformers', what is learned, and what all layers share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.loader import TokenStream
from model.config import UserError
from model.position.t5 import bucket_starts
from tests.conftest import CONTEXT, POSITIONS, VOCAB, encoding, evaluate, tiny_config, tiny_gpt, write_shards
from tests.position import checks

T5 = POSITIONS["t5"]


def buckets(distances: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """The bucket of each distance, as the encoding gives it: read off a table that holds its own row numbers."""
    position = encoding("t5", num_buckets=num_buckets, max_distance=max_distance)
    with torch.no_grad():
        position.table.weight.copy_(torch.arange(num_buckets)[:, None].expand_as(position.table.weight))
    last = int(distances.max())
    span = checks.span(1, offset=last)
    row = position.score_bias(position.prepare(span))[0, 0].long()
    return row.flip(0)[distances]


@pytest.mark.parametrize(
    ("num_buckets", "max_distance"),
    # in those with 256, 2048 and 8192 some logarithms are integers, where rounding would show
    [
        (32, 128),
        (32, 256),
        (32, 2048),
        (16, 128),
        (16, 8192),
        (64, 256),
        (8, 20),
        (2, 2),
        (32, 17),
        (128, 1000),
    ],
)
def test_buckets_equal_transformers_at_every_distance(num_buckets: int, max_distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(20_001)
    theirs = T5Attention._relative_position_bucket(
        -distances, bidirectional=False, num_buckets=num_buckets, max_distance=max_distance
    )
    assert torch.equal(buckets(distances, num_buckets, max_distance), theirs)


def test_buckets_of_a_few_distances() -> None:
    """16 at 8^(k/16) times 16: 18.2 starts bucket 17, 112.3 the last."""
    expected = {
        0: 0,
        1: 1,
        15: 15,
        16: 16,
        18: 16,
        19: 17,
        20: 17,
        21: 18,
        31: 21,
        32: 21,
        33: 21,
        50: 24,
        64: 26,
    }
    expected |= {99: 30, 100: 30, 112: 30, 113: 31, 127: 31, 128: 31, 10_000: 31}
    found = buckets(torch.tensor(list(expected)), 32, 128)
    assert dict(zip(expected, found.tolist(), strict=True)) == expected
    assert bucket_starts(32, 128)[16:] == [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 256), (64, 2048), (4, 2), (8, 20)])
def test_buckets_of_both_sides_equal_transformers(num_buckets: int, max_distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    config = tiny_config(causal=False)
    position = encoding("t5", config.dims, num_buckets=num_buckets, max_distance=max_distance)
    with torch.no_grad():
        position.table.weight.copy_(torch.arange(num_buckets)[:, None].expand_as(position.table.weight))
    ours = position.score_bias(position.prepare(checks.span(600)))[0].long()
    key_minus_query = torch.arange(600) - torch.arange(600)[:, None]
    theirs = T5Attention._relative_position_bucket(
        key_minus_query, bidirectional=True, num_buckets=num_buckets, max_distance=max_distance
    )
    assert torch.equal(ours, theirs)


def test_both_sides_need_a_multiple_of_four_buckets() -> None:
    dims = tiny_config(causal=False).dims
    with pytest.raises(
        UserError, match="half of those on each side hold one distance each; give a multiple of 4"
    ):
        encoding("t5", dims, num_buckets=30)
    with pytest.raises(UserError, match="more than the 8 distances"):
        encoding("t5", dims, max_distance=8)


def test_bias_is_not_divided_by_sqrt_d_and_is_of_the_head() -> None:
    model = tiny_gpt(T5)
    q, v = torch.zeros(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
    weight_H = torch.sigmoid(model.position.table.weight[1] - model.position.table.weight[0])
    expected = weight_H[:, None] * v[0, :, 0] + (1 - weight_H[:, None]) * v[0, :, 1]
    torch.testing.assert_close(checks.attention_output(model, q, q, v)[0, :, 1], expected)


def test_one_table_is_prepared_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, count = tiny_gpt(T5, n_layer=4), [0]
    prepare = model.position.prepare

    def counting(span: object) -> torch.Tensor:
        count[0] += 1
        return prepare(span)

    monkeypatch.setattr(model.position, "prepare", counting)
    model(torch.randint(VOCAB, (1, CONTEXT)))
    assert count == [1] and [tuple(p.shape) for p in model.position.parameters()] == [(32, 4)]


@pytest.mark.parametrize(("length", "used"), [(10, 10), (CONTEXT, 22), (200, 32)])
def test_gradient_reaches_every_bucket_in_use_and_no_other(length: int, used: int) -> None:
    """A window of 32 has distances up to 31, the first of bucket 21."""
    model = tiny_gpt(T5)
    model(torch.randint(VOCAB, (2, length))).square().mean().backward()
    touched = model.position.table.weight.grad.abs() > 0
    assert touched[:used].all() and not touched[used:].any()


def test_far_keys_are_told_apart_only_within_the_maximal_distance() -> None:
    bias = encoding("t5", num_buckets=8, max_distance=20).prepare(checks.span(1, offset=99))[0, 0].flip(0)
    assert len(bias[:20].unique()) == 8 and (bias[16:] == bias[99]).all()


def test_evaluation_at_four_times_the_trained_length_runs(tmp_path: Path) -> None:
    tokens = torch.randint(VOCAB, (1000,)).numpy()
    stream = TokenStream(write_shards(tmp_path / "s", tokens, tokens), "val")
    score = evaluate(tiny_gpt(T5), stream, 4 * CONTEXT)
    assert score.tokens == 999 and score.by_position[-1]["to"] == 4 * CONTEXT


@pytest.mark.parametrize(
    ("num_buckets", "max_distance", "message"),
    [
        (
            31,
            128,
            "position.num_buckets=31: half of them hold one distance each; give a multiple of 2, as 32",
        ),
        (1, 128, "position.num_buckets=1: half of them"),
        (0, 128, "position.num_buckets=0: expected greater than 0"),
        (
            32,
            16,
            "position.max_distance=16: expected more than the 16 distances that have buckets .* such as 128",
        ),
        (32, 0, "position.max_distance=0: expected greater than 0"),
    ],
)
def test_tables_that_make_no_sense_are_refused(num_buckets: int, max_distance: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        encoding("t5", num_buckets=num_buckets, max_distance=max_distance)
