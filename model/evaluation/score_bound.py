"""How much interpolation tightens the bound on RoPE's attention scores (Chen et al. 2023, section 2.3)."""

from __future__ import annotations

import math

import numpy as np


def extrapolation_sums(head_dim: int, base: float, length: int) -> np.ndarray:
    """B(s) of equation 8 at distances s = 0 .. `length` - 1, (length,) float64.

    B(s) is the sum over k = 1 .. d/2 of |sum over j < k of exp(i s theta_j)|, with theta_j = base^(-2j/d). Scores at
    distance s are at most 2 max|h| B(s), where h are the coefficients of a query and a key.
    """
    theta_J = base ** (-np.arange(0, head_dim, 2) / head_dim)
    waves_SJ = np.exp(1j * np.arange(length)[:, None] * theta_J)
    return np.abs(np.cumsum(waves_SJ, axis=1)).sum(1)


def bound_ratio(head_dim: int, base: float, length: int) -> float:
    """The bound beyond the window over that of interpolation between integer distances, where they are closest.

    Interpolated scores differ from those of their neighbours by at most d max|h| / (32 ln base), theorem 2.1. Both
    are upper bounds: the ratio says nothing about the scores of a given model.
    """
    closest = extrapolation_sums(head_dim, base, 2 * length).min()
    return float(2 * closest * 32 * math.log(base) / head_dim)
