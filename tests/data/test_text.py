"""UTF-8, safe cuts and the content's share."""

from __future__ import annotations

import numpy as np
import pytest

from data import text, tokenizer
from data.encode import ordinary
from tests.data.corpus import kjv

ALPHABET = [
    *"ab9.'?!é日。、ع🙂",
    "'s",
    "'ll",
    *(" ",) * 6,
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u2028",
    "\u0085",
    "\x1c",
    "   ",
    "\ufeff",
    "\u1680",
]


def nasty(seed: int, n: int) -> str:
    generator = np.random.default_rng(seed)
    return "".join(ALPHABET[i] for i in generator.integers(len(ALPHABET), size=n))


@pytest.mark.parametrize("name", ["gpt2", "gpt2_2k"])
@pytest.mark.parametrize("seed", range(60))
def test_tokens_of_cleanly_cut_parts_are_those_of_the_whole(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, whole = tokenizer.load(name), nasty(seed, 300)
    monkeypatch.setattr(text, "CHUNK", 40 + seed)
    _, parts, _, clean = text.as_text(whole.encode())
    assert "".join(parts) == whole and len(parts) > 3
    assert all(len(part.encode()) <= 40 + seed for part in parts)
    if clean:
        assert np.concatenate([ordinary(encoding, part) for part in parts]).tolist() == (
            encoding.encode_ordinary(whole)
        )


def test_most_nasty_texts_are_cut_cleanly_so_that_the_test_above_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clean = 0
    for seed in range(60):
        monkeypatch.setattr(text, "CHUNK", 40 + seed)
        clean += text.as_text(nasty(seed, 300).encode()).clean
    assert clean > 30


def test_real_text_in_parts_has_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    genesis = kjv()["train"][0]
    encoding = tokenizer.load("gpt2")
    monkeypatch.setattr(text, "CHUNK", 1000)
    _, parts, _, clean = text.as_text(genesis)
    assert clean and len(parts) > 100
    tokens = np.concatenate([ordinary(encoding, part) for part in parts])
    assert tokens.tolist() == encoding.encode_ordinary(genesis.decode())


@pytest.mark.parametrize("whole", ["x" * 1000, "🙂" * 250, " " * 1000, "é" * 501, "\n" * 999 + "x"])
def test_text_without_a_break_is_cut_between_characters_and_says_so(
    whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "CHUNK", 101)
    _, parts, _, clean = text.as_text(whole.encode())
    assert not clean and "".join(parts) == whole and max(len(part.encode()) for part in parts) <= 101


def test_cut_is_behind_no_other_white_space() -> None:
    for space in ("\u00a0", "\u3000", "\u2003", "\u1680", "\u0085", "\u2028", "\t", "\r", " "):
        end, clean = text.cut(f"a{space} b".encode(), 0, len(f"a{space} ".encode()))
        assert (end, clean) == (1, True) if space == " " else not clean


@pytest.mark.parametrize(
    ("data", "expected", "replaced"),
    [
        (b"caf\xc3\xa9", "café", 0),
        (b"caf\xe9 au lait", "caf\N{REPLACEMENT CHARACTER} au lait", 1),
        (b"a\xed\xa0\x80b", "a" + "\N{REPLACEMENT CHARACTER}" * 3 + "b", 3),
        ("a\N{REPLACEMENT CHARACTER}b".encode(), "a\N{REPLACEMENT CHARACTER}b", 0),
    ],
)
def test_invalid_utf8_becomes_replacement_characters(data: bytes, expected: str, replaced: int) -> None:
    found = text.as_text(data)
    assert found == (expected.encode(), [expected], replaced, True)


def test_share_is_uniform_and_from_content_alone() -> None:
    shares = [text.share(f"document {i}".encode()) for i in range(4000)]
    assert abs(np.mean(shares) - 0.5) < 0.02 and abs(np.mean(np.array(shares) < 0.1) - 0.1) < 0.02
    assert text.share(b"document 1") == shares[1]
