"""Restarts: after a failure a new generation of ranks, until the run is done, interrupted, or comes no further."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshtrain import restarts as policy
from meshtrain import supervise
from meshtrain.errors import Refused
from meshtrain.launch import launch, run
from meshtrain.restarts import Restarts, back_off
from tests.launching import children_of, generation, gone, pids, restarts, sign_in, started, stay, steps  # noqa: F401

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def no_wait(monkeypatch) -> list[float]:
    """Restarts follow at once; the list tells how long they would have waited."""
    waits: list[float] = []
    monkeypatch.setattr(policy, "back_off", lambda fruitless: waits.append(back_off(fruitless)) or 0.0)
    return waits


# ---- what is started again, and what is not ---------------------------------------------------------------


def fail_first(folder: Path, how: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    (folder / f"gen-{generation()}-{rank}").write_text(f"{os.environ['MASTER_PORT']} {size}")
    if generation() == 0 and rank == 1:
        if how == "raise":
            raise ZeroDivisionError("the one cause")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "vanish":
            os._exit(0)
        raise SystemExit(int(how))
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("raise", "ZeroDivisionError: the one cause"),
        ("kill", "rank 1 of 2 was killed by SIGKILL (out of memory?)"),
        ("vanish", "rank 1 of 2 ended with status 1: it left without a report (os._exit?)"),
        ("7", "rank 1 of 2 ended with status 7"),
    ],
)
def test_after_a_failure_a_new_generation_does_the_work(start, tmp_path, how, shown):
    (tmp_path / "step-100").touch()
    command = start(fail_first, how, restarts=restarts(tmp_path))
    assert command.wait() == 0
    lines = command.err.read_text().splitlines()
    assert lines.count(shown) == 1
    assert lines[-1] == "restart 1 of 3: 2 ranks, from step 100"
    first, second = ([(tmp_path / f"gen-{n}-{rank}").read_text() for rank in (0, 1)] for n in (0, 1))
    assert first[0] == first[1] != second[0] == second[1], "a new generation meets at a new port"
    assert not list(tmp_path.glob("gen-2-*"))


def refuse_or_leave(folder: Path, how: str) -> None:
    (folder / f"gen-{generation()}-{dist.get_rank()}").touch()
    if dist.get_rank() == 1:
        if how == "refuse":
            raise Refused("--lr is -1")
        if how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        raise SystemExit(int(how))
    dist.barrier()


@pytest.mark.parametrize(("how", "status"), [("refuse", 2), ("2", 2), ("interrupt", 130), ("130", 130)])
def test_a_refusal_and_an_interruption_are_final(start, tmp_path, how, status):
    command = start(refuse_or_leave, how, restarts=restarts(tmp_path))
    assert command.wait() == status
    assert "restart 1" not in command.err.read_text()
    assert not list(tmp_path.glob("gen-1-*"))


# ---- how often --------------------------------------------------------------------------------------------


def advance_and_fail(folder: Path, advancing: tuple[int, ...]) -> None:
    """Fail in every generation; in those listed only after a step."""
    (folder / f"gen-{generation()}").touch()
    if generation() in advancing:
        (folder / f"step-{10 * (generation() + 1)}").touch()
    raise OSError(f"generation {generation()}")


@pytest.mark.parametrize(
    ("advancing", "limit", "generations", "waits", "status", "last"),
    [
        ((), 9, 4, [0, 1, 2], 3, "3 restarts in a row came no further than step 0: what failed is shown above."),
        ((0,), 9, 4, [0, 1, 2], 3, "3 restarts in a row came no further than step 10: what failed is shown above."),
        (
            (2,),
            9,
            6,
            [0, 1, 0, 1, 2],
            3,
            "3 restarts in a row came no further than step 30: what failed is shown above.",
        ),
        ((0, 1, 2, 3, 4, 5), 5, 6, [0] * 5, 1, "no restart is left: 5 of 5 made, up to step 60."),
        ((), 1, 2, [0], 1, "no restart is left: 1 of 1 made, up to step 0."),
    ],
)
def test_restarts_end_at_the_limit_or_when_three_in_a_row_bring_nothing(
    tmp_path, no_wait, capfd, advancing, limit, generations, waits, status, last
):
    found = launch(
        advance_and_fail, (tmp_path, advancing), world_size=1, device="cpu", timeout_s=20,
        restarts=restarts(tmp_path, limit),
    )  # fmt: skip
    assert found == status
    assert len(list(tmp_path.glob("gen-*"))) == generations
    assert no_wait == waits
    shown = capfd.readouterr().err
    assert shown.splitlines()[-1] == last
    assert shown.count("Traceback") == generations, "each failure once"


def test_a_resumed_run_makes_progress_only_beyond_where_it_began(tmp_path, no_wait, capfd):
    (tmp_path / "step-500").touch()
    assert launch(advance_and_fail, (tmp_path, (0, 1, 2, 3)), world_size=1, device="cpu", timeout_s=20,
                  restarts=restarts(tmp_path, 9)) == 3  # fmt: skip
    assert len(list(tmp_path.glob("gen-*"))) == 4


def test_the_wait_doubles_up_to_30_seconds():
    assert [back_off(n) for n in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("limit", [-1, True, 1.5, "3"])
def test_a_number_of_restarts_that_is_none_is_refused(limit):
    with pytest.raises(Refused, match="--max-restarts is .*: it must be a whole number"):
        Restarts(limit, progress=lambda: 0)


def test_shrinking_without_restarts_is_refused():
    with pytest.raises(Refused, match="--elastic takes effect at a restart, but --max-restarts is 0"):
        Restarts(0, progress=lambda: 0, shrink=lambda left: None)


def test_under_an_outside_launcher_restarts_are_its_own_business(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    with pytest.raises(Refused, match="torchrun started the ranks .*: use torchrun --max-restarts"):
        run(stay, world_size=1, device="cpu", restarts=Restarts(1, progress=lambda: 0))


# ---- interruptions ----------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to it"
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_an_interruption_during_the_wait_ends_the_run(start, tmp_path, monkeypatch, number):
    monkeypatch.setattr(policy, "back_off", lambda fruitless: 30.0)
    command = start(fail_first, "raise", restarts=restarts(tmp_path))
    wait_for(lambda: "restart 1 of 3: 2 ranks, from step 0, in 30 s" in command.err.read_text())
    os.kill(command.pid, number)
    assert command.wait() == 130
    assert command.seconds < 10
    assert not list(tmp_path.glob("gen-1-*"))


def fail_and_hang(folder: Path) -> None:
    """One rank fails, the other does not notice."""
    (folder / f"gen-{generation()}-{dist.get_rank()}").touch()
    if dist.get_rank() == 1:
        (folder / "failing").touch()
        raise ZeroDivisionError("the one cause")
    time.sleep(60)


def test_an_interruption_while_a_generation_ends_forbids_the_next(start, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "_SETTLE_S", 20.0)
    command = start(fail_and_hang, restarts=restarts(tmp_path))
    wait_for((tmp_path / "failing").exists)
    time.sleep(0.3)
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 130
    assert command.seconds < 10
    assert command.err.read_text().count("ZeroDivisionError: the one cause") == 1
    assert "restart 1" not in command.err.read_text()


def fail_and_stay(folder: Path) -> None:
    if generation() == 0:
        raise ZeroDivisionError("the one cause")
    stay(folder)


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_an_interruption_while_a_generation_starts_ends_the_run_soon(start, tmp_path, seconds):
    command = start(fail_and_stay, world_size=8, restarts=restarts(tmp_path), grace_s=60, timeout_s=60)
    wait_for(lambda: "restart 1 of" in command.err.read_text())
    time.sleep(seconds)
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130
    assert command.seconds < 9
    assert "restart 2" not in command.err.read_text()


def save_in_the_second(folder: Path) -> None:
    if generation() == 0:
        raise ZeroDivisionError("the one cause")
    rank = sign_in(folder)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        (folder / f"{rank}.saved").touch()
        raise


def test_a_later_generation_is_interrupted_as_the_first(start, tmp_path):
    command = start(save_in_the_second, restarts=restarts(tmp_path))
    pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 130
    assert len(list(tmp_path.glob("*.saved"))) == 2


# ---- time -------------------------------------------------------------------------------------------------


def work_together(folder: Path) -> None:
    """Collectives without end in the first generation; in the next one, one."""
    dist.all_reduce(torch.ones(1))
    (folder / f"at-{generation()}-{dist.get_rank()}").write_text(f"{os.getpid()} {time.monotonic()}")
    while generation() == 0:
        dist.all_reduce(torch.ones(1))


def test_eight_ranks_are_back_at_work_soon_after_a_loss(start, tmp_path):
    command = start(work_together, world_size=8, restarts=restarts(tmp_path))
    wait_for(lambda: len(list(tmp_path.glob("at-0-*"))) == 8)
    first = [int((tmp_path / f"at-0-{rank}").read_text().split()[0]) for rank in range(8)]
    lost = time.monotonic()
    os.kill(first[5], signal.SIGKILL)
    assert command.wait() == 0, command.err.read_text()
    back = max(float((tmp_path / f"at-1-{rank}").read_text().split()[1]) for rank in range(8))
    assert back - lost < 6, "under 2 s on two idle cores; the allowance is for a busy machine"
    assert all(gone(pid) for pid in first)


def hang_first(folder: Path) -> None:
    sign_in(folder)
    if generation() == 0:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_hangs_is_ended_by_the_time_out_of_the_others_and_all_are_restarted(start, tmp_path):
    command = start(hang_first, timeout_s=2, restarts=restarts(tmp_path))
    hung = pids(tmp_path, 2)
    assert command.wait() == 0
    assert command.seconds < 10
    shown = command.err.read_text()
    assert "rank 1 was stopped (SIGSTOP?): the others waited in vain" in shown
    assert "restart 1 of 3: 2 ranks" in shown
    assert all(gone(pid) for pid in hung)


# ---- leaving nothing --------------------------------------------------------------------------------------


def spawn_and_fail(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "300"])
    (folder / f"child-{child.pid}").touch()
    (folder / f"step-{generation() + 1}").touch()
    dist.barrier()
    if dist.get_rank() == 1 and generation() < 20:
        raise ZeroDivisionError
    dist.barrier()


def test_twenty_generations_leave_no_descriptor_thread_process_or_memory(start, tmp_path):
    def count() -> int:
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        facts = [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(children_of(os.getpid()))]
        with (tmp_path / "facts").open("a") as file:
            print(*facts, memory, file=file)
        return steps(tmp_path)

    command = start(spawn_and_fail, restarts=Restarts(20, progress=count))
    assert command.wait(60) == 0, command.err.read_text()[-2000:]
    facts = [tuple(map(int, line.split())) for line in (tmp_path / "facts").read_text().splitlines()]
    assert len(facts) == 21, "before the first generation, and after each that failed"
    assert len({each[:3] for each in facts[1:]}) == 1, facts
    assert facts[20][3] - facts[2][3] < 2e6, facts
    children = [int(path.name[6:]) for path in tmp_path.glob("child-*")]
    assert len(children) == 42
    assert all(gone(pid, 5) for pid in children)
