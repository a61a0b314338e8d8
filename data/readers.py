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
from data.pieces import LONGEST_RECORD, NO_TEXT, NOT_JSON, NOT_UTF8, TOO_LONG, Document, Given, Piece
from data.text import BLOCK, BYTE_ORDER_MARK, as_utf8, cut, is_text, share
from model.config import UserError

RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Files(Piece):
    """One document a file."""

    paths: tuple[Path, ...]

    def documents(self) -> Iterator[Document]:
        for path in self.paths:
            try:
                yield path.read_bytes()
            except OSError as error:
                raise UserError(f"{path}: not readable ({error}); correct data.path") from None


@dataclass(frozen=True, kw_only=True)
class Lines(Piece):
    """The JSON lines that begin in bytes [start, start + size) of a file, or those of `data`."""

    text_key: str
    path: Path | None = None
    start: int = 0
    data: bytes = b""

    def documents(self) -> Iterator[Document]:
        if self.path is None:
            lines: Iterable[bytes] = self.data.split(b"\n")
        else:
            lines = self._lines_of(self.path)
        for line in lines:
            if line.strip():
                yield self._text(line)

    def _lines_of(self, path: Path) -> Iterator[bytes]:
        with open(path, "rb") as file:
            if self.start:
                file.seek(self.start - 1)
                _skip_line(file)
            while file.tell() < self.start + self.size:
                line = file.readline(LONGEST_RECORD + 1)
                if len(line) > LONGEST_RECORD:
                    _skip_line(file)
                yield line

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


def first_record(file: Path) -> dict[str, Any] | None:
    """The first line of a .jsonl file of any kind; None for other files, or when it is no JSON object."""
    name = file.name.lower()
    if not name.endswith(RECORDS) or name.endswith(".parquet"):
        return None
    with _open_lines(file) as (stream, _):
        return json_object(stream.read(BLOCK).split(b"\n", 1)[0])


@contextmanager
def _open_lines(file: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """A stream of the lines in a .jsonl file of any kind, and how far the file behind it was read."""
    import pyarrow as pa

    codec = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix.lower())
    with pa.OSFile(str(file)) as raw:
        try:
            yield (pa.CompressedInputStream(raw, codec) if codec else raw), raw.tell
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{file}: damaged ({error}); fetch it again") from None


def _skip_line(file: BinaryIO) -> None:
    while (part := file.readline(BLOCK)) and not part.endswith(b"\n"):
        pass


def pieces(files: Iterable[Path], text_key: str) -> Iterator[Piece]:
    """The pieces of `files` in order. Small text files share a piece; large ones of any kind have many.

    Raises UserError when a file is damaged, or has no column `text_key`.
    """
    paths: list[Path] = []
    size = 0
    for file in files:
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
            with open(file, "rb") as stream:
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
    if not is_text(block, as_utf8(block)[1]):
        while more:
            yield Given(size=len(block), given=())
            block, more = more, stream.read(BLOCK)
        yield Given(size=len(block), given=(NOT_UTF8,))
        return
    number = share(block)
    while more:
        block += more
        end, _ = cut(block, 0, len(block) - 4)
        yield Given(size=end, given=(block[:end],), part_of=number, continues=True)
        block, more = block[end:], stream.read(BLOCK)
    yield Given(size=len(block), given=(block,), part_of=number)


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
