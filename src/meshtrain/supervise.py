"""The ranks of one launch on this host, from fork to the last wait: start, watch, interrupt, end, report.

Used by `meshtrain.launch`, which checks and prepares. What a rank does is `meshtrain.ranks`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import IO, TYPE_CHECKING

from meshtrain.environment import RankEnvironment
from meshtrain.ranks import (
    STATUS_FAILED,
    STATUS_INTERRUPTED,
    Outcome,
    Work,
    describe,
    die_with_parent,
    flush_output,
    outcome_of,
    run_rank,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_POLL_S = 0.02
_SETTLE_S = 0.5  # for the failure that caused the first one seen to come in as well
_TERM_GRACE_S = 1.0
_KILL_GRACE_S = 30.0  # a killed process goes at once, unless the kernel holds it in a dead file system
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Child:
    """One forked rank, seen from the parent."""

    rank: int
    pid: int
    report: IO[bytes]
    outcome: Outcome | None = None


@dataclass
class Job:
    """The ranks of one `launch`, from fork to the last wait."""

    world_size: int
    grace_s: float
    interrupts: int = 0
    children: list[_Child] = field(default_factory=list)
    ending: bool = False
    """True once we began to kill: a rank that dies of a signal from then on did not fail."""

    def run(self, work: Work) -> int:
        """Start the ranks, wait until all have ended, show the first failure; return the exit status."""
        store = None
        listener = socket.socket()
        try:
            # On the loopback only, and open before the first fork: a rank that connects early waits in its
            # queue.
            listener.bind(("127.0.0.1", 0))
            listener.listen(max(128, self.world_size))
            port = listener.getsockname()[1]
            flush_output()
            for rank in range(self.world_size):
                self._fork(rank, port, listener, work)
            store = _tcp_store(port, work.timeout_s, listener.detach())  # its thread starts after the last fork
            self._watch()
        finally:
            self._kill(signal.SIGKILL)
            self._wait(_KILL_GRACE_S)
            del store
            listener.close()
            for child in self.children:
                child.report.close()
        return self._conclude()

    def _fork(self, rank: int, port: int, listener: socket.socket, work: Work) -> None:
        report = _anonymous_file()
        parent = os.getpid()
        # Until the child has its own handlers, a signal must reach neither ours in it nor nobody.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
        try:
            pid = os.fork()
            if pid == 0:
                place = place_on_this_host(rank, self.world_size, port)
                _child(place, work, report, listener, parent, mask)
            self.children.append(_Child(rank, pid, report))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _watch(self) -> None:
        """Return when all ranks have ended, or when those that have not should be killed."""
        while self._running() and not self._failed() and not self.interrupts:
            self._poll()
        if self.interrupts:
            self._kill(signal.SIGINT)
            self._wait(self.grace_s, until=lambda: self.interrupts > 1)
            if self._running() and self.interrupts == 1:
                late = ", ".join(str(child.rank) for child in self._running())
                print(
                    f"killing what has not ended {self.grace_s:g} s after the interruption: rank {late}",
                    file=sys.stderr,
                )
        elif self._running():
            self._wait(_SETTLE_S, until=lambda: self.interrupts > 0)
            self.ending = True
            self._kill(signal.SIGTERM)
            self._wait(_TERM_GRACE_S, until=lambda: self.interrupts > 0)
        self.ending = True

    def _running(self) -> list[_Child]:
        return [child for child in self.children if child.outcome is None]

    def _failed(self) -> bool:
        return any(child.outcome is not None and child.outcome.status != 0 for child in self.children)

    def _poll(self) -> None:
        for child in self._running():
            # Without reaping it yet: until then its process group cannot be anybody else's.
            if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _signal_group(child.pid, signal.SIGKILL)  # what the rank itself has started and left
                child.outcome = self._outcome(child, os.waitpid(child.pid, 0)[1])
        if self._running():
            time.sleep(_POLL_S)

    def _wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = time.monotonic() + seconds
        while self._running() and not until() and time.monotonic() < end:
            self._poll()

    def _kill(self, number: int) -> None:
        for child in self._running():
            if number == signal.SIGINT:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, number)  # the rank decides what its own children get
            else:
                _signal_group(child.pid, number)

    def _outcome(self, child: _Child, wait_status: int) -> Outcome:
        child.report.seek(0)
        written = child.report.read()
        if written:
            with suppress(ValueError, TypeError):
                return Outcome(**json.loads(written))
        code = os.waitstatus_to_exitcode(wait_status)
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            if self.ending:
                return Outcome(child.rank, 0, "ended")
            return Outcome(child.rank, STATUS_FAILED, "signal", name, name, at=time.monotonic())
        return Outcome(child.rank, code or STATUS_FAILED, "exit", "it left without a report (os._exit?)")

    def _conclude(self) -> int:
        """Show the failure that came first, and return the exit status."""
        outcomes = [child.outcome for child in self.children if child.outcome is not None]
        failures = sorted((o for o in outcomes if o.status != 0), key=lambda o: (o.secondary, o.at))
        if self.interrupts:
            # Ranks stop at different places, so errors about lost peers mean nothing; any other is a failed
            # ending.
            failures = [o for o in failures if not o.secondary and o.kind in ("error", "refused")]
            if self.interrupts > 1 or not failures:
                return STATUS_INTERRUPTED
        if not failures:
            return 0
        first = failures[0]
        lines = [describe(first, self.world_size)] if first.kind != "interrupted" else []
        lines += [
            f"rank {o.rank} failed too: {o.summary.splitlines()[0]}" for o in failures[1:] if _stands_alone(o, first)
        ]
        finished = [str(o.rank) for o in outcomes if o.kind == "done" and o.at < first.at]
        if first.secondary and finished:
            lines.append(f"rank {', '.join(finished)} had ended before: do all ranks make the same number of steps?")
        if lines:
            print("\n".join(lines), file=sys.stderr, flush=True)
        return first.status


def _stands_alone(other: Outcome, first: Outcome) -> bool:
    """Whether another rank's failure tells something that the first does not."""
    return bool(other.summary) and not other.secondary and other.summary != first.summary


