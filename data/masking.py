"""From windows of tokens to what a model reads and what it has to tell: the next token, or masked ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

IGNORED = -100  # the target that is none, as F.cross_entropy has it
SELECTED, MASKED, RANDOM = 0.15, 0.8, 0.1  # of a window's tokens; of the selected ones
VALIDATION_SEED = (
    2**63
)  # that of no run, so that all runs are validated on the same masks, and train on others


class Masking(NamedTuple):
    """Devlin et al. 2019 (arXiv 1810.04805, section 3.1): 15 % of the tokens of a window are to be told.

    Of these 80 % are replaced by the mask token, 10 % by a random token, and 10 % are left. They are drawn anew
    whenever a text is read (Liu et al. 2019, arXiv 1907.11692, section 4.1; Haviv et al. 2022), from `seed` and the
    number of the window alone. Their count is the same in all windows of one length, so that losses of batches
    average; which ones they are, of all tokens alike, end-of-text included.

    The mask token is the id behind the tokenizer's. None of those would do: end-of-text, the rarest, marks where
    documents meet, and a slot that held it would not tell what was hidden from what is text.
    """

    vocab_size: int  # of the tokenizer, and the id of the mask token
    seed: int

    def mask(self, tokens_T: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (T,) and targets (T,), IGNORED where nothing is to be told, of window `number`."""
        # far in the counter: the order of the data comes from keys of the same form, with a counter from 0
        counter = np.array([0, 0, 0, 1], dtype=np.uint64)
        key = np.array([self.seed, number], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(counter=counter, key=key))
        count = max(round(SELECTED * len(tokens_T)), 1)
        selected = generator.choice(len(tokens_T), count, replace=False)
        fate, other = generator.random(count), generator.integers(self.vocab_size, size=count)
        inputs_T, targets_T = tokens_T.copy(), np.full_like(tokens_T, IGNORED)
        targets_T[selected] = tokens_T[selected]
        left_or_random = np.where(fate < MASKED + RANDOM, other, tokens_T[selected])
        inputs_T[selected] = np.where(fate < MASKED, self.vocab_size, left_or_random)
        return inputs_T, targets_T


def examples(
    windows_BT1: np.ndarray, numbers_B: np.ndarray, masking: Masking | None
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, each (B, T) int64, of windows of T + 1 tokens. `numbers_B` tells windows apart.

    Without `masking` the targets are the tokens that follow; with it, the selected ones among the first T.
    """
    if masking is None:
        return windows_BT1[:, :-1], windows_BT1[:, 1:]
    pairs = [masking.mask(tokens, int(n)) for tokens, n in zip(windows_BT1[:, :-1], numbers_B, strict=True)]
    inputs, targets = zip(*pairs, strict=True)
    return np.stack(inputs), np.stack(targets)
