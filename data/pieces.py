"""A piece of a source: some documents in their order, which a worker reads by itself.

Pieces depend on the files alone, so the shards are the same for any number of workers. A document is its raw
bytes; in place of one that cannot be had stands a `str`, the reason. No piece holds more than some megabytes,
whatever the size of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data.text import Split
from model.errors import UserError

LONGEST_RECORD = 16 << 20  # bytes of one document in a .jsonl or an archive: memory is bounded by it
NOT_UTF8, EMPTY = "not UTF-8", "empty"
NOT_JSON, NO_TEXT, TOO_LONG = "not JSON", "without data.text_key", "longer than 16 MB"

Document = bytes | str


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what goes wrong while a source is read into a UserError that names the file."""
    try:
        yield
    except Exception as error:
        # by its module, since importing pyarrow takes a tenth of a second that plain text need not wait for
        if not (isinstance(error, OSError) or type(error).__module__.startswith("pyarrow")):
            raise
        what = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}: not readable, or damaged ({what}); correct data.path, or fetch it again"
        ) from None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some documents in their order. `size` is its part of the source's bytes, for the progress line."""

    size: int
    split: Split | None = None  # None: the content of each document decides
    part_of: float | None = None  # the `share` of the one long document that this is a part of
    follows: bool = False  # the piece before has its beginning
    continues: bool = False  # the next piece goes on with it

    @property
    def held(self) -> int:
        """Bytes that wait in memory with the piece."""
        return 0

    def documents(self) -> Iterator[Document]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Given(Piece):
    """Documents that are in memory already."""

    given: tuple[Document, ...]

    @property
    def held(self) -> int:
        return sum(map(len, self.given))

    def documents(self) -> Iterator[Document]:
        yield from self.given
