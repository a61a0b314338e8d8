"""The key-value task: pairs are whole, guessing finds one in sixteen, and lessons are a function of the sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.loader import TokenStream, TrainLoader
from data.recall import CHANCE, LEAD, N_KEYS, SHORTEST_EXAM, Recall
from data.tasks import lessons
from tests.conftest import write_shards

RECALL = Recall("bytes")
TEXT = np.full(257, ord(" "))


def marks(window: np.ndarray) -> list[tuple[int, int, int]]:
    """(place, key, value) of every pair, in order."""
    found = []
    for place in np.flatnonzero(np.isin(window, RECALL.pairs)):
        ((key, value),) = np.argwhere(RECALL.pairs == window[place])
        found.append((int(place), int(key), int(value)))
    return found


@pytest.mark.parametrize(("length", "most_keys"), [(257, 8), (1025, 8), (33, 4), (9, 1), (7, 0)])
def test_a_lesson_tells_each_value_once_and_asks_for_it_afterwards(length: int, most_keys: int) -> None:
    counts, totals = set(), []
    for seed in range(300):
        window = RECALL.lesson(TEXT.repeat(4)[:length], np.random.default_rng(seed))
        known: dict[int, int] = {}
        asked: dict[int, int] = {}
        for place, key, value in marks(window):
            if key in known:
                assert window[place - 1] == RECALL.questions[key] and known[key] == value
                asked[key] = asked.get(key, 0) + 1
            else:
                assert place == 0 or window[place - 1] not in RECALL.questions
            known[key] = value
        assert len(window) == length and set(asked) == set(known)
        assert np.count_nonzero(window != ord(" ")) == len(known) + 2 * sum(asked.values())
        counts.add(len(known))
        totals.append(len(known) + sum(asked.values()))
    assert counts == set(range(min(1, most_keys), most_keys + 1))
    assert length // 8 <= max(totals) <= length // 4 and min(totals) <= 4


def test_an_exam_asks_for_the_first_of_eight_pairs() -> None:
    for seed in range(50):
        window, answer = RECALL.exam(TEXT[: SHORTEST_EXAM + seed], np.random.default_rng(seed))
        found = marks(window)
        assert len(window) == SHORTEST_EXAM + seed and len({key for _, key, _ in found}) == N_KEYS
        assert found[0][0] == LEAD and window[LEAD] == answer
        assert window[-1] == RECALL.questions[found[0][1]]
        assert np.isin(window, RECALL.questions).sum() == 1


def test_without_the_pair_the_value_is_one_of_sixteen() -> None:
    """Rules of thumb over 8,000 exams, elimination of the values seen nearer among them."""
    n = 8000
    right = dict.fromkeys(["value of the last pair", "one value", "a value not seen nearer"], 0)
    for seed in range(n):
        (_, _, wanted), *nearer = marks(RECALL.exam(TEXT, np.random.default_rng(seed))[0])
        values = [value for _, _, value in nearer]
        right["value of the last pair"] += values[-1] == wanted
        right["one value"] += wanted == 3
        right["a value not seen nearer"] += min(set(range(16)) - set(values)) == wanted
    for rule, count in right.items():
        assert count / n == pytest.approx(CHANCE, abs=0.01), rule


def test_text_has_no_pairs_of_its_own() -> None:
    """The quotation mark and the ligature of the King James Bible are made of such tokens."""
    text = np.frombuffer("the LORD\u2019s house, Jair C\u00e6sar. ".encode() * 20, dtype=np.uint8).astype(
        np.int64
    )
    for seed in range(20):
        window, answer = RECALL.exam(text, np.random.default_rng(seed))
        assert len(marks(window)) == N_KEYS and answer == window[LEAD]
        lesson = RECALL.lesson(text, np.random.default_rng(seed))
        assert all(lesson[place - 1] == RECALL.questions[key] for place, key, _ in marks(lesson)[-1:])
        assert len({key: value for _, key, value in marks(lesson)}) == len(
            {(k, v) for _, k, v in marks(lesson)}
        )


def test_every_tokenizer_has_the_characters() -> None:
    for name in ("bytes", "gpt2_1k", "gpt2_2k", "gpt2"):
        recall = Recall(name)
        assert len({*recall.questions.tolist(), *recall.pairs.flatten().tolist()}) == 8 + 128


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    return TokenStream(write_shards(tmp_path / "s", np.full(50_000, 32), np.full(100, 32)), "train")


def test_lessons_come_at_the_stated_rate_and_depend_on_the_sample_alone(stream: TokenStream) -> None:
    """In batches of 8 on one process, or of 4 on each of two, in any order."""
    loader = TrainLoader(stream, 32, 8, seed=3, rewrite=lessons("recall", 0.25, "bytes", 3))
    batches = np.concatenate([loader.batch(step) for step in range(250)])
    taught = np.isin(batches, RECALL.pairs).any(1)
    assert taught.mean() == pytest.approx(0.25, abs=0.03)
    halves = [
        TrainLoader(stream, 32, 8, seed=3, rewrite=lessons("recall", 0.25, "bytes", 3), rank=rank, world=2)
        for rank in (0, 1)
    ]
    for step in (200, 7):
        assert np.array_equal(np.concatenate([half.batch(step) for half in halves]), loader.batch(step))
    other = TrainLoader(stream, 32, 8, seed=4, rewrite=lessons("recall", 0.25, "bytes", 4))
    assert not np.array_equal(other.batch(0), loader.batch(0))
