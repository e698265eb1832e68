"""Bytes between local shards and byte intervals of files, through one bounded buffer. No ranks talk to each
other here.

The buffer is plain memory that torch sees as a tensor and the operating system as bytes, so copying into it
gathers a strided shard and converts its dtype in one pass, on any device.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from meshtrain.errors import MeshtrainError, Refused
from meshtrain.parallel.layout import Block, contiguous_runs
from meshtrain.state.checksum import Contribution
from meshtrain.state.dtypes import NAME_OF, TORCH_OF
from meshtrain.state.header import TensorEntry
from meshtrain.state.specs import TensorSpec

BUFFER_BYTES = 4 * 2**20

Interval = tuple[int, int]


@dataclass
class Traffic:
    """Bytes of tensor data that this process has moved."""

    read: int = 0
    written: int = 0
    calls: int = 0
    """System calls that moved them."""


class Staging:
    """The buffer through which all bytes of a transfer pass."""

    def __init__(self, nbytes: int = BUFFER_BYTES) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes)
        self.bytes = memoryview(self._memory)
        self.traffic = Traffic()

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The start of the buffer as a contiguous tensor (which keeps the memory alive)."""
        return torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape)).view(shape)


@dataclass(frozen=True)
class Piece:
    """A part of a block that fits the buffer."""

    where: tuple[Interval, ...]
    """Rectangle of the global tensor."""
    local: tuple[slice, ...]
    """The same elements in the local tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.where)


def pieces(block: Block, limit: int) -> Iterator[Piece]:
    """Cut a block into pieces of at most `limit` elements (at least one), in row-major order."""
    shift = [local[0] - where[0] for where, local in zip(block.where, block.local, strict=True)]
    for where in _cut(block.where, limit):
        yield Piece(where, tuple(slice(a + s, b + s) for (a, b), s in zip(where, shift, strict=True)))


def _cut(where: tuple[Interval, ...], limit: int) -> Iterator[tuple[Interval, ...]]:
    count = math.prod(stop - start for start, stop in where)
    if count == 0:
        return
    if count <= limit:
        yield where
        return
    dim = next(dim for dim, (start, stop) in enumerate(where) if stop - start > 1)
    start, stop = where[dim]
    step = max(1, limit * (stop - start) // count)
    for low in range(start, stop, step):
        yield from _cut((*where[:dim], (low, min(low + step, stop)), *where[dim + 1 :]), limit)


def stage(name: str, source: Tensor, dtype: torch.dtype, staging: Staging) -> None:
    """Put values into the buffer as `dtype`. Raises MeshtrainError when float16 cannot hold one of them."""
    view = staging.tensor(dtype, tuple(source.shape))
    view.copy_(source)
    if dtype == torch.float16 and source.dtype != dtype and view.isinf().any() and not source.isinf().any():
        raise MeshtrainError(
            f"{name}: holds values beyond 65504, the largest of float16, which would become infinite. "
            "Export as bfloat16 or float32"
        )


def write_piece(
    descriptor: int, start: int, spec: TensorSpec, piece: Piece, dtype: torch.dtype, staging: Staging
) -> None:
    """Write the piece that the buffer holds to its byte intervals; the tensor's data begins at byte
    `start`.
    """
    _write_runs(descriptor, start, spec, piece.where, dtype.itemsize, staging.bytes, staging.traffic)


def sum_piece(spec: TensorSpec, piece: Piece, dtype: torch.dtype, staging: Staging, total: Contribution) -> None:
    """Add the piece that the buffer holds to what this process contributes to the tensor's checksum."""
    _sum_runs(spec, piece.where, dtype.itemsize, staging.bytes, total)


def write_shard(
    descriptor: int,
    start: int,
    spec: TensorSpec,
    coordinate: tuple[int, int],
    local: Tensor,
    dtype: torch.dtype,
    staging: Staging,
) -> None:
    """Write what a coordinate holds of one tensor; its data begins at byte `start` of the file."""
    for where, data in _own_bytes(spec, coordinate, local, dtype, staging):
        _write_runs(descriptor, start, spec, where, dtype.itemsize, data, staging.traffic)


def sum_shard(
    spec: TensorSpec,
    coordinate: tuple[int, int],
    local: Tensor,
    dtype: torch.dtype,
    staging: Staging,
    total: Contribution,
) -> None:
    """Add what a coordinate holds of one tensor to what it contributes to the tensor's checksum."""
    for where, data in _own_bytes(spec, coordinate, local, dtype, staging):
        _sum_runs(spec, where, dtype.itemsize, data, total)


