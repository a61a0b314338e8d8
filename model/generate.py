"""Prefill, decode, sample.

Prompts of different lengths share one batch by starting together: all rows are prefilled up to the shortest
prompt, then stepped; a row whose prompt is longer is fed its own tokens until they are used up. Every row has
the positions that it would have alone, and nothing is padded or masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from model.cache import KVCache
from model.config import Strict, UserError
from model.gpt import GPT

GREEDY_BELOW = 1e-6  # a temperature at which dividing the logits would overflow


class Sampling(Strict):
    """How the next token is drawn. Temperature 0 is greedy; `top_k` 0 or null and `top_p` 1 are off."""

    max_new_tokens: PositiveInt = 200
    temperature: Annotated[float, Field(ge=0)] = 0.8
    top_k: NonNegativeInt | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: NonNegativeInt = 0
    cache: bool = True
    overflow: Literal["extend", "slide"] = "extend"


def pick(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from logits (V,). At least one token always survives `top_k` and `top_p`."""
    if sampling.temperature < GREEDY_BELOW:
        return int(logits_V.argmax())
    # a full sort with exact ties by id, so that k tokens are k tokens
    sorted_V, order_V = torch.sort(
        logits_V.cpu().double() / sampling.temperature, descending=True, stable=True
    )
    if sampling.top_k:
        sorted_V = sorted_V[: sampling.top_k]
    mass_V = sorted_V.softmax(0)
    # keep the token with which the mass reaches top_p
    kept_V = mass_V[(mass_V.cumsum(0) - mass_V < sampling.top_p) | (torch.arange(len(mass_V)) == 0)]
    threshold = torch.rand((), generator=generator, dtype=torch.float64) * kept_V.sum()
    index = int(torch.searchsorted(kept_V.cumsum(0), threshold, right=True))
    return int(order_V[min(index, len(kept_V) - 1)])


def window_start(length: int, context_length: int, overflow: str) -> int:
    """First token that the model still sees when `length` tokens are there.

    With `overflow=slide` the older half is dropped whenever the window is full. It depends on `length`
    alone, so decoding with and without a cache drops the same tokens.
    """
    if overflow == "extend" or length <= context_length:
        return 0
    step = max(context_length // 2, 1)
    return -(-(length - context_length) // step) * step


@torch.no_grad()
def generate(
    model: GPT,
    prompts: list[list[int]],
    sampling: Sampling,
    stop: int | None = None,
    seeds: list[int] | None = None,
) -> Iterator[list[int | None]]:
    """Yield, step by step, the new token of each prompt, None where a row has none (yet, or any more).

    A row ends after `max_new_tokens` or with the id `stop`, which is yielded. Every row draws from a
    generator of its own, seeded with `sampling.seed` or its entry of `seeds`, so what it gives does not
    depend on the other rows. Raises UserError for a bad prompt or a length that the encoding lacks.
    """
    _check_prompts(model, prompts, sampling)
    if model.position.depends_on_horizon and len(set(map(len, prompts))) > 1:
        # rows of different plans would have different angles: each is then decoded for itself
        own = seeds or [sampling.seed] * len(prompts)
        rows = [generate(model, [p], sampling, stop, [s]) for p, s in zip(prompts, own, strict=True)]
        for steps in zip_longest(*rows):
            yield [None if step is None else step[0] for step in steps]
        return
    device = next(model.parameters()).device
    context = model.config.context_length
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or [sampling.seed] * len(prompts)]
    texts, produced, live = [list(p) for p in prompts], [0] * len(prompts), [True] * len(prompts)
    length = min(map(len, prompts))
    total = max(map(len, prompts)) + sampling.max_new_tokens
    horizon = total if sampling.overflow == "extend" else min(total, context)
    cache, start = None, 0
    training = model.training
    model.eval()
    try:
        while any(live):
            begin = window_start(length, context, sampling.overflow)
            if cache is None or begin != start or not sampling.cache:
                cache, start, seen = KVCache(model.config.n_layer, horizon), begin, begin
            ids_BT = torch.tensor([text[seen:length] for text in texts], device=device)
            logits_BV = model(ids_BT, cache if sampling.cache else None, horizon)[:, -1]
            seen = length
            new: list[int | None] = []
            for row, text in enumerate(texts):
                if length < len(prompts[row]):
                    new.append(None)
                elif not live[row]:
                    new.append(None)
                    text.append(text[-1])  # keeps the batch rectangular; never shown, never seen by others
                else:
                    token = pick(logits_BV[row], sampling, generators[row])
                    text.append(token)
                    new.append(token)
                    produced[row] += 1
                    live[row] = token != stop and produced[row] < sampling.max_new_tokens
            length += 1
            yield new
    finally:
        model.train(training)


def _check_prompts(model: GPT, prompts: list[list[int]], sampling: Sampling) -> None:
    if not model.config.causal:
        raise UserError(
            "a run of objective=mlm tells masked tokens and continues no text; sample one of objective=causal"
        )
    if not prompts:
        raise UserError("prompt: none given; give one, or several as a list")
    for prompt in prompts:
        if not prompt:
            raise UserError(
                "prompt: no token; give some text, or start from end-of-text with an empty prompt="
            )
        wrong = [token for token in prompt if not 0 <= token < model.vocab_size]
        if wrong:
            raise UserError(
                f"prompt: token id {wrong[0]} is not in the vocabulary, 0 to {model.vocab_size - 1}"
            )
    limit = model.position.max_length
    total = max(map(len, prompts)) + sampling.max_new_tokens
    if sampling.overflow == "extend" and limit is not None and total > limit:
        raise UserError(
            f"prompt and max_new_tokens make {total} tokens, but {type(model.position).__name__.lower()} positions "
            f"end at {limit}; give overflow=slide, or max_new_tokens={max(limit - total + sampling.max_new_tokens, 0)} "
            f"or less"
        )
