"""What goes wrong is one sentence, and costs neither the work nor the memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import encode as encoding
from data import tokenizer, workers
from data.encode import encode
from data.loader import TokenStream
from data.prepare import prepare
from data.sources import DataConfig, find
from model.config import RunFailed, UserError
from tests.conftest import ROOT
from tests.data import corpus
from tests.data.preparing import (
    children,
    config,
    die,
    run,
    silent,
)


def test_out_folder_of_other_data_is_refused(tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "source", "txt")
    prepare(config(source, tmp_path / "out"), "bytes", silent)
    with pytest.raises(UserError, match=r"holds .* with tokenizer bytes, not .* with gpt2_2k"):
        prepare(config(source, tmp_path / "out"), "gpt2_2k", silent)
    with pytest.raises(UserError, match=r"give another data.out= or delete"):
        prepare(config(source, tmp_path / "out", val_fraction=0.3), "bytes", silent)
    with pytest.raises(UserError, match="exists, but is not a folder of shards"):
        prepare(config(source, source), "bytes", silent)


def test_full_disk_is_one_sentence_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """The limit on the size of files stands in for a disk that is full: a write fails in the middle."""
    source = corpus.write(tmp_path / "source", "jsonl")
    arguments = ["data=text", f"data.path={source}", "data.out=out", "tokenizer=bytes"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    result = run(*arguments, cwd=tmp_path, code=2, preexec_fn=limit)
    assert "error: out: cannot write shards there" in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    run(*arguments, "verify=true", cwd=tmp_path)


def test_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write shards there"):
        prepare(config(source, tmp_path / "file/out"), "bytes", silent)


@pytest.mark.parametrize("kind", ["a file", "a link to an empty folder", "."])
def test_folder_that_cannot_take_the_name_is_known_before_the_work(tmp_path: Path, kind: str) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    (tmp_path / "here").mkdir()
    if kind == "a file":
        (tmp_path / "out").write_text("precious")
        result = run("data=text", f"data.path={source}", "data.out=out", cwd=tmp_path, code=2)
        assert "cannot become a folder of shards" in result.stderr
        assert (tmp_path / "out").read_text() == "precious"
    elif kind == ".":
        run("data=text", f"data.path={source}", "data.out=.", cwd=tmp_path / "here")
        assert (tmp_path / "here/meta.json").exists()
    else:
        (tmp_path / "out").symlink_to(tmp_path / "here")
        run("data=text", f"data.path={source}", "data.out=out", cwd=tmp_path)
        assert (tmp_path / "here/meta.json").exists()


def test_worker_that_dies_is_said_and_the_work_goes_on(
    tmp_path: Path, many_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_encode", die)
        with pytest.raises(RunFailed, match="a tokenizing process was killed"):
            prepare(config(source, tmp_path / "out", workers=2), "bytes", silent)
    prepare(config(source, tmp_path / "out", workers=2), "bytes", silent)
    assert sorted(corpus.texts(tmp_path / "out", "train") + corpus.texts(tmp_path / "out", "val")) == sorted(
        corpus.DOCUMENTS
    )


def test_error_in_a_worker_arrives_as_its_sentence(tmp_path: Path) -> None:
    path = corpus.write(tmp_path / "source", "tar")
    content = bytearray(path.read_bytes())
    at = content.index(b"\xfd7zXZ")
    content[at + 40 : at + 60] = bytes(20)
    path.write_bytes(content)
    result = run("data=text", f"data.path={path}", "data.workers=2", cwd=tmp_path, code=2)
    assert "is damaged" in result.stderr and result.stderr.startswith("error: ")


@pytest.mark.parametrize("damage", ["deleted", "replaced", "added"])
def test_shard_that_is_missing_or_another_is_refused(tmp_path: Path, damage: str) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    folder = prepare(config(source, tmp_path / "out", shard_tokens=3000), "bytes", silent)
    path, other = folder / "train-00001.bin", folder / "train-00002.bin"
    if damage == "deleted":
        path.unlink()
    else:
        (path if damage == "replaced" else folder / "train-99999.bin").write_bytes(other.read_bytes())
    for use in (
        lambda: prepare(config(source, tmp_path / "out", shard_tokens=3000), "bytes", silent),
        lambda: TokenStream(folder, "train"),
    ):
        with pytest.raises(UserError, match="bin: (missing|not listed|another).*delete the folder"):
            use()


def test_verify_finds_a_flipped_byte_and_describe_counts(tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    arguments = [
        "data=text",
        f"data.path={source}",
        "data.out=out",
        "tokenizer=bytes",
        "data.val_fraction=0.2",
    ]
    shown = run(*arguments, "verify=true", "describe=true", cwd=tmp_path).stdout
    lengths = [len(document.encode()) + 1 for document in corpus.DOCUMENTS]
    train = corpus.texts(tmp_path / "out", "train")
    assert "every byte as recorded" in shown and "1.0000" in shown
    assert f"{max(len(document.encode()) + 1 for document in train):,}" in shown
    assert f"the longest {max(lengths):,}" in shown
    path = tmp_path / "out/train-00000.bin"
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(content)
    assert (
        "train-00000.bin: damaged, its checksum differs"
        in run(*arguments, "verify=true", cwd=tmp_path, code=2).stderr
    )


def test_byte_flipped_beyond_the_vocabulary_is_one_sentence(tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    arguments = ["data=text", f"data.path={source}", "data.out=out", "data.val_fraction=0.2"]
    run(*arguments, cwd=tmp_path)
    path = tmp_path / "out/train-00000.bin"
    content = bytearray(path.read_bytes())
    content[1024 + 2 * 700 + 1] ^= 0x80
    path.write_bytes(content)
    assert "damaged, its checksum differs" in run(*arguments, "verify=true", cwd=tmp_path, code=2).stderr
    with pytest.raises(UserError, match=r"damaged, token id \d+ is above the \d+ that it records"):
        TokenStream(tmp_path / "out", "train").read(600, 200)


def test_wrong_tokenizer_of_ready_shards_is_refused(tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    prepare(config(source, tmp_path / "out"), "bytes", silent)
    said = run("data=bin", "data.path=out", "tokenizer=gpt2", "verify=true", cwd=tmp_path, code=2).stderr
    assert "made with tokenizer bytes, but tokenizer=gpt2" in said


def test_tokenizer_that_fails_on_a_part_leaves_the_end_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.set_block(monkeypatch, 1000)
    (tmp_path / "a.txt").write_text("a line of some words\n" * 200 + "the last FAILS\n")
    real = encoding.ordinary

    def failing(tiktoken: object, string: str) -> np.ndarray:
        if "FAILS" in string:
            raise ValueError("Regex error")
        return real(tiktoken, string)  # type: ignore[arg-type]

    monkeypatch.setattr(encoding, "ordinary", failing)
    pieces = find(DataConfig(source="text", path=str(tmp_path / "a.txt"))).pieces(tmp_path)
    done = [encode(piece, tokenizer.load("bytes"), 0.5) for piece in pieces]
    tokens = [i for part in done for array in part.tokens.values() for i in array.tolist()]
    assert tokens.count(256) == 1 and tokens[-1] == 256
    assert sum(part.counts["documents"] for part in done) == 1 and done[-1].left_out == {
        "tokenizer failed": 1
    }


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_peak_memory_is_far_below_a_gigabyte(tmp_path: Path) -> None:
    """Two workers on one long text, and on one long row group: all processes together, sampled."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = [f"{i} " + " ".join(corpus.DOCUMENTS) for i in range(800)]
    pq.write_table(pa.table({"text": documents}), tmp_path / "a.parquet", row_group_size=len(documents))
    (tmp_path / "b.txt").write_text("\n".join(documents))
    assert peak_memory(tmp_path, "a.parquet") < 700e6
    assert peak_memory(tmp_path, "b.txt") < 700e6


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_records_as_long_as_they_may_be_keep_memory_bounded(tmp_path: Path) -> None:
    import gzip

    long = " ".join(corpus._WORDS)
    long *= 15_000_000 // len(long.encode())
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for i in range(8):
            file.write(json.dumps({"text": f"{i} {long}"}, ensure_ascii=False).encode() + b"\n")
    assert peak_memory(tmp_path, "a.jsonl.gz") < 1e9


def peak_memory(folder: Path, name: str) -> int:
    """Bytes of all processes of a preparation with two workers and GPT-2's tokenizer, at their highest."""
    process = subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "scripts/prepare.py"), "data=text", f"data.path={name}"),
            *(f"data.out={name}.out", "data.workers=2", "tokenizer=gpt2"),
        ],
        cwd=folder,
        stdout=subprocess.DEVNULL,
    )
    peak = n_processes = 0
    while process.poll() is None:
        found = [_resident(pid) for pid in [process.pid, *children(process.pid)]]
        peak, n_processes = max(peak, sum(found)), max(n_processes, len(found))
        time.sleep(0.02)
    assert process.returncode == 0 and n_processes >= 3
    return peak


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
