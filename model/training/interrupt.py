"""Ctrl-C and SIGTERM: the first asks for a stop at the next step boundary, the second ends at once."""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Within `with Interrupt() as interrupt:`, `interrupt.signal` is the signal received, else None."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        name = signal.Signals(number).name
        print(
            f"\n{name}: saving at the next step boundary; again to quit at once", file=sys.stderr, flush=True
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
