"""What the reliability programs share: a tiny model whose every value follows from a number, checks of whole checkpoints,
children by fork, and counting.

A checkpoint is made from a *tag*. Weights, moments and numbers are functions of it, and it is recorded in the checkpoint:
so a checkpoint that mixes two saves, in whatever way, is told from one that does not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import signal
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

from meshtrain.errors import MeshtrainError
from meshtrain.launch import preload
from meshtrain.parallel import ParallelPlan, column, replicate, row
from meshtrain.parallel.state import find_state
from meshtrain.ranks import die_with_parent, is_secondary
from meshtrain.state.checkpoint import Checkpoint
from meshtrain.state.checkpoints import newest_complete
from meshtrain.state.content import named_parameters
from meshtrain.state.manifest import MANIFEST
from meshtrain.state.names import checkpoints_in
from meshtrain.state.restore import load_checkpoint
from meshtrain.state.saver import SaveFailed, Saver
from meshtrain.state.specs import TensorSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


class Lost(AssertionError):
    """Something that must survive did not."""


class Tiny(nn.Module):
    """A few thousand numbers: matrices, vectors and a persistent buffer."""

    def __init__(self, width: int = 12, hidden: int = 22) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


PLAN = ParallelPlan({"norm": replicate(), "up": column(), "down": row()})


def plain(width: int = 12, hidden: int = 22) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A Tiny of one process and its optimizer, with the values of tag 0."""
    model = Tiny(width, hidden)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    fill(model, optimizer, 0)
    return model, optimizer


def value(tag: int, kind: str, shape: Sequence[int]) -> Tensor:
    """What a whole tensor is at a tag."""
    seed = zlib.crc32(f"{tag} {kind}".encode())  # torch's generator looks at the lowest 32 bits of a seed only
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tuple(shape), generator=generator)


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, tag: int) -> None:
    """Bring model and optimizer, whole or cut over a mesh, to a tag."""
    for _, local, expected in _pairs(model, optimizer, tag, make=True):
        local.copy_(expected)
    for state in optimizer.state.values():
        state["step"] = torch.tensor(float(tag))


def differing(model: nn.Module, optimizer: torch.optim.Optimizer, tag: int) -> list[str]:
    """What is not, bit for bit, as `fill` leaves it."""
    found = [
        name for name, local, expected in _pairs(model, optimizer, tag, make=False) if not torch.equal(local, expected)
    ]
    if any(float(state["step"]) != tag for state in optimizer.state.values()):
        found.append("optimizer step")
    return found


def _pairs(
    model: nn.Module, optimizer: torch.optim.Optimizer, tag: int, make: bool
) -> list[tuple[str, Tensor, Tensor]]:
    """(name, local tensor, its value at the tag) of everything that this rank holds."""
    state = find_state(model)
    coordinate = state.coordinate if state is not None else (0, 0)
    named = list(named_parameters(model))
    pairs = []
    for layout, parameter in named:
        tensors: dict[str, Tensor] = {"": parameter.detach()}
        for kind in MOMENTS:
            if make and kind not in optimizer.state[parameter]:
                optimizer.state[parameter][kind] = torch.zeros_like(parameter.detach())
            tensors[kind] = optimizer.state[parameter].get(kind, torch.empty(0))
        for kind, tensor in tensors.items():
            local = getattr(tensor, "_local_tensor", tensor)
            spec = TensorSpec(layout.name, layout.name, (layout.name,), layout.shape, layout.dtype, layout)
            pairs.append((f"{layout.name} {kind}", local, _part(spec, coordinate, tag, kind)))
    for name, buffer in model.named_buffers():
        pairs.append((name, buffer, torch.full_like(buffer, tag)))
    return pairs


def _part(spec: TensorSpec, coordinate: tuple[int, int], tag: int, kind: str) -> Tensor:
    whole = value(tag, f"{spec.name} {kind}", spec.shape)
    part = torch.empty(spec.local_shape(*coordinate))
    for block in spec.blocks(*coordinate):
        part[block.of_local()] = whole[block.of_global()]
    return part


