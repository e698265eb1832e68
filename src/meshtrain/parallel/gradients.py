"""The one reduction over tp that gradients need after FSDP has reduced them over dp.

Parameters that every tp rank holds, but feeds with its own part of the data (norms on sequence shards, key and value
heads shared by ranks), get one term of a sum per tp rank. The terms are summed once per step, all parameters in one
collective, on the dp shards and in the dtype that FSDP reduces in. Doing it in each module's backward, as DTensor does,
costs a collective per parameter and micro-batch, and runs in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from .collectives import Axis, all_reduce_raw


@dataclass
class PartialGradients:
    """Sums the partial gradients of one model at the end of each backward pass that FSDP synchronises."""

    parameters: list[nn.Parameter]
    axis: Axis
    _queued: bool = False
    _before: list[Tensor | None] = field(default_factory=list)

    def watch(self, output: Any) -> None:
        """Arrange for the sum in the backward pass from these outputs of the root module."""
        if self.axis.size == 1 or not self.parameters or not torch.is_grad_enabled():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin)

    def _begin(self, gradient: Tensor) -> Tensor:
        if not self._queued:
            self._queued = True
            # What earlier backward passes left is summed already: it is kept apart from what this one adds.
            self._before = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            # FSDP's hook on the same tensor ran first, so its final callback is queued before this one.
            cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(self._finish)
        return gradient

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
