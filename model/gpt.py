"""A GPT-2 style decoder. It knows of positions only that there is an encoding and where its hooks go.

Shape suffixes: B batch, T new tokens, S all tokens with the cached ones, C width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import CausalSelfAttention
from model.cache import KVCache
from model.config import GPTConfig, UserError
from model.logit_scale import logit_scale
from model.position import PositionEncoding, Span


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BTC: Tensor = self.proj(F.gelu(self.fc(x_BTC)))
        return y_BTC


class Block(nn.Module):
    """Pre-norm residual block (GPT-2)."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BTC: Tensor,
        position: PositionEncoding,
        state: Any,
        cache: KVCache | None,
        logit_scale_T1: Tensor | None,
    ) -> Tensor:
        x_BTC = x_BTC + self.drop(self.attn(self.ln_1(x_BTC), position, state, cache, logit_scale_T1))
        return x_BTC + self.drop(self.mlp(self.ln_2(x_BTC)))


class GPT(nn.Module):
    """Token embedding, `n_layer` blocks, final norm, and a head tied to the embedding (Radford et al. 2019)."""

    def __init__(self, config: GPTConfig, vocab_size: int, position: PositionEncoding) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.embedding = nn.Embedding(vocab_size, config.n_embd)
        self.position = position
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            # 0.02 (GPT-2) at width 256. Falling with width, it keeps the tied logits near uniform, and
            # tokens against unit sinusoids in one proportion, at every width
            nn.init.normal_(module.weight, std=0.32 / math.sqrt(self.config.n_embd))
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, CausalSelfAttention | MLP):
            # GPT-2: the 2 * n_layer writes to the residual stream should not make it grow with depth
            nn.init.normal_(module.proj.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(self, ids_BT: Tensor, cache: KVCache | None = None, horizon: int | None = None) -> Tensor:
        """Logits (B, T, V) for token ids (B, T) that follow what `cache` holds. Arguments are `hidden`'s."""
        return self.head(self.hidden(ids_BT, cache, horizon))

    def head(self, hidden_BTC: Tensor) -> Tensor:
        """Logits (B, T, V) from the output of `hidden`; the weights are those of the embedding."""
        return F.linear(hidden_BTC, self.embedding.weight)

    def hidden(self, ids_BT: Tensor, cache: KVCache | None = None, horizon: int | None = None) -> Tensor:
        """What the head reads, (B, T, C), for token ids (B, T) that follow what `cache` holds.

        `horizon` is the length the sequence is planned to reach (default: the length it has now). Raises
        UserError when that exceeds what the encoding defines.
        """
        start, T = cache.length if cache else 0, ids_BT.shape[1]
        k_S = torch.arange(start + T, device=ids_BT.device)
        span = Span(q=k_S[start:], k=k_S, horizon=max(horizon or 0, start + T))
        limit = self.position.max_length
        if limit is not None and span.horizon > limit:
            raise UserError(
                f"{type(self.position).__name__.lower()} positions are not defined beyond {limit} tokens, "
                f"{span.horizon} asked; stay within {limit}, slide the window (overflow=slide), "
                f"or train with another position encoding"
            )
        if cache is not None and not self.config.causal:
            raise UserError("a model with model.causal=false has no cache: every token changes all others")
        layers = [self.position.for_layer(layer) for layer in range(self.config.n_layer)]
        states = {encoding: encoding.prepare(span) for encoding in set(layers)}
        scale_T1 = logit_scale(self.config.logit_scale, span, self.config.dims.original_length)
        x_BTC = self.drop(self.position.embed(self.embedding(ids_BT), span))
        for block, encoding in zip(self.blocks, layers, strict=True):
            x_BTC = block(x_BTC, encoding, states[encoding], cache, scale_T1)
        if cache is not None:
            cache.length += T
        normed: Tensor = self.ln_f(x_BTC)
        return normed

    def parameter_count(self) -> int:
        """Trainable parameters, position tables included; the tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int) -> int:
        """Forward and backward, Chowdhery et al. 2022, appendix B: 6 N + 12 n_layer n_embd T.

        N leaves out tables that are only looked up; the tied head is a real product and stays in.
        """
        looked_up = sum(p.numel() for p in self.position.parameters())
        attention = 12 * self.config.n_layer * self.config.n_embd * length
        return 6 * (self.parameter_count() - looked_up) + attention
