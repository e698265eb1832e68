"""Which file holds which tensor, and where: a function of names, shapes and dtypes alone, so every rank
finds the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshtrain.errors import Refused
from meshtrain.state.header import TensorInfo, make_header

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True)
class PlannedFile:
    """A file that will be written."""

    name: str
    """Path below the directory, with "/"."""
    head: bytes
    """Header length and header, as they go to the file."""
    size: int
    """Bytes of the whole file."""
    starts: dict[str, int]
    """Key -> the byte at which its data begins."""


def plan_files(
    tensors: Sequence[TensorInfo], max_shard_size: int | str = "5GB", base: str = "model"
) -> list[PlannedFile]:
    """Spread tensors, in the order given, over files of at most `max_shard_size` bytes of data (as
    transformers does).

    A larger tensor gets a file of its own. One file is named BASE.safetensors, several BASE-00001-of-0000N.
    """
    limit = parse_size(max_shard_size)
    groups: list[list[TensorInfo]] = [[]]
    alone: list[list[TensorInfo]] = []
    held = 0
    for tensor in tensors:
        if tensor.nbytes > limit:
            alone.append([tensor])
            continue
        if groups[-1] and held + tensor.nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.nbytes
    groups = [group for group in groups if group] + alone or [[]]
    files = []
    for number, group in enumerate(groups, 1):
        part = "" if len(groups) == 1 else f"-{number:05}-of-{len(groups):05}"
        name = f"{base}{part}.safetensors"
        head, starts = make_header(group)
        files.append(PlannedFile(name, head, len(head) + sum(tensor.nbytes for tensor in group), starts))
    return files


def index_of(files: Sequence[PlannedFile]) -> dict[str, Any] | None:
    """The content of BASE.safetensors.index.json; None for a single file, which has none."""
    if len(files) == 1:
        return None
    total = sum(file.size - len(file.head) for file in files)
    weight_map = {key: file.name.rpartition("/")[2] for file in files for key in file.starts}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def digest(files: Sequence[PlannedFile], *words: str) -> bytes:
    """32 bytes that are equal on two ranks exactly when they plan the same files (and the same `words`)."""
    total = hashlib.sha256()
    for part in (*(word.encode() for word in words), *(f.name.encode() + f.head for f in files)):
        total.update(len(part).to_bytes(8, "little") + part)
    return total.digest()


def parse_size(size: int | str) -> int:
    """Bytes from a number or from text such as "5GB" (10^9) or "512MiB" (2^20). Raises Refused."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match and match[2].upper() in _UNITS:
            size = int(float(match[1]) * _UNITS[match[2].upper()])
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise Refused(f"max_shard_size {size!r}: give a number of bytes above 0, as in 5000000000, '5GB' or '512MiB'")
    return size
