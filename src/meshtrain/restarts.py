"""Generations of ranks on this host: after a failure the next one, until the run is done or comes no further.

The policy only. One generation is `meshtrain.supervise`; where a run continues is the business of the function that the
ranks call, which finds its checkpoint (`progress` says how far that is).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meshtrain.errors import ContractError, Refused
from meshtrain.ranks import STATUS_INTERRUPTED, STATUS_STUCK, Work
from meshtrain.signals import Interruptions
from meshtrain.supervise import POLL_S, Generation, say
from meshtrain.verdict import Verdict

STUCK_AFTER = 3
"""Restarts in a row without progress after which a run ends: what fails every time at one step is not a chance fault."""
_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True)
class Restarts:
    """Whether and how a run goes on after a failure: a rank raised, was killed, or left with a status of its own."""

    limit: int
    """Generations of ranks that may be started after the first."""
    progress: Callable[[], int]
    """A number that grows as the run advances (the newest checkpoint's step); called in the parent between generations."""
    shrink: Callable[[int], tuple[int, tuple[Any, ...]] | None] | None = None
    """Ranks left after a loss -> (ranks, arguments) of a generation no larger than that, or None where there is none.

    None keeps the number of ranks.
    """

    def __post_init__(self) -> None:
        if isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 0:
            raise Refused(f"--max-restarts is {self.limit!r}: it must be a whole number, 0 (none) or more.")
        if self.shrink is not None and not self.limit:
            raise Refused("--elastic takes effect at a restart, but --max-restarts is 0: allow some, or leave it out.")


def run_generations(
    work: Work, world_size: int, grace_s: float, restarts: Restarts | None, interruptions: Interruptions
) -> int:
    """Run generations of ranks until one ends well or none may follow; return the exit status."""
    if restarts is None or not restarts.limit:
        return Generation(world_size, grace_s, interruptions).run(work).status
    best, fruitless = restarts.progress(), 0
    for restart in range(restarts.limit + 1):
        verdict = Generation(world_size, grace_s, interruptions, restart).run(work)
        if not verdict.restartable:
            return verdict.status
        if interruptions.asked:
            return STATUS_INTERRUPTED
        reached = restarts.progress()
        fruitless = 0 if reached > best else fruitless + (restart > 0)
        best = max(best, reached)
        if fruitless == STUCK_AFTER:
            say(f"{STUCK_AFTER} restarts in a row came no further than step {best}: what failed is shown above.")
            return STATUS_STUCK
        if restart == restarts.limit:
            say(f"no restart is left: {restart} of {restart} made, up to step {best}.")
            break
        world_size, work, note = _next_size(world_size, work, verdict, restarts)
        wait = back_off(fruitless)
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}, from step {best}{note}"
        say(f"restart {restart + 1} of {restarts.limit}: {ranks}" + (f", in {wait:g} s" if wait else ""))
        if _interrupted_within(wait, interruptions):
            return STATUS_INTERRUPTED
    return verdict.status


def back_off(fruitless: int) -> float:
    """Return the seconds to wait after so many restarts without progress: 0, 1, 2, 4 ... 30."""
    return min(2.0 ** (fruitless - 1), _LONGEST_WAIT_S) if fruitless else 0.0


def _next_size(world_size: int, work: Work, verdict: Verdict, restarts: Restarts) -> tuple[int, Work, str]:
    """Return the ranks and the work of the next generation, and what to say of them."""
    note, lost = "", len(verdict.lost)
    if lost and restarts.shrink is not None:
        left = world_size - lost
        note = f"{lost} of {world_size} {'was' if lost == 1 else 'were'} lost"
        smaller = restarts.shrink(left) if left else None
        if smaller is None:
            note += ", but no smaller mesh fits"
        else:
            world_size, args = smaller
            if not 1 <= world_size <= left:
                raise ContractError(f"shrink({left}) returned {world_size} ranks: return 1 to {left} ranks, or None")
            work = replace(work, args=args)
        note = f" ({note})"
    return world_size, _without_lost_devices(world_size, work, verdict), note


def _without_lost_devices(world_size: int, work: Work, verdict: Verdict) -> Work:
    """Have the ranks see only devices that work, where there are enough of them."""
    if not verdict.devices_lost:
        return work
    from meshtrain.mesh import visible_devices

    devices = visible_devices() if work.devices is None else work.devices
    sound = tuple(name for rank, name in enumerate(devices) if rank not in verdict.devices_lost)
    return replace(work, devices=sound) if len(sound) >= world_size else work


def _interrupted_within(seconds: float, interruptions: Interruptions) -> bool:
    end = time.monotonic() + seconds
    while not interruptions.asked and time.monotonic() < end:
        time.sleep(POLL_S)
    return interruptions.asked
