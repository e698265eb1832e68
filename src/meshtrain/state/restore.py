"""load_checkpoint: model, optimizer and generators as they were, on any mesh, every byte checked on the way.

Each rank reads its own part only, and sums it up; one exchange of the sums shows whether every tensor is what was written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshtrain.errors import Damaged
from meshtrain.parallel.state import find_state
from meshtrain.state.checkpoint import Checkpoint, inspect_checkpoint
from meshtrain.state.content import moment_specs, named_parameters
from meshtrain.state.folder import inspect_pretrained
from meshtrain.state.generators import restore_generators
from meshtrain.state.header import TensorEntry, read_header
from meshtrain.state.held import held_by
from meshtrain.state.moments import restore
from meshtrain.state.names import MOMENT, OTHER, STATE
from meshtrain.state.reader import Sources, check_copies, digest_of, read_own
from meshtrain.state.specs import TensorSpec, check_against, specs_of
from meshtrain.state.strict_json import shown
from meshtrain.state.sums import Sums
from meshtrain.state.team import JOIN_SECONDS
from meshtrain.state.transfer import Staging, torch_dtype
from meshtrain.state.writer import attempt, check_shards


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: str | os.PathLike[str],
    *,
    join_seconds: float = JOIN_SECONDS,
) -> Checkpoint:
    """Bring model, optimizer and generators to where they were when the checkpoint was written. Collective.

    Any mesh will do. Every rank reads its own bytes, and together they check the checksum of every tensor while they
    read. Parameters on the meta device need memory first: `allocate(model)`, before the optimizer is made. The optimizer
    must hold this model's parameters in the same groups. Generators are restored where there are as many ranks as before, and else seeded anew from the old ones.

    Raises Damaged when a file is not what was written (model and optimizer may then be partly filled: load another one,
    or stop), Refused when the checkpoint does not fit the model or the optimizer.
    """
    held = held_by(model)
    team = held.team
    team.join("load_checkpoint", join_seconds)
    staging, sums = Staging(), Sums()
    found: list[tuple[list[Any], Sources, dict[str, torch.Tensor]]] = []
    checkpoint: Checkpoint | None = None
    seen = b"\0" * 32

    def check() -> None:
        nonlocal checkpoint, seen
        checkpoint = inspect_checkpoint(path)
        entries = inspect_pretrained(path)
        specs = specs_of(held.layouts, held.buffers)
        sources = check_against(held.layouts, entries, held.buffers)
        check_shards(specs, held.shards, held.coordinate)
        found.append((specs, sources, dict(held.shards)))
        stored = _moment_entries(checkpoint)
        layouts = {layout.name: layout for layout in held.layouts}
        dtypes = {name: torch_dtype(places[0]) for name, places in sources.items()}
        for kind, tensors in restore(optimizer, named_parameters(model), checkpoint.state["optimizer"], dtypes).items():
            specs = moment_specs(kind, {name: tensor.dtype for name, tensor in tensors.items()}, layouts)
            check_shards(specs, tensors, held.coordinate)
            found.append((specs, _sources_of(checkpoint, kind, specs, stored.get(kind, {})), tensors))
        every = {f"{kind}/{key}": entry for kind, held in stored.items() for key, entry in held.items()}
        seen = digest_of({**entries, **every})

    team.agree(attempt(check))
    assert checkpoint is not None
    team.same(seen, f"the checkpoint {path}")

    def read() -> None:
        for specs, sources, shards in found:
            read_own(specs, sources, shards, held.coordinate, staging, sums)
        check_copies(found[0][0], found[0][1], held.coordinate, staging)

    team.agree(attempt(read))
    first = [sources[spec.name][0] for specs, sources, _ in found for spec in specs]
    whole = sums.combined([(entry.file, entry.offset, entry.nbytes) for entry in first], team)
    team.agree(attempt(_compare, checkpoint, first, whole))
    if (state := find_state(model)) is not None:
        state.tp.calls = int(checkpoint.state["parallel"].get("dropout_calls", 0))
    team.agree(attempt(restore_generators, checkpoint.path, team))
    return checkpoint


def _moment_entries(checkpoint: Checkpoint) -> dict[str, dict[str, TensorEntry]]:
    """Kind of moment -> parameter name -> where it is stored."""
    result: dict[str, dict[str, TensorEntry]] = {}
    for name in checkpoint.manifest.files:
        if match := MOMENT.fullmatch(name):
            result.setdefault(match[1], {}).update(read_header(checkpoint.path / name))
    return result


def _sources_of(
    checkpoint: Checkpoint, kind: str, specs: Sequence[TensorSpec], stored: Mapping[str, TensorEntry]
) -> Sources:
    for spec in specs:
        entry = stored.get(spec.name)
        if entry is None or entry.shape != spec.shape:
            what = "is missing" if entry is None else f"has shape {list(entry.shape)}, the parameter {list(spec.shape)}"
            raise Damaged(f"{checkpoint.path}: {kind} of {shown(spec.name)} {what}, though {STATE} lists it; {OTHER}")
    return {spec.name: [stored[spec.name]] for spec in specs}


def _compare(checkpoint: Checkpoint, entries: list[TensorEntry], whole: list[int]) -> None:
    """Raise Damaged when a tensor that was read is not the one that was written, naming each."""
    names = {checkpoint.path / name: name for name in checkpoint.manifest.files}
    keys = {
        (path, entry.offset): key
        for path in {entry.file for entry in entries}
        for key, entry in read_header(path).items()
        if entry.nbytes
    }
    bad = []
    for entry, total in zip(entries, whole):
        if entry.nbytes == 0:
            continue
        name, key = names.get(entry.file), keys[entry.file, entry.offset]
        if name is None or checkpoint.manifest.files[name].tensors.get(key) != total:
            bad.append(f"{shown(key)} in {entry.file.name}")
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise Damaged(
            f"{checkpoint.path}: {', '.join(bad[:4])}{more}: the bytes do not sum to what was written: damaged since; {OTHER}"
        )
