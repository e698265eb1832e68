"""The safetensors files of a directory one by one: headers that nobody has read yet, and the bytes of tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshtrain.errors import Refused
from meshtrain.state.checksum import combined
from meshtrain.state.folder import WEIGHTS, regular_inside
from meshtrain.state.header import TensorEntry, read_header
from meshtrain.state.manifest import MANIFEST, FileSums
from meshtrain.state.names import GENERATORS
from meshtrain.state.verify_findings import Report
from meshtrain.state.verify_sums import wrong_sum


def check_tensors(
    folder: Path,
    names: list[str],
    read: Sequence[Mapping[str, TensorEntry]],
    sums: Mapping[str, FileSums] | None,
    report: Report,
    *,
    full: bool,
) -> None:
    """Every safetensors file that was not read yet, and with `full` the bytes of all that count."""
    held: dict[str, int] = {}
    for entries in read:
        for entry in entries.values():
            name = entry.file.relative_to(folder).as_posix()
            held[name] = held.get(name, 0) + 1
    for name in names:
        if not name.endswith(".safetensors") or os.path.isdir(folder / name):
            continue
        if name not in held and sums is None and name not in (WEIGHTS, GENERATORS):
            report.add("warning", name, "is named by no index, so that it is not read as a part of the model")
        if name not in held or full:
            try:
                entries = read_header(regular_inside(folder, name))
            except (Refused, OSError) as error:
                if not report.damaged(name):  # whoever read it before has told
                    report.add_error("damaged", error)
                continue
            held[name] = len(entries)
            if full and (sums is None or name in sums):
                with report.noting("damaged", name):
                    read_bytes(folder / name, name, entries, sums[name] if sums is not None else None, report)
    report.files, report.tensors = len(held), sum(held.values())


def read_bytes(
    path: Path, name: str, entries: Mapping[str, TensorEntry], sums: FileSums | None, report: Report
) -> None:
    """Every byte of the tensors of one file."""
    from meshtrain.state.verify_values import scan

    parts, same = [], True
    listed = sums is not None
    if sums is not None and sums.header is None:  # its content was summed as a whole
        sums = None
    for found in scan(path, entries):
        report.bytes_read += found.nbytes
        parts.append((found.crc32, found.nbytes))
        if sums is not None and sums.tensors.get(found.key) != found.crc32:
            same = False
            report.add("damaged", name, wrong_sum(found.crc32, sums.tensors.get(found.key)), found.key)
        if found.nan or found.infinite:
            among = math.prod(entries[found.key].shape)
            report.add(
                "wrong", name, f"holds {found.nan} NaN and {found.infinite} infinities among {among} numbers", found.key
            )
        if found.unwritten and not listed:
            what = f"{found.unwritten} of its {found.nbytes} bytes were never written (the file has a hole there)"
            report.add("warning", name, what, found.key)
    if sums is None:
        return
    for key in sorted(sums.tensors.keys() - entries.keys()):
        same = False
        report.add("damaged", name, f"is missing, though {MANIFEST} lists it", key)
    if same:
        head = sums.bytes - sum(nbytes for _, nbytes in parts)
        if combined([(sums.header or 0, head), *parts]) != sums.crc32:
            report.add("damaged", MANIFEST, f"contradicts itself about {name}: its parts do not sum to the whole")
