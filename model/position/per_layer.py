"""Different encodings in different layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from model.config import Dims, UserError, nearest
from model.position.base import PositionEncoding, Span


class PerLayer(PositionEncoding):
    """`pattern` names an entry of `kinds` per block, repeated over the depth.

    [rope, rope, rope, none] drops positions in every fourth block, as SmolLM3 and Llama 4 do ("RNoPE").
    `scaling` is that of every kind whose own is null.
    """

    def __init__(
        self,
        dims: Dims,
        pattern: list[str],
        kinds: dict[str, dict[str, Any]],
        scaling: dict[str, Any] | None = None,
    ) -> None:
        from model.position import build

        super().__init__(dims)
        dotted = next((name for name in kinds if "." in name), None)
        if dotted is not None:
            raise UserError(f"position.kinds: the name {dotted} holds a dot; give a plain name")
        if not pattern or set(pattern) - set(kinds):
            wrong = next((name for name in pattern if name not in kinds), "[]")
            raise UserError(f"position.pattern: {wrong} is not one of position.kinds{nearest(wrong, kinds)}")
        self.pattern = pattern
        self.kinds = nn.ModuleDict()
        for name, values in kinds.items():
            own = values | ({"scaling": scaling} if values.get("scaling", ...) is None else {})
            self.kinds[name] = build(own, dims, f"position.kinds.{name}.")
        limits = [kind.max_length for kind in self.encodings() if kind.max_length is not None]
        self.max_length = min(limits, default=None)
        self.depends_on_horizon = any(kind.depends_on_horizon for kind in self.encodings())

    def encodings(self) -> list[PositionEncoding]:
        return [kind for kind in self.kinds.values() if isinstance(kind, PositionEncoding)]

    def for_layer(self, layer: int) -> PositionEncoding:
        kind = self.kinds[self.pattern[layer % len(self.pattern)]]
        assert isinstance(kind, PositionEncoding)
        return kind.for_layer(layer)

    def embed(self, x_BTC: Tensor, span: Span) -> Tensor:
        for kind in self.encodings():
            x_BTC = kind.embed(x_BTC, span)
        return x_BTC
