"""Styles of modules that tp does not cut: position-wise ones on the stream, and ones that every tp rank runs whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import Refused
from .context import TensorParallel
from .style import Cut, Forward, Gradient, Scope, Site, Style


@dataclass
class Sequence(Style):
    """A position-wise module on the stream (norms, dropout) and all modules below it: stream -> stream. With sequence
    parallelism every rank sees its positions only, and the gradients of its parameters are summed over tp."""

    name = "sequence"

    gather_output: bool = False
    """End the stream behind it: the output is whole on every tp rank."""

    @property
    def ends_stream(self) -> bool:  # type: ignore[override]
        return self.gather_output

    def differs_over_tp(self, tp: TensorParallel) -> bool:
        return tp.sequence_parallel

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        return {name: Cut(None, gradient=scope.stream_gradient) for name, _ in module.named_parameters()}

    def forward(self, site: Site) -> Forward:
        tp, path, run, gather_output = site.tp, site.path, site.run, self.gather_output

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

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        return {name: Cut(None, gradient=scope.stream_gradient) for name, _ in module.named_parameters()}

    def forward(self, site: Site) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            return site.tp.begin_whole(site.run(*args, **kwargs))

        return forward


@dataclass
class Replicated(Style):
    """A module, and all below it, that every tp rank runs and holds whole."""

    name = "replicate"

    gradient: Gradient = "whole"
    """"partial" when each tp rank feeds it other data (a norm of the heads that the rank has): the gradients of its
    parameters are then summed over tp."""

    def differs_over_tp(self, tp: TensorParallel) -> bool:
        return self.gradient == "partial"

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        if self.gradient not in ("whole", "partial"):
            raise Refused(f"'{path}': replicate(gradient={self.gradient!r}) must be 'whole' or 'partial'")
        return {name: Cut(None, gradient=self.gradient) for name, _ in module.named_parameters()}

    def forward(self, site: Site) -> Forward:
        return site.run


SUBTREE = (Sequence, Scatter, Replicated)
"""Styles that cover a module with all that lies below it."""
