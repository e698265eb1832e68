"""training/manifest.json: what a checkpoint consists of, with a checksum of every file and every tensor.

It guards itself too: its first field is the checksum of all the bytes after that field. Needs no torch.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshtrain.errors import Damaged, Refused
from meshtrain.state.checksum import combined
from meshtrain.state.header import open_regular
from meshtrain.state.names import OTHER
from meshtrain.state.strict_json import parse_object, shown

MANIFEST = "training/manifest.json"
FORMAT, VERSION = "meshtrain checkpoint", 1
_LIMIT = 1 << 30
_HEAD = b'{"crc32": "'
_SUM = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class FileSums:
    """What is known of one file."""

    bytes: int
    crc32: int
    """zlib's checksum of the whole file."""
    header: int | None = None
    """Of a safetensors file: the checksum of its first 8 bytes and the header."""
    tensors: dict[str, int] = field(default_factory=dict)
    """Key -> checksum of the tensor's bytes, in the order of the bytes."""


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint but the manifest itself."""

    files: dict[str, FileSums]
    """Path below the checkpoint's directory, with "/" -> what it holds."""

    def to_bytes(self) -> bytes:
        """The file."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "files": {name: _as_json(sums) for name, sums in sorted(self.files.items())},
        }
        rest = b" " + json.dumps(content, indent=1, ensure_ascii=False).lstrip("{").encode() + b"\n"
        return _HEAD + f"{zlib.crc32(rest):08x}".encode() + b'",' + rest


def sums_of_tensors(head: bytes, tensors: dict[str, tuple[int, int]]) -> FileSums:
    """What is known of a safetensors file, from its head and (checksum, bytes) of each tensor in the order of the bytes."""
    parts = [(zlib.crc32(head), len(head)), *tensors.values()]
    return FileSums(
        bytes=sum(nbytes for _, nbytes in parts),
        crc32=combined(parts),
        header=zlib.crc32(head),
        tensors={key: checksum for key, (checksum, _) in tensors.items()},
    )


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where there is none.

    Raises Damaged when it is not what was written, and Refused when another version wrote it.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    try:
        content = _guarded(path)
    except Damaged:
        raise
    except Refused as error:
        raise Damaged(str(error)) from error
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise Refused(
            f"{path}: is of format {shown(str(content.get('format')))} version {shown(str(content.get('version')))}, not "
            f"{FORMAT!r} version {VERSION}. Read it with the version of meshtrain that wrote it"
        )
    files = content.get("files")
    if not isinstance(files, dict):
        raise Damaged(f"{path}: field files must map names to what is known of each file; {OTHER}")
    return Manifest({name: _from_json(path, name, value) for name, value in files.items()})


def _guarded(path: Path) -> dict[str, Any]:
    """The object in the file, whose bytes sum to what its first field says."""
    raw = _content(path)
    head = len(_HEAD)
    if raw[:head] != _HEAD or raw[head + 8 : head + 10] != b'",' or len(raw) < head + 10:
        raise Damaged(f"{path}: does not begin with the checksum that every manifest begins with; {OTHER}")
    found = f"{zlib.crc32(raw[head + 10 :]):08x}".encode()
    if raw[head : head + 8] != found:
        raise Damaged(
            f"{path}: says {shown(raw[head : head + 8].decode('latin-1'))} of itself but sums to {found.decode()}: it was "
            f"damaged after it was written; {OTHER}"
        )
    return parse_object(raw, str(path))


def _content(path: Path) -> bytes:
    with open_regular(path) as (descriptor, size):
        if size > _LIMIT:
            raise Refused(f"{path}: {size} bytes is above the limit of {_LIMIT} bytes for a manifest; {OTHER}")
        raw = b""
        while len(raw) < size and (more := os.pread(descriptor, size - len(raw), len(raw))):
            raw += more
    return raw


def _as_json(sums: FileSums) -> dict[str, Any]:
    result: dict[str, Any] = {"bytes": sums.bytes, "crc32": f"{sums.crc32:08x}"}
    if sums.header is not None:
        result["header"] = f"{sums.header:08x}"
        result["tensors"] = {key: f"{checksum:08x}" for key, checksum in sums.tensors.items()}
    return result


def _from_json(path: Path, name: str, value: Any) -> FileSums:
    def wrong(what: str) -> Damaged:
        return Damaged(f"{path}: file {shown(name)}: {what}; {OTHER}")

    parts = name.split("/")
    if len(parts) > 2 or parts[:-1] not in ([], ["training"]) or parts[-1] in ("", ".", "..") or not name.isprintable():
        raise wrong("is no name of a file of a checkpoint")
    if not isinstance(value, dict):
        raise wrong("is not described by an object")
    tensors = value.get("tensors", {})
    numbers = [value.get("crc32"), *([value["header"]] if "header" in value else [])]
    if type(value.get("bytes")) is not int or not 0 <= value["bytes"] < 2**63 or not isinstance(tensors, dict):
        raise wrong("bytes must be a whole number, and tensors map keys to checksums")
    if not all(isinstance(text, str) and _SUM.fullmatch(text) for text in (*numbers, *tensors.values())):
        raise wrong("a checksum is not 8 hexadecimal digits")
    return FileSums(
        value["bytes"],
        int(value["crc32"], 16),
        int(value["header"], 16) if "header" in value else None,
        {key: int(text, 16) for key, text in tensors.items()},
    )
