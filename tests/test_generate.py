"""Sampling, with and without the cache."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from model.cache import KVCache
from model.config import UserError, validate
from model.generate import Sampling, generate, pick, window_start
from model.gpt import GPT
from tests.conftest import POSITIONS, VOCAB, tiny_gpt

EXTENDABLE = [name for name in POSITIONS if name != "learned"]


def tokens_of(
    model: GPT, prompts: list[list[int]], stop: int | None = None, **options: Any
) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in prompts]
    for step in generate(model, prompts, Sampling(**options), stop):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


def prompt_of(length: int) -> list[int]:
    return torch.randint(VOCAB, (length,)).tolist()


@pytest.mark.parametrize("name", EXTENDABLE)
@pytest.mark.parametrize("length", [1, 7, 31, 32])
@pytest.mark.parametrize("overflow", ["extend", "slide"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cache_changes_no_token_also_past_the_context(
    name: str, length: int, overflow: str, temperature: float
) -> None:
    model, prompt = tiny_gpt(POSITIONS[name]), prompt_of(length)
    options = {"max_new_tokens": 20, "temperature": temperature, "overflow": overflow}
    assert tokens_of(model, [prompt], cache=True, **options) == tokens_of(
        model, [prompt], cache=False, **options
    )


@pytest.mark.parametrize("name", POSITIONS)
def test_ragged_prompts_give_what_each_gives_alone(name: str) -> None:
    model, prompts = tiny_gpt(POSITIONS[name]), [prompt_of(length) for length in (3, 11, 1, 7)]
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 12, "temperature": temperature, "seed": 4}
        alone = [tokens_of(model, [prompt], **options)[0] for prompt in prompts]
        assert tokens_of(model, prompts, **options) == alone
        assert all(len(row) == 12 for row in alone)


def test_learned_refuses_to_extend_and_slides() -> None:
    model = tiny_gpt(POSITIONS["learned"])
    with pytest.raises(
        UserError, match=r"learned positions end at 32; give overflow=slide, or max_new_tokens=22 or less"
    ):
        tokens_of(model, [prompt_of(10)], max_new_tokens=23)
    assert len(tokens_of(model, [prompt_of(10)], max_new_tokens=22)[0]) == 22
    sliding = {"max_new_tokens": 50, "temperature": 0, "overflow": "slide"}
    prompt = prompt_of(40)
    assert tokens_of(model, [prompt], **sliding) == tokens_of(model, [prompt], cache=False, **sliding)


def test_window_slides_by_half_and_never_exceeds_the_context() -> None:
    assert [window_start(n, 32, "slide") for n in (1, 32, 33, 48, 49, 100)] == [0, 0, 16, 16, 32, 80]
    assert window_start(100, 32, "extend") == 0
    for context in (1, 2, 3, 7, 32):
        assert all(1 <= n - window_start(n, context, "slide") <= context for n in range(1, 200))


def test_cache_is_allocated_once_and_filled_in_place() -> None:
    model, cache = tiny_gpt(POSITIONS["alibi"]), KVCache(2, 20)
    addresses = set()
    with torch.no_grad():
        for _ in range(20):
            model(torch.zeros(1, 1, dtype=torch.long), cache, 20)
            addresses.add(tuple(t.data_ptr() for stored in cache._layers for t in stored))
    assert len(addresses) == 1 and cache.length == 20


def test_calls_do_not_influence_each_other() -> None:
    model, a, b = tiny_gpt(POSITIONS["rope"]), prompt_of(5), [prompt_of(9)] * 3
    first = tokens_of(model, [a], max_new_tokens=8)
    tokens_of(model, b, max_new_tokens=20)
    half = generate(model, [a], Sampling(max_new_tokens=8))
    next(half)
    half.close()
    assert tokens_of(model, [a], max_new_tokens=8) == first


def test_seed_decides_and_the_global_rng_is_untouched() -> None:
    model, prompt = tiny_gpt(POSITIONS["none"]), prompt_of(5)
    state = torch.get_rng_state()
    a, b, c = (tokens_of(model, [prompt], max_new_tokens=20, temperature=2, seed=seed) for seed in (1, 1, 2))
    assert a == b != c
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_is_off_while_sampling_and_the_mode_is_restored() -> None:
    model, prompt = tiny_gpt(POSITIONS["rope"], dropout=0.5).train(), prompt_of(5)
    assert tokens_of(model, [prompt], temperature=0) == tokens_of(model, [prompt], temperature=0)
    assert model.training


def test_stop_token_ends_its_row_only() -> None:
    model, prompts = tiny_gpt(POSITIONS["rope"]), [prompt_of(4), prompt_of(6)]
    free = tokens_of(model, prompts, max_new_tokens=15, temperature=0)
    stop = free[0][4]
    rows = tokens_of(model, prompts, stop=stop, max_new_tokens=15, temperature=0)
    assert rows[0] == free[0][: free[0].index(stop) + 1]
    assert rows[1] == (free[1][: free[1].index(stop) + 1] if stop in free[1] else free[1])


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1]])
def test_bad_prompts_are_refused(prompt: list[int]) -> None:
    with pytest.raises(UserError, match="prompt:"):
        tokens_of(tiny_gpt(POSITIONS["none"]), [[1], prompt])


# --- the sampler -------------------------------------------------------------------------------------------

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, 2.0])


def draws(n: int = 2000, **options: Any) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    return Counter(pick(LOGITS, Sampling(**options), generator) for _ in range(n))


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1e-8}, {"top_k": 1}, {"top_p": 0}, {"top_p": 1e-9}]
)
def test_greedy_edges(options: dict[str, Any]) -> None:
    assert draws(50, **options) == {1: 50}


def test_frequencies_follow_the_softmax() -> None:
    expected = (LOGITS / 0.7).softmax(0)
    counts = draws(20_000, temperature=0.7)
    for token, probability in enumerate(expected.tolist()):
        assert counts[token] / 20_000 == pytest.approx(probability, abs=4 * math.sqrt(probability / 20_000))


@pytest.mark.parametrize(("options", "kept"), [
    ({"top_k": 200}, {0, 1, 2, 3, 4}),
    ({"top_k": 5}, {0, 1, 2, 3, 4}),
    ({"top_k": 0}, {0, 1, 2, 3, 4}),
    ({"top_k": 2}, {1, 3}),
    ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
    ({"top_p": 0.6}, {1, 3}),
    ({"top_p": 0.95}, {1, 2, 3, 4}),
    ({"temperature": 1e8}, {0, 1, 2, 3, 4}),
])  # fmt: skip
def test_top_k_and_top_p_keep_what_they_say(options: dict[str, Any], kept: set[int]) -> None:
    assert set(draws(**({"temperature": 1.0} | options))) == kept


def test_huge_temperature_is_near_uniform() -> None:
    assert min(draws(5000, temperature=1e8).values()) > 800


@pytest.mark.parametrize("options", [
    {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 1.5},
    {"top_p": -0.1}, {"max_new_tokens": 0}, {"seed": -1}, {"overflow": "stop"},
])  # fmt: skip
def test_bad_sampler_arguments_are_refused_naming_the_key(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(options))}="):
        validate(Sampling, options)
