"""ParallelState: what is known of a model once it is parallelized. Reading it is how the rest of meshtrain finds layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ..errors import ContractError
from . import guards
from .context import TensorParallel, local_tensor
from .gradients import PartialGradients
from .layout import MeshSizes, ParamLayout
from .resolve import Resolved
from .watch import PathCheck, Watch

_STATE = "_meshtrain_state"


@dataclass
class ParallelState:
    """What meshtrain knows of a model that it has parallelized."""

    model: nn.Module
    mesh: DeviceMesh
    resolved: Resolved
    tp: TensorParallel
    peers: guards.PeerCheck
    gradients: PartialGradients
    watch: Watch
    paths: PathCheck

    @property
    def sizes(self) -> MeshSizes:
        return self.resolved.sizes

    @property
    def layouts(self) -> tuple[ParamLayout, ...]:
        return self.resolved.layouts

    @property
    def coordinate(self) -> tuple[int, int]:
        """This rank's (dp, tp)."""
        return cast("tuple[int, int]", tuple(self.mesh.get_coordinate() or ()))

    @property
    def world(self) -> dist.ProcessGroup:
        """The group of all ranks of the mesh."""
        return cast(dist.ProcessGroup, dist.group.WORLD)

    def parameters(self) -> list[tuple[ParamLayout, nn.Parameter]]:
        """Each parameter once, sharded over (dp, tp), with its layout."""
        return [(layout, self.model.get_parameter(layout.name)) for layout in self.layouts]

    def local_shards(self) -> dict[str, Tensor]:
        """Canonical name -> this rank's shard, to read or to write in place; rows may be 0."""
        self.reshard()
        return {layout.name: shard_of(parameter, layout) for layout, parameter in self.parameters()}

    def check_replicas(self) -> None:
        """Raise ContractError, on every rank, where tp peers hold different copies of a parameter. Collective; one pass over
        the parameters that tp does not cut."""
        if self.sizes.tp > 1:
            shards = self.local_shards()
            guards.check_replicas(
                {layout.name: shards[layout.name] for layout in self.layouts if layout.tp_dim is None}, self.coordinate
            )

    def reshard(self) -> None:
        """Give back what FSDP still holds gathered (the root, after a forward pass without a backward)."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def shard_of(parameter: nn.Parameter, layout: ParamLayout) -> Tensor:
    shard = local_tensor(parameter).detach()
    if shard.is_meta:
        raise ContractError(
            f"'{layout.name}' has no values yet: call initialise(model, seed=...) or load_pretrained(model, path), or before load_checkpoint allocate(model)"
        )
    return shard


def state_of(model: nn.Module) -> ParallelState:
    """What is known of a parallelized model. Raises ContractError for any other."""
    state = find_state(model)
    if state is None:
        raise ContractError(
            f"this {type(model).__name__} was not parallelized: call parallelize(model, mesh, plan) first"
        )
    return state


def find_state(model: nn.Module) -> ParallelState | None:
    """What is known of a model, or None when it was not parallelized."""
    return cast("ParallelState | None", model.__dict__.get(_STATE))


def attach(state: ParallelState) -> None:
    """Make `state` what is known of its model."""
    state.model.__dict__[_STATE] = state
