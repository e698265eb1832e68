"""What saving costs training: how long it stands still, how fast it goes on meanwhile, and what the checksums take.

python -m benchmarks.reliability.stall                       # 2x2, 50 saves
python -m benchmarks.reliability.stall --rounds 5 --mebytes 8

Four ranks, 2x2. All contenders take turns, so that other load hits them alike; times are those of the slowest rank.
  stall      Saver.save in the background, against copying the same shards, and against writing the same at once
  steps      training steps of a small Llama while a save is under way, against as many without
  checksums  a save at once, against one whose tensors are not summed
Targets: the stall is at most the copy and 20 ms, and 5 % of a save at once; steps keep 90 % of their pace; checksums cost
at most 5 %. They are judged with `--judge` (exit status 1 when missed), since other load on the machine counts too.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.reliability.common import differing, fill, parser, warm_up
from benchmarks.reliability.group import Group, on_mesh

from meshtrain.mesh import init_mesh
from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.parallel import initialise, parallelize
from meshtrain.state import placing
from meshtrain.state.content import take
from meshtrain.state.restore import load_checkpoint
from meshtrain.state.saver import Saver
from meshtrain.train.optim import adamw
from meshtrain.train.step import loss_in_model, train_step

MESH = (2, 2)
WIDTH = 1024


def hidden_of(mebibytes: float) -> int:
    """The hidden size at which weights and moments together are so large."""
    return max(2, int(mebibytes * 2**20 / (3 * 4 * 2 * WIDTH)) // 2 * 2)


def slowest(seconds: float) -> float:
    """The most of all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return slowest(time.perf_counter() - start)


def stalls(rank: int, pipe: Connection, folder: Path, rounds: int, mebibytes: float) -> None:
    """Be a rank: send a row of times a round."""
    model, optimizer = on_mesh(*MESH, WIDTH, hidden_of(mebibytes))
    fill(model, optimizer, 1)
    ours = Saver(folder / "background", model, optimizer, keep=1)
    once = Saver(folder / "at-once", model, optimizer, keep=1, background=False)
    ours.reserve()
    tensors = take(model, optimizer, 0).tensors()
    copies = [torch.zeros_like(tensor) for tensor in tensors]

    def copy() -> None:
        for to, tensor in zip(copies, tensors):
            to.copy_(tensor)

    def save(saver: Saver, step: int) -> None:
        saver.save(step, {"tag": 1})

    def settle(saver: Saver) -> None:
        saver.wait()
        if (error := saver.failure()) is not None:
            raise error

    pipe.send(sum(tensor.nbytes for tensor in tensors))
    for step in range(rounds + 1):
        row = {"copy": timed(copy), "stall": timed(partial(save, ours, step))}
        row["in background"] = timed(lambda: settle(ours))
        row["at once"] = timed(partial(save, once, step))
        settle(once)
        with mock.patch.object(placing, "sum_shard", lambda *_: None):
            row["without checksums"] = timed(partial(save, once, step))
        settle(once)
        pipe.send(row)
    path = ours.saved.path if ours.saved is not None else folder
    load_checkpoint(model, optimizer, path)
    pipe.send(differing(model, optimizer, 1))


def steps(rank: int, pipe: Connection, folder: Path, rounds: int, dim: int) -> None:
    """Be a rank: send (seconds of the steps with a save under way, of as many without, of the stall) a round."""
    mesh = init_mesh(*MESH, "cpu")
    shape = LlamaConfig(
        vocab_size=2048, hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=dim // 8,
    )  # fmt: skip
    model = parallelize(Llama(shape), mesh, parallel_plan())
    initialise(model, seed=0)
    optimizer = adamw(model, lr=1e-3)
    saver = Saver(folder / "steps", model, optimizer, keep=1)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    ids = torch.randint(0, shape.vocab_size, (4, 129), generator=generator)
    batch = [(ids[:, :-1], ids[:, 1:])]

    def step() -> bool:
        """One step; whether a save was under way at its end, on any rank."""
        result = train_step(
            model, optimizer, batch, max_norm=1.0, tokens=MESH[0] * 4 * 128, loss_sum=loss_in_model,
            flags=lambda: [saver.busy],
        )  # fmt: skip
        return result.flags[0]

    for _ in range(3):
        step()
    pipe.send("ready")
    for turn in range(rounds + 1):
        dist.barrier()
        stall = slowest(saver.save(turn))
        busy: list[float] = []
        under_way = True
        while under_way:
            start = time.perf_counter()
            under_way = step()
            busy.append(time.perf_counter() - start)
        saver.wait()
        if (error := saver.failure()) is not None:
            raise error
        dist.barrier()
        free = []
        for _ in range(len(busy)):
            start = time.perf_counter()
            step()
            free.append(time.perf_counter() - start)
        pipe.send((busy, free, stall))


