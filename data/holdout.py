"""A split for texts so few that a hash of the content leaves one side empty."""

from __future__ import annotations

import hashlib
from itertools import groupby
from pathlib import Path

import numpy as np
import tiktoken

from data.shards import CHUNK, Shard, open_shard
from data.writer import ShardWriter
from model.config import UserError


def hold_out_end(folder: Path, encoding: tiktoken.Encoding, val_fraction: float) -> dict[str, int]:
    """Move the end of the longest document to the empty split; returns by how much the counts change.

    It begins behind a line end near its share of the document. Raises UserError when there is too little text.
    """
    before = {split: _tokens(folder, split) for split in ("train", "val")}
    for path in sorted(folder.glob("val-*.bin")) if not before["train"] else []:
        path.rename(path.with_name(path.name.replace("val", "train")))
    shard, start, end = _longest_without_a_copy(folder, encoding.eot_token)
    cut = _line_end_near(shard, encoding, start, end, val_fraction)
    if not start < cut < end - 1:
        raise UserError("the text is too short to hold a part of it out; give more text")
    end_of_text = np.array([encoding.eot_token])
    temporary = folder / "cut.bin"
    _copy(shard, encoding, temporary, [(0, cut), end_of_text, (end, shard.n_tokens)])
    _copy(shard, encoding, folder / "val-00000.bin", [(cut, end)])
    temporary.rename(shard.path)
    return {split: _tokens(folder, split) - count for split, count in before.items()} | {"documents": 1}


def _tokens(folder: Path, split: str) -> int:
    return sum(open_shard(path).n_tokens for path in folder.glob(f"{split}-*.bin"))


def _longest_without_a_copy(folder: Path, end_of_text: int) -> tuple[Shard, int, int]:
    """A document whose end, once held out, is not in training with another copy of it. The first of the longest."""
    found = [
        (int(end - start), shard, int(start), int(end))
        for shard in map(open_shard, sorted(folder.glob("train-*.bin")))
        for start, end in _documents(shard, end_of_text)
    ]
    found.sort(key=lambda document: -document[0])
    for _, same_length in groupby(found, key=lambda document: document[0]):
        by_content: dict[str, list[tuple[Shard, int, int]]] = {}
        for _, shard, start, end in same_length:
            by_content.setdefault(_digest(shard, start, end), []).append((shard, start, end))
        for copies in by_content.values():
            if len(copies) == 1:
                return copies[0]
    raise UserError("every document is there more than once, so none can be held out in part; give more text")


def _digest(shard: Shard, start: int, end: int) -> str:
    digest, file = hashlib.sha256(), shard.open()
    for at in range(start, end, CHUNK):
        digest.update(shard.tokens(file, at, min(CHUNK, end - at)).data)
    return digest.hexdigest()


def _documents(shard: Shard, end_of_text: int) -> np.ndarray:
    starts = shard.document_starts(end_of_text)
    return np.stack([starts, np.append(starts[1:], shard.n_tokens)], axis=1)


def _line_end_near(
    shard: Shard, encoding: tiktoken.Encoding, start: int, end: int, val_fraction: float
) -> int:
    length = end - 1 - start
    wanted = start + int(length * (1 - val_fraction))
    first = max(wanted - length // 20, wanted - CHUNK, start)
    tokens = shard.tokens(shard.open(), first, wanted - first)
    ends_line = [encoding.decode_single_token_bytes(i).endswith(b"\n") for i in range(encoding.eot_token)]
    line_ends = np.flatnonzero(np.array(ends_line)[tokens])
    return first + int(line_ends[-1]) + 1 if len(line_ends) else wanted


def _copy(
    shard: Shard, encoding: tiktoken.Encoding, path: Path, parts: list[tuple[int, int] | np.ndarray]
) -> None:
    writer = ShardWriter(
        path,
        tokenizer=str(shard.tokenizer),
        tokenizer_hash=str(shard.tokenizer_hash),
        vocab_size=encoding.n_vocab,
    )
    file = shard.open()
    for part in parts:
        if isinstance(part, np.ndarray):
            writer.append(part)
            continue
        for at in range(part[0], part[1], CHUNK):
            writer.append(shard.tokens(file, at, min(CHUNK, part[1] - at)))
    writer.close()
