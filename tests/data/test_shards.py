"""The shard format, its damage, and the formats of others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data import foreign
from data.loader import TokenStream
from data.shards import open_shard, token_dtype, write_shard
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
