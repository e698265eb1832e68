"""Dp ranks that take different paths through a model: found while they wait for each other, or at the end of the step.

FSDP gathers and reduces each unit over dp, so every dp rank must run the same units in the same order. Where one batch
skips a unit, ranks wait in different collectives until the time-out of the process group; where it takes another unit of
the same size instead, they even go on, with each other's weights. The first is seen by ranks that have waited for a few
seconds and tell each other where, through the store; the second by a number that rides along with the scalars that a
step reduces anyway. Only on CPU: on a GPU the host does not wait in collectives, and NCCL has a watchdog of its own.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ContractError

PATIENCE_SECONDS = 8.0
_POLL = timedelta(seconds=1)
_CONFIRMATIONS = 3
_WAY_OUT = (
    "Every rank must run the same units in the same order: call each one on every rank, if need be with its result times zero, or "
    "take the optional module out of the plan's `units`, so that it belongs to the unit around it, where a parameter that a rank "
    "does not use counts as a gradient of zero"
)


class Watch:
    """Waits for the collectives of one model."""

    def __init__(self, group: dist.ProcessGroup, patience: float = PATIENCE_SECONDS) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        self.patience = timedelta(seconds=patience)
        self._waits = 0

    def wait(self, work: dist.Work, place: str) -> None:
        """Wait for a collective. Raises ContractError, on every rank of the dp group, when they wait in different places."""
        self._waits += 1
        if _done(work, self.patience):
            return
        store, key = dist.distributed_c10d._get_default_store(), "meshtrain/watch/{}".format
        mine, times = f"{self._waits} {place}", 0
        seen: dict[int, str] = {}
        try:
            while not _done(work, _POLL):
                store.set(key(self.rank), mine)
                keys = {rank: key(rank) for rank in self.ranks}
                found = {rank: store.get(name).decode() for rank, name in keys.items() if store.check([name])}
                times = times + 1 if found == seen else 1
                seen = found
                where = {rank: text.partition(" ")[2] for rank, text in found.items()}
                if times >= _CONFIRMATIONS and len(found) == len(self.ranks) and len(set(where.values())) > 1:
                    time.sleep(_CONFIRMATIONS * _POLL.total_seconds())  # the others must still read where this rank is
                    raise ContractError(_message(where))
        finally:
            with suppress(RuntimeError):
                store.delete_key(key(self.rank))


def _done(work: dist.Work, limit: timedelta) -> bool:
    """Whether a collective ends within `limit`. Raises what it raised."""
    try:
        work.wait(limit)
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


def _message(where: dict[int, str]) -> str:
    places: dict[str, list[int]] = {}
    for rank, place in where.items():
        places.setdefault(place, []).append(rank)
    told = "; ".join(f"rank {', '.join(map(str, ranks))}: {place}" for place, ranks in places.items())
    return f"dp ranks wait for each other in different places ({told}), and would until the time-out of the process group. {_WAY_OUT}"


class PathCheck:
    """Finds ranks that have run other units than their peers since the last step, without a collective of its own.

    Each rank's hash of the units that it ran goes into a sum with a factor, all of which add up to zero.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.factor = world - 1 if rank == 0 else -1
        self.hash = 0

    def see(self, unit: int) -> None:
        """Take the number of a unit that runs."""
        self.hash = (self.hash * 31 + unit + 1) % (2**31 - 1)

    def contribution(self) -> Tensor:
        """This rank's term of the sum, fp64; starts afresh."""
        value, self.hash = self.hash * self.factor, 0
        return torch.tensor(value, dtype=torch.float64)

    @staticmethod
    def check(total: float) -> None:
        """Raise unless the sum over all ranks is zero."""
        if total != 0:
            raise ContractError(
                f"ranks have run different units of the model since the last step, and so were given each other's weights and "
                f"gradients. {_WAY_OUT}. No weight was changed by this step"
            )
