"""How long a training step takes, side by side with another: machines are never quiet for two trainings in turn."""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import torch
from torch import Tensor

from model.evaluation.perplexity import target_losses
from model.gpt import GPT

ROUNDS = 9


def token_seconds(models: list[tuple[GPT, Tensor]], autocast: partial[torch.autocast]) -> list[float]:
    """Median seconds a token of forward and backward of each model on its ids (B, T), taken in turn.

    The optimizer's step is left out, which is the same for all. Gradients are cleared.
    """
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(1 + ROUNDS):  # the first is a warm-up
        for (model, ids_BT), own in zip(models, seconds, strict=True):
            began = time.perf_counter()
            with autocast():
                loss = target_losses(model, ids_BT, ids_BT).mean()
            loss.backward()
            if ids_BT.is_cuda:
                torch.cuda.synchronize()
            own.append((time.perf_counter() - began) / ids_BT.numel())
            model.zero_grad(set_to_none=True)
    return [median(own[1:]) for own in seconds]
