"""A word of random letters, a mark, and the word again or backwards (Kazemnejad et al. 2023, table 1)."""

from __future__ import annotations

import string

import numpy as np

from data import tokenizer

MARK = "#"


class Copy:
    """`x1 .. xn # x1 .. xn`, then end-of-text to the end of the window. One word a window, at its very start."""

    def __init__(self, tokenizer_name: str) -> None:
        encoding = tokenizer.load(tokenizer_name)
        self.mark, *letters = [
            encoding.encode_single_token(letter.encode()) for letter in MARK + string.ascii_lowercase
        ]
        self.letters, self.end = np.array(letters), encoding.eot_token

    def answer(self, word_N: np.ndarray) -> np.ndarray:
        return word_N

    def lesson(self, text_T: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """A window (T,) with a word of 1 to `longest(T)` letters; nothing is left of the text."""
        window_T = np.full_like(text_T, self.end)
        exam = self.exam(int(generator.integers(1, longest(len(text_T)) + 1)), generator)
        window_T[: len(exam)] = exam
        return window_T

    def exam(self, length: int, generator: np.random.Generator) -> np.ndarray:
        """A word of `length` letters, the mark, the answer, and the end: (2 `length` + 2,)."""
        word_N = generator.choice(self.letters, length)
        return np.concatenate((word_N, [self.mark], self.answer(word_N), [self.end]))


class Reverse(Copy):
    """`x1 .. xn # xn .. x1`."""

    def answer(self, word_N: np.ndarray) -> np.ndarray:
        return word_N[::-1]


def longest(window: int) -> int:
    """Letters of the longest word that a window of so many tokens has room for."""
    return max((window - 2) // 2, 1)
