"""Commands under test: forked processes that call `launch`, and what a test asks of them and of their ranks.

The fixture `start` is imported by the tests that use it, as `started`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshtrain.launch import launch
from meshtrain.restarts import Restarts


@dataclass
class Command:
    """A forked process that calls `launch`, as a command's process does."""

    pid: int
    out: Path
    err: Path
    started: float

    def wait(self, seconds: float = 30) -> int:
        while time.monotonic() < self.started + seconds:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        pytest.fail(f"the command did not end in {seconds} s; stderr: {self.err.read_text()}")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def redirect(out: Path, err: Path) -> None:
    """In a forked process: write to these files, not to what pytest captures."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")


@pytest.fixture(name="start")
def started(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """start(fn, *args, world_size=2, **options) -> a Command that calls launch(fn, (tmp_path, *args))."""
    commands: list[Command] = []

    def begin(
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        env: dict[str, str] | None = None,
        **options: Any,
    ):
        out, err = tmp_path / "out", tmp_path / "err"
        out.touch()
        err.touch()
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                os.setsid()
                redirect(out, err)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.environ.update(env or {})
                options = {"device": "cpu", "timeout_s": 20, **options}
                status = launch(fn, (tmp_path, *args), world_size=world_size, **options)
                threads = os.listdir("/proc/self/task")
                Path(tmp_path / "parent").write_text(f"{len(threads)} {signal.getsignal(signal.SIGINT)}")
            finally:
                sys.stderr.flush()
                os._exit(status)
        commands.append(Command(pid, out, err, time.monotonic()))
        return commands[-1]

    yield begin
    for command in commands:
        if command.pid:
            with suppress(ProcessLookupError):
                os.kill(command.pid, signal.SIGKILL)
            os.waitpid(command.pid, 0)


def sign_in(folder: Path) -> int:
    """In a rank: leave its process id where the test finds it. Returns the rank."""
    rank = dist.get_rank()
    note = folder / f"{rank}.new"
    note.write_text(str(os.getpid()))
    note.rename(folder / f"{rank}.pid")
    return rank


def pids(folder: Path, ranks: int, seconds: float = 20) -> list[int]:
    """Wait until all ranks have signed in; return their process ids."""
    end = time.monotonic() + seconds
    while len(found := sorted(folder.glob("*.pid"))) < ranks:
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.01)
    return [int(path.read_text()) for path in found]


def gone(pid: int, seconds: float = 0) -> bool:
    """Whether the process has ended; a zombie, which init is to reap, has."""
    end = time.monotonic() + seconds
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)


def stay(folder: Path, seconds: float = 60.0) -> None:
    sign_in(folder)
    time.sleep(seconds)


def fail_late(folder: Path, bad: int) -> None:
    """In a rank: leave a process behind; rank `bad` fails, the others wait for it."""
    rank = sign_in(folder)
    subprocess.Popen(["sleep", "300"], start_new_session=False)
    if rank == bad:
        time.sleep(0.2)
        raise ZeroDivisionError("the one cause")
    dist.barrier()


def listening(pid: int) -> list[tuple[str, int]]:
    """The (address, port)s at which a process listens, from /proc; "0100007F" is 127.0.0.1."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
    return [(address, int(port, 16)) for address, port in found]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def steps(folder: Path) -> int:
    """How far a run is: the newest of its notes, as of its checkpoints."""
    return max((int(path.name[5:]) for path in folder.glob("step-*")), default=0)


def restarts(folder: Path, limit: int = 3, shrink: Callable[[int], Any] | None = None) -> Restarts:
    return Restarts(limit, progress=lambda: steps(folder), shrink=shrink)


def generation() -> int:
    return int(os.environ["MESHTRAIN_RESTART"])
