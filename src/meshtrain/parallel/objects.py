"""Small plain values gathered from all ranks, as JSON in byte tensors.

Not `torch.distributed.all_gather_object`: it pickles, and needs numpy, which torch does not require.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of the group (all, by default), in order: what JSON holds, tuples as lists. Collective."""
    if not dist.is_initialized():
        return [json.loads(json.dumps(value))]
    chosen = group or dist.group.WORLD
    assert chosen is not None
    on_cpu = any(torch.device(kind).type == "cpu" for kind in chosen._device_types)
    device = torch.device("cpu" if on_cpu else "cuda")
    raw = json.dumps(value).encode()
    lengths = torch.empty(chosen.size(), dtype=torch.int64, device=device)
    dist.all_gather_single(lengths, torch.tensor([len(raw)], device=device), group=chosen)
    width = int(lengths.max())
    own = torch.frombuffer(bytearray(raw.ljust(width)), dtype=torch.uint8).to(device)
    rows = torch.empty(chosen.size() * width, dtype=torch.uint8, device=device)
    dist.all_gather_single(rows, own, group=chosen)
    return [json.loads(bytes(row.tolist())) for row in rows.view(chosen.size(), width)]
