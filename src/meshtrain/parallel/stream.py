"""Styles of modules that tp does not cut: position-wise ones on the stream, and ones that every tp rank runs whole."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import Refused
from .arguments import GRADIENT, SWITCH
from .context import TensorParallel
from .style import Cut, Forward, Gradient, Scope, Site, Style


def whole_cuts(module: nn.Module, path: str, gradient: Gradient, recurse: bool = True) -> dict[str, Cut]:
    """No cut, for the parameters of a module and of all modules below it; `recurse` False: for its own ones only."""
    names = [name for name, _ in module.named_parameters(recurse=recurse)]
    if not recurse and not names:
        raise Refused(
            f"'{path}' has no parameter of its own, which is all that an entry with recurse=False is for. Drop the entry, or "
            "leave recurse out"
        )
    return {name: Cut(None, gradient=gradient) for name in names}


@dataclass
class Sequence(Style):
    """A position-wise module on the stream (norms, dropout) and all modules below it: stream -> stream. With sequence
    parallelism every rank sees its positions only, and the gradients of its parameters are summed over tp."""

    name = "sequence"
    rules = {"gather_output": SWITCH, "recurse": SWITCH}

    gather_output: bool = False
    """End the stream behind it: the output is whole on every tp rank."""
    _: KW_ONLY
    recurse: bool = True
    """False: only for parameters that the module itself owns, such as the scale of a residual branch; the modules below
    it have entries of their own, and what it takes and returns need not be the stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gather_output and not self.recurse:
            raise Refused(
                f"{self} would end the stream behind a module that it does not cover. Give gather_output=True to the "
                "module below it that comes last on the stream"
            )

    @property
    def covers_below(self) -> bool:  # type: ignore[override]
        return self.recurse

    @property
    def ends_stream(self) -> bool:  # type: ignore[override]
        return self.gather_output

    def differs_over_tp(self, tp: TensorParallel) -> bool:
        return tp.sequence_parallel

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        return whole_cuts(module, path, scope.stream_gradient, self.recurse)

    def forward(self, site: Site) -> Forward:
        tp, path, run, gather_output = site.tp, site.path, site.run, self.gather_output
        if not self.recurse:
            return run

        @site.input_first
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tp.sequence_parallel:
                tp.expect_shard(x, path)
            out = run(x, *args, **kwargs)
            return tp.end(out, path) if gather_output else out

        return forward


@dataclass
class Scatter(Style):
    """A module that every tp rank runs whole, and whose output joins the stream (learned positions, a vision tower)."""

    name = "scatter"

    begins_stream = True
    covers_below = True

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        return whole_cuts(module, path, scope.stream_gradient)

    def forward(self, site: Site) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            return site.tp.begin_whole(site.run(*args, **kwargs))

        return forward


@dataclass
class Replicated(Style):
    """A module, and all below it, that every tp rank runs and holds whole."""

    name = "replicate"
    rules = {"gradient": GRADIENT, "recurse": SWITCH}

    gradient: Gradient = "whole"
    """"partial" when each tp rank feeds it other data (a norm of the heads that the rank has): the gradients of its
    parameters are then summed over tp."""
    _: KW_ONLY
    recurse: bool = True
    """False: only for parameters that the module itself owns; the modules below it have entries of their own."""

    @property
    def covers_below(self) -> bool:  # type: ignore[override]
        return self.recurse

    def differs_over_tp(self, tp: TensorParallel) -> bool:
        return self.gradient == "partial"

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        return whole_cuts(module, path, self.gradient, self.recurse)

    def forward(self, site: Site) -> Forward:
        return site.run
