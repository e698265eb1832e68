"""Whether training/state.json has the form that docs/checkpoints.md gives it, whoever wrote it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain.errors import Damaged


def check_record(state: Mapping[str, Any], path: Path) -> None:
    """Raise Damaged, naming the field, where the record cannot be used."""

    def rule(field: str, holds: bool, what: str) -> None:
        if not holds:
            raise Damaged(f"{path}: field {field} must be {what}; take another checkpoint")

    step, optimizer = state.get("step"), state.get("optimizer")
    rule("step", type(step) is int and step >= 0, "a whole number, 0 or more")
    for field in ("run", "parallel", "mesh"):
        rule(field, isinstance(state.get(field), Mapping), "an object")
    if not isinstance(optimizer, Mapping):
        raise Damaged(f"{path}: field optimizer must be an object; take another checkpoint")
    rule("optimizer.kind", isinstance(optimizer.get("kind"), str), "a text")
    moments, numbers = optimizer.get("moments"), optimizer.get("numbers")
    rule("optimizer.moments", _maps(moments, lambda held: _maps(held, _names)), "kind -> dtype -> names")
    rule("optimizer.numbers", _maps(numbers, _folded), "kind -> all and of, or each")
    dtypes = optimizer.get("number_dtypes")
    rule("optimizer.number_dtypes", _maps(dtypes, lambda dtype: isinstance(dtype, str)), "kind -> dtype")
    known = {dtype for held in (moments or {}).values() for dtype in held} | set((dtypes or {}).values())
    rule("optimizer", all(dtype in _DTYPES for dtype in known), f"in dtypes of {', '.join(sorted(_DTYPES))}")
    groups = optimizer.get("groups")
    rule(
        "optimizer.groups",
        isinstance(groups, list) and all(isinstance(g, Mapping) and _names(g.get("params")) for g in groups),
        "a list of objects with names under params",
    )


_DTYPES = {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}


def _maps(value: Any, rule: Any) -> bool:
    return isinstance(value, Mapping) and all(rule(each) for each in value.values())


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _folded(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    if "all" in value:
        return _number(value["all"]) and _names(value.get("of"))
    return _maps(value.get("each"), _number)


def _number(value: Any) -> bool:
    return isinstance(value, bool | int | float)
