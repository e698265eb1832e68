"""ParamLayout: where every element of one parameter lives on a dp x tp mesh, as plain data.

Applying, initialising, importing, exporting, checkpointing and previewing all read this one description, and nothing
else decides how a tensor is cut. It needs no process group: any process can ask what any coordinate holds.

The cut is made in two steps, in the order in which torch applies them. First tp cuts one dim (`tp_dim`) of each of the
`parts` of the tensor into contiguous chunks with `torch.chunk`'s rule (a fused weight has several parts, and a rank
holds its chunk of each, one after the other). Then dp cuts dim 0 of what a tp rank holds, again by `torch.chunk`'s rule:
that is FSDP2's rule for its real shards. DTensor's own metadata describes another cut when sizes do not divide, so
shapes and offsets are never read from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def chunk_interval(size: int, chunks: int, index: int) -> tuple[int, int]:
    """The half-open interval of chunk `index` when `torch.chunk` cuts `size` elements; empty past the last chunk."""
    step = -(-size // chunks)
    start = min(index * step, size)
    return start, min(start + step, size)


class MeshSizes(NamedTuple):
    """The sizes of the two axes of a mesh."""

    dp: int
    tp: int

    @property
    def world(self) -> int:
        return self.dp * self.tp

    def coordinates(self) -> Iterator[tuple[int, int]]:
        """All (dp, tp) coordinates, in rank order."""
        return ((dp, tp) for dp in range(self.dp) for tp in range(self.tp))


class Block(NamedTuple):
    """A rectangle of the global tensor and the place where the local tensor holds it: one (start, stop) per dim each."""

    where: tuple[tuple[int, int], ...]
    local: tuple[tuple[int, int], ...]

    def of_global(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.where)

    def of_local(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.local)


@dataclass(frozen=True)
class ParamLayout:
    """One parameter, resolved on a mesh."""

    name: str
    """Name in the model; the first one when several names are tied."""
    aliases: tuple[str, ...]
    """The other names of the same (tied) parameter."""
    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    """Stored (master) dtype."""
    requires_grad: bool
    sizes: MeshSizes
    tp_dim: int | None
    """The tensor dim that tp cuts; None when every tp rank holds the whole parameter."""
    parts: tuple[int, ...]
    """Lengths along `tp_dim` that are cut one by one (several for a fused weight)."""
    tp_gradient: Literal["whole", "partial"]
    """What a tp rank's backward gives: the whole gradient of what it holds, or one term of a sum over tp."""
    unit: str
    """The FSDP unit that owns it; "" is the root."""
    entry: str
    """The plan entry (pattern) that covers it."""

    @classmethod
    def whole(
        cls,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        aliases: tuple[str, ...] = (),
        requires_grad: bool = True,
    ) -> ParamLayout:
        """A parameter that nothing cuts: one process holds it."""
        return cls(name, aliases, shape, dtype, requires_grad, MeshSizes(1, 1), None, (), "whole", "", "")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def placements(self) -> tuple[Placement, Placement]:
        """Placements over (dp, tp), as `fully_shard` over `parallelize_module` labels them."""
        if self.tp_dim is None:
            return Shard(0), Replicate()
        if self.tp_dim == 0 and self.sizes.tp > 1:
            return _StridedShard(0, split_factor=self.sizes.tp), Shard(0)
        return Shard(0), Shard(self.tp_dim)

    @property
    def cut(self) -> str:
        """In words: how the axes cut it, in their order."""
        if self.tp_dim is None or self.sizes.tp == 1:
            return f"{_direction(0)} over dp"
        each = f" of each of {len(self.parts)} parts" if len(self.parts) > 1 else ""
        if self.tp_dim == 0:
            return f"{_direction(0)}{each} over tp, then dp"
        return f"{_direction(self.tp_dim)}{each} over tp, {_direction(0)} over dp"

    def tp_segments(self, tp: int) -> tuple[tuple[int, int], ...]:
        """Intervals of `tp_dim` that tp coordinate `tp` holds, in the order in which it holds them."""
        segments, offset = [], 0
        for part in self.parts:
            start, stop = chunk_interval(part, self.sizes.tp, tp)
            segments.append((offset + start, offset + stop))
            offset += part
        return tuple(segments)

    def tp_shape(self, tp: int) -> tuple[int, ...]:
        """Shape that tp coordinate `tp` computes with, once FSDP has gathered it over dp."""
        if self.tp_dim is None:
            return self.shape
        length = sum(stop - start for start, stop in self.tp_segments(tp))
        return (*self.shape[: self.tp_dim], length, *self.shape[self.tp_dim + 1 :])

    def local_shape(self, dp: int, tp: int) -> tuple[int, ...]:
        """Shape of the shard at a coordinate."""
        shape = self.tp_shape(tp)
        start, stop = chunk_interval(shape[0], self.sizes.dp, dp)
        return (stop - start, *shape[1:])

    def blocks(self, dp: int, tp: int) -> list[Block]:
        """The rectangles of the global tensor that the shard at a coordinate consists of, in local order."""
        shape = self.tp_shape(tp)
        low, high = chunk_interval(shape[0], self.sizes.dp, dp)
        if low == high:
            return []
        rows = (low, high)
        tail = tuple((0, size) for size in shape[1:])
        if self.tp_dim is None:
            return [Block(where=(rows, *tail), local=((0, high - low), *tail))]
        blocks, offset = [], 0
        for start, stop in self.tp_segments(tp):
            length = stop - start
            if self.tp_dim == 0:
                first, last = max(low, offset), min(high, offset + length)
                if first < last:
                    there = (start + first - offset, start + last - offset)
                    blocks.append(Block(where=(there, *tail), local=((first - low, last - low), *tail)))
            elif length:
                here = (offset, offset + length)
                before, after = tail[: self.tp_dim - 1], tail[self.tp_dim :]
                blocks.append(
                    Block(
                        where=(rows, *before, (start, stop), *after),
                        local=((0, high - low), *before, here, *after),
                    )
                )
            offset += length
        return blocks

    def byte_intervals(self, dp: int, tp: int, itemsize: int | None = None) -> Iterator[tuple[int, int]]:
        """(offset, length) in bytes within the contiguous global tensor, in the order of the local elements of each block."""
        size = itemsize or self.dtype.itemsize
        for block in self.blocks(dp, tp):
            for offset, length in contiguous_runs(self.shape, block.where):
                yield offset * size, length * size

    def writes(self, tp: int) -> bool:
        """Whether tp coordinate `tp` writes its shard to a file: of replicas only the first does."""
        return self.tp_dim is not None or tp == 0


def _direction(dim: int) -> str:
    return ("rows", "columns")[dim] if dim < 2 else f"dim {dim}"


def contiguous_runs(shape: tuple[int, ...], where: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    """(start, length) in elements of the contiguous runs that the rectangle `where` has in a row-major tensor of `shape`."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    # The innermost dims that are taken whole, and the one before them, are one run.
    split = len(shape) - 1
    while split > 0 and where[split] == (0, shape[split]):
        split -= 1
    length = (where[split][1] - where[split][0]) * strides[split]
    base = where[split][0] * strides[split]

    def walk(dim: int, start: int) -> Iterator[int]:
        if dim == split:
            yield start
            return
        for index in range(*where[dim]):
            yield from walk(dim + 1, start + index * strides[dim])

    for start in walk(0, base):
        yield start, length
