"""What a rank holds: its share of parameters, gradients and optimizer state, and nothing of its peers'."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import PRESETS, LlamaConfig
from meshtrain.parallel import MeshSizes, initialise, parallelize, resolve
from meshtrain.train.optim import adamw
from tests.ranks import mesh

DP, TP = 64, 8


def shape_of_70b() -> Llama:
    with torch.device("meta"):
        return Llama(PRESETS["llama3.1-70b"])


def test_each_of_512_ranks_holds_its_share_of_70b() -> None:
    model = shape_of_70b()
    resolved = resolve(parallel_plan(), model, MeshSizes(DP, TP))
    total = sum(parameter.numel() for parameter in model.parameters())
    shapes = [[layout.local_shape(dp, tp) for layout in resolved.layouts] for dp, tp in resolved.sizes.coordinates()]
    held = [sum(torch.Size(shape).numel() for shape in rank) for rank in shapes]
    assert max(held) <= 1.02 * total / (DP * TP)
    assert sum(held) >= total


def lay_out(rank: int) -> tuple[int, int, int]:
    """In a process without other ranks: parallelize 70B as `rank` of 512, and count what the rank would hold."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from meshtrain.parallel import guards

    dist.init_process_group("fake", rank=rank, world_size=DP * TP, store=FakeStore())
    grid = torch.distributed.device_mesh.init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    guards.check_equal_weights = lambda *_: None  # there is nobody to compare with
    model = shape_of_70b()
    parallelize(model, grid, parallel_plan())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = itertools.chain(*(state.values() for state in optimizer.state.values()))
    kinds = (model.parameters(), (p.grad for p in model.parameters()), (s for s in states if isinstance(s, DTensor)))
    one, two, three = (sum(t._local_tensor.numel() for t in kind) for kind in kinds)
    return one, two, three


@pytest.mark.timeout(300)
def test_parallelize_makes_those_shards() -> None:
    import multiprocessing

    total = sum(parameter.numel() for parameter in shape_of_70b().parameters())
    context = multiprocessing.get_context("fork")
    for rank in (0, 511):
        with context.Pool(1) as pool:
            parameters, gradients, state = pool.apply(lay_out, (rank,))
        assert parameters == gradients
        assert state == 2 * parameters
        assert 0.98 * total / (DP * TP) <= parameters <= 1.02 * total / (DP * TP)


def held_bytes(dp: int, tp: int) -> dict[str, int]:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = Llama(config)
    parallelize(model, mesh(dp, tp), parallel_plan())
    initialise(model)
    optimizer = adamw(model, lr=1e-3)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    model(ids, ids).backward()
    optimizer.step()

    def real(tensors: Any) -> int:
        """Bytes of the storages, not of views into larger ones; global shapes do not count."""
        storages = {
            t._local_tensor.untyped_storage().data_ptr(): t._local_tensor.untyped_storage().nbytes() for t in tensors
        }
        return sum(storages.values())

    total = sum(p.numel() * 4 for p in model.parameters())
    state = optimizer.state.values()
    return {
        "share": total // (dp * tp),
        "parameters": real(model.parameters()),
        "gradients": real(p.grad for p in model.parameters()),
        "state": real(s[key] for s in state for key in ("exp_avg", "exp_avg_sq")),
    }


def test_the_memory_behind_the_shards_is_no_larger(ranks: Any) -> None:
    for held in ranks(4).run(held_bytes, 2, 2):
        # Norms, which tp does not cut, weigh more in so small a model.
        assert held["parameters"] <= 1.05 * held["share"]
        # FSDP reduces into one buffer per unit, padded by a few rows.
        assert held["gradients"] <= 1.05 * held["share"]
        assert held["state"] <= 2 * 1.05 * held["share"]
