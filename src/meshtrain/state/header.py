"""The safetensors container: reading its header with suspicion, and making one. Tensor data is not touched
here.

Needs no torch. The format: 8 bytes of header length (little endian), a JSON object that gives each tensor's dtype, shape and
byte interval, then the bytes. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.errors import Refused
from meshtrain.state.strict_json import parse_object, shown

HEADER_LIMIT = 100_000_000
"""Bytes; the limit of the safetensors library."""

BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Name of a dtype in the file -> bits per element, in the order of the safetensors library."""

_ORDER = {name: position for position, name in enumerate(BITS)}

_MAGIC = {
    b"PK\x03\x04": "a zip archive, as torch.save writes; pickles are never loaded. Convert it to safetensors first",
    b"\x80\x02": "a pickle, which is never loaded. Convert it to safetensors first",
    b"GGUF": "a GGUF file. Take the safetensors files of the model",
    b"version ": "a git-lfs pointer, not the file itself. Fetch the file with `git lfs pull`",
    b"<!DOCTYP": "a web page. Download the file itself",
}


class TensorEntry(NamedTuple):
    """Where one tensor lies: `offset` in bytes from the start of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TensorInfo(NamedTuple):
    """What a header says of one tensor to be written."""

    key: str
    dtype: str
    """Name in the file, such as F32."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, int]]:
    """(descriptor, size) of a regular file, opened to be read. Raises Refused for anything else, without
    blocking.
    """
    try:
        # Looked at first because opening a device can have effects; O_NONBLOCK so that a FIFO swapped in cannot hang us.
        mode = os.stat(path).st_mode
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if stat.S_ISREG(mode) else -1
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Refused(f"{path}: cannot be opened ({reason}). Give the path of a safetensors file that exists") from None
    if descriptor < 0:
        raise Refused(
            f"{path}: is not a regular file. Weights are read from regular files only; copy the data into one"
        )
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{path}: changed into something that is not a regular file while it was opened")
        yield descriptor, found.st_size
    finally:
        os.close(descriptor)


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, by key, in the order of their bytes.

    Nothing is allocated before the lengths are checked against the file. Raises Refused, naming the file, the
    field, the value, the rule and the way out, unless every rule of the format holds, including those that
    the safetensors library does not enforce (duplicate and path-like names).
    """
    path = Path(path)
    with open_regular(path) as (descriptor, size):
        start = os.pread(descriptor, 8, 0)
        for magic, kind in _MAGIC.items():
            if start.startswith(magic):
                raise Refused(f"{path}: not a safetensors file but {kind}")
        if size < 10:
            raise Refused(
                f"{path}: {size} bytes, too short for a safetensors file (8 bytes of header length and a "
                f"header); {_AGAIN}"
            )
        length = int.from_bytes(start, "little")
        if length > HEADER_LIMIT:
            raise Refused(
                f"{path}: header length {length} is above the limit of {HEADER_LIMIT} bytes, so this is not "
                f"a "
                f"safetensors file or a damaged one; {_AGAIN}"
            )
        if 8 + length > size:
            raise Refused(f"{path}: header length {length} goes past the end of the file ({size} bytes); {_AGAIN}")
        raw = os.pread(descriptor, length, 8)
        if len(raw) != length:
            raise Refused(f"{path}: the file became shorter while its header was read; {_AGAIN}")
    fields = parse_object(raw, f"{path}: header")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Refused(f"{path}: header field __metadata__ must map names to strings; {_AGAIN}")
    entries = [(key, _entry(path, key, field, 8 + length)) for key, field in fields.items()]
    entries.sort(key=lambda item: (item[1].offset, item[1].nbytes))
    end = 8 + length
    for key, entry in entries:
        if entry.offset != end:
            what = "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
            raise Refused(
                f"{path}: tensor {shown(key)} begins at byte {entry.offset - 8 - length} of the data and "
                f"{what} (which ends at "
                f"{end - 8 - length}); tensors must follow each other without holes; {_AGAIN}"
            )
        end += entry.nbytes
    if end != size:
        state = "truncated" if end > size else "followed by bytes that belong to no tensor"
        raise Refused(f"{path}: the header describes {end} bytes, the file has {size}: it is {state}; {_AGAIN}")
    return dict(entries)


_AGAIN = "fetch or export it again"


def _entry(path: Path, key: str, field: Any, base: int) -> TensorEntry:
    def refuse(what: str) -> Refused:
        return Refused(f"{path}: tensor {shown(key)}: {what}; {_AGAIN}")

    if not key or "\0" in key or not key.isprintable():
        raise refuse("the name is empty or holds unprintable characters, which no parameter has")
    if ".." in key.replace("\\", "/").split("/") or key.startswith(("/", "\\")):
        raise refuse("the name is a path that leads elsewhere, which no parameter has")
    if not isinstance(field, dict):
        raise refuse(f"described by a {type(field).__name__}, not by an object with dtype, shape and data_offsets")
    dtype, shape, offsets = field.get("dtype"), field.get("shape"), field.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise refuse(f"dtype {shown(str(dtype))} is not one of {', '.join(BITS)}")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise refuse(f"shape {shown(str(shape))} must be a list of integers from 0 to 2^63 - 1")
    if len(shape) > 64 or math.prod(size for size in shape if size) >= 2**63:
        raise refuse(f"shape {shown(str(shape))} has more than 64 dims or 2^63 elements")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise refuse(f"data_offsets {shown(str(offsets))} must be two integers")
    begin, end = offsets
    if not 0 <= begin <= end < 2**63:
        raise refuse(f"data_offsets [{shown(str(begin))}, {shown(str(end))}] must be an interval from 0 up")
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8 or bits // 8 != end - begin:
        raise refuse(f"data_offsets hold {end - begin} bytes, dtype {dtype} and shape {shape} need {bits / 8:g}")
    return TensorEntry(path, dtype, tuple(shape), base + begin, end - begin)


def make_header(tensors: Sequence[TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """The head of a file that holds `tensors`, and the byte at which each one's data begins in that file.

    Byte for byte what the safetensors library writes: tensors by falling alignment and rising name, so that
    each one is aligned to its element size, and the data at a multiple of 8 bytes.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, starts = 0, {}
    for tensor in sorted(tensors, key=lambda t: (-_ORDER[t.dtype], t.key.encode())):
        fields[tensor.key] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        starts[tensor.key] = position
        position += tensor.nbytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {key: len(head) + start for key, start in starts.items()}
