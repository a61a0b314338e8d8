"""What becomes of the bytes of a document before they are tokenized: UTF-8, the split, and where to cut."""

from __future__ import annotations

import hashlib
import re
from typing import Literal, NamedTuple

Split = Literal["train", "val"]

BLOCK = 4 << 20  # bytes that are read, and tokenized by one worker, at a time
# tiktoken panics on a million spaces in a row, and needs time for any long run; no word is this long
CHUNK = 1 << 18
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A space or line end behind a character that is no white space. GPT-2's pattern always starts a new piece there and
# never looks back, so a text cut there has the tokens of the whole. (Characters by their UTF-8 length; left out
# are C2, E1, E2 and E3 80 80, below which Unicode has its other white space.)
_BREAK = re.compile(
    rb"(?:(?<=[!-~])|(?<=[\xc3-\xdf][\x80-\xbf])|(?<=\xe3\x80[\x81-\xbf])|(?<=\xe3[\x81-\xbf][\x80-\xbf])"
    rb"|(?<=[\xe4-\xef][\x80-\xbf]{2}))[ \n]"
)


class Text(NamedTuple):
    """A document as UTF-8 and as strings of at most CHUNK bytes.

    `replaced` invalid sequences became U+FFFD for it; it is `clean` when the tokens of the strings are those of
    the whole.
    """

    data: bytes
    strings: list[str]
    replaced: int
    clean: bool


def as_text(data: bytes) -> Text:
    """Any bytes as text."""
    try:
        return Text(data, *_chunks(data, 0))
    except UnicodeDecodeError:
        fixed = data.decode("utf-8", "replace").encode()
        replaced = fixed.count(b"\xef\xbf\xbd") - data.count(b"\xef\xbf\xbd")
        return Text(fixed, *_chunks(fixed, replaced))


def is_text(data: bytes, replaced: int) -> bool:
    """Whether `data` with `replaced` invalid sequences is a text with slips, and not UTF-16 or a picture."""
    return (replaced + data.count(0)) * 100 <= len(data)


def share(data: bytes) -> float:
    """A number in [0, 1) from the first BLOCK bytes of a document: below `val_fraction`, it is held out.

    The content alone decides, so a document keeps its split whatever is added, and duplicates share one.
    """
    return int.from_bytes(hashlib.sha256(data[:BLOCK]).digest()[:8], "big") / 2**64


def cut(data: bytes, start: int, limit: int) -> tuple[int, bool]:
    """(end, clean) of a part of at most `limit` bytes from `start`: clean where its tokens are those of the whole.

    That is in front of the last space or line end that follows a word; where there is none, a whole character.
    """
    end = start + limit
    if len(data) <= end:
        return len(data), True
    for near in (end - 1024, start + 1):
        breaks = [match.start() for match in _BREAK.finditer(data, max(near, start + 1), end)]
        if breaks:
            return breaks[-1], True
    while end > start + limit - 3 and 0x80 <= data[end] < 0xC0:
        end -= 1
    return end, False


def _chunks(data: bytes, replaced: int) -> tuple[list[str], int, bool]:
    if len(data) <= CHUNK:
        return [data.decode("utf-8")], replaced, True
    strings: list[str] = []
    start, all_clean = 0, True
    while start < len(data):
        end, clean = cut(data, start, CHUNK)
        strings.append(data[start:end].decode("utf-8"))
        start, all_clean = end, all_clean and clean
    return strings, replaced, all_clean
