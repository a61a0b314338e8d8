"""Preparation against the bare tokenizer and against nanoGPT's way, and the loader against the model."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from data import tokenizer, workers
from data.loader import TokenStream, TrainLoader
from data.prepare import prepare
from data.sources import DataConfig, find
from data.writer import write_shard

TOKENIZER = "gpt2"
MEAN_DOCUMENT = 4960  # bytes, as in OpenWebText: 39.8 GB in 8,013,769 documents
OPENWEBTEXT_BYTES = 39.8e9
_texts: list[str] = []  # of a process that encodes, so that handing them over is not timed


@contextmanager
def tokenizing(megabytes: int, count: int | None) -> Iterator[tuple[dict[str, Callable[[], None]], int]]:
    """What to time on the default corpus repeated to `megabytes`, by `count` processes, and its bytes.

    All have the same documents, and end when the last token is there: in the memory of the processes that
    encode (bare), in shards with checksums, or in one array on the disk.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = count or workers.suitable(None)
    documents = list(_documents(megabytes * 1_000_000))
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pq.write_table(pa.table({"text": documents}), folder / "text.parquet", row_group_size=1000)
        with get_context("spawn").Pool(count) as pool:
            parts = [documents[i::count] for i in range(count)]
            pool.map(_keep, parts, chunksize=1)
            config = DataConfig(
                source="text", path=str(folder / "text.parquet"), out=str(folder / "out"), workers=count
            )

            def ours() -> None:
                shutil.rmtree(folder / "out", ignore_errors=True)
                prepare(config, TOKENIZER, lambda _: None)

            def bare() -> None:
                pool.map(_encode, range(count), chunksize=1)

            variants = {f"bare encode_ordinary, {count} processes": bare, "scripts/prepare.py": ours}
            if find_spec("datasets"):
                variants["nanoGPT's way, datasets.map"] = _nanogpt(folder, count)
            yield variants, sum(len(document.encode()) for document in documents)


def _documents(size: int) -> Iterator[str]:
    """Real text in pieces of web length, no two alike."""
    source = find(DataConfig(source="kjv"))
    text = b"\n".join(d for piece in source.pieces(Path()) for d in piece.documents() if isinstance(d, bytes))
    generator, done = np.random.default_rng(0), 0
    for turn in itertools.count():
        start = 0
        while start < len(text) and done < size:
            length = int(generator.exponential(MEAN_DOCUMENT)) + 100
            document = f"{turn} " + text[start : start + length].decode(errors="ignore")
            start, done = start + length, done + len(document)
            yield document
        if done >= size:
            return


def _keep(texts: list[str]) -> None:
    _texts[:] = texts
    tokenizer.load(TOKENIZER)


def _encode(_: int) -> int:
    encoding = tokenizer.load(TOKENIZER)
    return sum(len(encoding.encode_ordinary(text)) for text in _texts)


def _nanogpt(folder: Path, count: int) -> Callable[[], None]:
    """The steps of nanoGPT's data/openwebtext/prepare.py: split, map with token lists, concatenate to a memmap."""
    import datasets

    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_parquet(str(folder / "text.parquet"), cache_dir=str(folder / "cache"))

    def run() -> None:
        split = whole.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
        mapped = split.map(_with_ids, remove_columns=["text"], num_proc=count, load_from_cache_file=False)
        for name, part in mapped.items():
            array = np.memmap(folder / f"{name}.bin", np.uint16, "w+", shape=(int(np.sum(part["len"])),))
            n_batches, at = min(1024, len(part)), 0
            for index in range(n_batches):
                batch = part.shard(num_shards=n_batches, index=index, contiguous=True).with_format("numpy")
                ids = np.concatenate(batch["ids"])
                array[at : at + len(ids)] = ids
                at += len(ids)
            array.flush()

    return run


def _with_ids(example: dict[str, Any]) -> dict[str, Any]:
    encoding = tokenizer.load(TOKENIZER)
    ids = [*encoding.encode_ordinary(example["text"]), encoding.eot_token]
    return {"ids": ids, "len": len(ids)}


@contextmanager
def loading(context_length: int, batch_size: int) -> Iterator[dict[str, Callable[[], None]]]:
    """A batch from ten shards of ten million tokens, and the opening of a thousand shards."""
    generator = np.random.default_rng(0)
    meta: dict[str, Any] = {"tokenizer": "gpt2_2k", "tokenizer_hash": "", "vocab_size": 2049}
    with TemporaryDirectory() as temporary:
        ten, thousand = Path(temporary, "ten"), Path(temporary, "thousand")
        for folder, count, tokens in ((ten, 10, 10_000_000), (thousand, 1000, 1000)):
            folder.mkdir()
            for i in range(count):
                write_shard(folder / f"train-{i:05d}.bin", generator.integers(2049, size=tokens), **meta)
        loader = TrainLoader(TokenStream(ten, "train"), context_length, batch_size, seed=0)
        steps = itertools.count()

        def batch() -> None:
            loader.batch(next(steps))

        def opening() -> None:
            TokenStream(thousand, "train")

        yield {"batch": batch, "opening": opening}
