"""What FSDP runs over dp on CPU: a reduce-scatter by exchange and local sum, in place of gloo's all-reduce, and both
collectives under a watch that finds ranks which wait for each other in different places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import exchange
from .watch import Watch


@dataclass(frozen=True)
class _UnitComm:
    watch: Watch
    unit: str
    """Path of the FSDP unit; "" is the root."""

    @property
    def label(self) -> str:
        return f"'{self.unit}'" if self.unit else "the root unit"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class WatchedAllGather(_UnitComm):
    """For `FSDPModule.set_custom_all_gather`: waits through the watch."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        work = group._allgather_base(output_tensor, input_tensor)
        self.watch.wait(work, f"gathering the parameters of {self.label}")


class ExchangeReduceScatter(_UnitComm):
    """For `FSDPModule.set_custom_reduce_scatter`. Sums in rank order, so the bits do not depend on timing."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        received = exchange(
            input_tensor.view(group.size(), -1),
            group,
            lambda work: self.watch.wait(work, f"reducing the gradients of {self.label}"),
        )
        torch.sum(received, 0, out=output_tensor.view(-1))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
