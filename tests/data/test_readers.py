"""Every format gives the same documents, in pieces of any size; damage and odd records are named."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import readers, text, tokenizer
from data.encode import encode
from data.pieces import NO_TEXT, NOT_JSON, TOO_LONG
from data.sources import DataConfig, find
from model.config import UserError
from tests.data import corpus


def documents(path: Path, text_key: str = "text") -> list[bytes | str]:
    source = find(DataConfig(source="text", path=str(path), text_key=text_key))
    return [document for piece in source.pieces(path) for document in piece.documents()]


@pytest.mark.parametrize("block", [700, 5000, readers.BLOCK])
@pytest.mark.parametrize("kind", corpus.KINDS)
def test_every_format_gives_the_same_documents(
    tmp_path: Path, kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.set_block(monkeypatch, block)
    path = corpus.write(tmp_path, kind)
    source = find(DataConfig(source="text", path=str(path)))
    pieces = list(source.pieces(tmp_path))
    found = [document for piece in pieces for document in piece.documents()]
    if kind in {"txt", "md"} and block == 700:  # larger files come in parts
        assert b"".join(d for d in found if isinstance(d, bytes)) == "".join(corpus.DOCUMENTS).encode()
    else:
        assert found == [document.encode() for document in corpus.DOCUMENTS]
    assert len(pieces) > (10 if block == 700 else 3) or block == readers.BLOCK
    assert source.size is not None and 0.5 * source.size <= sum(p.size for p in pieces) <= 1.01 * source.size


def test_long_text_in_parts_has_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = "\n".join(corpus.DOCUMENTS)
    (tmp_path / "a.txt").write_text(whole)
    source = find(DataConfig(source="text", path=str(tmp_path / "a.txt")))
    monkeypatch.setattr(text, "BLOCK", 3000)
    (one,) = [encode(piece, tokenizer.load("gpt2"), 0.5) for piece in source.pieces(tmp_path)]
    corpus.set_block(monkeypatch, 3000)
    parts = [encode(piece, tokenizer.load("gpt2"), 0.5) for piece in source.pieces(tmp_path)]
    (split,) = one.tokens
    assert len(parts) > 10 and all(list(part.tokens) == [split] for part in parts)
    assert [i for part in parts for i in part.tokens[split].tolist()] == one.tokens[split].tolist()
    assert sum(part.counts["documents"] for part in parts) == 1 == one.counts["documents"]
    assert sum(part.counts["bytes"] for part in parts) == len(whole.encode())


def test_json_records_that_are_no_text_are_told_apart(tmp_path: Path) -> None:
    lines = [
        b'{"text": "plain"}',
        b"not json",
        b"",
        b'{"other": "x"}',
        b'{"text": null}',
        b'{"text": 7}',
        b'["text"]',
        b'{"text": "half \\ud83d pair"}',
        b'{"text": "caf\xe9"}',
        b'{"text": "\\u65e5 \\ud83d\\ude42"}\r',
        b'{"text": "' + b"[" * 9 + b'"}',
        b"[" * 200_000,
        b'{"text": "last, without a line end"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    assert documents(tmp_path) == [
        b"plain",
        NOT_JSON,
        NO_TEXT,
        NO_TEXT,
        NO_TEXT,
        NOT_JSON,
        b"half \xed\xa0\xbd pair",
        b"caf\xe9",
        "日 🙂".encode(),
        b"[" * 9,
        NOT_JSON,
        b"last, without a line end",
    ]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst"])
def test_record_beyond_the_limit_is_counted_once_and_costs_no_other(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LONGEST_RECORD", 1000)
    corpus.set_block(monkeypatch, 300)
    texts = ["first", "x" * 50_000, "second", "y" * 900, "z" * 1200, "third"]
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    path = tmp_path / f"a.{kind}"
    path.write_bytes(lines if kind == "jsonl" else pa.Codec("zstd").compress(lines, asbytes=True))
    assert documents(path) == [b"first", TOO_LONG, b"second", b"y" * 900, TOO_LONG, b"third"]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_parquet_columns_of_any_text_type_and_their_nulls(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(["a", None, "é", "a"], pa.string()).cast(kind)
    meta = pa.array([{"text": 1}] * 4)  # a nested column before it, whose leaves count in the file's order
    pq.write_table(pa.table({"meta": meta, "text": column}), tmp_path / "a.parquet", row_group_size=3)
    assert documents(tmp_path) == [b"a", NO_TEXT, "é".encode(), b"a"]


def test_wrong_text_key_is_refused_with_the_right_ones(tmp_path: Path) -> None:
    for kind in ("jsonl", "jsonl.gz", "parquet"):
        path = corpus.write(tmp_path / kind, kind)
        with pytest.raises(UserError, match=r"give data.text_key= one of: text"):
            documents(path, "content")


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "tar"])
@pytest.mark.parametrize("part", [0.5, 0.95])
def test_file_cut_short_is_an_error_that_names_it(tmp_path: Path, kind: str, part: float) -> None:
    path = corpus.write(tmp_path, kind)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content.rstrip(b"\0")) * part)])
    with pytest.raises(UserError, match=f"corpus.{kind}: .*fetch"):
        documents(path)


def test_damaged_member_of_an_archive_is_named(tmp_path: Path) -> None:
    path = corpus.write(tmp_path, "tar")
    content = bytearray(path.read_bytes())
    at = content.index(b"\xfd7zXZ")
    content[at + 40 : at + 60] = bytes(20)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"its member openwebtext/urlsf_subset00-0_data.xz is damaged"):
        documents(path)


def test_archive_is_read_without_unpacking_it(tmp_path: Path) -> None:
    path = corpus.write(tmp_path, "tar")
    assert len(documents(path)) == len(corpus.DOCUMENTS)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("cut", [0, 300])
def test_archive_cut_between_members_is_an_error(tmp_path: Path, inner: bool, cut: int) -> None:
    """A .tar ends with blocks of zeros; cut at or in a header, tarfile takes what is there for the whole."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for i in range(20):
            info = tarfile.TarInfo(f"{i}.txt")
            info.size = 100
            archive.addfile(info, io.BytesIO(b"x" * 100))
    short = content.getvalue()[: 1024 * 10 + cut]
    if inner:
        member = lzma.compress(short)
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            info = tarfile.TarInfo("part.xz")
            info.size = len(member)
            archive.addfile(info, io.BytesIO(member))
        short = content.getvalue()
    (tmp_path / "a.tar").write_bytes(short)
    with pytest.raises(UserError, match=r"a.tar: .*(cut short|truncated|unexpected end|bad)"):
        documents(tmp_path)


