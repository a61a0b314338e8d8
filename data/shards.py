"""Token shards that describe themselves.

Layout: 8 bytes magic, 8 bytes length of the JSON header, the header, padding to 64 bytes, the tokens, then
one int64 offset per document. The header says dtype, counts, tokenizer and the sha256 of all that follows.
Every document ends with the tokenizer's end-of-text id, which is its last and occurs nowhere else, so the tokens
themselves tell where documents begin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data import foreign
from data.files import File, parse_json
from model.errors import UserError

MAGIC = b"ORDINAL1"
HEADER_BYTES = 1024  # reserved by the writer, which knows the counts and the checksum only at the end
LARGEST_HEADER = 1 << 20
CHUNK = 1 << 22  # tokens read at a time where a whole shard is read


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest of uint16 and uint32 that holds ids 0 .. vocab_size - 1."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def after_ends(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
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
            recorded = np.frombuffer(self.open().read(begin, 8 * self.n_documents), "<i8")
            if (
                not len(recorded)
                or recorded[0]
                or (np.diff(recorded) <= 0).any()
                or recorded[-1] >= self.n_tokens
            ):
                raise UserError(
                    f"{self.path}: damaged, its documents do not lie in its tokens; prepare it again"
                )
            return recorded
        starts, done = [np.zeros(1, np.int64)], 0
        for chunk in self.chunks():
            starts.append(after_ends(chunk, end_of_text) + done)
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
                return _open_own(
                    path, size, file.read(min(int.from_bytes(head[8:], "little"), LARGEST_HEADER))
                )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
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
    header = parse_json(encoded)
    n_tokens, n_documents, max_id = (header[key] for key in ("tokens", "documents", "max_id"))
    if not all(type(count) is int and count >= 0 for count in (n_tokens, n_documents, max_id)):
        raise ValueError("its header holds no counts")
    if header["dtype"] not in {"<u2", "<u4"}:
        raise ValueError("its header has no width of ids")
    dtype = np.dtype(header["dtype"])
    start = -(-(16 + len(encoded)) // 64) * 64
    promised = start + n_tokens * dtype.itemsize + 8 * n_documents
    if size != promised:
        raise ValueError(f"{size:,} bytes, its header promises {promised:,}")
    return Shard(
        path,
        dtype,
        start,
        n_tokens,
        n_documents,
        max_id,
        str(header["tokenizer"]),
        str(header["tokenizer_hash"]),
        str(header["sha256"]),
    )


def check_complete(folder: Path) -> None:
    """Raises UserError when a shard that the folder's meta.json lists is missing, or is another than it was."""
    try:
        listed = parse_json((folder / "meta.json").read_text())["shards"]
        wanted = {str(name): str(sha256) for name, sha256 in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # shards from elsewhere have no list
    found = {path.name: open_shard(path).sha256 for path in folder.glob("*.bin")}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            what = (
                "missing"
                if name not in found
                else "not listed"
                if name not in wanted
                else "another than it was"
            )
            raise UserError(f"{folder / name}: {what}; delete the folder and prepare it again")
