"""Ctrl-C, SIGTERM and Slurm's signals: the first asks for a stop at the next step boundary, the second ends at once."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

# SIGUSR1 or SIGUSR2 is what Slurm is asked to send before the time limit
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ECHO_SECONDS = 5.0


class Interrupt:
    """Within `with Interrupt() as interrupt:`, `interrupt.signal` is the signal received, else None.

    Of `several` processes, each gets a Ctrl-C from the terminal and a signal from torchrun right behind it: what
    follows within seconds is the same wish. Those that do not lead keep quiet.
    """

    def __init__(self, several: bool = False, leads: bool = True) -> None:
        self.signal: int | None = None
        self._several, self._leads, self._first = several, leads, 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if not self._several or time.monotonic() - self._first > ECHO_SECONDS:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.signal, self._first = number, time.monotonic()
        if self._leads:
            name = signal.Signals(number).name
            with suppress(OSError, RuntimeError):  # a pipe whose reader has got the same Ctrl-C
                print(
                    f"\n{name}: saving at the next step boundary; again to quit at once",
                    file=sys.stderr,
                    flush=True,
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        # one who wanted to know as well, such as submitit, which then puts the job into the queue again
        handler = self._previous.get(self.signal or 0)
        if self.signal and callable(handler) and handler is not signal.default_int_handler:
            signal.raise_signal(self.signal)
