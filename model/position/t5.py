"""T5's relative bias: a learned scalar per head and bucket of distances."""

from __future__ import annotations

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from model.config import Dims, UserError
from model.position.base import PositionEncoding, Span


def bucket_starts(num_buckets: int, max_distance: int) -> list[int]:
    """The smallest distance in each bucket, (num_buckets,), in exact integers.

    With E = num_buckets / 2: the buckets 0 .. E - 1 hold one distance each, and bucket E + k, k = 0 .. E - 1, starts
    at E (max_distance / E)^(k / E), rounded up, so that the last one would end at max_distance; it takes all beyond.
    """
    exact = num_buckets // 2
    starts = list(range(exact))
    for k in range(exact):
        start = int(exact * (max_distance / exact) ** (k / exact))
        # the float is at most the start; integers say what it is, also where the power is an integer itself
        while start**exact * exact**k < max_distance**k * exact**exact:
            start += 1
        starts.append(start)
    return starts


class T5(PositionEncoding):
    """Raffel et al. 2020 (arXiv 1910.10683, section 2.1): softmax(q . k / sqrt(D) + b_h(bucket(i - j))).

    One table for all layers. Where attention is not causal, half of its buckets are for keys after the query, as in
    T5's encoder; else all are for those before it, as in its decoder. T5 itself leaves q . k undivided; the
    division by sqrt(D), which the bias does not have, is that of the T5 baseline of Press et al. 2022.

    The table starts as every table of the model does, normal with standard deviation 0.32 / sqrt(n_embd): T5's own
    n_embd^-0.5 but for the factor, and too small to weigh against q . k before it is trained.

    The bias is dense, so memory is n_head * T * S numbers, for training and for each window of an evaluation.
    """

    def __init__(self, dims: Dims, num_buckets: PositiveInt = 32, max_distance: PositiveInt = 128) -> None:
        super().__init__(dims)
        sides = 1 if dims.causal else 2
        if num_buckets % (2 * sides):
            halved = "them" if dims.causal else "those on each side"
            raise UserError(
                f"position.num_buckets={num_buckets}: half of {halved} hold one distance each; "
                f"give a multiple of {2 * sides}, as 32"
            )
        self.buckets_of_a_side = num_buckets // sides
        if max_distance <= self.buckets_of_a_side // 2:
            raise UserError(
                f"position.max_distance={max_distance}: expected more than the {self.buckets_of_a_side // 2} distances "
                f"that have buckets of their own, such as {4 * num_buckets}"
            )
        self.causal, self.starts = dims.causal, bucket_starts(self.buckets_of_a_side, max_distance)
        self.table = nn.Embedding(num_buckets, dims.n_head)

    def prepare(self, span: Span) -> Tensor:
        """The bias (H, T, S) in fp32. Of keys that a causal mask hides, it is that of their distance all the same."""
        starts = torch.tensor(self.starts, device=span.q.device)
        distance_TS = span.q[:, None] - span.k
        bucket_TS = torch.bucketize(distance_TS.abs(), starts, right=True) - 1
        if not self.causal:
            bucket_TS += (distance_TS < 0) * self.buckets_of_a_side
        bias_HN = self.table.weight.float().T.index_select(1, bucket_TS.flatten())
        return bias_HN.unflatten(1, bucket_TS.shape)

    def score_bias(self, state: Tensor) -> Tensor:
        return state
