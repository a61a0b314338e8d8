"""How long words a model copies or reverses without a mistake."""

from __future__ import annotations

import numpy as np
import torch

from data.synthetic import Copy, Reverse
from model.gpt import GPT

TRIALS = 16  # words a length
TASKS = {"copy": Copy, "reverse": Reverse}


@torch.no_grad()
def exact_match(model: GPT, task: str, tokenizer_name: str, length: int) -> float:
    """The fraction of `TRIALS` words of `length` letters whose answer, its end included, is right in every token.

    The most likely token at each place of the right answer is what greedy decoding gives, up to its first mistake:
    so an answer is right in one if and only if it is right in the other, and no decoding is needed. The words are
    the same for every model.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([length, TRIALS], dtype=np.uint64)))
    teacher = TASKS[task](tokenizer_name)
    exams_WT = torch.from_numpy(np.stack([teacher.exam(length, generator) for _ in range(TRIALS)]))
    device = next(model.parameters()).device
    guess_WT = model.head(model.hidden(exams_WT[:, :-1].to(device))[:, length:]).argmax(-1).cpu()
    return float((guess_WT == exams_WT[:, length + 1 :]).all(1).float().mean())
