"""Key-value recall, written into real text: one token says that key k has value v; asked for k, it is to come again.

The tokens are those of single bytes that are rare in text, and are taken out of the text of a lesson: eight for the
questions, one a key, and 128 for the pairs, one for each of eight keys and 16 values. The values of a window are
independent draws. So nothing but the earlier pair tells which value a key has, and whatever else a model may know of
the window, it finds one value in 16 by chance.
"""

from __future__ import annotations

import numpy as np

from data import tokenizer

N_KEYS, N_VALUES = 8, 16
CHANCE = 1 / N_VALUES
LEAD = 8  # tokens of text before the first pair of an exam
SHORTEST_EXAM = LEAD + N_KEYS + 1


class Recall:
    """The task in the ids of a tokenizer."""

    def __init__(self, tokenizer_name: str) -> None:
        encoding = tokenizer.load(tokenizer_name)
        one_byte = np.array([encoding.encode_single_token(bytes([byte])) for byte in range(256)])
        self.questions = one_byte[16 : 16 + N_KEYS]
        self.pairs = one_byte[128:].reshape(N_KEYS, N_VALUES)
        self.blank = one_byte[ord(" ")]

    def _cleared(self, text_T: np.ndarray) -> np.ndarray:
        """`text_T` without tokens that would be taken for the task's, such as those of a character beyond ASCII."""
        reserved = np.concatenate((self.questions, self.pairs.flatten()))
        return np.where(np.isin(text_T, reserved), self.blank, text_T)

    def lesson(self, text_T: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """A window (T,) of text to train on, with 1 to `N_KEYS` pairs written over it, each asked for once or more.

        Few pairs that are often asked for are learned first; many that are asked for once need the whole window.
        """
        most = len(text_T) // 4
        if most < 2:
            return text_T
        keys = generator.permutation(N_KEYS)[: generator.integers(1, min(N_KEYS, most // 2) + 1)]
        values = generator.integers(N_VALUES, size=len(keys))
        count = round(2 * len(keys) * (most / (2 * len(keys))) ** generator.random())
        known: set[int] = set()
        written = []
        for index in generator.permutation(np.arange(count) % len(keys)):
            pair = self.pairs[keys[index], values[index]]
            written.append([self.questions[keys[index]], pair] if index in known else [pair])
            known.add(index)
        return _write(self._cleared(text_T), written, 0, generator)

    def exam(self, text_T: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, int]:
        """A window (T,) that ends with a question, and the pair that should come next.

        The pair is the first of `N_KEYS`, and stands T - `LEAD` - 1 tokens back.
        """
        keys = generator.permutation(N_KEYS)
        pairs = self.pairs[keys, generator.integers(N_VALUES, size=N_KEYS)]
        body_T = _write(self._cleared(text_T[:-1]), [[pair] for pair in pairs[1:]], LEAD + 1, generator)
        body_T[LEAD] = pairs[0]
        return np.append(body_T, self.questions[keys[0]]), int(pairs[0])


def _write(
    text_T: np.ndarray, parts: list[list[int]], first: int, generator: np.random.Generator
) -> np.ndarray:
    """`text_T` with `parts` written over it in their order, anywhere from place `first`, never overlapping."""
    extra = np.cumsum([0, *(len(part) - 1 for part in parts)])
    room = len(text_T) - first - int(extra[-1])
    places = first + np.sort(generator.choice(room, len(parts), replace=False)) + extra[:-1]
    out_T = text_T.copy()
    for place, part in zip(places, parts, strict=True):
        out_T[place : place + len(part)] = part
    return out_T
