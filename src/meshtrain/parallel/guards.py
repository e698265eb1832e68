"""Guards of the contract: misuse that would train silently wrong is detected, and refused with an explanation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ContractError
from .context import STALE, TensorParallel, local_tensor
from .init import hash_bits
from .objects import gather_values

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensors: Sequence[Any]) -> Tensor:
    """A 31-bit hash of the contents of tensors, fp64 scalar. Costs one pass over them."""
    total: Tensor | None = None
    for tensor in tensors:
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.numel() and not tensor.is_meta:
            flat = tensor.detach().contiguous().view(-1)
            flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
            bits = (flat if flat.dtype == torch.bool else flat.view(_BITS[flat.element_size()])).long()
            weights = _weights(bits.numel(), bits.device)
            value = (bits * weights).sum()
            total = value if total is None else total * 31 + value
    if total is None:
        device = next((t.device for t in tensors if isinstance(t, Tensor) and not t.is_meta), "cpu")
        return torch.zeros((), dtype=torch.float64, device=device)
    return ((total >> 20) & (2**31 - 1)).double()


_WEIGHTS: dict[str, Tensor] = {}


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd pseudo-random int64 factors, kept for the longest batch so far."""
    held = _WEIGHTS.get(str(device))
    if held is None or held.numel() < count:
        held = _WEIGHTS[str(device)] = hash_bits(1, torch.arange(count, device=device)) | 1
    return held[:count]


class PeerCheck:
    """Finds tp peers that were given different batches, without a collective of its own.

    The tp ranks of one dp coordinate contribute their hash with factors that add up to zero (tp - 1, -1, -1, ...); the
    number rides along with the scalars that a step reduces anyway, and is zero, exactly, when all peers agree.
    """

    def __init__(self, tp_index: int, tp_size: int) -> None:
        self.factor = tp_size - 1 if tp_index == 0 else -1
        self.hash = torch.zeros((), dtype=torch.float64)

    def see(self, inputs: Sequence[Any]) -> None:
        """Take the inputs of one forward pass in training."""
        self.hash = torch.remainder(self.hash * 31 + fingerprint(inputs), 2.0**31)

    def contribution(self) -> Tensor:
        """This rank's term of the sum; starts afresh."""
        value, self.hash = self.hash * self.factor, torch.zeros((), dtype=torch.float64)
        return value

    @staticmethod
    def check(total: float) -> None:
        """Raise unless the sum over all ranks is zero."""
        if total != 0:
            raise ContractError(
                "the ranks of a tp group were given different batches since the last step: they hold parts of one model, and "
                "must all read the same samples. Choose the samples by the dp coordinate, mesh['dp'].get_local_rank(), never "
                "by the global rank. No weight was changed by this step"
            )


