"""Learning-rate schedules as functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from typing import Literal, get_args

from ..errors import Refused

Schedule = Literal["constant", "linear", "cosine", "wsd"]


def learning_rate(
    step: int,
    *,
    peak: float,
    steps: int,
    warmup: int,
    schedule: Schedule = "cosine",
    final: float = 0.1,
    decay: float = 0.2,
) -> float:
    """Learning rate of `step` (the first is 1): linear warm-up to `peak` at step `warmup`, then the schedule.

    "cosine" and "linear" fall to `final` x peak at the last step; "constant" stays; "wsd" (warmup-stable-decay, Hu et
    al., "MiniCPM", 2024) stays and falls linearly to `final` x peak over the last `decay` of the steps.
    """
    if schedule not in get_args(Schedule):
        raise Refused(f"there is no schedule {schedule!r}: use one of {', '.join(get_args(Schedule))}")
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if schedule == "constant":
        return peak
    if schedule == "wsd":
        tail = max(1, round(steps * decay))
        progress = max(0.0, (step - (steps - tail)) / tail)
        return peak * (1 - (1 - final) * min(1.0, progress))
    if schedule == "linear":
        return peak * (1 - (1 - final) * min(1.0, progress))
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def check_schedule(steps: int, warmup: int, peak: float) -> None:
    """Raise Refused where a run has no sensible schedule."""
    if steps < 0:
        raise Refused(f"--steps is {steps}; it must be 0 (initialise and export only) or more. Correct it")
    if warmup < 0 or (steps and warmup > steps):
        raise Refused(
            f"--warmup is {warmup} steps; it must lie between 0 and --steps ({steps}). Shorten it, or train for more steps"
        )
    if not peak > 0 or math.isinf(peak):
        raise Refused(f"--lr is {peak}; it must be a positive number. Correct it")
