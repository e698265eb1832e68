"""What a style is, and how one is put on a module. The styles themselves are in linear, vocabulary and stream.

A style answers two questions. `cover` says how it cuts each parameter of a module (resolve asks it, on any process, for
any mesh); `forward` gives what the module runs instead of its own forward once its parameters are cut. Parameters
become DTensors on the tp axis, but every style computes on local tensors with explicit collectives. Styles are torch
`ParallelStyle`s: `parallelize_module` applies them.

"Stream" means the activations between styled modules: cut along the sequence with sequence parallelism, else whole.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..errors import ContractError, Refused
from . import dropout
from .arguments import MOST, Rule, check, is_number
from .context import LocalParameters, TensorParallel
from .layout import MeshSizes, ParamLayout, chunk_interval

Gradient = Literal["whole", "partial"]
Forward = Callable[..., Any]


class Cut(NamedTuple):
    """How tp cuts one parameter."""

    dim: int | None
    """The tensor dim that is cut; None: every tp rank holds the whole parameter."""
    parts: tuple[int, ...] = ()
    """Lengths along `dim` that are cut one by one; () is the whole dim at once."""
    gradient: Gradient = "whole"


@dataclass
class Scope:
    """What a style may ask about while it is resolved."""

    config: Any
    sizes: MeshSizes
    sequence_parallel: bool

    def count(self, value: int | str, path: str) -> int:
        """`value` itself, or the attribute of the model's config that it names."""
        if isinstance(value, int):
            return value
        config = self.config
        found = config.get(value) if isinstance(config, Mapping) else getattr(config, value, None)
        if not is_number(found, 1, MOST):
            raise Refused(
                f"'{path}': the plan takes the number of heads from config.{value}, which is {found!r}; it must be a whole "
                f"number, 1 to {MOST}. Give the model a `config` with that attribute, or write the number in the plan"
            )
        return cast(int, found)

    @property
    def stream_gradient(self) -> Gradient:
        return "partial" if self.sequence_parallel else "whole"


@dataclass
class Style(ParallelStyle):
    """Base of meshtrain's styles."""

    name: ClassVar[str]
    """What plans and their files call it."""
    rules: ClassVar[Mapping[str, Rule]] = {}
    """What its arguments may be."""

    def __post_init__(self) -> None:
        for argument, rule in self.rules.items():
            if isinstance(value := getattr(self, argument), list):
                setattr(self, argument, value := tuple(value))
            check(self.name, argument, value, rule)

    @abstractmethod
    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        """Parameter name, relative to the module -> its cut. Raises Refused where the style cannot apply."""

    @abstractmethod
    def forward(self, site: Site) -> Forward:
        """What `site.module` runs instead of its own forward."""

    begins_stream = False
    ends_stream = False
    covers_below = False
    """Whether it covers, besides its module, all modules below it."""

    def differs_over_tp(self, tp: TensorParallel) -> bool:
        """Whether the tp ranks see different activations in the module (which its dropout masks must follow)."""
        return False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """For torch's own `parallelize_module(model, mesh, {"path": style})`: without sequence parallelism."""
        scope = Scope(getattr(module, "config", None), MeshSizes(1, device_mesh.size()), sequence_parallel=False)
        cuts = self.cover(module, type(module).__name__, scope)
        if device_mesh.size() > 1 and any(cut.gradient == "partial" for cut in cuts.values()):
            raise Refused(
                f"{self} on a {type(module).__name__}: its gradients are terms of a sum over tp, which only parallelize() arranges. Use "
                "meshtrain's parallelize() in place of torch's parallelize_module()"
            )
        layouts = {
            name: layout_of(name, module.get_parameter(name), cut, scope.sizes, unit="", entry="")
            for name, cut in cuts.items()
        }
        return Applied(self, type(module).__name__, TensorParallel.of(device_mesh), scope, layouts)._apply(
            module, device_mesh
        )

    def __str__(self) -> str:
        arguments = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        )
        return f"{getattr(self, 'name', type(self).__name__)}({arguments})"


def layout_of(name: str, parameter: nn.Parameter, cut: Cut, sizes: MeshSizes, *, unit: str, entry: str) -> ParamLayout:
    """The layout that a cut gives to a parameter."""
    shape = tuple(parameter.shape)
    parts = () if cut.dim is None else (cut.parts or (shape[cut.dim],))
    return ParamLayout(
        name, (), shape, parameter.dtype, parameter.requires_grad, sizes, cut.dim, parts, cut.gradient, unit, entry
    )


