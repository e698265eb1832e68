"""parallelize: a plan applied to a model, in one order, top to bottom.

build on meta -> resolve -> tensor parallelism -> ties -> compile -> activation checkpointing -> fully_shard -> hooks
-> initialise or load_pretrained -> optimizer
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._common_utils import collect_grad_tensors
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ..errors import ContractError, Refused
from . import guards
from .context import TensorParallel
from .fsdp_comm import ExchangeReduceScatter, WatchedAllGather, gather_ordinary_tensors
from .gradients import PartialGradients, fsdp_parameters
from .layout import MeshSizes
from .plan import ParallelPlan
from .resolve import Resolved, resolve
from .state import ParallelState, attach, find_state
from .styles import Applied, Style
from .unused import reduce_unused
from .watch import PathCheck, Watch

log = logging.getLogger("meshtrain")


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ParallelPlan,
    *,
    sequence_parallel: bool | None = None,
    loss_parallel: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    activation_checkpointing: bool = False,
    compile_backend: str | None = None,
    seed: int = 0,
) -> nn.Module:
    """Apply `plan` to `model` on a ("dp", "tp") mesh, in place. Collective: every rank calls it alike.

    The model is best built under `torch.device("meta")`; a real one must have the same values on every rank, and keeps
    them. Its parameters become DTensors over (dp, tp); the module computes with plain local tensors. As with FSDP2,
    gradients are averaged over dp.

    sequence_parallel, loss_parallel: see `resolve`.
    param_dtype: compute in another dtype than the (master) parameters have. reduce_dtype: reduce gradients over dp in this
        one (float32 when there is a param_dtype); their sums over tp are made in the dtype of the parameters.
    activation_checkpointing: recompute each unit in the backward pass. compile_backend: compile each unit with this
        torch.compile backend. seed: of dropout masks.

    Raises Refused for a plan that does not fit, before anything is changed.
    """
    if find_state(model) is not None:
        raise ContractError(f"this {type(model).__name__} is parallelized already")
    dp_mesh, tp_mesh = _axes(mesh)
    sizes = MeshSizes(dp_mesh.size(), tp_mesh.size())
    resolved = resolve(plan, model, sizes, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    guards.check_equal_weights(model, mesh)
    guards.mark_stale(
        model.parameters(),
        "it was built before parallelize() replaced the model's parameters by sharded ones; build it after",
    )
    tp = TensorParallel.of(
        tp_mesh,
        sequence_parallel=resolved.sequence_parallel,
        loss_parallel=resolved.loss_parallel,
        seed=seed,
        dp_index=dp_mesh.get_local_rank(),
    )

    _apply_styles(model, tp_mesh, resolved, tp)
    _tie(model, resolved)
    units = [model.get_submodule(path) for path in resolved.units]
    for unit in units:
        if compile_backend is not None:
            unit.forward = torch.compile(unit.forward, backend=compile_backend)
        if activation_checkpointing:
            # Around what is compiled: the contexts of a second run cannot be traced.
            unit.forward = _checkpointed(unit.forward, tp)
    reduce_dtype = reduce_dtype or (torch.float32 if param_dtype is not None else None)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    watch, paths = Watch(dp_mesh.get_group()), PathCheck(mesh.get_rank(), sizes.world)
    for name, unit in zip([*resolved.units, ""], [*units, model], strict=True):
        # The root's backward begins as soon as its forward ends: None keeps it gathered in between.
        reshard = None if unit is model and reshard_after_forward else reshard_after_forward
        fully_shard(unit, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=reshard)
        if mesh.device_type == "cpu" and sizes.dp > 1:
            cast(FSDPModule, unit).set_custom_all_gather(WatchedAllGather(watch, name))  # type: ignore[arg-type]
            cast(FSDPModule, unit).set_custom_reduce_scatter(ExchangeReduceScatter(watch, name))  # type: ignore[arg-type]
    _check_layouts(model, resolved, mesh)
    state = _install_hooks(model, mesh, resolved, tp, watch, paths)
    reduce_unused([*units, model], paths.see, state.gradients.begin)
    gather_ordinary_tensors([*units, model])
    guards.refuse_double_backward([*units, model])
    attach(state)
    log.info(
        "parallelized %s on dp %d x tp %d: %d parameters in %d units, sequence parallel %s, loss parallel %s",
        type(model).__name__, sizes.dp, sizes.tp, sum(layout.numel for layout in resolved.layouts), len(units) + 1,
        resolved.sequence_parallel, resolved.loss_parallel,
    )  # fmt: skip
    return model


def _axes(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    if mesh.mesh_dim_names != ("dp", "tp"):
        raise Refused(
            f"the mesh has the axes {mesh.mesh_dim_names}; meshtrain needs ('dp', 'tp'): use init_mesh(dp, tp)"
        )
    if mesh.size() != dist.get_world_size():
        raise Refused(
            f"the mesh has {mesh.size()} ranks, but the process group has {dist.get_world_size()}: meshtrain's mesh takes all of "
            "them. Start as many ranks as the mesh has"
        )
    return mesh["dp"], mesh["tp"]


def _apply_styles(model: nn.Module, tp_mesh: DeviceMesh, resolved: Resolved, tp: TensorParallel) -> None:
    by_name = {name: layout for layout in resolved.layouts for name in layout.names}
    for path, entry in resolved.entries.items():
        style = entry.style
        if isinstance(style, Style):
            layouts = {name: by_name[f"{path}.{name}" if path else name] for name in entry.cuts}
            style = Applied(style, path or type(model).__name__, tp, resolved.scope, layouts)
        module = model.get_submodule(path)
        # torch's styles broadcast from rank 0 by default; all ranks hold the same values already.
        parallelize_module(module, tp_mesh, style, src_data_rank=None)


def _tie(model: nn.Module, resolved: Resolved) -> None:
    """Each style made a parameter of its own for its module: point tied names at one again, before FSDP sees them."""
    for first, *others in resolved.ties:
        parameter = model.get_parameter(first)
        for name in others:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = parameter


def _checkpointed(forward: Callable[..., Any], tp: TensorParallel) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        length, calls = tp.length, tp.calls

        def contexts() -> tuple[Any, Any]:
            return tp.running(), tp.recomputing(length, calls)

        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def _check_layouts(model: nn.Module, resolved: Resolved, mesh: DeviceMesh) -> None:
    """Layouts are the one truth: what FSDP really made must agree with them."""
    dp, tp = cast("tuple[int, int]", tuple(mesh.get_coordinate() or ()))
    for layout in resolved.layouts:
        shard = cast(DTensor, model.get_parameter(layout.name)).to_local()
        if tuple(shard.shape) != layout.local_shape(dp, tp) and shard.numel():
            raise ContractError(
                f"'{layout.name}' was sharded to {list(shard.shape)} at dp {dp}, tp {tp}, but the plan says "
                f"{list(layout.local_shape(dp, tp))}. This version of torch ({torch.__version__}) cuts otherwise than meshtrain expects"
            )


def _install_hooks(
    model: nn.Module, mesh: DeviceMesh, resolved: Resolved, tp: TensorParallel, watch: Watch, paths: PathCheck
) -> ParallelState:
    partial = {layout.name for layout in resolved.layouts if layout.tp_gradient == "partial"}
    state = ParallelState(
        model,
        mesh,
        resolved,
        tp,
        guards.PeerCheck(tp.axis.index, tp.axis.size),
        PartialGradients(fsdp_parameters(model, partial), tp.axis),
        watch,
        paths,
    )

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        state.gradients.check_finished()
        tp.enter_root()
        if tp.axis.size > 1 and module.training and torch.is_grad_enabled():
            state.peers.see(tree_leaves((args, kwargs)))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        tp.leave_root()

    def done(module: nn.Module, args: Any, output: Any) -> None:
        if not collect_grad_tensors(output):
            # No backward follows. While gathered, the model shows parameters that an optimizer must not hold, and on which
            # freezing and unfreezing is lost.
            state.reshard()
            if tp.recorded and module.training and torch.is_grad_enabled():
                raise ContractError(
                    "the model computed with trainable parameters, in training mode and with gradients enabled, but returned "
                    "nothing that has a gradient. FSDP follows the backward pass from what the model returns: return the loss "
                    "(one that is kept in an attribute cannot be used), or run under torch.no_grad()"
                )

    guards.guard_root(model, tp)
    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(done)
    model.register_forward_hook(after, always_call=True)
    return state
