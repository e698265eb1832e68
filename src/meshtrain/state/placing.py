"""How the ranks' bytes get into the files of a new directory: each rank writes its own, or rank 0 writes what the others send."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from meshtrain.parallel.layout import MeshSizes
from meshtrain.state.publish import named_errors
from meshtrain.state.sums import Sums
from meshtrain.state.team import Team
from meshtrain.state.transfer import Staging, pieces, stage, sum_piece, sum_shard, write_piece, write_shard
from meshtrain.state.writer import Part, attempt


def write_own(
    parts: Sequence[Part], coordinate: tuple[int, int], folder: Path, staging: Staging, sums: Sums | None = None
) -> None:
    """Write this coordinate's bytes into the files of `folder`, make them durable, and sum them up.

    While the disk takes one file, its bytes are summed and the next file is written. They are summed from memory once
    more, not from what was written, so that bytes that changed on the way do not fit their sum.
    """
    under_way: list[Future[None]] = []
    with ThreadPoolExecutor(1, "meshtrain-fsync") as disk:
        for part, name, keys, starts in _own_files(parts, coordinate):
            path = folder / name
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                with named_errors(path):
                    for key in keys:
                        spec = part.plan.specs[key]
                        local, dtype = part.shards[spec.name], part.plan.dtypes[key]
                        write_shard(descriptor, starts[key], spec, coordinate, local, dtype, staging)
            except BaseException:
                os.close(descriptor)
                raise
            under_way.append(disk.submit(_sync_and_close, descriptor, path))
            if sums is not None:
                for key in keys:
                    spec, total = part.plan.specs[key], sums.of(path, starts[key])
                    sum_shard(spec, coordinate, part.shards[spec.name], part.plan.dtypes[key], staging, total)
            if len(under_way) > 1:  # as many descriptors are open
                under_way.pop(0).result()
        for each in under_way:
            each.result()


def _sync_and_close(descriptor: int, path: Path) -> None:
    with named_errors(path):
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _own_files(parts: Sequence[Part], coordinate: tuple[int, int]) -> list[tuple[Part, str, list[str], dict[str, int]]]:
    """(part, file, keys, starts) of each file of which a coordinate writes something."""
    return [
        (part, file.name, keys, file.starts)
        for part in parts
        for file in part.plan.files
        if (keys := [key for key in file.starts if part.plan.specs[key].writes(*coordinate)])
    ]


def relay_to_first(
    part: Part,
    sizes: MeshSizes,
    folder: Path,
    team: Team,
    staging: Staging,
    sums: Sums | None = None,
) -> None:
    """Send every piece to rank 0, which writes it: for file systems that not all ranks see. Collective.

    A rank that fails goes on sending or receiving, since the others wait for it; the failure is shared after
    each file.
    """
    plan, shards = part
    for file in plan.files:
        error: Exception | None = None
        descriptor = -1
        if team.rank == 0:
            try:
                descriptor = os.open(folder / file.name, os.O_WRONLY | os.O_CLOEXEC)
            except OSError as failure:
                error = failure
        try:
            for key, start in file.starts.items():
                spec, dtype = plan.specs[key], plan.dtypes[key]
                for owner, coordinate in enumerate(sizes.coordinates()):
                    if not spec.writes(*coordinate) or team.rank not in (0, owner):
                        continue
                    for block in spec.blocks(*coordinate):
                        for piece in pieces(block, staging.nbytes // dtype.itemsize):
                            if team.rank == owner and error is None:
                                local = shards[spec.name].detach().reshape(spec.local_shape(*coordinate) or (1,))
                                error = attempt(stage, spec.name, local[piece.local], dtype, staging)
                                if sums is not None and error is None:
                                    sum_piece(
                                        spec, piece, dtype, staging, sums.of(folder / file.name, file.starts[key])
                                    )
                            data = staging.tensor(dtype, piece.shape).view(-1).view(torch.uint8)
                            if owner != 0 and team.rank == owner:
                                team.send_to_first(data)
                            elif owner != 0:
                                team.receive(data, owner)
                            if team.rank == 0 and error is None:
                                error = attempt(write_piece, descriptor, start, spec, piece, dtype, staging)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        team.agree(error)
