"""The same bytes, whatever interrupts a preparation or however many work on it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data import prepare as preparation
from data import workers
from data.prepare import prepare
from data.sources import DataConfig
from data.writer import SplitWriter
from tests.conftest import ROOT
from tests.data import corpus
from tests.data.preparing import (
    Killed,
    children,
    config,
    digests,
    kill_after,
    report,
    run,
    silent,
)


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
            offspring = children(process.pid)
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
