"""What a run shows: a bar and one live line on a terminal, plain lines with the same numbers elsewhere. Not what it records.

Colours follow the terminal and NO_COLOR (rich's rules).
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

if TYPE_CHECKING:
    from .metrics import StepMetrics

REFRESH_S = 0.25
LINE_EVERY_S = 1.0
_RECENT = 0.1  # weight of the newest step in the average that the time left is estimated from


def refuse(message: str) -> None:
    """Show on standard error why nothing was started."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("refused: ", "bold red"), message))


class RunConsole:
    """The output of one rank; a quiet one prints nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str = "", *, style: str = "") -> None:
        """One line, literally."""
        self.console.print(Text(text, style=style))

    def label(self, name: str, text: str) -> None:
        """A line of a table: a name, and what there is to say about it."""
        self.console.print(Text.assemble((f"{name:<10} ", "bold"), text))

    def steps(self, total: int) -> StepView:
        """The view of a loop of `total` steps, to be entered."""
        return StepView(self.console, total)


class StepView:
    """Shows each step: live on a terminal, else as lines, at most one a second besides the first and the last."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._live = console.is_terminal and not console.quiet
        self._average = 0.0
        self._shown = 0.0
        self._pending: str | None = None
        # Refreshed by hand: rich's own thread would wake up on cores that the ranks need.
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[line]}"),
            console=console,
            auto_refresh=False,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> StepView:
        if self._live:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, line="starting")
            self._bar.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.refresh()
            self._bar.stop()
        elif self._pending is not None:
            self._console.print(Text(self._pending))

    def show(self, metrics: StepMetrics) -> None:
        """Show one step."""
        seconds = metrics.step_seconds
        # The first step also pays for what is made once; it is no measure of the others.
        known = self._average and metrics.step > 2
        self._average = self._average + _RECENT * (seconds - self._average) if known else seconds
        line = describe(metrics, (self._total - metrics.step) * self._average)
        now = time.monotonic()
        last = metrics.step == self._total
        if self._live:
            assert self._task is not None
            self._bar.update(self._task, completed=metrics.step, line=line)
            if last or now - self._shown >= REFRESH_S:
                self._shown = now
                self._bar.refresh()
            return
        width = len(str(self._total))
        text = f"step {metrics.step:>{width}}/{self._total} {100 * metrics.step // self._total:>3}%  {line}"
        if last or metrics.step == 1 or now - self._shown >= LINE_EVERY_S:
            self._shown, self._pending = now, None
            self._console.print(Text(text))
        else:
            self._pending = text  # printed in the end, if it turns out to be the last one


def describe(metrics: StepMetrics, seconds_left: float) -> str:
    """The numbers of one step in a line."""
    return (
        f"loss {metrics.loss:.4f}  lr {metrics.lr:.2e}  norm {metrics.grad_norm:.3f}  "
        f"{count(metrics.tokens_per_second)} tokens/s  {size(metrics.peak_memory_bytes)}  {duration(seconds_left)} left"
    )


def count(number: float) -> str:
    """A number in at most four characters and a unit: 950, 12.3k, 4.56M."""
    value, unit = float(number), ""
    for larger in ("k", "M", "B", "T"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    digits = 0 if not unit or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{unit}"


def size(nbytes: int) -> str:
    """Bytes as MiB, or GiB from 10 GiB on."""
    return f"{nbytes / 2**20:.0f} MiB" if nbytes < 10 * 2**30 else f"{nbytes / 2**30:.1f} GiB"


def duration(seconds: float) -> str:
    """m:ss, or h:mm:ss."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