def percentile(values: list[float], part: float) -> float:
    """The value that `part` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def report_stalls(group: Group, rounds: int) -> list[str]:
    """Print; return the targets that were missed."""
    nbytes = sum(group.answers())
    rows = []
    for number in range(rounds + 1):
        row = group.answers(300)[0]
        if number:  # the first warms up
            rows.append(row)
        if number % 10 == 0:
            print(f"  stall: {number} of {rounds}", flush=True)
    wrong = group.answers(300)
    if any(wrong):
        raise SystemExit(f"the last checkpoint loads with other values: {wrong}")
    print(f"{nbytes / 2**20:.0f} MiB of weights and moments at 2x2, {rounds} saves, milliseconds:")
    medians = {}
    for name in rows[0]:
        values = [1000 * row[name] for row in rows]
        medians[name] = statistics.median(values)
        print(f"  {name:18} median {medians[name]:8.1f}   99th percentile {percentile(values, 0.99):8.1f}")
    over, share = medians["stall"] - medians["copy"], medians["stall"] / medians["at once"]
    cost = statistics.median(row["at once"] / row["without checksums"] for row in rows) - 1
    print(
        f"  the stall is the copy and {over:.1f} ms, {share:.1%} of a save at once; checksums add {cost:.1%}",
        flush=True,
    )
    return [
        what
        for what, missed in (
            ("the stall is above the copy and 20 ms", over > 20),
            ("the stall is above 5 % of a save at once", share > 0.05),
            ("the checksums cost more than 5 %", cost > 0.05),
        )
        if missed
    ]


def report_steps(group: Group, rounds: int) -> list[str]:
    """Print; return the targets that were missed."""
    group.answers()
    busy: list[float] = []
    free: list[float] = []
    paces = []
    for number in range(rounds + 1):
        with_save, without, stall = group.answers(300)[0]
        if number:
            busy += with_save
            free += without
            paces.append(sum(without) / (sum(with_save) + stall))
    pace = statistics.median(paces)
    print(
        f"steps: median {1000 * statistics.median(busy):.1f} ms while a save is under way, {1000 * statistics.median(free):.1f} ms "
        f"without ({len(busy)} steps each); pace of a whole save, stall and all, {pace:.2f} of that without",
        flush=True,
    )
    return ["steps are below 90 % of their pace"] if pace < 0.9 else []


def main(argv: list[str] | None = None) -> int:
    """Run; return the exit status."""
    parse = parser(__doc__, rounds=50, mebytes=200.0, dim=256)
    parse.add_argument("--judge", action="store_true", help="exit with 1 when a target is missed")
    chosen = parse.parse_args(argv)
    warm_up()
    missed = []
    home = Path(tempfile.mkdtemp(prefix="meshtrain-stall-", dir=chosen.dir))
    try:
        for body, size, report in ((stalls, chosen.mebytes, report_stalls), (steps, chosen.dim, report_steps)):
            with Group(MESH[0] * MESH[1], body, home, chosen.rounds, size, timeout_s=120) as group:
                missed += report(group, chosen.rounds)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    for what in missed:
        print(f"missed: {what}")
    return 1 if missed and chosen.judge else 0


if __name__ == "__main__":
    raise SystemExit(main())
