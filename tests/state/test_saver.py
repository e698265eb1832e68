"""Saver: what it writes in the background is what was there when it was called, and what it says of failures is true."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.errors import ContractError, Refused
from meshtrain.state.checkpoint import inspect_checkpoint
from meshtrain.state.checkpoints import newest_complete
from meshtrain.state.saver import Saved, SaveFailed, Saver
from meshtrain.train.saving import Saving
from tests.cases.models import gather
from tests.state.training import Job, assert_equal, job, resumed

pytestmark = pytest.mark.timeout(120)
DTYPE = torch.float32


def begun(dp: int, tp: int, steps: int = 1) -> Job:
    run = job(dp, tp, dtype=DTYPE)
    run.go(steps)
    return run


def saver_of(run: Job, folder: Path, **how: Any) -> Saver:
    return Saver(folder, run.model, run.optimizer, **how)


def done(saver: Saver) -> None:
    saver.wait()
    if (error := saver.failure()) is not None:
        raise error


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@contextmanager
def disk(write: Callable[..., int]) -> Iterator[None]:
    """Have `write` stand for os.pwrite; it gets the real one first."""
    real = os.pwrite
    with mock.patch.object(os, "pwrite", lambda *arguments: write(real, *arguments)):
        yield


def overwritten(run: Job, value: float) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.to_local().fill_(value)
            for moment in run.optimizer.state[parameter].values():
                (moment.to_local() if moment.dim() else moment).fill_(value)


# What is written.


def change_at_once(folder: Path) -> None:
    """The disk waits until the weights are others. Twice, since the second save uses the memory of the first."""
    run, again = begun(2, 2), threading.Event()

    def held(real: Any, *arguments: Any) -> int:
        assert again.wait(30)
        return real(*arguments)

    with saver_of(run, folder) as saver:
        for step in (1, 2):
            notes, before = {"list": [step]}, run.values()
            with disk(held):
                saver.save(step, {**run.run(), "notes": notes})
                assert saver.busy
                overwritten(run, 7.0 * step)
                notes["list"].append("later")
                run.optimizer.param_groups[0]["lr"] = 99.0
                again.set()
                done(saver)
            again.clear()
            other = resumed(folder / f"step-{step:08}", 2, 2, dtype=DTYPE)
            assert_equal(other.values(), before)
            assert inspect_checkpoint(folder / f"step-{step:08}").run["notes"] == {"list": [step]}
            assert other.optimizer.param_groups[0]["lr"] < 1
            run.load(folder / "step-00000001")
            run.go(2)


def test_case_f14_what_is_saved_is_what_was_there_at_the_call_twice(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(change_at_once, tmp_path / "c")


def train_on_while_saving(folder: Path) -> None:
    """Saves under way do not disturb the steps, nor the steps the saves."""
    calm = begun(2, 2, 4)
    run = job(2, 2, dtype=DTYPE)
    kept: list[dict[str, Tensor]] = []
    with saver_of(run, folder, background=True) as saver:
        for step in range(1, 5):
            run.go(step)
            saver.save(step, run.run())
            kept.append(run.values())
        done(saver)
    assert run.rows == calm.rows
    assert_equal(run.values(), calm.values())
    for step, values in enumerate(kept, 1):
        assert_equal(resumed(folder / f"step-{step:08}", 2, 2, dtype=DTYPE).values(), values)


def test_saving_in_every_step_changes_nothing(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(train_on_while_saving, tmp_path / "c", timeout=90.0)


def in_the_foreground_and_twice(folder: Path) -> None:
    run, seen = begun(2, 1), []
    with saver_of(run, folder, background=False, on_saved=seen.append) as saver:
        saver.save(1, run.run())
        assert not saver.busy
        run.go(2)
        saver.save(1, run.run())  # the same step again: it is replaced
        second = run.values()
        assert saver.saved == seen[-1]
    assert [(saved.step, saved.path.name) for saved in seen] == [(1, "step-00000001")] * 2
    assert all(saved.stall_seconds == saved.seconds > 0 for saved in seen)
    again = resumed(folder / "step-00000001", 2, 1, dtype=DTYPE)
    assert again.tokens == run.tokens
    assert_equal(again.values(), second)


def test_a_step_may_be_saved_again_and_in_the_foreground(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(in_the_foreground_and_twice, tmp_path / "c")
    assert names(tmp_path / "c") == ["latest", "step-00000001"]


def times(folder: Path) -> Saved:
    """One save is under way at most: another waits for it, and none makes training stand still for the writing."""
    run, seen = begun(2, 1), []

    def slow(real: Any, *arguments: Any) -> int:
        time.sleep(0.02)
        return real(*arguments)

    with disk(slow), saver_of(run, folder, on_saved=seen.append) as saver:
        saver.reserve()
        stall = saver.save(1, run.run())
        assert saver.busy
        start = time.monotonic()
        saver.save(2, run.run())
        waited = time.monotonic() - start
        assert [saved.step for saved in seen] == [1]
        done(saver)
    first = seen[0]
    assert first.seconds > 0.4, "a pause for each write"
    assert first.stall_seconds == stall < first.seconds / 2
    assert waited > first.seconds / 4
    return first


def test_a_save_waits_for_the_one_before_it_only(ranks: Any, tmp_path: Path) -> None:
    for saved in ranks(2).run(times, tmp_path / "c"):
        assert saved.path == tmp_path / "c" / "step-00000001"


# Memory.


def memory_of(folder: Path) -> None:
    run = job(2, 2, dtype=DTYPE)
    with saver_of(run, folder, keep=1) as saver:
        saver.reserve()
        weights = [tensor.data_ptr() for tensor in saver._snapshot._memory]
        run.go(1)
        saver.reserve()  # the moments join
        pointers = [tensor.data_ptr() for tensor in saver._snapshot._memory]
        assert set(weights) <= set(pointers)
        nbytes = saver._snapshot.nbytes
        held = sum(p.to_local().nbytes for p in run.model.parameters())
        assert nbytes == 3 * held
        for step in range(1, 6):
            saver.save(step, run.run())
            done(saver)
        assert [tensor.data_ptr() for tensor in saver._snapshot._memory] == pointers
        assert saver._snapshot.nbytes == nbytes


def test_the_copy_is_made_in_the_same_memory_every_time(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(memory_of, tmp_path / "c")


# Which checkpoints stay.


def seven_steps(folder: Path, keep: int | None, milestone: int) -> list[list[str]]:
    run, removed = begun(2, 1), []
    with saver_of(
        run,
        folder,
        keep=keep,
        milestone=milestone,
        on_saved=lambda saved: removed.append([p.name for p in saved.removed]),
    ) as saver:
        for step in range(1, 8):
            saver.save(step, run.run())
        done(saver)
    return removed


@pytest.mark.parametrize(
    ("keep", "milestone", "left"),
    [
        (None, 0, range(1, 8)),
        (1, 3, (3, 6, 7)),
        pytest.param(2, 0, (6, 7), marks=pytest.mark.slow),
        pytest.param(3, 2, (2, 4, 5, 6, 7), marks=pytest.mark.slow),
    ],
)
def test_old_ones_go_milestones_stay_and_latest_is_the_last(
    ranks: Any, tmp_path: Path, keep: int | None, milestone: int, left: Any
) -> None:
    first, other = ranks(2).run(seven_steps, tmp_path / "c", keep, milestone)
    assert names(tmp_path / "c") == ["latest", *(f"step-{step:08}" for step in left)]
    assert (tmp_path / "c/latest").read_text() == "step-00000007\n"
    gone = [f"step-{step:08}" for step in range(1, 8) if step not in left]
    assert [name for names in first for name in names] == gone
    assert all(not names for names in other), "rank 0 removes, and says so"


def leftovers(folder: Path) -> None:
    run = begun(2, 1)
    with saver_of(run, folder):
        dist.barrier()
        assert "mine" in names(folder)
        assert not [name for name in names(folder) if name.startswith(".")]


def test_what_killed_saves_have_left_is_swept_at_the_start(ranks: Any, tmp_path: Path) -> None:
    for name in (f".step-00000003.tmp-{'0' * 16}", f".step-00000001.old-{'f' * 16}", "mine"):
        (tmp_path / name / "training").mkdir(parents=True)
    ranks(2).run(leftovers, tmp_path)


# Failures.


class Broken:
    """A disk that is full while `on` is set, on one rank."""

    def __init__(self, victim: int) -> None:
        self.victim, self.on = victim, True

    def __call__(self, real: Any, *arguments: Any) -> int:
        if self.on and dist.get_rank() == self.victim:
            raise OSError(28, "No space left on device")
        return int(real(*arguments))


def fail_and_go_on(folder: Path, victim: int) -> str:
    """A save fails on one rank: every rank learns of it, what was there stays, nothing is left, and the next one works."""
    run, broken = begun(2, 2), Broken(victim)
    with disk(broken), saver_of(run, folder, keep=1) as saver:
        broken.on = False
        saver.save(1, run.run())
        done(saver)
        before = run.values()
        broken.on = True
        run.go(2)
        saver.save(2, run.run())
        saver.wait()
        assert saver.failed
        assert saver.saved is not None
        assert saver.saved.step == 1
        error = saver.failure()
        assert isinstance(error, SaveFailed)
        assert not saver.failed
        assert saver.failure() is None
        dist.barrier()
        assert names(folder) == ["latest", "step-00000001"], "keep=1 has not removed the only one"
        assert_equal(resumed(folder / "step-00000001", 2, 2, dtype=DTYPE).values(), before)
        broken.on = False
        saver.save(3, run.run())
        done(saver)
        dist.barrier()
        assert names(folder) == ["latest", "step-00000003"]
        assert_equal(resumed(folder / "step-00000003", 2, 2, dtype=DTYPE).values(), run.values())
    return str(error)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_failure_on_one_rank_reaches_all_and_costs_that_save_only(ranks: Any, tmp_path: Path, victim: int) -> None:
    messages = ranks(4).run(fail_and_go_on, tmp_path / "c", victim)
    assert len(set(messages)) == 1
    assert f"rank {victim}: OSError: [Errno 28] No space left on device" in messages[0]


def train_with_a_failing_disk(folder: Path, goes_on: bool) -> tuple[list[int], list[str]]:
    """Every second of eight steps is saved; the disk of one rank is full in the save of step 4."""
    run, heard = job(2, 2, dtype=DTYPE), []
    rank = dist.get_rank()

    def full(real: Any, descriptor: int, *arguments: Any) -> int:
        if rank == 2 and "step-00000004" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        return int(real(descriptor, *arguments))

    with disk(full), saver_of(run, folder) as saver:
        saving = Saving(
            saver, lambda step, tokens: {"tokens": tokens, "samples": 0}, every=2,
            on_failure=(lambda error: heard.append(str(error))) if goes_on else None,
        )  # fmt: skip
        try:
            run.go(8, saving)
            saving.settle()
        except SaveFailed as error:
            heard.append(str(error))
    return [row.step for row in run.rows], heard


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")


@needs_proc
def test_case_f15_a_failure_in_the_background_ends_training_on_all_ranks_after_the_same_step(
    ranks: Any, tmp_path: Path
) -> None:
    results = ranks(4).run(train_with_a_failing_disk, tmp_path / "c", False)
    steps, (message,) = results[0]
    assert results == [(steps, [message])] * 4, "no rank makes a step more than another, and all say the same"
    assert steps in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    assert "rank 2: OSError: [Errno 28]" in message
    found, skipped = newest_complete(tmp_path / "c")
    assert found is not None
    assert (found.step, skipped) == (2, [])


@needs_proc
def test_told_to_it_goes_on_without_that_checkpoint(ranks: Any, tmp_path: Path) -> None:
    for steps, heard in ranks(4).run(train_with_a_failing_disk, tmp_path / "c", True):
        assert steps == list(range(1, 9))
        (message,) = heard
        assert "rank 2: OSError: [Errno 28]" in message
    assert names(tmp_path / "c") == ["latest", *(f"step-{step:08}" for step in (2, 6, 8))]


def absent(folder: Path) -> float:
    """Case E1 of a save: one rank never calls it. Training would go on; the others learn why there is no checkpoint."""
    run = begun(2, 2)
    start = time.monotonic()
    with saver_of(run, folder, join_seconds=0.5) as saver:
        if dist.get_rank() != 2:
            saver.save(1, run.run())
            saver.wait()
            error = saver.failure()
            assert error is not None
            assert "save_checkpoint was called on rank" in str(error)
            assert isinstance(error.__cause__, ContractError)
            assert "2" in str(error).partition("not on rank(s)")[2]
        seconds = time.monotonic() - start
        dist.barrier()
        assert not folder.exists()
        saver.save(2, run.run())
        done(saver)
    return seconds


def test_case_e1_a_rank_that_never_saves_is_named_and_does_no_harm(ranks: Any, tmp_path: Path) -> None:
    assert max(ranks(4).run(absent, tmp_path / "c")) < 20
    assert names(tmp_path / "c") == ["latest", "step-00000002"]


def an_impossible_state(folder: Path) -> None:
    """What no checkpoint can hold is said at the call, not in the background, and on every rank alike."""
    run = begun(2, 1)
    with saver_of(run, folder) as saver:
        run.optimizer.state[run.optimizer.param_groups[0]["params"][0]]["odd"] = [1]
        with pytest.raises(ContractError, match="keeps 'odd'"):
            saver.save(1, run.run())
        assert saver.failure() is None
    assert gather(folder.exists()) == [False, False]


def test_an_impossible_state_is_refused_at_the_call(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(an_impossible_state, tmp_path / "c")


def careless(folder: Path) -> None:
    run = begun(1, 1)
    with pytest.raises(ContractError, match="keep is 0: it must be a whole number, 1 or more"):
        saver_of(run, folder, keep=0)
    with pytest.raises(ContractError, match="milestone is -1"):
        saver_of(run, folder, milestone=-1)
    with pytest.raises(Refused, match="max_shard_size"):
        saver_of(run, folder, max_shard_size="many")
    (folder.parent / "file").write_text("")
    with pytest.raises(Refused, match="is not a directory"):
        saver_of(run, folder.parent / "file")


def test_what_makes_no_sense_is_refused_at_once(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(careless, tmp_path / "c")
    assert names(tmp_path) == ["file"]
