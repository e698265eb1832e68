"""Parameters that some ranks, or some micro-batches, do not use: their units still reduce them, as zeros, in one dtype.

FSDP reduces the gradients that a rank happens to have. Where a parameter of a unit is used on some ranks only, the
ranks then reduce tensors of different sizes, which hangs or tears the group down. Where it is first used in the last
micro-batch, a fresh gradient in the compute dtype meets accumulated ones in the reduce dtype, which FSDP refuses. Not
for a unit that only some ranks call: that fails earlier, in its all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def reduce_unused(units: Iterable[nn.Module], ran: Callable[[int], None], reducing: Callable[[], None]) -> None:
    """Let each of these FSDP units reduce a gradient for all its trainable parameters whenever it has run.

    ran: is told the number of each unit that runs with gradients. reducing: is called before a unit reduces its gradients.
    """
    for index, unit in enumerate(units):
        for group in cast(Any, unit)._get_fsdp_state()._fsdp_param_groups:
            _Unit(cast(FSDPModule, unit), group, partial(ran, index), reducing)


class _Unit:
    """Wraps what one FSDP parameter group does at the end of its backward pass."""

    def __init__(self, unit: FSDPModule, group: Any, runs: Callable[[], None], reducing: Callable[[], None]) -> None:
        self.group, self.reduce, self.runs, self.reducing, self.ran = group, group.post_backward, runs, reducing, False
        cast(nn.Module, unit).register_forward_pre_hook(self._before)
        group.post_backward = self._post_backward

    def _before(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self.ran = True
        self.runs()
        for p in self.group.fsdp_params:
            # FSDP copies the flag when it gathers; a unit that stays gathered shows, and has frozen, the gathered copy.
            if hasattr(p, "_unsharded_param") and p._unsharded_param.requires_grad != p.sharded_param.requires_grad:
                p.sharded_param.requires_grad_(p._unsharded_param.requires_grad)
        if self.group._orig_dtype is None and any(p.sharded_param.requires_grad for p in self.group.fsdp_params):
            self.group._init_mp_dtypes()  # all parameters were frozen at the first forward, and no longer are

    def _post_backward(self, *unused: Any) -> None:
        self.reducing()
        if self.ran and self.group.reduce_grads:
            self.ran = False
            self._complete()
        self.reduce(*unused)

    def _complete(self) -> None:
        held = [p for p in self.group.fsdp_params if hasattr(p, "_unsharded_param") and p.sharded_param.requires_grad]
        mixed = any(p.unsharded_accumulated_grad is not None for p in held)
        for p in held:
            if p.unsharded_accumulated_grad is None:
                if p._unsharded_param.grad is None:
                    p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
                if mixed:
                    p.to_accumulated_grad_if_needed()
