"""What shards hold: checked byte by byte, and how long their documents are."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from data import tokenizer
from data.loader import TokenStream
from data.shards import Shard
from model.config import UserError

LENGTHS = [2**power for power in range(7, 21)]  # 128 to 1,048,576 tokens


def shard_table(stream: TokenStream, tokenizer_name: str, verify: bool) -> list[dict[str, Any]]:
    """A row per shard. With `verify`, every byte is read: checksum, bytes per token and longest document.

    Raises UserError when a shard is damaged or was made with another version of its tokenizer.
    """
    end_of_text = tokenizer.vocab_size(tokenizer_name) - 1
    rows: list[dict[str, Any]] = []
    quiet = not (verify and sys.stderr.isatty())
    for shard in track(
        stream.shards,
        f"verifying {stream.split}",
        console=Console(stderr=True),
        transient=True,
        disable=quiet,
    ):
        row: dict[str, Any] = {"shard": shard.path.stem, "docs": shard.n_documents, "tokens": shard.n_tokens}
        row |= _read_through(stream, shard, end_of_text) if verify else {}
        rows.append(row | {"tokenizer": shard.tokenizer, "sha256": shard.sha256[:8]})
    return rows


def _read_through(stream: TokenStream, shard: Shard, end_of_text: int) -> dict[str, Any]:
    if shard.tokenizer is not None and shard.tokenizer_hash != tokenizer.fingerprint(
        tokenizer.load(shard.tokenizer)
    ):
        raise UserError(
            f"{shard.path}: made with another {shard.tokenizer} than this one; prepare the data again"
        )
    table = stream.bytes_per_token()
    n_bytes = n_ends = 0

    def count(chunk: np.ndarray) -> None:
        nonlocal n_bytes, n_ends
        n_ends += int((chunk == end_of_text).sum())
        if table is not None:
            n_bytes += int(table[chunk[chunk < len(table)]].sum())  # a damaged id is found once all is read

    shard.verify(count)
    starts = shard.document_starts(end_of_text)
    return {
        "B/token": n_bytes / max(shard.n_tokens - n_ends, 1) if table is not None else None,
        "longest": int(np.diff(np.append(starts, shard.n_tokens)).max(initial=0)),
    }


def length_table(stream: TokenStream, tokenizer_name: str) -> list[dict[str, Any]]:
    """Documents of at least so many tokens, and the fraction of all documents and tokens that they are."""
    _, lengths = stream.documents(tokenizer.vocab_size(tokenizer_name) - 1)
    rows = []
    for least in [1, *LENGTHS]:
        found = lengths[lengths >= least]
        if len(found):
            rows.append(
                {
                    "tokens, at least": least,
                    "documents": len(found),
                    "of documents": len(found) / len(lengths),
                    "of tokens": float(found.sum() / lengths.sum()),
                }
            )
    return rows


def quantiles(stream: TokenStream, tokenizer_name: str) -> str:
    """The spread of the lengths in one sentence."""
    _, lengths = stream.documents(tokenizer.vocab_size(tokenizer_name) - 1)
    low, median, high, highest = np.quantile(lengths, [0.1, 0.5, 0.9, 0.99], method="higher")
    return (
        f"{stream.split}: {len(lengths):,} documents; of tokens a document 10 % have at most {low:,}, half "
        f"{median:,}, 90 % {high:,}, 99 % {highest:,}, the longest {lengths.max():,}"
    )
