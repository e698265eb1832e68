"""One rank of a run: its threads, its process group, its function, and what became of it.

Runs inside the rank, whoever started it. Starting ranks is `meshtrain.launch`, watching them `meshtrain.supervise`, and
what their outcomes amount to together `meshtrain.verdict`.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshtrain.environment import RankEnvironment, threads_per_rank
from meshtrain.errors import Refused

if TYPE_CHECKING:
    from torch.distributed import Store

STATUS_DONE, STATUS_FAILED, STATUS_REFUSED, STATUS_STUCK, STATUS_INTERRUPTED = 0, 1, 2, 3, 130
RESTART_VARIABLE = "MESHTRAIN_RESTART"
"""Names the environment variable that tells a rank how often the ranks have been started again: 0 at first."""

# What gloo, nccl and the store say on a rank whose peer is gone or late: such an error is seldom the cause.
_SECONDARY = re.compile(
    r"connectFullMesh failed|closed by peer|reset by peer|Broken pipe|Connection refused|Socket closed|"
    r"Timed out waiting|wait timeout|timed out after \d+|failed to recv|recvBytes|sendBytes|ncclRemoteError|"
    r"remote process exited|Connection was likely closed|NCCL communicator was aborted|"
    r"Watchdog caught collective operation timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Work:
    """What every rank of a run does."""

    fn: Callable[..., object]
    """Called on each rank as fn(*args); what it returns is dropped."""
    args: tuple[Any, ...]
    device: str
    """"cpu" or "cuda"."""
    timeout_s: float
    """Seconds after which a collective, or the meeting of the ranks, fails."""
    devices: tuple[str, ...] | None = None
    """What CUDA_VISIBLE_DEVICES is to name, without the devices that were lost; None leaves it alone."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    rank: int
    status: int
    """Exit status: 0 done, 1 failed, 2 refused, 130 interrupted, or what SystemExit carried."""
    kind: str
    """"done", "error", "refused", "interrupted", "exit" (a SystemExit) or "signal" (killed)."""
    text: str = ""
    """The traceback of an error, the message of a refusal."""
    summary: str = ""
    """The last line of it."""
    secondary: bool = False
    """True for an error that a lost or late peer causes."""
    at: float = 0.0
    """When, in seconds of the host's monotonic clock, which all its processes share."""


def run_rank(
    place: RankEnvironment,
    work: Work,
    connect: Callable[[], Store] | None = None,
    *,
    restart: str = "0",
    met: Callable[[], object] = lambda: None,
) -> Outcome:
    """Join the process group, call the work's function, leave the group; return how it went, raising nothing.

    connect: makes the store at which the ranks meet; None has torch make it from the environment. restart: how often
    the ranks have been started again, which `fn` finds in MESHTRAIN_RESTART. met: called when all ranks are there.
    """
    try:
        from meshtrain.mesh import init_default_group

        place.export()
        os.environ[RESTART_VARIABLE] = restart
        if work.devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(work.devices)
        set_threads(threads_per_rank(place))
        store = connect() if connect else None
        init_default_group(work.device, work.timeout_s, store=store, rank=place.rank, world_size=place.world_size)
        _meet()
        met()
        work.fn(*work.args)
        _leave()
        return Outcome(place.rank, STATUS_DONE, "done", at=time.monotonic())
    except BaseException as error:
        # torch raises errors of its own outside Exception (CheckpointException), and a rank must report those too.
        return outcome_of(error, place.rank)


def outcome_of(error: BaseException, rank: int) -> Outcome:
    """Return what an exception that ended a rank means; its traceback starts below the caller's frame."""
    now = time.monotonic()
    if isinstance(error, Refused):
        return Outcome(rank, STATUS_REFUSED, "refused", str(error), str(error), at=now)
    if isinstance(error, KeyboardInterrupt):
        return Outcome(rank, STATUS_INTERRUPTED, "interrupted", at=now)
    if isinstance(error, SystemExit):
        code = error.code
        if code is None or isinstance(code, int):
            return Outcome(rank, (code or 0) & 0xFF, "exit", at=now)
        return Outcome(rank, STATUS_FAILED, "exit", str(code), str(code), at=now)
    below = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, below or error.__traceback__))
    return Outcome(rank, STATUS_FAILED, "error", text, f"{type(error).__name__}: {error}", is_secondary(error), now)


def is_secondary(error: BaseException) -> bool:
    """Return whether the error, or its cause, is what a rank sees when another one is lost or late."""
    import torch.distributed as dist

    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, (dist.DistNetworkError, dist.DistStoreError)):
            return True
        if isinstance(link, RuntimeError) and _SECONDARY.search(str(link)):
            return True
        link = link.__cause__
    return False


def describe(outcome: Outcome, world_size: int) -> str:
    """Return the text to show for a rank that did not end well."""
    if outcome.kind == "refused":
        return outcome.text
    if outcome.kind == "error":
        return f"rank {outcome.rank} of {world_size} failed:\n{outcome.text.rstrip()}"
    if outcome.kind == "signal":
        hint = " (out of memory?)" if outcome.text == "SIGKILL" else ""
        return f"rank {outcome.rank} of {world_size} was killed by {outcome.text}{hint}"
    ended = f"rank {outcome.rank} of {world_size} ended with status {outcome.status}"
    return f"{ended}: {outcome.text}" if outcome.text else ended


def set_threads(threads: int) -> None:
    """Give this process, and those it starts, `threads` compute threads."""
    import torch

    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent `parent` ends, however that ends (Linux only)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(STATUS_FAILED)


def flush_output() -> None:
    """Flush stdout and stderr, of which either may be closed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _meet() -> None:
    """Wait for all ranks: one that is done at once would cut the connections that another is still making."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))  # a CPU tensor, so by gloo on either device


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
