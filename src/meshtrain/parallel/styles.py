"""The vocabulary of plans: how one module is parallelised over tp.

A style answers two questions. `cover` says how it cuts each parameter of a module (resolve asks it, on any process, for
any mesh); `forward` gives what the module runs instead of its own forward once its parameters are cut. Parameters
become DTensors on the tp axis, but every style computes on local tensors with explicit collectives. Styles are torch
`ParallelStyle`s: `parallelize_module` applies them.

"Stream" means the activations between styled modules: cut along the sequence with sequence parallelism, else whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..errors import Refused
from . import dropout
from .context import TensorParallel, local, local_parameters
from .cross_entropy import VocabShard, linear_cross_entropy
from .collectives import gather_last
from .layout import MeshSizes, ParamLayout, chunk_interval

Gradient = Literal["whole", "partial"]
Forward = Callable[..., Any]
FUSED_NAMES = frozenset(
    "qkv qkv_proj c_attn wqkv query_key_value in_proj_qkv kv_proj gate_up_proj gate_up w13 w1_w3 fc1_gate".split()
)
"""Last path segments that usually name several matrices fused into one."""


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
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise Refused(
                f"'{path}': the plan takes the number of heads from config.{value}, which is {found!r}; it must be a "
                "positive integer. Give the model a `config` with that attribute, or write the number in the plan"
            )
        return found

    @property
    def stream_gradient(self) -> Gradient:
        return "partial" if self.sequence_parallel else "whole"


@dataclass
class Style(ParallelStyle):
    """Base of meshtrain's styles."""

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        """Parameter name, relative to the module -> its cut. Raises Refused where the style cannot apply."""
        raise NotImplementedError

    def forward(self, site: Site) -> Forward:
        """What `site.module` runs instead of its own forward."""
        raise NotImplementedError

    begins_stream = False
    ends_stream = False

    def differs_over_tp(self, tp: TensorParallel) -> bool:
        """Whether the tp ranks see different activations in the module (which its dropout masks must follow)."""
        return False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """For torch's own `parallelize_module(model, mesh, {"path": style})`: without sequence parallelism."""
        scope = Scope(getattr(module, "config", None), MeshSizes(1, device_mesh.size()), sequence_parallel=False)
        cuts = self.cover(module, type(module).__name__, scope)
        layouts = {
            name: layout_of(name, module.get_parameter(name), cut, scope.sizes, unit="", entry="")
            for name, cut in cuts.items()
        }
        return Applied(self, type(module).__name__, TensorParallel.of(device_mesh), scope, layouts)._apply(module, device_mesh)

    def to_file(self) -> str | dict[str, Any]:
        """The style as a plan file holds it: its name, or a table with its arguments."""
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
        name = next(name for name, style in STYLES.items() if style is type(self))
        return {"style": name, **arguments} if arguments else name

    def __str__(self) -> str:
        arguments = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        )
        return f"{next(name for name, style in STYLES.items() if style is type(self))}({arguments})"


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
    """The module and those below it, with their paths: all whose parameters the style covers."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on local parameters."""
        with local_parameters(self.within):
            return self.original(*args, **kwargs)


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
        within = tuple(
            (f"{self.path}.{name}" if name else self.path, submodule)
            for name, submodule in module.named_modules()
            if any(parameter is not None for parameter in submodule._parameters.values())
        )
        differs = self.style.differs_over_tp
        for name, submodule in module.named_modules():
            if isinstance(submodule, dropout.MODULES):
                dropout.install(submodule, f"{self.path}.{name}", self.tp, lambda: differs(self.tp))
        site = Site(module, self.path, self.tp, self.scope, self.layouts, module.forward, within)
        module.forward = self.style.forward(site)  # type: ignore[method-assign]
        return module


