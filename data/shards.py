"""Token shards that describe themselves, and those of nanoGPT and llm.c.

Layout: 8 bytes magic, 8 bytes length of the JSON header, the header, padding to 64 bytes, the tokens, then
one int64 offset per document. The header says dtype, counts, tokenizer and the sha256 of all that follows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.config import UserError

MAGIC = b"ORDINAL1"
LLMC_MAGIC = 20240520  # llm.c and modded-nanogpt: 256 int32, of which magic, version, token count
LLMC_HEADER_BYTES = 1024


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file so that a kill or a full disk leaves either the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest of uint16 and uint32 that holds ids 0 .. vocab_size - 1."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def write_shard(
    path: Path,
    documents: Sequence[Sequence[int] | np.ndarray],
    *,
    tokenizer: str,
    tokenizer_hash: str,
    vocab_size: int,
) -> None:
    """Write token documents, each already ended by its end-of-text id, as one shard.

    Raises UserError when an id does not fit the vocabulary.
    """
    wide = [np.asarray(document, dtype=np.int64) for document in documents]
    tokens = np.concatenate(wide) if wide else np.zeros(0, np.int64)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise UserError(
            f"{path}: token ids {tokens.min()}..{tokens.max()} do not fit vocab_size={vocab_size}"
        )
    dtype = token_dtype(vocab_size)
    offsets = np.cumsum([0, *(len(document) for document in wide)], dtype="<i8")[:-1]
    payload = tokens.astype(dtype).tobytes() + offsets.tobytes()
    header = {
        "version": 1,
        "dtype": dtype.str,
        "tokens": int(tokens.size),
        "documents": len(wide),
        "tokenizer": tokenizer,
        "tokenizer_hash": tokenizer_hash,
        "vocab_size": vocab_size,
        "max_id": int(tokens.max(initial=0)),
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    encoded = json.dumps(header).encode()
    start = -(-(16 + len(encoded)) // 64) * 64
    head = MAGIC + len(encoded).to_bytes(8, "little") + encoded
    write_atomically(path, head.ljust(start, b"\0") + payload)


@dataclass(frozen=True)
class Shard:
    """An opened shard. `tokenizer` is None for a foreign file, which does not record one."""

    path: Path
    tokens: np.ndarray  # read-only memory map
    offsets: np.ndarray  # (documents,) start of each document; empty when unknown
    max_id: int
    tokenizer: str | None
    tokenizer_hash: str | None
    sha256: str

    def verify(self) -> None:
        """Re-read every byte. Raises UserError when the checksum differs from the recorded one.

        A foreign file records none; there is nothing to compare it with.
        """
        actual = hashlib.sha256(self.tokens.tobytes() + self.offsets.tobytes()).hexdigest()
        if self.tokenizer is not None and actual != self.sha256:
            raise UserError(
                f"{self.path}: damaged, its checksum differs; delete the folder and prepare it again"
            )


def open_shard(path: Path) -> Shard:
    """Map a shard of any known format. Raises UserError when it is missing, cut short or not a shard."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(16)
            if head[:8] == MAGIC:
                return _open_own(path, size, head, file.read(min(int.from_bytes(head[8:], "little"), size)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not a readable shard ({error}); delete it and prepare the data again"
        ) from None
    if (path.parent / "meta.json").exists():
        raise UserError(
            f"{path}: damaged, its first bytes are not a shard's; delete the folder and prepare it again"
        )
    return _open_foreign(path, size)


def _open_own(path: Path, size: int, head: bytes, encoded: bytes) -> Shard:
    header = json.loads(encoded)
    dtype, n_tokens, n_documents = np.dtype(header["dtype"]), int(header["tokens"]), int(header["documents"])
    start = -(-(16 + len(encoded)) // 64) * 64
    tokens_end = start + n_tokens * dtype.itemsize
    if size != tokens_end + 8 * n_documents:
        raise ValueError(f"{size:,} bytes, its header promises {tokens_end + 8 * n_documents:,}")
    if dtype.str not in {"<u2", "<u4"}:
        raise ValueError(f"dtype {dtype.str}")
    return Shard(
        path,
        _map(path, dtype, start, n_tokens),
        _map(path, np.dtype("<i8"), tokens_end, n_documents),
        int(header["max_id"]),
        str(header["tokenizer"]),
        str(header["tokenizer_hash"]),
        str(header["sha256"]),
    )


def _open_foreign(path: Path, size: int) -> Shard:
    header = np.fromfile(path, dtype="<i4", count=3)
    start = 0
    if header.size == 3 and header[0] == LLMC_MAGIC:
        start = LLMC_HEADER_BYTES
        if size != start + 2 * int(header[2]):
            raise UserError(
                f"{path}: cut short, {size:,} bytes where its header promises {start + 2 * header[2]:,}"
            )
    if size % 2 or size <= start:
        raise UserError(
            f"{path}: {size:,} bytes is not a whole number of uint16 tokens; copy or prepare it again"
        )
    tokens = _map(path, np.dtype("<u2"), start, (size - start) // 2)
    max_id, digest = 0, hashlib.sha256()
    for i in range(0, len(tokens), 1 << 24):
        chunk = tokens[i : i + (1 << 24)]
        max_id = max(max_id, int(chunk.max()))
        digest.update(chunk.tobytes())
    return Shard(path, tokens, np.zeros(0, np.int64), max_id, None, None, digest.hexdigest())


def _map(path: Path, dtype: np.dtype[Any], start: int, count: int) -> np.ndarray:
    if count == 0:  # numpy cannot map nothing
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(count,))
