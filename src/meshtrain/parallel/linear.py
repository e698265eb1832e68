"""Styles of linear modules that hold one matrix: column and row, and whole attention heads. Fused ones are in packed."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast

from torch import Tensor, nn

from ..errors import Refused
from .arguments import COUNT, NOT_FUSED
from .style import Cut, Forward, Scope, Site, Style, check_nonempty, check_own_forward, check_plain_parameters

FUSED_NAMES = frozenset(
    [
        "qkv",
        "qkv_proj",
        "c_attn",
        "wqkv",
        "query_key_value",
        "in_proj_qkv",
        "kv_proj",
        "gate_up_proj",
        "gate_up",
        "w13",
        "w1_w3",
        "fc1_gate",
    ]
)
"""Last path segments that usually name several matrices fused into one."""


def matrix_dims(module: nn.Module, path: str, style: str) -> tuple[int, int]:
    """(output dim, input dim) of a module's weight."""
    if isinstance(module, nn.Linear):
        check_plain_parameters(module, path, style)
        return 0, 1
    raise Refused(
        f"'{path}' is a {type(module).__name__}, and {style} cuts the matrix of an nn.Linear. Use replicate() or "
        "sequence() for it, or a style of your own (subclass meshtrain.parallel.Style)"
    )


def weight_size(module: nn.Module, dim: int) -> int:
    """Length of a dim of a module's weight."""
    return module.get_parameter("weight").shape[dim]


@dataclass
class Column(Style):
    """Cut the output dim of a linear module (Shoeybi et al., "Megatron-LM", 2019): stream -> [..., out / tp].

    Sizes that tp does not divide are cut unevenly, which a row() behind it understands.
    """

    name = "column"
    rules = {"fused": NOT_FUSED}

    _: KW_ONLY
    fused: Literal[False] | None = None
    """False says that a weight with a name like qkv_proj really is one matrix."""

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        out_dim, _ = matrix_dims(module, path, str(self))
        if scope.sizes.tp > 1 and self.fused is None and path.rpartition(".")[2].lower() in FUSED_NAMES:
            raise Refused(
                f"'{path}' looks like several matrices fused into one, and {self} would give rank 0 all of the first. "
                "Use packed_column(parts=2) or packed_column(heads=(...)), or column(fused=False) if it is one matrix"
            )
        self.check(module, path, scope, weight_size(module, out_dim))
        return self.cuts(module, path, scope, out_dim)

    def check(self, module: nn.Module, path: str, scope: Scope, size: int) -> None:
        check_nonempty(size, "the output size", path, scope.sizes.tp)

    def cuts(self, module: nn.Module, path: str, scope: Scope, out_dim: int) -> dict[str, Cut]:
        return column_cuts(module, out_dim)

    def forward(self, site: Site) -> Forward:
        return column_forward(site)


def column_cuts(module: nn.Module, out_dim: int, parts: tuple[int, ...] = ()) -> dict[str, Cut]:
    cuts = {"weight": Cut(out_dim, parts)}
    if module.bias is not None:
        cuts["bias"] = Cut(0, parts)
    return cuts


def column_forward(site: Site) -> Forward:
    """The module's own forward, on the whole of what the stream holds."""
    tp, path, run = site.tp, site.path, site.run

    @site.input_first
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return run(tp.enter(x, path), *args, **kwargs)

    return forward


