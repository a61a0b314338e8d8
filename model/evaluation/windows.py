"""Which windows a text is cut into, and which of their tokens are scored. The protocol of an evaluation.

A window of width w at `start` reads tokens start .. start + w - 1 and predicts start + 1 .. start + w. Of its
predictions the first `skip` are context alone.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from model.config import UserError

Protocol = Literal["non_overlapping", "sliding", "last"]


class Windows(NamedTuple):
    """All (W,) int64. `cluster` numbers what the window is a part of, for the standard error."""

    start: np.ndarray
    width: np.ndarray
    skip: np.ndarray
    cluster: np.ndarray

    @property
    def targets(self) -> int:
        return int((self.width - self.skip).sum())


def stream_windows(n_tokens: int, length: int, max_targets: int | None = None) -> Windows:
    """Back-to-back windows over a whole stream, the last one shorter; each its own cluster."""
    total = min(n_tokens - 1, max_targets or n_tokens)
    start = np.arange(0, total, length)
    return Windows(start, np.minimum(length, total - start), np.zeros_like(start), np.arange(len(start)))


def choose_documents(
    starts: np.ndarray, lengths: np.ndarray, protocol: Protocol, longest: int, max_targets: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of documents with more than `longest` tokens, cut to `max_targets` scored tokens in all.

    `longest` is the longest window of the whole comparison: what is scored must not depend on the window. Under a
    limit, as many documents as can have a whole window are taken, evenly spaced, and all give as much as they can
    up to one limit for each, since tokens of one document are no independent draws.
    """
    keep = lengths > longest
    starts, lengths = starts[keep], lengths[keep]
    unscored = longest if protocol == "last" else 1
    if max_targets is not None and (lengths - unscored).sum() > max_targets:
        count = min(max(max_targets // longest, 1), len(starts))
        chosen = np.arange(count) * len(starts) // count
        starts, lengths = starts[chosen], lengths[chosen]
        left = max_targets
        for rank, document in enumerate(np.argsort(lengths, kind="stable")):  # the shortest first
            scored = min(int(lengths[document]) - unscored, left // (count - rank))
            lengths[document] = scored + unscored
            left -= scored
    return starts, lengths


def document_windows(
    starts: np.ndarray, lengths: np.ndarray, protocol: Protocol, length: int, stride: int, longest: int
) -> Windows:
    """Windows of at most `length` tokens inside documents; the scored tokens are the same for every `length`.

    non_overlapping: back to back, each token scored once, the early ones of a window with little context.
    sliding: each token once, with at least `length` - `stride` tokens of context or all that there are.
    last: only tokens with `longest` tokens before them, each in the last `stride` places of a full window.
    Raises UserError when `stride` exceeds `length`.
    """
    if protocol != "non_overlapping" and stride > length:
        raise UserError(f"stride={stride}: more than the window of {length} tokens; give {length} or less")
    rows: list[tuple[int, int, int, int]] = []
    for cluster, (start, n_tokens) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if protocol == "non_overlapping":
            rows += [
                (start + at, min(length, n_tokens - 1 - at), 0, cluster)
                for at in range(0, n_tokens - 1, length)
            ]
            continue
        # tokens up to `done` are scored or left out; each window ends at a target, which it does not read
        done = longest - 1 if protocol == "last" else 0
        while done < n_tokens - 1:
            step = length if protocol == "sliding" and not done else stride
            end = min(done + step, n_tokens - 1)
            width = min(length, end)
            rows.append((start + end - width, width, width - (end - done), cluster))
            done = end
    return Windows(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)