def _own_bytes(
    spec: TensorSpec, coordinate: tuple[int, int], local: Tensor, dtype: torch.dtype, staging: Staging
) -> Iterator[tuple[tuple[Interval, ...], memoryview]]:
    """Rectangles of the global tensor that a coordinate holds, with their bytes in the file's dtype: those of the tensor
    itself where they lie there as they are needed, else through the buffer.
    """
    local = local.detach().reshape(spec.local_shape(*coordinate) or (1,))
    for block in spec.blocks(*coordinate):
        held = local[block.of_local()]
        if held.numel() and held.is_contiguous() and held.dtype == dtype and held.device.type == "cpu":
            yield block.where, _memory_of(held)
            continue
        for piece in pieces(block, staging.nbytes // dtype.itemsize):
            stage(spec.name, local[piece.local], dtype, staging)
            yield piece.where, staging.bytes


def _memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which has to outlive them."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _write_runs(
    descriptor: int,
    start: int,
    spec: TensorSpec,
    where: tuple[Interval, ...],
    itemsize: int,
    data: memoryview,
    traffic: Traffic,
) -> None:
    position = 0
    for first, count in contiguous_runs(spec.extent, where):
        end = position + count * itemsize
        _pwrite(descriptor, data[position:end], start + first * itemsize, traffic)
        position = end


def _sum_runs(
    spec: TensorSpec, where: tuple[Interval, ...], itemsize: int, data: memoryview, total: Contribution
) -> None:
    runs = contiguous_runs(spec.extent, where)  # all of one length
    first, count = next(runs)
    offsets = chain([first * itemsize], (start * itemsize for start, _ in runs))
    total.add_rows(data, offsets, count * itemsize)


def read_shard(
    descriptor: int,
    entry: TensorEntry,
    spec: TensorSpec,
    coordinate: tuple[int, int],
    local: Tensor,
    staging: Staging,
    total: Contribution | None = None,
) -> None:
    """Fill what a coordinate holds of one tensor from its own byte intervals, converting the dtype. `total` sums them up."""
    dtype = torch_dtype(entry)
    local = local.detach().view(spec.local_shape(*coordinate) or (1,))
    for block in spec.blocks(*coordinate):
        for piece in pieces(block, staging.nbytes // dtype.itemsize):
            read_piece(descriptor, entry, spec, piece, staging.bytes, staging.traffic)
            if total is not None:
                sum_piece(spec, piece, dtype, staging, total)
            local[piece.local].copy_(staging.tensor(dtype, piece.shape))


def same_shard(
    first: tuple[int, TensorEntry],
    second: tuple[int, TensorEntry],
    spec: TensorSpec,
    coordinate: tuple[int, int],
    staging: Staging,
) -> bool:
    """Whether two stored copies of a tensor, as (descriptor, entry), agree bit for bit in what a
    coordinate holds.
    """
    if first[1].dtype != second[1].dtype:
        return False
    size = torch_dtype(first[1]).itemsize
    half = staging.nbytes // 2
    for block in spec.blocks(*coordinate):
        for piece in pieces(block, half // size):
            count = math.prod(piece.shape) * size
            read_piece(*first, spec, piece, staging.bytes, staging.traffic)
            read_piece(*second, spec, piece, staging.bytes[half:], staging.traffic)
            both = staging.tensor(torch.uint8, (staging.nbytes,))
            if not torch.equal(both[:count], both[half : half + count]):
                return False
    return True


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """The torch dtype of a stored tensor. Raises Refused for those that meshtrain does not read."""
    dtype = TORCH_OF.get(entry.dtype)
    if dtype is None:
        raise Refused(
            f"{entry.file}: dtype {entry.dtype} is not supported; convert the file to one of "
            f"{', '.join(NAME_OF.values())}"
        )
    return dtype


def read_piece(
    descriptor: int, entry: TensorEntry, spec: TensorSpec, piece: Piece, into: memoryview, traffic: Traffic
) -> None:
    size, position = torch_dtype(entry).itemsize, 0
    for first, count in contiguous_runs(spec.extent, piece.where):
        end = position + count * size
        _pread(descriptor, into[position:end], entry, entry.offset + first * size, traffic)
        position = end


def _pread(descriptor: int, into: memoryview, entry: TensorEntry, offset: int, traffic: Traffic) -> None:
    while into:
        count = os.preadv(descriptor, [into], offset)
        if count == 0:
            raise Refused(
                f"{entry.file}: ends at byte {offset}, before the tensor that was there; it changed while it was read"
            )
        traffic.read += count
        traffic.calls += 1
        into, offset = into[count:], offset + count


def _pwrite(descriptor: int, data: memoryview, offset: int, traffic: Traffic) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        traffic.written += count
        traffic.calls += 1
        data, offset = data[count:], offset + count
