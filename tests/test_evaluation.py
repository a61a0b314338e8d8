"""Held-out loss: every token once, the same for any batch size, and no trace left in the training."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.loader import TokenStream
from data.prepare import prepare
from data.sources import DataConfig
from model.evaluation.perplexity import evaluate
from tests.conftest import CONTEXT, POSITIONS, VOCAB, tiny_gpt, write_shards


@pytest.fixture
def val(tmp_path: Path) -> TokenStream:
    tokens = np.random.default_rng(0).integers(VOCAB, size=1000)
    return TokenStream(write_shards(tmp_path / "s", tokens, tokens), "val")


def test_loss_is_weighted_by_tokens_not_by_batches(tmp_path: Path) -> None:
    """110 targets: 100 at loss 1.0 and 10 at loss 3.0."""
    tokens = [0] + [1] * 110
    stream = TokenStream(write_shards(tmp_path / "s", tokens, tokens), "val")

    class ByPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.anchor = 0, nn.Parameter(torch.zeros(()))

        def forward(self, ids: Tensor) -> Tensor:
            index = torch.arange(self.seen, self.seen + ids.numel()).view_as(ids)
            self.seen += ids.numel()
            p = torch.where(index < 100, math.exp(-1.0), math.exp(-3.0))
            return torch.stack(((1 - p).log(), p.log()), -1)

    score = evaluate(ByPosition(), stream, 100, batch_tokens=100)  # type: ignore[arg-type]
    assert score.tokens == 110
    assert score.loss == pytest.approx(1.181818, abs=1e-6)
    assert score.perplexity == pytest.approx(3.2603, abs=1e-4)


@pytest.mark.parametrize("length", [1, 7, 32, 100, 999, 5000])
def test_every_token_is_scored_once_at_ln_v_by_a_uniform_model(val: TokenStream, length: int) -> None:
    class Uniform(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.anchor = nn.Parameter(torch.zeros(()))

        def forward(self, ids: Tensor) -> Tensor:
            return torch.zeros(*ids.shape, VOCAB)

    score = evaluate(Uniform(), val, length)  # type: ignore[arg-type]
    assert score.tokens == 999
    assert score.loss == pytest.approx(math.log(VOCAB), abs=1e-6)
    assert score.standard_error == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", POSITIONS)
def test_batch_size_and_seed_do_not_matter(val: TokenStream, name: str) -> None:
    model = tiny_gpt(POSITIONS[name])
    losses = set()
    for batch in (1, 3, 8):
        torch.manual_seed(batch)
        losses.add(round(evaluate(model, val, CONTEXT, batch_tokens=batch * CONTEXT).loss, 5))
    assert len(losses) == 1


def test_max_tokens_limits_and_asking_for_more_scores_what_there_is(val: TokenStream) -> None:
    model = tiny_gpt(POSITIONS["rope"])
    assert evaluate(model, val, CONTEXT, max_tokens=100).tokens == 100
    assert evaluate(model, val, CONTEXT, max_tokens=10**9) == evaluate(model, val, CONTEXT)


def test_dropout_is_off_mode_restored_and_rng_untouched(val: TokenStream) -> None:
    model = tiny_gpt(POSITIONS["rope"], dropout=0.5).train()
    state = torch.get_rng_state()
    assert evaluate(model, val, CONTEXT) == evaluate(model, val, CONTEXT)
    assert model.training and torch.equal(torch.get_rng_state(), state)


def test_bits_per_byte_uses_the_bytes_of_the_scored_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("In the beginning God created é 🙂\n" * 60)
    config = DataConfig(source="text", path=str(tmp_path / "a.txt"), out=str(tmp_path / "out"))
    stream = TokenStream(prepare(config, "bytes", lambda _: None), "val")
    score = evaluate(tiny_gpt(POSITIONS["none"]), stream, CONTEXT)
    n_bytes = score.tokens - 1  # every scored token is one byte, but for the end-of-text
    assert score.bits_per_byte == pytest.approx(score.loss * score.tokens / math.log(2) / n_bytes)
