"""Power cuts during and right after saves: is every checkpoint whole, and every acknowledged one there?

python -m benchmarks.reliability.powercut                        # all kinds, on ext4
python -m benchmarks.reliability.powercut --cuts 100 --after 25 --group-cuts 10 --fs xfs

Each cut makes the file system forget what was not forced to disk (see disk.py). Then every checkpoint is read in full
through plain checksums and through load_checkpoint. Kinds of cuts:
  call    at each system call of a save in turn, by the saving process
  random  at a random moment of a save, from another process
  after   right after a save was acknowledged
  group   at a random moment of a save by several ranks, which then go on with the next
  control as after, but with fsync taken away: there must be losses, or the cuts prove nothing
Saves alternate between a new step (older ones are pruned) and one that replaces the newest; in the background and not; and
between none of their bytes having been written back by the system before the cut, some, and all. Needs root.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.reliability.common import (
    Lost,
    Tally,
    check_whole,
    ended,
    fill,
    fork,
    newest_whole,
    parser,
    plain,
    rest,
    saved,
    steps,
    warm_up,
)  # fmt: skip
from benchmarks.reliability.disk import Disk, cut, why_not
from benchmarks.reliability.group import Group, mesh_of, on_mesh
from benchmarks.reliability.hooks import Calls

from meshtrain.state.checkpoint import save_checkpoint
from meshtrain.state.names import name_of
from meshtrain.state.saver import Saver

KEEP = 2
CUT, FAILED = 7, 3  # exit statuses of a process that saves


@dataclass
class Scene:
    """A folder of checkpoints on a disk that loses its power again and again."""

    disk: Disk
    chance: random.Random
    acknowledged: dict[int, int] = field(default_factory=dict)
    """Step -> tag of the newest save of it that counts."""
    tag: int = 0
    spans: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model, self.optimizer = plain()
        self.folder = self.disk.path / "checkpoints"

    def next(self, replace: bool) -> tuple[int, int]:
        """Step and tag of the next save."""
        self.tag += 1
        found = steps(self.folder)
        newest = found[0] if found else 0
        return (newest if replace and found else newest + 1), self.tag

    def check(self, step: int, tag: int, acknowledged: bool) -> str:
        """After a cut in the save of a step and tag: mount again, read everything; return what became of the save. Raises Lost."""
        self.disk.again()
        before = dict(self.acknowledged)
        if acknowledged:
            self.acknowledged[step] = tag
        found, newest_tag = newest_whole(self.folder, self.model, self.optimizer)
        tags = {
            each: check_whole(self.folder / name_of(each), self.model, self.optimizer) for each in steps(self.folder)
        }
        wanted = max(self.acknowledged, default=0)
        if wanted and (found is None or found.step < wanted):
            raise Lost(f"step {wanted} was acknowledged, the newest there is {found.step if found else 'none'}")
        for each, seen in tags.items():
            allowed = {self.acknowledged[each]} if each in self.acknowledged else set()
            if each == step and not acknowledged:
                allowed.add(tag)
            if each in before or each == step:
                if seen not in allowed:
                    raise Lost(f"step {each} has tag {seen}, allowed are {sorted(allowed)}")
        for each in sorted(before)[-KEEP:-1] if len(before) > 1 else []:
            if each not in tags and not (acknowledged or (found and found.step == step and newest_tag == tag)):
                raise Lost(f"step {each} went though no newer one was complete")
        for each in sorted(tags)[:-KEEP]:  # cut before they were pruned; without this there would be ever more
            shutil.rmtree(self.folder / name_of(each))
            del tags[each]
        self.disk.write_back()
        self.acknowledged = dict(tags)  # what is there and whole counts from now on
        return "whole new" if tags.get(step) == tag else "as before"


def one_call(scene: Scene, number: int, replace: bool, background: bool, write_back: str) -> tuple[bool, str]:
    """Cut before system call `number` of a save; return whether there was such a call, and what became of the save."""
    step, tag = scene.next(replace)
    early = scene.chance.randrange(1, number + 1)
    power = scene.disk.open()

    def body() -> None:
        def act(found: int, name: str, what: str, perform: Callable[[], Any]) -> Any:
            if found == early and write_back == "all":
                scene.disk.write_back()
            elif found >= early and write_back == "some" and name in ("close", "fsync", "rename"):
                if found == early or scene.chance.random() < 0.2:
                    _write_back_some(scene)
            if found == number:
                cut(power)
                os._exit(CUT)
            return perform()

        with Calls(act):
            _save(scene, step, tag, background)

    status = ended(fork(body), 60)
    acknowledged = status == 0
    if status not in (0, CUT):
        raise Lost(f"the save of step {step} failed without a cause (status {status})")
    if acknowledged:
        if left := rest(scene.folder):
            raise Lost(f"left behind: {left}")
        cut(power)
    os.close(power)
    return not acknowledged, scene.check(step, tag, acknowledged)


def one_random(scene: Scene, replace: bool, background: bool) -> str:
    """Cut at a random moment of a save."""
    step, tag = scene.next(replace)
    power, (ready, told) = scene.disk.open(), os.pipe()

    def body() -> None:
        os.write(told, b".")
        _save(scene, step, tag, background)

    pid = fork(body)
    os.read(ready, 1)
    key = f"{replace} {background}"
    span = scene.spans.get(key, 0.5)
    time.sleep(scene.chance.uniform(0, span))
    cut(power)
    status = ended(pid, 60)
    scene.spans[key] = span * _closer(status == 0)
    for descriptor in (power, ready, told):
        os.close(descriptor)
    if status is None:
        raise Lost("a save hung after its disk was gone")
    return scene.check(step, tag, status == 0)


def one_after(scene: Scene, way: str, replace: bool) -> str:
    """Cut right after a save was acknowledged, as soon as it says so."""
    step, tag = scene.next(replace)
    power = scene.disk.open()

    def at_once(*_: Any) -> None:
        cut(power)
        os._exit(CUT)

    def body() -> None:
        if way == "save_checkpoint":
            fill(scene.model, scene.optimizer, tag)
            save_checkpoint(scene.model, scene.optimizer, scene.folder / name_of(step), step=step, run={"tag": tag})
            at_once()
        _save(scene, step, tag, way == "background", at_once)

    status = ended(fork(body), 60)
    os.close(power)
    if status != CUT:
        raise Lost(f"the save of step {step} failed without a cause (status {status})")
    return scene.check(step, tag, True)


def one_control(scene: Scene, way: str) -> str:
    """As one_after, with an fsync that does nothing."""
    with mock.patch.object(os, "fsync", lambda descriptor: None):
        return one_after(scene, way, False)


def _save(scene: Scene, step: int, tag: int, background: bool, on_saved: Callable[[Any], None] | None = None) -> None:
    fill(scene.model, scene.optimizer, tag)
    saver = Saver(scene.folder, scene.model, scene.optimizer, keep=KEEP, background=background, on_saved=on_saved)
    if saved(saver, step, {"tag": tag}) is not None or saver.saved is None:
        os._exit(FAILED)


def _closer(acknowledged: bool) -> float:
    """How to change the time within which a cut falls, so that cuts fall on all of a save, however busy the machine is."""
    return 0.9 if acknowledged else 1.05


def _write_back_some(scene: Scene) -> None:
    """Force some of the files that are being written, and with them the journal."""
    found = [path for path in scene.folder.rglob("*") if path.is_file()] if scene.folder.is_dir() else []
    for path in scene.chance.sample(found, min(2, len(found))):
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.close(descriptor)


def serve(rank: int, pipe: Connection, size: int, folder: Path) -> None:
    """Be a rank that saves when told: (step, tag, background) -> the error, or None."""
    model, optimizer = on_mesh(*mesh_of(size))
    savers: dict[bool, Saver] = {}
    pipe.send("ready")
    while True:
        step, tag, background = pipe.recv()
        try:
            if background not in savers:
                savers[background] = Saver(folder, model, optimizer, keep=KEEP, background=background, join_seconds=10)
            saver = savers[background]
            fill(model, optimizer, tag)
            error = saved(saver, step, {"tag": tag})
            pipe.send("" if error is None else str(error))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def group_cuts(scene: Scene, size: int, cuts: int, tally: Tally) -> None:
    """Cut at random moments of saves by `size` ranks, which live on."""
    with Group(size, serve, size, scene.folder) as group:
        group.answers()
        span = 1.0
        for number in range(cuts):
            step, tag = scene.next(replace=number % 3 == 2)
            power = scene.disk.open()
            group.tell(step, tag, number % 2 == 0)
            time.sleep(scene.chance.uniform(0, span))
            cut(power)
            said = group.answers()
            os.close(power)
            acknowledged = said == [""] * size
            span *= _closer(acknowledged)
            try:
                if None in said or (not acknowledged and "" in said):
                    raise Lost(f"the ranks do not agree about the save of step {step}: {said}")
                outcome = scene.check(step, tag, acknowledged)
                tally.add(outcome, "acknowledged" if acknowledged else "not acknowledged")
            except Lost as error:
                tally.lose(f"{size} ranks, cut {number}: {error}")


def control(scene: Scene, cuts: int) -> int:
    """Cuts after saves that are not durable; return 1 when none lost anything. The disk is no good afterwards."""
    lost = 0
    for number in range(cuts):
        try:
            one_control(scene, ("foreground", "background")[number % 2])
        except Lost:
            lost += 1
            scene.acknowledged.clear()
            shutil.rmtree(scene.folder, ignore_errors=True)
            scene.disk.again()
    print(
        f"powercut {scene.disk.kind} control: {cuts} cuts without fsync lost {lost} acknowledged checkpoints",
        flush=True,
    )
    return 0 if lost or not cuts else 1


def main(argv: list[str] | None = None) -> int:
    """Run; return the exit status."""
    parse = parser(__doc__, cuts=2000, after=500, group_cuts=100, control=10, fs="ext4", mebibytes=64)
    chosen = parse.parse_args(argv)
    if (reason := why_not(chosen.fs)) is not None:
        print(f"powercut on {chosen.fs}: {reason}")
        return 0
    warm_up()
    status = 0
    with Disk(chosen.fs, chosen.mebibytes, chosen.dir) as disk:
        scene = Scene(disk, random.Random(chosen.seed))
        tallies = (
            (by_call, "call", chosen.cuts - chosen.cuts // 2),
            (by_chance, "random", chosen.cuts // 2),
            (afterwards, "after", chosen.after),
        )
        for kind, name, number in tallies:
            tally = Tally(f"powercut {chosen.fs} {name}", number)
            kind(scene, tally)
            status |= tally.close()
        for size in (2, 4) if chosen.group_cuts else ():
            tally = Tally(f"powercut {chosen.fs} group of {size}", chosen.group_cuts // 2)
            group_cuts(scene, size, chosen.group_cuts // 2, tally)
            status |= tally.close()
        status |= control(scene, chosen.control)
    return status


def by_call(scene: Scene, tally: Tally) -> None:
    """Cuts at every call of each way to save, until there were enough."""
    ways = itertools.cycle(itertools.product(("none", "all", "some"), (False, True), (False, True)))
    for write_back, background, replace in ways:
        for number in itertools.count(1):
            if tally.done + len(tally.lost) >= tally.total:
                return
            try:
                there, outcome = one_call(scene, number, replace, background, write_back)
            except Lost as error:
                tally.lose(
                    f"call {number}, replace {replace}, background {background}, write-back {write_back}: {error}"
                )
                continue
            tally.add(outcome, *(() if there else ("whole sweeps",)))
            if not there:
                break


def by_chance(scene: Scene, tally: Tally) -> None:
    """Cuts at random moments."""
    for number in range(tally.total):
        try:
            tally.add(one_random(scene, number % 3 == 2, number % 2 == 0))
        except Lost as error:
            tally.lose(f"random {number}: {error}")


def afterwards(scene: Scene, tally: Tally) -> None:
    """Cuts right after the acknowledgement."""
    ways = ("save_checkpoint", "foreground", "background")
    for number in range(tally.total):
        try:
            tally.add(one_after(scene, ways[number % 3], number % 5 == 4))
        except Lost as error:
            tally.lose(f"after {number}: {error}")


if __name__ == "__main__":
    raise SystemExit(main())
