"""resolve: a plan, a model and the sizes of a mesh -> layouts. Every check of a plan is made here (some stand in checks).

Nothing is allocated or communicated: the model may be on the meta device, and the mesh need not exist. Whatever later
stages would trip over is refused here, by name, with the way out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..errors import Refused
from .checks import check_dropout, check_dtypes, check_tie, check_units_hold_something, uncovered
from .layout import MeshSizes, ParamLayout
from .patterns import folded, matches, missed, within
from .plan import ParallelPlan
from .stock import check_stock_streams, stock_cuts
from .style import Cut, Scope, Style, layout_of

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Entry:
    """A plan entry on one module."""

    pattern: str
    style: ParallelStyle
    cuts: Mapping[str, Cut]
    """Name relative to the module -> cut."""


@dataclass(frozen=True)
class Resolved:
    """A plan held against a model on a mesh of given sizes. Applying, previewing and all state read this."""

    plan: ParallelPlan
    scope: Scope
    entries: Mapping[str, Entry]
    """Module path -> its entry, in the order of the model."""
    layouts: tuple[ParamLayout, ...]
    units: tuple[str, ...]
    """Module paths of the FSDP units, inner ones first; the root is not among them."""
    ties: tuple[tuple[str, ...], ...]
    """Names that are one and the same parameter."""
    loss_parallel: bool

    @property
    def sizes(self) -> MeshSizes:
        return self.scope.sizes

    @property
    def sequence_parallel(self) -> bool:
        return self.scope.sequence_parallel

    def __getitem__(self, name: str) -> ParamLayout:
        """The layout of a parameter, by any of its names."""
        for layout in self.layouts:
            if name in layout.names:
                return layout
        raise KeyError(name)

    def __str__(self) -> str:
        rows: dict[tuple[str, ...], int] = defaultdict(int)
        for layout in self.layouts:
            row = (
                folded(layout.name),
                str(list(layout.shape)),
                layout.cut,
                str(list(layout.local_shape(0, 0))),
                layout.entry or "''",
            )
            rows[row] += 1
        table: list[tuple[str, ...]] = [("parameter", "shape", "cut", "at (0, 0)", "entry", "")]
        table += [(*row, f"x{count}" if count > 1 else "") for row, count in rows.items()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
        )


def resolve(
    plan: ParallelPlan,
    model: nn.Module,
    sizes: MeshSizes | tuple[int, int],
    *,
    sequence_parallel: bool | None = None,
    loss_parallel: bool = True,
) -> Resolved:
    """Hold `plan` against `model` on a (dp, tp) mesh of `sizes`.

    sequence_parallel: None turns it on where the plan says where the stream begins and ends (embedding() or scatter(),
    and head() or sequence(gather_output=True)); True refuses a plan that does not.

    Raises Refused, naming the module, the value, the rule and the way out.
    """
    sizes = MeshSizes(*sizes)
    if min(sizes) < 1:
        raise Refused(f"a mesh of dp {sizes.dp} x tp {sizes.tp} has no ranks: both sizes must be at least 1")
    styles = [style for style in plan.styles.values() if isinstance(style, Style)]
    whole_stream = any(s.begins_stream for s in styles) and any(s.ends_stream for s in styles)
    if sequence_parallel and sizes.tp > 1 and not whole_stream:
        raise Refused(
            f"{plan.source} cannot be used with sequence parallelism: no entry says where the sequence is cut (embedding() "
            "or scatter()), or none where it is whole again (head() or sequence(gather_output=True)). Add it, or turn "
            "sequence parallelism off"
        )
    on = sizes.tp > 1 and (whole_stream if sequence_parallel is None else sequence_parallel)
    scope = Scope(getattr(model, "config", None), sizes, on)
    entries = _entries(plan, model, scope)
    check_stock_streams(plan.source, entries, on)
    units = _units(plan, model, entries)
    check_dropout(plan, model, entries, sizes)
    layouts, ties = _layouts(plan, model, entries, units, sizes)
    return Resolved(plan, scope, entries, layouts, units, ties, loss_parallel and sizes.tp > 1)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> module; the root has the path ""."""
    return dict(model.named_modules())


def _select(pattern: str, modules: Mapping[str, nn.Module], what: str, plan: ParallelPlan) -> list[str]:
    """The paths that a pattern matches; at least one."""
    found = [path for path in modules if (path == pattern if pattern == "" else path and matches(pattern, path))]
    if not found:
        owner, _, leaf = pattern.rpartition(".")
        named = [
            name
            for path, module in modules.items()
            if (matches(owner, path) if owner else not path)
            for name, _ in module.named_parameters(recurse=False)
        ]
        if any(matches(leaf, name) for name in named):
            hint = f"; it names a parameter, and a plan names modules: write '{owner}'"
            hint += "" if owner else ": replicate(recurse=False), for the parameters that the model itself owns"
        else:
            hint = missed(pattern, [path for path in modules if path], type(modules[""]).__name__)
        raise Refused(
            f"{plan.source}: the {what} '{pattern}' matches no module of the {type(modules['']).__name__}{hint}"
        )
    return found


