"""Checks that resolve makes of a plan once the cuts of all parameters are known, and what it says of uncovered ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from ..errors import Refused
from . import dropout
from .layout import MeshSizes, ParamLayout
from .patterns import folded, within
from .plan import ParallelPlan
from .styles import Style

if TYPE_CHECKING:
    from .resolve import Entry


def check_tie(plan: ParallelPlan, one: ParamLayout, other: ParamLayout) -> None:
    names = f"'{one.name}' and '{other.name}' are one (tied) parameter"
    if one.unit != other.unit:
        place = [f"the unit '{unit}'" if unit else "the root" for unit in (one.unit, other.unit)]
        raise Refused(
            f"{plan.source}: {names}, but lie in {place[0]} and {place[1]}: FSDP would give each its own copy. Leave both to "
            "the root, or make a module that holds both the unit"
        )
    if (one.tp_dim, one.parts, one.tp_gradient) != (other.tp_dim, other.parts, other.tp_gradient):
        raise Refused(
            f"{plan.source}: {names}, but their entries '{one.entry}' and '{other.entry}' cut it differently (dim {one.tp_dim}, "
            f"{one.tp_gradient} gradient; dim {other.tp_dim}, {other.tp_gradient} gradient). Use styles that agree, such as "
            "embedding() and head(), or replicate() for both"
        )


def check_units_hold_something(plan: ParallelPlan, units: tuple[str, ...], layouts: list[ParamLayout]) -> None:
    owners = {layout.unit for layout in layouts}
    for unit in units:
        if unit not in owners:
            raise Refused(
                f"{plan.source}: the unit '{unit}' has no parameter of its own (it has none, or units inside it took all). Leave "
                "it out of `units`"
            )


def check_dtypes(layouts: list[ParamLayout]) -> None:
    """Refuse what FSDP would refuse at the first forward, deep inside."""
    firsts: dict[str, ParamLayout] = {}
    for layout in layouts:
        if layout.requires_grad and (first := firsts.setdefault(layout.unit, layout)).dtype != layout.dtype:
            place = f"the unit '{layout.unit}'" if layout.unit else "the root unit"
            raise Refused(
                f"'{first.name}' is {first.dtype} and '{layout.name}' is {layout.dtype}, both in {place}, and FSDP gathers and "
                "reduces trainable parameters of one dtype together. Convert the model, model.float(), and compute in a lower "
                "precision with parallelize(..., param_dtype=torch.bfloat16)"
            )


def check_dropout(plan: ParallelPlan, model: nn.Module, entries: Mapping[str, Entry], sizes: MeshSizes) -> None:
    """Refuse dropout that no entry covers: it would draw from each rank's own generator."""
    for path, module in model.named_modules():
        if isinstance(module, dropout.OTHERS) and module.p > 0 and sizes.world > 1:
            raise Refused(
                f"'{path}' is a {type(module).__name__} with p={module.p}, whose mask would come from each rank's own generator. Use "
                "nn.Dropout, whose masks meshtrain makes right on any mesh, or p=0"
            )
        if isinstance(module, dropout.MODULES) and module.p > 0 and sizes.world > 1:
            if not any(
                isinstance(e.style, Style) and (path == styled or (e.style.covers_below and within(path, styled)))
                for styled, e in entries.items()
            ):
                raise Refused(
                    f"{plan.source} does not cover '{path}', a dropout with p={module.p}: ranks would draw the same mask where "
                    f"they must differ, or other ones where they must agree. Add '{folded(path)}': sequence() between the "
                    "blocks, replicate() on what every tp rank holds whole, or replicate(gradient='partial') on what tp cuts"
                )


def uncovered(plan: ParallelPlan, model: nn.Module, missing: Sequence[str]) -> str:
    """The message for parameters that no entry covers, with entries that would."""
    modules = dict(model.named_modules())
    streams = any(isinstance(style, Style) and style.begins_stream for style in plan.styles.values())
    suggestions: dict[str, str] = {}
    for name in missing:
        owner = name.rpartition(".")[0]
        suggestions.setdefault(folded(owner), _suggested(modules[owner], streams))
    shown = ", ".join(f"'{name}'" for name in missing[:4]) + (
        f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    )
    lines = "; ".join(f"{pattern!r}: {style}" for pattern, style in list(suggestions.items())[:4])
    return (
        f"{plan.source} covers no {'parameter' if len(missing) == 1 else 'parameters'} {shown}. Every parameter needs an entry, "
        f"or its gradient would silently miss its reduction over tp. Add, for instance, {lines}"
    )


def _suggested(module: nn.Module, streams: bool) -> str:
    """A style for the parameters that a module owns."""
    kind = type(module).__name__
    if "Norm" in kind:
        return "sequence()" if streams else "replicate()"
    if isinstance(module, nn.Linear | nn.Embedding):
        first = "column(), row()" if isinstance(module, nn.Linear) else "embedding()"
        return f"{first} or replicate()"
    if not any(True for child in module.children() for _ in child.parameters()):
        return "replicate()"
    # Entries for the modules below it stand beside this one.
    whole = "replicate(recurse=False)"
    return f"sequence(recurse=False) if it is used between the blocks, else {whole}" if streams else whole
