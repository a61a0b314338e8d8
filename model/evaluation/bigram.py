"""The baseline without context: the next token given the last one, counted."""

from __future__ import annotations

import numpy as np

from data.loader import TokenStream

TRAIN_TOKENS = 100_000_000  # counted at most
WEIGHTS = (1, 3, 10, 30, 100, 300, 1000)  # of the unigram, in tokens


def bigram_loss(train: TokenStream, val: TokenStream, vocab_size: int) -> float:
    """Nats per token of `val` under p(b | a) = (n(ab) + w p(b)) / (n(a) + w), with counts n of `train`.

    p(b) is the unigram with one count added to each token. The weight w is the one in `WEIGHTS` that suits `val`
    best, so that a model which is compared with it is given nothing for free.
    """
    ids, scored = train.read(0, min(len(train), TRAIN_TOKENS)), val.read(0, len(val))
    unigram = np.bincount(ids, minlength=vocab_size) + 1.0
    pairs, counts = np.unique(ids[:-1] * vocab_size + ids[1:], return_counts=True)
    before = np.bincount(ids[:-1], minlength=vocab_size)
    wanted = scored[:-1] * vocab_size + scored[1:]
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    together = np.where(pairs[place] == wanted, counts[place], 0)
    alone = unigram[scored[1:]] / unigram.sum()
    losses = [-np.log((together + w * alone) / (before[scored[:-1]] + w)).mean() for w in WEIGHTS]
    return float(min(losses))
