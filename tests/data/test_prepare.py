"""What the shards of a preparation hold, and that nothing odd in a text is fatal."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from data import text, tokenizer
from data.encode import encode
from data.loader import TokenStream
from data.prepare import prepare
from data.shards import open_shard
from data.sources import DataConfig, find
from model.config import UserError
from tests.data import corpus
from tests.data.preparing import (
    config,
    digests,
    report,
    run,
    silent,
)


def test_each_document_is_in_one_split_once_with_one_end_of_text(tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    said: list[str] = []
    folder = prepare(config(source, tmp_path / "out"), "bytes", said.append)
    train, val = corpus.texts(folder, "train"), corpus.texts(folder, "val")
    assert sorted(train + val) == sorted(corpus.DOCUMENTS) and len(val) in range(10, 40)
    assert train == [text for text in corpus.DOCUMENTS if text in set(train)]  # in their order
    assert any("<|endoftext|>" in document for document in train)
    assert set(digests(folder)) == {"meta.json", "train-00000.bin", "val-00000.bin"}
    n_said = len(said)
    assert prepare(config(source, tmp_path / "out"), "bytes", said.append) == folder and len(said) == n_said


def test_split_neither_moves_when_data_is_added_nor_parts_duplicates(tmp_path: Path) -> None:
    lines = [f"document {i % 25}" for i in range(50)]
    found: dict[str, set[str]] = {}
    for n in (50, 70):
        more = [f"document {i}" for i in range(25, 25 + n - 50)]
        file = tmp_path / f"{n}.jsonl"
        file.write_text("".join(json.dumps({"text": line}) + "\n" for line in [*more, *lines]))
        folder = prepare(config(file, tmp_path / f"out{n}"), "bytes", silent)
        train, val = corpus.texts(folder, "train"), corpus.texts(folder, "val")
        assert not set(train) & set(val) and len(train) + len(val) == n
        assert all(found[document] == "val" for document in val if document in found)
        assert all(found[document] == "train" for document in train if document in found)
        found |= dict.fromkeys(train, "train") | dict.fromkeys(val, "val")


@pytest.mark.parametrize("shard_tokens", [1, 500, 5000])
def test_shards_end_with_the_document_that_fills_them(tmp_path: Path, shard_tokens: int) -> None:
    source = corpus.write(tmp_path / "source", "parquet")
    folder = prepare(config(source, tmp_path / "out", shard_tokens=shard_tokens), "gpt2_2k", silent)
    one = prepare(config(source, tmp_path / "one"), "gpt2_2k", silent)
    paths = sorted(folder.glob("train-*.bin"))
    assert len(paths) > 3
    for path in paths:
        shard = open_shard(path)
        starts = shard.document_starts(0)
        assert shard.n_tokens >= shard_tokens or path == paths[-1]
        assert starts[-1] < shard_tokens  # without its last document it is not full
        assert shard.tokens(shard.open())[-1] == 2048
        shard.verify()
    assert corpus.texts(folder, "train", "gpt2_2k") == corpus.texts(one, "train", "gpt2_2k")


def test_odd_documents_are_left_out_and_counted_and_the_others_intact(tmp_path: Path) -> None:
    documents = [b"one", b"", b" \n\t", "caf\xe9 au lait, café, and more of the same".encode("latin-1")]
    documents += [b"two", b"\xff\xfe" * 50, b"x<|endoftext|>y", bytes(50)]
    source = tmp_path / "source"
    source.mkdir()
    for i, document in enumerate(documents):
        (source / f"{i}.txt").write_bytes(document)
    said: list[str] = []
    folder = prepare(config(source, tmp_path / "out", val_fraction=0.5), "bytes", said.append)
    found = corpus.texts(folder, "train") + corpus.texts(folder, "val")
    assert sorted(found) == ["one", "two", "x<|endoftext|>y"]
    assert report(folder)["left_out"] == {"empty": 2, "not UTF-8": 3}
    assert any("Left out 5 documents" in line and "2 empty, 3 not UTF-8" in line for line in said)


def test_invalid_bytes_in_a_text_are_replaced_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a long enough line of text \xff\n" * 30)
    (tmp_path / "b.txt").write_bytes(
        b"a long enough line of text of more than a hundred bytes, so that one "
        b"that is not valid is a slip: \xff\n" * 3
    )
    said: list[str] = []
    folder = prepare(config(tmp_path / "*.txt", tmp_path / "out"), "bytes", said.append)
    assert report(folder)["counts"]["repaired"] == 1 and report(folder)["left_out"] == {"not UTF-8": 1}
    assert any("U+FFFD in 1 document (or 4 MB parts)" in line for line in said)


@pytest.mark.parametrize("name", ["gpt2", "gpt2_2k"])
def test_runs_on_which_tiktoken_panics_are_cut_and_keep_their_text(tmp_path: Path, name: str) -> None:
    runs = [
        "normal one",
        "\n" * 1_200_000 + "x",
        "a" * 2_000_000,
        "y" + " " * 1_000_000,
        " \n" * 600_000 + "z",
    ]
    runs += ["normal two", "\t" * 1_000_001 + "x"]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": run}) + "\n" for run in runs))
    said: list[str] = []
    began = time.monotonic()
    folder = prepare(config(file, tmp_path / "out"), name, said.append)
    assert time.monotonic() - began < 60
    assert sorted(corpus.texts(folder, "train", name) + corpus.texts(folder, "val", name)) == sorted(runs)
    assert report(folder)["counts"]["cut"] == 5 and report(folder)["left_out"] == {}
    assert any("Cut 5 documents" in line and "no text was lost" in line for line in said)


def test_document_on_which_the_tokenizer_panics_all_the_same_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "CHUNK", 1 << 30)  # hand tiktoken the whole run
    file = tmp_path / "a.jsonl"
    normal = [f"normal {i}" for i in range(10)]
    runs = [*normal[:5], "\n" * 1_200_000 + "x", *normal[5:]]
    file.write_text("".join(json.dumps({"text": run}) + "\n" for run in runs))
    folder = prepare(config(file, tmp_path / "out", val_fraction=0.5), "gpt2_2k", silent)
    found = corpus.texts(folder, "train", "gpt2_2k") + corpus.texts(folder, "val", "gpt2_2k")
    assert sorted(found) == normal
    assert report(folder)["left_out"] == {"tokenizer failed": 1}


def test_standard_input_is_prepared_once(tmp_path: Path) -> None:
    arguments = ["data=text", "data.path=-", "tokenizer=bytes", "data.val_fraction=0.2"]
    run(*arguments, cwd=tmp_path, input=corpus.json_lines().decode())
    folder = tmp_path / "shards/stdin-bytes"
    assert sorted(corpus.texts(folder, "train") + corpus.texts(folder, "val")) == sorted(corpus.DOCUMENTS)
    again = run(*arguments, cwd=tmp_path, input="other text", code=2)
    assert "whether it holds this standard input cannot be told; give data.out=" in again.stderr
    empty = run(*arguments, "data.out=empty", cwd=tmp_path, input="", code=2)
    assert "no document to train on" in empty.stderr and not (tmp_path / "empty").exists()


@pytest.mark.parametrize("shard_tokens", [200, 100_000])
@pytest.mark.parametrize("val_fraction", [0.1, 0.999])
def test_end_of_a_single_text_is_held_out_behind_a_line(
    tmp_path: Path, shard_tokens: int, val_fraction: float
) -> None:
    whole = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "one.txt").write_text(whole)
    folder = prepare(
        config(tmp_path / "one.txt", tmp_path / "out", val_fraction=val_fraction, shard_tokens=shard_tokens),
        "bytes",
        silent,
    )
    (train,), (val,) = corpus.texts(folder, "train"), corpus.texts(folder, "val")
    assert train + val == whole and train.endswith("\n")
    assert abs(len(val) / len(whole) - val_fraction) < 0.06
    counts = report(folder)["counts"]
    assert counts["train"] == len(train) + 1 and counts["val"] == len(val) + 1
    assert len(digests(folder)) == 3


def test_of_few_texts_the_longest_gives_its_end(tmp_path: Path) -> None:
    texts = [f"{i}\n" + "word " * 500 * (i + 1) for i in range(3)]
    for i, whole in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(whole)
    folder = prepare(config(tmp_path / "*.txt", tmp_path / "out", val_fraction=0.001), "gpt2_2k", silent)
    train, val = corpus.texts(folder, "train", "gpt2_2k"), corpus.texts(folder, "val", "gpt2_2k")
    assert train[:2] == texts[:2] and train[2] + val[0] == texts[2] and 0 < len(val[0]) < 50
    assert [shard.n_documents for shard in TokenStream(folder, "train").shards] == [3]


def test_text_of_nothing_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for content in ("", " \n"):
        (tmp_path / "a.txt").write_text(content)
        with pytest.raises(UserError, match="no document to train on .1 document: 1 empty"):
            prepare(config(tmp_path / "a.txt", tmp_path / "out"), "bytes", silent)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="too short to hold a part of it out"):
        prepare(config(tmp_path / "a.txt", tmp_path / "out"), "bytes", silent)
    assert not (tmp_path / "out").exists()


def test_held_out_end_is_not_that_of_a_text_with_copies(tmp_path: Path) -> None:
    copies, single = "twice " * 400, "once\n" * 100
    for i, whole in enumerate((copies, single, copies)):
        (tmp_path / f"{i}.txt").write_text(whole)
    for n in range(1, 100):  # a fraction with which nothing would be held out
        if all(text.share(t.encode()) > 0.5 / n for t in (copies, single)):
            break
    folder = prepare(config(tmp_path / "*.txt", tmp_path / "out", val_fraction=0.5 / n), "bytes", silent)
    assert corpus.texts(folder, "val")[0] in single and corpus.texts(folder, "train").count(copies) == 2
    (tmp_path / "1.txt").write_text(copies)
    with pytest.raises(UserError, match="every document is there more than once"):
        prepare(config(tmp_path / "*.txt", tmp_path / "none", val_fraction=0.5 / n), "bytes", silent)


def test_long_texts_are_held_to_the_same_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.set_block(monkeypatch, 1000)
    mark = "\N{ZERO WIDTH NO-BREAK SPACE}"
    fine = "a line of some words\n" * 100
    contents = {
        "white.txt": b" \n" * 2000,
        "noise.txt": fine.encode() + bytes(range(128, 256)) * 40,
        "marks.txt": (mark + (mark * 3 + " word ") * 800).encode(),
    }
    found = {}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        done = [
            encode(piece, tokenizer.load("bytes"), 0.5)
            for piece in find(DataConfig(source="text", path=str(tmp_path / name))).pieces(tmp_path)
        ]
        tokens = [i for part in done for array in part.tokens.values() for i in array.tolist()]
        found[name] = tokens, Counter(reason for part in done for reason in part.left_out)
    assert found["white.txt"] == ([], {"empty": 1})
    tokens, left_out = found["noise.txt"]
    assert left_out["part not UTF-8"] >= 4 and tokens.count(256) == 1 and tokens[-1] == 256
    assert bytes(tokens[:1900]) == fine.encode()[:1900] and len(tokens) < len(fine) + 1500
    tokens, _ = found["marks.txt"]
    assert bytes(tokens[:-1]) == contents["marks.txt"].removeprefix(mark.encode())
