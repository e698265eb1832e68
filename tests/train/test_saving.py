"""When a run saves, and what becomes of a failure: the decisions alone, with a writer that only notes what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from meshtrain.train import saving as module
from meshtrain.train.saving import Saving


class Note:
    """A writer that notes calls, and fails the saves of the steps in `bad`."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad
        self.calls: list[str] = []
        self._failure: Exception | None = None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def reserve(self) -> None:
        self.calls.append("reserve")

    def save(self, step: int, run: Mapping[str, Any]) -> float:
        self.calls.append(f"save {step} {run['tokens']}")
        if step in self.bad:
            self._failure = OSError(f"step {step}")
        return 0.0

    def wait(self) -> None:
        self.calls.append("wait")

    def failure(self) -> Exception | None:
        found, self._failure = self._failure, None
        return found


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def run(saving: Saving, steps: int, last: bool = True) -> None:
    """What the loop does with it: the flags go round, and every rank hears those of all."""
    for step in range(1, steps + 1):
        saving.after_step(step, 10 * step, saving.flags(), last=last and step == steps)


def saves(note: Note) -> list[str]:
    return [call for call in note.calls if call.startswith("save")]


def record(step: int, tokens: int) -> dict[str, int]:
    return {"tokens": tokens}


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [(2, 6, [2, 4, 6]), (4, 6, [4, 6]), (1, 3, [1, 2, 3]), (0, 3, [3]), (9, 3, [3])],
)
def test_every_so_many_steps_and_after_the_last(every: int, steps: int, expected: list[int]) -> None:
    note = Note()
    run(Saving(note, record, every=every), steps)
    assert saves(note) == [f"save {step} {10 * step}" for step in expected]


def test_every_so_many_minutes_counted_from_the_save_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, note = Clock(monkeypatch), Note()
    saving = Saving(note, record, minutes=1.0)
    seen = []
    for step, seconds in enumerate([30, 59, 61, 70, 120, 130, 500], 1):
        clock.now = 100.0 + seconds
        if saving.flags()[0]:
            seen.append(step)
        saving.after_step(step, 0, saving.flags(), last=False)
    assert seen == [3, 6, 7]
    assert saves(note) == ["save 3 0", "save 6 0", "save 7 0"]


def test_a_save_by_steps_puts_off_the_one_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, note = Clock(monkeypatch), Note()
    saving = Saving(note, record, every=2, minutes=1.0)
    for step in range(1, 5):
        clock.now += 40
        saving.after_step(step, 0, saving.flags(), last=False)
    assert saves(note) == ["save 2 0", "save 4 0"]


def test_what_one_rank_is_due_for_all_do() -> None:
    """A clock is a rank's own; the flags that come back are those of all."""
    note = Note()
    saving = Saving(note, record)
    assert saving.flags() == (False, False)
    saving.after_step(1, 7, (True, False), last=False)
    assert saves(note) == ["save 1 7"]


def test_memory_is_taken_in_the_first_step_unless_that_one_saves() -> None:
    note = Note()
    run(Saving(note, record, every=3), 4)
    assert [call for call in note.calls if call != "wait"] == ["reserve", "save 3 30", "save 4 40"]
    note = Note()
    run(Saving(note, record, every=1), 2)
    assert saves(note) == ["save 1 10", "save 2 20"]


def test_a_failure_is_raised_in_the_next_step() -> None:
    note = Note(2)
    saving = Saving(note, record, every=2)
    with pytest.raises(OSError, match="step 2"):
        run(saving, 6)
    assert saves(note) == ["save 2 20"]
    assert note.calls[-1] == "wait", "every rank waits for its own part before it looks"


def test_a_failure_on_another_rank_is_waited_for() -> None:
    """The flag came from a rank whose save has failed; this one's is still under way, and will fail too."""
    note = Note()
    saving = Saving(note, record, every=5)
    saving.after_step(1, 0, saving.flags(), last=False)
    note._failure = OSError("of all")
    with pytest.raises(OSError, match="of all"):
        saving.after_step(2, 0, (False, True), last=False)
    saving.after_step(3, 0, saving.flags(), last=False)


def test_told_to_go_on_it_goes_on_and_says_so() -> None:
    note, heard = Note(2, 6), []
    saving = Saving(note, record, every=2, on_failure=heard.append)
    run(saving, 6)
    assert saves(note) == ["save 2 20", "save 4 40", "save 6 60"]
    assert list(map(str, heard)) == ["step 2"]
    saving.settle()
    assert list(map(str, heard)) == ["step 2", "step 6"]
    assert saving.lost
    saving.settle()
    assert len(heard) == 2


def test_what_is_lost_is_the_newest_save_only() -> None:
    note, heard = Note(2), []
    saving = Saving(note, record, every=2, on_failure=heard.append)
    run(saving, 3, last=False)
    assert saving.lost
    assert len(heard) == 1
    saving.after_step(4, 0, saving.flags(), last=True)
    saving.settle()
    assert not saving.lost


def test_a_failure_of_the_last_save_is_not_lost() -> None:
    note = Note(3)
    saving = Saving(note, record)
    run(saving, 3)
    with pytest.raises(OSError, match="step 3"):
        saving.settle()
