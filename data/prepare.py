"""Text to shards: workers tokenize pieces of the source, this process writes them in order.

The work grows in a hidden folder with a journal, and becomes visible by one rename. Killed at any instant, the
same call goes on behind the last entry of the journal, and ends with the bytes of an undisturbed run.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from data import openwebtext, sources, tokenizer, workers
from data.encode import CUT, REPAIRED, Encoded
from data.files import parse_json, write_atomically
from data.holdout import hold_out_end
from data.progress import Progress
from data.shards import check_complete, open_shard, token_dtype
from data.sources import DataConfig, Source
from data.text import Split
from data.writer import SplitWriter
from model.config import UserError, to_path

JOURNAL_SECONDS = 5  # at most so much work is done again after a kill
SPLITS: tuple[Split, ...] = ("train", "val")


def prepare(config: DataConfig, tokenizer_name: str, say: Callable[[str], None] = print) -> Path:
    """The folder of shards for this data and tokenizer; made when it is not there yet.

    A second process that wants the same folder waits for the first. Raises UserError when the source is missing
    or damaged, the disk is full, or `data.out` holds shards of another tokenizer.
    """
    if config.source == "bin":
        return to_path(str(config.path))
    source = sources.find(config)
    folder = to_path(config.out) if config.out else Path("shards") / f"{source.name}-{tokenizer_name}"
    made_from = {"source": source.name, "tokenizer": tokenizer_name, "shard_tokens": config.shard_tokens}
    if config.source != "kjv":
        made_from["val_fraction"] = config.val_fraction
    if folder.name in {"", ".."} or folder.is_symlink():
        folder = folder.resolve()
    if not folder.name or os.path.ismount(folder) or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder}: cannot become a folder of shards; give data.out=<a new folder>")
    partial = folder.with_name(f".{folder.name}.partial")
    if config.path == sources.STDIN and _is_ready(folder, made_from):
        raise UserError(
            f"{folder}: exists, and whether it holds this standard input cannot be told; give data.out= or delete it"
        )
    try:
        while not _is_ready(folder, made_from):
            with _alone_in(partial, say) as alone:
                if alone and _is_ready(folder, made_from):  # since we looked
                    shutil.rmtree(partial)
                elif alone:
                    say(f"Preparing {source.name} with tokenizer {tokenizer_name} in {folder}")
                    for line in _Preparation(config, source, partial, made_from).run():
                        say(line)
                    os.rename(partial, folder)
        for name in (".lock", "journal.json", "files.json"):
            if (folder / name).exists():
                (folder / name).unlink()
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write shards there ({error}); make room or give another folder as data.out=, "
            f"then the same command goes on"
        ) from None
    return folder


def _is_ready(folder: Path, made_from: dict[str, Any]) -> bool:
    """Whether `folder` holds just these shards. Raises UserError when it holds anything else."""
    if not folder.is_dir() or not any(entry.name != ".lock" for entry in folder.iterdir()):
        return False
    try:
        meta = parse_json((folder / "meta.json").read_text())
        found = {key: meta[key] for key in made_from if key in meta or key == "source"}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder}: exists, but is not a folder of shards; give another data.out=") from None
    for key, value in found.items():
        if value != made_from[key]:
            raise UserError(
                f"{folder}: holds {found['source']} with {key} {value}, not {made_from['source']} with "
                f"{made_from[key]}; give another data.out= or delete the folder"
            )
    check_complete(folder)
    return True


@contextmanager
def _alone_in(partial: Path, say: Callable[[str], None]) -> Iterator[bool]:
    """Hold `partial` against other processes; False when another one had it, and it is to be looked at again."""
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Waiting for another process that prepares {partial.name[1:-8]}")
            fcntl.flock(file, fcntl.LOCK_EX)
            yield False
            return
        try:  # the other may have finished, and its folder be renamed, since the file was opened
            alone = os.path.samestat(os.fstat(file.fileno()), os.stat(partial / ".lock"))
        except FileNotFoundError:
            alone = False
        yield alone


class _Preparation:
    """One preparation in its hidden folder, from the journal that it finds there."""

    def __init__(self, config: DataConfig, source: Source, folder: Path, made_from: dict[str, Any]) -> None:
        self.config, self.source, self.folder, self.made_from = config, source, folder, made_from
        self.encoding = tokenizer.load(made_from["tokenizer"])
        self.identity = made_from | {"tokenizer_hash": tokenizer.fingerprint(self.encoding)}
        self.pieces_done, self.source_bytes, self.adding = 0, 0, False
        self.counts: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.writers = self._new_writers()

    def _new_writers(self) -> dict[Split, SplitWriter]:
        return {
            split: SplitWriter(
                self.folder,
                split,
                self.config.shard_tokens,
                tokenizer=self.identity["tokenizer"],
                tokenizer_hash=self.identity["tokenizer_hash"],
                vocab_size=self.encoding.n_vocab,
            )
            for split in SPLITS
        }

    def run(self) -> list[str]:
        """Do what is left, and return the report line by line."""
        self._take_up_journal()
        try:
            self._tokenize()
            for writer in self.writers.values():
                writer.close()
        except BaseException:
            for writer in self.writers.values():
                writer.abandon()
            raise
        if not self.counts["documents"]:
            shutil.rmtree(self.folder)
            raise UserError(
                f"{self.source.name}: no document to train on ({self._left_out() or 'it is empty'})"
            )
        if not all(self.counts[split] for split in SPLITS):
            write_atomically(self.folder / "journal.json", b"{}")  # killed in what follows: from the start
            moved = hold_out_end(self.folder, self.encoding, self.config.val_fraction)
            self.counts.update(moved)
        report = self._report()
        table = self.made_from | {
            "bytes_per_token": tokenizer.bytes_per_token(self.encoding).tolist(),
            "report": {"counts": self.counts, "left_out": self.left_out},
            "shards": {path.name: open_shard(path).sha256 for path in sorted(self.folder.glob("*.bin"))},
        }
        write_atomically(self.folder / "meta.json", json.dumps(table).encode())
        return report

    def _take_up_journal(self) -> None:
        try:
            journal = parse_json((self.folder / "journal.json").read_text())
            if journal["identity"] != self.identity or self.source.name == "stdin":
                raise ValueError
            self.pieces_done, self.source_bytes = _count(journal["pieces"]), _count(journal["source_bytes"])
            self.counts, self.left_out = (
                Counter({str(key): _count(n) for key, n in journal[name].items()})
                for name in ("counts", "left_out")
            )
            for split, writer in self.writers.items():
                writer.resume(*map(_count, journal["writers"][split]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.pieces_done, self.source_bytes = 0, 0
            self.counts, self.left_out = Counter(), Counter()
            for writer in self.writers.values():
                writer.abandon()
            for file in self.folder.iterdir():
                if file.name != ".lock":
                    file.unlink()
            self.writers = self._new_writers()
            self._check_disk()
            return
        print(f"Going on after {self.counts['documents']:,} documents", flush=True)

    def _tokenize(self) -> None:
        expected = openwebtext.N_DOCUMENTS * (self.source.n_files or 0) // openwebtext.N_FILES
        count = self.config.workers or workers.suitable(self.source.size)
        pieces = islice(self.source.pieces(self.folder), self.pieces_done, None)
        journaled = time.monotonic()
        with Progress(self.source.size, self.source_bytes, expected, self.counts) as progress:
            try:
                for done in workers.encode_in_order(pieces, count, self.encoding, self.config.val_fraction):
                    self._add(done)
                    progress.update(self.source_bytes, self.counts)
                    if time.monotonic() - journaled > JOURNAL_SECONDS:
                        self._journal()
                        journaled = time.monotonic()
            except KeyboardInterrupt:
                if (
                    not self.adding
                ):  # else what is written is ahead of what is counted; an older journal stands
                    self._journal()
                if self.source.name != "stdin":
                    print("Stopped; the same command goes on from here", flush=True)
                raise

    def _add(self, done: Encoded) -> None:
        self.adding = True
        for split, tokens in done.tokens.items():
            self.writers[split].append(tokens)
            self.counts[split] += len(tokens)
        self.counts.update(done.counts)
        self.left_out.update(done.left_out)
        self.pieces_done += 1
        self.source_bytes += done.size
        self.adding = False

    def _journal(self) -> None:
        state = {
            "identity": self.identity,
            "writers": {split: writer.sync() for split, writer in self.writers.items()},
            "pieces": self.pieces_done,
            "source_bytes": self.source_bytes,
            "counts": self.counts,
            "left_out": self.left_out,
        }
        write_atomically(self.folder / "journal.json", json.dumps(state).encode())

    def _check_disk(self) -> None:
        """Say how much OpenWebText is, before hours are spent. Raises UserError when it does not fit the disk."""
        part = (self.source.n_files or 0) / openwebtext.N_FILES
        if not part:
            return
        documents, tokens = openwebtext.N_DOCUMENTS * part, openwebtext.N_TOKENS * part
        needed = tokens * token_dtype(self.encoding.n_vocab).itemsize
        print(
            f"Expecting about {documents:,.0f} documents: {tokens / 1e9:.2f} B tokens by GPT-2's tokenizer, "
            f"{needed / 2**30:.1f} GiB"
        )
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise UserError(
                f"{self.folder.parent}: {free / 2**30:.1f} GiB free, about {needed / 2**30:.0f} needed for shards; "
                f"give a folder on another disk as data.out=, or fewer files as data.shards="
            )

    def _report(self) -> list[str]:
        counts = self.counts
        tokens = counts["train"] + counts["val"]
        per_token = counts["bytes"] / max(tokens - counts["documents"], 1)
        lines = [
            f"Prepared {counts['documents']:,} documents: train {counts['train']:,} tokens, "
            f"val {counts['val']:,} tokens, {per_token:.2f} bytes a token"
        ]
        if self.left_out:
            lines.append(f"Left out {self._left_out()}")
        if counts[REPAIRED]:
            lines.append(
                f"Replaced invalid UTF-8 by U+FFFD in {_documents(counts[REPAIRED])} (or 4 MB parts)"
            )
        if counts[CUT]:
            lines.append(
                f"Cut {_documents(counts[CUT])} inside a run too long for the tokenizer; no text was lost"
            )
        return lines

    def _left_out(self) -> str:
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(self.left_out.items()))
        return f"{_documents(sum(self.left_out.values()))}: {reasons}" if reasons else ""


def _documents(count: int) -> str:
    return f"{count:,} document{'' if count == 1 else 's'}"


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value} is no count")
    return value
