"""Optimizers and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from model.config import UserError
from model.gpt import GPT
from model.training.config import OptimConfig


def lr_factor(config: OptimConfig, step: int, steps: int) -> float:
    """What the peak learning rate is multiplied by at 0-based `step` of `steps`; never 0 at the first step.

    With `decay` > 0 the last step has `min_lr_ratio`, unless a warm-up fills the whole training.
    """
    warmup = round(config.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    start = max(warmup - 1, 0, steps - 1 - round(config.decay * steps))
    if config.decay == 0 or step <= start:
        return 1.0
    progress = (step - start) / (steps - 1 - start)
    fall = progress if config.shape == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1 - fall * (1 - config.min_lr_ratio)


class Optimizers:
    """One or two torch optimizers, stepped, saved and restored as one."""

    def __init__(self, model: GPT, config: OptimConfig) -> None:
        self.config = config
        matrices = {p for block in model.blocks for p in block.parameters() if p.ndim == 2}
        on_muon = [p for p in model.parameters() if config.name == "muon" and p in matrices]
        others = [p for p in model.parameters() if config.name == "adamw" or p not in matrices]
        decayed, plain = [p for p in others if p in matrices], [p for p in others if p not in matrices]
        # norms, biases and tables (token embedding, learned positions) are not shrunk towards zero
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        fused = next(model.parameters()).is_cuda
        adamw = AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, fused=fused)
        self.all: list[tuple[Optimizer, float]] = [(adamw, config.lr)]
        if on_muon:
            # match_rms_adamw would tie muon_lr to AdamW's scale; the original scaling is the published one
            muon = Muon(on_muon, lr=config.muon_lr, weight_decay=config.weight_decay, momentum=0.95)
            self.all.append((muon, config.muon_lr))

    def step(self, factor: float) -> None:
        """One update with every peak learning rate multiplied by `factor`, then clear the gradients."""
        for optimizer, peak in self.all:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer, _ in self.all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Raises UserError when the states are those of other optimizers."""
        try:
            for (optimizer, _), state in zip(self.all, states, strict=True):
                optimizer.load_state_dict(state)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"the checkpoint has the state of another optimizer ({error})") from None


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale gradients down to norm `limit` (0: leave them). Returns the norm before; NaN or inf pass through."""
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit if limit > 0 else math.inf))


def is_finite(model: nn.Module) -> bool:
    """Whether every weight is a number."""
    return all(bool(p.isfinite().all()) for p in model.parameters())
