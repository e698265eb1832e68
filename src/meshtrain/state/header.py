"""The safetensors container: reading its header with suspicion, and making one. Tensor data is not touched
here.

Needs no torch. The format: 8 bytes of header length (little endian), a JSON object that gives each tensor's dtype, shape and
byte interval, then the bytes. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.errors import Refused
from meshtrain.state.strict_json import Scanner, shown

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

_CONVERT = "Convert it to safetensors first: meshtrain import --help"
_MAGIC = {
    b"PK\x03\x04": f"a zip archive, as torch.save writes; pickles are never loaded. {_CONVERT}",
    b"\x80": f"a pickle, which is never loaded. {_CONVERT}",
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
        raise Refused(
            f"{path}: cannot be opened ({reason}). Give the path of a file that exists and may be read"
        ) from None
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


def read_exactly(descriptor: int, nbytes: int, offset: int, path: Path) -> bytes:
    """Bytes of an open file. Raises Refused when it ends before."""
    raw = os.pread(descriptor, nbytes, offset)
    while len(raw) < nbytes:  # one call reads 2 GiB at most
        more = os.pread(descriptor, nbytes - len(raw), offset + len(raw))
        if not more:
            raise Refused(f"{path}: the file became shorter while it was read; {_AGAIN}")
        raw += more
    return raw


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, by key, in the order of their bytes.

    Nothing is allocated before the lengths are checked against the file, and a header that is refused costs about the
    memory of its bytes. Raises Refused, naming the file, the field, the value, the rule and the way out, unless every rule
    of the format holds, including those that the safetensors library does not enforce (duplicate and path-like names).
    """
    path = Path(path)
    with open_regular(path) as (descriptor, size):
        before = os.fstat(descriptor)
        length = _header_length(descriptor, size, path)
        raw = read_exactly(descriptor, length, 8, path)
        after = os.fstat(descriptor)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise Refused(f"{path}: changed while its header was read; read it when nothing writes to it any more")
    entries = _entries(raw, path, 8 + length)
    end = 8 + length
    for key, entry in entries.items():
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
    return entries


_AGAIN = "fetch or export it again"
_METADATA = "__metadata__"
_NAME_LIMIT = 4096
_ENTRY_LIMIT = 8192
_METADATA_LIMIT = 10_000

_NUMBER = rb"(?:0|[1-9][0-9]{0,18})"
# An entry as every writer writes it. One in another order or spelling is read as any other JSON.
_ENTRY = re.compile(
    rb'[ ]?\{"dtype": ?"([A-Z0-9_]{1,16})", ?"shape": ?\[((?:%b(?:, ?%b){0,63}+)?)\], ?"data_offsets": ?\[(%b), ?(%b)\]\}'
    % ((_NUMBER,) * 4)
)
_DTYPES = {name.encode(): name for name in BITS}


def _header_length(descriptor: int, size: int, path: Path) -> int:
    start = os.pread(descriptor, 9, 0)
    length = int.from_bytes(start[:8], "little")
    if size < 10:
        wrong = f"{size} bytes, too short for a safetensors file (8 bytes of header length and a header); {_AGAIN}"
    elif length > HEADER_LIMIT:
        wrong = (
            f"header length {length} is above the limit of {HEADER_LIMIT} bytes, so this is not a safetensors file or a damaged "
            f"one; {_AGAIN}"
        )
    elif 8 + length > size:
        wrong = f"header length {length} goes past the end of the file ({size} bytes); {_AGAIN}"
    elif start[8:] != b"{":
        wrong = f"the header starts with {start[8:]!r} and not with '{{', as a JSON object does; {_AGAIN}"
    else:
        return length
    # Only now, since the length of a good header may begin with the same bytes.
    kinds = [kind for magic, kind in _MAGIC.items() if start.startswith(magic)]
    raise Refused(f"{path}: not a safetensors file but {kinds[0]}" if kinds else f"{path}: {wrong}")


