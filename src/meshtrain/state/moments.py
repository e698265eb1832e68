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
from meshtrain.parallel.context import local_tensor
from meshtrain.parallel.layout import ParamLayout
from meshtrain.state.dtypes import NAME_OF
from meshtrain.state.strict_json import shown

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAME_OF}

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
        names = [_layout_of(parameter, layouts).name for parameter in group["params"]]
        options = {name: _plain(name, value) for name, value in group.items() if name != "params"}
        found.groups.append({**options, "params": names})
    for parameter, layout in layouts.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            _sort_in(found, kind, value, parameter, layout)
    return found


def restore(
    optimizer: torch.optim.Optimizer, named: Named, record: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]
) -> dict[str, dict[str, Tensor]]:
    """Give the optimizer the state that a record describes; return its moments' local tensors, to be filled.

    dtypes: those that the parameters had. A moment that had the dtype of its parameter has it again, whatever it is now.
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
    restored = _matched(optimizer, layouts, record["groups"])
    known = {name for group in record["groups"] for name in group["params"]}
    for group, options in restored:
        group.update(options)
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
                parameter, kept = parameters[name].detach(), getattr(torch, dtype)
                kept = parameter.dtype if kept == dtypes.get(name) else kept
                value = torch.zeros_like(parameter, dtype=kept)
                optimizer.state[parameters[name]][kind] = value
                moments.setdefault(kind, {})[name] = local_tensor(value)
    for kind, held in record["numbers"].items():
        dtype = record["number_dtypes"].get(kind)
        for name, number in _unfolded(held).items():
            parameter = parameters[name]
            if dtype is None:
                optimizer.state[parameter][kind] = number
                continue
            device = local_tensor(parameter).device if parameter in on_device else torch.device("cpu")
            optimizer.state[parameter][kind] = torch.tensor(number, dtype=_DTYPES[dtype], device=device)
    return moments


def _dtype_now(stored: str, parameter: torch.dtype) -> torch.dtype:
    """A moment in full precision follows its parameter's from fp32 to fp64 and back; one in another keeps its own."""
    dtype = _DTYPES[stored]
    return parameter if {dtype, parameter} <= {torch.float32, torch.float64} else dtype


def _sort_in(found: OptimizerState, kind: str, value: Any, parameter: nn.Parameter, layout: ParamLayout) -> None:
    if isinstance(value, Tensor) and value.shape == parameter.shape and not (value.dim() == 0 and kind == "step"):
        local = local_tensor(value)
        if local.shape != local_tensor(parameter).shape:
            raise ContractError(
                f"{kind} of '{layout.name}' is {list(local.shape)} on this rank where the parameter is "
                f"{list(local_tensor(parameter).shape)}: it is not cut as its parameter is. Make it with torch.zeros_like(parameter)"
            )
        found.moments.setdefault(kind, {})[layout.name] = local
    elif isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0 and not isinstance(value, DTensor):
        found.numbers.setdefault(kind, {})[layout.name] = _finite(f"{kind} of '{layout.name}'", value.item())
        found.dtypes[kind] = str(value.dtype).removeprefix("torch.")
    elif isinstance(value, bool | int | float):
        found.numbers.setdefault(kind, {})[layout.name] = _finite(f"{kind} of '{layout.name}'", value)
    elif value is not None:
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ContractError(
            f"{found.kind} keeps {kind!r} of '{layout.name}' ({list(layout.shape)}) as {what}, which a checkpoint cannot hold: "
            "it takes tensors of the parameter's shape, and numbers. Use an elementwise optimizer such as adamw(model, lr=...)"
        )


def _matched(
    optimizer: torch.optim.Optimizer, layouts: Mapping[nn.Parameter, ParamLayout], groups: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(group of the optimizer, what the checkpoint says of its options), where both have the same groups of parameters."""
    saved = {frozenset(group["params"]): group for group in groups}
    ours = [frozenset(_layout_of(p, layouts).name for p in group["params"]) for group in optimizer.param_groups]
    if set(saved) != set(ours):
        before, now = frozenset().union(*saved), frozenset().union(*ours)
        lost, new = sorted(before - now), sorted(now - before)
        example = (
            f"{shown(new[0])} is new in the optimizer" if new
            else f"{shown(lost[0])} is not in the optimizer" if lost
            else "the same parameters are grouped otherwise"
        )  # fmt: skip
        raise Refused(
            f"the optimizer has not the groups of parameters that the checkpoint has: {example}. Freeze the same parameters, "
            "and make the same groups"
        )
    return [
        (group, {name: _as_before(group.get(name), value) for name, value in saved[names].items() if name != "params"})
        for names, group in zip(ours, optimizer.param_groups)
    ]


def _layout_of(parameter: nn.Parameter, layouts: Mapping[nn.Parameter, ParamLayout]) -> ParamLayout:
    if parameter not in layouts:
        raise ContractError(
            f"the optimizer holds a parameter of shape {list(parameter.shape)} that the model does not have. Build "
            "the optimizer on this model, after parallelize: adamw(model, lr=...)"
        )
    return layouts[parameter]


def _as_before(like: Any, value: Any) -> Any:
    """An option of the kind that the optimizer has: JSON knows neither tuples nor tensors."""
    if isinstance(like, Tensor):
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return tuple(value) if isinstance(like, tuple) else value


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    if isinstance(value, tuple | list) and all(isinstance(item, bool | int | float) for item in value):
        return [_finite(f"option {name!r}", item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return _finite(f"option {name!r}", value)
    raise ContractError(
        f"option {name!r} of the optimizer is a {type(value).__name__}, which a checkpoint cannot hold: it takes numbers, texts "
        "and lists of numbers. Use an elementwise optimizer such as adamw(model, lr=...)"
    )


def _finite(what: str, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ContractError(f"{what} of the optimizer is {value}: a checkpoint holds finite numbers only")
    return value


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
