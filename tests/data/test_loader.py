"""Batches: every window once an epoch, the same for any order of asking, ranks apart."""

from __future__ import annotations

import gc
import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest

from data.loader import OPEN_FILES, TokenStream, TrainLoader
from data.writer import write_shard
from model.config import UserError
from tests.conftest import CONTEXT, write_shards

RAMP = np.arange(2000) % 251


@pytest.mark.parametrize(
    ("n_tokens", "starts"), [(33, {0}), (34, {0, 1}), (40, set(range(8))), (100, set(range(68)))]
)
def test_every_start_occurs_and_targets_are_inputs_shifted(
    tmp_path: Path, n_tokens: int, starts: set[int]
) -> None:
    stream = TokenStream(write_shards(tmp_path / "s", RAMP[:n_tokens], RAMP), "train")
    stream.check_fits("bytes", CONTEXT)
    loader = TrainLoader(stream, CONTEXT, 4, seed=0)
    seen = set()
    for step in range(600):
        batch = loader.batch(step)
        assert batch.shape == (4, CONTEXT + 1)
        assert (batch[:, 1:] == batch[:, :-1] + 1).all() and batch.max() < n_tokens
        seen |= set(batch[:, 0].tolist())
    assert seen == starts


def test_split_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    stream = TokenStream(write_shards(tmp_path / "s", RAMP, RAMP[:5]), "val")
    with pytest.raises(UserError, match=r"val split has 5 tokens.*model.context_length=4 or less"):
        stream.check_fits("bytes", CONTEXT)
    with pytest.raises(UserError, match="train split has 32 tokens"):
        TokenStream(write_shards(tmp_path / "t", RAMP[:32], RAMP), "train").check_fits("bytes", CONTEXT)


def test_an_epoch_shows_no_target_twice_and_almost_all_of_them(tmp_path: Path) -> None:
    n = 5000
    stream = TokenStream(write_shards(tmp_path / "s", np.arange(n), [0] * 50, vocab_size=n), "train")
    loader = TrainLoader(stream, CONTEXT, 1, seed=3)
    targets = np.concatenate([loader.batch(step)[0, 1:] for step in range(loader.windows_per_epoch)])
    assert len(set(targets.tolist())) == len(targets) >= n - 3 * CONTEXT


def test_batch_is_a_pure_function_of_seed_and_step(shards: Path) -> None:
    stream = TokenStream(shards, "train")
    loader, again = TrainLoader(stream, CONTEXT, 4, seed=5), TrainLoader(stream, CONTEXT, 4, seed=5)
    other = TrainLoader(stream, CONTEXT, 4, seed=6)
    late = again.batch(1000)
    assert all((loader.batch(step) == again.batch(step)).all() for step in (3, 0, 2))
    assert (loader.batch(1000) == late).all()
    assert any((loader.batch(step) != other.batch(step)).any() for step in range(3))
    small = TrainLoader(stream, CONTEXT, 2, seed=5)
    assert (np.concatenate((small.batch(2), small.batch(3))) == loader.batch(1)).all()


