"""Tasks that are trained beside text: which there are, and how they get into the windows of a training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from data.recall import Recall

TASKS = {"recall": Recall}
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
