"""Probes find position where it is and do not where it is not, and leave the model as it was."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.loader import TokenStream
from model.config import UserError
from model.evaluation import probe
from model.evaluation.probe import (
    cut_windows,
    hidden_states,
    probe_positions,
    train_and_test_windows,
    untrained,
)
from model.gpt import GPT
from model.load import build_model
from model.position import build
from tests.conftest import (
    CONTEXT,
    POSITIONS,
    TINY,
    VOCAB,
    compose_config,
    tiny_config,
    tiny_gpt,
    write_shards,
)

QUICK: dict[str, Any] = {"steps": 3, "batch_size": 4, "lr": 1e-2, "seed": 0}


def windows(count: int, seed: int, length: int = CONTEXT) -> Tensor:
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))


def loud(name: str) -> GPT:
    """A model in whose embeddings the token is whispered, so that what is added to it stands out."""
    model = tiny_gpt(POSITIONS[name])
    with torch.no_grad():
        model.embedding.weight.mul_(0.01)
        for table in model.position.parameters():
            table.mul_(20)
    return model


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_positions_in_the_embeddings_are_found_in_every_layer(name: str) -> None:
    rows = probe_positions(
        loud(name), windows(64, 1), windows(32, 2), steps=100, batch_size=16, lr=1e-2, seed=0
    )
    assert rows[0]["mad_over_length"] < 0.01 and rows[0]["accuracy"] > 0.95
    assert all(row["mad_over_length"] < 0.1 for row in rows)


@pytest.mark.parametrize("name", ["none", "rope", "alibi"])
def test_embeddings_without_position_are_at_chance(name: str) -> None:
    """Random guesses score 1/3, the middle 1/4; training data learned by heart would not help either."""
    rows = probe_positions(
        tiny_gpt(POSITIONS[name]), windows(64, 1), windows(64, 2), steps=60, batch_size=16, lr=1e-2, seed=0
    )
    assert 0.23 < rows[0]["mad_over_length"] < 0.42 and rows[0]["accuracy"] < 0.06


def test_untrained_causal_mask_tells_positions_in_every_later_layer() -> None:
    """Chi et al. 2023: a mean over i + 1 tokens has less variance the larger i is. Without a mask there is nothing."""
    blocks, chance = [], []
    for causal, n_layer in ((True, 2), (False, 1)):
        config = tiny_config(n_embd=64, n_layer=n_layer, causal=causal)
        model = GPT(config, VOCAB, build(POSITIONS["none"], config.dims))
        with torch.no_grad():
            model.embedding.weight.mul_(0.2)  # in so few layers of so small weights one would hear it alone
        rows = probe_positions(
            model, windows(1600, 1), windows(64, 2), steps=200, batch_size=16, lr=2e-2, seed=0
        )
        (blocks if causal else chance).extend(rows[1:])
        chance.append(rows[0])
    assert max(row["mad_over_length"] for row in blocks) < 0.27
    assert min(row["mad_over_length"] for row in chance) > 0.29


@pytest.mark.parametrize("name", POSITIONS)
def test_a_row_per_layer_for_every_encoding_and_length(name: str) -> None:
    model = tiny_gpt(POSITIONS[name], n_layer=3)
    for length in (CONTEXT // 2, CONTEXT):
        rows = probe_positions(model, windows(5, 1, length), windows(3, 2, length), **QUICK)
        assert [row["layer"] for row in rows] == [0, 1, 2, 3]
        assert all(row["mad"] == pytest.approx(row["mad_over_length"] * length) for row in rows)


@pytest.mark.parametrize("name", POSITIONS)
def test_hidden_states_are_the_residual_stream(name: str) -> None:
    """Layer 0 has the tokens with what the encoding adds; the last under the final norm is what the head reads."""
    model, ids = tiny_gpt(POSITIONS[name]), windows(2, 1)
    states = hidden_states(model, ids)
    with torch.no_grad():
        torch.testing.assert_close(model.ln_f(states[-1]), model.hidden(ids))
        alone = hidden_states(model, ids[:, :1])[0]
    torch.testing.assert_close(states[0][:, :1], alone)
    if name not in ("sinusoidal", "learned"):
        assert torch.equal(states[0], model.embedding(ids))
    changes = [float((b - a).detach().abs().max()) for a, b in pairwise(states)]
    assert min(changes) > 0


def test_metrics_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that always says index 3 of 8: distances 3 2 1 0 1 2 3 4."""

    def constant(self: probe.Probe, h_NC: Tensor) -> Tensor:
        return torch.eye(8)[3].repeat(len(h_NC), 1) + 0 * self.down.sum()

    monkeypatch.setattr(probe.Probe, "forward", constant)
    rows = probe_positions(tiny_gpt(POSITIONS["none"]), windows(5, 1, 8), windows(7, 2, 8), **QUICK)
    for row in rows:
        assert (row["mad"], row["mad_over_length"], row["accuracy"]) == (2.0, 0.25, 0.125)


def test_model_and_random_state_are_left_as_they_were() -> None:
    model = tiny_gpt(POSITIONS["learned"], dropout=0.5).train()
    model.position.table.weight.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = [weight.requires_grad for weight in model.parameters()]
    state = torch.get_rng_state()
    probe_positions(model, windows(8, 1), windows(4, 2), **QUICK)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [weight.requires_grad for weight in model.parameters()] == wanted
    assert all(weight.grad is None for weight in model.parameters())
    assert model.training and not any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_same_seed_gives_the_same_numbers_whatever_the_global_state() -> None:
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(found))
        model = loud("sinusoidal").train()
        with torch.no_grad():
            model.embedding.weight.copy_(torch.linspace(-0.1, 0.1, VOCAB)[:, None])
            for block in model.blocks:
                for weight in block.parameters():
                    weight.fill_(0.01)
        found.append(probe_positions(model, windows(20, 1), windows(9, 2), **QUICK | {"seed": seed}))
    assert found[0] == found[1] != found[2]


