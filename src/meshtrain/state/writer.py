"""Writing a model directory: every rank puts its own bytes into files of the final size, then the directory
appears.

Where the ranks do not share a file system, rank 0 writes what the others send it, one buffer at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshtrain.errors import ContractError
from meshtrain.state.dtypes import NAME_OF, dtype_written
from meshtrain.state.filemap import PlannedFile, digest, index_of, plan_files
from meshtrain.state.header import TensorInfo
from meshtrain.state.manifest import FileSums, sums_of_tensors
from meshtrain.state.publish import (
    check_space,
    check_target,
    fsync_files,
    named_errors,
    publish,
    temporary_directory,
    write_file,
)
from meshtrain.state.specs import TensorSpec
from meshtrain.state.sums import Sums
from meshtrain.state.team import Team


@dataclass(frozen=True)
class SavePlan:
    """Everything that a set of files follows from; equal on every rank."""

    specs: dict[str, TensorSpec]
    """By the key in the file."""
    dtypes: dict[str, torch.dtype]
    """Key -> the dtype in the file."""
    files: list[PlannedFile]
    base: str = "model"
    """What the names of the files begin with."""

    def main_dtype(self) -> torch.dtype | None:
        """The floating dtype in which most elements of parameters are written; None when there are none."""
        counts: dict[torch.dtype, int] = {}
        for key, spec in self.specs.items():
            if spec.layout is not None and self.dtypes[key].is_floating_point:
                counts[self.dtypes[key]] = counts.get(self.dtypes[key], 0) + spec.layout.numel
        return max(counts, key=lambda dtype: counts[dtype]) if counts else None

    def nbytes(self, key: str) -> int:
        """Bytes of a tensor in its file."""
        return math.prod(self.specs[key].shape) * self.dtypes[key].itemsize


class Part(NamedTuple):
    """One kind of tensors to be written: the model's, or one moment of the optimizer."""

    plan: SavePlan
    shards: Mapping[str, Tensor]
    """What this process holds, by the name of the spec."""


def plan_save(
    specs: Sequence[TensorSpec],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    base: str = "model",
) -> SavePlan:
    """Decide dtypes and files. `dtype` applies to floating parameters; buffers keep theirs, as their
    values may need it.
    """
    dtypes = {s.key: dtype_written(s.dtype, dtype if s.layout is not None else None) for s in specs}
    infos = [TensorInfo(s.key, NAME_OF[dtypes[s.key]], s.shape) for s in specs]
    return SavePlan({spec.key: spec for spec in specs}, dtypes, plan_files(infos, max_shard_size, base), base)


def check_shards(specs: Sequence[TensorSpec], shards: Mapping[str, Tensor], coordinate: tuple[int, int]) -> None:
    """Raise ContractError unless this rank holds, in memory, exactly the part of every tensor that the
    layouts give it.
    """
    for spec in specs:
        local, shape = shards.get(spec.name), spec.local_shape(*coordinate)
        # An empty shard has no rows, whatever its other dims are said to be.
        empty = local is not None and local.numel() == 0 == math.prod(shape)
        if local is None or (tuple(local.shape) != shape and not empty):
            found = "nothing" if local is None else f"shape {list(local.shape)}"
            raise ContractError(
                f"{spec.name}: its layout gives coordinate {coordinate} a part of shape {list(shape)}, the "
                f"model holds {found} "
                "there. Do not change parameters after parallelize"
            )
        if local.is_meta:
            raise ContractError(
                f"{spec.name}: is on the meta device and holds no data. Materialise the model first "
                f"(initial weights, to_empty)"
            )


def write_directory(
    plans: Sequence[SavePlan],
    target: str | os.PathLike[str],
    fill: Callable[[Path, bool], None],
    beside: Callable[[Path], None],
    team: Team,
    *,
    shared: bool | None = None,
    sums: Sums | None = None,
    seal: Callable[[Path, dict[str, FileSums]], None] = lambda folder, found: None,
    check: Callable[[Path], None] = check_target,
    published: Callable[[Path], None] = lambda target: None,
) -> Path:
    """Make the directory `target`: complete, or not at all. Collective over `team`.

    fill(folder, shared): writes the tensors into the files, which have their headers and final sizes;
        `shared` says whether every rank sees the folder.
    beside(folder): called on rank 0, first, writes the other files (config, tokenizer).
    shared: None finds out by looking for the folder from every rank.
    sums: what `fill` gathers of the checksums of what this rank writes.
    seal(folder, found): called on rank 0 when all else is written; `found` are the checksums of the files in `plans`.
    check(target): raises Refused for a target that may not be replaced.
    published(target): called on rank 0 when the directory is in its place for good.

    Raises on every rank when any rank fails (Refused for a target that may not be replaced, MeshtrainError
    with rank and cause otherwise); then nothing is left behind, and a directory that was there before is
    untouched. (Two errors can come when the directory is in its place already, and say so: its name may not be durable,
    or `published` failed.)
    """
    named, target = os.path.abspath(target), Path(os.path.realpath(target))
    files = [file for plan in plans for file in plan.files]
    team.same(digest(files, named), f"the set of files to write to {target}")
    with ExitStack() as stack:
        folder = Path()

        def begin() -> None:
            nonlocal folder
            check(target)
            folder = stack.enter_context(temporary_directory(target))
            check_space(folder, sum(file.size for file in files))
            for parent in {folder / file.name for file in files}:
                parent.parent.mkdir(exist_ok=True)
            beside(folder)
            for file in files:
                with named_errors(folder / file.name), open(folder / file.name, "xb") as handle:
                    handle.write(file.head)
                    handle.truncate(file.size)

        def finish() -> None:
            for plan in plans:
                if (index := index_of(plan.files)) is not None:
                    write_file(folder / f"{plan.base}.safetensors.index.json", json_bytes(index))
            seal(folder, found)
            fsync_files(folder)
            check(target)
            publish(folder, target)
            published(target)

        team.agree(attempt(begin) if team.rank == 0 else None)
        folder = Path(team.from_first(str(folder)))
        if shared is None:
            shared = team.all(_sees(folder))
        team.agree(attempt(fill, folder, shared))
        found = _sums_of(files, plans, sums, folder, team) if sums is not None else {}
        team.agree(attempt(finish) if team.rank == 0 else None)
    return target


def _sums_of(
    files: Sequence[PlannedFile], plans: Sequence[SavePlan], sums: Sums, folder: Path, team: Team
) -> dict[str, FileSums]:
    """The checksums of files that the ranks have written together. Collective."""
    nbytes = {(file.name, key): plan.nbytes(key) for plan in plans for file in plan.files for key in file.starts}
    places = [
        (folder / file.name, start, nbytes[file.name, key]) for file in files for key, start in file.starts.items()
    ]
    whole = iter(sums.combined(places, team))
    return {
        file.name: sums_of_tensors(file.head, {key: (next(whole), nbytes[file.name, key]) for key in file.starts})
        for file in files
    }


def _sees(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:  # raised here on one rank, it would leave the others waiting
        return False


def attempt(call: Callable[..., None], *args: Any) -> Exception | None:
    """The error that a call raises, to be shared with the other ranks before any of them raises."""
    try:
        call(*args)
    except Exception as error:
        return error
    return None


def json_bytes(value: dict[str, Any]) -> bytes:
    """JSON as transformers writes it."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"{value!r} in a config is no JSON value; make it a number, string, list or dict")
