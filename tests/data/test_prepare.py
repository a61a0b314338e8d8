"""Preparation: the same bytes whatever interrupts it or however many work on it, and nothing odd is fatal."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data import encode as encoding
from data import prepare as preparation
from data import text, tokenizer, workers
from data.encode import encode
from data.loader import TokenStream
from data.prepare import prepare
from data.shards import open_shard
from data.sources import DataConfig, find
from data.writer import SplitWriter
from model.config import RunFailed, UserError
from tests.conftest import ROOT
from tests.data import corpus


def config(path: Path, out: Path, **changes: object) -> DataConfig:
    values = {"source": "text", "path": str(path), "out": str(out), "val_fraction": 0.2, "workers": 1}
    return DataConfig.model_validate(values | changes)


def silent(_: str) -> None:
    pass


def digests(folder: Path) -> dict[str, str]:
    """Every file by name: also that nothing else is left in the folder."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def report(folder: Path) -> dict[str, dict[str, int]]:
    return json.loads((folder / "meta.json").read_text())["report"]  # type: ignore[no-any-return]


def run(*arguments: str, cwd: Path, code: int = 0, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/prepare.py"), *arguments]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, **more)  # type: ignore[call-overload]
    assert result.returncode == code, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr + result.stdout
    return result  # type: ignore[no-any-return]


# --- what the shards hold ----------------------------------------------------------------------------------


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


# --- texts so few that one side would be empty -------------------------------------------------------------


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


# --- the same bytes ----------------------------------------------------------------------------------------


@pytest.fixture
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.set_block(monkeypatch, 2000)


@pytest.mark.parametrize("kind", ["txt", "jsonl.zst", "parquet", "tar"])
def test_number_of_workers_changes_no_byte(tmp_path: Path, kind: str, many_pieces: None) -> None:
    source = corpus.write(tmp_path / "source", kind)
    found = [
        digests(
            prepare(config(source, tmp_path / f"out{n}", workers=n, shard_tokens=3000), "gpt2_2k", silent)
        )
        for n in (1, 2, 3)
    ]
    assert found[0] == found[1] == found[2] and len(found[0]) > 5


class Killed(BaseException):
    pass


def die(*_: object) -> None:
    os._exit(9)


def kill_after(n: int) -> Callable[..., object]:
    """In place of workers.encode_in_order: the n-th result never comes."""

    def encode_in_order(pieces: object, *arguments: object) -> object:
        for i, done in enumerate(real(pieces, *arguments)):  # type: ignore[arg-type]
            if i == n:
                raise Killed
            yield done

    real = workers.encode_in_order
    return encode_in_order


@pytest.mark.parametrize("journal_seconds", [0, 1e9])
@pytest.mark.parametrize("kind", ["txt", "jsonl.gz", "parquet", "tar"])
def test_interrupted_at_any_piece_it_ends_with_the_same_bytes(
    tmp_path: Path, kind: str, journal_seconds: float, many_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "JOURNAL_SECONDS", journal_seconds)
    source = corpus.write(tmp_path / "source", kind)
    undisturbed = prepare(config(source, tmp_path / "undisturbed", shard_tokens=3000), "gpt2_2k", silent)
    disturbed = config(source, tmp_path / "out", shard_tokens=3000)
    kills = 0
    while True:
        with monkeypatch.context() as patch:
            patch.setattr(
                workers, "encode_in_order", kill_after(kills % 4 if journal_seconds == 0 else kills)
            )
            try:
                prepare(disturbed, "gpt2_2k", silent)
                break
            except Killed:
                kills += 1
                assert not (tmp_path / "out").exists()
    assert kills >= 5
    assert digests(tmp_path / "out") == digests(undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "undisturbed"]


@pytest.mark.parametrize("operation", ["write", "fsync", "rename", "replace", "unlink"])
def test_interrupted_at_any_write_it_ends_with_the_same_bytes(
    tmp_path: Path, operation: str, many_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies before the n-th call of an operation on the disk, for every n, journal included."""
    monkeypatch.setattr(preparation, "JOURNAL_SECONDS", 0)
    source = corpus.write(tmp_path / "source", "parquet")
    undisturbed = digests(
        prepare(config(source, tmp_path / "undisturbed", shard_tokens=2500), "bytes", silent)
    )
    owner, name = {
        "write": ("data.writer.ShardWriter", "append"),
        "fsync": ("os", "fsync"),
        "rename": ("pathlib.Path", "rename"),
        "replace": ("os", "replace"),
        "unlink": ("pathlib.Path", "unlink"),
    }[operation]
    module = __import__(owner.rpartition(".")[0] or owner, fromlist=["x"])
    target = getattr(module, owner.rpartition(".")[2]) if "." in owner else module
    real = getattr(target, name)
    for n in range(0, 40, 3):
        calls = 0

        def dying(*arguments: object, n: int = n, **more: object) -> object:
            nonlocal calls
            calls += 1
            if calls > n:
                raise Killed
            return real(*arguments, **more)

        disturbed = config(source, tmp_path / f"out{n}", shard_tokens=2500)
        with monkeypatch.context() as patch:
            patch.setattr(target, name, dying)
            with contextlib.suppress(Killed):
                prepare(disturbed, "bytes", silent)
        assert digests(prepare(disturbed, "bytes", silent)) == undisturbed, n


def test_killed_while_holding_out_it_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "JOURNAL_SECONDS", 0)
    (tmp_path / "one.txt").write_text("".join(f"line {i}\n" for i in range(1000)))
    undisturbed = digests(prepare(config(tmp_path / "one.txt", tmp_path / "a"), "bytes", silent))
    real = Path.rename
    for n in range(6):
        calls = 0

        def dying(self: Path, to: Path, n: int = n) -> Path:
            nonlocal calls
            calls += 1
            if calls > n:
                raise Killed
            return real(self, to)

        disturbed = config(tmp_path / "one.txt", tmp_path / f"out{n}")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dying)
            with contextlib.suppress(Killed):
                prepare(disturbed, "bytes", silent)
        assert digests(prepare(disturbed, "bytes", silent)) == undisturbed, n


def test_text_that_changed_since_the_interruption_is_read_anew(
    tmp_path: Path, many_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "JOURNAL_SECONDS", 0)
    source = corpus.write(tmp_path / "source", "jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(workers, "encode_in_order", kill_after(5))
        with pytest.raises(Killed):
            prepare(config(source, tmp_path / "out"), "bytes", silent)
    source.write_bytes(corpus.json_lines().replace(b"end of document", b"END of document"))
    folder = prepare(config(source, tmp_path / "out"), "bytes", silent)
    found = corpus.texts(folder, "train") + corpus.texts(folder, "val")
    assert len(found) == len(corpus.DOCUMENTS) and not any(
        "end of document" in document for document in found
    )


def test_sigkill_at_random_instants_loses_nothing(tmp_path: Path) -> None:
    """The real thing: the command with two workers, killed at most four times, leaves no process behind."""
    generator = np.random.default_rng(0)
    with open(tmp_path / "big.jsonl", "w") as file:
        for i in range(3000):
            file.write(
                json.dumps({"text": f"{i} " + " ".join(generator.choice(corpus._WORDS, size=1500))}) + "\n"
            )
    arguments = ["data=text", "data.path=big.jsonl", "data.shards=null", "data.shard_tokens=1000000"]
    command = [sys.executable, str(ROOT / "scripts/prepare.py"), *arguments, "data.workers=2"]
    run(*arguments, "data.out=undisturbed", "data.workers=1", cwd=tmp_path)
    kills = 0
    for delay in generator.uniform(0.8, 2.2, size=4):
        process = subprocess.Popen([*command, "data.out=out"], cwd=tmp_path, stdout=subprocess.DEVNULL)
        time.sleep(delay)
        if process.poll() is None:
            offspring = _children(process.pid)
            process.send_signal(signal.SIGKILL)
            kills += 1
            process.wait()
            gone = time.monotonic() + 10
            while any(_is_alive(pid) for pid in offspring) and time.monotonic() < gone:
                time.sleep(0.05)
            assert not [pid for pid in offspring if _is_alive(pid)]
        assert process.wait() in {0, -9}
    assert kills >= 2
    run(*arguments, "data.out=out", "data.workers=2", cwd=tmp_path)
    assert digests(tmp_path / "out") == digests(tmp_path / "undisturbed")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_keeps_the_work_and_says_how_to_go_on(
    tmp_path: Path, many_pieces: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")

    def interrupted(*arguments: object) -> object:
        for i, done in enumerate(real(*arguments)):  # type: ignore[arg-type]
            if i == 5:
                raise KeyboardInterrupt
            yield done

    real = workers.encode_in_order
    with monkeypatch.context() as patch:
        patch.setattr(workers, "encode_in_order", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(source, tmp_path / "out"), "bytes", silent)
    assert json.loads((tmp_path / ".out.partial/journal.json").read_text())["pieces"] == 5
    prepare(config(source, tmp_path / "out"), "bytes", silent)
    assert "the same command goes on" in capsys.readouterr().out


def test_prepared_bytes_do_not_depend_on_locale(tmp_path: Path) -> None:
    corpus.write(tmp_path / "source", "txt")
    (tmp_path / "source/é.txt").write_text("é")
    (tmp_path / "source/z\N{PILE OF POO}.txt").write_text("last")
    found = []
    for i, locale in enumerate(("C", "C.UTF-8", "POSIX")):
        environment = os.environ | {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        run(
            "data=text", "data.path=source", f"data.out={i}", "tokenizer=bytes", cwd=tmp_path, env=environment
        )
        found.append(digests(tmp_path / str(i)))
    assert found[0]["train-00000.bin"] == found[1]["train-00000.bin"] == found[2]["train-00000.bin"]


def test_processes_that_want_the_same_shards_share_one_preparation(tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    said: list[list[str]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=prepare, args=(config(source, tmp_path / "out"), "gpt2_2k", said[i].append))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(line.startswith("Prepared") for lines in said for line in lines) == 1
    assert set(digests(tmp_path / "out")) == {"meta.json", "train-00000.bin", "val-00000.bin"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


# --- what goes wrong ---------------------------------------------------------------------------------------


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
        found = [_resident(pid) for pid in [process.pid, *_children(process.pid)]]
        peak, n_processes = max(peak, sum(found)), max(n_processes, len(found))
        time.sleep(0.02)
    assert process.returncode == 0 and n_processes >= 3
    return peak


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


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


# --- what a review found -----------------------------------------------------------------------------------


def test_ctrl_c_between_writing_and_counting_repeats_no_document(
    tmp_path: Path, many_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    undisturbed = digests(prepare(config(source, tmp_path / "undisturbed"), "bytes", silent))
    real, calls = SplitWriter.append, 0

    def interrupted(self: SplitWriter, tokens: np.ndarray) -> None:
        nonlocal calls
        real(self, tokens)
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(preparation, "JOURNAL_SECONDS", 0)
    with monkeypatch.context() as patch:
        patch.setattr(SplitWriter, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(source, tmp_path / "out"), "bytes", silent)
    assert digests(prepare(config(source, tmp_path / "out"), "bytes", silent)) == undisturbed


def test_left_out_documents_are_counted_across_an_interruption(
    tmp_path: Path, many_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "JOURNAL_SECONDS", 0)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"not json\n" + corpus.json_lines() + b'{"text": ""}\n')
    with monkeypatch.context() as patch:
        patch.setattr(workers, "encode_in_order", kill_after(5))
        with pytest.raises(Killed):
            prepare(config(file, tmp_path / "out"), "bytes", silent)
    prepare(config(file, tmp_path / "out"), "bytes", silent)
    assert report(tmp_path / "out")["left_out"] == {"not JSON": 1, "empty": 1}


@pytest.mark.parametrize(
    "damage",
    [
        {"pieces": -1},
        {"pieces": "3"},
        {"pieces": None},
        {"counts": []},
        {"counts": {"bytes": -1}},
        {"writers": {"train": [0, -5], "val": [0, 0]}},
        {"writers": {"train": [True, 5], "val": [0, 0]}},
        {"writers": {"train": [0, 10**9], "val": [0, 0]}},
        {"writers": None},
    ],
    ids=str,
)
def test_damaged_journal_means_a_fresh_start(
    tmp_path: Path, many_pieces: None, damage: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    undisturbed = digests(prepare(config(source, tmp_path / "undisturbed"), "bytes", silent))
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "JOURNAL_SECONDS", 0)
        patch.setattr(workers, "encode_in_order", kill_after(9))
        with pytest.raises(Killed):
            prepare(config(source, tmp_path / "out"), "bytes", silent)
    journal = tmp_path / ".out.partial/journal.json"
    state = json.loads(journal.read_text()) | damage
    journal.write_text(json.dumps({key: value for key, value in state.items() if value is not None}))
    assert digests(prepare(config(source, tmp_path / "out"), "bytes", silent)) == undisturbed


def test_interrupted_standard_input_is_not_gone_on_with(
    tmp_path: Path, many_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "JOURNAL_SECONDS", 0)

    def given(content: bytes) -> DataConfig:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        return config(Path("-"), tmp_path / "out")

    with monkeypatch.context() as patch:
        patch.setattr(workers, "encode_in_order", kill_after(5))
        with pytest.raises(Killed):
            prepare(given(corpus.json_lines().replace(b"end of", b"END of")), "bytes", silent)
    prepare(given(corpus.json_lines()), "bytes", silent)
    assert sorted(corpus.texts(tmp_path / "out", "train") + corpus.texts(tmp_path / "out", "val")) == sorted(
        corpus.DOCUMENTS
    )


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


def test_wrong_tokenizer_of_ready_shards_is_refused(tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    prepare(config(source, tmp_path / "out"), "bytes", silent)
    said = run("data=bin", "data.path=out", "tokenizer=gpt2", "verify=true", cwd=tmp_path, code=2).stderr
    assert "made with tokenizer bytes, but tokenizer=gpt2" in said


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


def test_shards_that_another_process_finished_meanwhile_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus.write(tmp_path / "source", "jsonl")
    real = preparation._is_ready
    looks = 0

    def looking(folder: Path, made_from: dict[str, object]) -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:  # the other is through between our look and our lock
            monkeypatch.setattr(preparation, "_is_ready", real)
            prepare(config(source, tmp_path / "out"), "bytes", silent)
            monkeypatch.setattr(preparation, "_is_ready", looking)
            return False
        return real(folder, made_from)

    monkeypatch.setattr(preparation, "_is_ready", looking)
    said: list[str] = []
    prepare(config(source, tmp_path / "out"), "bytes", said.append)
    assert said == [] and sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
