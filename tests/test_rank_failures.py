"""Ranks that fail: they end together, the first failure is shown once, and the status tells it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from meshtrain.errors import Refused
from meshtrain.ranks import Outcome
from meshtrain.restarts import Restarts
from meshtrain.verdict import judge
from tests.launching import children_of, fail_late, gone, pids, sign_in, started, stay  # noqa: F401

pytestmark = pytest.mark.timeout(90)


def test_one_failing_rank_ends_all_and_its_traceback_is_shown_once(start, tmp_path):
    command = start(fail_late, 2, world_size=4)
    assert command.wait() == 1
    assert command.seconds < 10
    shown = command.err.read_text()
    assert shown.count("ZeroDivisionError: the one cause") == 1
    assert shown.count("Traceback") == 1
    assert "rank 2 of 4 failed:" in shown
    assert "in fail_late" in shown
    assert "in run_rank" not in shown
    assert "closed by peer" not in shown
    assert all(gone(pid) for pid in pids(tmp_path, 4))


def spawn_and_stay(folder: Path) -> None:
    subprocess.Popen(["sleep", "300"])
    stay(folder)


def test_a_killed_rank_is_named_with_its_signal_and_all_end_with_what_they_started(start, tmp_path):
    command = start(spawn_and_stay, world_size=3)
    ranks = pids(tmp_path, 3)
    grandchildren = [child for pid in ranks for child in children_of(pid)]
    assert len(grandchildren) == 3
    command.started = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    assert command.wait() == 1
    assert command.seconds < 5
    assert command.err.read_text() == "rank 1 of 3 was killed by SIGKILL (out of memory?)\n"
    assert all(gone(pid) for pid in ranks)
    assert all(gone(pid, 2) for pid in grandchildren)


def ignore_terminate(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sign_in(folder) == 0:
        raise OSError("disk full")
    time.sleep(60)


def test_a_rank_that_ignores_sigterm_is_killed(start, tmp_path):
    command = start(ignore_terminate)
    assert command.wait() == 1
    assert command.seconds < 8
    assert "OSError: disk full" in command.err.read_text()
    assert all(gone(pid) for pid in pids(tmp_path, 2))


def all_fail_after_the_first(folder: Path) -> None:
    rank = sign_in(folder)
    dist.barrier()
    time.sleep(0.0 if rank == 3 else 0.4)
    raise ValueError(f"rank {rank} saw it")


def test_of_several_failures_the_first_is_shown_in_full(start):
    command = start(all_fail_after_the_first, world_size=4)
    assert command.wait() == 1
    shown = command.err.read_text()
    assert shown.startswith("rank 3 of 4 failed:\nTraceback")
    assert shown.count("Traceback") == 1
    assert "rank 2 failed too: ValueError: rank 2 saw it" in shown


def leave_early(folder: Path) -> None:
    if sign_in(folder) == 0:
        return
    time.sleep(0.5)
    dist.barrier()


def test_a_rank_that_left_early_is_named(start):
    command = start(leave_early)
    assert command.wait() == 1
    assert "rank 0 had ended before" in command.err.read_text()


def stop_or_hang(folder: Path, number: int | None) -> None:
    if sign_in(folder) == 2:
        if number is not None:
            os.kill(os.getpid(), number)
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (signal.SIGSTOP, "rank 2 was stopped (SIGSTOP?): the others waited in vain"),
        (None, "rank 2 had not come to it: does it hang, or is it slower than the time-out?"),
    ],
)
def test_a_rank_for_which_the_others_waited_in_vain_is_named(start, tmp_path, number, shown):
    command = start(stop_or_hang, number, world_size=4, timeout_s=2)
    assert command.wait() == 1
    assert command.seconds < 10
    assert "Timed out waiting 2000ms" in command.err.read_text()
    assert shown in command.err.read_text().splitlines()
    assert all(gone(pid) for pid in pids(tmp_path, 4))


def refuse(folder: Path) -> None:
    sign_in(folder)
    dist.barrier()
    raise Refused("--lr is -1: it must be above 0.")


def test_a_refusal_in_a_rank_is_its_message_alone_and_status_2(start):
    command = start(refuse, world_size=2)
    assert command.wait() == 2
    assert command.err.read_text() == "--lr is -1: it must be above 0.\n"


def leave(folder: Path, code: object) -> None:
    if sign_in(folder) == 1:
        raise SystemExit(code)
    if code:
        time.sleep(60)


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (7, 7, "rank 1 of 2 ended with status 7\n"),
        ("no more data", 1, "rank 1 of 2 ended with status 1: no more data\n"),
    ],
)
def test_systemexit_is_respected(start, code, status, shown):
    command = start(leave, code)
    assert command.wait() == status
    assert command.err.read_text() == shown


def vanish(folder: Path) -> None:
    if sign_in(folder) == 1:
        os._exit(0)
    time.sleep(60)


def test_a_rank_that_vanishes_with_status_0_has_failed(start):
    command = start(vanish)
    assert command.wait() == 1
    assert "rank 1 of 2 ended with status 1: it left without a report" in command.err.read_text()


def leave_at_once(folder: Path) -> None:
    pass


def test_a_rank_that_is_done_at_once_does_not_cut_the_others_off(start):
    for _ in range(5):
        command = start(leave_at_once, world_size=4)
        assert command.wait() == 0, command.err.read_text()


# ---- the verdict, on outcomes that no test can bring about -------------------------------------------------


def error(rank: int, text: str, *, at: float = 1.0, secondary: bool = False) -> Outcome:
    return Outcome(rank, 1, "error", f"Traceback ...\n{text}", text, secondary, at)


def killed(rank: int, name: str, at: float = 1.0) -> Outcome:
    return Outcome(rank, 1, "signal", name, name, at=at)


@pytest.mark.parametrize(
    ("outcomes", "lost", "devices"),
    [
        ([error(0, "ValueError: x"), error(1, "ValueError: y")], (), ()),
        ([killed(1, "SIGKILL"), error(0, "recvBytes", secondary=True)], (1,), ()),
        ([killed(1, "SIGKILL"), killed(0, "SIGSEGV", 1.1)], (0, 1), ()),
        # The watchdogs of all ranks abort when one is late; and those of the peers of a rank that died.
        ([killed(2, "SIGABRT", 1.0), killed(0, "SIGABRT", 1.2), killed(1, "SIGABRT", 1.1)], (2,), ()),
        ([killed(1, "SIGKILL", 1.0), killed(0, "SIGABRT", 1.1)], (1,), ()),
        ([error(1, "RuntimeError: CUDA error: uncorrectable ECC error encountered")], (1,), (1,)),
        ([error(3, "RuntimeError: CUDA error: unspecified launch failure"), killed(0, "SIGBUS")], (0, 3), (3,)),
        ([error(0, "RuntimeError: Unable to determine the device handle: GPU is lost")], (0,), (0,)),
        ([error(0, "RuntimeError: CUDA error: device-side assert triggered")], (), ()),
        ([error(0, "RuntimeError: CUDA error: out of memory")], (), ()),
    ],
)
def test_who_is_lost_is_told_from_who_failed(outcomes, lost, devices):
    verdict = judge(outcomes, 4)
    assert (verdict.lost, verdict.devices_lost, verdict.restartable, verdict.status) == (lost, devices, True, 1)


def test_ranks_that_survive_their_killing_are_named_and_forbid_a_restart(start, tmp_path, monkeypatch):
    # As a process does that the kernel holds in a dead file system; here nobody waits for its end.
    monkeypatch.setattr("meshtrain.supervise._KILL_GRACE_S", 0.0)
    command = start(ignore_terminate, restarts=Restarts(3, progress=lambda: 0))
    assert command.wait() == 1
    shown = command.err.read_text()
    assert shown.endswith("rank 1 is still there though it was killed: the kernel holds it\n")
    assert "restart 1" not in shown
