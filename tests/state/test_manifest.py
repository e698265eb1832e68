"""The manifest: what it says of files, that it guards itself, and that it believes nothing it should not."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from meshtrain.errors import Damaged, Refused
from meshtrain.state.manifest import MANIFEST, FileSums, Manifest, read_manifest, sums_of_tensors

GOOD = Manifest(
    {
        "model.safetensors": FileSums(20, 1, 2, {"a": 3, "größe": 0xFFFFFFFF}),
        "config.json": FileSums(0, 0),
        "training/state.json": FileSums(7, 0xABCDEF),
    }
)


def write(folder: Path, content: bytes) -> Path:
    path = folder / MANIFEST
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def guarded(content: dict[str, Any]) -> bytes:
    """A manifest with any content, under a right checksum."""
    rest = b" " + json.dumps(content).lstrip("{").encode()
    return b'{"crc32": "' + f"{zlib.crc32(rest):08x}".encode() + b'",' + rest


def described(files: Any, **more: Any) -> dict[str, Any]:
    return {"format": "meshtrain checkpoint", "version": 1, "files": files, **more}


def test_it_comes_back_as_it_was_and_is_plain_json(tmp_path: Path) -> None:
    write(tmp_path, GOOD.to_bytes())
    assert read_manifest(tmp_path) == GOOD
    raw = GOOD.to_bytes()
    content = json.loads(raw)
    assert content["files"]["model.safetensors"] == {
        "bytes": 20, "crc32": "00000001", "header": "00000002", "tensors": {"a": "00000003", "größe": "ffffffff"},
    }  # fmt: skip
    # As docs/checkpoints.md tells other tools to check it.
    assert raw.startswith(b'{"crc32": "')
    assert raw[11:19].decode() == content["crc32"] == f"{zlib.crc32(raw[21:]):08x}"


def test_without_one_there_is_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


def test_a_flipped_bit_in_any_byte_is_found(tmp_path: Path) -> None:
    raw = bytearray(GOOD.to_bytes())
    path = write(tmp_path, raw)
    for position in range(len(raw)):
        raw[position] ^= 1 << position % 8
        path.write_bytes(raw)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            read_manifest(tmp_path)
        raw[position] ^= 1 << position % 8


@pytest.mark.parametrize("length", [0, 1, 10, 19, 20, 21, 60])
def test_a_truncated_one_is_damaged(tmp_path: Path, length: int) -> None:
    write(tmp_path, GOOD.to_bytes()[:length])
    with pytest.raises(Damaged):
        read_manifest(tmp_path)


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "another"}, {"version": None}])
def test_that_of_another_version_is_refused_but_not_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, guarded({**described({}), **change}))
    with pytest.raises(Refused, match="version of meshtrain that wrote it") as error:
        read_manifest(tmp_path)
    assert not isinstance(error.value, Damaged), "to go back to an older checkpoint would lose work"


@pytest.mark.parametrize(
    "name",
    [
        "../a",
        "/etc/passwd",
        "a/b",
        "training/a/b",
        "",
        "training/",
        ".",
        "..",
        "training/..",
        "a\0b",
        "a\nb",
        "training//a",
    ],
)
def test_names_that_lead_elsewhere_are_not_believed(tmp_path: Path, name: str) -> None:
    write(tmp_path, guarded(described({name: {"bytes": 1, "crc32": "00000000"}})))
    with pytest.raises(Damaged, match="no name of a file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        3, [], None, {}, {"bytes": 1}, {"bytes": -1, "crc32": "00000000"}, {"bytes": 2**63, "crc32": "00000000"},
        {"bytes": True, "crc32": "00000000"}, {"bytes": 1.0, "crc32": "00000000"}, {"bytes": 1, "crc32": "0"},
        {"bytes": 1, "crc32": "0000000G"}, {"bytes": 1, "crc32": "ABCDEF00"}, {"bytes": 1, "crc32": 0},
        {"bytes": 1, "crc32": "00000000", "header": None}, {"bytes": 1, "crc32": "00000000", "tensors": []},
        {"bytes": 1, "crc32": "00000000", "tensors": {"a": 1}},
    ],
)  # fmt: skip
def test_entries_of_another_kind_are_not_believed(tmp_path: Path, entry: Any) -> None:
    write(tmp_path, guarded(described({"config.json": entry})))
    with pytest.raises(Damaged, match=r"config\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("files", [[], None, "a"])
def test_a_list_of_files_is_needed(tmp_path: Path, files: Any) -> None:
    write(tmp_path, guarded(described(files)))
    with pytest.raises(Damaged, match="field files"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "folder", "device"]
)
def test_what_is_no_file_is_not_read(tmp_path: Path, make: Any) -> None:
    path = write(tmp_path, b"")
    path.unlink()
    make(path)
    with pytest.raises(Damaged):
        read_manifest(tmp_path)


def test_the_sums_of_a_file_of_tensors_are_those_of_its_bytes() -> None:
    head, tensors = b"\x10\0\0\0\0\0\0\0{ the header     ", {"a": b"abc", "empty": b"", "b": b"defgh"}
    found = sums_of_tensors(head, {key: (crc32(data), len(data)) for key, data in tensors.items()})
    whole = head + b"".join(tensors.values())
    assert (found.bytes, found.crc32, found.header) == (len(whole), zlib.crc32(whole), zlib.crc32(head))
    assert found.tensors == {key: zlib.crc32(data) for key, data in tensors.items()}
    assert list(found.tensors) == ["a", "empty", "b"]
