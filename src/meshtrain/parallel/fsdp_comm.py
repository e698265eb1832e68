"""How FSDP gathers and reduces over dp. On CPU: a reduce-scatter by exchange and local sum, in place of gloo's all-reduce,
and both collectives under a watch that finds ranks which wait for each other in different places. Everywhere: tensors
that are gathered in inference mode can be trained later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


def gather_ordinary_tensors(units: Iterable[nn.Module]) -> None:
    """Let these FSDP units gather outside of inference mode. FSDP keeps the tensors that it makes at the first gathering,
    and inference tensors could never be trained."""
    for unit in units:
        for group in cast(Any, unit)._get_fsdp_state()._fsdp_param_groups:
            group.unshard = _outside_inference_mode(group.unshard)
            group.wait_for_unshard = _outside_inference_mode(group.wait_for_unshard)


def _outside_inference_mode(gather: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        if not torch.is_inference_mode_enabled():
            return gather(*args)
        with torch.inference_mode(False), torch.no_grad():
            return gather(*args)

    return run
