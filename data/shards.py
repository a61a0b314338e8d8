"""Token shards that describe themselves.

Layout: 8 bytes magic, 8 bytes length of the JSON header, the header, padding to 64 bytes, the tokens, then
one int64 offset per document. The header says dtype, counts, tokenizer and the sha256 of all that follows.
Every document ends with the tokenizer's end-of-text id, which is its last and occurs nowhere else, so the tokens
themselves tell where documents begin.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data import foreign
from data.files import File
from model.config import UserError

MAGIC = b"ORDINAL1"
HEADER_BYTES = 1024  # reserved by the writer, which knows the counts and the checksum only at the end
CHUNK = 1 << 22  # tokens read at a time where a whole shard is read


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest of uint16 and uint32 that holds ids 0 .. vocab_size - 1."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


class ShardWriter:
    """Appends tokens to a shard in bounded memory; it is at `path`, whole, once `close` returns.

    Until then it is a hidden .partial file. With `kept_tokens`, the first so many tokens of an earlier writer's
    work are kept, closed or not, and the rest is dropped: how an interrupted preparation goes on.
    """

    def __init__(
        self, path: Path, *, tokenizer: str, tokenizer_hash: str, vocab_size: int, kept_tokens: int = 0
    ) -> None:
        self.path, self.n_tokens = path, 0
        self._tokenizer, self._tokenizer_hash, self._vocab_size = tokenizer, tokenizer_hash, vocab_size
        self._dtype = token_dtype(vocab_size)
        self._partial = path.with_name(f".{path.name}.partial")
        self._digest = hashlib.sha256()
        self._starts = [np.zeros(1, np.int64)]
        self._max_id = 0
        if path.exists():
            path.rename(self._partial)
        self._file = open(self._partial, "r+b" if kept_tokens else "wb")
        self._file.seek(HEADER_BYTES)
        while self.n_tokens < kept_tokens:
            count = min(CHUNK, kept_tokens - self.n_tokens)
            tokens = np.fromfile(self._file, self._dtype, count)
            if len(tokens) < count:
                raise ValueError(f"{self._partial} is shorter than recorded")
            self._note(tokens)
        self._file.truncate()

    def append(self, tokens: np.ndarray) -> None:
        """Raises UserError, and writes nothing, when an id does not fit the vocabulary."""
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise UserError(
                f"{self.path}: token ids {tokens.min()}..{tokens.max()} do not fit vocab_size={self._vocab_size}"
            )
        narrow = np.ascontiguousarray(tokens, dtype=self._dtype)
        self._file.write(narrow.data)
        self._note(narrow)

    def _note(self, tokens: np.ndarray) -> None:
        self._digest.update(tokens.data)
        self._starts.append(_after_ends(tokens, self._vocab_size - 1) + self.n_tokens)
        self._max_id = max(self._max_id, int(tokens.max(initial=0)))
        self.n_tokens += len(tokens)

    def sync(self) -> None:
        """Return once everything appended is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        starts = np.concatenate(self._starts)
        starts = starts[starts < self.n_tokens]
        self._digest.update(starts.astype("<i8").data)
        self._file.write(starts.astype("<i8").data)
        header = {
            "version": 1,
            "dtype": self._dtype.str,
            "tokens": self.n_tokens,
            "documents": len(starts),
            "tokenizer": self._tokenizer,
            "tokenizer_hash": self._tokenizer_hash,
            "vocab_size": self._vocab_size,
            "max_id": self._max_id,
            "sha256": self._digest.hexdigest(),
        }
        # JSON may end in spaces, so the header fills what was reserved for it
        encoded = json.dumps(header).encode().ljust(HEADER_BYTES - 16)
        self._file.seek(0)
        self._file.write(MAGIC + len(encoded).to_bytes(8, "little") + encoded)
        self.sync()
        self._file.close()
        self._partial.rename(self.path)

    def abandon(self) -> None:
        """Let go of the file, unfinished; what `sync` put on the disk can be kept by another writer."""
        with suppress(OSError):  # what is still in Python's buffer may not fit a full disk
            self._file.close()


