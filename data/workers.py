"""Processes that tokenize. Results come in the order of the pieces, so their number changes nothing."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing import get_context, parent_process
from types import ModuleType

import tiktoken

from data.encode import Encoded, encode
from data.pieces import Piece
from data.text import BLOCK
from model.errors import RunFailed

AHEAD = 3  # pieces per worker that wait or are done: hides that some take longer
HELD = 48 << 20  # bytes that may wait with them: bounds memory
_one_at_a_time = threading.Lock()


def suitable(size: int | None) -> int:
    """One worker a core, fewer for a source of few pieces."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if size is None else max(min(cores, size // (2 * BLOCK)), 1)


def encode_in_order(
    pieces: Iterable[Piece], count: int, encoding: tiktoken.Encoding, val_fraction: float
) -> Iterator[Encoded]:
    """Encode `pieces` by `count` processes, or in this one when that is 1.

    Raises RunFailed when a process dies, which the system does to it when memory is short.
    """
    if count == 1:
        yield from (encode(piece, encoding, val_fraction) for piece in pieces)
        return
    waiting: deque[tuple[Future[Encoded], int]] = deque()
    # Five times faster to unpickle than to build from its files. It goes with each piece, for what a process is
    # started with is written to it while all others wait.
    pickled = pickle.dumps(encoding)
    # spawned, not forked: the caller may have threads
    pool = ProcessPoolExecutor(count, get_context("spawn"), end_with_parent)
    try:
        for piece in pieces:
            while waiting and (
                len(waiting) >= AHEAD * count or piece.held + sum(held for _, held in waiting) > HELD
            ):
                yield waiting.popleft()[0].result()
            with starting():
                waiting.append((pool.submit(_encode, piece, pickled, val_fraction), piece.held))
        while waiting:
            yield waiting.popleft()[0].result()
    except BrokenProcessPool:
        raise RunFailed(
            "a tokenizing process was killed, perhaps for want of memory; the same command goes on, "
            "with data.workers=1 in the least memory"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def starting() -> Iterator[None]:
    """A process that starts here neither sees Ctrl-C, which is ours to answer, nor runs the script again.

    multiprocessing has it import __main__ for what may be defined there, which costs a quarter of a second.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with _one_at_a_time:
        script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """A worker ends when the process that it works for does, however that ends."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _encode(piece: Piece, pickled: bytes, val_fraction: float) -> Encoded:
    return encode(piece, _unpickled(pickled), val_fraction)


@lru_cache(maxsize=1)
def _unpickled(encoding: bytes) -> tiktoken.Encoding:
    found: tiktoken.Encoding = pickle.loads(encoding)
    return found


def _wait_for_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
