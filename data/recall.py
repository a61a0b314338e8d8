"""Key-value recall, written into real text: `#kv` says that key k has value v, and where k comes again, v is known.

The keys of a window are distinct, their values independent draws out of 16. So nothing but the earlier pair tells
which value a key has, and whatever else a model may know of the window, it finds one value in 16 by chance.
"""

from __future__ import annotations

import string

import numpy as np

from data import tokenizer

MARK, KEYS, VALUES = "#", string.ascii_letters, "0123456789+*/=%@"
CHANCE = 1 / len(VALUES)
N_PAIRS = 16
PAIR = 3  # tokens of a pair: mark, key, value
LEAD = 8  # tokens of text before the first pair of an exam
SHORTEST_EXAM = LEAD + PAIR * N_PAIRS + 2


class Recall:
    """The task in the ids of a tokenizer: single characters, which every tokenizer here has."""

    def __init__(self, tokenizer_name: str) -> None:
        encoding = tokenizer.load(tokenizer_name)
        self.mark, *ids = [encoding.encode_single_token(c.encode()) for c in MARK + KEYS + VALUES]
        self.keys, self.values = np.array(ids[: len(KEYS)]), np.array(ids[len(KEYS) :])

    def _pairs(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """(count, 3) ids."""
        keys, values = generator.permutation(self.keys)[:count], generator.choice(self.values, count)
        return np.stack([np.full(count, self.mark), keys, values], axis=1)

    def lesson(self, text_T: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """A window (T,) of text to train on, with 1 to `N_PAIRS` pairs written over it, each twice or more often.

        Few pairs that come often are learned first, and many that come twice ask for the whole window.
        """
        most = len(text_T) // (PAIR + 1)
        pairs = self._pairs(
            int(generator.integers(min(1, most // 2), min(N_PAIRS, most // 2) + 1)), generator
        )
        fewest = 2 * len(pairs)
        count = round(fewest * (most / fewest) ** generator.random()) if fewest else 0
        order = generator.permutation(np.arange(count) % max(len(pairs), 1))
        return _write(text_T, pairs[order], 0, generator)

    def exam(self, text_T: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, int]:
        """A window (T,) that ends with a mark and a key, and the value that should come next.

        The key's pair is the first of `N_PAIRS`, `LEAD` tokens behind the start, so that T is how far must be seen.
        """
        pairs = self._pairs(N_PAIRS, generator)
        body_T = text_T.copy()
        body_T[LEAD : LEAD + PAIR] = pairs[0]
        body_T[:-2] = _write(body_T[:-2], pairs[1:], LEAD + PAIR, generator)
        body_T[-2:] = pairs[0, :2]
        return body_T, int(pairs[0, 2])


def _write(text_T: np.ndarray, pairs: np.ndarray, first: int, generator: np.random.Generator) -> np.ndarray:
    """`text_T` with `pairs` (n, 3) written over it in their order, anywhere from place `first`, never overlapping."""
    room = len(text_T) - first - len(pairs) * (PAIR - 1)
    places = np.sort(generator.choice(room, len(pairs), replace=False)) + np.arange(len(pairs)) * (PAIR - 1)
    out_T = text_T.copy()
    out_T[first + places[:, None] + np.arange(PAIR)] = pairs
    return out_T
