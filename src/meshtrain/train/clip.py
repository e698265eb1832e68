"""The gradient norm and clipping: one collective of a few numbers, over local shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..errors import ContractError, MeshtrainError
from ..parallel.context import local_tensor
from ..parallel.guards import PeerCheck
from ..parallel.objects import gather_values
from ..parallel.state import ParallelState, find_state
from ..parallel.watch import PathCheck


class NonFinite(MeshtrainError):
    """A loss or gradient is infinite or not a number; raised by every rank, before any weight has changed."""


class Clipped(NamedTuple):
    """What a clip found."""

    norm: Tensor
    """The norm before clipping, fp64 scalar, the same on all ranks."""
    also: Tensor
    """The sums over all ranks of the numbers that rode along, fp64."""


def clip_grad_norm_(
    model: nn.Module | Iterable[nn.Parameter],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their norm together is at most `max_norm`; return the norm before, fp64, on all ranks.

    Takes a parallelized model, or parameters of any kind (on several meshes, or plain tensors that every rank holds).
    `max_norm` may be math.inf, to measure only. Collective: one all-reduce over all ranks. For a parallelized model it
    also finds tp peers that were given different batches (ContractError).

    Raises NonFinite on every rank, with `error_if_nonfinite`, when the norm is not finite.
    """
    return clip_and_sum(model, max_norm, (), norm_type=norm_type, error_if_nonfinite=error_if_nonfinite).norm


def clip_and_sum(
    model: nn.Module | Iterable[nn.Parameter],
    max_norm: float,
    also: Sequence[Tensor],
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Clipped:
    """`clip_grad_norm_`, with other scalars summed over all ranks in the same collective."""
    if norm_type <= 0 or math.isnan(norm_type):
        raise ContractError(f"norm_type is {norm_type}; it must be positive, or math.inf for the largest element")
    if not max_norm > 0:
        raise ContractError(f"max_norm is {max_norm}; it must be positive, or math.inf to measure only")
    state = find_state(model) if isinstance(model, nn.Module) else None
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    shards = [local_tensor(gradient) for _, gradient in held]
    world = dist.get_world_size() if dist.is_initialized() else 1
    device = shards[0].device if shards else torch.device("cpu")
    powers = _powers(
        [(shard, _holders(gradient, world)) for shard, (_, gradient) in zip(shards, held)], norm_type, device
    )
    guards = [state.peers.contribution(), state.paths.contribution()] if state is not None else []
    total, sums = _reduce(powers, [*also, *guards], math.isinf(norm_type), device, world, state)
    if state is not None:
        unequal_peers, unequal_paths = sums[len(also) :].tolist()
        PathCheck.check(unequal_paths)
        PeerCheck.check(unequal_peers)
    norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise NonFinite(f"the gradient norm is {norm.item()}{_culprit(state, shards)}; no weight was changed")
    # Always a multiplication, never a branch on the value: CUDA would have to wait for it.
    if not math.isinf(max_norm) and shards:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale = torch.where(norm.isfinite(), scale, torch.ones_like(scale))  # the culprit must still be found
        if device.type != "cpu" or float(scale) < 1:
            torch._foreach_mul_(shards, scale if device.type != "cpu" else float(scale))
    return Clipped(norm, sums[: len(also)])


def _holders(gradient: Tensor, world: int) -> float:
    """How many ranks hold each element: what one rank counts must be divided by it.

    A mesh smaller than the world is taken to be repeated over the rest of it, as FSDP without a tp entry leaves it.
    """
    if not isinstance(gradient, DTensor):
        return world
    cuts = 1
    for placement, size in zip(gradient.placements, gradient.device_mesh.shape, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            cuts *= size
        elif not isinstance(placement, Replicate):
            raise ContractError(f"a gradient has the placement {placement}: reduce it before clipping")
    return world / cuts


def _powers(shards: list[tuple[Tensor, float]], norm_type: float, device: torch.device) -> Tensor:
    """This rank's share of the sum of |g|^p, or its largest |g|; fp64 scalar."""
    present = [(shard, holders) for shard, holders in shards if shard.numel()]
    if not present:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([n.double() for n in torch._foreach_norm([shard for shard, _ in present], norm_type)])
    if math.isinf(norm_type):
        return norms.max()
    holders = torch.tensor([count for _, count in present], dtype=torch.float64, device=device)
    return (norms.pow(norm_type) / holders).sum()


def _reduce(
    powers: Tensor, also: Sequence[Tensor], largest: bool, device: torch.device, world: int, state: ParallelState | None
) -> tuple[Tensor, Tensor]:
    numbers = torch.stack([powers, *(number.detach().to(device, torch.float64) for number in also)])
    if world == 1:
        return numbers[0], numbers[1:]
    # The maximum cannot share a sum: every rank's numbers are gathered, still in one collective.
    everyone = numbers.new_empty(world * len(numbers)) if largest else numbers
    work = (
        dist.all_gather_into_tensor(everyone, numbers, async_op=True)
        if largest
        else dist.all_reduce(numbers, async_op=True)
    )
    if state is not None and device.type == "cpu":
        state.watch.wait(work, "reducing the gradient norm")
    else:
        work.wait()
    if largest:
        table = everyone.view(world, -1)
        return table[:, 0].max(), table[:, 1:].sum(0)
    return numbers[0], numbers[1:]


def _culprit(state: ParallelState | None, shards: list[Tensor]) -> str:
    """Which parameter is to blame, and on which ranks. Collective; called on all ranks or none."""
    names = [layout.name for layout, p in state.parameters() if p.grad is not None] if state is not None else []
    if len(names) != len(shards):
        names = [f"parameter {index}" for index in range(len(shards))]
    mine = next((n for n, s in zip(names, shards) if s.numel() and not bool(torch.isfinite(s).all())), None)
    everyone = gather_values(mine)
    ranks = [rank for rank, name in enumerate(everyone) if name is not None]
    if not ranks:
        return " (each gradient is finite, but their norm overflows)"
    return f": the gradient of '{everyone[ranks[0]]}' is not finite on rank {', '.join(map(str, ranks))}"