@pytest.mark.parametrize("value", [["x"], {"a": "x"}, 7], ids=str)
def test_parquet_column_that_is_no_text_is_refused(tmp_path: Path, value: object) -> None:
    pq.write_table(pa.table({"text": [value], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="no column of text named text; give data.text_key= one of: body"):
        documents(tmp_path)


def test_damage_inside_a_parquet_file_names_it(tmp_path: Path) -> None:
    path = corpus.write(tmp_path, "parquet")
    content = bytearray(path.read_bytes())
    content[2000:6000] = bytes(range(250)) * 16
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"corpus.parquet: not readable, or damaged"):
        documents(path)


def test_one_endless_line_is_gone_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.set_block(monkeypatch, 1000)
    monkeypatch.setattr(readers, "LONGEST_RECORD", 2000)
    (tmp_path / "a.jsonl").write_bytes(b"[" + b"1," * 200_000 + b"1]")
    source = find(DataConfig(source="text", path=str(tmp_path / "a.jsonl")))
    pieces = list(source.pieces(tmp_path))
    sizes: list[int] = []
    real = open

    class Counting:
        def __init__(self, path: Path, mode: str) -> None:
            self.file = real(path, mode)

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def readline(self, size: int) -> bytes:
            line: bytes = self.file.readline(size)
            sizes.append(len(line))
            return line

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    monkeypatch.setattr(readers, "open", Counting, raising=False)
    assert [d for piece in pieces for d in piece.documents()] == [TOO_LONG]
    assert sum(sizes) < 3 * 400_000
