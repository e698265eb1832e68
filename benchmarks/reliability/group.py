"""Forked ranks that share a gloo group and do what they are told, one command at a time, until they are closed or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.reliability.common import PLAN, Tiny, fork

from meshtrain.mesh import init_default_group, init_mesh
from meshtrain.parallel import parallelize
from meshtrain.supervise import place_on_this_host
from meshtrain.train.optim import adamw

TIMEOUT_S = 30.0


class Hung(AssertionError):
    """Ranks that did not answer in time."""


class Group:
    """`size` ranks. Each calls body(rank, next), where next() is the next command, and answers with what body yields."""

    def __init__(self, size: int, body: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> None:
        self.size = size
        self.pids: list[int] = []
        self.pipes: list[Connection] = []
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        for rank in range(size):
            ours, theirs = socket.socketpair()

            def serve(rank: int = rank, ours: socket.socket = ours, theirs: socket.socket = theirs) -> None:
                ours.close()
                for pipe in self.pipes:
                    pipe.close()
                _join(rank, size, listener, timeout_s)
                body(rank, Connection(theirs.detach()), *args)

            self.pids.append(fork(serve))
            theirs.close()
            self.pipes.append(Connection(ours.detach()))
        listener.close()

    def tell(self, *command: Any) -> None:
        """Give every rank a command."""
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send(command)

    def answers(self, seconds: float = 60.0) -> list[Any]:
        """One answer of every rank; None of one that has died. Raises Hung, naming ranks, after `seconds`."""
        found: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while len(found) < self.size:
            waiting = {self.pipes[rank]: rank for rank in range(self.size) if rank not in found}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                raise Hung(f"no answer of rank(s) {', '.join(map(str, sorted(waiting.values())))} in {seconds:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    found[waiting[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    found[waiting[pipe]] = None
        return [found[rank] for rank in range(self.size)]

    def ask(self, *command: Any, seconds: float = 60.0) -> list[Any]:
        """tell, then answers."""
        self.tell(*command)
        return self.answers(seconds)

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        """SIGKILL."""
        for rank in range(self.size) if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)

    def close(self) -> None:
        """End all ranks and wait for them."""
        self.kill()
        for pid in self.pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for pipe in self.pipes:
            pipe.close()
        self.pids, self.pipes = [], []

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _join(rank: int, size: int, listener: socket.socket, timeout_s: float) -> None:
    port = listener.getsockname()[1]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place_on_this_host(rank, size, port).export()
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if rank == 0 else None,
    )
    if rank:
        listener.close()
    init_default_group("cpu", timeout_s, store=store, rank=rank, world_size=size)


def on_mesh(dp: int, tp: int, width: int = 12, hidden: int = 22) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A Tiny cut over a mesh of these ranks, and its optimizer. Inside ranks."""
    torch.manual_seed(0)
    model = parallelize(Tiny(width, hidden), init_mesh(dp, tp, "cpu"), PLAN)
    return model, adamw(model, lr=1e-3)


def mesh_of(ranks: int) -> tuple[int, int]:
    """(dp, tp) for a number of ranks: tp is 2 where it divides."""
    return (ranks // 2, 2) if ranks % 2 == 0 else (ranks, 1)
