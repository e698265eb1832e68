"""The tp collectives that styles compute with, as autograd functions over plain local tensors.

Each pairs a forward collective with the one that its gradient needs (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022). They skip DTensor's dispatch, which costs 50 to 200 microseconds an
operation.

The sequence dim is -2: activations are [..., seq, hidden]. A sequence that tp does not divide is padded with zeros to
`tp * ceil(seq / tp)` around each collective, so every rank holds ceil(seq / tp) positions and the padding never reaches
a computation that mixes positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Axis:
    """One mesh axis as the collectives need it."""

    group: dist.ProcessGroup
    size: int
    index: int
    """This rank's coordinate on the axis."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Axis:
        """The axis of a one-axis mesh."""
        return cls(mesh.get_group(), mesh.size(), mesh.get_local_rank())


def shard_length(length: int, axis: Axis) -> int:
    """Positions that each rank holds of a sequence of `length`."""
    return -(-length // axis.size)


# The four functions below call the process group itself: torch's functional collectives, which compiled code needs,
# take three times as long to call.


def all_reduce_raw(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, in a new tensor."""
    if torch.compiler.is_compiling():
        return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", axis.group.group_name))
    total = x.clone(memory_format=torch.contiguous_format)
    axis.group.allreduce([total]).wait()
    return total


def all_gather_raw(x: Tensor, axis: Axis) -> Tensor:
    """[...] -> [size, ...]"""
    if torch.compiler.is_compiling():
        flat = _c10d.all_gather_into_tensor(x.contiguous().view(1, *x.shape), axis.size, axis.group.group_name)
        return _c10d.wait_tensor(flat)
    out = x.new_empty((axis.size, *x.shape))
    axis.group.all_gather_single(out.view(-1), x.contiguous().view(-1)).wait()
    return out


def reduce_scatter_raw(stacked: Tensor, axis: Axis) -> Tensor:
    """[size, ...], contiguous -> this rank's [...] of the sum over the axis"""
    if torch.compiler.is_compiling():
        summed = _c10d.reduce_scatter_tensor(stacked, "sum", axis.size, axis.group.group_name)
        return _c10d.wait_tensor(summed).view(stacked.shape[1:])
    if stacked.device.type == "cpu":
        return exchange(stacked, axis.group).sum(0)
    out = stacked.new_empty(stacked.shape[1:])
    axis.group.reduce_scatter_single(out.view(-1), stacked.view(-1), dist.ReduceScatterOptions()).wait()
    return out


def exchange(stacked: Tensor, group: dist.ProcessGroup, wait: Callable[[dist.Work], object] = dist.Work.wait) -> Tensor:
    """[size, ...] -> [size, ...]: rank i's row j becomes rank j's row i. `wait` waits for the collective.

    gloo computes a reduce-scatter as an all-reduce of everything. This exchange followed by a local sum moves the
    bytes of a true reduce-scatter, in half to a third of the time, and adds up in rank order.
    """
    received = torch.empty_like(stacked)
    wait(group.alltoall_base(received, stacked, [], []))
    return received


def gather_last_raw(x: Tensor, size: int, step: int, axis: Axis) -> Tensor:
    """Shards of the last dim, the longest of length `step` -> [..., size]"""
    padded = F.pad(x, (0, step - x.shape[-1])) if x.shape[-1] < step else x
    stacked = all_gather_raw(padded, axis)
    return stacked.movedim(0, -2).reshape(*x.shape[:-1], axis.size * step)[..., :size]


def _gather(x: Tensor, length: int, axis: Axis) -> Tensor:
    """[..., shard, hidden] of each rank -> [..., length, hidden]"""
    *lead, shard, hidden = x.shape
    stacked = all_gather_raw(x, axis).view(axis.size, -1, shard, hidden)
    joined = stacked.transpose(0, 1).reshape(*lead, axis.size * shard, hidden)
    return joined if axis.size * shard == length else joined.narrow(-2, 0, length)


def _reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[..., length, hidden], one term of a sum per rank -> this rank's [..., shard, hidden] of the sum"""
    *lead, length, hidden = x.shape
    shard = shard_length(length, axis)
    if padding := shard * axis.size - length:
        x = F.pad(x, (0, 0, 0, padding))
    stacked = x.reshape(-1, axis.size, shard, hidden).transpose(0, 1).contiguous()
    return reduce_scatter_raw(stacked, axis).view(*lead, shard, hidden)


def _own_shard(x: Tensor, axis: Axis) -> Tensor:
    """[..., length, hidden], the same on every rank -> this rank's [..., shard, hidden], padded with zeros"""
    length = x.shape[-2]
    shard = shard_length(length, axis)
    start = min(axis.index * shard, length)
    own = x.narrow(-2, start, min(shard, length - start))
    return F.pad(own, (0, 0, 0, shard - own.shape[-2])) if own.shape[-2] < shard else own.contiguous()


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather(x, length, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad, ctx.axis), None, None


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather(x, length, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_shard(grad, ctx.axis), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.length = axis, x.shape[-2]
        return _reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.length, ctx.axis), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce_raw(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_raw(grad, ctx.axis), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, start: int, step: int, axis: Axis) -> Tensor:
        ctx.start, ctx.width = start, x.shape[-1]
        return gather_last_raw(x, size, step, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad.narrow(-1, ctx.start, ctx.width).contiguous(), None, None, None, None


def gather_sequence(x: Tensor, length: int, axis: Axis) -> Tensor:
    """All-gather sequence shards for a computation that tp splits; the gradient, a sum over tp, is reduce-scattered.

    [..., ceil(length / tp), hidden] -> [..., length, hidden]
    """
    return _GatherSequence.apply(x, length, axis) if axis.size > 1 else x


def gather_whole(x: Tensor, length: int, axis: Axis) -> Tensor:
    """All-gather sequence shards for a computation that every tp rank repeats; each keeps its shard of the gradient."""
    return _GatherWhole.apply(x, length, axis) if axis.size > 1 else x


def reduce_scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Sum the terms that the tp ranks hold and keep this rank's sequence shard; the gradient is all-gathered."""
    return _ReduceScatterSequence.apply(x, axis) if axis.size > 1 else x


def own_shard(x: Tensor, axis: Axis) -> Tensor:
    """This rank's sequence shard of a tensor that every tp rank holds whole. No communication; what lies upstream gets
    the gradient of its own shard only, a term of a sum over tp."""
    return _own_shard(x, axis) if axis.size > 1 else x


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over tp; the gradient, the same on every rank, passes through (the g of Megatron-LM)."""
    return _AllReduce.apply(x, axis) if axis.size > 1 else x


def reduce_gradient(x: Tensor, axis: Axis) -> Tensor:
    """The identity on a replicated tensor; its gradient is summed over tp (the f of Megatron-LM)."""
    return _ReduceGradient.apply(x, axis) if axis.size > 1 else x


def gather_last(x: Tensor, size: int, start: int, step: int, axis: Axis) -> Tensor:
    """All-gather shards of the last dim into `size` elements, for a computation that every tp rank repeats.

    `step` is the length of the longest shard and `start` the offset of this rank's, as `torch.chunk` cuts.
    """
    return _GatherLast.apply(x, size, start, step, axis) if axis.size > 1 else x