def write_shard(
    path: Path, tokens: np.ndarray, *, tokenizer: str, tokenizer_hash: str, vocab_size: int
) -> None:
    """Write tokens, each document ended by the end-of-text id, as one shard. Raises as ShardWriter does."""
    writer = ShardWriter(path, tokenizer=tokenizer, tokenizer_hash=tokenizer_hash, vocab_size=vocab_size)
    try:
        writer.append(tokens)
        writer.close()
    except BaseException:
        writer.abandon()
        path.with_name(f".{path.name}.partial").unlink(missing_ok=True)
        raise


def _after_ends(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
    return np.flatnonzero(tokens == end_of_text) + 1


@dataclass(frozen=True)
class Shard:
    """A shard that was checked to be whole. A foreign one records no tokenizer and no documents."""

    path: Path
    dtype: np.dtype[Any]
    start: int  # byte at which the tokens begin
    n_tokens: int
    n_documents: int | None
    max_id: int
    tokenizer: str | None
    tokenizer_hash: str | None
    sha256: str

    def open(self) -> File:
        return File(self.path)

    def tokens(self, file: File, start: int = 0, count: int | None = None) -> np.ndarray:
        """Tokens [start, start + count), or all, in the width of the shard."""
        width = self.dtype.itemsize
        size = (self.n_tokens - start if count is None else count) * width
        return np.frombuffer(file.read(self.start + start * width, size), self.dtype)

    def chunks(self) -> Iterator[np.ndarray]:
        """All tokens in order, some millions at a time."""
        file = self.open()
        for start in range(0, self.n_tokens, CHUNK):
            yield self.tokens(file, start, min(CHUNK, self.n_tokens - start))

    def document_starts(self, end_of_text: int) -> np.ndarray:
        """Where documents begin, (documents,) int64. In a foreign shard: at 0 and after each end-of-text id."""
        if self.n_documents is not None:
            begin = self.start + self.n_tokens * self.dtype.itemsize
            return np.frombuffer(self.open().read(begin, 8 * self.n_documents), "<i8")
        starts, done = [np.zeros(1, np.int64)], 0
        for chunk in self.chunks():
            starts.append(_after_ends(chunk, end_of_text) + done)
            done += len(chunk)
        joined = np.concatenate(starts)
        return joined[joined < self.n_tokens]

    def verify(self, also: Callable[[np.ndarray], None] | None = None) -> None:
        """Re-read every byte, calling `also` with each chunk of tokens on the way.

        Raises UserError when the checksum differs from the recorded one. A foreign file records none.
        """
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk.data)
            if also:
                also(chunk)
        if self.tokenizer is None:
            return
        digest.update(self.document_starts(0).data)
        if digest.hexdigest() != self.sha256:
            raise UserError(
                f"{self.path}: damaged, its checksum differs; delete the folder and prepare it again"
            )


def open_shard(path: Path) -> Shard:
    """Open a shard of any known format. Raises UserError when it is missing, cut short or not a shard."""
    try:
        size = path.stat().st_size
        with open(path, "rb", buffering=HEADER_BYTES) as file:
            head = file.read(16)
            if head[:8] == MAGIC:
                return _open_own(path, size, file.read(min(int.from_bytes(head[8:], "little"), size)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not a readable shard ({error}); delete it and prepare the data again"
        ) from None
    if (path.parent / "meta.json").exists():
        raise UserError(
            f"{path}: damaged, its first bytes are not a shard's; delete the folder and prepare it again"
        )
    start, max_id, sha256 = foreign.scan(path, size)
    return Shard(path, foreign.DTYPE, start, (size - start) // 2, None, max_id, None, None, sha256)


def _open_own(path: Path, size: int, encoded: bytes) -> Shard:
    header = json.loads(encoded)
    dtype, n_tokens, n_documents = np.dtype(header["dtype"]), int(header["tokens"]), int(header["documents"])
    start = -(-(16 + len(encoded)) // 64) * 64
    if dtype.str not in {"<u2", "<u4"}:
        raise ValueError(f"dtype {dtype.str}")
    promised = start + n_tokens * dtype.itemsize + 8 * n_documents
    if size != promised:
        raise ValueError(f"{size:,} bytes, its header promises {promised:,}")
    return Shard(
        path,
        dtype,
        start,
        n_tokens,
        n_documents,
        int(header["max_id"]),
        str(header["tokenizer"]),
        str(header["tokenizer_hash"]),
        str(header["sha256"]),
    )
