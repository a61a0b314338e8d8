"""Multi-head causal self-attention. Position is someone else's business: it arrives as an encoding."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from model.cache import KVCache
from model.config import GPTConfig
from model.kernels import attend
from model.position.base import PositionEncoding


class CausalSelfAttention(nn.Module):
    """Vaswani et al. 2017, section 3.2, with the q, k and v projections fused into one matrix (3C, C)."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.n_head, self.causal, self.dropout = (
            layer,
            config.n_head,
            config.causal,
            config.dropout,
        )
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def project(
        self, x_BTC: Tensor, position: PositionEncoding, state: Any, logit_scale_T1: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (B, H, T, D); queries and keys may be wider, as the encoding likes."""
        qkv_3BHTD = self.qkv(x_BTC).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        q_BHTD, k_BHTD, v_BHTD = qkv_3BHTD.unbind(0)
        if logit_scale_T1 is not None:
            q_BHTD = (q_BHTD * logit_scale_T1).to(q_BHTD.dtype)
        return *position.encode_qk(q_BHTD, k_BHTD, state), v_BHTD

    def forward(
        self,
        x_BTC: Tensor,
        position: PositionEncoding,
        state: Any,
        cache: KVCache | None = None,
        logit_scale_T1: Tensor | None = None,
    ) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = self.project(x_BTC, position, state, logit_scale_T1)
        k_BHSD, v_BHSD = cache.append(self.layer, k_BHTD, v_BHTD) if cache else (k_BHTD, v_BHTD)
        y_BHTD = attend(
            q_BHTD,
            k_BHSD,
            v_BHSD,
            bias_HTS=position.score_bias(state),
            causal=self.causal,
            dropout=self.dropout if self.training else 0.0,
        )
        projected: Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(-2))
        return projected
