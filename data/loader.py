"""Shards to batches. `batch(step)` is a pure function, so the state of the data is one integer."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

import numpy as np

from data import tokenizer as tokenizers
from data.shards import Shard, open_shard
from model.config import UserError


class TokenStream:
    """The shards of one split, in order, as one sequence of token ids."""

    def __init__(self, folder: Path, split: str) -> None:
        self.folder, self.split = folder, split
        if not folder.is_dir():
            raise UserError(
                f"{folder}: no such folder of shards; prepare the data first, or correct data.path"
            )
        paths = sorted(folder.glob(f"{split}*.bin")) or sorted(folder.glob(f"*_{split}_*.bin"))
        if not paths:
            raise UserError(f"{folder}: holds no {split} shard; expected {split}.bin or {split}-00000.bin")
        self.shards: list[Shard] = [open_shard(path) for path in paths]
        self.starts = np.cumsum([0, *(len(shard.tokens) for shard in self.shards)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as int64, across shard ends."""
        parts = []
        index = int(np.searchsorted(self.starts, start, side="right")) - 1
        while count > 0:
            tokens = self.shards[index].tokens[start - self.starts[index] :][:count]
            parts.append(tokens.astype(np.int64))
            start, count, index = start + len(tokens), count - len(tokens), index + 1
        return np.concatenate(parts)

    def fingerprint(self) -> str:
        """A hash of the checksums of all shards; a resumed run must find the one it was started with."""
        return hashlib.sha256(" ".join(shard.sha256 for shard in self.shards).encode()).hexdigest()[:16]

    def check_fits(self, tokenizer: str, context_length: int) -> None:
        """Raises UserError unless tokenizer, ids and length suit the model."""
        vocab_size = tokenizers.vocab_size(tokenizer)
        for shard in self.shards:
            if shard.tokenizer is not None and shard.tokenizer != tokenizer:
                raise UserError(
                    f"{shard.path}: made with tokenizer {shard.tokenizer}, but tokenizer={tokenizer} is configured; "
                    f"give tokenizer={shard.tokenizer} or prepare the data again"
                )
            if shard.max_id >= vocab_size:
                raise UserError(
                    f"{shard.path}: holds token id {shard.max_id}, but tokenizer={tokenizer} has a vocabulary of "
                    f"{vocab_size}; give the tokenizer that the shard was made with"
                )
        if len(self) <= context_length:
            raise UserError(
                f"{self.folder}: the {self.split} split has {len(self)} tokens, fewer than the "
                f"{context_length + 1} that model.context_length={context_length} needs; give more text or "
                f"model.context_length={max(len(self) - 1, 1)} or less"
            )

    def bytes_per_token(self) -> np.ndarray | None:
        """UTF-8 bytes by token id, from the folder's meta.json; None when the shards come from elsewhere."""
        try:
            table = json.loads((self.folder / "meta.json").read_text())["bytes_per_token"]
        except (OSError, ValueError, KeyError):
            return None
        return np.array(table, dtype=np.int64)


class TrainLoader:
    """Batches of windows of `context_length` + 1 tokens, in a seeded permutation per epoch.

    An epoch cuts the stream into back-to-back windows behind an offset of its own, so over epochs every one
    of the N - T starts occurs, and within an epoch no target is seen twice.
    """

    def __init__(self, stream: TokenStream, context_length: int, batch_size: int, seed: int) -> None:
        self.stream, self.context_length, self.batch_size, self.seed = (
            stream,
            context_length,
            batch_size,
            seed,
        )
        self.windows_per_epoch = max((len(stream) - context_length) // context_length, 1)
        self.n_offsets = len(stream) - self.windows_per_epoch * context_length
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def _draw_epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        return int(generator.integers(self.n_offsets)), generator.permutation(self.windows_per_epoch)

    def start(self, sample: int) -> int:
        """Where in the stream the `sample`-th window of the training begins."""
        epoch, index = divmod(sample, self.windows_per_epoch)
        offset, order = self._epoch(epoch)
        return offset + int(order[index]) * self.context_length

    def batch(self, step: int) -> np.ndarray:
        """The (batch_size, context_length + 1) int64 windows of a step; inputs [:, :-1], targets [:, 1:]."""
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)
        return np.stack([self.stream.read(self.start(s), self.context_length + 1) for s in samples])
