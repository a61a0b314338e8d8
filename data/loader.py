"""Shards to batches. `batch(step)` is a pure function, so the state of the data is one integer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from data import tokenizer as tokenizers
from data.files import File, parse_json
from data.shards import Shard, check_complete, open_shard
from model.config import UserError

OPEN_FILES = 64  # of thousands, where a system allows a process 256


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
        check_complete(folder)
        self.shards: list[Shard] = [open_shard(path) for path in paths]
        self.starts = np.cumsum([0, *(shard.n_tokens for shard in self.shards)])
        self._file = lru_cache(maxsize=OPEN_FILES)(self._open)

    def _open(self, index: int) -> File:
        return self.shards[index].open()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as int64, across shard ends."""
        parts = []
        index = int(np.searchsorted(self.starts, start, side="right")) - 1
        while count > 0:
            shard, offset = self.shards[index], start - int(self.starts[index])
            tokens = shard.tokens(self._file(index), offset, min(count, shard.n_tokens - offset))
            if int(tokens.max(initial=0)) > shard.max_id:
                raise UserError(
                    f"{shard.path}: damaged, token id {tokens.max()} is above the {shard.max_id} that it records; "
                    f"delete the folder and prepare it again"
                )
            parts.append(tokens.astype(np.int64))
            start, count, index = start + len(tokens), count - len(tokens), index + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def documents(self, end_of_text: int) -> tuple[np.ndarray, np.ndarray]:
        """Where each document starts in the stream and its tokens, end-of-text included: two (documents,) int64.

        Shards of Ordinal's own record it; in others a document ends with the id `end_of_text`.
        """
        found = [shard.document_starts(end_of_text) for shard in self.shards]
        starts = np.concatenate([part + start for part, start in zip(found, self.starts, strict=False)])
        return starts, np.diff(np.append(starts, len(self)))

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
            table = parse_json((self.folder / "meta.json").read_text())["bytes_per_token"]
            known = np.array(table, dtype=np.int64)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None
        complete = known.ndim == 1 and len(known) > max(shard.max_id for shard in self.shards)
        return known if complete and (known >= 0).all() else None


class TrainLoader:
    """Batches of windows of `context_length` + 1 tokens, in a seeded permutation per epoch.

    An epoch cuts a text into back-to-back windows behind an offset of its own, so over epochs every start
    occurs, and within an epoch no target is seen twice. The text is the whole stream, or with
    `windows="within_document"` each document; one shorter than a window then has none.

    `rewrite(window, sample)`, where given, has the last word on each window.
    Of `world` processes, each draws its own rows of every batch. `batch_size` is that of all together.
    """

    def __init__(
        self,
        stream: TokenStream,
        context_length: int,
        batch_size: int,
        seed: int,
        *,
        windows: Literal["contiguous", "within_document"] = "contiguous",
        end_of_text: int = -1,
        rewrite: Callable[[np.ndarray, int], np.ndarray] | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size % world:
            raise UserError(
                f"train.batch_size={batch_size} cannot be shared by {world} processes; give a multiple of {world}"
            )
        self.stream, self.context_length, self.seed = stream, context_length, seed
        self.batch_size, self.rank, self.world, self.rewrite = batch_size, rank, world, rewrite
        self.n_documents = self.n_long_documents = 1
        if windows == "contiguous":
            # one window fewer than would fit, so that the offset ranges over more than a window
            n_windows = np.array([max((len(stream) - context_length) // context_length, 1)])
            starts, lengths = np.zeros(1, np.int64), np.array([len(stream)])
        else:
            starts, lengths = stream.documents(end_of_text)
            self.n_documents, longest = len(starts), int(lengths.max())
            starts, lengths = starts[lengths > context_length], lengths[lengths > context_length]
            self.n_long_documents = len(starts)
            n_windows = (lengths - 1) // context_length
            if not len(starts):
                raise UserError(
                    f"data.windows=within_document: the longest document has {longest} tokens; give "
                    f"model.context_length={max(longest - 1, 1)} or less, or data.windows=contiguous"
                )
        self._starts, self._first_window = starts, np.append(0, np.cumsum(n_windows))
        self._n_offsets = lengths - n_windows * context_length
        self.windows_per_epoch = int(self._first_window[-1])
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    @property
    def coverage(self) -> float:
        """The fraction of the stream's tokens that are targets in an epoch."""
        return self.windows_per_epoch * self.context_length / len(self.stream)

    def _draw_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        return generator.integers(self._n_offsets), generator.permutation(self.windows_per_epoch)

    def start(self, sample: int) -> int:
        """Where in the stream the `sample`-th window of the training begins."""
        epoch, index = divmod(sample, self.windows_per_epoch)
        offsets, order = self._epoch(epoch)
        window = int(order[index])
        text = int(np.searchsorted(self._first_window, window, side="right")) - 1
        in_text = window - int(self._first_window[text])
        return int(self._starts[text]) + int(offsets[text]) + in_text * self.context_length

    def batch(self, step: int) -> np.ndarray:
        """This process's (batch_size / world, context_length + 1) int64 windows of a step.

        Inputs are [:, :-1], targets [:, 1:].
        """
        return np.stack([self.window(sample) for sample in self.samples(step).tolist()])

    def samples(self, step: int) -> np.ndarray:
        """The numbers of the windows of `batch(step)`, counted over the whole training, (batch_size / world,)."""
        rows = self.batch_size // self.world
        return step * self.batch_size + self.rank * rows + np.arange(rows)

    def window(self, sample: int) -> np.ndarray:
        """The `sample`-th window of the training, (context_length + 1,) int64."""
        window_T1 = self.stream.read(self.start(sample), self.context_length + 1)
        return self.rewrite(window_T1, sample) if self.rewrite else window_T1
