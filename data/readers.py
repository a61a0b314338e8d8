"""Files to pieces: small text files together, large ones of any kind in parts, in a fixed order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from data.archive import of_tar
from data.parquet import of_parquet
from data.pieces import (
    EMPTY,
    LONGEST_RECORD,
    NO_TEXT,
    NOT_JSON,
    NOT_UTF8,
    TOO_LONG,
    Document,
    Given,
    Piece,
    reading,
)
from data.text import BLOCK, BYTE_ORDER_MARK, as_text, cut, is_text, share
from model.errors import UserError

RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Files(Piece):
    """One document a file."""

    paths: tuple[Path, ...]

    def documents(self) -> Iterator[Document]:
        for path in self.paths:
            with reading(path):
                yield path.read_bytes()


@dataclass(frozen=True, kw_only=True)
class Lines(Piece):
    """The JSON lines that begin in bytes [start, start + size) of a file, or those of `data`."""

    text_key: str
    path: Path | None = None
    start: int = 0
    data: bytes = b""

    @property
    def held(self) -> int:
        return len(self.data)

    def documents(self) -> Iterator[Document]:
        if self.path is None:
            lines: Iterable[bytes] = self.data.split(b"\n")
        else:
            lines = self._lines_of(self.path)
        for line in lines:
            if line.strip():
                yield self._text(line)

    def _lines_of(self, path: Path) -> Iterator[bytes]:
        end = self.start + self.size
        with reading(path), open(path, "rb") as file:
            if self.start:
                file.seek(self.start - 1)
                if not file.readline(self.size + 1).endswith(b"\n"):
                    return  # all of it is inside a line that began before
            while file.tell() < end:
                line = file.readline(LONGEST_RECORD + 1)
                yield line
                if len(line) > LONGEST_RECORD and not file.readline(max(end - file.tell(), 1)).endswith(
                    b"\n"
                ):
                    return  # the line is counted, and ends behind this piece

    def _text(self, line: bytes) -> Document:
        if len(line) > LONGEST_RECORD:
            return TOO_LONG
        record = json_object(line)
        if record is None:
            return NOT_JSON
        text = record.get(self.text_key)
        if not isinstance(text, str):
            return NO_TEXT
        try:
            return text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can write and UTF-8 cannot
            return text.encode("utf-8", "surrogatepass")


def json_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object on a line, None when there is none.

    Bytes that are not UTF-8 pass through as they are: what becomes of them is not decided here.
    """
    try:
        record = json.loads(line.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def check_has_key(head: bytes, text_key: str, name: str) -> None:
    """The first records tell whether the key is right, before hours are spent. Raises UserError when none has it."""
    records = [record for line in head.split(b"\n") if (record := json_object(line)) is not None]
    if records and not any(isinstance(record.get(text_key), str) for record in records):
        keys = dict.fromkeys(
            key for record in records for key, value in record.items() if isinstance(value, str)
        )
        raise UserError(
            f"{name}: its first records have no text under data.text_key={text_key}; "
            f"give data.text_key= one of: {', '.join(keys) or 'none there is text'}"
        )


def head_of_lines(file: Path) -> bytes:
    """The beginning of a .jsonl file of any kind; nothing for other files."""
    name = file.name.lower()
    if not name.endswith(RECORDS) or name.endswith(".parquet"):
        return b""
    with _open_lines(file) as (stream, _):
        return bytes(stream.read(BLOCK))


@contextmanager
def _open_lines(file: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """A stream of the lines in a .jsonl file of any kind, and how far the file behind it was read."""
    import pyarrow as pa

    codec = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix.lower())
    # a file of Python's, since Arrow takes names in UTF-8 alone
    with reading(file), open(file, "rb") as raw, pa.PythonFile(raw) as wrapped:
        yield (pa.CompressedInputStream(wrapped, codec) if codec else wrapped), wrapped.tell


def pieces(files: Iterable[Path], text_key: str) -> Iterator[Piece]:
    """The pieces of `files` in order. Small text files share a piece; large ones of any kind have many.

    Raises UserError when a file is damaged, or has no column `text_key`.
    """
    paths: list[Path] = []
    size = 0
    for file in files:
        with reading(file):
            name, file_size = file.name.lower(), file.stat().st_size
        plain = not name.endswith((*RECORDS, ".tar"))
        if plain and file_size <= BLOCK:
            paths.append(file)
            size += file_size
        if paths and (size >= BLOCK or file_size > BLOCK or not plain):
            yield Files(size=size, paths=tuple(paths))
            paths, size = [], 0
        if not plain:
            yield from _of_records(file, name, file_size, text_key)
        elif file_size > BLOCK:
            with reading(file), open(file, "rb") as stream:
                yield from of_long_text(stream)
    if paths:
        yield Files(size=size, paths=tuple(paths))


def _of_records(file: Path, name: str, size: int, text_key: str) -> Iterator[Piece]:
    if name.endswith(".jsonl"):
        for start in range(0, size, BLOCK):
            yield Lines(size=min(BLOCK, size - start), text_key=text_key, path=file, start=start)
    elif name.endswith(".parquet"):
        yield from of_parquet(file, size, text_key)
    elif name.endswith(".tar"):
        yield from of_tar(file)
    else:
        with _open_lines(file) as (stream, place):
            yield from of_lines(stream, text_key, place=place)


def of_long_text(stream: BinaryIO, head: bytes = b"") -> Iterator[Piece]:
    """One document that starts with `head`, in parts whose tokens join to those of the whole."""
    block, more = head or stream.read(BLOCK), stream.read(BLOCK)
    if not more:
        yield Given(size=len(block), given=(block,))
        return
    if not block.strip() or not is_text(block, as_text(block).replaced):
        reason = NOT_UTF8 if block.strip() else EMPTY  # 4 MB tell, and may be all that memory has room for
        while more:
            yield Given(size=len(block), given=())
            block, more = more, stream.read(BLOCK)
        yield Given(size=len(block), given=(reason,))
        return
    number, follows = share(block), False
    while more:
        block += more
        end, _ = cut(block, 0, len(block) - 4)
        yield Given(size=end, given=(block[:end],), part_of=number, follows=follows, continues=True)
        block, more, follows = block[end:], stream.read(BLOCK), True
    yield Given(size=len(block), given=(block,), part_of=number, follows=True)


def of_lines(
    stream: Any, text_key: str, head: bytes = b"", place: Callable[[], int] | None = None
) -> Iterator[Piece]:
    """JSON lines of a stream that starts with `head`; `place()` is how far it is in the source, in bytes."""
    carry, before = head, 0
    while True:
        block = stream.read(BLOCK)
        carry += block
        end = carry.rfind(b"\n") + 1 if block else len(carry)
        if end:
            here = place() if place else 0
            yield Lines(size=here - before if place else end, text_key=text_key, data=carry[:end])
            carry, before = carry[end:], here
        if not block:
            return
        if len(carry) > LONGEST_RECORD + BLOCK:  # enough to be counted as too long, once its end comes
            carry = carry[: LONGEST_RECORD + 1]
