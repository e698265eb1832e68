"""The loop over steps: learning rate, batch, step, report; and stopping on request at a step that all ranks agree on.

Not where the model, the data or the files of a run come from: that is the program's business (`meshtrain.recipes`).
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .clip import NonFinite
from .metrics import StepMetrics, peak_memory_bytes
from .saving import Saving
from .step import LossSum, MicroBatch, loss_of_logits, train_step

SAME_INTERRUPTION_S = 3.0


class StopRequest:
    """Whether this rank has been asked to stop."""

    def __init__(self) -> None:
        self.at: float | None = None
        """When, on the monotonic clock; None while nobody has asked."""

    def __bool__(self) -> bool:
        return self.at is not None


@contextmanager
def stop_on_interrupt() -> Iterator[StopRequest]:
    """Have the first SIGINT noted instead of raised while the block runs; a later second one raises KeyboardInterrupt.

    Signals that come within 3 s of the first are taken for the same interruption: torchrun passes a Ctrl-C on that the
    terminal has already given to every process. Outside the main thread nothing is changed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: object) -> None:
        now = time.monotonic()
        if request.at is None:
            request.at = now
        elif now - request.at > SAME_INTERRUPTION_S:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)


@dataclass(frozen=True)
class Trained:
    """How a loop went; the same on all ranks."""

    steps: int
    """Steps made, those before this loop among them."""
    first_loss: float
    """Of the first step of this loop; NaN when there was none."""
    last_loss: float
    seconds: float
    stopped: bool
    """True when a rank was asked to stop before the last step."""


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[int], Sequence[MicroBatch]],
    *,
    steps: int,
    learning_rate: Callable[[int], float],
    tokens: Callable[[int], int] | None = None,
    max_norm: float = math.inf,
    loss_sum: LossSum = loss_of_logits,
    report: Callable[[StepMetrics], None] | None = None,
    stop: StopRequest | None = None,
    saving: Saving | None = None,
    done: int = 0,
    seen: int = 0,
) -> Trained:
    """Make the steps after `done`, up to `steps`. Collective: every rank calls it alike.

    batches: step (the first is 1) -> this rank's micro-batches, on the model's device. learning_rate: step -> rate.
    tokens: step -> labels that count in the global batch; None has every step sum them over dp. max_norm, loss_sum: see
    `train_step`. report: called on this rank after each step.
    stop: once true on any rank, all ranks stop after the same step; it rides in the reduction that the step makes anyway.
    saving: checkpoints, also after the last step; the caller waits for them. done, seen: steps made, and tokens trained
        on, before this call.

    Raises NonFinite, naming the step, before a weight is changed; what `saving` raises when a save fails.
    """
    first = last = math.nan
    begun, stopped = done, False
    start = before = time.perf_counter()

    def flags() -> tuple[bool, ...]:
        return (bool(stop), *(saving.flags() if saving is not None else ()))

    for step in range(done + 1, steps + 1):
        rate = learning_rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        count = tokens(step) if tokens is not None else None
        try:
            result = train_step(
                model, optimizer, batches(step), max_norm=max_norm, tokens=count, loss_sum=loss_sum, flags=flags
            )
        except NonFinite as error:
            raise NonFinite(f"step {step}: {error}") from error
        now = time.perf_counter()
        seconds, before = now - before, now
        done, seen, last = step, seen + result.tokens, result.loss
        first = result.loss if step == begun + 1 else first
        if report is not None:
            report(
                StepMetrics(
                    step=step,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=rate,
                    tokens=seen,
                    tokens_per_second=result.tokens / seconds,
                    step_seconds=seconds,
                    peak_memory_bytes=peak_memory_bytes(),
                )
            )
        stopping, *heard = result.flags
        if saving is not None:
            saving.after_step(step, seen, heard, last=stopping or step == steps)
        if stopping:
            stopped = step < steps
            break
    return Trained(done, first, last, time.perf_counter() - start, stopped)
