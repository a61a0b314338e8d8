"""The bounds of Chen et al. 2023 at their own figures and spelt out."""

from __future__ import annotations

import cmath

import pytest

from model.evaluation.score_bound import bound_ratio, extrapolation_sums


def test_sums_equal_equation_8() -> None:
    sums = extrapolation_sums(8, 100.0, 12)
    for s in (0, 1, 11):
        wanted = sum(abs(sum(cmath.exp(1j * s * 100 ** (-2 * j / 8)) for j in range(k))) for k in range(1, 5))
        assert sums[s] == pytest.approx(wanted)
    assert sums[0] == 1 + 2 + 3 + 4


@pytest.mark.parametrize(("head_dim", "length", "smallest"), [
    (128, 2048, 1.116), (64, 256, 1.310), (32, 256, 0.754), (32, 128, 0.915),
])  # fmt: skip
def test_the_smallest_sum_is_about_the_head_dimension(head_dim: int, length: int, smallest: float) -> None:
    assert extrapolation_sums(head_dim, 1e4, 2 * length).min() / head_dim == pytest.approx(smallest, abs=2e-3)


def test_the_ratio_is_about_600_at_the_papers_head_dimension() -> None:
    """2 x 294.73 = 589 where B(s) >= d, as the paper finds it to be."""
    assert bound_ratio(128, 1e4, 2048) == pytest.approx(1.116 * 589.46, rel=2e-3)
