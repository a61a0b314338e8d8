"""Fixtures of the data tests."""

from __future__ import annotations

import pytest

from tests.data import corpus


@pytest.fixture
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, so that a small corpus has many."""
    corpus.set_block(monkeypatch, 2000)
