"""TensorParallel: what the styles of one model share while it runs - the tp axis, the switches, the sequence length.

One object per parallelized model, never a global: two models on two meshes can live in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ContractError
from .collectives import (
    Axis,
    all_reduce,
    gather_sequence,
    gather_whole,
    own_shard,
    reduce_gradient,
    reduce_scatter_sequence,
    shard_length,
)

STALE = "_meshtrain_stale"
"""Attribute of a parameter that no longer is (or never was) the one to train: why, for the optimizer guard."""

_UNSHARDED = (
    "it is the gathered copy of a sharded parameter, which FSDP frees and fills again: build the optimizer right after "
    "parallelize() and initialise() or load_pretrained(), before any forward pass"
)


@dataclass
class TensorParallel:
    """The tp axis of one model. `stream` below means the activations between the styled modules: [..., seq, hidden],
    cut along seq over tp when `sequence_parallel`, else whole on every tp rank."""

    mesh: DeviceMesh
    """The one-axis mesh over tp."""
    axis: Axis
    sequence_parallel: bool = False
    loss_parallel: bool = False
    length: int | None = None
    """Length of the sequence that the model is running on; set where the stream begins."""
    seed: int = 0
    """Seed of dropout masks; the same on all ranks."""
    dp_index: int = 0
    again: bool = False
    """Whether a block is being recomputed under `recomputing`."""
    calls: int = 0
    """Dropout calls so far; with the seed, all the state that the masks have."""
    _entered: tuple[Tensor, Tensor, tuple[int | None, bool]] | None = field(default=None, repr=False)
    """What entered last, what it became, and in which state it was."""
    inside: bool = False
    """Whether the root module's forward is running."""
    recorded: bool = False
    """Whether a parameter has been read for gradients since a forward pass of the root began."""

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        *,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        seed: int = 0,
        dp_index: int = 0,
    ) -> TensorParallel:
        axis = Axis.of(mesh)
        many = axis.size > 1
        return cls(mesh, axis, sequence_parallel and many, loss_parallel and many, seed=seed, dp_index=dp_index)

    def next_call(self) -> int:
        """The number of a dropout call: the same on all ranks, and when a checkpointed block runs again."""
        if torch._C._current_graph_task_id() != -1 and not self.again:
            raise ContractError(
                "a dropout module runs inside a backward pass: a checkpoint of your own recomputes it, and would draw another mask. "
                "Use parallelize(activation_checkpointing=True), which recomputes with the masks of the first run"
            )
        self.calls += 1
        return self.calls

    def begin(self, x: Tensor) -> Tensor:
        """Start the stream from terms of a sum over tp, [..., seq, hidden] (a vocabulary-parallel embedding)."""
        self._begin(x.shape[-2])
        return self.leave(x)

    def begin_whole(self, x: Tensor) -> Tensor:
        """Start the stream from a tensor that every tp rank holds whole, [..., seq, hidden], or join it.

        One position, [..., 1, hidden], joins a longer stream as it is: it is added to every position.
        """
        if self.inside and x.shape[-2] == 1 and self.length not in (None, 1):
            return x
        self._begin(x.shape[-2])
        return own_shard(x, self.axis) if self.sequence_parallel else x

    def _begin(self, length: int) -> None:
        if self.inside and self.sequence_parallel and self.length not in (None, length):
            raise ContractError(
                f"a stream of sequence length {length} begins in a forward pass that has one of length {self.length}: with sequence "
                "parallelism all streams of a model must have one length. Turn sequence parallelism off for this model"
            )
        self.length = length

    def enter(self, x: Tensor, module: str) -> Tensor:
        """From the stream to the whole input of a module that tp splits.

        Modules that read one and the same tensor (query, key and value; gate and up) share one collective, forward and
        backward: autograd adds their gradients up before the single reduction.
        """
        if self.axis.size == 1:
            return x
        # Not by identity alone: the tensor may have changed in place, or have been read under no_grad before.
        version = None if torch.compiler.is_compiling() or x.is_inference() else x._version
        seen = (version, x.requires_grad and torch.is_grad_enabled())
        if self._entered is not None and self._entered[0] is x and self._entered[2] == seen:
            return self._entered[1]
        if self.sequence_parallel:
            whole = gather_sequence(x, self.expect_shard(x, module), self.axis)
        else:
            whole = reduce_gradient(x, self.axis)
        self._entered = (x, whole, seen)
        return whole

    def leave(self, x: Tensor) -> Tensor:
        """From terms of a sum over tp back to the stream."""
        self._entered = None
        return reduce_scatter_sequence(x, self.axis) if self.sequence_parallel else all_reduce(x, self.axis)

    def end(self, x: Tensor, module: str) -> Tensor:
        """End the stream: whole on every tp rank, for computations that each of them repeats."""
        return gather_whole(x, self.expect_shard(x, module), self.axis) if self.sequence_parallel else x

    def expect_shard(self, x: Tensor, module: str) -> int:
        """The length of the sequence of which `x` must be a shard."""
        if self.length is None or x.ndim < 2 or x.shape[-2] != shard_length(self.length, self.axis):
            raise ContractError(
                f"'{module}' got an input of shape {list(x.shape)}, but with sequence parallelism it reads a shard of the "
                f"sequence, [..., {'?' if self.length is None else shard_length(self.length, self.axis)}, hidden] "
                f"(sequence length {self.length} over tp {self.axis.size}). Something before it left the stream of "
                "sequence shards: give that module a style of the plan, or turn sequence parallelism off"
            )
        return self.length

    def local(self, parameter: Tensor, owner: str) -> Tensor:
        """What this tp rank computes with of a parameter of `owner`. Its gradient keeps the parameter's placements."""
        if not isinstance(parameter, DTensor):
            return parameter
        if parameter.device_mesh.ndim != 1:
            raise ContractError(
                f"the parameters of '{owner}' are still sharded over dp while it runs: FSDP gathers them in hooks that only "
                "run when the whole model is called. Call model(x), not model.forward(x) or a submodule of it; for another "
                "entry point, register it with torch.distributed.fsdp.register_fsdp_forward_method(model, 'name')"
            )
        if torch.compiler.is_compiling():
            return parameter.to_local()
        if STALE not in parameter.__dict__:
            parameter.__dict__[STALE] = _UNSHARDED
        if not parameter.requires_grad or not torch.is_grad_enabled():
            return parameter._local_tensor.detach()
        self.recorded = True
        return _Local.apply(parameter)

    def reset(self) -> None:
        """Forget what entered last."""
        self._entered = None

    def enter_root(self) -> None:
        """A forward pass of the whole model begins."""
        self.inside, self.length, self._entered, self.recorded = True, None, None, False

    def leave_root(self) -> None:
        """It has ended. The length stays: its backward pass may run blocks again."""
        self.inside, self._entered = False, None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a block for the first time: what it gathers is not shared with a run before it."""
        self._entered = None
        yield

    def recomputing(self, length: int | None, calls: int) -> Recomputing:
        """For running a block again as it first ran, with that sequence length and number of dropout calls."""
        return Recomputing(self, length, calls)


@dataclass
class Recomputing:
    """A context that can be entered more than once: a graph that is retained is recomputed for each backward pass."""

    tp: TensorParallel
    length: int | None
    calls: int
    _before: tuple[int | None, int] = (None, 0)

    def __enter__(self) -> None:
        tp = self.tp
        self._before = tp.length, tp.calls
        tp.length, tp.calls, tp._entered, tp.again = self.length, self.calls, None, True

    def __exit__(self, *error: object) -> None:
        (self.tp.length, self.tp.calls), self.tp._entered, self.tp.again = self._before, None, False


class _Local(torch.autograd.Function):
    """The local tensor of a gathered parameter. Its gradient goes straight to the parameter, where FSDP takes it: the
    detour over DTensor's own `to_local` costs more than a small matrix product."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.parameter = parameter
        return parameter._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        parameter = ctx.parameter
        if parameter.grad is not None:
            # Never in place: autograd may have handed the same tensor to another parameter.
            gradient = parameter.grad._local_tensor + gradient
        parameter.grad = DTensor(gradient.contiguous(), parameter._spec, requires_grad=False)


class LocalParameters:
    """Let modules see local tensors as their parameters, inside a `with`: their own forward then runs on them, unchanged."""

    def __init__(self, tp: TensorParallel, modules: tuple[tuple[str, nn.Module], ...]) -> None:
        self.tp, self.modules = tp, modules

    def __enter__(self) -> None:
        self.saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for path, module in self.modules:
            held: dict[str, Any] = module._parameters
            self.saved.append((held, dict(held)))
            for name, parameter in self.saved[-1][1].items():
                if parameter is not None:
                    held[name] = self.tp.local(parameter, path)

    def __exit__(self, *error: object) -> None:
        for held, before in self.saved:
            held.update(before)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, outside autograd: the local tensor of a DTensor, any other one itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
