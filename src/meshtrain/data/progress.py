"""Progress over a known number of bytes: a bar on a terminal, a plain line now and then elsewhere, or
nothing."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_SHOW_AFTER_SECONDS = 0.5
_LINE_EVERY_SECONDS = 10.0


class Progress(Protocol):
    """What a long task calls as it goes on."""

    def advance(self, amount: int) -> None:
        """`amount` more bytes are done."""


class _Silent:
    def advance(self, amount: int) -> None:
        pass


class _Lines:
    """Plain lines for logs. A task of under half a second prints nothing."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._next = time.monotonic() + _SHOW_AFTER_SECONDS

    def advance(self, amount: int) -> None:
        self._done += amount
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_EVERY_SECONDS
            percent = min(100, 100 * self._done // max(self._total, 1))
            print(f"{self._title}: {percent} % of {self._total / 1e6:.1f} MB", file=sys.stderr, flush=True)


@contextmanager
def track(title: str, total: int, *, enabled: bool) -> Iterator[Progress]:
    """Show progress over `total` bytes on standard error while the block runs, if `enabled`."""
    if not enabled:
        yield _Silent()
    elif not sys.stderr.isatty():
        yield _Lines(title, total)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)

            class _Bar:
                def advance(self, amount: int) -> None:
                    bar.advance(task, amount)

            yield _Bar()
