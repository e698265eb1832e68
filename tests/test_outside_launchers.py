"""Ranks that torchrun or Slurm started: joined with the same program, and ended as those launchers end them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshtrain.errors import Refused
from meshtrain.launch import run
from meshtrain.mesh import group_timeout, init_mesh
from tests.launching import Command, redirect, stay

pytestmark = pytest.mark.timeout(90)


PROGRAM = """
import sys
from meshtrain.launch import run
from tests.test_outside_launchers import work

if __name__ == "__main__":
    sys.exit(run(work, (sys.argv[1],), world_size=2, device="cpu", timeout_s=33))
"""


def work(how: str) -> None:
    grid = init_mesh(dist.get_world_size(), 1, "cpu")
    total = torch.ones(1)
    dist.all_reduce(total, group=grid.get_group("dp"))
    timeout = group_timeout(grid.get_group("tp"))
    sys.stdout.write(f"joined {dist.get_rank()} {total.item()} {timeout}\n")
    sys.stdout.flush()
    if how == "fail" and dist.get_rank() == 1:
        raise ValueError("rank one cannot")
    if how == "refuse":
        raise Refused("--data has no text")
    if how == "stay":
        time.sleep(60)
    if how == "restart":
        print(os.environ["MESHTRAIN_RESTART"], flush=True)
    if how == "count":
        seen: list[int] = []
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            time.sleep(0.01)
        print(len(seen), flush=True)
    if how == "fail once" and os.environ["MESHTRAIN_RESTART"] == "0":
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        raise ValueError("only the first time")


def join(folder: Path, how: str, variables: dict[str, str], world_size: int = 2) -> Command:
    """Fork one rank of a job that somebody else started, with that one's variables."""
    number = len(list(folder.glob("out*")))
    out, err = folder / f"out{number}", folder / f"err{number}"
    out.touch()
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            redirect(out, err)
            os.environ.update(variables, GLOO_SOCKET_IFNAME="lo")
            status = run(work, (how,), world_size=world_size, device="cpu", timeout_s=33)
        finally:
            sys.stderr.flush()
            os._exit(status)
    return Command(pid, out, err, time.monotonic())


def torchrun_variables(rank: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = str(probe.getsockname()[1])
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free,
    }  # fmt: skip


def slurm_variables(rank: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": "7731",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2",
    }  # fmt: skip


def test_ranks_of_torchrun_are_joined_and_a_failing_one_says_who_it_is(tmp_path):
    first = torchrun_variables(0)
    ranks = [join(tmp_path, "fail", {**first, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    assert [rank.wait() for rank in ranks] == [0, 1]
    assert [rank.out.read_text() for rank in ranks] == [f"joined {rank} 2.0 0:00:33\n" for rank in (0, 1)]
    shown = ranks[1].err.read_text()
    assert shown.count("Traceback") == 1
    assert "rank 1 of 2 failed:" in shown
    assert "ValueError: rank one cannot" in shown


def test_ranks_of_slurm_are_joined_and_a_refusal_is_status_2(tmp_path):
    ranks = [join(tmp_path, "refuse", slurm_variables(rank)) for rank in (0, 1)]
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert [rank.out.read_text() for rank in ranks] == [f"joined {rank} 2.0 0:00:33\n" for rank in (0, 1)]
    assert [rank.err.read_text() for rank in ranks] == ["--data has no text\n"] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("at_first", [signal.default_int_handler, signal.SIG_IGN])
def test_a_joined_rank_takes_what_its_launcher_sends_as_an_interruption(tmp_path, number, at_first):
    # torchrun and Slurm send SIGTERM, Slurm before that SIGUSR1, and the function must get its chance to save; also in
    # the background of a script, where SIGINT is ignored.
    if number == signal.SIGINT and at_first == signal.SIG_IGN:
        pytest.skip("then the one who started it wanted that")
    ranks = joined_two(tmp_path, "stay", at_first)
    for rank in ranks:
        os.kill(rank.pid, number)
    assert [rank.wait() for rank in ranks] == [130, 130]


def joined_two(folder: Path, how: str, at_first: Any = signal.default_int_handler) -> list[Command]:
    before = signal.signal(signal.SIGINT, at_first)
    try:
        first = torchrun_variables(0)
        ranks = [join(folder, how, {**first, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    finally:
        signal.signal(signal.SIGINT, before)
    while not all("joined" in rank.out.read_text() for rank in ranks):
        assert ranks[0].seconds < 20
        time.sleep(0.02)
    time.sleep(0.05)  # until the function has installed its handler
    return ranks


@pytest.mark.parametrize(
    ("numbers", "interruptions"),
    [
        ((signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM), 1),  # a warning, another one, the time limit
        ((signal.SIGTERM, signal.SIGUSR1), 1),
        ((signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM), 2),  # the second one is meant
    ],
)
def test_a_joined_rank_that_is_ending_is_not_interrupted_by_what_follows_the_warning(tmp_path, numbers, interruptions):
    ranks = joined_two(tmp_path, "count")
    for rank in ranks:
        for number in numbers:
            os.kill(rank.pid, number)
            time.sleep(0.1)
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert [rank.out.read_text().split()[-1] for rank in ranks] == [str(interruptions)] * 2


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "0"), ({"TORCHELASTIC_RESTART_COUNT": "2"}, "2"), ({"SLURM_RESTART_COUNT": "1"}, "1")],
)
def test_a_joined_rank_is_told_what_its_launcher_counts(tmp_path, variables, expected):
    first = {**torchrun_variables(0), "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    rank = join(tmp_path, "restart", {**first, **variables}, world_size=1)
    assert rank.wait() == 0, rank.err.read_text()
    assert rank.out.read_text().split()[-1] == expected


def torchrun(folder: Path, how: str, *options: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).resolve().parent.parent
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
         "--master-port", torchrun_variables(0)["MASTER_PORT"], *options, str(program), how],
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)},
        capture_output=True, text=True, timeout=230,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_real_torchrun_starts_the_same_program(tmp_path):
    done = torchrun(tmp_path, "fail")
    assert done.returncode == 1, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [f"joined {rank} 2.0 0:00:33" for rank in (0, 1)]
    assert done.stderr.count("ValueError: rank one cannot") == 1
    assert "rank 1 of 2 failed:" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_real_torchrun_starts_the_ranks_again_and_they_know_it(tmp_path):
    done = torchrun(tmp_path, "fail once", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert "ValueError: only the first time" in done.stderr
    joined = sorted(line for line in done.stdout.split("\n") if line.startswith("joined"))
    assert joined == [f"joined {rank} 2.0 0:00:33" for rank in (0, 0, 1, 1)]


def test_another_number_of_ranks_than_the_mesh_needs_is_refused_with_both(monkeypatch):
    for name, value in torchrun_variables(0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match=r"torchrun started 2 ranks, but dp x tp needs 8\..*product is 2"):
        run(stay, world_size=8, device="cpu")
