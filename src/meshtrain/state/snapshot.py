"""A copy in host memory of what a checkpoint takes from this rank, so that training goes on while it is written.

The memory is taken once and used again for every save: one copy of the shards is all that a save costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshtrain.state.content import Content


class Snapshot:
    """Host memory for one copy at a time."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return sum(tensor.nbytes for tensor in self._memory)

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Have memory for these tensors, and have it touched: the first copy then costs what every other one does."""
        kept = {_kind(tensor): [] for tensor in self._memory}  # type: dict[tuple[torch.Size, torch.dtype], list[Tensor]]
        for tensor in self._memory:
            kept[_kind(tensor)].append(tensor)
        memory = []
        for tensor in tensors:
            free = kept.get(_kind(tensor))
            memory.append(free.pop() if free else _host_memory(tensor))
        self._memory = memory

    def copy(self, content: Content) -> Content:
        """The content as it is now. The copy before is overwritten."""
        tensors = content.tensors()
        if [_kind(tensor) for tensor in tensors] != [_kind(tensor) for tensor in self._memory]:
            self.reserve(tensors)
        cuda = False
        for ours, theirs in zip(self._memory, tensors, strict=True):
            cuda = cuda or theirs.is_cuda
            ours.copy_(theirs, non_blocking=theirs.is_cuda)
        if cuda:
            torch.cuda.current_stream().synchronize()
        return content.with_tensors(self._memory)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _host_memory(like: Tensor) -> Tensor:
    memory = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
    return memory.zero_()
