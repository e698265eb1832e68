"""The reduce-scatter that FSDP runs over dp on CPU: an exchange and a local sum, in place of gloo's all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import exchange


class ExchangeReduceScatter:
    """For `FSDPModule.set_custom_reduce_scatter`. Sums in rank order, so the bits do not depend on timing."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        received = exchange(input_tensor.view(group.size(), -1), group)
        torch.sum(received, 0, out=output_tensor.view(-1))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
