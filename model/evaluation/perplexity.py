"""Loss on held-out text. Every scored token counts the same, whatever the window and the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.loader import TokenStream
from data.masking import IGNORED, Masking, examples
from model.evaluation.windows import Windows
from model.gpt import GPT

HEAD_TOKENS = 4096  # tokens whose logits are held at once, so that memory is linear in length and small


@dataclass(frozen=True)
class Score:
    """`loss` in nats per token over `tokens` tokens, with its standard error over clusters.

    `by_position` has the loss of tokens by their place in the window, in buckets that end before `to`.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None  # None when the shards do not say how many bytes a token stands for
    standard_error: float | None  # None for a single cluster
    clusters: int
    tokens: int
    by_position: list[dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """The metric names that W&B and metrics.jsonl use."""
        named = {"loss": self.loss, "perplexity": self.perplexity, "standard_error": self.standard_error}
        named["bits_per_byte"] = self.bits_per_byte
        return {f"val/{name}": value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class Tally:
    """Sums over scored tokens: by cluster, and by place in the window. Those of parts of a text add up."""

    nats: np.ndarray
    tokens: np.ndarray
    nats_at: np.ndarray
    tokens_at: np.ndarray
    n_bytes: int

    def __add__(self, other: Tally) -> Tally:
        sums = (getattr(self, part.name) + getattr(other, part.name) for part in fields(self))
        return Tally(*sums)

    def score(self, edge: int | None = None) -> Score:
        """`edge` is a position that shall divide buckets, such as the trained length."""
        total = float(self.nats.sum())
        loss = total / float(self.tokens.sum())
        return Score(
            loss=loss,
            perplexity=math.exp(min(loss, 700)),
            bits_per_byte=total / math.log(2) / self.n_bytes if self.n_bytes else None,
            standard_error=_standard_error(self.nats, self.tokens, loss),
            clusters=len(self.nats),
            tokens=int(self.tokens.sum()),
            by_position=_buckets(self.nats_at, self.tokens_at, edge),
        )


def token_losses(model: GPT, windows_BT1: Tensor) -> Tensor:
    """Cross entropy in nats of each next token, (B, T) in fp32, for windows (B, T + 1)."""
    return target_losses(model, windows_BT1[:, :-1], windows_BT1[:, 1:])


def target_losses(model: GPT, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross entropy in nats of each target, (B, T) in fp32; 0 where the target is IGNORED."""
    if torch.is_grad_enabled():  # autograd keeps all logits anyway; this call is the one that may be compiled
        logits_BTV = model(inputs_BT).float()
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none").view_as(
            targets_BT
        )
    step = max(HEAD_TOKENS // len(targets_BT), 1)
    losses = [
        F.cross_entropy(
            model.head(hidden_BtC).float().flatten(0, 1), targets_Bt.flatten(), reduction="none"
        ).view_as(targets_Bt)
        for hidden_BtC, targets_Bt in zip(
            model.hidden(inputs_BT).split(step, 1), targets_BT.split(step, 1), strict=True
        )
    ]
    return torch.cat(losses, 1)


def score(
    model: GPT, stream: TokenStream, windows: Windows, *, edge: int | None = None, **options: Any
) -> Score:
    """Score the targets of `windows`, with the options of `tally`."""
    return tally(model, stream, windows, **options).score(edge)


@torch.no_grad()
def tally(
    model: GPT,
    stream: TokenStream,
    windows: Windows,
    *,
    part: slice = slice(None),
    masking: Masking | None = None,
    batch_tokens: int = 16384,
    autocast: Callable[[], torch.autocast] | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> Tally:
    """Sum up the targets of `windows`: next tokens, or with `masking` the tokens that it selects.

    The masks of a window depend on where in the stream it starts. There is no other random draw: the result depends
    on nothing but model and text, and the training's RNG is not touched.
    The model's mode is restored. `part` takes some of the batches, the same ones that the whole consists of.
    `on_batch(tokens_done, tokens)` is called per batch.
    """
    # what both sides tell of some tokens is no code for the text
    bytes_by_id = None if masking else stream.bytes_per_token()
    device = next(model.parameters()).device
    nats, tokens = np.zeros(windows.cluster.max() + 1), np.zeros(windows.cluster.max() + 1)
    nats_at, tokens_at = np.zeros(windows.width.max()), np.zeros(windows.width.max())
    n_bytes = done = 0
    batches = _batches(windows, batch_tokens)[part]
    total = sum(int((windows.width[rows] - windows.skip[rows]).sum()) for rows in batches)
    training = model.training
    model.eval()
    try:
        for rows in batches:
            width = int(windows.width[rows[0]])
            ids = np.stack([stream.read(int(start), width + 1) for start in windows.start[rows]])
            inputs_BT, targets_BT = examples(ids, windows.start[rows], masking)
            pair = torch.from_numpy(inputs_BT).to(device), torch.from_numpy(targets_BT).to(device)
            with autocast() if autocast else torch.autocast(device.type, enabled=False):
                losses_BT = target_losses(model, *pair)
            scored_BT = (np.arange(width) >= windows.skip[rows, None]) & (targets_BT != IGNORED)
            losses = np.where(scored_BT, losses_BT.cpu().double().numpy(), 0)
            np.add.at(nats, windows.cluster[rows], losses.sum(1))
            np.add.at(tokens, windows.cluster[rows], scored_BT.sum(1))
            nats_at[:width] += losses.sum(0)
            tokens_at[:width] += scored_BT.sum(0)
            if bytes_by_id is not None:
                n_bytes += int(bytes_by_id[targets_BT[scored_BT]].sum())
            done += int((width - windows.skip[rows]).sum())
            if on_batch:
                on_batch(done, total)
    finally:
        model.train(training)
    return Tally(nats, tokens, nats_at, tokens_at, n_bytes)


def _batches(windows: Windows, batch_tokens: int) -> list[np.ndarray]:
    """Indices of windows of one width each, at most `batch_tokens` together, in their order."""
    batches: list[np.ndarray] = []
    for width in np.unique(windows.width)[::-1]:
        rows = np.flatnonzero(windows.width == width)
        step = max(batch_tokens // int(width), 1)
        batches += [rows[i : i + step] for i in range(0, len(rows), step)]
    return batches


def _standard_error(nats: np.ndarray, tokens: np.ndarray, loss: float) -> float | None:
    """Of a ratio of sums over clusters, which are the independent draws: tokens inside one are not."""
    n = len(nats)
    if n < 2:
        return None
    residuals = nats - loss * tokens
    return math.sqrt(float((residuals**2).sum()) * n / (n - 1)) / float(tokens.sum())


def _buckets(nats_at: np.ndarray, tokens_at: np.ndarray, edge: int | None) -> list[dict[str, float]]:
    length = len(nats_at)
    edges = sorted({0, length, *(2**k for k in range(40)), *([edge] if edge else [])})
    edges = [e for e in edges if e <= length]
    return [
        {"from": a, "to": b, "loss": float(nats_at[a:b].sum() / count), "tokens": int(count)}
        for a, b in pairwise(edges)
        if (count := tokens_at[a:b].sum())
    ]
