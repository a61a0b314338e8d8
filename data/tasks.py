"""Tasks that are trained beside text: which there are, and how they get into the windows of a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from data.loader import TokenStream
from data.recall import Recall
from data.synthetic import Copy, Reverse


class Teacher(Protocol):
    """A task in the ids of one tokenizer."""

    def lesson(self, text_T: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """The window (T,) to train on in place of `text_T`."""


TASKS: dict[str, Callable[[str], Teacher]] = {"recall": Recall, "copy": Copy, "reverse": Reverse}
_DRAWS = 2**63  # apart from the epochs, which are the other keys of the loader's generators


def lessons(task: str, rate: float, tokenizer: str, seed: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """Makes a lesson of a training window (T,) with probability `rate`: a pure function of it and of its number."""
    teacher = TASKS[task](tokenizer)

    def rewrite(window_T: np.ndarray, sample: int) -> np.ndarray:
        generator = np.random.Generator(
            np.random.Philox(key=np.array([seed, _DRAWS + sample], dtype=np.uint64))
        )
        return teacher.lesson(window_T, generator) if generator.random() < rate else window_T

    return rewrite


class TaskStream(TokenStream):
    """A held-out split for a training that sees nothing but its task: every window that is read is a lesson."""

    def __init__(self, split: TokenStream, task: str, tokenizer: str) -> None:
        self.__dict__.update(split.__dict__)
        self._rewrite = lessons(task, 1.0, tokenizer, seed=0)

    def read(self, start: int, count: int) -> np.ndarray:
        # far from the numbers of training windows
        return self._rewrite(super().read(start, count), 2**62 + start)

    def bytes_per_token(self) -> None:
        return None
