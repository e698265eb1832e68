"""Group A: the gradient norm and clipping."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshtrain.mesh import BACKENDS, init_mesh
from meshtrain.parallel import parallelize
from meshtrain.train.clip import NonFinite, clip_grad_norm_
from tests.cases.models import (
    LM,
    LM_PLAN,
    MLP,
    MLP_PLAN,
    assert_same,
    of_plain,
    plain,
    sharded,
    share,
    tokens,
    vectors,
    whole,
)
from tests.ranks import mesh

MESHES = [(4, 1), (2, 2), (1, 4)]


def backward(model: nn.Module, dp: int = 1, tp: int = 1) -> None:
    """The mean square of the outputs over a global batch of 8."""
    x = vectors(8, 3, 8, dtype=next(model.parameters()).dtype)
    own = share(x, dp, tp) if dp * tp > 1 else x
    (model(own).square().sum() * dp / x.numel()).backward()


def reference_norm(norm_type: float, max_norm: float = math.inf) -> tuple[float, nn.Module]:
    model = plain(MLP)
    backward(model)
    return float(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)), model


def clip_on_mesh(dp: int, tp: int, norm_type: float) -> float:
    wanted, reference = reference_norm(norm_type, 0.05)
    assert wanted > 0.06, "the clip must do something"
    model = sharded(MLP, MLP_PLAN, dp, tp)
    backward(model, dp, tp)
    norm = float(clip_grad_norm_(model, 0.05, norm_type=norm_type))
    assert norm == pytest.approx(wanted, rel=1e-12)
    assert_same(whole(model), of_plain(reference), 1e-5)  # torch adds 1e-6 to the norm, in other dtypes
    return norm


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_case_a1_all_parameters_live_on_one_mesh(ranks, dp, tp):
    norms = ranks(4).run(clip_on_mesh, dp, tp, 2.0)
    assert len(set(norms)) == 1


def torch_clip() -> None:
    wanted, _ = reference_norm(2.0)
    model = sharded(MLP, MLP_PLAN, 2, 2)
    backward(model, 2, 2)
    got = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert float(got.full_tensor()) == pytest.approx(wanted, rel=1e-12)


def test_case_a1_torchs_own_clip_works_on_the_model(ranks):
    ranks(4).run(torch_clip)


def clip_stock_model(dp: int, tp: int, shard: bool) -> None:
    """A model outside meshtrain: the LayerNorm is not in torch's plan, so it is plain, or on dp alone."""
    wanted, reference = reference_norm(2.0, 0.05)
    two = mesh(dp, tp)
    model = plain(MLP)
    parallelize_module(model, two["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if shard:
        fully_shard(model, mesh=two["dp"])
    backward(model, dp, tp)
    with pytest.raises(RuntimeError):
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert float(clip_grad_norm_(model.parameters(), 0.05)) == pytest.approx(wanted, rel=1e-12)
    got = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    assert_same(got, of_plain(reference), 1e-5)


@pytest.mark.parametrize(("dp", "tp", "shard"), [(2, 2, True), (1, 4, False)])
def test_case_a1_a_model_on_several_meshes_is_clipped_too(ranks, dp, tp, shard):
    ranks(4).run(clip_stock_model, dp, tp, shard)


def hand_made(dp: int, tp: int) -> tuple[float, float]:
    model = sharded(MLP, MLP_PLAN, dp, tp)
    backward(model, dp, tp)
    squares = sum(p.grad.to_local().square().sum() for p in model.parameters())
    dist.all_reduce(squares)
    return float(squares.sqrt()), float(clip_grad_norm_(model, math.inf))


def test_case_a2_the_norm_does_not_depend_on_tp(ranks):
    wanted, _ = reference_norm(2.0)
    naive = []
    for dp, tp in MESHES:
        (wrong, right), *_ = ranks(4).run(hand_made, dp, tp)
        assert right == pytest.approx(wanted, rel=1e-12)
        naive.append(wrong / wanted)
    assert naive[0] == pytest.approx(1)
    assert naive[2] > naive[1] > 1.01, "the sum over all local shards should count replicas tp times"


def lm_norm(dp: int, tp: int, sequence_parallel: bool) -> float:
    ids, _ = tokens()
    model = sharded(LM, LM_PLAN, dp, tp, sequence_parallel=sequence_parallel, loss_parallel=False)
    (model(share(ids, dp, tp)).square().sum() * dp / 1000).backward()
    return float(clip_grad_norm_(model, 1.0))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_case_a2_neither_with_shared_heads_and_sequence_shards(ranks, sequence_parallel):
    model = plain(LM)
    (model(tokens()[0]).square().sum() / 1000).backward()
    wanted = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf))
    for dp, tp in MESHES:
        for norm in ranks(4).run(lm_norm, dp, tp, sequence_parallel):
            assert norm == pytest.approx(wanted, rel=1e-11)


def test_case_a5_no_offload_is_offered_on_cpu():
    assert not [name for name in inspect.signature(parallelize).parameters if "offload" in name]


def test_case_a5_groups_of_cuda_serve_cpu_tensors_too():
    assert BACKENDS["cuda"] == "cpu:gloo,cuda:nccl"
    assert inspect.signature(init_mesh).parameters["device"].default is None


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 4)])
def test_case_a6_every_norm_type(ranks, dp, tp, norm_type):
    ranks(4).run(clip_on_mesh, dp, tp, norm_type)


def hsdp_norm(norm_type: float) -> None:
    wanted, _ = reference_norm(norm_type)
    model = plain(MLP)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    x = vectors(8, 3, 8)
    (model(x.chunk(4)[dist.get_rank()]).square().sum() * 4 / x.numel()).backward()
    assert float(clip_grad_norm_(model.parameters(), math.inf, norm_type=norm_type)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_case_a6_replicas_of_hsdp_count_once(ranks, norm_type):
    ranks(4).run(hsdp_norm, norm_type)


def one_bad_rank(bad: int, value: float, norm_type: float) -> None:
    model = sharded(MLP, MLP_PLAN, 2, 2)
    backward(model, 2, 2)
    before = [p.grad.to_local().clone() for p in model.parameters()]
    if dist.get_rank() == bad:
        model.up.weight.grad.to_local()[0, 0] = before[2][0, 0] = value
    assert not math.isfinite(float(clip_grad_norm_(model, math.inf, norm_type=norm_type)))
    with pytest.raises(NonFinite, match=rf"'up.weight' is not finite on rank {bad}"):
        clip_grad_norm_(model, 1.0, norm_type=norm_type, error_if_nonfinite=True)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad.to_local().nan_to_num(), old.nan_to_num()), "a refused clip must not scale"


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize(("bad", "value"), [(0, math.nan), (3, math.inf)])
def test_case_a6_every_rank_raises_when_one_has_a_nan(ranks, bad, value, norm_type):
    ranks(4).run(one_bad_rank, bad, value, norm_type)
