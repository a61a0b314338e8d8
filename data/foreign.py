"""Shards that other programs wrote: nanoGPT's raw uint16, and those of llm.c and modded-nanogpt."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from data.files import parse_json, write_atomically
from model.errors import UserError

DTYPE = np.dtype("<u2")
LLMC_MAGIC = 20240520  # llm.c and modded-nanogpt: 256 int32, of which magic, version, token count
LLMC_HEADER_BYTES = 1024
SCANS = Path("shards") / ".scans"
CHUNK = 1 << 25  # bytes
LARGE = 1 << 30  # bytes that take more than two seconds to read


def scan(path: Path, size: int) -> tuple[int, int, str]:
    """(byte at which tokens begin, largest id, sha256 of the tokens) of a foreign shard of `size` bytes.

    Such a file records neither, so it is read once; the result is kept below shards/ while name, size and time
    of the file stay. Raises UserError when the file is not a whole number of uint16 tokens.
    """
    try:
        start = _token_start(path, size)
        stat = path.stat()
        key = hashlib.sha256(f"{path.resolve()}\n{size}\n{stat.st_mtime_ns}".encode()).hexdigest()[:32]
        kept = SCANS / f"{key}.json"
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = parse_json(kept.read_text())
            return start, int(found["max_id"]), str(found["sha256"])
        max_id, sha256 = _read_through(path, start, size)
    except OSError as error:
        raise UserError(f"{path}: not readable ({error})") from None
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps({"max_id": max_id, "sha256": sha256}).encode())
    return start, max_id, sha256


def _token_start(path: Path, size: int) -> int:
    header = np.fromfile(path, dtype="<i4", count=3)
    start = 0
    if header.size == 3 and header[0] == LLMC_MAGIC:
        start = LLMC_HEADER_BYTES
        if header[1] != 1:
            raise UserError(
                f"{path}: version {header[1]} of llm.c's format; expected 1, which is uint16 tokens"
            )
        if size != start + 2 * int(header[2]):
            raise UserError(
                f"{path}: cut short, {size:,} bytes where its header promises {start + 2 * int(header[2]):,}"
            )
    if size % 2 or size <= start:
        raise UserError(
            f"{path}: {size:,} bytes is not a whole number of uint16 tokens; copy or prepare it again"
        )
    return start


def _read_through(path: Path, start: int, size: int) -> tuple[int, str]:
    from rich.console import Console
    from rich.progress import track

    max_id, digest = 0, hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(start)
        steps = range(start, size, CHUNK)
        if size > LARGE:
            print(f"Reading {path} once, {size / 1e9:.1f} GB, for its largest id and a checksum", flush=True)
        for _ in track(steps, console=Console(file=sys.stderr), transient=True, disable=size <= LARGE):
            chunk = file.read(CHUNK)
            max_id = max(max_id, int(np.frombuffer(chunk, DTYPE).max()))
            digest.update(chunk)
    return max_id, digest.hexdigest()