def test_dropout_is_off_and_gradients_are_on_whatever_the_caller_has() -> None:
    model = tiny_gpt(POSITIONS["rope"], dropout=0.5)
    quiet = probe_positions(model, windows(20, 1), windows(9, 2), **QUICK)
    with torch.no_grad():
        assert probe_positions(model.train(), windows(20, 1), windows(9, 2), **QUICK) == quiet


def test_gradients_in_pieces_are_those_of_the_mean_over_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "HELD_TOKENS", 50)
    one = probe.Probe(8, CONTEXT, torch.Generator().manual_seed(0))
    h_BTC = torch.randn(4, CONTEXT, 8)
    probe._accumulate_gradients(one, h_BTC)
    index = torch.arange(CONTEXT).expand(4, CONTEXT)
    loss = F.cross_entropy(one(h_BTC).transpose(1, 2), index)
    wanted = torch.autograd.grad(loss, [one.up, one.down])
    for weight, gradient in zip((one.up, one.down), wanted, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


def test_every_window_trains_before_one_does_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = hidden_states

    def watching(model: GPT, ids_BT: Tensor) -> list[Tensor]:
        seen.extend(ids_BT[:, 0].tolist())
        return real(model, ids_BT)

    monkeypatch.setattr(probe, "hidden_states", watching)
    marked = windows(6, 1)
    marked[:, 0] = torch.arange(6)
    probe_positions(tiny_gpt(POSITIONS["none"]), marked, windows(2, 2), **QUICK)
    seen = seen[QUICK["batch_size"] :]  # the first batch is read for the size of the states
    trained = seen[: QUICK["steps"] * QUICK["batch_size"]]
    assert sorted(trained[:6]) == sorted(trained[6:]) == list(range(6)) and trained[:6] != trained[6:]


def test_the_size_of_the_states_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training makes the residual stream larger, which by itself is no knowledge of position."""
    model, texts = tiny_gpt(POSITIONS["sinusoidal"]), (windows(6, 1), windows(2, 2))
    rows = probe_positions(model, *texts, **QUICK)
    real = hidden_states
    monkeypatch.setattr(probe, "hidden_states", lambda *arguments: [64 * h for h in real(*arguments)])
    assert probe_positions(model, *texts, **QUICK) == rows


# --- windows -----------------------------------------------------------------------------------------------


@pytest.fixture
def streams(tmp_path: Path) -> tuple[TokenStream, TokenStream]:
    """Tokens that say where they stand, 0 to 999 and 1000 to 1499."""
    write_shards(tmp_path / "s", np.arange(1000), np.arange(1000, 1500), vocab_size=2000)
    return TokenStream(tmp_path / "s", "train"), TokenStream(tmp_path / "s", "val")


def test_windows_are_apart_whole_and_spread_over_the_stream(streams: tuple[TokenStream, TokenStream]) -> None:
    for count, length in ((7, 100), (10, 100), (1, 1000), (1000, 1)):
        found = cut_windows(streams[0], count, length)
        assert found.shape == (count, length) and found.dtype == torch.int64
        assert len(found.unique()) == count * length
        assert (found - found[:, :1] == torch.arange(length)).all()
        assert found[-1, 0] == (count - 1) * (1000 // count)


def test_more_windows_than_the_text_holds_are_refused(streams: tuple[TokenStream, TokenStream]) -> None:
    with pytest.raises(UserError, match="1000 tokens, too few for 11 windows of 100; ask for 10 or fewer"):
        cut_windows(streams[0], 11, 100)


def test_test_windows_share_no_text_with_training(streams: tuple[TokenStream, TokenStream]) -> None:
    train, test = train_and_test_windows(*streams, 10, 5, 100)
    assert (len(train), len(test)) == (10, 5)
    assert not set(train.flatten().tolist()) & set(test.flatten().tolist())
    with pytest.raises(UserError, match="tested on the split that they are trained on"):
        train_and_test_windows(streams[0], streams[0], 10, 5, 100)


def test_window_in_both_is_refused() -> None:
    train, test = windows(8, 1), windows(4, 2)
    test[2] = train[5]
    with pytest.raises(UserError, match="1 of 4 windows"):
        probe_positions(tiny_gpt(POSITIONS["none"]), train, test, **QUICK)


def test_windows_of_two_lengths_are_refused() -> None:
    with pytest.raises(UserError, match="of 32 tokens and tested on windows of 16"):
        probe_positions(tiny_gpt(POSITIONS["none"]), windows(8, 1), windows(4, 2, 16), **QUICK)


def test_windows_past_what_the_encoding_defines_are_refused() -> None:
    long = CONTEXT + 1
    with pytest.raises(UserError, match="not defined beyond 32 tokens"):
        probe_positions(tiny_gpt(POSITIONS["learned"]), windows(8, 1, long), windows(4, 2, long), **QUICK)


def test_untrained_is_the_first_step_of_the_run() -> None:
    config = compose_config(*TINY, "data.path=none", "position=learned", "seed=5")
    state = torch.get_rng_state()
    model = untrained(config)
    assert torch.equal(torch.get_rng_state(), state) and not model.training
    first = build_model(config).state_dict()
    assert all(torch.equal(value, first[key]) for key, value in model.state_dict().items())
    assert first.keys() == model.state_dict().keys()
