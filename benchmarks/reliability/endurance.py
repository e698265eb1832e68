"""Saves without end: does anything grow that should not?

python -m benchmarks.reliability.endurance                   # 500 saves, by one process and by 2 ranks
python -m benchmarks.reliability.endurance --rounds 100

Every save goes through the same Saver, in the background, with keep=2; every tenth fails (its disk errors, by a hook), and
every sixth is loaded again. What is counted after each save, in each process: open descriptors, threads, children, resident
memory, shared mappings, names in the folder of checkpoints, and keys in the store that the ranks meet at. After the first
50 saves nothing may be more than it was by the 50th; memory may grow by `--mebytes` over the rest.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist
from benchmarks.reliability.common import Lost, Tally, differing, fill, parser, rest, steps, warm_up
from benchmarks.reliability.group import Group, mesh_of, on_mesh
from benchmarks.reliability.hooks import Calls, failing

from meshtrain.state.names import name_of
from meshtrain.state.restore import load_checkpoint
from meshtrain.state.saver import Saver

SETTLED = 50
KEEP = 2
_SHARED = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV")  # how /proc/self/maps names memory that processes share


def usage(folder: Path) -> dict[str, int]:
    """What this process, and the folder, hold just now."""
    me = Path("/proc/self")
    children = (me / "task" / str(os.getpid()) / "children").read_text().split()
    maps = (me / "maps").read_text().splitlines()
    status = dict(line.split(":", 1) for line in (me / "status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": len(os.listdir(me / "fd")) - 1,
        "threads": int(status["Threads"]),
        "python threads": threading.active_count(),
        "children": len(children),
        "memory": int(status["VmRSS"].split()[0]) * 1024,
        "shared mappings": sum(any(what in line for what in _SHARED) for line in maps),
        "names": len(steps(folder)) + len(rest(folder)),
        "store keys": _keys(),
    }


def _keys() -> int:
    if not dist.is_initialized() or dist.get_rank() != 0:
        return 0
    return int(dist.distributed_c10d._get_default_store().num_keys())


def serve(rank: int, pipe: Connection, size: int, folder: Path, rounds: int) -> None:
    """Be a rank: save, fail and load; send the usage after each save."""
    model, optimizer = on_mesh(*mesh_of(size))
    saver = Saver(folder, model, optimizer, keep=KEEP, join_seconds=20)
    pipe.send("ready")
    for step in range(1, rounds + 1):
        broken = step % 10 == 5
        fill(model, optimizer, step)
        with Calls(failing(20, errno.EIO)) if broken and rank == 0 else Calls():
            saver.save(step, {"tag": step})
            saver.wait()
        error = saver.failure()
        if (error is None) == broken:
            pipe.send(
                ("lost", f"save {step} {'failed: ' + str(error) if error else 'did not fail, with a broken disk'}")
            )
            return
        if step % 6 == 0:
            load_checkpoint(model, optimizer, folder / name_of(step))
            if wrong := differing(model, optimizer, step):
                pipe.send(("lost", f"step {step} loads with other values: {', '.join(wrong)}"))
                return
        if size > 1:
            dist.barrier()  # so that the folder is looked at when nobody writes to it
        pipe.send(("usage", usage(folder)))
        if size > 1:
            dist.barrier()


def grown(before: dict[str, int], after: dict[str, int], mebibytes: float) -> list[str]:
    """What is more than it was, in words."""
    return [
        f"{name} {before[name]} -> {after[name]}"
        for name in before
        if after[name] > before[name] + (int(mebibytes * 2**20) if name == "memory" else 0)
    ]


def run(size: int, rounds: int, mebibytes: float, folder: Path, tally: Tally) -> None:
    """`rounds` saves by `size` ranks."""
    settled = min(SETTLED, rounds // 2)
    at: dict[int, list[dict[str, int]]] = {}
    with Group(size, serve, size, folder, rounds) as group:
        group.answers()
        for number in range(1, rounds + 1):
            said = group.answers(120)
            if bad := [text for text in said if text is None or text[0] == "lost"]:
                tally.lose(f"{size} ranks: {bad[0] or 'a rank died'}")
                return
            at[number] = [found for _, found in said]
            tally.add("saves")
    for rank in range(size):
        # The most of a stretch, since a thread that is ending counts for a moment.
        first = _most(at[number][rank] for number in range(settled - settled // 3, settled + 1))
        last = _least(at[number][rank] for number in range(rounds - 9, rounds + 1))
        text = ", ".join(f"{name} {first[name]} -> {last[name]}" for name in first)
        print(f"  {size} ranks, rank {rank}, save {settled} -> {rounds}: {text}", flush=True)
        for what in grown(first, last, mebibytes):
            tally.lose(f"rank {rank} of {size}: grew between save {settled} and save {rounds}: {what}")


def _most(found: Iterator[dict[str, int]]) -> dict[str, int]:
    rows = list(found)
    return {name: max(row[name] for row in rows) for name in rows[0]}


def _least(found: Iterator[dict[str, int]]) -> dict[str, int]:
    rows = list(found)
    return {name: min(row[name] for row in rows) for name in rows[0]}


def main(argv: list[str] | None = None) -> int:
    """Run; return the exit status."""
    chosen = parser(__doc__, rounds=500, mebytes=4.0).parse_args(argv)
    if not os.path.isdir("/proc/self/fd"):
        print("endurance: needs /proc: skipped")
        return 0
    warm_up()
    status = 0
    for size in (1, 2):
        tally = Tally(f"endurance, {size} ranks", chosen.rounds)
        with tempfile.TemporaryDirectory(prefix="meshtrain-endurance-", dir=chosen.dir) as home:
            try:
                run(size, chosen.rounds, chosen.mebytes, Path(home) / "checkpoints", tally)
            except Lost as error:
                tally.lose(str(error))
        status |= tally.close()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
