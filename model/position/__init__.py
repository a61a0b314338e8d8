"""Position encodings. A new one is a class in a file of its own here and a YAML in conf/position/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import Dims
from model.position.base import PositionEncoding, Span
from model.position.build import construct

__all__ = ["PositionEncoding", "Span", "build"]


def build(values: Mapping[str, Any], dims: Dims, prefix: str = "position.") -> PositionEncoding:
    """The encoding that a position config describes. Raises UserError as `construct` does."""
    return construct(PositionEncoding, values, dims, prefix)
