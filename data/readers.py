"""Files to documents: a source becomes pieces in a fixed order, each of which a worker reads by itself.

Pieces depend on the files alone, so the shards are the same for any number of workers. A document is its raw
bytes; in place of one that cannot be had stands a `str`, the reason. No piece holds more than some megabytes,
whatever the size of the file.
"""

from __future__ import annotations

import json
import lzma
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from data.text import BLOCK, BYTE_ORDER_MARK, Split, as_utf8, cut, is_text, share
from model.config import UserError

LONGEST_RECORD = 32 << 20  # bytes of one document in a .jsonl or an archive: memory is bounded by it
ROWS_OF_A_PIECE = 1024  # a column that repeats itself is far longer than its file says
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


@dataclass(frozen=True, kw_only=True)
class Rows(Piece):
    """Row groups of a .parquet file."""

    path: Path
    text_key: str
    row_groups: tuple[int, ...]

    def documents(self) -> Iterator[Document]:
        yield from _rows(self.path, self.text_key, self.row_groups)


def _rows(path: Path, text_key: str, row_groups: tuple[int, ...]) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet

    with pa.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        batches = file.iter_batches(
            batch_size=256, row_groups=row_groups, columns=[text_key], use_threads=False
        )
        for batch in batches:
            column = batch.column(0)
            if isinstance(column, pa.DictionaryArray):
                column = column.dictionary_decode()
            values = column.cast(pa.binary()).to_pylist()
            yield from (NO_TEXT if value is None else value for value in values)


@dataclass(frozen=True, kw_only=True)
class Members(Piece):
    """Members of a .tar, by name, place and size: .xz ones are each a tar of .txt, others are documents."""

    path: Path
    members: tuple[tuple[str, int, int], ...]

    def documents(self) -> Iterator[Document]:
        with tarfile.open(self.path) as archive:
            for name, place, size in self.members:
                info = tarfile.TarInfo(name)
                info.offset_data, info.size = place, size
                content = archive.extractfile(info)
                assert content is not None
                try:
                    if name.endswith(".xz"):
                        yield from _documents_of_tar(lzma.open(content))
                    else:
                        yield content.read()
                except (lzma.LZMAError, EOFError, tarfile.TarError) as error:
                    raise UserError(
                        f"{self.path}: its member {name} is damaged ({error}); fetch the archive again"
                    ) from None


def _documents_of_tar(file: Any) -> Iterator[Document]:
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for info in archive:
            if info.isfile() and info.name.endswith(".txt"):
                content = archive.extractfile(info)
                assert content is not None
                yield content.read() if info.size <= LONGEST_RECORD else TOO_LONG


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


RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


def _of_records(file: Path, name: str, size: int, text_key: str) -> Iterator[Piece]:
    if name.endswith(".jsonl"):
        for start in range(0, size, BLOCK):
            yield Lines(size=min(BLOCK, size - start), text_key=text_key, path=file, start=start)
    elif name.endswith(".parquet"):
        yield from _of_parquet(file, size, text_key)
    elif name.endswith(".tar"):
        yield from _of_tar(file)
    else:
        with _open_lines(file) as (stream, place):
            yield from of_lines(stream, text_key, place=place)


def of_long_text(stream: BinaryIO, head: bytes = b"") -> Iterator[Piece]:
    """One document that starts with `head`, in parts whose tokens join to those of the whole."""
    block = head or stream.read(BLOCK)
    if not is_text(block, as_utf8(block)[1]):
        while block:
            rest = stream.read(BLOCK)
            yield Given(size=len(block), given=() if rest else (NOT_UTF8,))
            block = rest
        return
    number = share(block)
    while True:
        more = stream.read(BLOCK)
        if not more:
            yield Given(size=len(block), given=(block,), part_of=number)
            return
        block += more
        end, _ = cut(block, 0, len(block) - 4)
        yield Given(size=end, given=(block[:end],), part_of=number, continues=True)
        block = block[end:]


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


def _of_parquet(file: Path, size: int, text_key: str) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pa.parquet.ParquetFile(file) as opened:
            schema, metadata = opened.schema_arrow, opened.metadata
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file}: not a whole .parquet file ({error}); fetch it again") from None
    textual = [field.name for field in schema if "string" in str(field.type) or "binary" in str(field.type)]
    if text_key not in textual:
        raise UserError(
            f"{file}: no column of text named {text_key}; give data.text_key= one of: {', '.join(textual) or 'none'}"
        )
    column = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(text_key)
    groups: list[int] = []
    rows = text_bytes = 0
    for group in range(metadata.num_row_groups):
        groups.append(group)
        rows += metadata.row_group(group).num_rows
        text_bytes += metadata.row_group(group).column(column).total_uncompressed_size
        if text_bytes < BLOCK and rows < ROWS_OF_A_PIECE and group + 1 < metadata.num_row_groups:
            continue
        part = size * rows // max(metadata.num_rows, 1)
        if text_bytes <= 4 * BLOCK and rows <= 2 * ROWS_OF_A_PIECE:
            yield Rows(size=part, path=file, text_key=text_key, row_groups=tuple(groups))
        else:  # to be read once and in order, for a worker could start within a row group only by decoding it
            yield from _packed(_rows(file, text_key, tuple(groups)), part, rows)
        groups, rows, text_bytes = [], 0, 0


def _packed(documents: Iterator[Document], size: int, count: int) -> Iterator[Piece]:
    """Documents that this process reads, in pieces of about BLOCK bytes. `size` is shared among them by number."""
    given: list[Document] = []
    n_bytes = 0
    for document in documents:
        given.append(document)
        n_bytes += len(document)
        if n_bytes >= BLOCK or len(given) >= ROWS_OF_A_PIECE:
            yield Given(size=size * len(given) // count, given=tuple(given))
            given, n_bytes = [], 0
    if given:
        yield Given(size=size * len(given) // count, given=tuple(given))


def _of_tar(file: Path) -> Iterator[Piece]:
    members: list[tuple[str, int, int]] = []
    size = 0
    try:
        with tarfile.open(file) as archive:
            for info in archive:
                if not info.isfile() or not info.name.endswith((".xz", ".txt")):
                    continue
                if info.size > LONGEST_RECORD:
                    raise UserError(
                        f"{file}: its member {info.name} has {info.size:,} bytes; unpack it and give the folder"
                    )
                members.append((info.name, info.offset_data, info.size))
                size += info.size
                if size >= BLOCK // 4:  # xz packs text to about a fourth
                    yield Members(size=size, path=file, members=tuple(members))
                    members, size = [], 0
    except tarfile.TarError as error:
        raise UserError(f"{file}: damaged ({error}); fetch it again") from None
    if members:
        yield Members(size=size, path=file, members=tuple(members))
