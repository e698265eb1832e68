"""The one reduction over tp that gradients need after FSDP has reduced them over dp.

Parameters that every tp rank holds, but feeds with its own part of the data (norms on sequence shards, key and value
heads shared by ranks), get one term of a sum per tp rank. The terms are summed once per step, all parameters in one
collective, on the dp shards and in the dtype of the (master) parameters. Doing it in each module's backward, as DTensor does,
costs a collective per parameter and micro-batch, and runs in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import ContractError
from .collectives import Axis, all_reduce_raw


@dataclass
class PartialGradients:
    """Sums the partial gradients of one model at the end of each backward pass that FSDP synchronises."""

    held: list[Any]
    """What FSDP knows of each parameter with partial gradients; frozen ones too, which may be unfrozen later."""
    axis: Axis
    _queued: bool = False
    _parameters: list[nn.Parameter] = field(default_factory=list)
    _before: list[Tensor | None] = field(default_factory=list)

    def begin(self) -> None:
        """Arrange for the sum at the end of the backward pass that runs. Called before FSDP reduces the first unit."""
        if self.axis.size == 1 or not self.held or self._queued:
            return
        self._queued = True
        self._parameters = [each.sharded_param for each in self.held]
        # What earlier backward passes left is summed already: it is kept apart from what this one adds.
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
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
        fresh = [cast(DTensor, p.grad).to_local() for p in self._parameters if p.grad is not None]
        if fresh:
            flat = all_reduce_raw(torch.cat([gradient.flatten() for gradient in fresh]), self.axis)
            for gradient, total in zip(fresh, flat.split([g.numel() for g in fresh]), strict=True):
                gradient.copy_(total.view(gradient.shape))
        for parameter, earlier in zip(self._parameters, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)


def fsdp_parameters(model: nn.Module, names: Collection[str]) -> list[Any]:
    """FSDP's own records of these parameters of a sharded model: they follow when a parameter is replaced."""
    paths = {module: path for path, module in model.named_modules()}
    found = {}
    for module in paths:
        if isinstance(module, FSDPModule):
            for group in cast(Any, module)._get_fsdp_state()._fsdp_param_groups:
                for each in group.fsdp_params:
                    path = paths[each._module_info.module]
                    found[f"{path}.{each._module_info.param_name}" if path else each._module_info.param_name] = each
    return [found[name] for name in found if name in names]
