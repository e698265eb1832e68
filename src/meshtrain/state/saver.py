"""Saver: checkpoints of a run into one folder, written in the background while training goes on.

One save is in flight at most. The thread that writes has a process group of its own, so that its exchanges never mix
with those of training, and a low priority, so that training has the cores first.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshtrain.errors import ContractError, MeshtrainError
from meshtrain.mesh import group_timeout
from meshtrain.parallel.state import find_state
from meshtrain.state.checkpoint import write_checkpoint
from meshtrain.state.checkpoints import check_folder, move_latest, prune, sweep
from meshtrain.state.content import Content, take
from meshtrain.state.filemap import parse_size
from meshtrain.state.names import name_of
from meshtrain.state.snapshot import Snapshot
from meshtrain.state.team import JOIN_SECONDS, Team
from meshtrain.state.transfer import Staging

_NICENESS = 10
_LAST_WAIT_S = 30.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint that would survive a power cut."""

    path: Path
    step: int
    stall_seconds: float
    """For how long this rank stood still."""
    seconds: float
    """From the call to the moment when it counts."""
    removed: tuple[Path, ...] = ()
    """Older checkpoints that went, on rank 0."""


class SaveFailed(MeshtrainError):
    """A checkpoint could not be written. Those before it are untouched."""


class Saver:
    """Writes checkpoints `folder`/step-NNNNNNNN. Every rank makes one, and calls its methods alike; see `save`."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int | None = None,
        milestone: int = 0,
        background: bool = True,
        tokenizer: Any = None,
        generation_config: Any = None,
        max_shard_size: int | str = "5GB",
        on_saved: Callable[[Saved], None] | None = None,
        join_seconds: float = JOIN_SECONDS,
    ) -> None:
        """keep, milestone: see `checkpoints.prune`. background: False writes within `save`. on_saved: called on this rank when a
        save counts, in the thread that wrote it. Other arguments: see `save_checkpoint`. Collective.
        """
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ContractError(
                f"keep is {keep!r}: it must be a whole number, 1 or more, or None to keep every checkpoint"
            )
        if type(milestone) is not int or milestone < 0:
            raise ContractError(f"milestone is {milestone!r}: it must be a whole number of steps, or 0 for none")
        parse_size(max_shard_size)
        self.folder = Path(os.path.abspath(folder))
        check_folder(self.folder)
        self._model, self._optimizer, self._generation = model, optimizer, generation_config
        self._keep, self._milestone = keep, milestone
        self._how = {
            "tokenizer": tokenizer, "max_shard_size": max_shard_size, "join_seconds": join_seconds,
        }  # fmt: skip
        self._on_saved = on_saved
        self._background = background
        state = find_state(model)
        if state is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ContractError(
                f"this {type(model).__name__} was not parallelized, but there are {dist.get_world_size()} ranks, which would "
                "all write the whole of it. Call parallelize(model, mesh, plan) first, or save from one process"
            )
        self._group = _own_group() if state is not None and state.sizes.world > 1 else None
        self._team = Team(self._group)
        self._snapshot, self._staging = Snapshot(), Staging()
        self._job: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._saved: Saved | None = None
        if self._team.rank == 0:
            sweep(self.folder)

    @property
    def saved(self) -> Saved | None:
        """The newest save that counts."""
        return self._saved

    @property
    def failed(self) -> bool:
        """Whether a save has failed since `failure` was last asked for."""
        return self._failure is not None

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._job is not None and self._job.is_alive()

    def reserve(self) -> None:
        """Take the host memory for the copies now, rather than at the first save."""
        if self._background:
            self._snapshot.reserve(take(self._model, self._optimizer, 0).tensors())

    def save(self, step: int, run: Mapping[str, Any] | None = None) -> float:
        """Save the state after `step` steps; return the seconds that training stood still for it. Collective.

        Waits for the save before it, copies this rank's shards to host memory, and writes the copy in the background. A
        failure is kept for `failure()`; the checkpoints before it stay as they are. run: see `save_checkpoint`.

        Raises ContractError at once for a state that a checkpoint cannot hold; without a background, SaveFailed.
        """
        self.wait()
        start = time.monotonic()
        content = take(self._model, self._optimizer, step, run, self._generation)
        content = replace(content, milestone=bool(self._milestone) and step % self._milestone == 0)
        if not self._background:
            self._write(content, start, None)
            if (error := self.failure()) is not None:
                raise error
            return time.monotonic() - start
        content = self._snapshot.copy(content)
        stall = time.monotonic() - start
        self._job = threading.Thread(
            target=self._work, args=(content, start, stall), name="meshtrain-save", daemon=True
        )
        self._job.start()
        return stall

    def wait(self) -> None:
        """Return when no save is under way."""
        if self._job is not None:
            self._job.join()
            self._job = None

    def failure(self) -> SaveFailed | None:
        """The failure of a save, once; None when there was none."""
        found, self._failure = self._failure, None
        if found is None:
            return None
        error = SaveFailed(str(found) if isinstance(found, MeshtrainError) else f"{type(found).__name__}: {found}")
        error.__cause__ = found
        return error

    def close(self) -> None:
        """Wait for the save that is under way, and give back the process group. Raises a failure that nobody has asked for."""
        self.wait()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        if (error := self.failure()) is not None:
            raise error

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, Exception) and self._job is not None:
            self._job.join(_LAST_WAIT_S)  # what went wrong in training is no reason to lose the save before

    def _work(self, content: Content, start: float, stall: float) -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._write(content, start, stall)

    def _write(self, content: Content, start: float, stall: float | None) -> None:
        removed: list[Path] = []

        def published(target: Path) -> None:
            try:
                move_latest(self.folder, target.name)
            except OSError as error:
                raise MeshtrainError(
                    f"{target}: is whole and in its place, but `latest` does not name it ({error})"
                ) from error
            with suppress(OSError):  # the checkpoint is safe all the same, and the next save tries again
                removed.extend(prune(self.folder, self._keep, self._milestone, content.step))
                sweep(self.folder, removals_only=True)

        try:
            path = write_checkpoint(
                content, self.folder / name_of(content.step), self._team,
                staging=self._staging, published=published, **self._how,
            )  # fmt: skip
            seconds = time.monotonic() - start
            self._saved = Saved(path, content.step, seconds if stall is None else stall, seconds, tuple(removed))
        except BaseException as error:
            if stall is None and not isinstance(error, Exception):
                raise  # Ctrl-C in the caller's own thread is no failure of the save
            self._failure = error
            return
        if self._on_saved is not None:
            with suppress(OSError):  # nobody listens any more (a closed stdout), but the checkpoint is there
                self._on_saved(self._saved)


def _own_group() -> dist.ProcessGroup:
    """A gloo group of all ranks for the exchanges of the background, with the time-out of the default one."""
    return dist.new_group(backend="gloo", timeout=group_timeout(None) or timedelta(minutes=10))
