"""When a run saves, and what becomes of a save that fails. How a checkpoint is written is `meshtrain.state.saver`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Writer(Protocol):
    """What saves: `meshtrain.state.saver.Saver`, or anything alike."""

    @property
    def failed(self) -> bool: ...

    def reserve(self) -> None: ...

    def save(self, step: int, run: Mapping[str, Any]) -> float: ...

    def wait(self) -> None: ...

    def failure(self) -> Exception | None: ...


class Saving:
    """Saves every so many steps or minutes, and after the last step. Every rank makes one with the same settings."""

    def __init__(
        self,
        writer: Writer,
        record: Callable[[int, int], Mapping[str, Any]],
        *,
        every: int = 0,
        minutes: float = 0.0,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        """record: (step, tokens seen) -> what a resumed run needs to know. every: steps between saves, minutes: time between
        them; 0 means never. on_failure: told of a save that failed, and the run goes on; None has it raised instead.
        """
        self._writer, self._record = writer, record
        self._every, self._minutes, self._on_failure = every, minutes, on_failure
        self._since = time.monotonic()
        self._reserved = False
        self._lost = False

    @property
    def lost(self) -> bool:
        """Whether the newest save has failed, and the run has gone on without it. After `settle`, the same on all ranks."""
        return self._lost

    def flags(self) -> tuple[bool, ...]:
        """What this rank tells the others in every step: that it is time to save, and that a save has failed."""
        due = self._minutes > 0 and time.monotonic() - self._since >= 60 * self._minutes
        return due, self._writer.failed

    def after_step(self, step: int, tokens: int, heard: Sequence[bool], *, last: bool) -> None:
        """Save if it is time. heard: the flags, set on any rank. Raises the failure of an earlier save, unless told to go on."""
        due, failed = heard
        if failed:
            self.settle()
        if due or last or (self._every and step % self._every == 0):
            self.settle()  # so that the failure of the save before counts before another one begins
            self._writer.save(step, self._record(step, tokens))
            self._lost = False
            self._since = time.monotonic()
        elif not self._reserved:
            # In the first step, which pays for all that is made once.
            self._writer.reserve()
        self._reserved = True

    def settle(self) -> None:
        """Wait for the save that is under way. Raises its failure, unless told to go on."""
        self._writer.wait()
        error = self._writer.failure()
        if error is None:
            return
        self._lost = True
        if self._on_failure is None:
            raise error
        self._on_failure(error)
