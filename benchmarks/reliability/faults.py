"""Errors of the system during saves: does each end the save cleanly on every rank, and leave everything else as it was?

python -m benchmarks.reliability.faults                      # every fault at every call
python -m benchmarks.reliability.faults --rounds 100         # 100 of them, drawn by chance

An error (EIO, ENOSPC, EMFILE, EINTR, EACCES) at each call in turn of one rank's save, and writes that take only a third of what they
are given; on rank 0 and on another; in the background and not; for a new step and for one that replaces the newest. Then
disks that are full (with and without the look at the free space beforehand), and, where strace is, errors made by the
kernel. After each: either all ranks have failed, and say which rank and why, or none has and the checkpoint is whole;
the earlier checkpoints are what they were; nothing temporary is left, but for what was to be removed and could not be, which
the next save removes; the next save works.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.reliability.common import (
    Lost,
    Tally,
    check_whole,
    fill,
    parser,
    plain,
    rest,
    saved,
    steps,
    sums_differing,
    warm_up,
)  # fmt: skip
from benchmarks.reliability.disk import Disk, why_not
from benchmarks.reliability.group import Group, Hung, mesh_of, on_mesh
from benchmarks.reliability.hooks import Calls, failing

from meshtrain.state import writer
from meshtrain.state.names import name_of
from meshtrain.state.saver import Saver

CODES = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EINTR, errno.EACCES)
SHORT = 0
KEEP = 2


class Fault(NamedTuple):
    """What goes wrong, where."""

    victim: int
    code: int
    """An errno; SHORT for short writes."""
    number: int
    """Which call; of a short write, every call from there on."""
    background: bool
    replace: bool


def serve(rank: int, pipe: Connection, size: int, folder: Path, width: int, keep: int | None) -> None:
    """Be a rank: (step, tag, background, fault, free) -> (error or "", names of the calls made)."""
    model, optimizer = on_mesh(*mesh_of(size), width, 2 * width)
    savers = {
        background: Saver(folder, model, optimizer, keep=keep, background=background, join_seconds=10)
        for background in (False, True)
    }
    pipe.send("ready")
    while True:
        step, tag, background, fault, free = pipe.recv()
        saver = savers[background]
        fill(model, optimizer, tag)
        calls = Calls()
        if fault is not None and fault.victim == rank:
            if fault.code == SHORT:
                calls = Calls(lambda number, name, what, perform: perform(), True, fault.number.__le__)
            else:
                calls = Calls(failing(fault.number, fault.code), reading=True)
        with calls, mock.patch.object(writer, "check_space", (lambda *_: None) if free else writer.check_space):
            error = saved(saver, step, {"tag": tag})
        pipe.send(("" if error is None else str(error), calls.made))


class Place:
    """A folder that ranks save to, and what must be in it."""

    def __init__(self, folder: Path, size: int, width: int = 12, keep: int | None = KEEP) -> None:
        self.folder, self.size, self.keep = folder, size, keep
        self.whole: dict[int, int] = {}
        self.tag = 0
        self.group = Group(size, serve, size, folder, width, keep)
        self.group.answers()
        self.model, self.optimizer = plain(width, 2 * width)

    def save(
        self, step: int, background: bool, fault: Fault | None = None, free: bool = False
    ) -> tuple[str, list[list[str]]]:
        """Save; return the error, which all ranks agree about, and the calls of each rank. Raises Lost."""
        self.tag += 1
        said = self.group.ask(step, self.tag, background, fault, free)
        if None in said:
            raise Lost("a rank died")
        errors = {text for text, _ in said}
        if len(errors) > 1:
            raise Lost(f"the ranks do not agree whether the save failed: {[text for text, _ in said]}")
        return errors.pop(), [calls for _, calls in said]

    def check(self, step: int, error: str, fully: bool, removing: bool = False) -> str:
        """After a save of a step that failed, or not: look at everything; return what became of the step. Raises Lost.

        removing: what was to be removed may still be there.
        """
        if left := [name for name in rest(self.folder) if not (removing and ".old-" in name)]:
            raise Lost(f"left behind: {left} ({error or 'no error'})")
        there = steps(self.folder)
        became = "saved" if not error else "absent"
        for each in there:
            path = self.folder / name_of(each)
            if wrong := sums_differing(path):
                raise Lost(f"step {each}: {', '.join(wrong)} not as written ({error or 'no error'})")
            tag = check_whole(path, self.model, self.optimizer) if fully or each == step else self.whole.get(each, -1)
            if each == step and tag == self.tag:
                became = "saved" if not error else "failed, but there and whole"
            elif tag != self.whole.get(each):
                raise Lost(f"step {each} has tag {tag}, not {self.whole.get(each)} ({error or 'no error'})")
            elif each == step and not error:
                raise Lost(f"step {each} was not replaced, without an error")
        if not error and step not in there:
            raise Lost(f"step {step} is not there, without an error")
        fresh = step in there and became != "absent"
        if not fresh and (gone := set(self.whole) - set(there)):
            raise Lost(f"step(s) {sorted(gone)} went though the save failed: {error}")
        self.whole = {each: self.whole.get(each, self.tag) if each != step or not fresh else self.tag for each in there}
        return became


def one_fault(place: Place, fault: Fault, fully: bool) -> tuple[str, bool]:
    """Save with a fault, look, save without; return what became of the first, and whether the fault was reached."""
    newest = max(place.whole, default=0)
    step = newest if fault.replace and newest else newest + 1
    error, calls = place.save(step, fault.background, fault)
    reached = len(calls[fault.victim]) >= fault.number
    if error:
        if not reached or fault.code == SHORT:
            raise Lost(f"a save failed without a fault: {error}")
        if os.strerror(fault.code) not in error or (place.size > 1 and f"rank {fault.victim}" not in error):
            raise Lost(f"the message does not name rank {fault.victim} and the cause: {error!r}")
    became = place.check(step, error, fully, removing=reached)
    if reached and not error and fault.code != SHORT:
        became = "survived"
    after, _ = place.save(step + 1, fault.background)
    if after:
        raise Lost(f"the save after the fault failed too: {after}")
    place.check(step + 1, "", fully=False)
    return became, reached


def every_fault(size: int) -> Iterator[tuple[int, int, bool, bool]]:
    """(victim, code, background, replace), each of which has as many faults as the save has calls."""
    yield from itertools.product((0, size - 1), (*CODES, SHORT), (False, True), (False, True))


def by_hook(folder: Path, size: int, rounds: int, chance: random.Random, tally: Tally) -> None:
    """Faults from within the process."""
    place = Place(folder, size)
    try:
        for background in (False, True, False):
            place.check(_next(place), place.save(_next(place), background)[0], True)
        ways = list(every_fault(size))
        sizes: dict[tuple[int, bool, bool], int] = {}
        for victim, _, background, replace in ways:
            if (victim, background, replace) not in sizes:
                step = max(place.whole) + (not replace)
                probe = Fault(victim, SHORT, 10**9, background, replace)
                error, calls = place.save(step, background, probe)
                place.check(step, error, True)
                sizes[victim, background, replace] = len(calls[victim])
        faults = [
            Fault(victim, code, number, background, replace)
            for victim, code, background, replace in ways
            for number in range(1, 2 + sizes[victim, background, replace])
            if code != SHORT or number in (1, sizes[victim, background, replace] // 2)
        ]
        if rounds:
            faults = chance.sample(faults, min(rounds, len(faults)))
        tally.total = len(faults)
        for fault in faults:
            try:
                became, _ = one_fault(place, fault, chance.random() < 0.1)
                tally.add(became)
            except Lost as error:
                tally.lose(f"{fault}: {error}")
                place = _afresh(place, folder, size)
            except Hung as error:
                tally.lose(f"{fault}: {error}")
                place = _afresh(place, folder, size)
    finally:
        place.group.close()


def _next(place: Place) -> int:
    return max(place.whole, default=0) + 1


def _afresh(place: Place, folder: Path, size: int) -> Place:
    place.group.close()
    shutil.rmtree(folder, ignore_errors=True)
    place = Place(folder, size)
    for _ in range(2):
        step = _next(place)
        place.check(step, place.save(step, False)[0], True)
    return place


@contextmanager
def full_place(kind: str, within: Path | None) -> Iterator[Path]:
    """A small file system."""
    if kind == "ext4":
        with Disk("ext4", 16, within) as disk:
            yield disk.path
        return
    home = Path(tempfile.mkdtemp(prefix="meshtrain-full-", dir=within))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(home)], check=True)
    try:
        yield home
    finally:
        subprocess.run(["umount", "-l", str(home)], check=False)
        home.rmdir()


def full(kind: str, within: Path | None, size: int, rounds: int, tally: Tally) -> None:
    """Save until the disk is full; the save that does not fit fails alone; with room again, saving goes on."""
    with full_place(kind, within) as path:
        place = Place(path / "checkpoints", size, width=220, keep=None)
        try:
            for number in range(rounds):
                free, background = number % 2 == 0, number % 4 < 2
                try:
                    for _ in range(50):
                        step = _next(place)
                        error, _ = place.save(step, background, None, free)
                        place.check(step, error, True)
                        if error:
                            break
                    else:
                        raise Lost("the disk never filled")
                    if "[Errno 28]" not in error or str(place.folder) not in error:
                        raise Lost(f"the message does not say what failed: {error!r}")
                    tally.add(f"full {kind}, {'found by writing' if free else 'seen beforehand'}")
                except Lost as error:
                    tally.lose(f"full {kind} {number}: {error}")
                for step in steps(place.folder)[1:]:
                    shutil.rmtree(place.folder / name_of(step))
                    place.whole.pop(step, None)
        finally:
            place.group.close()


KERNEL = (
    ("fsync", "EIO"), ("fsync", "EINTR"), ("pwrite64", "EIO"), ("pwrite64", "ENOSPC"), ("pwrite64", "EINTR"),
    ("ftruncate", "ENOSPC"), ("?mkdir,?mkdirat", "EIO"), ("?rename,?renameat,renameat2", "EIO"),
    ("openat", "EMFILE"), ("openat", "EINTR"),
)  # fmt: skip


def by_kernel(folder: Path, size: int, rounds: int, chance: random.Random, tally: Tally) -> None:
    """Faults that the kernel makes, by strace."""
    place = Place(folder, size)
    try:
        for _ in range(3):
            step = _next(place)
            place.check(step, place.save(step, False)[0], True)
        for number in range(rounds):
            calls, code = KERNEL[number % len(KERNEL)]
            victim, when = chance.randrange(size), chance.randrange(1, 6)
            background = number % 2 == 0
            what = f"{calls} of rank {victim}, {code} at call {when}"
            try:
                with _injected(place.group.pids[victim], calls, code, when):
                    step = _next(place)
                    error, _ = place.save(step, background)
                if error and (os.strerror(getattr(errno, code)) not in error or f"rank {victim}" not in error):
                    raise Lost(f"the message does not name rank {victim} and the cause: {error!r}")
                if error and code == "EINTR" and "rename" not in calls:
                    raise Lost(f"an interrupted call was not made again: {error!r}")
                became = place.check(step, error, True)
                after, _ = place.save(step + 1, background)
                if after:
                    raise Lost(f"the save after the fault failed too: {after}")
                place.check(step + 1, "", False)
                tally.add(became)
            except (Lost, Hung) as error:
                tally.lose(f"{what}: {error}")
                place = _afresh(place, folder, size)
    finally:
        place.group.close()


@contextmanager
def _injected(pid: int, calls: str, code: str, when: int) -> Iterator[None]:
    what = f"-e trace={calls} -e inject={calls}:error={code}:when={when}".split()
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", "/dev/null", *what, "-p", str(pid)], stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(2000):
            if "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text():
                break
            time.sleep(0.002)
        else:
            raise Lost("strace did not attach")
        time.sleep(0.02)  # to its other threads
        yield
    finally:
        tracer.send_signal(signal.SIGTERM)
        tracer.wait(10)


def main(argv: list[str] | None = None) -> int:
    """Run; return the exit status."""
    parse = parser(__doc__, rounds=0, ranks=2, full=12, kernel=60)
    chosen = parse.parse_args(argv)
    warm_up()
    status, chance = 0, random.Random(chosen.seed)

    def run(name: str, rounds: int, body: Any) -> None:
        nonlocal status
        tally = Tally(f"faults {name}", rounds)
        with tempfile.TemporaryDirectory(prefix="meshtrain-faults-", dir=chosen.dir) as home:
            body(Path(home) / "checkpoints", tally)
        status |= tally.close()

    run("by call", chosen.rounds, lambda folder, tally: by_hook(folder, chosen.ranks, chosen.rounds, chance, tally))
    for kind in ("tmpfs", "ext4") if chosen.full else ():
        if (reason := why_not("ext4")) is not None:
            print(f"faults full {kind}: {reason}")
            continue
        run(f"full {kind}", chosen.full, lambda _, tally, k=kind: full(k, chosen.dir, chosen.ranks, chosen.full, tally))
    if chosen.kernel and shutil.which("strace") is None:
        print("faults by kernel: needs strace, which is not installed: skipped")
    elif chosen.kernel:
        run(
            "by kernel",
            chosen.kernel,
            lambda folder, tally: by_kernel(folder, chosen.ranks, chosen.kernel, chance, tally),
        )
    return status


if __name__ == "__main__":
    raise SystemExit(main())
