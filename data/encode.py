"""What a worker does: a piece of a source in, the token ids of its documents out."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import tiktoken

from data import text
from data.pieces import EMPTY, NOT_UTF8, Piece
from data.shards import token_dtype
from data.text import BYTE_ORDER_MARK, Split

FAILED, PART_NOT_UTF8 = "tokenizer failed", "part not UTF-8"
REPAIRED, CUT = "repaired", "cut"


class Encoded(NamedTuple):
    """Token ids by split, each document ended by end-of-text, and what happened on the way."""

    tokens: dict[Split, np.ndarray]
    counts: dict[str, int]  # documents, bytes (of text), repaired, cut
    left_out: dict[str, int]  # documents by reason
    size: int  # bytes of the source


def encode(piece: Piece, encoding: tiktoken.Encoding, val_fraction: float) -> Encoded:
    """Tokenize the documents of a piece. A document that cannot be is left out and counted, never fatal.

    Invalid UTF-8 becomes U+FFFD, up to one sequence in a hundred bytes; with more, the document is left out.
    """
    dtype = token_dtype(encoding.n_vocab)
    end_of_text = np.array([encoding.eot_token], dtype)
    parts: dict[Split, list[np.ndarray]] = {"train": [], "val": []}
    documents = n_bytes = n_repaired = n_cut = 0
    left_out: Counter[str] = Counter()
    is_part = piece.part_of is not None
    for document in piece.documents():
        if isinstance(document, str):
            left_out[document] += 1
            continue
        content = text.as_text(document if piece.follows else document.removeprefix(BYTE_ORDER_MARK))
        reason = None
        if not is_part and (not content.data or content.data.isspace()):
            reason = EMPTY
        elif not text.is_text(content.data, content.replaced):
            reason = PART_NOT_UTF8 if is_part else NOT_UTF8
        else:
            try:
                tokens = [ordinary(encoding, string) for string in content.strings]
            except BaseException as error:
                # tiktoken's own, of which the second is no Exception: its pattern gave up
                if not (isinstance(error, ValueError) or type(error).__name__ == "PanicException"):
                    raise
                reason = FAILED
        if reason is not None:
            left_out[reason] += 1
            if not is_part:
                continue
            tokens = []  # the document goes on without this part, and has its end
        else:
            n_bytes += len(content.data)
            n_repaired += content.replaced > 0
            n_cut += not content.clean
        number = text.share(document) if piece.part_of is None else piece.part_of
        split: Split = piece.split or ("val" if number < val_fraction else "train")
        parts[split] += tokens
        if not piece.continues:
            parts[split].append(end_of_text)
            documents += 1
    joined: dict[Split, np.ndarray] = {
        split: np.concatenate(arrays, dtype=dtype, casting="unsafe")  # all ids fit: they are this encoding's
        for split, arrays in parts.items()
        if arrays
    }
    counts = {"documents": documents, "bytes": n_bytes, REPAIRED: n_repaired, CUT: n_cut}
    return Encoded(joined, counts, dict(left_out), piece.size)


def ordinary(encoding: tiktoken.Encoding, string: str) -> np.ndarray:
    """The ids of `encode_ordinary`, in which text that looks like a special token is text, as uint32.

    A quarter faster than by way of a list.
    """
    return encoding.encode_to_numpy(string, disallowed_special=())
