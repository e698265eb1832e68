"""The one reduction over tp that gradients need after FSDP has reduced them over dp.

Parameters that every tp rank holds, but feeds with its own part of the data (norms on sequence shards, key and value
heads shared by ranks), get one term of a sum per tp rank. The terms are summed once per step, all parameters in one
collective, on the dp shards and in the dtype of the (master) parameters. Doing it in each module's backward, as DTensor does,
costs a collective per parameter and micro-batch, and runs in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import ContractError
from .collectives import Axis, all_reduce_raw


@dataclass
class PartialGradients:
    """Sums the partial gradients of one model at the end of each backward pass that FSDP synchronises."""

    parameters: list[nn.Parameter]
    axis: Axis
    _queued: bool = False
    _before: list[Tensor | None] = field(default_factory=list)

    def begin(self) -> None:
        """Arrange for the sum at the end of the backward pass that runs. Called before FSDP reduces the first unit."""
        if self.axis.size == 1 or not self.parameters or self._queued:
            return
        self._queued = True
        # What earlier backward passes left is summed already: it is kept apart from what this one adds.
        self._before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        # FSDP queued its own final callback when the backward pass began, so this one runs after it.
        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(self._finish)

    def check_finished(self) -> None:
        """Raise ContractError after a backward pass that did not come to its end: its gradients are lost."""
        if self._queued:
            raise ContractError(
                "an earlier backward pass of this model raised an error, and left gradients that are reduced in part. Build the "
                "model anew, from the last weights that were saved"
            )

    def _finish(self) -> None:
        self._queued = False
        before, self._before = self._before, []
        fresh = [cast(DTensor, p.grad).to_local() for p in self.parameters if p.grad is not None]
        if fresh:
            flat = all_reduce_raw(torch.cat([gradient.flatten() for gradient in fresh]), self.axis)
            for gradient, total in zip(fresh, flat.split([g.numel() for g in fresh]), strict=True):
                gradient.copy_(total.view(gradient.shape))
        for parameter, earlier in zip(self.parameters, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
