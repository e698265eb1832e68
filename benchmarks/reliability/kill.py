"""Ranks killed at random moments while they train and save: does the next generation always go on from what counted?

python -m benchmarks.reliability.kill                        # 8 ranks, 1,000 kills
python -m benchmarks.reliability.kill --rounds 50 --ranks 4

Each generation of ranks finds the newest checkpoint, loads it and compares every value that it holds with the one that
this step must have; its step must be at least the newest one that was acknowledged to the outside before the kill. Then it
trains: a collective a step, and weights that are a function of the step. Every few steps a Saver saves in the background,
prunes (it keeps 2) and moves `latest`; rank 0 acknowledges what counts through a pipe. At a random moment one rank, or
all, get SIGKILL; the others go on for as long as they can, or are killed soon after. The mesh alternates between two shapes.
"""

from __future__ import annotations

import os
import random
import select
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.reliability.common import Lost, Tally, check_whole, differing, fill, parser, plain, rest, warm_up
from benchmarks.reliability.group import Group, Hung, on_mesh

from meshtrain.state.checkpoints import newest_complete
from meshtrain.state.names import LATEST, name_of
from meshtrain.state.restore import load_checkpoint
from meshtrain.state.saver import Saved, Saver

KEEP = 2


def train(rank: int, pipe: Connection, mesh: tuple[int, int], folder: Path, every: int, told: int) -> None:
    """Be a rank of a generation: resume, check, then train and save until killed."""
    model, optimizer = on_mesh(*mesh)
    chosen: list[str | None] = [None]
    if rank == 0:
        found, skipped = newest_complete(folder)
        if skipped:
            pipe.send(("torn", skipped[0][1]))
        chosen = [str(found.path) if found else None]
    dist.broadcast_object_list(chosen)
    step = 0
    if chosen[0] is not None:
        fill(model, optimizer, 2**20)
        step = load_checkpoint(model, optimizer, chosen[0]).step
        if wrong := differing(model, optimizer, step):
            pipe.send(("wrong", f"rank {rank}, step {step}: {', '.join(wrong)}"))
    pipe.send(("resumed", step))

    def acknowledge(saved: Saved) -> None:
        if rank == 0:
            os.write(told, f"{saved.step}\n".encode())

    saver = Saver(folder, model, optimizer, keep=KEEP, on_saved=acknowledge, join_seconds=10)
    while True:
        step += 1
        dist.all_reduce(torch.ones(16))
        fill(model, optimizer, step)
        if step % every == 0:
            saver.save(step, {"tag": step})
            if (error := saver.failure()) is not None:
                raise error


class Run:
    """A run that is killed again and again."""

    def __init__(self, folder: Path, ranks: int, chance: random.Random, most: float) -> None:
        self.folder, self.ranks, self.chance, self.most = folder, ranks, chance, most
        self.acknowledged = 0
        self.meshes = [(ranks // 2, 2), (ranks // 4, 4)] if ranks % 4 == 0 else [(ranks // 2, 2), (ranks, 1)]

    def generation(self, number: int) -> tuple[int, str]:
        """Start ranks, look at how they resume, kill; return the step that they resumed from, and how they were killed."""
        reader, told = os.pipe()
        every = self.chance.choice((1, 3, 10))
        group = Group(self.ranks, train, self.meshes[number % 2], self.folder, every, told, timeout_s=20)
        os.close(told)
        try:
            said = group.answers(60)
            if bad := [answer for answer in said if answer is None or answer[0] != "resumed"]:
                raise Lost(f"the next generation did not resume: {bad[0] or 'a rank died'}")
            steps = {step for _, step in said}
            if len(steps) > 1:
                raise Lost(f"the ranks resumed from different steps: {sorted(steps)}")
            step = steps.pop()
            if step < self.acknowledged:
                raise Lost(f"step {self.acknowledged} was acknowledged, the next generation resumed from step {step}")
            if self.chance.random() < 0.7:  # let it get somewhere: kill near an acknowledgement
                for _ in range(self.chance.randrange(1, 4)):
                    self._listen(reader, 20)
                time.sleep(self.chance.uniform(0, 0.1 * self.most))
            else:
                time.sleep(self.chance.uniform(0, self.most))
            way = self._kill(group)
        finally:
            group.close()
            while self._listen(reader, 0):
                pass
            os.close(reader)
        return step, way

    def _listen(self, reader: int, seconds: float) -> bool:
        """Take in what was acknowledged; return whether there was anything."""
        if not select.select([reader], [], [], seconds)[0] or not (said := os.read(reader, 2**20)):
            return False
        self.acknowledged = max(self.acknowledged, *map(int, said.decode().split()))
        return True

    def _kill(self, group: Group) -> str:
        if self.chance.random() < 0.4:
            group.kill()
            return "all killed"
        group.kill([self.chance.randrange(self.ranks)])
        if self.chance.random() < 0.3:  # the others go on for as long as they can
            time.sleep(self.chance.uniform(0, 0.5))
        return "one killed"


def main(argv: list[str] | None = None) -> int:
    """Run; return the exit status."""
    chosen = parser(__doc__, rounds=1000, ranks=8, most=1.0).parse_args(argv)
    warm_up()
    tally = Tally(f"kill, {chosen.ranks} ranks", chosen.rounds)
    with tempfile.TemporaryDirectory(prefix="meshtrain-kill-", dir=chosen.dir) as home:
        folder = Path(home) / "checkpoints"
        run = Run(folder, chosen.ranks, random.Random(chosen.seed), chosen.most)
        model, optimizer = plain()
        seen = 0
        for number in range(chosen.rounds):
            try:
                step, way = run.generation(number)
                tally.add(way, "further on" if step > seen else "as far as before")
                seen = max(seen, step)
                if number % 20 == 0 and step:
                    found, _ = newest_complete(folder)
                    assert found is not None
                    check_whole(found.path, model, optimizer)
            except (Lost, Hung) as error:
                tally.lose(f"kill {number}: {error}")
        found, skipped = newest_complete(folder)
        if found is None or skipped or found.step < run.acknowledged:
            tally.lose(f"at the end: {found}, {skipped}, acknowledged {run.acknowledged}")
        else:
            check_whole(found.path, model, optimizer)
            left = Saver(folder, model, optimizer, keep=KEEP)  # sweeps
            fill(model, optimizer, found.step + 1)
            left.save(found.step + 1, {"tag": found.step + 1})
            left.close()
            if (junk := rest(folder)) or (folder / LATEST).read_text().strip() != name_of(found.step + 1):
                tally.lose(f"left behind after the end: {junk}, latest is {(folder / LATEST).read_text()!r}")
        tally.counts["steps"] = seen
    return tally.close()


if __name__ == "__main__":
    raise SystemExit(main())
