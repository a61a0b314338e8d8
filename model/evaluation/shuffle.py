"""What the order of the prefix is worth to a model: the loss of one token with the tokens before it permuted.

Shape suffixes: W windows, B batch, T tokens that are read, C width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import UserError
from model.gpt import GPT

KEPT = {"all": 0, "keep_1": 1, "keep_8": 8}  # tokens next to the target that stay where they are, by arm
ARMS = ("none", *KEPT)


class Shuffled(NamedTuple):
    """A window whose token at index `target` is scored, and what stands before it in each arm, (target,) int64."""

    target: int
    prefixes: dict[str, np.ndarray]


def shuffle_losses(
    model: GPT, stream_windows: Tensor, seed: int, batch_size: int, min_prefix: int = 16
) -> list[dict[str, Any]]:
    """Haviv et al. 2022 (arXiv 2203.16634, appendix B): the loss of a token when the order before it is lost.

    In each window (T + 1) of `stream_windows` (W, T + 1) one token is scored, at an index drawn uniformly from
    `min_prefix` to T; it is the same one in all arms. `none` leaves the prefix in order, `all` permutes it,
    `keep_1` and `keep_8` permute all but the last token, or the last eight. The paper's is `all`, which takes the
    bigram away as well: a model of one layer without positions, which sees a set and its last token, loses there
    too, and exactly nothing in `keep_1`.

    A row per arm: `loss` in nats, mean over windows; `rise`, the mean difference to `none` in the same window;
    both with a standard error, over windows (None for a single one), and in bits as `loss_bits` and `rise_bits`.
    Encodings and logit scales that ask for the planned length get T, whatever the prefix. `batch_size` windows
    are read at once, which changes nothing. The draws of window w depend on (seed, w) and no other window; the
    mode of the model is restored.

    Raises UserError when a prefix would be too short for all arms to differ, or the model sees later tokens.
    """
    W, T = stream_windows.shape[0], stream_windows.shape[1] - 1
    longest_kept = max(KEPT.values())
    if not longest_kept + 2 <= min_prefix <= T:
        raise UserError(
            f"min_prefix={min_prefix}: expected {longest_kept + 2}, for two tokens to change places before the "
            f"{longest_kept} that stay, up to the window's {T}"
        )
    if not model.config.causal:
        raise UserError(
            "a model with model.causal=false has no prefix: it reads the token that it shall predict"
        )
    ids_WT1 = stream_windows.cpu().numpy()
    shuffled = [shuffle_prefix(window_T1, seed, w, min_prefix) for w, window_T1 in enumerate(ids_WT1)]
    target_W = np.array([window.target for window in shuffled])
    # by length of the prefix, so that a batch reads little beyond it
    order_W = np.argsort(target_W, kind="stable")
    losses = {arm: np.zeros(W) for arm in ARMS}
    training = model.training
    model.eval()
    try:
        for first in range(0, W, batch_size):
            rows_B = order_W[first : first + batch_size]
            for arm in ARMS:
                ids_BT1 = ids_WT1[rows_B, : target_W[rows_B].max() + 1]
                for ids_T1, w in zip(ids_BT1, rows_B, strict=True):
                    ids_T1[: target_W[w]] = shuffled[w].prefixes[arm]
                losses[arm][rows_B] = _target_losses(model, ids_BT1, target_W[rows_B], T)
    finally:
        model.train(training)
    return [_row(arm, losses[arm], losses["none"]) for arm in ARMS]


def shuffle_prefix(window_T1: np.ndarray, seed: int, number: int, min_prefix: int) -> Shuffled:
    """Draw the target of window `number`, and a permutation for each arm; they depend on nothing else."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))
    target = int(generator.integers(min_prefix, len(window_T1)))
    prefix = window_T1[:target]
    prefixes = {"none": prefix}
    for arm, kept in KEPT.items():
        moved = target - kept
        prefixes[arm] = np.concatenate((generator.permutation(prefix[:moved]), prefix[moved:]))
    return Shuffled(target, prefixes)


@torch.no_grad()
def _target_losses(model: GPT, ids_BT1: np.ndarray, target_B: np.ndarray, horizon: int) -> np.ndarray:
    """Cross entropy in nats, (B,), of the token at `target_B` in each row, which later tokens cannot change."""
    device = next(model.parameters()).device
    ids, target = torch.from_numpy(ids_BT1).to(device), torch.from_numpy(target_B).to(device)
    row_B = torch.arange(len(ids), device=device)
    hidden_BTC = model.hidden(ids[:, :-1], horizon=horizon)
    logits_BV = model.head(hidden_BTC[row_B, target - 1])
    return F.cross_entropy(logits_BV.double(), ids[row_B, target], reduction="none").cpu().numpy()


def _row(arm: str, loss_W: np.ndarray, baseline_W: np.ndarray) -> dict[str, Any]:
    rise_W = loss_W - baseline_W
    return {
        "arm": arm,
        "loss": float(loss_W.mean()),
        "standard_error": _standard_error(loss_W),
        "rise": float(rise_W.mean()),
        "rise_standard_error": _standard_error(rise_W),
        "loss_bits": float(loss_W.mean()) / math.log(2),
        "rise_bits": float(rise_W.mean()) / math.log(2),
        "windows": len(loss_W),
    }


def _standard_error(value_W: np.ndarray) -> float | None:
    return float(value_W.std(ddof=1)) / math.sqrt(len(value_W)) if len(value_W) > 1 else None
