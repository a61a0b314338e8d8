"""The bigram baseline against its formula."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from data.loader import TokenStream
from model.evaluation import bigram
from tests.conftest import write_shards


def test_bigram_equals_its_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigram, "WEIGHTS", (2,))
    train, val = [0, 1, 0, 1, 0, 2], [1, 0, 2]
    folder = write_shards(tmp_path / "s", train, val)
    streams = [TokenStream(folder, split) for split in ("train", "val")]
    # counts with one added: 4, 3, 2 of 9; n(10) = 2 of n(1) = 2, n(02) = 1 of n(0) = 3
    wanted = -(math.log((2 + 2 * 4 / 9) / (2 + 2)) + math.log((1 + 2 * 2 / 9) / (3 + 2))) / 2
    assert bigram.bigram_loss(*streams, 3) == pytest.approx(wanted)


def test_bigram_of_random_tokens_is_no_better_than_uniform(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(64, size=60_000)
    folder = write_shards(tmp_path / "s", tokens[:50_000], tokens[50_000:])
    loss = bigram.bigram_loss(TokenStream(folder, "train"), TokenStream(folder, "val"), 64)
    assert loss == pytest.approx(math.log(64), abs=0.02) and loss >= math.log(64) - 0.005
