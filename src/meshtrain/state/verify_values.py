"""Tensors read once from end to end, in bounded memory: their checksums, and the numbers in them that are none."""

from __future__ import annotations

import errno
import math
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshtrain.errors import Refused
from meshtrain.state.checksum import combined, finished
from meshtrain.state.dtypes import TORCH_OF
from meshtrain.state.header import BITS, TensorEntry, open_regular
from meshtrain.state.verify_sums import BUFFER_BYTES


class Scanned(NamedTuple):
    """What one tensor holds."""

    key: str
    nbytes: int
    crc32: int
    nan: int
    """Elements that are no number."""
    infinite: int
    unwritten: int
    """Bytes that were never written: the file has a hole there, and reads as zeros."""


def scan(path: Path, entries: Mapping[str, TensorEntry]) -> Iterator[Scanned]:
    """Read the tensors of one file, given in the order of their bytes. Raises Refused when the file changes meanwhile.

    Holes are not read, so that a file that claims to be huge costs no time.
    """
    buffer = mmap.mmap(-1, BUFFER_BYTES)
    with open_regular(path) as (descriptor, _):
        before = os.fstat(descriptor)
        for key, entry in entries.items():
            yield _scan_tensor(descriptor, key, entry, buffer)
        after = os.fstat(descriptor)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise Refused(f"{path}: changed while it was read; verify it when nothing writes to it any more")


def _scan_tensor(descriptor: int, key: str, entry: TensorEntry, buffer: mmap.mmap) -> Scanned:
    dtype, unit = TORCH_OF.get(entry.dtype), max(1, BITS[entry.dtype] // 8)
    view = memoryview(buffer)
    total = nan = infinite = unwritten = 0
    position, end = entry.offset, entry.offset + entry.nbytes
    while position < end:
        hole = (_data_after(descriptor, position, end) - position) // unit * unit
        if hole >= BUFFER_BYTES:
            total, position, unwritten = (
                combined([(total, 0), (finished(0, hole), hole)]),
                position + hole,
                unwritten + hole,
            )
            continue
        part = view[: min(len(view), end - position)]
        _fill(descriptor, part, position, entry.file)
        total, position = zlib.crc32(part, total), position + len(part)
        if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
            found = _not_finite(torch.frombuffer(buffer, dtype=dtype, count=len(part) // unit))
            nan, infinite = nan + found[0], infinite + found[1]
    return Scanned(key, entry.nbytes, total, nan, infinite, unwritten)


def _data_after(descriptor: int, position: int, end: int) -> int:
    """The first byte from `position` on that was written, or `end`."""
    try:
        return min(os.lseek(descriptor, position, os.SEEK_DATA), end)
    except OSError as error:
        # ENXIO: nothing but a hole follows. Anything else: a file system that does not tell.
        return end if error.errno == errno.ENXIO else position


def _fill(descriptor: int, part: memoryview, position: int, path: Path) -> None:
    while part:
        count = os.preadv(descriptor, [part], position)
        if count == 0:
            raise Refused(f"{path}: became shorter while it was read; verify it when nothing writes to it any more")
        part, position = part[count:], position + count


def _not_finite(values: Tensor) -> tuple[int, int]:
    """(NaNs, infinities) among the values."""
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.dtype.itemsize == 1:
        values = values.float()
    low, high = torch.aminmax(values)  # either is NaN where any value is, at ten times the speed of isfinite()
    if math.isfinite(low.item()) and math.isfinite(high.item()):
        return 0, 0
    return int(values.isnan().sum()), int(values.isinf().sum())
