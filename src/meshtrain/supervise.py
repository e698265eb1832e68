"""One generation of ranks on this host, from fork to the last wait: start, watch, interrupt, end.

Used by `meshtrain.launch`, which checks and prepares, and `meshtrain.restarts`, which starts the next one after a failure.
What a rank does is `meshtrain.ranks`; what the ranks' ends amount to is `meshtrain.verdict`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from meshtrain.environment import RankEnvironment
from meshtrain.ranks import STATUS_FAILED, Outcome, Work, die_with_parent, flush_output, outcome_of, run_rank
from meshtrain.signals import ASKING, Interruptions
from meshtrain.verdict import Verdict, judge

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_S = 0.02
_SETTLE_S = 0.5  # for the failure that caused the first one seen to come in as well
_TERM_GRACE_S = 0.5  # a rank without a handler of its own goes at once
_KILL_GRACE_S = 30.0  # a killed process goes at once, unless the kernel holds it in a dead file system
_STRAGGLER_S = 10.0  # ranks end together; one that does not is waiting for a lost peer, or stopped


@dataclass
class _Child:
    """One forked rank, seen from the parent."""

    rank: int
    pid: int
    report: IO[bytes]
    outcome: Outcome | None = None


@dataclass
class Generation:
    """The ranks of one start. Nothing of them is left when `run` returns: no process, port, thread or descriptor."""

    world_size: int
    grace_s: float
    interruptions: Interruptions
    restart: int = 0
    """How many generations there were before."""
    children: list[_Child] = field(default_factory=list)
    interrupted: bool = False
    """True once the ranks were told to end by themselves."""
    ending: bool = False
    """True once we began to kill: a rank that dies of a signal from then on did not fail."""
    met: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1))
    """Memory shared with the ranks: not zero once they have met, and the function has been called."""
    stopped: list[int] = field(default_factory=list)
    """Ranks that were stopped when others had failed."""

    def run(self, work: Work) -> Verdict:
        """Start the ranks, wait until all have ended, show the first failure."""
        store = None
        listener = socket.socket()
        try:
            # On the loopback only, and open before the first fork: a rank that connects early waits in its queue.
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
            self.met.close()
            for child in self.children:
                child.report.close()
        verdict = judge(
            [child.outcome for child in self.children if child.outcome is not None],
            self.world_size,
            interrupted=self.interrupted,
            at_once=self.interruptions.insisted,
            stopped=self.stopped,
            alive=[child.rank for child in self._running()],
        )
        if verdict.text:
            say(verdict.text)
        return verdict

    def _fork(self, rank: int, port: int, listener: socket.socket, work: Work) -> None:
        report = _anonymous_file()
        parent = os.getpid()
        # Until the child has its own handlers, a signal must reach neither ours in it nor nobody.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
        try:
            pid = os.fork()
            if pid == 0:
                place = place_on_this_host(rank, self.world_size, port)
                _child(place, work, self, report, listener, parent, mask)
            self.children.append(_Child(rank, pid, report))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _watch(self) -> None:
        """Return when all ranks have ended, or when those that have not should be killed."""
        while self._running() and not self._failed() and not self.interruptions.asked:
            self._poll()
        if self._running() and self.interruptions.asked:
            self._let_end()
        elif self._running():
            self._wait(_SETTLE_S, until=lambda: self.interruptions.asked)
            self.stopped = [child.rank for child in self._running() if _is_stopped(child.pid)]
            self.ending = True
            self._kill(signal.SIGTERM)
            self._wait(_TERM_GRACE_S, until=lambda: self.interruptions.asked)
        self.ending = True

    def _let_end(self) -> None:
        """Pass an interruption on, and leave the ranks their grace: shorter where there is nothing to wait for."""
        self.interrupted = True
        if not self.met[0]:
            return  # nothing is to be saved yet, and a rank that waits in C++ for one that has gone hears no signal
        asked, now = len(self._running()), time.monotonic()
        end, why = now + self.grace_s, f"{self.grace_s:g} s after the interruption"
        self._kill(signal.SIGINT)
        while (left := self._running()) and now < end and not self.interruptions.insisted:
            stopped = any(_is_stopped(child.pid) for child in left)
            if (stopped or len(left) < asked) and now + _STRAGGLER_S < end:
                end = now + _STRAGGLER_S
                why = f"{_STRAGGLER_S:g} s after {'one of the ranks was stopped' if stopped else 'others had ended'}"
            self._poll()
            now = time.monotonic()
        if left and not self.interruptions.insisted:
            say(f"killing what has not ended {why}: rank {', '.join(str(child.rank) for child in left)}")

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
            time.sleep(POLL_S)

    def _wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = time.monotonic() + seconds
        while self._running() and not until() and time.monotonic() < end:
            self._poll()

    def _kill(self, number: int) -> None:
        for child in self._running():
            _signal_group(child.pid, signal.SIGCONT)  # a stopped process gets no other signal until it goes on
            if number == signal.SIGINT:
                _signal_main_thread(child.pid, number)  # the rank decides what its own children get
            else:
                _signal_group(child.pid, number)

    def _outcome(self, child: _Child, wait_status: int) -> Outcome:
        child.report.seek(0)
        written = child.report.read()
        if written:
            with suppress(ValueError, TypeError):
                return Outcome(**json.loads(written))
        code, now = os.waitstatus_to_exitcode(wait_status), time.monotonic()
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            if self.ending:
                return Outcome(child.rank, 0, "ended")
            return Outcome(child.rank, STATUS_FAILED, "signal", name, name, at=now)
        return Outcome(child.rank, code or STATUS_FAILED, "exit", "it left without a report (os._exit?)", at=now)


def _child(
    place: RankEnvironment,
    work: Work,
    generation: Generation,
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
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            outcome = _in_child(place, work, generation)
        except BaseException as error:
            outcome = outcome_of(error, place.rank)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        flush_output()
        report.write(json.dumps(asdict(outcome)).encode())
        report.flush()
        status = outcome.status
    finally:
        os._exit(status)  # whatever happened: the frames and exit handlers above are the parent's


def _in_child(place: RankEnvironment, work: Work, generation: Generation) -> Outcome:
    from meshtrain.mesh import loopback_interface

    with loopback_interface():
        return run_rank(
            place,
            work,
            connect=lambda: _tcp_store(place.master_port, work.timeout_s),
            restart=str(generation.restart),
            met=lambda: generation.met.__setitem__(0, 1),
        )


def _tcp_store(port: int, timeout_s: float, listen_fd: int | None = None) -> TCPStore:
    import torch.distributed as dist

    from meshtrain.mesh import check_timeout

    return dist.TCPStore(
        "127.0.0.1", port, is_master=listen_fd is not None, timeout=check_timeout(timeout_s),
        wait_for_workers=False, master_listen_fd=listen_fd,
    )  # fmt: skip


def _is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or the like holds a process; a debugger does so differently ("t")."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _signal_group(pid: int, number: int) -> None:
    """Signal a rank and all that it started; a rank that has not made its session yet is signalled alone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_main_thread(pid: int, number: int) -> None:
    """Signal a rank so that its main thread, which alone runs Python's handlers, wakes if it sleeps.

    Of a process that has just gone on, the kernel may choose any thread.
    """
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is not None:
        tgkill(pid, pid, number)
    else:
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


def say(text: str) -> None:
    """Show something on stderr, which may be closed."""
    with suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)
