"""Which files a source is, and what is said when it is none."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from data import readers, text, tokenizer
from data.pieces import NOT_UTF8, Document
from data.sources import DataConfig, find
from model.config import UserError, validate
from tests.data import corpus


def documents(**config: object) -> list[Document]:
    source = find(validate(DataConfig, {"source": "text", **config}))
    return [document for piece in source.pieces(Path()) for document in piece.documents()]


def test_kjv_is_66_books_without_brackets_of_which_4_are_held_out() -> None:
    books = corpus.kjv()
    assert len(books["train"]) == 62 and len(books["val"]) == 4
    assert books["train"][0].startswith(b"In the beginning God created the heaven and the earth.")
    assert books["val"][0].startswith(b"Now there was a certain man of Ramathaim-zophim")
    everything = books["train"] + books["val"]
    assert not any(b"[" in book or b"]" in book for book in everything)
    assert sum(map(len, everything)) == pytest.approx(4.14e6, rel=2e-3)


def test_folder_is_searched_in_the_order_of_bytes_and_hidden_files_are_not_text(tmp_path: Path) -> None:
    for name in ("b.txt", "a/é.txt", "a/z.md", "Z.txt", ".hidden.txt", ".git/x.txt", "data.bin", "B.TXT"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()
    assert documents(path=str(tmp_path)) == [
        name.encode() for name in ("B.TXT", "Z.txt", "a/z.md", "a/é.txt", "b.txt")
    ]


def test_glob_and_single_file_of_any_name(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.log"):
        (tmp_path / name).write_text(name)
    assert documents(path=f"{tmp_path}/*.txt") == [b"a.txt", b"b.txt"]
    assert documents(path=f"{tmp_path}/c.log") == [b"c.log"]


def test_name_changes_with_the_text_and_not_with_the_folder(tmp_path: Path) -> None:
    def name(folder: str, **config: object) -> str:
        return find(validate(DataConfig, {"source": "text", "path": str(tmp_path / folder), **config})).name

    for folder in ("one", "two"):
        (tmp_path / folder / "books").mkdir(parents=True)
        (tmp_path / folder / "books/a.txt").write_text("hello")
        os.utime(tmp_path / folder / "books/a.txt", (1, 1))
    before = name("one/books")
    assert before.startswith("books-") and before == name("two/books")
    assert before != name("one/books", val_fraction=0.2)
    os.utime(tmp_path / "one/books/a.txt", (2, 2))
    assert before != name("one/books")
    (tmp_path / "two/books/b.txt").write_text("")
    assert before != name("two/books")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "kjv", "path": "books/"}, "data=kjv has no path; give data=text"),
        ({"source": "text"}, "data=text needs a text file, a folder, a glob, or -"),
        ({"source": "bin"}, "data=bin needs the folder"),
        ({"source": "text", "path": "x", "shards": 3}, "only data=openwebtext comes in numbered files"),
        ({"source": "text", "path": "x", "val_fraction": 0}, "data.val_fraction=0: expected greater than 0"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(DataConfig, values, prefix="data.")


def test_missing_text_is_refused_with_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    for path in (tmp_path / "absent.txt", tmp_path, tmp_path / "*.md"):
        with pytest.raises(UserError, match=r"no text file there; expected .* \.jsonl"):
            documents(path=str(path))


def test_local_openwebtext_takes_archives_and_parquet_alone(tmp_path: Path) -> None:
    for kind in ("tar", "parquet", "jsonl"):
        corpus.write(tmp_path, kind)
    (tmp_path / "README.md").write_text("a card")
    once = [document.encode() for document in corpus.DOCUMENTS]
    assert documents(source="openwebtext", path=str(tmp_path)) == once + once
    assert documents(source="openwebtext", path=str(tmp_path), shards=1) == once


@pytest.mark.parametrize("block", [3000, readers.BLOCK])
def test_standard_input_is_json_lines_or_one_text(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.set_block(monkeypatch, block)

    def given(content: bytes) -> list[Document]:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        return documents(path="-")

    assert given(corpus.json_lines()) == [document.encode() for document in corpus.DOCUMENTS]
    whole = "\n".join(corpus.DOCUMENTS).encode()
    found = given(whole)
    assert b"".join(d for d in found if isinstance(d, bytes)) == whole and (len(found) > 1) == (block == 3000)


@pytest.mark.parametrize("size", [100, 5000])
def test_file_that_is_no_utf8_is_left_out_whatever_its_size(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from data.encode import encode

    corpus.set_block(monkeypatch, 1000)
    monkeypatch.setattr(text, "BLOCK", 1000)
    kinds = {
        "latin.txt": ("é l'été " * size).encode("latin-1"),
        "wide.txt": ("plain text " * size).encode("utf-16"),
        "picture.txt": bytes(range(256)) * (size // 10),
    }
    for name, content in kinds.items():
        (tmp_path / name).write_bytes(content)
        source = find(DataConfig(source="text", path=str(tmp_path / name)))
        done = [encode(piece, tokenizer.load("bytes"), 0.5) for piece in source.pieces(tmp_path)]
        assert not any(piece.tokens for piece in done), name
        assert sum(piece.left_out.get(NOT_UTF8, 0) for piece in done) == 1, name


def test_standard_input_whose_first_line_is_long_or_blank_is_still_json_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus.set_block(monkeypatch, 1000)
    long = json.dumps({"text": "x" * 5000}).encode() + b"\n"
    for content in (long + corpus.json_lines(), b"\n \n" + long + corpus.json_lines()):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        assert documents(path="-") == [b"x" * 5000, *(text.encode() for text in corpus.DOCUMENTS)]
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(corpus.json_lines())))
    with pytest.raises(UserError, match="standard input: .* give data.text_key= one of: text"):
        documents(path="-", text_key="body")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        documents(path="-")


def test_first_record_without_text_does_not_condemn_the_file(tmp_path: Path) -> None:
    lines = b'{"text": null}\n{"id": 7}\n' + corpus.json_lines()
    (tmp_path / "a.jsonl").write_bytes(lines)
    assert documents(path=str(tmp_path))[2:] == [text.encode() for text in corpus.DOCUMENTS]


def test_pipes_and_dangling_links_in_a_folder_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert documents(path=str(tmp_path)) == [b"text"]


def test_glob_takes_a_file_once_however_links_lead_to_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert documents(path=f"{tmp_path}/**") == [b"text"]


def test_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(UserError, match=r"closed: not readable .*Permission denied"):
        documents(path=str(tmp_path))


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "tar"])
def test_names_that_are_no_utf8_are_read(tmp_path: Path, kind: str) -> None:
    path = corpus.write(tmp_path, kind)
    odd = os.path.join(os.fsencode(tmp_path), b"bad\xff." + kind.encode())
    try:
        os.rename(path, odd)
    except OSError:
        pytest.skip("a file system of Unicode names")
    assert documents(path=str(tmp_path)) == [text.encode() for text in corpus.DOCUMENTS]
