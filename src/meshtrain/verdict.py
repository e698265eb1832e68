"""What a generation of ranks came to: which failure was the first, what to show of the others, and who was lost.

Works on the ranks' `Outcome`s alone. Whether the ranks are then started again is `meshtrain.restarts`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshtrain.ranks import STATUS_DONE, STATUS_INTERRUPTED, STATUS_REFUSED, Outcome, describe
from meshtrain.signals import ASKING

# A device-side assertion and a full memory say "CUDA error" too, but there the program is at fault, not the device.
_DEVICE_GONE = re.compile(
    r"CUDA error(?!: (device-side assert|out of memory))|uncorrectable ECC|GPU is lost", re.IGNORECASE
)
_ASKING = {number.name for number in ASKING}


@dataclass(frozen=True)
class Verdict:
    """How a generation ended."""

    status: int
    """Exit status: that of the first failure, or 0, or 130 after an interruption."""
    text: str = ""
    """What to show of the failures."""
    restartable: bool = False
    """Whether a new generation may do better: not after success, a refusal or an interruption."""
    lost: tuple[int, ...] = ()
    """Ranks that a signal killed, or whose device is gone."""
    devices_lost: tuple[int, ...] = ()
    """Those of them whose device is gone."""


def judge(
    outcomes: Sequence[Outcome],
    world_size: int,
    *,
    interrupted: bool = False,
    at_once: bool = False,
    stopped: Collection[int] = (),
    alive: Collection[int] = (),
) -> Verdict:
    """Return what the ranks' outcomes, of all that have ended, amount to.

    interrupted: the ranks were asked to end; at_once: and then killed. stopped: ranks found stopped (SIGSTOP) when the
    others had failed. alive: ranks that are still there though they were killed.
    """
    failures = sorted((o for o in outcomes if o.status != STATUS_DONE), key=lambda o: (o.secondary, o.at))
    if interrupted:
        failures = [] if at_once else [o for o in failures if _failed_to_end(o)]
    if not failures:
        return Verdict(STATUS_INTERRUPTED if interrupted else STATUS_DONE, _still_there(alive))
    first = failures[0]
    lines = [describe(first, world_size)] if first.kind != "interrupted" else []
    lines += [f"rank {o.rank} failed too: {o.summary.splitlines()[0]}" for o in failures[1:] if _stands_alone(o, first)]
    if first.secondary:
        lines += _absent(outcomes, first, stopped)
    devices = tuple(o.rank for o in failures if o.kind == "error" and not o.secondary and _DEVICE_GONE.search(o.text))
    # An abort is what torch's watchdog does on all ranks when one of them is late: only the first may be a loss.
    killed = (o.rank for o in failures if o.kind == "signal" and (o is first or o.text != "SIGABRT"))
    return Verdict(
        first.status,
        "\n".join(filter(None, [*lines, _still_there(alive)])),
        restartable=first.status not in (STATUS_REFUSED, STATUS_INTERRUPTED) and not interrupted and not alive,
        lost=tuple(sorted({*devices, *killed})),
        devices_lost=devices,
    )


def _failed_to_end(outcome: Outcome) -> bool:
    """Whether a rank that was asked to end failed instead.

    Ranks stop at different places, so errors about lost peers mean nothing, nor does a status that the rank chose; a
    rank that was killed by one of the signals that ask for an end got it from where we got ours.
    """
    if outcome.kind == "signal":
        return outcome.text not in _ASKING
    return outcome.kind in ("error", "refused") and not outcome.secondary


def _stands_alone(other: Outcome, first: Outcome) -> bool:
    """Whether another rank's failure tells something that the first does not."""
    return bool(other.summary) and not other.secondary and other.summary != first.summary


def _absent(outcomes: Sequence[Outcome], first: Outcome, stopped: Collection[int]) -> list[str]:
    """Whom the ranks can have waited for, when all that they say is that they have waited."""
    lines = []
    finished = [o.rank for o in outcomes if o.kind == "done" and o.at < first.at]
    hanging = [o.rank for o in outcomes if o.kind == "ended" and o.rank not in stopped]
    if stopped:
        lines.append(f"{_ranks(stopped)} was stopped (SIGSTOP?): the others waited in vain")
    if finished:
        lines.append(f"{_ranks(finished)} had ended before: do all ranks make the same number of steps?")
    if not stopped and not finished and 0 < len(hanging) <= len(outcomes) // 2:
        lines.append(f"{_ranks(hanging)} had not come to it: does it hang, or is it slower than the time-out?")
    return lines


def _still_there(alive: Collection[int]) -> str:
    return f"{_ranks(alive)} is still there though it was killed: the kernel holds it" if alive else ""


def _ranks(ranks: Collection[int]) -> str:
    return "rank " + ", ".join(map(str, sorted(ranks)))
