"""The signals that ask a run to end: finish the step, save, and go. Which of them insist, and how a rank is told.

What the ranks of this host then get is `meshtrain.supervise`; what a loop makes of it is `meshtrain.train.loop`.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C; a batch system or service manager; a closed terminal; Slurm, some time before its time limit."""

# The others come several at a time for one event: a closed terminal sends SIGHUP twice, systemd one after SIGTERM, and
# Slurm SIGTERM at the limit that its SIGUSR1 announced.
_INSISTING = (signal.SIGINT, signal.SIGTERM)
_ONE_EVENT_S = 0.1


class Interruptions:
    """What has been asked of a run by signals so far."""

    def __init__(self) -> None:
        self.asked = False
        """Whether it is to finish its step, save and end."""
        self._firm = 0
        self._last = -math.inf

    @property
    def insisted(self) -> bool:
        """Whether it is to end at once: after a second SIGINT or SIGTERM."""
        return self._firm > 1

    def note(self, number: int, frame: object = None) -> bool:
        """Count a signal; return whether it asks for more than those before it. Usable as a signal handler."""
        now, before = time.monotonic(), self._last
        if number in _INSISTING:
            # `timeout` and torchrun send one to a process and to its group: that is one event.
            self._firm += now - before > _ONE_EVENT_S
            self._last = now
        first, self.asked = not self.asked, True
        return first or (number in _INSISTING and self.insisted)


@contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, object], object]) -> Iterator[None]:
    """Have signals handled so in the block. Outside the main thread, and for SIGHUP under nohup, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A job in the background of a script ignores SIGINT, but one that was sent is meant; under nohup SIGHUP is not.
    meant = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in meant}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old or signal.SIG_DFL)


def as_sigint(interruptions: Interruptions) -> Callable[[int, object], None]:
    """Return a handler that passes on what is new in a signal as SIGINT would come: one kind of interruption."""

    def pass_on(number: int, frame: object) -> None:
        if not interruptions.note(number):
            return
        if not callable(signal.getsignal(signal.SIGINT)):
            raise KeyboardInterrupt  # a job in the background of a script has SIGINT ignored, but this one is meant
        signal.raise_signal(signal.SIGINT)

    return pass_on
