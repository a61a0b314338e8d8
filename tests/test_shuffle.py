"""Only the prefix is permuted, the same token is scored, and what has no sense of order loses nothing."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.config import UserError
from model.evaluation.shuffle import shuffle_losses, shuffle_prefix
from tests.conftest import CONTEXT, POSITIONS, VOCAB, tiny_gpt

KEPT = {"none": CONTEXT + 1, "all": 0, "keep_1": 1, "keep_8": 8}


def windows(count: int, seed: int = 0, length: int = CONTEXT + 1) -> Tensor:
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))


def by_arm(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["arm"]: row for row in rows}


class Unigram(nn.Module):
    """Its logits are the same everywhere, so its loss says which token was scored."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(causal=True)
        self.logits = nn.Parameter(torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)))

    def hidden(self, ids_BT: Tensor, horizon: int) -> Tensor:
        return torch.zeros(*ids_BT.shape, 1)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden + self.logits


# --- what is permuted --------------------------------------------------------------------------------------


def test_each_arm_moves_its_tokens_and_no_other() -> None:
    for number in range(50):
        window = 100 + np.arange(CONTEXT + 1)
        target, prefixes = shuffle_prefix(window, seed=3, number=number, min_prefix=12)
        assert set(prefixes) == set(KEPT)
        for arm, prefix in prefixes.items():
            assert sorted(prefix) == list(window[:target])
            stays = min(KEPT[arm], target)
            assert (prefix[target - stays :] == window[target - stays : target]).all()
            assert (arm == "none") == (prefix == window[:target]).all()
        assert (window == 100 + np.arange(CONTEXT + 1)).all()


def test_every_token_before_those_that_stay_can_come_to_every_place() -> None:
    """Also the first, and the last one before those that stay, whose neighbour the target or a kept token is."""
    window = np.arange(13)
    for arm, kept in (("all", 0), ("keep_1", 1), ("keep_8", 8)):
        seen = {
            (place, int(token))
            for number in range(400)
            for place, token in enumerate(shuffle_prefix(window, 0, number, 12).prefixes[arm])
        }
        moved = 12 - kept
        assert seen == {(i, j) for i in range(moved) for j in range(moved)} | {
            (i, i) for i in range(moved, 12)
        }


def test_targets_are_uniform_from_the_shortest_prefix_to_the_last_token() -> None:
    targets = [shuffle_prefix(np.arange(33), 0, number, 16).target for number in range(3400)]
    counts = np.bincount(targets)
    assert counts[:16].sum() == 0 and len(counts) == 33
    assert (abs(counts[16:] - 200) < 70).all()  # five standard deviations


def test_windows_and_seeds_have_draws_of_their_own() -> None:
    def draw(seed: int, number: int) -> list[int]:
        target, prefixes = shuffle_prefix(np.arange(33), seed, number, 16)
        return [target, *prefixes["all"].tolist()]

    assert draw(0, 0) == draw(0, 0)
    assert len({tuple(draw(seed, number)) for seed in range(5) for number in range(5)}) == 25
    assert draw(2**63, 0) != draw(0, 0)


# --- what is measured --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POSITIONS)
def test_rows_equal_a_plain_loop_over_prefixes(name: str) -> None:
    """Every prefix alone, one row a forward: later tokens of the window cannot matter."""
    model, ids = tiny_gpt(POSITIONS[name]).double(), windows(9)
    nats: dict[str, list[float]] = {arm: [] for arm in KEPT}
    for number, window in enumerate(ids):
        target, prefixes = shuffle_prefix(window.numpy(), 7, number, 16)
        for arm, prefix in prefixes.items():
            with torch.no_grad():
                logits = model(torch.from_numpy(prefix)[None], horizon=CONTEXT)[0, -1]
            nats[arm].append(-float(logits.log_softmax(-1)[window[target]]))
    rows = by_arm(shuffle_losses(model, ids, seed=7, batch_size=4))
    assert list(rows) == ["none", "all", "keep_1", "keep_8"]
    for arm, row in rows.items():
        loss, rise = np.array(nats[arm]), np.array(nats[arm]) - np.array(nats["none"])
        assert row["windows"] == 9
        assert row["loss"] == pytest.approx(loss.mean(), abs=1e-9)
        assert row["standard_error"] == pytest.approx(loss.std(ddof=1) / 3, abs=1e-9)
        assert row["rise"] == pytest.approx(rise.mean(), abs=1e-9)
        assert row["rise_standard_error"] == pytest.approx(rise.std(ddof=1) / 3, abs=1e-9)
        assert row["loss_bits"] == pytest.approx(loss.mean() / math.log(2), abs=1e-9)
        assert row["rise_bits"] == pytest.approx(rise.mean() / math.log(2), abs=1e-9)
    assert rows["none"]["rise"] == rows["none"]["rise_standard_error"] == 0