def _entries(plan: ParallelPlan, model: nn.Module, scope: Scope) -> dict[str, Entry]:
    modules = _modules(model)
    chosen: dict[str, str] = {}
    for pattern in plan.styles:
        for path in _select(pattern, modules, "entry", plan):
            if path in chosen:
                raise Refused(
                    f"{plan.source}: '{path}' is covered twice, by '{chosen[path]}' and by '{pattern}'. Make the patterns "
                    "disjoint, or drop one"
                )
            chosen[path] = pattern
    entries = {}
    for path in sorted(chosen, key=list(modules).index):
        style = plan.styles[chosen[path]]
        if isinstance(modules[path], CONTAINERS):
            raise Refused(
                f"{plan.source}: '{path}' is a {type(modules[path]).__name__}, which has no forward of its own for a style to "
                f"change. Name the modules in it: '{path}.*'"
            )
        label = path or type(model).__name__
        cuts = (
            style.cover(modules[path], label, scope)
            if isinstance(style, Style)
            else stock_cuts(style, modules[path], label, scope)
        )
        entries[path] = Entry(chosen[path], style, cuts)
    return entries


def _units(plan: ParallelPlan, model: nn.Module, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    modules = _modules(model)
    chosen: dict[str, str] = {}
    for pattern in plan.units:
        for path in _select(pattern, modules, "unit", plan):
            if path in chosen:
                raise Refused(
                    f"{plan.source}: the unit '{path}' is named twice, by '{chosen[path]}' and by '{pattern}'. Drop one"
                )
            if path == "":
                raise Refused(f"{plan.source}: the whole model is the root unit already; leave '' out of `units`")
            if isinstance(modules[path], CONTAINERS):
                raise Refused(
                    f"{plan.source}: the unit '{path}' is a {type(modules[path]).__name__}, which is never called, so FSDP would "
                    f"never gather it. Name the modules in it: '{path}.*'"
                )
            chosen[path] = pattern
    for path in chosen:
        for styled, entry in entries.items():
            if isinstance(entry.style, Style) and entry.style.covers_below and within(path, styled):
                raise Refused(
                    f"{plan.source}: the unit '{path}' lies inside '{styled}', whose style covers all that is below it. Make "
                    f"'{styled}' the unit, or give the modules below it styles of their own"
                )
    return tuple(sorted(chosen, key=lambda path: -path.count(".")))


def _unit_of(name: str, units: tuple[str, ...]) -> str:
    """The innermost unit that holds a parameter (units come inner ones first); "" is the root."""
    return next((unit for unit in units if within(name, unit)), "")


def _names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from model.named_parameters(remove_duplicate=False)


def _layouts(
    plan: ParallelPlan, model: nn.Module, entries: Mapping[str, Entry], units: tuple[str, ...], sizes: MeshSizes
) -> tuple[tuple[ParamLayout, ...], tuple[tuple[str, ...], ...]]:
    covered: dict[str, tuple[str, Entry, Cut]] = {}
    for path, entry in entries.items():
        for relative, cut in entry.cuts.items():
            name = f"{path}.{relative}" if path else relative
            if name in covered:
                raise Refused(
                    f"{plan.source}: the parameter '{name}' is covered twice, by '{covered[name][1].pattern}' and by "
                    f"'{entry.pattern}'. Drop one: sequence(), scatter() and replicate() cover all modules below theirs (with "
                    "recurse=False, the parameters of their own module only)"
                )
            covered[name] = (path, entry, cut)
    # A module that is registered in two places has one set of hooks: entries stand at its first path.
    by_parameter: dict[int, list[str]] = defaultdict(list)
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in _names(model):
        by_parameter[id(parameter)].append(name)
        parameters[id(parameter)] = parameter
    shared_modules = _shared_module_names(model)
    missing = [n for names in by_parameter.values() for n in names if n not in covered and n not in shared_modules]
    if missing:
        raise Refused(uncovered(plan, model, missing))
    layouts, ties = [], []
    for key, names in by_parameter.items():
        parameter = parameters[key]
        if parameter.ndim == 0:
            raise Refused(f"the parameter '{names[0]}' has no dims, and FSDP cuts dim 0. Make it a tensor of shape [1]")
        if not parameter.is_floating_point():
            raise Refused(
                f"the parameter '{names[0]}' is {parameter.dtype}; parameters must be floating point. Make it a buffer"
            )
        found = [(name, covered[name]) for name in names if name in covered]
        made = [
            layout_of(name, parameter, cut, sizes, unit=_unit_of(name, units), entry=entry.pattern)
            for name, (_, entry, cut) in found
        ]
        first = replace(made[0], aliases=tuple(name for name in names if name != made[0].name))
        for other in made[1:]:
            check_tie(plan, first, other)
        if len(names) > 1:
            ties.append(first.names)
        layouts.append(first)
    check_units_hold_something(plan, units, layouts)
    check_dtypes(layouts)
    return tuple(layouts), tuple(ties)


def _shared_module_names(model: nn.Module) -> set[str]:
    """Names of parameters below the second and later paths of a module that is registered more than once."""
    first = set(model.named_modules())
    again = {path: m for path, m in model.named_modules(remove_duplicate=False) if (path, m) not in first}
    return {f"{path}.{name}" for path, m in again.items() for name, _ in m.named_parameters(recurse=False)}
