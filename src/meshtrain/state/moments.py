"""The state of an optimizer as plain data: moments by parameter name, numbers, and the options of its groups.

It works for every optimizer whose tensors have the shape of their parameter (AdamW, SGD, RAdam, ...), besides 0-d ones
and numbers. Nothing is made to be filled later: a state that does not exist yet is absent, and stays so (a dummy step
would count as one).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.errors import ContractError, Refused
from meshtrain.parallel.layout import ParamLayout
from meshtrain.state.strict_json import shown

Named = Iterable[tuple[ParamLayout, nn.Parameter]]


@dataclass
class OptimizerState:
    """What an optimizer knows, on this rank."""

    kind: str
    """Name of its class."""
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Kind of moment ("exp_avg") -> parameter name -> the local tensor."""
    numbers: dict[str, dict[str, float | int | bool]] = field(default_factory=dict)
    """Kind of number ("step") -> parameter name -> its value."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Kind of number -> dtype, where it is held as a 0-d tensor."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Options of each group; "params" lists names."""

    def record(self) -> dict[str, Any]:
        """All but the moments' values, as JSON. A number that is the same for all parameters is written once."""
        return {
            "kind": self.kind,
            "moments": {kind: _by_dtype(held) for kind, held in sorted(self.moments.items())},
            "numbers": {kind: _folded(held) for kind, held in sorted(self.numbers.items())},
            "number_dtypes": dict(sorted(self.dtypes.items())),
            "groups": self.groups,
        }


def capture(optimizer: torch.optim.Optimizer, named: Named) -> OptimizerState:
    """What the optimizer knows of these parameters; the tensors are its own, not copies.

    Raises ContractError for a parameter that the model does not have, and for a state that is neither of its
    parameter's shape nor a number.
    """
    layouts = {parameter: layout for layout, parameter in named}
    found = OptimizerState(type(optimizer).__name__)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in layouts:
                raise ContractError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that the model does not have. Build "
                    "the optimizer on this model, after parallelize: adamw(model, lr=...)"
                )
        options = {name: _plain(name, value) for name, value in group.items() if name != "params"}
        found.groups.append({**options, "params": [layouts[parameter].name for parameter in group["params"]]})
    for parameter, layout in layouts.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            _sort_in(found, kind, value, parameter, layout)
    return found


def restore(optimizer: torch.optim.Optimizer, named: Named, record: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Give the optimizer the state that a record describes; return its moments' local tensors, to be filled.

    The state that it had is dropped. Options of the groups are restored too (the learning rate among them).

    Raises Refused when the record is of another kind of optimizer, or of other groups of parameters.
    """
    named = list(named)
    parameters = {layout.name: parameter for layout, parameter in named}
    layouts = {parameter: layout for layout, parameter in named}
    if record["kind"] != type(optimizer).__name__:
        raise Refused(
            f"the checkpoint holds the state of {shown(str(record['kind']))}, this optimizer is {type(optimizer).__name__}. "
            "Build the same kind, or start anew from the checkpoint's weights with load_pretrained"
        )
    _restore_groups(optimizer, layouts, record["groups"])
    known = {name for group in record["groups"] for name in group["params"]}
    optimizer.state.clear()
    on_device = {p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    moments: dict[str, dict[str, Tensor]] = {}
    for kind, by_dtype in record["moments"].items():
        for dtype, names in by_dtype.items():
            for name in names:
                if name not in known:
                    raise Refused(
                        f"the checkpoint has {shown(kind)} of {shown(name)}, which no group of its optimizer holds"
                    )
                value = torch.zeros_like(parameters[name].detach(), dtype=getattr(torch, dtype))
                optimizer.state[parameters[name]][kind] = value
                moments.setdefault(kind, {})[name] = local_of(value)
    for kind, held in record["numbers"].items():
        dtype = record["number_dtypes"].get(kind)
        for name, number in _unfolded(held).items():
            parameter = parameters[name]
            if dtype is None:
                optimizer.state[parameter][kind] = number
                continue
            device = local_of(parameter).device if parameter in on_device else torch.device("cpu")
            optimizer.state[parameter][kind] = torch.tensor(number, dtype=getattr(torch, dtype), device=device)
    return moments


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    tensor = tensor.detach()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _sort_in(found: OptimizerState, kind: str, value: Any, parameter: nn.Parameter, layout: ParamLayout) -> None:
    if isinstance(value, Tensor) and value.shape == parameter.shape and not (value.dim() == 0 and kind == "step"):
        local = local_of(value)
        if local.shape != local_of(parameter).shape:
            raise ContractError(
                f"{kind} of '{layout.name}' is {list(local.shape)} on this rank where the parameter is "
                f"{list(local_of(parameter).shape)}: it is not cut as its parameter is. Make it with torch.zeros_like(parameter)"
            )
        found.moments.setdefault(kind, {})[layout.name] = local
    elif isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0 and not isinstance(value, DTensor):
        found.numbers.setdefault(kind, {})[layout.name] = value.item()
        found.dtypes[kind] = str(value.dtype).removeprefix("torch.")
    elif isinstance(value, bool | int | float):
        found.numbers.setdefault(kind, {})[layout.name] = value
    elif value is not None:
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ContractError(
            f"{found.kind} keeps {kind!r} of '{layout.name}' ({list(layout.shape)}) as {what}, which a checkpoint cannot hold: "
            "it takes tensors of the parameter's shape, and numbers. Use an elementwise optimizer such as adamw(model, lr=...)"
        )


def _restore_groups(
    optimizer: torch.optim.Optimizer, layouts: Mapping[nn.Parameter, ParamLayout], groups: list[dict[str, Any]]
) -> None:
    saved = {frozenset(group["params"]): group for group in groups}
    for number, group in enumerate(optimizer.param_groups):
        names = frozenset(layouts[parameter].name for parameter in group["params"])
        if names not in saved:
            before = {name for held in saved for name in held}
            lost, new = sorted(before - names), sorted(names - before)
            example = (
                f"{new[0]!r} is new in it" if new else f"{lost[0]!r} is not in it" if lost else "it is cut otherwise"
            )
            raise Refused(
                f"group {number} of the optimizer is none of those in the checkpoint: {example}. Freeze the same parameters, "
                "and make the same groups"
            )
        group.update(
            {name: _untupled(group.get(name), value) for name, value in saved[names].items() if name != "params"}
        )


def _untupled(like: Any, value: Any) -> Any:
    """JSON has lists only, and optimizers compare tuples."""
    if isinstance(like, Tensor):
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return tuple(value) if isinstance(like, tuple) else value


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, tuple | list) and all(isinstance(item, bool | int | float) for item in value):
        return list(value)
    if value is None or isinstance(value, bool | int | float | str):
        if isinstance(value, float) and not math.isfinite(value):
            raise ContractError(f"option {name!r} of the optimizer is {value}: a checkpoint holds finite numbers only")
        return value
    raise ContractError(f"option {name!r} of the optimizer is a {type(value).__name__}, which a checkpoint cannot hold")


def _by_dtype(held: Mapping[str, Tensor]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for name, tensor in sorted(held.items()):
        result.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(name)
    return result


def _folded(held: Mapping[str, Any]) -> dict[str, Any]:
    values = set(held.values())
    if len(values) == 1:
        return {"all": next(iter(values)), "of": sorted(held)}
    return {"each": dict(sorted(held.items()))}


def _unfolded(held: Mapping[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(held["of"], held["all"]) if "all" in held else dict(held["each"])
