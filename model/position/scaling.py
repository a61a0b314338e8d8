"""How an encoding is carried past its trained length: one class per published way, one pure method each.

A scaling turns (head dimension, base, horizon) into RoPE's inverse frequencies and an attention factor, by which
cos and sin are multiplied. It keeps no state: what depends on the length depends on the planned one, `horizon`,
which is the same for prefill and decode. The trained length is `Dims.original_length`, never the extended one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from model.config import Dims, UserError
from model.position.build import construct

Factor = Annotated[float, Field(ge=1)]  # extended length / trained length
Positive = Annotated[float, Field(gt=0)]


def inverse_frequencies(head_dim: int, base: float) -> Tensor:
    """theta_i = base^(-2i/d), i = 0 .. d/2 - 1, as (head_dim / 2,) in float64. Su et al. 2021, eq. 15."""
    return base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def stretched_base(base: float, stretch: float, head_dim: int) -> float:
    """b s^(d / (d - 2)): divides the lowest frequency by exactly `stretch` and leaves the highest alone.

    NTK-aware scaling (bloc97 2023), as YaRN's definition 1.
    """
    if head_dim == 2:
        raise UserError("position.scaling: NTK scaling is not defined for a head dimension of 2; give more")
    return float(base * stretch ** (head_dim / (head_dim - 2)))


class Scaling:
    """No scaling, and the interface."""

    depends_on_horizon = False
    interpolation = 1.0  # what positions themselves are divided by, for encodings without frequencies

    def __init__(self, dims: Dims) -> None:
        self.trained_length = dims.original_length

    def frequencies(self, head_dim: int, base: float, horizon: int) -> tuple[Tensor, float]:
        """Inverse frequencies (head_dim / 2,) in float64 and the attention factor, for `horizon` tokens."""
        return inverse_frequencies(head_dim, base), 1.0


def scaling_of(values: Mapping[str, Any] | None, dims: Dims) -> Scaling:
    """The scaling that `position.scaling` describes, none when there is none."""
    return construct(Scaling, values, dims, "position.scaling.") if values else Scaling(dims)


def interpolation_of(values: Mapping[str, Any] | None, dims: Dims) -> float:
    """What an encoding without frequencies divides positions by. Raises UserError for other scalings."""
    scaling = scaling_of(values, dims)
    if type(scaling) not in (Scaling, Linear):
        raise UserError(
            f"position/scaling: {type(scaling).__name__} scales the frequencies of RoPE; this encoding has none, "
            f"give position/scaling=linear or none"
        )
    return scaling.interpolation


class Linear(Scaling):
    """Position interpolation, Chen et al. 2023 (arXiv 2306.15595), eq. 4: positions m L / L' for m."""

    def __init__(self, dims: Dims, factor: Factor) -> None:
        super().__init__(dims)
        self.interpolation = factor

    def frequencies(self, head_dim: int, base: float, horizon: int) -> tuple[Tensor, float]:
        return inverse_frequencies(head_dim, base) / self.interpolation, 1.0


class NTK(Scaling):
    """NTK-aware: a larger base, so that low frequencies are interpolated and high ones are not."""

    def __init__(self, dims: Dims, factor: Factor) -> None:
        super().__init__(dims)
        self.factor = factor

    def frequencies(self, head_dim: int, base: float, horizon: int) -> tuple[Tensor, float]:
        return inverse_frequencies(head_dim, stretched_base(base, self.factor, head_dim)), 1.0


class DynamicNTK(Scaling):
    """NTK-aware with a stretch of s l' / L - (s - 1), which is 1 up to the trained length L (emozilla 2023).

    l' is the horizon: Peng et al. (arXiv 2309.00071, 3.3) warn that a base which changes while a cache fills is
    wrong; here it cannot.
    """

    depends_on_horizon = True

    def __init__(self, dims: Dims, factor: Factor = 1.0) -> None:
        super().__init__(dims)
        self.factor = factor

    def frequencies(self, head_dim: int, base: float, horizon: int) -> tuple[Tensor, float]:
        length = max(horizon, self.trained_length)
        stretch = self.factor * length / self.trained_length - (self.factor - 1)
        return inverse_frequencies(head_dim, stretched_base(base, stretch, head_dim)), 1.0


class ABF(Scaling):
    """A raised base, Xiong et al. 2023 (arXiv 2309.16039, 4.1): 10,000 became 500,000 for Llama 2 Long."""

    def __init__(self, dims: Dims, base: Positive = 500000.0) -> None:
        super().__init__(dims)
        self.base = base

    def frequencies(self, head_dim: int, base: float, horizon: int) -> tuple[Tensor, float]:
        return inverse_frequencies(head_dim, self.base), 1.0


