"""What a run shows: one live line on a terminal, as much as it has room for, plain lines with all numbers elsewhere. Not
what it records.

Colours follow the terminal and NO_COLOR (rich's rules).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .metrics import StepMetrics

REFRESH_S = 0.25
LINE_EVERY_S = 1.0
GAP = "  "
BAR = 20
DROPPED = ("memory", "norm", "rate", "speed", "left")
"""What a line that is too long for the terminal leaves out, first to last. The step and the loss are always there."""
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
        self._live: Live | None = None
        self._seen = 0
        self._average = 0.0
        self._shown = 0.0
        self._pending: str | None = None

    def __enter__(self) -> StepView:
        if self._console.is_terminal and not self._console.quiet:
            # Refreshed by hand: rich's own thread would wake up on cores that the ranks need.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            self._live.update(self._line(0, {"loss": "starting"}), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.refresh()
            self._live.stop()
        elif self._pending is not None:
            self._console.print(Text(self._pending))

    def show(self, metrics: StepMetrics) -> None:
        """Show one step."""
        seconds = metrics.step_seconds
        self._seen += 1
        # The first step also pays for what is made once; it is no measure of the others.
        known = self._seen > 2
        self._average = self._average + _RECENT * (seconds - self._average) if known else seconds
        numbers = describe(metrics, (self._total - metrics.step) * self._average)
        now = time.monotonic()
        last = metrics.step == self._total
        if self._live is not None:
            due = last or now - self._shown >= REFRESH_S
            self._shown = now if due else self._shown
            self._live.update(self._line(metrics.step, numbers), refresh=due)
            return
        text = GAP.join([self._place(metrics.step), *numbers.values()])
        if last or self._seen == 1 or now - self._shown >= LINE_EVERY_S:
            self._shown, self._pending = now, None
            self._console.print(Text(text))
        else:
            self._pending = text  # printed in the end, if it turns out to be the last one

    def _place(self, step: int) -> str:
        return f"step {step:>{len(str(self._total))}}/{self._total} {100 * step // max(1, self._total):>3}%"

    def _line(self, step: int, numbers: Mapping[str, str]) -> RenderableType:
        """What one line of the terminal holds; a bar too, where everything has room."""
        place, width = self._place(step), self._console.width
        kept = fitted(numbers, width - len(place) - len(GAP))
        cells: list[RenderableType] = [Text(text, no_wrap=True, overflow="crop") for text in (place, *kept.values())]
        if len(GAP.join([place, " " * BAR, *numbers.values()])) <= width:
            cells.insert(1, ProgressBar(max(1, self._total), step, width=BAR))
        line = Table.grid(*("" for _ in cells), padding=(0, len(GAP), 0, 0))
        line.add_row(*cells)
        return line


def fitted(numbers: Mapping[str, str], width: int) -> dict[str, str]:
    """The numbers, by name, that fit into `width` columns: what is in DROPPED goes first, from left to right."""
    kept = dict(numbers)
    for name in DROPPED:
        if len(GAP.join(kept.values())) > width:
            kept.pop(name, None)
    return kept


def describe(metrics: StepMetrics, seconds_left: float) -> dict[str, str]:
    """The numbers of one step in words, by name."""
    return {
        "loss": f"loss {metrics.loss:.4f}",
        "rate": f"lr {metrics.lr:.2e}",
        "norm": f"norm {metrics.grad_norm:.3f}",
        "speed": f"{count(metrics.tokens_per_second)} tokens/s",
        "memory": size(metrics.peak_memory_bytes),
        "left": f"{duration(seconds_left)} left",
    }


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
