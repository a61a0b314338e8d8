"""Documents in a column of .parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.pieces import NO_TEXT, Document, Given, Piece
from data.text import BLOCK
from model.config import UserError

ROWS_OF_A_PIECE = 1024  # a column that repeats itself is far longer than its file says


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


def of_parquet(file: Path, size: int, text_key: str) -> Iterator[Piece]:
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
