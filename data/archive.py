"""Documents in .tar archives, and in the .xz archives inside them, read as streams and never unpacked."""

from __future__ import annotations

import lzma
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data.pieces import LONGEST_RECORD, TOO_LONG, Document, Piece, reading
from data.text import BLOCK
from model.errors import UserError

BLOCK_OF_TAR = 512


@dataclass(frozen=True, kw_only=True)
class Members(Piece):
    """Members of a .tar, by name, place and size: .xz ones are each a tar of .txt, others are documents."""

    path: Path
    members: tuple[tuple[str, int, int], ...]

    def documents(self) -> Iterator[Document]:
        with reading(self.path), tarfile.open(self.path, "r:") as archive:
            for name, place, size in self.members:
                info = tarfile.TarInfo(name)
                info.offset_data, info.size = place, size
                content = archive.extractfile(info)
                assert content is not None
                try:
                    if name.endswith(".xz"):
                        yield from _documents_of_tar(_Ending(lzma.open(content)))
                    else:
                        yield content.read()
                except (lzma.LZMAError, EOFError, tarfile.TarError) as error:
                    raise UserError(
                        f"{self.path}: its member {name} is damaged ({error}); fetch the archive again"
                    ) from None


class _Ending:
    """A stream that remembers its last block: a whole .tar ends with blocks of zeros, one cut short may not."""

    def __init__(self, stream: BinaryIO | lzma.LZMAFile) -> None:
        self._stream, self._last = stream, b""

    def read(self, size: int) -> bytes:
        part = self._stream.read(size)
        self._last = (self._last + part)[-BLOCK_OF_TAR:]
        return part

    def check(self) -> None:
        while self.read(BLOCK):
            pass
        if self._last.strip(b"\0") or len(self._last) < BLOCK_OF_TAR:
            raise tarfile.ReadError("cut short")


def _documents_of_tar(file: _Ending) -> Iterator[Document]:
    with tarfile.open(fileobj=file, mode="r|") as archive:  # type: ignore[call-overload]
        for info in archive:
            if info.isfile() and info.name.endswith(".txt"):
                content = archive.extractfile(info)
                assert content is not None
                yield content.read() if info.size <= LONGEST_RECORD else TOO_LONG
    file.check()


def of_tar(file: Path) -> Iterator[Piece]:
    members: list[tuple[str, int, int]] = []
    size = 0
    try:
        with reading(file), tarfile.open(file, "r:") as archive:
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
        with reading(file), open(file, "rb") as raw:
            raw.seek(-BLOCK_OF_TAR, 2)
            _Ending(raw).check()
    except tarfile.TarError as error:
        raise UserError(f"{file}: damaged ({error}); fetch it again") from None
    if members:
        yield Members(size=size, path=file, members=tuple(members))