def shard_over_tp(parameter: nn.Parameter, layout: ParamLayout, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's tp shard of a parameter that every rank holds whole (or on meta), as a DTensor parameter.

    Not `distribute_tensor`: it would broadcast what each rank has already, and cannot cut a fused weight.
    """
    dim = layout.tp_dim
    if dim is None:
        shard, placement = parameter.detach(), Replicate()
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


def matrix_dims(module: nn.Module, path: str, style: str) -> tuple[int, int]:
    """(output dim, input dim) of a module's weight."""
    if isinstance(module, nn.Linear):
        return 0, 1
    if type(module).__name__ == "Conv1D" and getattr(module, "nf", None) is not None:
        return 1, 0  # transformers' GPT-2 layer stores [in, out]
    raise Refused(
        f"'{path}' is a {type(module).__name__}, and {style}() cuts the matrix of an nn.Linear. Use replicate() or "
        "sequence() for it, or a style of your own (subclass meshtrain.parallel.Style)"
    )


def check_nonempty(size: int, what: str, path: str, tp: int) -> None:
    """Refuse a cut that leaves a tp rank without anything."""
    start, stop = chunk_interval(size, tp, tp - 1)
    if start >= stop:
        largest = max(n for n in range(1, tp) if (lambda c: c[0] < c[1])(chunk_interval(size, n, n - 1)))
        raise Refused(
            f"'{path}': {what} is {size}, and tp {tp} would leave rank {tp - 1} of the tp axis an empty shard "
            f"(chunks of {-(-size // tp)}). Use tp {largest} or less, or replicate() for it"
        )


@dataclass
class Column(Style):
    """Cut the output dim of a linear module (Shoeybi et al., "Megatron-LM", 2019): stream -> [..., out / tp].

    Sizes that tp does not divide are cut unevenly, which a row() behind it understands.
    """

    fused: bool | None = None
    """False says that a weight with a name like qkv_proj really is one matrix; packed_column() is for fused ones."""

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        out_dim, _ = matrix_dims(module, path, str(self))
        if scope.sizes.tp > 1 and self.fused is not False and path.rpartition(".")[2].lower() in FUSED_NAMES:
            raise Refused(
                f"'{path}' looks like several matrices fused into one, and {self} would give rank 0 all of the first. "
                "Use packed_column(parts=2) or packed_column(heads=(...)), or column(fused=False) if it is one matrix"
            )
        self.check(module, path, scope, module.weight.shape[out_dim])  # type: ignore[index,union-attr]
        return self.cuts(module, path, scope, out_dim)

    def check(self, module: nn.Module, path: str, scope: Scope, size: int) -> None:
        check_nonempty(size, "the output size", path, scope.sizes.tp)

    def cuts(self, module: nn.Module, path: str, scope: Scope, out_dim: int) -> dict[str, Cut]:
        cuts = {"weight": Cut(out_dim)}
        if module.bias is not None:
            cuts["bias"] = Cut(0)
        return cuts

    def forward(self, site: Site) -> Forward:
        tp, path, run = site.tp, site.path, site.run

        def forward(x: Tensor) -> Tensor:
            return run(tp.enter(x, path))

        return forward


@dataclass
class Heads(Column):
    """A column() that never cuts an attention head: stream -> [..., heads / tp * head_dim].

    Key and value projections name the query heads that share theirs (Ainslie et al., "GQA", 2023). When tp exceeds
    their number, the weight is replicated, each tp rank computes the one head that its query heads read, and the
    gradient is summed over tp.
    """

    count: int | str = ""
    """Number of heads, or the attribute of the model's config that holds it."""
    shared_by: int | str | None = None
    """For keys and values: the number of query heads, or the attribute that holds it."""

    def __init__(self, count: int | str, shared_by: int | str | None = None, fused: bool | None = None) -> None:
        self.count, self.shared_by, self.fused = count, shared_by, fused

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
        return {name: Cut(None, gradient="partial") for name, _ in module.named_parameters()}

    def forward(self, site: Site) -> Forward:
        if not self.replicated(site.path, site.scope):
            return super().forward(site)
        tp, path, module, run = site.tp, site.path, site.module, site.original
        out_dim, _ = matrix_dims(module, path, str(self))
        heads = site.scope.count(self.count, path)
        width = module.weight.shape[out_dim] // heads  # type: ignore[index,union-attr]
        start = tp.axis.index * heads // tp.axis.size * width

        def forward(x: Tensor) -> Tensor:
            whole = tp.enter(x, path)
            parameters = module._parameters
            before = dict(parameters)
            held: dict[str, Any] = cast("dict[str, Any]", parameters)
            try:
                for name, parameter in before.items():
                    if parameter is not None:
                        held[name] = local(parameter, path).narrow(out_dim if name == "weight" else 0, start, width)
                return run(whole)
            finally:
                parameters.update(before)

        return forward


def _parts(parts: int, heads: tuple[int | str, ...], size: int, path: str, scope: Scope, style: Style) -> tuple[int, ...]:
    """Lengths of the fused parts of a dim of `size`."""
    tp = scope.sizes.tp
    if not heads:
        if parts < 2 or size % parts:
            raise Refused(f"'{path}': {style} cannot cut {size} into {parts} equal parts. Correct `parts` in the plan")
        check_nonempty(size // parts, "the size of a fused part", path, tp)
        return (size // parts,) * parts
    counts = [scope.count(count, path) for count in heads]
    if size % sum(counts):
        raise Refused(f"'{path}': its size {size} is not a multiple of its {sum(counts)} heads in all ({style})")
    if uneven := [count for count in counts if count % tp]:
        raise Refused(
            f"'{path}': tp {tp} would cut a head of its fused parts with {', '.join(map(str, counts))} heads "
            f"({uneven[0]} is not a multiple of {tp}). Use a tp that divides them all"
        )
    return tuple(size // sum(counts) * count for count in counts)


@dataclass
class PackedColumn(Column):
    """A column() for a fused weight, such as [gate; up] or [query; key; value]: each part is cut, and a tp rank holds
    its chunk of every part, in order. The module must split its output by local sizes (`chunk`, or heads / tp)."""

    parts: int = 2
    """Number of equal parts."""
    heads: tuple[int | str, ...] = ()
    """Instead: the numbers of heads of each part, or the attributes of the model's config that hold them."""

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        out_dim, _ = matrix_dims(module, path, str(self))
        size = module.weight.shape[out_dim]  # type: ignore[index,union-attr]
        parts = _parts(self.parts, tuple(self.heads), cast(int, size), path, scope, self)
        cuts = {"weight": Cut(out_dim, parts)}
        if module.bias is not None:
            cuts["bias"] = Cut(0, parts)
        return cuts


@dataclass
class Row(Style):
    """Cut the input dim of a linear module: [..., in / tp] -> stream. The terms of the tp ranks are summed (and, with
    sequence parallelism, scattered) before the bias is added once."""

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        _, in_dim = matrix_dims(module, path, str(self))
        size = cast(int, module.weight.shape[in_dim])  # type: ignore[index,union-attr]
        parts = self.parts_of(size, path, scope)
        cuts = {"weight": Cut(in_dim, parts)}
        if module.bias is not None:
            cuts["bias"] = Cut(None, gradient=scope.stream_gradient)
        return cuts

    def parts_of(self, size: int, path: str, scope: Scope) -> tuple[int, ...]:
        check_nonempty(size, "the input size", path, scope.sizes.tp)
        return ()

    def forward(self, site: Site) -> Forward:
        tp, path, module, run = site.tp, site.path, site.module, site.original
        parameters = cast("dict[str, Any]", module._parameters)
        # Conv1D adds its bias unconditionally, so it runs with a zero in place of the bias that is added below.
        absent = None if isinstance(module, nn.Linear) else 0.0

        def forward(x: Tensor) -> Tensor:
            weight, bias = parameters["weight"], parameters.get("bias")
            parameters["weight"] = local(weight, path)
            if bias is not None:
                parameters["bias"] = absent if absent is None else bias._local_tensor.new_zeros(bias.shape)
            try:
                out = tp.leave(run(x))
            finally:
                parameters["weight"] = weight
                if bias is not None:
                    parameters["bias"] = bias
            return out if bias is None else out + local(bias, path)

        return forward


@dataclass
class PackedRow(Row):
    """A row() whose input is the output of a packed_column(), unsplit: its input dim has the same fused parts."""

    parts: int = 2
    heads: tuple[int | str, ...] = ()

    def parts_of(self, size: int, path: str, scope: Scope) -> tuple[int, ...]:
        return _parts(self.parts, tuple(self.heads), size, path, scope, self)


@dataclass
class Embedding(Style):
    """Cut the rows of an embedding over tp, and begin the stream: ids [batch, seq], whole -> stream. A rank looks up
    the ids of its own rows; the others give zeros, and the sum over tp has every row."""

    begins_stream = True

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        if not isinstance(module, nn.Embedding):
            raise Refused(f"'{path}' is a {type(module).__name__}, and embedding() is for nn.Embedding")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise Refused(
                    f"'{path}': an nn.Embedding with {option}={getattr(module, option)!r} cannot be cut over tp, since the "
                    "option needs the whole table or all ids. Use replicate() for it, or leave the option out"
                )
        check_nonempty(module.num_embeddings, "the vocabulary", path, scope.sizes.tp)
        return {"weight": Cut(0)}

    def forward(self, site: Site) -> Forward:
        tp, path, layout = site.tp, site.path, site.layouts["weight"]
        module = cast(nn.Embedding, site.module)
        (start, stop), vocab = layout.tp_segments(tp.axis.index)[0], layout.shape[0]
        padding = module.padding_idx

        def forward(ids: Tensor) -> Tensor:
            weight = local(module._parameters["weight"], path)  # type: ignore[arg-type]
            if tp.axis.size == 1:
                return tp.begin(torch.nn.functional.embedding(ids, weight, padding))
            if not torch.compiler.is_compiling() and ids.device.type == "cpu" and ids.numel():
                low, high = torch.aminmax(ids)
                if low < 0 or high >= vocab:
                    raise IndexError(
                        f"'{path}': token id {int(low if low < 0 else high)} is outside the vocabulary of {vocab}"
                    )
            own = ids - start
            elsewhere = (own < 0) | (own >= stop - start)
            out = torch.nn.functional.embedding(own.masked_fill(elsewhere, 0), weight)
            out = out.masked_fill(elsewhere.unsqueeze(-1), 0)
            if padding is not None:
                out = torch.where((ids == padding).unsqueeze(-1), out.detach(), out)
            return tp.begin(out)

        return forward


@dataclass
class Head(Style):
    """Cut the vocabulary of the output layer, and end the stream: stream -> logits, as a DTensor that is cut on the
    vocabulary with loss parallelism (`meshtrain.cross_entropy` and torch's `loss_parallel` take it), else whole.

    Called with labels it gives the sum of the token losses, and never holds the logits of more than a chunk.
    """

    ends_stream = True

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        if not isinstance(module, nn.Linear):
            raise Refused(f"'{path}' is a {type(module).__name__}, and head() is for nn.Linear")
        check_nonempty(module.out_features, "the vocabulary", path, scope.sizes.tp)
        return {"weight": Cut(0)} | ({"bias": Cut(0)} if module.bias is not None else {})

    def forward(self, site: Site) -> Forward:
        tp, path, module, layout = site.tp, site.path, site.module, site.layouts["weight"]
        (start, stop), vocab = layout.tp_segments(tp.axis.index)[0], layout.shape[0]
        step = chunk_interval(vocab, tp.axis.size, 0)[1]
        shard = VocabShard(start, vocab, step, tp.axis, tp.loss_parallel)

        def forward(x: Tensor, labels: Tensor | None = None) -> Tensor:
            whole = tp.enter(x, path)
            tp.reset()
            if labels is not None:
                weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
                return linear_cross_entropy(
                    whole, local(weight, path), labels, bias=None if bias is None else local(bias, path), shard=shard  # type: ignore[arg-type]
                )
            with local_parameters(site.within):
                # Not the module's own forward: it may take labels, or do more than the product.
                logits = nn.Linear.forward(cast(nn.Linear, module), whole)
            if tp.axis.size == 1:
                return logits
            if not tp.loss_parallel:
                return gather_last(logits, vocab, start, step, tp.axis)
            shape = torch.Size((*logits.shape[:-1], vocab))
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(
                logits, tp.mesh, [Shard(logits.ndim - 1)], run_check=False, shape=shape, stride=stride
            )

        return forward


@dataclass
class Sequence(Style):
    """A position-wise module on the stream (norms, dropout) and all modules below it: stream -> stream. With sequence
    parallelism every rank sees its positions only, and the gradients of its parameters are summed over tp."""

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

# The names that plans and plan files are written with.
column, row, heads = Column, Row, Heads
packed_column, packed_row = PackedColumn, PackedRow
embedding, head = Embedding, Head
sequence, scatter, replicate = Sequence, Scatter, Replicated
STYLES: dict[str, type[Style]] = {
    "column": Column,
    "row": Row,
    "heads": Heads,
    "packed_column": PackedColumn,
    "packed_row": PackedRow,
    "embedding": Embedding,
    "head": Head,
    "sequence": Sequence,
    "scatter": Scatter,
    "replicate": Replicated,
}