def check_equal_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a model whose real (not meta) parameters or buffers differ between ranks. Collective over the world."""
    if mesh.size() == 1:
        return
    names, hashes = [], []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_meta:
            names.append(name)
            hashes.append(fingerprint([tensor]))
    mine = torch.stack(hashes).cpu() if hashes else torch.zeros(0, dtype=torch.float64)
    everyone = gather_values((names, mine.tolist()))
    for rank, (their_names, theirs) in enumerate(everyone):
        first_names, first = everyone[0]
        if their_names != first_names:
            raise ContractError(
                f"the models of ranks 0 and {rank} have different parameters: build the same model on all ranks"
            )
        for name, one, other in zip(their_names, first, theirs, strict=True):
            if one != other:
                raise ContractError(
                    f"'{name}' has other values on rank {rank} than on rank 0. Sharding broadcasts nothing, so the model would "
                    "be a patchwork. Seed every rank alike, load the same weights, or build the model on the meta device and "
                    "call initialise(model, seed=...)"
                )


def check_replicas(shards: Mapping[str, Tensor], coordinate: tuple[int, int]) -> None:
    """Refuse tp peers whose copies of a parameter differ. Collective over the world.

    shards: of the parameters that every tp rank holds whole, by name. coordinate: this rank's (dp, tp).
    """
    hashes = torch.stack([fingerprint([shard]) for shard in shards.values()]).tolist() if shards else []
    everyone = gather_values((coordinate, hashes))
    firsts = {dp: theirs for (dp, tp), theirs in everyone if tp == 0}
    for rank, ((dp, tp), theirs) in enumerate(everyone):
        for name, one, other in zip(shards, firsts[dp], theirs, strict=True):
            if one != other:
                raise ContractError(
                    f"tp rank {tp} of dp rank {dp} (rank {rank}) holds another copy of '{name}' than its peers: it was given another "
                    "gradient, or changed by hand on one rank. Go on from a checkpoint, and report how it came about"
                )


def mark_stale(parameters: Iterable[nn.Parameter], why: str) -> None:
    """Remember that these parameters of a model are about to be replaced."""
    for parameter in parameters:
        parameter.__dict__[STALE] = why
    _watch_optimizers()


_watching: list[Any] = []


def _watch_optimizers() -> None:
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_check_optimizer))


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    kind = type(optimizer).__name__
    scaled = _called_by_grad_scaler()
    whole_matrix = any(name in kind.lower() for name in WHOLE_MATRIX)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if whole_matrix and parameter.numel() != local_tensor(parameter).numel():
                raise ContractError(
                    f"{kind} computes on whole matrices, but would see this rank's shard of one of shape {list(parameter.shape)}: "
                    "its update would depend on the mesh. Use an element-wise optimizer, such as meshtrain's adamw(model, ...)"
                )
            if (
                scaled
                and isinstance(parameter, DTensor)
                and parameter.device_mesh.shape[-1] > 1
                and parameter.device_mesh.ndim > 1
            ):
                raise ContractError(
                    "torch's GradScaler shares over dp, but not over tp, that a gradient overflowed: one tp rank would skip the step "
                    "that its peers take. Use bfloat16, which needs no loss scaling: parallelize(..., param_dtype=torch.bfloat16)"
                )
            why = parameter.__dict__.get(STALE)
            if why is not None:
                raise ContractError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that its step would not train: {why}"
                )


def _called_by_grad_scaler() -> bool:
    """Whether an enabled GradScaler makes this optimizer step: it leaves no other trace on the optimizer."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.amp.grad_scaler":
        frame = frame.f_back
    return frame is not None and bool(getattr(frame.f_locals.get("self"), "_enabled", False))


WHOLE_MATRIX = ("muon", "shampoo", "soap", "kfac", "galore")
"""Parts of the names of optimizers whose update of an element depends on the whole matrix."""


def guard_root(model: nn.Module, tp: TensorParallel) -> None:
    """Refuse a root forward that did not come through `model(...)`, where FSDP gathers the parameters, and say what to do
    about one that mixes DTensors and local tensors."""
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not tp.inside:
            raise ContractError(
                f"{type(model).__name__}.forward() was called directly, around the hooks in which FSDP gathers the parameters. "
                "Call model(...) instead; another entry point must be registered with "
                "torch.distributed.fsdp.register_fsdp_forward_method(model, 'name')"
            )
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise ContractError(
                "a parameter was used outside of the forward of the module that owns it, or in a hook, where it is a DTensor, "
                "and the activations are not: F.linear(x, embed.weight) does that. For an output layer on the embedding's weight make "
                "an nn.Linear with the style head(), and tie the two (lm_head.weight = embed.weight); for a parameter that the "
                "model or a block owns itself, give that module an entry with recurse=False"
            ) from error

    model.forward = forward


def refuse_double_backward(units: Iterable[nn.Module]) -> None:
    """Refuse, before it changes anything, a backward pass that is itself to be differentiated: FSDP frees and reduces in
    it what the second one would need, and collectives are not recorded."""
    for unit in units:
        state = cast(Any, unit)._get_fsdp_state()
        state._pre_backward = _first_order(state._pre_backward)


def _first_order(pre_backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ContractError(
                "a backward pass through the model was asked for with create_graph=True (a gradient penalty, or another second "
                "derivative), which FSDP and the tp collectives cannot differentiate. Use a penalty of first order: finite "
                "differences of the loss, or of the outputs, at two inputs"
            )
        return pre_backward(gradient)

    return run