def _child(
    place: RankEnvironment,
    work: Work,
    report: IO[bytes],
    listener: socket.socket,
    parent: int,
    mask: set[int | signal.Signals],
) -> None:
    """Be a forked rank; never returns."""
    status = STATUS_FAILED
    try:
        try:
            # A session of its own: the terminal's Ctrl-C reaches the parent alone, a kill all that it starts.
            os.setsid()
            die_with_parent(parent)
            listener.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            outcome = _in_child(place, work)
        except BaseException as error:
            outcome = outcome_of(error, place.rank)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        flush_output()
        report.write(json.dumps(asdict(outcome)).encode())
        report.flush()
        status = outcome.status
    finally:
        os._exit(status)  # whatever happened: the frames and exit handlers above are the parent's


def _in_child(place: RankEnvironment, work: Work) -> Outcome:
    from meshtrain.mesh import loopback_interface

    with loopback_interface():
        return run_rank(place, work, connect=lambda: _tcp_store(place.master_port, work.timeout_s))


def _tcp_store(port: int, timeout_s: float, listen_fd: int | None = None) -> TCPStore:
    import torch.distributed as dist

    return dist.TCPStore(
        "127.0.0.1", port, is_master=listen_fd is not None, timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False, master_listen_fd=listen_fd,
    )  # fmt: skip


def _signal_group(pid: int, number: int) -> None:
    """Signal a rank and all that it started; a rank that has not made its session yet is signalled alone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _anonymous_file() -> IO[bytes]:
    """A file without a name, for a rank's report: in memory if possible, since failing runs fill disks."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("meshtrain-rank"), "w+b")
    return tempfile.TemporaryFile()


def place_on_this_host(rank: int, world_size: int, port: int) -> RankEnvironment:
    """Return the place of a rank of a job that runs on this host alone."""
    return RankEnvironment("meshtrain", rank, world_size, rank, world_size, "127.0.0.1", port)


@contextmanager
def count_interrupts(job: Job) -> Iterator[None]:
    """Have SIGINT, SIGTERM and SIGHUP counted instead of raised, while ranks run. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def count(number: int, frame: object) -> None:
        job.interrupts += 1

    # A job in the background of a script ignores SIGINT, but one that was sent is meant; under nohup SIGHUP
    # is not.
    handled = [n for n in _INTERRUPTS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, count) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
