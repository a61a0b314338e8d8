"""Documents in a column of .parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.pieces import LONGEST_RECORD, NO_TEXT, TOO_LONG, Document, Given, Piece, reading
from data.text import BLOCK
from model.errors import UserError

ROWS_OF_A_PIECE = 1024  # a column that repeats itself is far longer than its file says


@dataclass(frozen=True, kw_only=True)
class Rows(Piece):
    """Row groups of a .parquet file."""

    path: Path
    text_key: str
    row_groups: tuple[int, ...]

    def documents(self) -> Iterator[Document]:
        yield from _rows(self.path, self.text_key, self.row_groups, 256)


def _rows(path: Path, text_key: str, row_groups: tuple[int, ...], at_once: int) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet

    # a file of Python's, since Arrow takes names in UTF-8 alone
    with (
        reading(path),
        open(path, "rb") as raw,
        pa.parquet.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False) as file,
    ):
        for batch in file.iter_batches(at_once, row_groups, columns=[text_key], use_threads=False):
            column = batch.column(0)
            if isinstance(column, pa.DictionaryArray):
                column = column.dictionary_decode()
            column = column.cast(pa.large_binary())
            # by offsets into the buffer, for a Python object per value costs as much as a tenth of tokenizing it
            _, offsets, data = column.buffers()
            ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
            valid_rows = column.is_valid().to_numpy(zero_copy_only=False).tolist()
            for start, end, valid in zip(ends[:-1].tolist(), ends[1:].tolist(), valid_rows, strict=True):
                if not valid:
                    yield NO_TEXT
                else:
                    yield data[start:end].to_pybytes() if end - start <= LONGEST_RECORD else TOO_LONG


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


def of_parquet(file: Path, size: int, text_key: str) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet

    with reading(file), open(file, "rb") as raw, pa.parquet.ParquetFile(raw) as opened:
        schema, metadata = opened.schema_arrow, opened.metadata
    textual = [field.name for field in schema if _is_text(field.type)]
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
            at_once = max(min(256, rows * BLOCK // max(text_bytes, 1)), 1)
            yield from _packed(_rows(file, text_key, tuple(groups), at_once), part, rows)
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
