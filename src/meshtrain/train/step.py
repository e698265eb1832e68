"""One optimisation step, exact on any mesh: micro-batches, one gradient reduction, one scalar collective, one update.

The loss is a sum over the tokens of the global batch divided by their number, so padding, ranks without a label and
micro-batches of different fill weigh as they should. FSDP averages gradients over dp; the factor dp undoes that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..errors import ContractError
from ..parallel.cross_entropy import IGNORED, cross_entropy
from ..parallel.objects import gather_values
from ..parallel.state import ParallelState, state_of
from .clip import NonFinite, clip_and_sum

MicroBatch = tuple[Tensor, Tensor]
"""(inputs [batch, seq], labels [batch, seq])"""
LossSum = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, inputs, labels) -> sum of the token losses of this dp rank, the same on its tp peers."""


@dataclass(frozen=True)
class StepResult:
    """What a step measured; the same on all ranks."""

    loss: float
    """Mean over the tokens of the global batch; 0.0 when no token has a label."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Tokens with a label in the global batch."""
    flags: tuple[bool, ...] = ()
    """Each of the flags that `train_step` was given: whether it was set on any rank."""


def loss_of_logits(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """For models that return logits."""
    return cross_entropy(model(inputs), labels)


def loss_in_model(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """For models that take labels and return the sum of the token losses (they never hold full logits)."""
    return cast(Tensor, model(inputs, labels))


def count_tokens(state: ParallelState, micro_batches: Sequence[MicroBatch]) -> int:
    """Labels that count in the global batch: one small all-reduce over all ranks.

    Raises ContractError, on every rank, when ranks have different numbers of micro-batches.
    """
    own = len(micro_batches)
    labels = sum(int((labels != IGNORED).sum()) for _, labels in micro_batches)
    numbers = torch.tensor([labels, own, own * own], dtype=torch.int64, device=state.mesh.device_type)
    world = state.sizes.world
    if world > 1:
        dist.all_reduce(numbers, group=state.world)
    labels, total, squares = numbers.tolist()
    # Numbers are all equal where n times the sum of their squares is the square of their sum.
    if world * squares != total * total:
        everyone = gather_values(own)
        raise ContractError(
            f"the ranks were given different numbers of micro-batches for this step ({', '.join(map(str, everyone))} on ranks 0 to "
            f"{world - 1}), and would wait for each other. Give each as many: drop the last ones, or pad with a batch whose labels "
            f"are all {IGNORED}. No weight was changed"
        )
    return labels // state.sizes.tp


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    *,
    max_norm: float = math.inf,
    tokens: int | None = None,
    loss_sum: LossSum = loss_of_logits,
    flags: Callable[[], Sequence[bool]] = tuple,
) -> StepResult:
    """Run one step on this rank's micro-batches (as many on every rank). Collective.

    tokens: labels that count in the global batch, where the data knows it; else an all-reduce counts them.
    flags: what this rank has to tell (that it wants the run to end, say), as many on every rank; all ranks learn of it in
        the result, without a collective of its own. Called when the gradients are there, so that late news still counts.

    Raises NonFinite, on every rank and before any weight changes, when the loss or a gradient is not finite; it names
    the ranks.
    """
    state = state_of(model)
    dp_size, (_, tp_index) = state.sizes.dp, state.coordinate
    tokens = count_tokens(state, micro_batches) if tokens is None else tokens
    if not micro_batches:
        raise ContractError(
            "train_step() was given no micro-batch; a rank without data takes one whose labels are all -100"
        )
    scale = dp_size / max(1, tokens)
    fsdp = cast(FSDPModule, model)
    total = torch.zeros((), dtype=torch.float64, device=state.mesh.device_type)
    try:
        for index, (inputs, labels) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            fsdp.set_requires_gradient_sync(last)
            fsdp.set_is_last_backward(last)
            loss = loss_sum(model, inputs, labels)
            (loss * scale).backward()
            total += loss.detach().double()
        own = total if tp_index == 0 else torch.zeros_like(total)
        told = [torch.full_like(own, float(flag)) for flag in flags()]
        clipped = clip_and_sum(model, max_norm, [own, *told])
        mean = float(clipped.also[0]) / max(1, tokens)
        norm, heard = float(clipped.norm), tuple(float(flag) > 0 for flag in clipped.also[1:])
        if not math.isfinite(mean) or not math.isfinite(norm):
            _raise_non_finite(model, float(total), mean, norm)
        optimizer.step()
    finally:
        # Also after an error: what is left of this step must not be added to the next one.
        optimizer.zero_grad()
    return StepResult(mean, norm, tokens, heard)


def _raise_non_finite(model: nn.Module, own: float, mean: float, norm: float) -> None:
    """Every rank comes here together: the numbers are the same on all of them."""
    losses = gather_values(own)
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        raise NonFinite(
            f"the loss is {losses[bad[0]]} on rank {', '.join(map(str, bad))}; no weight was changed by this step. Lower the "
            "learning rate, or look at this step's data"
        )
    clip_and_sum(model, math.inf, (), error_if_nonfinite=True)
    raise NonFinite(f"the gradient norm is {norm} at a loss of {mean}; no weight was changed by this step")
