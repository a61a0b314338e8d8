"""Held-out loss: every token once, the same for any batch size, and no trace left in the training."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.loader import TokenStream
from data.prepare import prepare
from data.sources import DataConfig
from model.config import UserError
from model.evaluation import attention, perplexity
from model.evaluation.perplexity import score, tally, token_losses
from model.evaluation.windows import Protocol, Windows, choose_documents, document_windows, stream_windows
from tests.conftest import CONTEXT, POSITIONS, ROOT, VOCAB, evaluate, tiny_gpt, write_shards


@pytest.fixture
def val(tmp_path: Path) -> TokenStream:
    tokens = np.random.default_rng(0).integers(VOCAB, size=1000)
    return TokenStream(write_shards(tmp_path / "s", tokens, tokens), "val")


def test_loss_is_weighted_by_tokens_not_by_batches(tmp_path: Path) -> None:
    """110 targets: 100 at loss 1.0 and 10 at loss 3.0."""
    tokens = [0] + [1] * 110
    stream = TokenStream(write_shards(tmp_path / "s", tokens, tokens), "val")

    class ByPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.anchor = 0, nn.Parameter(torch.zeros(()))

        def hidden(self, ids: Tensor) -> Tensor:
            index = torch.arange(self.seen, self.seen + ids.numel()).view_as(ids)
            self.seen += ids.numel()
            p = torch.where(index < 100, math.exp(-1.0), math.exp(-3.0))
            return torch.stack(((1 - p).log(), p.log()), -1)

        def head(self, hidden: Tensor) -> Tensor:
            return hidden

    score = evaluate(ByPosition(), stream, 100, batch_tokens=100)  # type: ignore[arg-type]
    assert score.tokens == 110
    assert score.loss == pytest.approx(1.181818, abs=1e-6)
    assert score.perplexity == pytest.approx(3.2603, abs=1e-4)


@pytest.mark.parametrize("length", [1, 7, 32, 100, 999, 5000])
def test_every_token_is_scored_once_at_ln_v_by_a_uniform_model(val: TokenStream, length: int) -> None:
    class Uniform(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.anchor = nn.Parameter(torch.zeros(()))

        def hidden(self, ids: Tensor) -> Tensor:
            return torch.zeros(*ids.shape, VOCAB)

        def head(self, hidden: Tensor) -> Tensor:
            return hidden

    score = evaluate(Uniform(), val, length)  # type: ignore[arg-type]
    assert score.tokens == 999
    assert score.loss == pytest.approx(math.log(VOCAB), abs=1e-6)
    assert score.standard_error == (pytest.approx(0, abs=1e-6) if length < 999 else None)


@pytest.mark.parametrize("name", POSITIONS)
def test_batch_size_and_seed_do_not_matter(val: TokenStream, name: str) -> None:
    model = tiny_gpt(POSITIONS[name])
    losses = set()
    for batch in (1, 3, 8):
        torch.manual_seed(batch)
        losses.add(round(evaluate(model, val, CONTEXT, batch_tokens=batch * CONTEXT).loss, 5))
    assert len(losses) == 1


def test_max_tokens_limits_and_asking_for_more_scores_what_there_is(val: TokenStream) -> None:
    model = tiny_gpt(POSITIONS["rope"])
    assert evaluate(model, val, CONTEXT, max_tokens=100).tokens == 100
    assert evaluate(model, val, CONTEXT, max_tokens=10**9) == evaluate(model, val, CONTEXT)


@pytest.mark.parametrize("world", [2, 3, 40])  # 40: more than there are batches
def test_parts_of_a_validation_add_up_to_the_whole(val: TokenStream, world: int) -> None:
    model, windows, seen = tiny_gpt(POSITIONS["alibi"]), stream_windows(len(val), CONTEXT), []
    options = {"batch_tokens": 2 * CONTEXT, "on_batch": lambda done, total: seen.append((done, total))}
    parts = [tally(model, val, windows, part=slice(rank, None, world), **options) for rank in range(world)]
    assert sum(done == total for done, total in seen) == min(world, 17) and len(seen) == 17
    together, alone = sum(parts[1:], parts[0]).score(), tally(model, val, windows, **options).score()
    assert (together.loss, together.standard_error) == (alone.loss, alone.standard_error)
    assert (together.tokens, together.bits_per_byte) == (alone.tokens, alone.bits_per_byte)
    for bucket, other in zip(together.by_position, alone.by_position, strict=True):
        assert bucket == pytest.approx(other, rel=1e-12)


def test_dropout_is_off_mode_restored_and_rng_untouched(val: TokenStream) -> None:
    model = tiny_gpt(POSITIONS["rope"], dropout=0.5).train()
    state = torch.get_rng_state()
    assert evaluate(model, val, CONTEXT) == evaluate(model, val, CONTEXT)
    assert model.training and torch.equal(torch.get_rng_state(), state)


def test_bits_per_byte_uses_the_bytes_of_the_scored_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("In the beginning God created é 🙂\n" * 60)
    config = DataConfig(source="text", path=str(tmp_path / "a.txt"), out=str(tmp_path / "out"))
    stream = TokenStream(prepare(config, "bytes", lambda _: None), "val")
    score = evaluate(tiny_gpt(POSITIONS["none"]), stream, CONTEXT)
    n_bytes = score.tokens - 1  # every scored token is one byte, but for the end-of-text
    assert score.bits_per_byte == pytest.approx(score.loss * score.tokens / math.log(2) / n_bytes)


# --- protocols ---------------------------------------------------------------------------------------------

PROTOCOLS: list[Protocol] = ["non_overlapping", "sliding", "last"]


def scored(windows: Windows) -> list[int]:
    """The position in the stream of every scored target."""
    return [
        start + 1 + place
        for start, width, skip in zip(*windows[:3], strict=True)
        for place in range(int(skip), int(width))
    ]


@pytest.mark.parametrize("stride", [1, 16, 32, 40])
@pytest.mark.parametrize("window", [1, 7, 32, 100, 200])
def test_sliding_scores_each_token_once_with_the_context_promised(window: int, stride: int) -> None:
    starts, lengths = np.array([5, 200]), np.array([101, 33])
    if stride > window:
        with pytest.raises(UserError, match=f"stride={stride}: more than the window of {window} tokens"):
            document_windows(starts, lengths, "sliding", window, stride, 1)
        return
    windows = document_windows(starts, lengths, "sliding", window, stride, 1)
    assert scored(windows) == [*range(6, 106), *range(201, 233)]
    for start, width, skip, cluster in zip(*windows, strict=True):
        first = starts[cluster]
        assert first <= start and start + width < first + lengths[cluster]
        assert width == window or start == first  # only the first window may be short, as its document is
        assert skip >= window - stride or start == first


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_length_scores_the_same_tokens(protocol: Protocol) -> None:
    starts, lengths = np.array([0, 500, 900]), np.array([400, 129, 300])
    found = [
        sorted(scored(document_windows(starts, lengths, protocol, length, min(16, length), 128)))
        for length in (1, 16, 32, 100, 128)
    ]
    assert all(targets == found[0] for targets in found) and len(set(found[0])) == len(found[0])
    wanted = (lengths - (128 if protocol == "last" else 1)).sum()
    assert len(found[0]) == wanted


def test_last_scores_only_tokens_with_the_longest_context_in_the_last_places() -> None:
    windows = document_windows(np.array([10]), np.array([300]), "last", 64, 16, 128)
    assert scored(windows) == list(range(10 + 128, 310))
    assert (windows.width == 64).all() and (windows.skip >= 64 - 16).all() and windows.start.min() >= 10


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_limit_on_tokens_is_exact_and_the_same_for_every_length(protocol: Protocol) -> None:
    starts, lengths = np.array([0, 50, 500]), np.array([50, 400, 700])
    chosen = choose_documents(starts, lengths, protocol, 64, 500)
    for length in (16, 64):
        assert document_windows(*chosen, protocol, length, 8, 64).targets == 500
    assert chosen[0].tolist() == [50, 500]  # not that of 50 tokens, too short for a window of 64
    assert chosen[1][1] - chosen[1][0] in (0, 1)  # 250 scored tokens of each


def test_limit_takes_from_all_documents_but_no_less_than_a_window() -> None:
    starts = np.arange(0, 40_000, 1000)
    lengths = np.full(40, 1000)
    lengths[0] = 110
    first, cut = choose_documents(starts, lengths, "non_overlapping", 100, 1009)
    assert first.tolist() == [0, 4000, 8000, 12000, 16000, 20000, 24000, 28000, 32000, 36000]
    assert sorted((cut - 1).tolist()) == [100] * 1 + [101] * 9
    _, whole = choose_documents(starts, lengths, "non_overlapping", 100, 10**6)
    assert whole.tolist() == lengths.tolist()


def test_strided_uniform_model_has_ln_v_for_every_stride(tmp_path: Path) -> None:
    """101 tokens, window 32: 100 scored, each once, at ln 257."""
    tokens = np.arange(101) % 256
    stream = TokenStream(write_shards(tmp_path / "s", tokens, tokens), "val")
    model = tiny_gpt(POSITIONS["none"])
    with torch.no_grad():
        model.embedding.weight.zero_()
    for stride in (32, 16, 1):
        windows = document_windows(*stream.documents(256), "sliding", 32, stride, 1)
        found = score(model, stream, windows)
        assert found.tokens == 100 and found.loss == pytest.approx(5.5491, abs=1e-4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_loss_equals_a_plain_loop_over_tokens(val: TokenStream, protocol: Protocol) -> None:
    model = tiny_gpt(POSITIONS["rope"])
    windows = document_windows(np.array([3]), np.array([150]), protocol, 20, 6, 40)
    total, count = 0.0, 0
    by_place: dict[int, list[float]] = {}
    with torch.no_grad():
        for start, width, skip, _ in zip(*windows, strict=True):
            ids = torch.from_numpy(val.read(int(start), int(width) + 1))[None]
            for place in range(int(skip), int(width)):
                logits = model(ids[:, : place + 1], horizon=int(width))[0, -1]
                nats = -float(logits.log_softmax(-1)[ids[0, place + 1]])
                total, count = total + nats, count + 1
                by_place.setdefault(place, []).append(nats)
    found = score(model, val, windows, edge=10, batch_tokens=100)
    assert (found.tokens, found.loss) == (count, pytest.approx(total / count, rel=1e-5))
    for bucket in found.by_position:
        inside = [n for place, ns in by_place.items() for n in ns if bucket["from"] <= place < bucket["to"]]
        assert bucket["tokens"] == len(inside) and bucket["loss"] == pytest.approx(np.mean(inside), rel=1e-5)
    assert sum(bucket["tokens"] for bucket in found.by_position) == count
    assert any(bucket["to"] == 10 for bucket in found.by_position) or protocol == "last"


def test_standard_error_is_over_documents(tmp_path: Path) -> None:
    """Two documents of equal length at losses a and b: the mean of two draws, |a - b| / 2."""
    tokens = [*([1] * 40), 256, *([2] * 40), 256]
    stream = TokenStream(write_shards(tmp_path / "s", tokens, tokens), "val")
    model = tiny_gpt(POSITIONS["none"])
    starts, lengths = stream.documents(256)
    both = score(model, stream, document_windows(starts, lengths, "non_overlapping", 10, 10, 1))
    each = [
        score(model, stream, document_windows(starts[i : i + 1], lengths[:1], "non_overlapping", 10, 10, 1))
        for i in (0, 1)
    ]
    assert both.clusters == 2 and each[0].standard_error is None
    assert both.standard_error == pytest.approx(abs(each[0].loss - each[1].loss) / 2, rel=1e-6)


def test_losses_in_pieces_are_those_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = tiny_gpt(POSITIONS["alibi"]), torch.randint(VOCAB, (3, 101))
    with torch.enable_grad():
        whole = token_losses(model, windows)
    monkeypatch.setattr(perplexity, "HEAD_TOKENS", 30)
    with torch.no_grad():
        torch.testing.assert_close(token_losses(model, windows), whole)


# --- attention statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POSITIONS)
def test_attention_statistics_equal_the_weights_spelt_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ROWS", 10)
    model = tiny_gpt(POSITIONS[name], n_layer=3)
    T, trained = 32, 20
    ids = torch.randint(VOCAB, (2, T))
    seen: list[dict[str, Any]] = []
    real = model.blocks[0].attn.__class__.forward.__globals__["attend"]

    def watching(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(v.shape[-1])
        scores += 0 if options["bias_HTS"] is None else options["bias_HTS"]
        p = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
        i, j = torch.arange(T)[:, None], torch.arange(T)
        seen.append({"entropy": -torch.xlogy(p, p).sum(-1), "distance": (p * (i - j)).sum(-1)})
        return real(q, k, v, **options)

    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr("model.attention.attend", watching)
        model(ids)
    rows = attention.attention_statistics(model, ids, trained)
    assert [(row["layer"], row["side"]) for row in rows] == [
        (layer, side) for layer in range(3) for side in ("inside", "outside")
    ]
    for row in rows:
        part = slice(1, trained) if row["side"] == "inside" else slice(trained, T)
        for key in ("entropy", "distance"):
            expected = seen[row["layer"]][key].mean((0, 1))[part].mean()
            assert row[key] == pytest.approx(float(expected), rel=1e-4)


def test_uniform_attention_is_1_of_uniform() -> None:
    model = tiny_gpt(POSITIONS["none"])
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.zero_()
    for row in attention.attention_statistics(model, torch.randint(VOCAB, (1, 100)), CONTEXT):
        assert row["of_uniform"] == pytest.approx(1, abs=1e-4)
        assert row["distance_of_uniform"] == pytest.approx(1, abs=1e-4)


def test_window_within_the_trained_length_has_no_outside() -> None:
    rows = attention.attention_statistics(tiny_gpt(POSITIONS["rope"]), torch.randint(VOCAB, (1, 20)), CONTEXT)
    assert {row["side"] for row in rows} == {"inside"}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("name", ["none", "rope", "alibi", "sinusoidal"])
def test_loss_of_32768_tokens_fits_4_gigabytes(name: str) -> None:
    """In a process of its own, whose peak is then that of the evaluation."""
    code = (
        "import resource, sys, torch\n"
        "from model.evaluation.perplexity import token_losses\n"
        "from model.load import build_model\n"
        "from tests.conftest import compose_config\n"
        "model = build_model(compose_config(f'position={sys.argv[1]}', 'model=mini')).eval()\n"
        "with torch.no_grad():\n"
        "    assert token_losses(model, torch.randint(2049, (1, 32769))).isfinite().all()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, name], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 4_000_000  # kB
    print(name, result.stdout)
