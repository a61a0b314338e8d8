"""The shard format, its damage, and the formats of others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data import foreign
from data.loader import TokenStream
from data.shards import open_shard, token_dtype
from data.writer import ShardWriter, write_shard
from model.config import UserError
from tests.conftest import CONTEXT, write_shards

RAMP = np.arange(2000) % 251


@pytest.mark.parametrize(("vocab_size", "width"), [(257, 2), (65536, 2), (65537, 4), (100277, 4)])
def test_ids_round_trip_in_the_narrowest_width(tmp_path: Path, vocab_size: int, width: int) -> None:
    ids = [0, 1, vocab_size - 1]
    write_shard(tmp_path / "a.bin", np.array(ids), tokenizer="t", tokenizer_hash="h", vocab_size=vocab_size)
    shard = open_shard(tmp_path / "a.bin")
    tokens = shard.tokens(shard.open())
    assert tokens.tolist() == ids and tokens.dtype == token_dtype(vocab_size)
    assert tokens.dtype.itemsize == width and shard.max_id == vocab_size - 1


def test_id_outside_the_vocabulary_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="do not fit"):
        write_shard(tmp_path / "a.bin", np.array([5, 300]), tokenizer="t", tokenizer_hash="h", vocab_size=257)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage", ["empty", "one byte short", "half", "header cut", "garbage header", "a folder"]
)
def test_damaged_shard_is_refused_naming_the_file(tmp_path: Path, damage: str) -> None:
    path = write_shards(tmp_path / "s", RAMP, RAMP) / "train-00000.bin"
    content = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    else:
        cut = {"empty": 0, "one byte short": len(content) - 1, "half": len(content) // 2, "header cut": 40}
        path.write_bytes(content[:16] + b"x" * 400 if damage == "garbage header" else content[: cut[damage]])
    with pytest.raises(UserError, match="train-00000.bin"):
        TokenStream(path.parent, "train")


def test_flipped_byte_is_found_by_verify(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "s", RAMP, RAMP) / "train-00000.bin"
    open_shard(path).verify()
    content = bytearray(path.read_bytes())
    content[-3000] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="checksum differs"):
        open_shard(path).verify()


def test_nanogpt_and_llmc_shards_are_read(tmp_path: Path) -> None:
    RAMP.astype("<u2").tofile(tmp_path / "train.bin")
    header = np.zeros(256, dtype="<i4")
    header[:3] = foreign.LLMC_MAGIC, 1, len(RAMP)
    (tmp_path / "val.bin").write_bytes(header.tobytes() + RAMP.astype("<u2").tobytes())
    for split in ("train", "val"):
        stream = TokenStream(tmp_path, split)
        assert stream.read(0, len(RAMP)).tolist() == RAMP.tolist()
        assert stream.bytes_per_token() is None


@pytest.mark.parametrize("content", [b"", b"\1\2\3"])
def test_raw_shard_that_is_no_uint16_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match="not a whole number of uint16"):
        TokenStream(tmp_path, "train")


def test_stream_reads_across_shards(tmp_path: Path) -> None:
    for i, part in enumerate((RAMP[:700], RAMP[700:701], RAMP[701:])):
        write_shard(
            tmp_path / f"train-0000{i}.bin", part, tokenizer="bytes", tokenizer_hash="h", vocab_size=257
        )
    stream = TokenStream(tmp_path, "train")
    assert stream.read(690, 20).tolist() == RAMP[690:710].tolist()
    assert stream.read(0, len(stream)).tolist() == RAMP.tolist()


def test_other_tokenizer_and_ids_above_the_vocabulary_are_refused(tmp_path: Path) -> None:
    stream = TokenStream(write_shards(tmp_path / "own", RAMP, RAMP), "train")
    with pytest.raises(UserError, match=r"made with tokenizer bytes, but tokenizer=gpt2_2k"):
        stream.check_fits("gpt2_2k", CONTEXT)
    raw = tmp_path / "raw"
    raw.mkdir()
    np.array([5, 3000] * 100, dtype="<u2").tofile(raw / "train.bin")
    with pytest.raises(UserError, match=r"token id 3000, but .* vocabulary of 2049"):
        TokenStream(raw, "train").check_fits("gpt2_2k", CONTEXT)


# --- writing as a stream -----------------------------------------------------------------------------------

META = {"tokenizer": "bytes", "tokenizer_hash": "h", "vocab_size": 257}


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("kept", [0, 1, 256, 257, 1000, 1999])
def test_writer_that_keeps_an_earlier_ones_tokens_ends_with_the_same_bytes(
    tmp_path: Path, kept: int, closed: bool
) -> None:
    tokens = np.arange(2000) * 7 % 257
    write_shard(tmp_path / "whole.bin", tokens, **META)
    first = ShardWriter(tmp_path / "a.bin", **META)
    first.append(tokens)
    first.append(np.array([3, 256, 5]))  # what came after the last journal entry
    first.sync()
    if closed:
        first.close()
    else:
        first.abandon()
    second = ShardWriter(tmp_path / "a.bin", **META, kept_tokens=kept)
    for start in range(kept, 2000, 300):
        second.append(tokens[start : start + 300])
    second.close()
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "whole.bin"}


def test_documents_begin_behind_each_end_of_text(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.array([1, 256, 256, 2, 3, 256]), **META)
    shard = open_shard(tmp_path / "a.bin")
    assert shard.document_starts(0).tolist() == [0, 2, 3] and shard.n_documents == 3
    write_shard(tmp_path / "b.bin", np.array([1, 256, 2]), **META)
    assert open_shard(tmp_path / "b.bin").document_starts(0).tolist() == [0, 2]
    shard.verify()


# --- what others wrote -------------------------------------------------------------------------------------


def llmc(tokens: np.ndarray, version: int = 1) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = foreign.LLMC_MAGIC, version, len(tokens)
    return header.tobytes() + tokens.astype("<u2").tobytes()


@pytest.mark.parametrize("cut", [-1, -2, 1024, 500])
def test_foreign_shard_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    (tmp_path / "train.bin").write_bytes(llmc(RAMP)[:cut])
    with pytest.raises(UserError, match="train.bin: cut short"):
        TokenStream(tmp_path, "train")


def test_other_version_of_llmc_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(llmc(RAMP, version=7))
    with pytest.raises(UserError, match="version 7 of llm.c's format; expected 1"):
        TokenStream(tmp_path, "train")


def test_names_of_modded_nanogpt_are_found(tmp_path: Path) -> None:
    for name in ("fineweb_train_000002.bin", "fineweb_train_000001.bin", "fineweb_val_000000.bin"):
        (tmp_path / name).write_bytes(llmc(RAMP[:100] + int(name[-5])))
    stream = TokenStream(tmp_path, "train")
    assert len(stream) == 200 and stream.read(0, 1)[0] == 1 and stream.read(100, 1)[0] == 2
    assert len(TokenStream(tmp_path, "val")) == 100


def test_foreign_documents_end_with_the_end_of_text_of_the_tokenizer(tmp_path: Path) -> None:
    for i, part in enumerate(([5, 256, 7, 8], [9, 256, 256, 1])):
        (tmp_path / f"train_{i}.bin").write_bytes(llmc(np.array(part)))
    starts, lengths = TokenStream(tmp_path, "train").documents(256)
    assert starts.tolist() == [0, 2, 4, 6, 7] and lengths.tolist() == [2, 2, 2, 1, 1]


def test_foreign_shard_is_read_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.bin").write_bytes(llmc(RAMP))
    reads: list[Path] = []
    real = foreign._read_through

    def counting(path: Path, start: int, size: int) -> tuple[int, str]:
        reads.append(path)
        return real(path, start, size)

    monkeypatch.setattr(foreign, "_read_through", counting)
    first, again = open_shard(tmp_path / "train.bin"), open_shard(tmp_path / "train.bin")
    assert first == again and first.max_id == 250 and len(reads) == 1
    (tmp_path / "train.bin").write_bytes(llmc(RAMP + 1))
    assert open_shard(tmp_path / "train.bin").max_id == 251 and len(reads) == 2
    for kept in (tmp_path / "shards/.scans").iterdir():
        kept.write_text("half wri")
    assert open_shard(tmp_path / "train.bin").max_id == 251 and len(reads) == 3


def test_pickle_beside_a_foreign_shard_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(RAMP.astype("<u2").tobytes())
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    assert TokenStream(tmp_path, "train").read(0, 5).tolist() == [0, 1, 2, 3, 4]
    assert not (tmp_path / "pwned").exists()


def test_shard_cut_short_under_a_running_training_is_an_error(tmp_path: Path) -> None:
    stream = TokenStream(write_shards(tmp_path / "s", RAMP, RAMP), "train")
    path = tmp_path / "s/train-00000.bin"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UserError, match="cut short while in use"):
        stream.read(1500, 100)


@pytest.mark.parametrize(
    "header",
    [
        {"tokens": float("inf")},
        {"documents": float("nan")},
        {"max_id": -1},
        {"tokens": -5},
        {"documents": -250, "tokens": 3000},
        {"tokens": True},
        {"dtype": "f8,(3"},
        {"dtype": "O"},
        {"dtype": ["<u2"]},
        {"tokens": 10**30},
    ],
    ids=str,
)
def test_hostile_header_is_refused(tmp_path: Path, header: dict[str, object]) -> None:
    path = write_shards(tmp_path / "s", RAMP, RAMP) / "train-00000.bin"
    content = path.read_bytes()
    encoded = json.dumps(json.loads(content[16:1024]) | header).encode().ljust(1008)
    path.write_bytes(content[:16] + encoded + content[1024:])
    with pytest.raises(UserError, match="train-00000.bin: not a readable shard"):
        open_shard(path)


def test_header_of_endless_nesting_or_length_is_refused(tmp_path: Path) -> None:
    for size in (200_000, 2**62):
        path = tmp_path / "train.bin"
        path.write_bytes(b"ORDINAL1" + size.to_bytes(8, "little") + b"[" * 200_000)
        with pytest.raises(UserError, match="train.bin: not a readable shard"):
            open_shard(path)


@pytest.mark.parametrize("starts", [[0, -1], [0, 2**62], [1, 5], [0, 9, 9], [0, 1000]])
def test_documents_that_do_not_lie_in_the_tokens_are_refused(tmp_path: Path, starts: list[int]) -> None:
    tokens = np.resize([5, 6, 256], 1000)
    path = write_shards(tmp_path / "s", tokens, tokens) / "train-00000.bin"
    header = json.loads(path.read_bytes()[16:1024]) | {"documents": len(starts)}
    encoded = json.dumps(header).encode().ljust(1008)
    documents = np.array(starts, "<i8").tobytes()
    path.write_bytes(path.read_bytes()[:16] + encoded + tokens.astype("<u2").tobytes() + documents)
    with pytest.raises(UserError, match="damaged, its documents do not lie in its tokens"):
        TokenStream(tmp_path / "s", "train").documents(256)


@pytest.mark.parametrize("table", [[], "x", [1e999], [10**23], {"a": 1}, [1, 2], [-1] * 3000, [[1]] * 3000])
def test_table_of_bytes_that_is_none_counts_as_absent(tmp_path: Path, table: object) -> None:
    folder = write_shards(tmp_path / "s", RAMP, RAMP)
    (folder / "meta.json").write_text(json.dumps({"bytes_per_token": table}))
    assert TokenStream(folder, "train").bytes_per_token() is None
    (folder / "meta.json").write_text(json.dumps({"bytes_per_token": [1] * 3000}))
    assert TokenStream(folder, "train").bytes_per_token() is not None