def _entries(raw: bytes, path: Path, base: int) -> dict[str, TensorEntry]:
    """What a header says of each tensor, in the order of their bytes, which begin at byte `base`."""
    scanner = Scanner(raw, f"{path}: header")
    entries: dict[str, TensorEntry] = {}
    metadata, ordered, last = False, True, (0, 0)
    for key in scanner.members(_NAME_LIMIT):
        if key == _METADATA and not metadata:
            metadata = True
            _check_metadata(scanner, path)
            continue
        if key in entries or key == _METADATA:
            raise Refused(
                f"{path}: header: the name {shown(key)} occurs twice, and which one counts is undefined; {_AGAIN}"
            )
        if (match := _ENTRY.match(raw, scanner.position)) is not None and (dtype := _DTYPES.get(match[1])) is not None:
            scanner.position = match.end()
            shape = tuple(map(int, match[2].split(b","))) if match[2] else ()
            entry = _checked(path, key, dtype, shape, int(match[3]), int(match[4]), base)
        else:
            entry = _entry(path, key, scanner.value(_ENTRY_LIMIT), base)
        entries[key] = entry
        ordered, last = ordered and last <= (entry.offset, entry.nbytes), (entry.offset, entry.nbytes)
    scanner.end()
    if ordered:
        return entries
    return dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))


def _check_metadata(scanner: Scanner, path: Path) -> None:
    """Pass over the texts of the metadata, which nothing here reads."""
    names: set[str] = set()
    bad = Refused(f"{path}: header field {_METADATA} must map names to strings, each once; {_AGAIN}")
    if not scanner.have(b"{"):
        raise bad
    scanner.position -= 1
    for name in scanner.members(_NAME_LIMIT):
        whole = not any("\ud800" <= character <= "\udfff" for character in name)
        if not scanner.have(b'"') or not whole or name in names or len(names) >= _METADATA_LIMIT:
            raise bad
        scanner.position -= 1
        names.add(name)
        scanner.skip_string()


def _refusal(path: Path, key: str, what: str) -> Refused:
    return Refused(f"{path}: tensor {shown(key)}: {what}; {_AGAIN}")


def _entry(path: Path, key: str, field: Any, base: int) -> TensorEntry:
    """One tensor, from any JSON value."""
    if not isinstance(field, dict):
        raise _refusal(
            path, key, f"described by a {type(field).__name__}, not by an object with dtype, shape and data_offsets"
        )
    dtype, shape, offsets = field.get("dtype"), field.get("shape"), field.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _refusal(path, key, f"dtype {shown(str(dtype))} is not one of {', '.join(BITS)}")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise _refusal(path, key, f"shape {shown(str(shape))} must be a list of integers from 0 to 2^63 - 1")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise _refusal(path, key, f"data_offsets {shown(str(offsets))} must be two integers")
    return _checked(path, key, dtype, tuple(shape), offsets[0], offsets[1], base)


def _checked(path: Path, key: str, dtype: str, shape: tuple[int, ...], begin: int, end: int, base: int) -> TensorEntry:
    if (problem := _problem_of_name(key)) is not None:
        raise _refusal(path, key, problem)
    if shape and not 0 <= min(shape) <= max(shape) < 2**63:
        raise _refusal(path, key, f"shape {shown(str(list(shape)))} must be a list of integers from 0 to 2^63 - 1")
    if len(shape) > 64 or math.prod(size or 1 for size in shape) >= 2**63:
        raise _refusal(path, key, f"shape {shown(str(list(shape)))} has more than 64 dims or 2^63 elements")
    if not 0 <= begin <= end < 2**63:
        raise _refusal(
            path, key, f"data_offsets [{shown(str(begin))}, {shown(str(end))}] must be an interval from 0 up"
        )
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8 or bits // 8 != end - begin:
        raise _refusal(
            path, key, f"data_offsets hold {end - begin} bytes, dtype {dtype} and shape {list(shape)} need {bits / 8:g}"
        )
    return TensorEntry(path, dtype, shape, base + begin, end - begin)


def _problem_of_name(key: str) -> str | None:
    if not key or not key.isprintable():
        return "the name is empty or holds unprintable characters, which no parameter has"
    if (".." in key and ".." in key.replace("\\", "/").split("/")) or key.startswith(("/", "\\")):
        return "the name is a path that leads elsewhere, which no parameter has"
    return None


def make_header(tensors: Sequence[TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """The head of a file that holds `tensors`, and the byte at which each one's data begins in that file.

    Byte for byte what the safetensors library writes: tensors by falling alignment and rising name, so that
    each one is aligned to its element size, and the data at a multiple of 8 bytes. Raises Refused for a name that
    no reader would take.
    """
    for tensor in tensors:
        problem = "the format keeps this name for itself" if tensor.key == _METADATA else _problem_of_name(tensor.key)
        if problem is not None:
            raise Refused(f"tensor {shown(tensor.key)} cannot be written: {problem}. Rename the parameter")
    fields: dict[str, Any] = {_METADATA: {"format": "pt"}}
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
