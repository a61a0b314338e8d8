"""Batches: every window once an epoch, the same for any order of asking, ranks apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.loader import TokenStream, TrainLoader
from model.config import UserError
from tests.conftest import CONTEXT, write_shards

RAMP = np.arange(2000) % 251


@pytest.mark.parametrize(
    ("n_tokens", "starts"), [(33, {0}), (34, {0, 1}), (40, set(range(8))), (100, set(range(68)))]
)
def test_every_start_occurs_and_targets_are_inputs_shifted(
    tmp_path: Path, n_tokens: int, starts: set[int]
) -> None:
    stream = TokenStream(write_shards(tmp_path / "s", RAMP[:n_tokens], RAMP), "train")
    stream.check_fits("bytes", CONTEXT)
    loader = TrainLoader(stream, CONTEXT, 4, seed=0)
    seen = set()
    for step in range(600):
        batch = loader.batch(step)
        assert batch.shape == (4, CONTEXT + 1)
        assert (batch[:, 1:] == batch[:, :-1] + 1).all() and batch.max() < n_tokens
        seen |= set(batch[:, 0].tolist())
    assert seen == starts


def test_split_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    stream = TokenStream(write_shards(tmp_path / "s", RAMP, RAMP[:5]), "val")
    with pytest.raises(UserError, match=r"val split has 5 tokens.*model.context_length=4 or less"):
        stream.check_fits("bytes", CONTEXT)
    with pytest.raises(UserError, match="train split has 32 tokens"):
        TokenStream(write_shards(tmp_path / "t", RAMP[:32], RAMP), "train").check_fits("bytes", CONTEXT)


def test_an_epoch_shows_no_target_twice_and_almost_all_of_them(tmp_path: Path) -> None:
    n = 5000
    stream = TokenStream(write_shards(tmp_path / "s", np.arange(n), [0] * 50, vocab_size=n), "train")
    loader = TrainLoader(stream, CONTEXT, 1, seed=3)
    targets = np.concatenate([loader.batch(step)[0, 1:] for step in range(loader.windows_per_epoch)])
    assert len(set(targets.tolist())) == len(targets) >= n - 3 * CONTEXT


def test_batch_is_a_pure_function_of_seed_and_step(shards: Path) -> None:
    stream = TokenStream(shards, "train")
    loader, again = TrainLoader(stream, CONTEXT, 4, seed=5), TrainLoader(stream, CONTEXT, 4, seed=5)
    other = TrainLoader(stream, CONTEXT, 4, seed=6)
    late = again.batch(1000)
    assert all((loader.batch(step) == again.batch(step)).all() for step in (3, 0, 2))
    assert (loader.batch(1000) == late).all()
    assert any((loader.batch(step) != other.batch(step)).any() for step in range(3))
    small = TrainLoader(stream, CONTEXT, 2, seed=5)
    assert (np.concatenate((small.batch(2), small.batch(3))) == loader.batch(1)).all()
