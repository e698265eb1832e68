"""Ranks for tests: a pool of forked processes that share a process group and run the functions of tests.

    def test_sum(ranks):
        assert ranks(2).run(total, 3) == [6, 6]

`total` is a function at the top of a module (it goes to the ranks by name); it is called as total(3) on every
rank. Not the launcher under test (`meshtrain.launch`): a pool outlives a failing test, and starts anew after
a hang.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import io
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.mesh import init_default_group, init_mesh
from meshtrain.ranks import die_with_parent, is_secondary, set_threads
from meshtrain.supervise import place_on_this_host

GROUP_TIMEOUT_S = 45.0  # below the time-out of run(), so that a hang shows as the collective that waited
_SETTLE_S = 3.0


class RankError(AssertionError):
    """At least one rank raised, hung or died."""

    def __init__(self, failures: dict[int, str], types: dict[int, str]) -> None:
        self.failures = failures
        """Rank -> traceback, or what else became of it."""
        self.types = types
        """Rank -> name of the exception's class; "Hung" and "Died" where there is none."""
        seen: dict[str, list[int]] = {}
        for rank, text in sorted(failures.items()):
            seen.setdefault(text, []).append(rank)
        super().__init__("\n".join(f"rank {', '.join(map(str, who))}:\n{text}" for text, who in seen.items()))


@functools.cache
def mesh(dp: int, tp: int) -> DeviceMesh:
    """The CPU mesh of these sizes, made once per process; for use inside ranks."""
    return init_mesh(dp, tp, "cpu")


_pools: dict[int, RankPool] = {}


def pool(world_size: int) -> RankPool:
    """The session's pool of this size."""
    if world_size not in _pools:
        _pools[world_size] = RankPool(world_size)
    return _pools[world_size]


@atexit.register
def close_pools() -> None:
    """End all ranks of all pools."""
    for each in _pools.values():
        each.close()
    _pools.clear()


class RankPool:
    """`world_size` forked ranks on gloo, started at the first `run` and again after a failure."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._owner = os.getpid()
        self._pids: list[int] = []
        self._pipes: list[Connection] = []
        self._stacks: list[int] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call fn(*args) on every rank; return the results by rank. Raises RankError. timeout: seconds."""
        try:
            request = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"{fn} and its arguments must pickle: use a function at the top of a module") from error
        if not self._pids:
            self._start()
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send_bytes(request)
        replies, types, failures = self._collect(timeout)
        if failures:
            alike = len(failures) == self.world_size and len(set(types.values())) == 1
            if not alike or any(kind in ("Hung", "Died") or "secondary" in kind for kind in types.values()):
                self.close()  # the ranks no longer agree about where they are
            raise RankError(failures, {rank: kind.removesuffix(" secondary") for rank, kind in types.items()})
        return [replies[rank] for rank in range(self.world_size)]

    def _collect(self, timeout: float) -> tuple[dict[int, Any], dict[int, str], dict[int, str]]:
        replies: dict[int, Any] = {}
        types: dict[int, str] = {}
        failures: dict[int, str] = {}
        end = time.monotonic() + timeout
        while waiting := [r for r in range(self.world_size) if r not in replies and r not in failures]:
            ready = wait([self._pipes[r] for r in waiting], max(0.0, end - time.monotonic()))
            if not ready:
                for rank in waiting:
                    types[rank], failures[rank] = "Hung", f"had not ended; it was at\n{self._stack(rank)}"
                break
            for rank in [r for r in waiting if self._pipes[r] in ready]:
                try:
                    kind, value = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    kind, value = "Died", "died without a word"
                if kind == "":
                    replies[rank] = value
                else:
                    types[rank], failures[rank] = kind, value
                    end = min(end, time.monotonic() + _SETTLE_S)
        return replies, types, failures

    def _stack(self, rank: int) -> str:
        with suppress(ProcessLookupError):
            os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.1)
        with os.fdopen(os.dup(self._stacks[rank]), "rb") as file:
            file.seek(0)
            return file.read().decode(errors="replace")

    def _start(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        for rank in range(self.world_size):
            ours, theirs = socket.socketpair()
            stack = os.memfd_create("stack")
            pid = os.fork()
            if pid == 0:
                try:
                    die_with_parent(parent)
                    os.setpgid(0, 0)
                    ours.close()
                    for other in _pools.values():
                        for pipe in other._pipes:
                            pipe.close()
                    _serve(rank, self.world_size, listener, Connection(theirs.detach()), stack)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            theirs.close()
            self._pids.append(pid)
            self._pipes.append(Connection(ours.detach()))
            self._stacks.append(stack)
        listener.close()

    def close(self) -> None:
        """End the ranks; the next `run` starts new ones."""
        if os.getpid() != self._owner:
            return
        for pid in self._pids:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        for pid in self._pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for pipe in self._pipes:
            pipe.close()
        for stack in self._stacks:
            os.close(stack)
        self._pids, self._pipes, self._stacks = [], [], []


def _serve(rank: int, world_size: int, listener: socket.socket, pipe: Connection, stack: int) -> None:
    """Be one rank: run what comes through the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    port = listener.getsockname()[1]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place_on_this_host(rank, world_size, port).export()
    set_threads(1)
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=rank == 0,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if rank == 0 else None,
    )
    if rank:
        listener.close()
    init_default_group("cpu", GROUP_TIMEOUT_S, store=store, rank=rank, world_size=world_size)
    gc.freeze()
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        pipe.send_bytes(_answer(request))
        gc.collect()


def _answer(request: bytes) -> bytes:
    try:
        fn, args = pickle.loads(request)
        reply: tuple[str, Any] = ("", fn(*args))
        out = io.BytesIO()
        pickle.dump(reply, out)
        return out.getvalue()
    except BaseException as error:
        kind = type(error).__name__ + (" secondary" if is_secondary(error) else "")
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        return pickle.dumps((kind, "".join(traceback.format_exception(type(error), error, frames))))
