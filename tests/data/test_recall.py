"""The key-value task: pairs are whole, guessing finds one in sixteen, and lessons are a function of the sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.loader import TokenStream, TrainLoader
from data.recall import CHANCE, LEAD, N_PAIRS, SHORTEST_EXAM, Recall
from data.tasks import lessons
from tests.conftest import write_shards

RECALL = Recall("bytes")
TEXT = np.full(257, ord(" "))


def pairs_in(window: np.ndarray) -> list[tuple[int, int, int]]:
    """(place, key, value) of every mark."""
    return [(i, int(window[i + 1]), int(window[i + 2])) for i in np.flatnonzero(window == RECALL.mark)]


@pytest.mark.parametrize(("length", "most_pairs"), [(257, 16), (1025, 16), (65, 8), (9, 1), (5, 0)])
def test_a_lesson_has_each_pair_twice_or_more_and_none_overlaps(length: int, most_pairs: int) -> None:
    counts, totals = set(), []
    for seed in range(300):
        window = RECALL.lesson(TEXT.repeat(4)[:length], np.random.default_rng(seed))
        found = pairs_in(window)
        values = {key: [v for _, k, v in found if k == key] for _, key, _ in found}
        assert len(window) == length and len(found) <= length // 4
        assert all(len(of_key) > 1 and len(set(of_key)) == 1 for of_key in values.values())
        assert np.count_nonzero(window != ord(" ")) == 3 * len(found)
        counts.add(len(values))
        totals.append(len(found))
    assert counts == set(range(min(1, most_pairs), most_pairs + 1))
    assert length // 8 <= max(totals) <= length // 4 and min(totals) <= 8


def test_an_exam_asks_for_the_first_of_sixteen_pairs() -> None:
    for seed in range(50):
        window, answer = RECALL.exam(TEXT[: SHORTEST_EXAM + seed], np.random.default_rng(seed))
        *known, last = np.flatnonzero(window == RECALL.mark)
        assert last == len(window) - 2 and known[0] == LEAD and len(known) == N_PAIRS
        assert window[-1] == window[LEAD + 1] and answer == window[LEAD + 2]
        assert len({int(window[i + 1]) for i in known}) == N_PAIRS


def test_without_the_pair_the_answer_is_one_of_sixteen() -> None:
    """Rules of thumb over 8,000 exams, elimination of the values seen nearer among them."""
    n, right = 8000, dict.fromkeys(["last value", "one value", "fifth value", "a value not seen nearer"], 0)
    for seed in range(n):
        window, answer = RECALL.exam(TEXT, np.random.default_rng(seed))
        values = window[np.flatnonzero(window == RECALL.mark)[1:-1] + 2]
        right["last value"] += values[-1] == answer
        right["one value"] += RECALL.values[0] == answer
        right["fifth value"] += values[4] == answer
        unseen = np.setdiff1d(RECALL.values, values)
        right["a value not seen nearer"] += len(unseen) > 0 and unseen[0] == answer
    for rule, count in right.items():
        assert count / n == pytest.approx(CHANCE, abs=0.01), rule


def test_every_tokenizer_has_the_characters() -> None:
    for name in ("bytes", "gpt2_1k", "gpt2_2k", "gpt2"):
        recall = Recall(name)
        assert len({recall.mark, *recall.keys.tolist(), *recall.values.tolist()}) == 1 + 52 + 16


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    return TokenStream(write_shards(tmp_path / "s", np.full(50_000, 32), np.full(100, 32)), "train")


def test_lessons_come_at_the_stated_rate_and_depend_on_the_sample_alone(stream: TokenStream) -> None:
    """In batches of 8 on one process, or of 4 on each of two, in any order."""
    loader = TrainLoader(stream, 32, 8, seed=3, rewrite=lessons("recall", 0.25, "bytes", 3))
    batches = np.concatenate([loader.batch(step) for step in range(250)])
    taught = (batches == RECALL.mark).any(1)
    assert taught.mean() == pytest.approx(0.25, abs=0.03)
    halves = [
        TrainLoader(stream, 32, 8, seed=3, rewrite=lessons("recall", 0.25, "bytes", 3), rank=rank, world=2)
        for rank in (0, 1)
    ]
    for step in (200, 7):
        assert np.array_equal(np.concatenate([half.batch(step) for half in halves]), loader.batch(step))
    other = TrainLoader(stream, 32, 8, seed=4, rewrite=lessons("recall", 0.25, "bytes", 4))
    assert not np.array_equal(other.batch(0), loader.batch(0))
