"""One small corpus in every format that is read, and shards back as text."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import archive, parquet, readers, sources, tokenizer
from data.loader import TokenStream
from data.sources import DataConfig, find

_RANDOM = np.random.default_rng(7)
_WORDS = ["in", "the", "beginning", "God", "created", "heaven", "and", "earth", "it's", "1,000"]
_WORDS += ["été", "日本語", "🙂", "<|endoftext|>", "\n", "\n\n"]
DOCUMENTS = [
    " ".join(_RANDOM.choice(_WORDS, size=int(_RANDOM.integers(5, 200)))) + f" end of document {i}"
    for i in range(120)
]


def json_lines() -> bytes:
    return "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(DOCUMENTS)).encode()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def archive_of_archives(documents: list[str], per_member: int = 7) -> bytes:
    """As OpenWebText was published: a .tar of .xz, each a tar of .txt."""
    outer = io.BytesIO()
    with tarfile.open(fileobj=outer, mode="w") as archive:
        _add(archive, "openwebtext/README", b"not a document")
        for start in range(0, len(documents), per_member):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as part:
                for i, text in enumerate(documents[start : start + per_member]):
                    _add(part, f"{start + i:07d}-abc.txt", text.encode())
            _add(
                archive,
                f"openwebtext/urlsf_subset00-{start}_data.xz",
                lzma.compress(inner.getvalue(), preset=0),
            )
    return outer.getvalue()


def write(path: Path, kind: str) -> Path:
    """The corpus below `path` as `kind`; returns what to give as data.path."""
    path.mkdir(parents=True, exist_ok=True)
    if kind in {"txt", "md"}:
        for i, text in enumerate(DOCUMENTS):
            (path / f"{i:04d}.{kind}").write_text(text, encoding="utf-8")
        return path
    file = path / f"corpus.{kind}"
    if kind == "jsonl":
        file.write_bytes(json_lines())
    elif kind == "jsonl.gz":
        half = len(json_lines()) // 2  # two gzip members in a row, as `cat a.gz b.gz` makes them
        file.write_bytes(gzip.compress(json_lines()[:half]) + gzip.compress(json_lines()[half:]))
    elif kind == "jsonl.zst":
        file.write_bytes(pa.Codec("zstd").compress(json_lines(), asbytes=True))
    elif kind == "parquet":
        pq.write_table(pa.table({"id": range(len(DOCUMENTS)), "text": DOCUMENTS}), file, row_group_size=50)
    elif kind == "tar":
        file.write_bytes(archive_of_archives(DOCUMENTS))
    return file


KINDS = ["txt", "md", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "tar"]


def texts(folder: Path, split: str, tokenizer_name: str = "bytes") -> list[str]:
    """The documents of a split, decoded from its shards; asserts that each ends with one end-of-text."""
    encoding = tokenizer.load(tokenizer_name)
    stream = TokenStream(folder, split)
    starts, lengths = stream.documents(encoding.eot_token)
    found = []
    for start, length in zip(starts, lengths, strict=True):
        tokens = stream.read(int(start), int(length)).tolist()
        assert tokens.index(encoding.eot_token) == len(tokens) - 1
        found.append(encoding.decode(tokens[:-1]))
    return found


def kjv() -> dict[str, list[bytes]]:
    """The books of the default corpus by split."""
    pieces = find(DataConfig(source="kjv")).pieces(Path())
    return {str(piece.split): [d for d in piece.documents() if isinstance(d, bytes)] for piece in pieces}


def set_block(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Make pieces of `size` bytes, so that a small corpus has many."""
    for module in (archive, parquet, readers, sources):
        monkeypatch.setattr(module, "BLOCK", size)