def test_one_layer_without_positions_has_no_sense_of_the_order_before_its_last_token() -> None:
    """One layer of causal attention weighs a set. With two, each key has seen how many came before it."""
    for n_layer in (1, 2):
        model = tiny_gpt(POSITIONS["none"], n_layer=n_layer).double()
        changes: dict[str, list[float]] = {"all": [], "keep_1": [], "keep_8": []}
        for number, window in enumerate(windows(10)):
            prefixes = shuffle_prefix(window.numpy(), 0, number, 16).prefixes
            with torch.no_grad():
                last = {arm: model(torch.from_numpy(prefix)[None])[0, -1] for arm, prefix in prefixes.items()}
            for arm, found in changes.items():
                found.append(float((last[arm] - last["none"]).abs().max()))
        rows = by_arm(shuffle_losses(model, windows(10), seed=0, batch_size=4))
        for arm in ("keep_1", "keep_8"):
            if n_layer == 1:
                assert max(changes[arm]) < 1e-12 and abs(rows[arm]["rise_standard_error"]) < 1e-12
            else:
                assert min(changes[arm]) > 1e-4 and rows[arm]["rise_standard_error"] > 1e-4
        assert max(changes["all"]) > 1e-2 and rows["all"]["rise_standard_error"] > 1e-2


def test_all_arms_score_the_same_tokens() -> None:
    model, ids = Unigram(), windows(40)
    targets = [window[shuffle_prefix(window.numpy(), 1, i, 16).target] for i, window in enumerate(ids)]
    wanted = -model.logits.detach().double().log_softmax(-1)[torch.stack(targets)]
    for row in shuffle_losses(model, ids, seed=1, batch_size=8):  # type: ignore[arg-type]
        assert row["loss"] == pytest.approx(float(wanted.mean()), abs=1e-12)
        assert row["standard_error"] == pytest.approx(float(wanted.std() / math.sqrt(40)), abs=1e-12)
        assert row["rise"] == row["rise_standard_error"] == 0


@pytest.mark.parametrize("name", POSITIONS)
def test_batch_size_does_not_matter_and_seed_does(name: str) -> None:
    model, ids = tiny_gpt(POSITIONS[name]).double(), windows(11)
    whole = shuffle_losses(model, ids, seed=0, batch_size=100)
    assert shuffle_losses(model, ids, seed=0, batch_size=100) == whole
    for batch_size in (1, 4):
        found = shuffle_losses(model, ids, seed=0, batch_size=batch_size)
        assert found == [pytest.approx(row, abs=1e-10) for row in whole]
    assert shuffle_losses(model, ids, seed=1, batch_size=100)[0]["loss"] != pytest.approx(whole[0]["loss"])


def test_logits_are_computed_at_one_position_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = tiny_gpt(POSITIONS["rope"]), []
    real = model.head
    monkeypatch.setattr(model, "head", lambda hidden: (shapes.append(hidden.shape), real(hidden))[1])
    shuffle_losses(model, windows(6), seed=0, batch_size=3)
    assert {math.prod(shape[:-1]) for shape in shapes} == {3}


def test_planned_length_is_that_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoding that depends on it gives every prefix and every batch the same angles."""
    model, horizons = tiny_gpt(POSITIONS["rope"]), []
    real = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda ids, horizon: (horizons.append(horizon), real(ids, horizon=horizon))[1]
    )
    shuffle_losses(model, windows(6, length=25), seed=0, batch_size=1)
    assert set(horizons) == {24}


def test_model_windows_and_random_state_are_left_as_they_were() -> None:
    model, ids = tiny_gpt(POSITIONS["rope"], dropout=0.5), windows(6)
    quiet, copy, state = shuffle_losses(model, ids, seed=0, batch_size=4), ids.clone(), torch.get_rng_state()
    assert shuffle_losses(model.train(), ids, seed=0, batch_size=4) == quiet
    assert model.training and torch.equal(ids, copy) and torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_one_window_has_no_standard_error() -> None:
    for row in shuffle_losses(tiny_gpt(POSITIONS["rope"]), windows(1), seed=0, batch_size=4):
        assert row["standard_error"] is None and row["rise_standard_error"] is None


@pytest.mark.parametrize("min_prefix", [0, 9, CONTEXT + 1])
def test_prefix_too_short_to_permute_or_longer_than_the_window_is_refused(min_prefix: int) -> None:
    with pytest.raises(UserError, match=f"min_prefix={min_prefix}: expected 10, .* up to the window's 32"):
        shuffle_losses(tiny_gpt(POSITIONS["rope"]), windows(3), 0, 4, min_prefix=min_prefix)
    shuffle_losses(tiny_gpt(POSITIONS["rope"]), windows(3), 0, 4, min_prefix=10)
    shuffle_losses(tiny_gpt(POSITIONS["rope"]), windows(3), 0, 4, min_prefix=CONTEXT)


def test_model_that_sees_later_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="model.causal=false"):
        shuffle_losses(tiny_gpt(POSITIONS["none"], causal=False), windows(3), 0, 4)
