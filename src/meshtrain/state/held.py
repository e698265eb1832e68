"""What this process holds of a model, parallelized or plain, as plain data; and the files that follow from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshtrain.errors import ContractError
from meshtrain.parallel.layout import MeshSizes, ParamLayout
from meshtrain.parallel.state import state_of
from meshtrain.state.hf_files import hf_config, hf_generation_config, settle_keys, with_dtype
from meshtrain.state.specs import TensorSpec, canonical, layouts_of_plain, persistent_buffers, specs_of
from meshtrain.state.team import Team
from meshtrain.state.writer import Part, check_shards, json_bytes, plan_save


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


@dataclass(frozen=True)
class Description:
    """What a model is besides its values: as it was when asked, whatever becomes of the model since."""

    specs: Sequence[TensorSpec]
    config: dict[str, Any] | None
    """The content of config.json, but for the dtype."""
    generation: dict[str, Any] | None
    """The content of generation_config.json."""


def describe(held: Held, model: nn.Module, generation_config: Any) -> Description:
    """What this model is. Raises ContractError for a config that JSON cannot hold."""
    specs, config = settle_keys(specs_of(held.layouts, held.buffers), hf_config(model), model)
    return Description(specs, copy.deepcopy(config), copy.deepcopy(hf_generation_config(model, generation_config)))


def model_part(
    held: Held, model: Description, dtype: torch.dtype | None, max_shard_size: int | str
) -> tuple[Part, dict[str, bytes]]:
    """The tensors of a model as they will be written, and config.json and generation_config.json. Raises ContractError."""
    check_shards(model.specs, held.shards, held.coordinate)
    plan = plan_save(model.specs, dtype, max_shard_size)
    texts: dict[str, bytes] = {}
    if model.config is not None:
        texts["config.json"] = json_bytes(with_dtype(model.config, plan.main_dtype()))
    if model.generation is not None:
        texts["generation_config.json"] = json_bytes(model.generation)
    return Part(plan, held.shards), texts
