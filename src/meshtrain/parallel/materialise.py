"""Memory and first values for the parameters of a model that was built on the meta device: this rank's shards only."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import Refused
from . import guards
from .context import local_tensor
from .init import fill, rules
from .layout import ParamLayout
from .state import find_state, shard_of


def initialise(model: nn.Module, *, seed: int = 0, device: str | torch.device | None = None) -> nn.Module:
    """Give every parameter its initial value: a function of `seed`, its name and the position in it, with the same bits
    on every mesh. A rank makes what it keeps, and nothing else.

    The distributions are the model's own `initial_value(name)` (Normal, Uniform or Constant), else those of torch's
    modules. Works on a parallelized model and, for one process, on any other. Raises Refused for a parameter without a
    rule, and for buffers on the meta device that nothing has computed.
    """
    allocate(model, device)
    rule = rules(model)
    if (state := find_state(model)) is None:
        for name, parameter in model.named_parameters():
            layout = ParamLayout.whole(name, tuple(parameter.shape), parameter.dtype)
            fill(parameter.data, layout, 0, 0, rule(name), seed)
        return model
    dp, tp = state.coordinate
    for layout, parameter in state.parameters():
        fill(shard_of(parameter, layout), layout, dp, tp, rule(layout.name), seed)
    return model


def allocate(model: nn.Module, device: str | torch.device | None = None) -> None:
    """Allocate what is on the meta device: this rank's shards, one tensor for all names of a tie, and no values.

    Not `to_empty`, which gives each name of a tie a parameter of its own. Buffers on meta are computed by their module's
    `reset_buffers()`; a module without that method is refused, since its buffers would hold garbage.
    """
    state = find_state(model)
    if state is not None:
        state.reshard()  # values go into the shards, not into what FSDP gathered from them
    target = torch.device(device or (state.mesh.device_type if state else "cpu"))
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and local_tensor(parameter).is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = _allocated(parameter, target)
                    guards.mark_stale(
                        [parameter],
                        "it was built before the parameters had values; build it after initialise() or load_pretrained()",
                    )
                module._parameters[name] = made[id(parameter)]
    for path, module in model.named_modules():
        lost = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not lost:
            continue
        reset = getattr(module, "reset_buffers", None)
        if reset is None:
            raise Refused(
                f"the buffer '{path}.{lost[0]}' is on the meta device, and nothing can compute its values. Give {type(module).__name__} "
                "a method reset_buffers() that does, or build its buffers on a real device"
            )
        for name in lost:
            module._buffers[name] = torch.empty_like(cast(Tensor, module._buffers[name]), device=target)
            if cast(Tensor, module._buffers[name]).is_floating_point():
                cast(Tensor, module._buffers[name]).fill_(torch.nan)
        reset()
        for name in lost:
            buffer = getattr(module, name)
            if buffer.is_meta or (buffer.is_floating_point() and bool(buffer.isnan().any())):
                raise Refused(
                    f"{type(module).__name__}.reset_buffers() did not compute all of the buffer '{path}.{name}'"
                )


def _allocated(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    shard = torch.empty_like(parameter._local_tensor, device=device)
    spec = parameter._spec
    distributed = DTensor.from_local(
        shard, spec.mesh, spec.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(distributed, parameter.requires_grad)