class YaRN(Scaling):
    """Peng et al. 2023 (arXiv 2309.00071, 3.2 and 3.4): by parts, and an attention factor of 0.1 ln(s) + 1.

    Dimensions that turn more than `beta_fast` times within the trained length keep their frequency, those that
    turn less than `beta_slow` times are interpolated, with a ramp between. The ramp is over the dimension
    index and its ends are rounded outwards, as in the authors' code; the paper's is over the turns.
    `beta_fast` 32 supposes windows of thousands of tokens: at 256 almost no dimension turns so often.
    """

    def __init__(
        self,
        dims: Dims,
        factor: Factor,
        beta_fast: Positive = 32.0,
        beta_slow: Positive = 1.0,
        attention_factor: Positive | None = None,
    ) -> None:
        super().__init__(dims)
        if beta_fast <= beta_slow:
            raise UserError(
                f"position.scaling.beta_fast={beta_fast}: expected more than beta_slow={beta_slow}; swap them"
            )
        self.factor, self.beta_fast, self.beta_slow = factor, beta_fast, beta_slow
        self.attention_factor = attention_factor or 0.1 * math.log(factor) + 1

    def frequencies(self, head_dim: int, base: float, horizon: int) -> tuple[Tensor, float]:
        def index_that_turns(times: float) -> float:
            return head_dim * math.log(self.trained_length / (times * 2 * math.pi)) / (2 * math.log(base))

        first = max(math.floor(index_that_turns(self.beta_fast)), 0)
        last = max(min(math.ceil(index_that_turns(self.beta_slow)), head_dim - 1), first)
        index = torch.arange(head_dim // 2, dtype=torch.float64)
        # a step where both ends meet, as in the authors' code
        ramp = ((index - first) / (last - first if last != first else 0.001)).clamp(0, 1)
        kept = inverse_frequencies(head_dim, base)
        return kept * (1 - ramp) + kept / self.factor * ramp, self.attention_factor


class Llama3(Scaling):
    """Llama 3.1's rule: by wavelength, against the trained length; no attention factor.

    Wavelengths below L / high_freq_factor stay, those above L / low_freq_factor are interpolated, linear between.
    """

    def __init__(
        self,
        dims: Dims,
        factor: Factor = 8.0,
        low_freq_factor: Positive = 1.0,
        high_freq_factor: Positive = 4.0,
    ) -> None:
        super().__init__(dims)
        if high_freq_factor <= low_freq_factor:
            raise UserError(
                f"position.scaling.high_freq_factor={high_freq_factor}: expected more than "
                f"low_freq_factor={low_freq_factor}; swap them"
            )
        self.factor, self.low, self.high = factor, low_freq_factor, high_freq_factor

    def frequencies(self, head_dim: int, base: float, horizon: int) -> tuple[Tensor, float]:
        kept = inverse_frequencies(head_dim, base)
        turns = self.trained_length * kept / (2 * math.pi)
        smooth = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - smooth) * kept / self.factor + smooth * kept, 1.0


class LongRoPE(Scaling):
    """Ding et al. 2024 (arXiv 2402.13753): a given divisor per frequency, another set past the trained length.

    The attention factor is sqrt(1 + ln(s) / ln(L)), as released with Phi-3.
    """

    depends_on_horizon = True

    def __init__(
        self,
        dims: Dims,
        factor: Factor,
        long_factor: list[Positive],
        short_factor: list[Positive] | None = None,
        attention_factor: Positive | None = None,
    ) -> None:
        super().__init__(dims)
        self.long, self.short = long_factor, short_factor or [1.0] * (dims.head_dim // 2)
        for name, divisors in (("long_factor", self.long), ("short_factor", self.short)):
            if len(divisors) != dims.head_dim // 2:
                raise UserError(
                    f"position.scaling.{name}: {len(divisors)} factors for {dims.head_dim // 2} frequencies; "
                    f"give one for each"
                )
        self.attention_factor = attention_factor or math.sqrt(
            1 + math.log(factor) / math.log(self.trained_length)
        )

    def frequencies(self, head_dim: int, base: float, horizon: int) -> tuple[Tensor, float]:
        divisors = self.long if horizon > self.trained_length else self.short
        divided = inverse_frequencies(head_dim, base) / torch.tensor(divisors, dtype=torch.float64)
        return divided, self.attention_factor
