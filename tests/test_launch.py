"""One command -> N ranks: how they start, what is refused, and what is left behind (nothing)."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshtrain.errors import Refused
from meshtrain.launch import launch
from meshtrain.mesh import group_timeout, init_mesh
from tests.launching import Command, children_of, fail_late, gone, listening, pids, sign_in, started, stay  # noqa: F401

pytestmark = pytest.mark.timeout(90)


def write_facts(folder: Path) -> None:
    rank = sign_in(folder)
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
    )
    facts = [
        value.item(),
        torch.get_num_threads(),
        group_timeout(dist.group.WORLD).total_seconds(),
        os.getsid(0),
    ]
    (folder / f"{rank}.facts").write_text(repr((facts, [os.environ[name] for name in names])))
    print(f"rank {rank} was here")


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_knows_its_place_and_shares_a_group_with_a_time_out(start, tmp_path, world_size):
    command = start(write_facts, world_size=world_size, timeout_s=12, env={"OMP_NUM_THREADS": "5"})
    assert command.wait() == 0, command.err.read_text()
    for rank in range(world_size):
        (total, threads, timeout, session), found = eval((tmp_path / f"{rank}.facts").read_text())
        assert (total, threads, timeout) == (sum(range(world_size)), 5, 12.0)
        assert session == int((tmp_path / f"{rank}.pid").read_text()), "Ctrl-C must not reach the rank by itself"
        assert found == [str(rank), str(rank), str(world_size), str(world_size), "127.0.0.1", "5", "lo"]
    assert sorted(command.out.read_text().split("\n"))[1:] == [f"rank {rank} was here" for rank in range(world_size)]
    assert command.err.read_text() == ""


@pytest.mark.parametrize(("cores", "world_size", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_ranks_share_the_cores(start, tmp_path, monkeypatch, cores, world_size, threads):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("meshtrain.environment.available_cores", lambda: cores)
    assert start(write_facts, world_size=world_size).wait() == 0
    for rank in range(world_size):
        facts, variables = eval((tmp_path / f"{rank}.facts").read_text())
        assert (facts[1], variables[5]) == (threads, str(threads))


def compute_in_parallel(folder: Path) -> None:
    torch.set_num_threads(2)
    x = torch.randn(1 << 20)
    assert torch.isfinite(x.exp().sum())


def used_openmp(fn: Callable[[Path], None], folder: Path) -> None:
    """Not a rank: a command that has computed on two threads before it launches."""
    compute_in_parallel(folder)
    os._exit(launch(fn, (folder,), world_size=2, device="cpu", timeout_s=20))


def test_ranks_compute_even_when_the_parent_had_openmp_threads(tmp_path):
    # A fork keeps none of its parent's OpenMP threads, and a rank that expects them waits for ever.
    pid = os.fork()
    if pid == 0:
        try:
            used_openmp(compute_in_parallel, tmp_path)
        finally:
            os._exit(99)
    assert Command(pid, tmp_path, tmp_path, time.monotonic()).wait() == 0


def test_everything_listens_on_the_loopback_only(start, tmp_path):
    command = start(stay)
    processes = [command.pid, *pids(tmp_path, 2)]
    found = [listening(pid) for pid in processes]
    assert all(found), "the store and each rank's gloo listen"
    assert {address for each in found for address, _ in each} == {"0100007F"}
    for each in found:
        for _, port in each:
            with pytest.raises(ConnectionRefusedError):
                # Another address of this host: what listens on all of them would answer.
                socket.create_connection(("127.0.0.2", port), timeout=5).close()
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130
    assert all(gone(pid) for pid in processes[1:])


def first_collective(folder: Path) -> None:
    dist.all_reduce(torch.ones(1))
    init_mesh(4, 2, "cpu")


def test_eight_ranks_start_quickly(start):
    command = start(first_collective, world_size=8)
    assert command.wait() == 0
    assert command.seconds < 6, "under 1 s on two idle cores; the allowance is for a busy machine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "0 ranks"),
        ({"world_size": 2, "device": "cuda"}, "'cuda' was asked for"),
        ({"world_size": 2, "device": "gpu"}, "'gpu' is not known"),
        ({"world_size": 2, "timeout_s": 0}, "time-out is 0 seconds: it must be a number from 1 to 1000000000"),
        ({"world_size": 2, "timeout_s": 0.0001}, "time-out is 0.0001"),
        ({"world_size": 2, "timeout_s": 1e300}, "time-out is 1e\\+300"),
        ({"world_size": 2, "timeout_s": float("nan")}, "time-out is nan"),
        ({"world_size": 2, "timeout_s": True}, "time-out is True"),
        ({"world_size": 2, "timeout_s": "9"}, "time-out is '9'"),
    ],
)
def test_what_cannot_start_is_refused_before_a_fork(options, message, monkeypatch):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this host has CUDA")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    with pytest.raises(Refused, match=message):
        launch(stay, (), **{"device": "cpu", **options})


def test_the_longest_time_out_works(start):
    # What C++ makes of it must not overflow, which would show as no time at all, or as a wait for ever.
    command = start(first_collective, timeout_s=1e9, world_size=8)
    assert command.wait() == 0, command.err.read_text()


def test_omp_num_threads_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(Refused, match="OMP_NUM_THREADS is 'many'"):
        launch(stay, (), world_size=1, device="cpu")


@pytest.mark.parametrize("bad", [-1, 0])
def test_no_file_descriptor_thread_or_temporary_file_is_left(tmp_path, bad, monkeypatch, capfd):
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def left() -> tuple[list[str], list[str], list[int]]:
        return sorted(os.listdir("/proc/self/fd")), os.listdir("/proc/self/task"), children_of(os.getpid())

    launch(fail_late, (tmp_path, bad), world_size=2, device="cpu", timeout_s=20)  # torch opens some for good
    before = left()
    environ = dict(os.environ)
    assert launch(fail_late, (tmp_path, bad), world_size=2, device="cpu", timeout_s=20) == (bad == 0)
    for _ in range(100):
        if left() == before:
            break
        time.sleep(0.02)
    assert left() == before
    assert os.environ == environ
    assert list(scratch.iterdir()) == []
    assert not [name for name in os.listdir("/dev/shm") if "meshtrain-rank" in name]
