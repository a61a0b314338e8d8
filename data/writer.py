"""Tokens to shards, as they come: in bounded memory, and able to go on with what an earlier writer left."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from data.shards import CHUNK, HEADER_BYTES, MAGIC, after_ends, token_dtype
from data.text import Split
from model.errors import UserError


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
        self._starts.append(after_ends(tokens, self._vocab_size - 1) + self.n_tokens)
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


class SplitWriter:
    """The shards of one split; each ends with the document that fills it."""

    def __init__(
        self,
        folder: Path,
        split: Split,
        shard_tokens: int,
        *,
        tokenizer: str,
        tokenizer_hash: str,
        vocab_size: int,
    ) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._tokenizer, self._tokenizer_hash, self._vocab_size = tokenizer, tokenizer_hash, vocab_size
        self._index = 0
        self._writer: ShardWriter | None = None

    def _open(self, kept_tokens: int = 0) -> ShardWriter:
        return ShardWriter(
            self._folder / f"{self._split}-{self._index:05d}.bin",
            tokenizer=self._tokenizer,
            tokenizer_hash=self._tokenizer_hash,
            vocab_size=self._vocab_size,
            kept_tokens=kept_tokens,
        )

    def resume(self, index: int, tokens: int) -> None:
        self._index = index
        if tokens:
            self._writer = self._open(tokens)

    def append(self, tokens: np.ndarray) -> None:
        while len(tokens):
            self._writer = self._writer or self._open()
            room = max(self._shard_tokens - self._writer.n_tokens, 1)
            ends = np.flatnonzero(tokens[room - 1 :] == self._vocab_size - 1)
            end = room + int(ends[0]) if len(ends) else len(tokens)
            self._writer.append(tokens[:end])
            tokens = tokens[end:]
            if len(ends):
                self.close()

    def sync(self) -> tuple[int, int]:
        """(index, tokens) of the shard at hand, all of it on the disk."""
        if self._writer is None:
            return self._index, 0
        self._writer.sync()
        return self._index, self._writer.n_tokens

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._index = None, self._index + 1

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
