"""TensorSpec: one tensor of a model as import and export see it, the same on every rank; and its match with a
file.

A parameter takes its cut from its ParamLayout. A buffer is held whole by every rank. Whether a tensor is cut
is decided by this description alone, never by comparing values.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshtrain.errors import Refused
from meshtrain.parallel.layout import Block, ParamLayout
from meshtrain.state.dtypes import NAME_OF, TORCH_OF
from meshtrain.state.header import TensorEntry
from meshtrain.state.strict_json import shown

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_STALE = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Old Llama checkpoints hold this table; no model keeps it as a parameter, and transformers ignores it
too.
"""
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
_SHOWN = 8


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model."""

    name: str
    """Name in the model, and the name of the local tensor that holds this rank's part."""
    key: str
    """Name in a file that is written."""
    names: tuple[str, ...]
    """All names in the model, of a tied parameter several; a file that is read may use any of them."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: ParamLayout | None
    """How it is cut; None when every rank holds it whole (buffers)."""

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape, with a dim of one element for a scalar, so that blocks and runs need no special case."""
        return self.shape or (1,)

    def blocks(self, dp: int, tp: int) -> list[Block]:
        """The rectangles of `extent` that the local tensor at a coordinate consists of."""
        if self.layout is not None and self.shape:
            return self.layout.blocks(dp, tp)
        whole = tuple((0, size) for size in self.extent)
        return [Block(where=whole, local=whole)]

    def writes(self, dp: int, tp: int) -> bool:
        """Whether a coordinate writes its part: of replicas only the first does."""
        return self.layout.writes(tp) if self.layout is not None and self.shape else (dp, tp) == (0, 0)

    def local_shape(self, dp: int, tp: int) -> tuple[int, ...]:
        """Shape of the local tensor at a coordinate."""
        return self.layout.local_shape(dp, tp) if self.layout is not None and self.shape else self.shape


def canonical(name: str) -> str:
    """A module or parameter name without what activation checkpointing and compilation put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to a model's state dict, by canonical name. Works on the meta device."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[canonical(f"{path}.{name}" if path else name)] = buffer
    return found


def layouts_of_plain(model: nn.Module) -> list[ParamLayout]:
    """Layouts on a 1 x 1 mesh for the parameters of a model that was not parallelized."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical(name))
        parameters[id(parameter)] = parameter
    return [
        ParamLayout.whole(
            names[key][0], tuple(parameter.shape), parameter.dtype, tuple(names[key][1:]), parameter.requires_grad
        )
        for key, parameter in parameters.items()
    ]


def specs_of(layouts: Iterable[ParamLayout], buffers: Mapping[str, torch.Tensor] | None = None) -> list[TensorSpec]:
    """The tensors of a model in its own order: parameters, then persistent buffers."""
    specs = [TensorSpec(p.name, p.name, p.names, p.shape, p.dtype, p) for p in layouts]
    for name, buffer in (buffers or {}).items():
        specs.append(TensorSpec(name, name, (name,), tuple(buffer.shape), buffer.dtype, None))
    for spec in specs:
        if spec.name == "__metadata__":
            raise Refused("a tensor named '__metadata__' would make a safetensors file that nobody can read; rename it")
        if spec.dtype not in NAME_OF:
            raise Refused(
                f"{spec.name}: dtype {spec.dtype} cannot be stored as safetensors; convert it to one of "
                f"{', '.join(TORCH_OF)}"
            )
    return specs


def check_against(
    layouts: Iterable[ParamLayout],
    entries: Mapping[str, TensorEntry],
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, list[TensorEntry]]:
    """The entries of a checkpoint that hold each tensor of a model, by canonical name.

    A tied parameter may be stored under any of its names. Stored under several, it has several entries (the
    canonical name's first), which must hold the same bytes: the reader compares them.

    Raises Refused, listing at once every missing, unexpected and wrongly shaped key and every dtype that does
    not fit.
    """
    specs = specs_of(layouts, buffers)
    known = {name for spec in specs for name in spec.names}
    unexpected = [key for key in entries if key not in known and not _STALE.search(key)]
    missing, wrong, sources = [], [], {}
    for spec in specs:
        held = [(name, entries[name]) for name in spec.names if name in entries]
        if not held:
            missing.append(spec.name)
        for name, entry in held:
            if entry.shape != spec.shape:
                wrong.append(f"{shown(name)} has shape {list(entry.shape)}, the model {list(spec.shape)}")
            elif not _convertible(entry.dtype, spec.dtype):
                wrong.append(f"{shown(name)} has dtype {entry.dtype}, which does not convert to {spec.dtype}")
        sources[spec.name] = [entry for _, entry in held]
    if missing or unexpected or wrong:
        raise Refused(_mismatch(entries, missing, unexpected, wrong))
    return sources


def _convertible(stored: str, wanted: torch.dtype) -> bool:
    dtype = TORCH_OF.get(stored)
    return dtype == wanted or (dtype in _FLOATS and wanted in _FLOATS)


def _mismatch(
    entries: Mapping[str, TensorEntry],
    missing: Sequence[str],
    unexpected: Sequence[str],
    wrong: Sequence[str],
) -> str:
    where = str(next(iter(entries.values())).file.parent) if entries else "the checkpoint"
    lines = [f"{where}: the weights do not fit the model."]
    if missing:
        lines.append(f"{len(missing)} missing, as the model has them: {_some(missing, unexpected)}.")
    if unexpected:
        lines.append(f"{len(unexpected)} unexpected, as the file has them: {_some(unexpected, missing)}.")
    if wrong:
        rest = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        lines.append(f"{len(wrong)} of another kind: {'; '.join(wrong[:_SHOWN])}{rest}.")
    lines.append("Build the model from the config.json beside the weights, or rename the keys of the file.")
    return "\n".join(lines)


def _some(names: Sequence[str], others: Sequence[str]) -> str:
    # Near matches are looked for among a bounded number of names, because a hostile file can hold a million.
    pool = list(others[:2000])
    parts = []
    for name in names[:_SHOWN]:
        near = difflib.get_close_matches(name[:200], pool, n=1, cutoff=0.8)
        parts.append(shown(name) + (f" (near: {shown(near[0])})" if near else ""))
    if len(names) > _SHOWN:
        parts.append(f"and {len(names) - _SHOWN} more")
    return ", ".join(parts)
