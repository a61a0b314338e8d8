"""Loss on held-out text. Every token is scored once and counts the same, whatever the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.loader import TokenStream
from model.gpt import GPT


@dataclass(frozen=True)
class Score:
    """`loss` in nats per token over `tokens` tokens, with its standard error over windows."""

    loss: float
    perplexity: float
    bits_per_byte: float | None  # None when the shards do not say how many bytes a token stands for
    standard_error: float
    tokens: int
    length: int
    protocol: str = "non_overlapping"

    def as_dict(self) -> dict[str, float | int | str | None]:
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """The metric names that W&B and metrics.jsonl use."""
        named = {"loss": self.loss, "perplexity": self.perplexity, "standard_error": self.standard_error}
        bits = {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        return {f"val/{name}": value for name, value in (named | bits).items()}


def token_losses(model: GPT, windows_BT1: Tensor) -> Tensor:
    """Cross entropy in nats of each next token, (B, T) in fp32, for windows (B, T + 1)."""
    targets_BT = windows_BT1[:, 1:]
    logits_BTV = model(windows_BT1[:, :-1]).float()
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
    return losses.view_as(targets_BT)


@torch.no_grad()
def evaluate(
    model: GPT,
    stream: TokenStream,
    length: int,
    *,
    max_tokens: int | None = None,
    batch_tokens: int = 16384,
    autocast: Callable[[], torch.autocast] | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> Score:
    """Score `stream` in back-to-back windows of `length` tokens, the last one shorter, from its start.

    Fixed windows and no random draw: the result depends on nothing but model and text, and the training's
    RNG is not touched. The model's mode is restored. `on_batch(tokens_done, tokens)` is called per batch.
    """
    total = min(len(stream) - 1, max_tokens or len(stream))
    bytes_by_id = stream.bytes_per_token()
    device = next(model.parameters()).device
    batch = max(batch_tokens // length, 1)
    starts = list(range(0, total - total % length, length))
    batches = [(starts[i : i + batch], length) for i in range(0, len(starts), batch)]
    if total % length:
        batches.append(([total - total % length], total % length))
    sums: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    n_bytes = 0
    training = model.training
    model.eval()
    try:
        for begin, width in batches:
            windows = np.stack([stream.read(start, width + 1) for start in begin])
            with autocast() if autocast else torch.autocast(device.type, enabled=False):
                losses_BT = token_losses(model, torch.from_numpy(windows).to(device))
            sums.append(losses_BT.cpu().double().sum(1).numpy())
            counts.append(np.full(len(begin), width))
            n_bytes += int(bytes_by_id[windows[:, 1:]].sum()) if bytes_by_id is not None else 0
            if on_batch:
                on_batch(int(sum(c.sum() for c in counts)), total)
    finally:
        model.train(training)
    nats, tokens = np.concatenate(sums), np.concatenate(counts)
    loss = float(nats.sum() / tokens.sum())
    # a ratio estimator: windows are the independent draws, tokens inside one are not
    residuals = nats - loss * tokens
    spread = math.sqrt(float((residuals**2).sum()) * len(nats) / max(len(nats) - 1, 1))
    return Score(
        loss=loss,
        perplexity=math.exp(min(loss, 700)),
        bits_per_byte=float(nats.sum()) / math.log(2) / n_bytes if n_bytes else None,
        standard_error=spread / float(tokens.sum()),
        tokens=int(tokens.sum()),
        length=length,
    )
