"""save_pretrained and load_pretrained: a model, parallelized or plain, to and from a Hugging Face model
directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshtrain.errors import ContractError
from meshtrain.parallel.layout import MeshSizes, ParamLayout
from meshtrain.parallel.materialise import allocate
from meshtrain.parallel.state import state_of
from meshtrain.state.dtypes import parse_dtype
from meshtrain.state.filemap import parse_size
from meshtrain.state.folder import inspect_pretrained
from meshtrain.state.hf_files import (
    hf_config,
    hf_generation_config,
    main_dtype,
    settle_keys,
    with_dtype,
    write_tokenizer,
)
from meshtrain.state.publish import write_file
from meshtrain.state.reader import check_copies, digest_of, read_own
from meshtrain.state.specs import (
    TensorSpec,
    canonical,
    check_against,
    layouts_of_plain,
    persistent_buffers,
    specs_of,
)
from meshtrain.state.team import JOIN_SECONDS, Team
from meshtrain.state.transfer import Staging
from meshtrain.state.writer import (
    SavePlan,
    attempt,
    check_shards,
    json_bytes,
    plan_save,
    relay_to_first,
    write_directory,
    write_own,
)


@dataclass(frozen=True)
class Held:
    """What this process holds of a model, as plain data."""

    layouts: Sequence[ParamLayout]
    buffers: Mapping[str, Tensor]
    """Persistent buffers, whole on every rank, by canonical name."""
    shards: Mapping[str, Tensor]
    """Local tensors of parameters and buffers, by canonical name."""
    coordinate: tuple[int, int]
    sizes: MeshSizes
    team: Team


def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    generation_config: Any = None,
    join_seconds: float = JOIN_SECONDS,
) -> Path:
    """Write a model as a Hugging Face directory: safetensors, index when sharded, config, generation config,
    tokenizer.

    Collective on a parallelized model: every rank calls it with the same arguments, and writes its own bytes
    through a buffer of 4 MiB. A plain model is written by the one process that calls it. The directory
    appears complete or not at all, and replaces only an empty or a model directory. Returns its path.

    dtype: of the floating parameters in the files ("bfloat16", torch.float32 ...); None keeps each one's own.
        Buffers keep theirs.
    max_shard_size: largest file, in bytes or as "5GB", "512MiB".
    tokenizer: a directory with tokenizer files, or an object of meshtrain, transformers or tokenizers.
    generation_config: a dict or an object with to_dict(); None takes `model.generation_config` if there is
    one.
    join_seconds: how long to wait for the other ranks to make the same call.

    Raises Refused for bad arguments or a target that must not be replaced, ContractError when not every rank
    calls it or when ranks disagree, MeshtrainError on every rank when one fails to write.
    """
    wanted = parse_dtype(dtype)
    parse_size(max_shard_size)
    held = held_by(model)
    held.team.join("save_pretrained", join_seconds)
    plan: SavePlan | None = None
    texts: dict[str, bytes] = {}

    def prepare() -> None:
        nonlocal plan
        specs, config = settle_keys(specs_of(held.layouts, held.buffers), hf_config(model), model)
        check_shards(specs, held.shards, held.coordinate)
        plan = plan_save(specs, wanted, max_shard_size)
        if config is not None:
            texts["config.json"] = json_bytes(with_dtype(config, _written(plan)))
        if (generation := hf_generation_config(model, generation_config)) is not None:
            texts["generation_config.json"] = json_bytes(generation)

    held.team.agree(attempt(prepare))
    assert plan is not None
    return save_shards(plan, held, path, texts, tokenizer)


def save_shards(
    plan: SavePlan,
    held: Held,
    path: str | os.PathLike[str],
    texts: Mapping[str, bytes],
    tokenizer: Any = None,
    *,
    shared: bool | None = None,
    staging: Staging | None = None,
) -> Path:
    """The part of save_pretrained after all decisions: write the planned files, `texts` and the tokenizer.
    Collective.
    """
    staging = staging or Staging()

    def fill(folder: Path, shared: bool) -> None:
        if shared:
            write_own(plan, held.shards, held.coordinate, folder, staging)
        else:
            relay_to_first(plan, held.shards, held.sizes, folder, held.team, staging)

    def beside(folder: Path) -> None:
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder)
        for name, content in texts.items():
            write_file(folder / name, content)

    return write_directory(plan, path, fill, beside, held.team, shared=shared)


def load_pretrained(model: nn.Module, path: str | os.PathLike[str], *, join_seconds: float = JOIN_SECONDS) -> None:
    """Fill a model's parameters and persistent buffers from a Hugging Face directory or one .safetensors
    file.

    Collective on a parallelized model. Parameters on the meta device are allocated first. Each rank reads its
    own bytes only and converts them to the dtypes that the model has. Every key must fit: nothing is skipped
    or left as it was.

    Raises Refused, before any weight is touched, for files that break a rule of their format and for weights
    that do not fit the model; ContractError when not every rank calls it or ranks see different files.
    """
    allocate(model)
    held = held_by(model)
    held.team.join("load_pretrained", join_seconds)
    load_shards(held, path)


def load_shards(held: Held, path: str | os.PathLike[str], *, staging: Staging | None = None) -> Staging:
    """The part of load_pretrained that works on plain data. Collective. Returns the buffer, which counts
    the bytes read.
    """
    staging = staging or Staging()
    sources: dict[str, Any] = {}
    seen = b"\0" * 32
    specs: list[TensorSpec] = []

    def check() -> None:
        nonlocal sources, seen, specs
        entries = inspect_pretrained(path)
        sources, seen = check_against(held.layouts, entries, held.buffers), digest_of(entries)
        specs = specs_of(held.layouts, held.buffers)
        check_shards(specs, held.shards, held.coordinate)
        check_copies(specs, sources, held.coordinate, staging)

    held.team.agree(attempt(check))
    held.team.same(seen, f"the checkpoint {path}")
    held.team.agree(attempt(read_own, specs, sources, held.shards, held.coordinate, staging))
    return staging


def held_by(model: nn.Module) -> Held:
    """What this process holds of a model. Raises ContractError for one that is cut by anything but
    parallelize.
    """
    buffers = {name: _whole(name, buffer) for name, buffer in persistent_buffers(model).items()}
    try:
        state = state_of(model)
    except ContractError:
        # Not parallelized; but one that was sharded otherwise holds parts, whatever its parameters are just now.
        if any(isinstance(p, DTensor) for p in model.parameters()) or _uses_fsdp(model):
            raise
        layouts = layouts_of_plain(model)
        shards = {canonical(name): p.detach() for name, p in model.named_parameters()}
        return Held(layouts, buffers, {**shards, **buffers}, (0, 0), MeshSizes(1, 1), Team())
    ranks = state.mesh.mesh.flatten().tolist()
    if ranks != list(range(dist.get_world_size())):
        raise ContractError(
            f"the mesh of the model has ranks {ranks}; saving and loading need all {dist.get_world_size()} "
            f"ranks of the default "
            "process group, in order. Make the mesh with init_mesh"
        )
    group = state.world if state.sizes.world > 1 else None
    shards = {**state.local_shards(), **buffers}
    return Held(state.layouts, buffers, shards, state.coordinate, state.sizes, Team(group))


def _uses_fsdp(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _whole(name: str, buffer: Tensor) -> Tensor:
    if not isinstance(buffer, DTensor):
        return buffer.detach()
    if not all(placement.is_replicate() for placement in buffer.placements):
        raise ContractError(
            f"buffer {name} is cut over the mesh ({buffer.placements}); buffers have to be whole on every rank"
        )
    return buffer.to_local().detach()


def _written(plan: SavePlan) -> torch.dtype | None:
    sizes: dict[torch.dtype, int] = {}
    for key, spec in plan.specs.items():
        if spec.layout is not None:
            sizes[plan.dtypes[key]] = sizes.get(plan.dtypes[key], 0) + spec.layout.numel
    return main_dtype(sizes)
