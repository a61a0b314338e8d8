"""A piece of a source: some documents in their order, which a worker reads by itself.

Pieces depend on the files alone, so the shards are the same for any number of workers. A document is its raw
bytes; in place of one that cannot be had stands a `str`, the reason. No piece holds more than some megabytes,
whatever the size of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from data.text import Split

LONGEST_RECORD = 32 << 20  # bytes of one document in a .jsonl or an archive: memory is bounded by it
NOT_UTF8, EMPTY = "not UTF-8", "empty"
NOT_JSON, NO_TEXT, TOO_LONG = "not JSON", "without data.text_key", "longer than 32 MB"

Document = bytes | str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some documents in their order. `size` is its part of the source's bytes, for the progress line."""

    size: int
    split: Split | None = None  # None: the content of each document decides
    part_of: float | None = None  # the `share` of the one long document that this is a part of
    continues: bool = False  # the next piece goes on with that document

    def documents(self) -> Iterator[Document]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Given(Piece):
    """Documents that are in memory already."""

    given: tuple[Document, ...]

    def documents(self) -> Iterator[Document]:
        yield from self.given