@dataclass
class Heads(Column):
    """A column() that never cuts an attention head: stream -> [..., heads / tp * head_dim].

    Key and value projections name the query heads that share theirs (Ainslie et al., "GQA", 2023). When tp exceeds
    their number, the weight is replicated, each tp rank computes the one head that its query heads read, and the
    gradient is summed over tp.
    """

    name = "heads"
    rules = {**Column.rules, "count": COUNT, "shared_by": COUNT.or_none()}

    count: int | str
    """Number of heads, or the attribute of the model's config that holds it."""
    shared_by: int | str | None = None
    """For keys and values: the number of query heads, or the attribute that holds it."""

    def check(self, module: nn.Module, path: str, scope: Scope, size: int) -> None:
        heads, tp = scope.count(self.count, path), scope.sizes.tp
        if size % heads:
            raise Refused(
                f"'{path}': its output size {size} is not a multiple of its {heads} heads. Correct the number of heads "
                f"in the config or in the plan ({self})"
            )
        queries = heads if self.shared_by is None else scope.count(self.shared_by, path)
        if queries % heads:
            raise Refused(
                f"'{path}': {queries} query heads cannot share {heads} key and value heads evenly. Correct the config"
            )
        valid = [n for n in range(1, queries + 1) if queries % n == 0 and (heads % n == 0 or n % heads == 0)]
        if tp not in valid:
            what = f"{heads} heads" if self.shared_by is None else f"{heads} heads shared by {queries} query heads"
            raise Refused(f"'{path}': tp {tp} would cut a head of its {what}. tp can be {', '.join(map(str, valid))}")

    def replicated(self, path: str, scope: Scope) -> bool:
        return scope.sizes.tp > scope.count(self.count, path)

    def cuts(self, module: nn.Module, path: str, scope: Scope, out_dim: int) -> dict[str, Cut]:
        if not self.replicated(path, scope):
            return super().cuts(module, path, scope, out_dim)
        return {name: Cut(None, gradient="partial") for name in column_cuts(module, out_dim)}

    def forward(self, site: Site) -> Forward:
        if not self.replicated(site.path, site.scope):
            return super().forward(site)
        tp, path, module, run = site.tp, site.path, site.module, site.original
        out_dim, _ = matrix_dims(module, path, str(self))
        heads = site.scope.count(self.count, path)
        width = weight_size(module, out_dim) // heads
        start = tp.axis.index * heads // tp.axis.size * width

        @site.input_first
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            whole = tp.enter(x, path)
            parameters = module._parameters
            before = dict(parameters)
            held: dict[str, Any] = cast("dict[str, Any]", parameters)
            try:
                for name, parameter in before.items():
                    if parameter is not None:
                        held[name] = tp.local(parameter, path).narrow(out_dim if name == "weight" else 0, start, width)
                return run(whole, *args, **kwargs)
            finally:
                parameters.update(before)

        return forward


@dataclass
class Row(Style):
    """Cut the input dim of a linear module: [..., in / tp] -> stream. The terms of the tp ranks are summed (and, with
    sequence parallelism, scattered) before the bias is added once."""

    name = "row"

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        _, in_dim = matrix_dims(module, path, str(self))
        check_nonempty(weight_size(module, in_dim), "the input size", path, scope.sizes.tp)
        return row_cuts(module, path, scope, str(self), in_dim)

    def forward(self, site: Site) -> Forward:
        return row_forward(site)


def row_cuts(
    module: nn.Module, path: str, scope: Scope, style: str, in_dim: int, parts: tuple[int, ...] = ()
) -> dict[str, Cut]:
    check_own_forward(module, nn.Linear, path, style)
    cuts = {"weight": Cut(in_dim, parts)}
    if module.bias is not None:
        cuts["bias"] = Cut(None, gradient=scope.stream_gradient)
    return cuts


def row_forward(site: Site) -> Forward:
    """The module's own forward without its bias, summed over tp; then the bias."""
    tp, path, run = site.tp, site.path, site.original
    parameters = cast("dict[str, Any]", site.module._parameters)

    @site.input_first
    def forward(x: Tensor) -> Tensor:
        weight, bias = parameters["weight"], parameters.get("bias")
        parameters["weight"] = tp.local(weight, path)
        if bias is not None:
            parameters["bias"] = None
        try:
            out = tp.leave(run(x))
        finally:
            parameters["weight"] = weight
            if bias is not None:
                parameters["bias"] = bias
        return out if bias is None else out + tp.local(bias, path)

    return forward
