"""Meshes without ranks: layouts, whole tensors, and the shards that every coordinate would hold, all in
one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshtrain.parallel.layout import MeshSizes, ParamLayout
from meshtrain.state.held import Held
from meshtrain.state.placing import write_own
from meshtrain.state.pretrained import load_shards
from meshtrain.state.specs import specs_of
from meshtrain.state.team import Team
from meshtrain.state.transfer import Staging
from meshtrain.state.writer import Part, SavePlan, plan_save, write_directory

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (8, 1), (1, 8)]

# (name, shape, dim cut by tp, parts): sizes that do not divide, fused weights, more ranks than rows, replicas.
TABLE: list[tuple[str, tuple[int, ...], int | None, tuple[int, ...]]] = [
    ("embed.weight", (257, 12), 0, (257,)),
    ("small.weight", (17, 6), 0, (17,)),
    ("row.weight", (7, 26), 1, (26,)),
    ("fused.weight", (30, 5), 0, (15, 15)),
    ("qkv.weight", (24, 5), 0, (16, 4, 4)),
    ("packed_row.weight", (9, 20), 1, (10, 10)),
    ("norm.weight", (12,), None, ()),
    ("bias", (3,), 0, (3,)),
    ("tiny.weight", (1, 17), 1, (17,)),
    ("conv.weight", (6, 8, 3), 1, (8,)),
]


def layout(
    name: str,
    shape: tuple[int, ...],
    tp_dim: int | None,
    parts: tuple[int, ...],
    sizes: MeshSizes,
    dtype: torch.dtype = torch.float32,
    aliases: tuple[str, ...] = (),
) -> ParamLayout:
    return ParamLayout(name, aliases, shape, dtype, True, sizes, tp_dim, parts, "whole", "", "")


def layouts(dp: int, tp: int, dtype: torch.dtype = torch.float32) -> list[ParamLayout]:
    return [layout(*row, MeshSizes(dp, tp), dtype) for row in TABLE]


def whole_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape, *_ in TABLE}


def cut(whole: Tensor, layout: ParamLayout, coordinate: tuple[int, int]) -> Tensor:
    local = torch.full(layout.local_shape(*coordinate), 7, dtype=whole.dtype)
    for block in layout.blocks(*coordinate):
        local[block.of_local()] = whole[block.of_global()]
    return local


def save(
    layouts: Sequence[ParamLayout],
    whole: dict[str, Tensor],
    path: Path,
    buffers: dict[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    buffer_bytes: int = 4096,
) -> SavePlan:
    """What the ranks of the layouts' mesh write, one after the other."""
    plan = plan_save(specs_of(layouts, buffers), dtype, max_shard_size)

    def fill(folder: Path, shared: bool) -> None:
        for coordinate in layouts[0].sizes.coordinates():
            shards = {one.name: cut(whole[one.name], one, coordinate) for one in layouts}
            write_own([Part(plan, {**shards, **(buffers or {})})], coordinate, folder, Staging(buffer_bytes))

    write_directory([plan], path, fill, lambda folder: None, Team())
    return plan


def load(
    layouts: Sequence[ParamLayout],
    path: Path,
    coordinate: tuple[int, int],
    buffers: dict[str, Tensor] | None = None,
    buffer_bytes: int = 4096,
) -> tuple[dict[str, Tensor], Staging]:
    """What the rank at a coordinate reads."""
    shards = {one.name: torch.full(one.local_shape(*coordinate), 9, dtype=one.dtype) for one in layouts}
    held = Held(layouts, buffers or {}, {**shards, **(buffers or {})}, coordinate, layouts[0].sizes, Team())
    staging = load_shards(held, path, staging=Staging(buffer_bytes))
    return shards, staging