def test_ranks_share_each_batch_between_them(shards: Path) -> None:
    stream = TokenStream(shards, "train")
    whole = TrainLoader(stream, CONTEXT, 12, seed=5)
    for world in (2, 3, 4):
        ranks = [TrainLoader(stream, CONTEXT, 12, seed=5, rank=r, world=world) for r in range(world)]
        for step in (0, 7, whole.windows_per_epoch // 12, 1000):
            assert (np.concatenate([rank.batch(step) for rank in ranks]) == whole.batch(step)).all()
    with pytest.raises(UserError, match=r"train.batch_size=12 cannot be shared by 5 processes"):
        TrainLoader(stream, CONTEXT, 12, seed=5, rank=0, world=5)


def test_epoch_leaves_out_less_than_a_batch(tmp_path: Path) -> None:
    n = 5000
    stream = TokenStream(write_shards(tmp_path / "s", np.arange(n), [0] * 50, vocab_size=n), "train")
    loader = TrainLoader(stream, CONTEXT, 4, seed=0)
    windows = [loader.start(sample) for sample in range(loader.windows_per_epoch)]
    assert len(set(windows)) == loader.windows_per_epoch
    assert n - 1 - loader.windows_per_epoch * CONTEXT < 4 * CONTEXT


# --- windows within documents ------------------------------------------------------------------------------

LENGTHS = [5, 33, 32, 34, 100, 1, 700, 64, 65, 66]  # of the documents, end-of-text included


@pytest.fixture
def documents(tmp_path: Path) -> TokenStream:
    """Documents whose tokens are their number, over three shards; end-of-text is 256."""
    (tmp_path / "s").mkdir()
    for i, part in enumerate((LENGTHS[:3], LENGTHS[3:7], LENGTHS[7:])):
        first = 3 * i + (i == 2)
        tokens = [t for d, n in enumerate(part, start=first) for t in [*[d] * (n - 1), 256]]
        write_shard(
            tmp_path / f"s/train-{i:05d}.bin",
            np.array(tokens),
            tokenizer="bytes",
            tokenizer_hash="h",
            vocab_size=257,
        )
    return TokenStream(tmp_path / "s", "train")


def test_documents_of_at_least_so_many_tokens_are_found_across_shards(documents: TokenStream) -> None:
    starts, lengths = documents.documents(256)
    assert lengths.tolist() == LENGTHS and starts.tolist() == np.cumsum([0, *LENGTHS[:-1]]).tolist()
    long = starts[lengths >= 100]
    assert [documents.read(int(start), 1)[0] for start in long] == [4, 6]


def test_window_within_a_document_holds_no_other(documents: TokenStream) -> None:
    loader = TrainLoader(documents, CONTEXT, 2, seed=1, windows="within_document", end_of_text=256)
    assert loader.windows_per_epoch == sum((n - 1) // CONTEXT for n in LENGTHS) == 31
    targets: set[int] = set()
    for epoch in range(40):
        seen: list[int] = []
        for sample in range(epoch * 31, (epoch + 1) * 31):
            start = loader.start(sample)
            window = documents.read(start, CONTEXT + 1)
            assert len(set(window[:-1].tolist())) == 1 and window[-1] in {window[0], 256}
            seen += range(start + 1, start + CONTEXT + 1)
        assert len(seen) == len(set(seen)) == 31 * CONTEXT
        targets |= set(seen)
    reachable = sum(n - 1 for n in LENGTHS if n > CONTEXT)  # every token of a long document, in some epoch
    assert len(targets) == reachable
    assert loader.coverage == pytest.approx(31 * CONTEXT / len(documents))
    assert (loader.n_documents, loader.n_long_documents) == (10, 7)


def test_documents_that_are_all_too_short_are_refused(documents: TokenStream) -> None:
    with pytest.raises(UserError, match=r"longest document has 700 tokens; give model.context_length=699"):
        TrainLoader(documents, 700, 2, seed=1, windows="within_document", end_of_text=256)


# --- speed and memory --------------------------------------------------------------------------------------


def test_a_thousand_shards_open_in_under_a_second_and_need_few_files(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s", RAMP, RAMP)
    content = (folder / "train-00000.bin").read_bytes()
    for i in range(1, 1000):
        (folder / f"train-{i:05d}.bin").write_bytes(content)
    began = time.perf_counter()
    stream = TokenStream(folder, "train")
    assert time.perf_counter() - began < 1 and len(stream.shards) == 1000
    loader = TrainLoader(stream, CONTEXT, 500, seed=0)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for step in range(10):
        loader.batch(step)
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after - before <= OPEN_FILES


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_resident_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    n = 40_000_000
    stream = TokenStream(write_shards(tmp_path / "s", np.arange(n) % 251, RAMP), "train")
    loader = TrainLoader(stream, 1000, 100, seed=0)
    loader.batch(0)
    gc.collect()
    before = resident()
    for step in range(loader.windows_per_epoch // 100):
        loader.batch(step)  # all 80 MB, once
    assert resident() - before < 20e6


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