@dataclass
class Site:
    """One module that a style is installed on."""

    module: nn.Module
    path: str
    tp: TensorParallel
    scope: Scope
    layouts: dict[str, ParamLayout]
    original: Forward
    within: tuple[tuple[str, nn.Module], ...]
    """The modules whose parameters the style covers, with their paths."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on local parameters."""
        with LocalParameters(self.tp, self.within):
            return self.original(*args, **kwargs)

    def input_first(self, forward: Forward) -> Forward:
        """A decorator: `forward` takes the module's input first, which callers may give by the name that the module's
        own forward has for it."""
        own = list(inspect.signature(self.original).parameters.values())
        name = own[0].name if own and own[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else None
        path = self.path

        def run(*args: Any, **kwargs: Any) -> Any:
            if args:
                return forward(*args, **kwargs)
            if name not in kwargs:
                raise ContractError(
                    f"'{path}' was called without its input{f' ({name})' if name else ''}, which its style works on: it got "
                    f"{', '.join(kwargs) or 'nothing'}. Pass the input as the first argument"
                )
            return forward(kwargs.pop(name), **kwargs)

        return run


@dataclass
class Applied(ParallelStyle):
    """A style on one module of one model: what `parallelize_module` is handed."""

    style: Style
    path: str
    tp: TensorParallel
    scope: Scope
    layouts: dict[str, ParamLayout]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, layout in self.layouts.items():
            owner_path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(owner_path)
            owner._parameters[leaf] = shard_over_tp(cast(nn.Parameter, owner._parameters[leaf]), layout, device_mesh)
        owners = dict.fromkeys(name.rpartition(".")[0] for name in self.layouts)
        within = tuple((f"{self.path}.{name}" if name else self.path, module.get_submodule(name)) for name in owners)
        differs = self.style.differs_over_tp
        for name, submodule in module.named_modules():
            if isinstance(submodule, dropout.MODULES) and (self.style.covers_below or not name):
                dropout.install(submodule, f"{self.path}.{name}", self.tp, lambda: differs(self.tp))
        site = Site(module, self.path, self.tp, self.scope, self.layouts, module.forward, within)
        module.forward = self.style.forward(site)
        return module


def shard_over_tp(parameter: nn.Parameter, layout: ParamLayout, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's tp shard of a parameter that every rank holds whole (or on meta), as a DTensor parameter.

    Not `distribute_tensor`: it would broadcast what each rank has already, and cannot cut a fused weight.
    """
    dim = layout.tp_dim
    if dim is None:
        shard, placement = parameter.detach(), cast(Placement, Replicate())
    else:
        segments = layout.tp_segments(mesh.get_local_rank())
        pieces = [parameter.detach().narrow(dim, start, stop - start) for start, stop in segments]
        shard, placement = torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous(), Shard(dim)
        if shard.data_ptr() == parameter.data_ptr() and not shard.is_meta and mesh.size() > 1:
            shard = shard.clone()  # a view would keep the whole parameter alive
    distributed = DTensor.from_local(
        shard, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)


def check_nonempty(size: int, what: str, path: str, tp: int) -> None:
    """Refuse a cut that leaves a tp rank without anything."""
    if size == 0:
        raise Refused(
            f"'{path}': {what} is 0, and there is nothing to cut. Use replicate() for it, or leave the module out"
        )
    start, stop = chunk_interval(size, tp, tp - 1)
    if start >= stop:
        largest = max(n for n in range(1, tp) if (lambda c: c[0] < c[1])(chunk_interval(size, n, n - 1)))
        raise Refused(
            f"'{path}': {what} is {size}, and tp {tp} would leave rank {tp - 1} of the tp axis an empty shard "
            f"(chunks of {-(-size // tp)}). Use tp {largest} or less, or replicate() for it"
        )


def check_plain_parameters(module: nn.Module, path: str, style: str) -> None:
    """Refuse a module whose weight or bias is computed from other parameters, which a style would have to cut."""
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None and module._parameters.get(name) is None:
            others = [other for other, _ in module.named_parameters() if other not in ("weight", "bias")]
            raise Refused(
                f"'{path}' has no parameter '{name}': weight_norm, spectral_norm, pruning or another parametrization computes it "
                f"from {', '.join(others) or 'something else'}, and {style} cuts the parameter itself. Use replicate() for it "
                "(and torch.nn.utils.parametrizations, not the older hooks), or take the parametrization off"
            )


def check_own_forward(module: nn.Module, kind: type[nn.Module], path: str, style: str) -> None:
    """Refuse a subclass with a forward of its own, which a style that computes in its place would drop."""
    if type(module).forward is not kind.forward:
        raise Refused(
            f"'{path}' is a {type(module).__name__}, whose forward is not that of nn.{kind.__name__}; {style} computes in its place, "
            "and would drop what it adds. Move that into the module around it, or use a style of your own"
        )