def sums_differing(path: Path) -> list[str]:
    """The files of a checkpoint whose bytes do not sum to what its manifest says, and those that it does not list.

    It reads the manifest with nothing but zlib and json, so that it does not share an error with the code under test.
    """
    import json

    raw = (path / MANIFEST).read_bytes()
    wrong = [] if f"{zlib.crc32(raw[21:]):08x}".encode() == raw[11:19] else [MANIFEST]
    listed = json.loads(raw)["files"]
    for name, known in listed.items():
        content = (path / name).read_bytes() if (path / name).is_file() else None
        if content is None or len(content) != known["bytes"] or f"{zlib.crc32(content):08x}" != known["crc32"]:
            wrong.append(name)
    there = {each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()}
    return wrong + sorted(there - set(listed) - {MANIFEST})


def check_whole(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read all of a checkpoint, through plain checksums and through load_checkpoint; return its tag. Raises Lost.

    model, optimizer: plain ones of the right shape, which are overwritten.
    """
    if wrong := sums_differing(path):
        raise Lost(f"{path}: {', '.join(wrong)} not as written")
    fill(model, optimizer, 2**20)
    try:
        tag = int(load_checkpoint(model, optimizer, path).run["tag"])
    except MeshtrainError as error:
        raise Lost(f"cannot be loaded: {error}") from error
    if wrong := differing(model, optimizer, tag):
        raise Lost(f"{path}: loads with other values than tag {tag} has: {', '.join(wrong)}")
    return tag


def newest_whole(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Checkpoint | None, int]:
    """The newest complete checkpoint and its tag, after checking every byte of it, and that none newer was torn. Raises Lost."""
    found, skipped = newest_complete(folder)
    if skipped:
        raise Lost(f"a torn checkpoint appeared: {skipped[0][1]}")
    return found, check_whole(found.path, model, optimizer) if found is not None else -1


def rest(folder: Path) -> list[str]:
    """Temporary names in a folder of checkpoints, and whatever else does not belong there."""
    if not folder.is_dir():
        return []
    return [name for name in sorted(os.listdir(folder)) if not re.fullmatch(r"step-\d{8,}|latest", name)]


def steps(folder: Path) -> list[int]:
    """The steps that there are checkpoints of, newest first."""
    return [step for step, _ in checkpoints_in(folder)]


def warm_up() -> None:
    """Import what a child would import, and have SIGTERM end this program in order, so that nothing stays mounted."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    preload("meshtrain.state.saver", "meshtrain.state.restore", "meshtrain.parallel")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def fork(body: Callable[[], object]) -> int:
    """Start a process that calls body() and ends, with status 0 or, after an exception, 1; return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        body()
        status = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            if not is_secondary(error):  # what a rank says whose peer was killed
                traceback.print_exc()
                sys.stderr.flush()
    finally:
        os._exit(status)


def ended(pid: int, seconds: float) -> int | None:
    """Wait for a child; return its exit status (negative: the signal), or None when it had to be killed after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.001)


class Tally:
    """Counts what happened, shows a line while it does, and decides the exit status."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.done = 0
        self._start = self._shown = time.monotonic()

    def add(self, *outcomes: str) -> None:
        """One more is done, and these outcomes were seen."""
        self.done += 1
        self.counts.update(outcomes)
        now = time.monotonic()
        if now - self._shown > 5:
            self._shown = now
            spent = now - self._start
            print(f"  {self.what}: {self.done} of {self.total}, {len(self.lost)} lost, {spent:.0f} s", flush=True)

    def lose(self, what: str) -> None:
        """Something was lost."""
        self.lost.append(what)
        if len(self.lost) <= 10:
            print(f"  LOST {what}", file=sys.stderr, flush=True)

    def close(self) -> int:
        """Print the counts; return the exit status."""
        seen = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        seconds = time.monotonic() - self._start
        print(
            f"{self.what}: {self.done} done, {len(self.lost)} lost ({seen or 'nothing else'}), {seconds:.0f} s",
            flush=True,
        )
        return 1 if self.lost else 0


def parser(text: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with --seed, --dir and one option for each default, of its type."""
    result = argparse.ArgumentParser(
        description=(text or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in defaults.items():
        result.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    result.add_argument("--seed", type=int, default=0)
    result.add_argument(
        "--dir", type=Path, default=None, help="where to work; the system's temporary directory by default"
    )
    return result


def saved(saver: Saver, step: int, run: dict[str, int]) -> SaveFailed | None:
    """Save, in the background or not, and wait for it; return what went wrong."""
    try:
        saver.save(step, run)
        saver.wait()
    except SaveFailed as error:
        return error
    return saver.failure()
