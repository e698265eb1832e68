"""One command -> N ranks: how they start, how they end together, and what is left behind (nothing)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshtrain.errors import Refused
from meshtrain.launch import launch, run
from meshtrain.mesh import group_timeout, init_mesh

pytestmark = pytest.mark.timeout(90)


@dataclass
class Command:
    """A forked process that calls `launch`, as a command's process does."""

    pid: int
    out: Path
    err: Path
    started: float

    def wait(self, seconds: float = 30) -> int:
        while time.monotonic() < self.started + seconds:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        pytest.fail(f"the command did not end in {seconds} s; stderr: {self.err.read_text()}")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def redirect(out: Path, err: Path) -> None:
    """In a forked process: write to these files, not to what pytest captures."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """start(fn, *args, world_size=2, **options) -> a Command that calls launch(fn, (tmp_path, *args))."""
    commands: list[Command] = []

    def begin(
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        env: dict[str, str] | None = None,
        **options: Any,
    ):
        out, err = tmp_path / "out", tmp_path / "err"
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                os.setsid()
                redirect(out, err)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.environ.update(env or {})
                options.setdefault("timeout_s", 20)
                status = launch(fn, (tmp_path, *args), world_size=world_size, device="cpu", **options)
                threads = os.listdir("/proc/self/task")
                Path(tmp_path / "parent").write_text(f"{len(threads)} {signal.getsignal(signal.SIGINT)}")
            finally:
                sys.stderr.flush()
                os._exit(status)
        commands.append(Command(pid, out, err, time.monotonic()))
        return commands[-1]

    yield begin
    for command in commands:
        if command.pid:
            with suppress(ProcessLookupError):
                os.kill(command.pid, signal.SIGKILL)
            os.waitpid(command.pid, 0)


def sign_in(folder: Path) -> int:
    """In a rank: leave its process id where the test finds it. Returns the rank."""
    rank = dist.get_rank()
    note = folder / f"{rank}.new"
    note.write_text(str(os.getpid()))
    note.rename(folder / f"{rank}.pid")
    return rank


def pids(folder: Path, ranks: int, seconds: float = 20) -> list[int]:
    """Wait until all ranks have signed in; return their process ids."""
    end = time.monotonic() + seconds
    while len(found := sorted(folder.glob("*.pid"))) < ranks:
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.01)
    return [int(path.read_text()) for path in found]


def gone(pid: int, seconds: float = 0) -> bool:
    """Whether the process has ended; a zombie, which init is to reap, has."""
    end = time.monotonic() + seconds
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)


# ---- starting --------------------------------------------------------------------------------------------


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


def stay(folder: Path, seconds: float = 60.0) -> None:
    sign_in(folder)
    time.sleep(seconds)


def listening(pid: int) -> list[str]:
    """The addresses at which a process listens, from /proc; "0100007F" is 127.0.0.1."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_everything_listens_on_the_loopback_only(start, tmp_path):
    command = start(stay)
    processes = [command.pid, *pids(tmp_path, 2)]
    found = [listening(pid) for pid in processes]
    assert all(found), "the store and each rank's gloo listen"
    assert {address for each in found for address in each} == {"0100007F"}
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


# ---- failing ---------------------------------------------------------------------------------------------


def fail_late(folder: Path, bad: int) -> None:
    rank = sign_in(folder)
    subprocess.Popen(["sleep", "300"], start_new_session=False)
    if rank == bad:
        time.sleep(0.2)
        raise ZeroDivisionError("the one cause")
    dist.barrier()


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


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


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
    time.sleep(0.2 * (3 - rank))
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "0 ranks"),
        ({"world_size": 2, "device": "cuda"}, "'cuda' was asked for"),
        ({"world_size": 2, "device": "gpu"}, "'gpu' is not known"),
        ({"world_size": 2, "timeout_s": 0}, "time-out is 0"),
    ],
)
def test_what_cannot_start_is_refused_before_a_fork(options, message, monkeypatch):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this host has CUDA")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    with pytest.raises(Refused, match=message):
        launch(stay, (), **{"device": "cpu", **options})


def test_omp_num_threads_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(Refused, match="OMP_NUM_THREADS is 'many'"):
        launch(stay, (), world_size=1, device="cpu")


# ---- interrupting ----------------------------------------------------------------------------------------


def save_when_interrupted(folder: Path) -> None:
    rank = sign_in(folder)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(0.3)
        (folder / f"{rank}.saved").write_text("")
        raise


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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


def test_ranks_die_with_a_killed_parent(start, tmp_path):
    command = start(stay)
    ranks = pids(tmp_path, 2)
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    assert all(gone(pid, 5) for pid in ranks)


# ---- leaving nothing -------------------------------------------------------------------------------------


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
    assert not [name for name in os.listdir("/dev/shm") if "meshtrain" in name]


# ---- joining ---------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from meshtrain.launch import run
from tests.test_launch import work

if __name__ == "__main__":
    sys.exit(run(work, (sys.argv[1],), world_size=2, device="cpu", timeout_s=33))
"""


def work(how: str) -> None:
    grid = init_mesh(2, 1, "cpu")
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


def join(folder: Path, how: str, variables: dict[str, str]) -> Command:
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
            status = run(work, (how,), world_size=2, device="cpu", timeout_s=33)
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


def test_a_joined_rank_takes_sigterm_as_an_interruption(tmp_path):
    # torchrun and Slurm send SIGTERM, and the function must get its chance to save.
    first = torchrun_variables(0)
    ranks = [join(tmp_path, "stay", {**first, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    while not all("joined" in rank.out.read_text() for rank in ranks):
        assert ranks[0].seconds < 20
        time.sleep(0.02)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [130, 130]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_real_torchrun_starts_the_same_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
         "--master-port", torchrun_variables(0)["MASTER_PORT"], str(program), "fail"],
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=230,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [f"joined {rank} 2.0 0:00:33" for rank in (0, 1)]
    assert done.stderr.count("ValueError: rank one cannot") == 1
    assert "rank 1 of 2 failed:" in done.stderr


def test_another_number_of_ranks_than_the_mesh_needs_is_refused_with_both(monkeypatch):
    for name, value in torchrun_variables(0).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refused, match=r"torchrun started 2 ranks, but dp x tp needs 8\..*product is 2"):
        run(stay, world_size=8, device="cpu")
