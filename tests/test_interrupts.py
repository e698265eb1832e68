"""Signals: they ask the ranks to finish, save and end; a second one insists; none is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import meshtrain.launch as launch_module
from meshtrain import supervise
from tests.launching import gone, pids, sign_in, started, stay  # noqa: F401

pytestmark = pytest.mark.timeout(90)


def save_when_interrupted(folder: Path) -> None:
    rank = sign_in(folder)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(0.3)
        (folder / f"{rank}.saved").write_text("")
        raise


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_an_interruption_reaches_every_rank_once_and_ends_with_130(start, tmp_path, number):
    command = start(save_when_interrupted, world_size=3)
    ranks = pids(tmp_path, 3)
    os.kill(command.pid, number)
    assert command.wait() == 130
    assert command.err.read_text() == ""
    assert len(list(tmp_path.glob("*.saved"))) == 3
    assert all(gone(pid) for pid in ranks)
    _, handler = (tmp_path / "parent").read_text().split(" ", 1)
    assert "default_int_handler" in handler


def count_interrupts(folder: Path, seconds: float) -> None:
    """In a rank: end `seconds` after the first SIGINT, and leave the number of them."""
    seen: list[float] = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(time.monotonic()))
    rank = sign_in(folder)
    while not seen or time.monotonic() < seen[0] + seconds:
        time.sleep(0.01)
    (folder / f"{rank}.saved").write_text(str(len(seen)))


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM),  # Slurm: a warning, perhaps again, then the limit
        (signal.SIGHUP, signal.SIGHUP),  # a closed terminal: from the kernel and from the shell
        (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1),  # systemd adds SIGHUP to its SIGTERM
    ],
)
def test_signals_that_come_together_are_one_interruption_and_leave_the_ranks_the_grace(start, tmp_path, numbers):
    command = start(count_interrupts, 0.8)
    pids(tmp_path, 2)
    for number in numbers:
        os.kill(command.pid, number)
        time.sleep(0.1)
    assert command.wait() == 130
    assert [path.read_text() for path in tmp_path.glob("*.saved")] == ["1", "1"]


def test_a_second_sigterm_after_the_warning_kills_at_once(start, tmp_path):
    command = start(count_interrupts, 30)
    ranks = pids(tmp_path, 2)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        assert not any(gone(pid) for pid in ranks)
        os.kill(command.pid, number)
        time.sleep(0.3)
    assert command.wait() == 130
    assert command.seconds < 15
    assert not list(tmp_path.glob("*.saved"))


def test_under_nohup_a_closed_terminal_is_none_of_our_business(start, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        command = start(stay, 0.5)
    finally:
        signal.signal(signal.SIGHUP, before)
    pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGHUP)
    assert command.wait() == 0


def test_a_warning_that_reaches_the_ranks_themselves_does_not_kill_them(start, tmp_path):
    # Some batch systems signal every process of a job.
    command = start(save_when_interrupted)
    for pid in (*pids(tmp_path, 2), command.pid):
        os.kill(pid, signal.SIGUSR1)
    assert command.wait() == 130
    assert len(list(tmp_path.glob("*.saved"))) == 2


def ignore_interrupts(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stay(folder)


def test_a_second_interruption_kills_at_once(start, tmp_path):
    command = start(ignore_interrupts)
    ranks = pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGINT)
    time.sleep(0.3)
    assert not any(gone(pid) for pid in ranks), "the first one leaves them their grace"
    command.started = time.monotonic()
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130
    assert command.seconds < 2
    assert all(gone(pid) for pid in ranks)


def test_ranks_that_outlast_the_grace_are_killed_and_named(start, tmp_path):
    command = start(ignore_interrupts, grace_s=0.5)
    ranks = pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130
    assert "0.5 s after the interruption: rank 0, 1" in command.err.read_text()
    assert all(gone(pid) for pid in ranks)


def test_a_stopped_rank_goes_on_and_saves(start, tmp_path):
    command = start(save_when_interrupted)
    ranks = pids(tmp_path, 2)
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(0.1)
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130
    assert command.seconds < 8
    assert len(list(tmp_path.glob("*.saved"))) == 2


def stop_when_interrupted(folder: Path) -> None:
    """In a rank: the last one stops itself and cannot go on, the others wait for it as in a collective."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    stay(folder)


def end_alone_when_interrupted(folder: Path) -> None:
    if dist.get_rank() == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    stay(folder)


@pytest.mark.parametrize(
    ("fn", "shown"),
    [
        (stop_when_interrupted, "0.4 s after one of the ranks was stopped: rank 0, 1"),
        (end_alone_when_interrupted, "0.4 s after others had ended: rank 1"),
    ],
)
def test_a_rank_that_cannot_end_is_not_waited_for_the_whole_grace(start, tmp_path, monkeypatch, fn, shown):
    assert supervise._STRAGGLER_S <= 10
    monkeypatch.setattr(supervise, "_STRAGGLER_S", 0.4)
    command = start(fn, grace_s=300)
    ranks = pids(tmp_path, 2)
    time.sleep(0.1)  # until the handlers are there
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130
    assert command.seconds < 10
    assert shown in command.err.read_text()
    assert all(gone(pid) for pid in ranks)


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_an_interruption_while_the_ranks_start_is_not_lost_and_not_waited_for(start, tmp_path, monkeypatch, seconds):
    # A rank that waits in C++ for one that has gone hears no signal until the time-out.
    begin = launch_module.run_generations
    monkeypatch.setattr(launch_module, "run_generations", lambda *args: (tmp_path / "ready").touch() or begin(*args))
    command = start(stay, world_size=8, timeout_s=60, grace_s=60)
    while not (tmp_path / "ready").exists():
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 130
    assert command.seconds < 9


def fail_to_save(folder: Path) -> None:
    rank = sign_in(folder)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        if rank == 1:
            raise OSError("no space left") from None
        raise


def test_a_failure_while_saving_after_an_interruption_is_not_hidden(start, tmp_path):
    command = start(fail_to_save)
    pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 1
    assert "OSError: no space left" in command.err.read_text()


def die_while_saving(folder: Path) -> None:
    rank = sign_in(folder)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise


def test_a_rank_that_is_killed_while_saving_is_not_hidden(start, tmp_path):
    command = start(die_while_saving)
    pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 1
    assert command.err.read_text() == "rank 1 of 2 was killed by SIGKILL (out of memory?)\n"


def test_ranks_die_with_a_killed_parent(start, tmp_path):
    command = start(stay)
    ranks = pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    assert all(gone(pid, 5) for pid in ranks)
