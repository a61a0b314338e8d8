"""How far a preparation is: a live line on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS_BETWEEN_LINES = 10


def live_bar(console: Console, *before: ProgressColumn) -> Bar:
    """A bar with text, time taken and time left behind the columns given; nothing where there is no terminal."""
    return Bar(
        *before,
        BarColumn(bar_width=20),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class Progress:
    """Documents, tokens, MB of text a second and time left, by bytes of the source or expected documents."""

    def __init__(
        self, size: int | None, done: int, expected_documents: int, counts: Mapping[str, int]
    ) -> None:
        self._expected, self._began, self._said = expected_documents, time.monotonic(), time.monotonic()
        self._bytes_before = counts.get("bytes", 0)
        self._total = expected_documents or size
        self._first = counts.get("documents", 0) if expected_documents else done
        self._console = Console(soft_wrap=True)
        self._bar = live_bar(self._console)
        self._task = self._bar.add_task("", total=self._total, completed=self._first, text="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, source_bytes: int, counts: Mapping[str, int]) -> None:
        now = time.monotonic()
        speed = (counts["bytes"] - self._bytes_before) / (now - self._began) / 1e6
        of = f" of about {self._expected:,}" if self._expected else ""
        text = (
            f"{counts['documents']:,}{of} documents | {(counts['train'] + counts['val']) / 1e6:,.1f} M tokens | "
            f"{speed:.1f} MB/s"
        )
        done = counts["documents"] if self._expected else source_bytes
        self._bar.update(self._task, completed=done, text=text)
        if not self._console.is_terminal and now - self._said > SECONDS_BETWEEN_LINES:
            left = self._total and (now - self._began) / max(done - self._first, 1) * (self._total - done)
            print(text + (f" | ETA {left:,.0f} s" if left else ""), flush=True)
            self._said = now
