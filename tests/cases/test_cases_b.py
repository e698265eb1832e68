"""Group B: gradients and loss values."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from meshtrain.errors import ContractError, Refused
from meshtrain.parallel import (
    IGNORED,
    ParallelPlan,
    column,
    parallelize,
    replicate,
    resolve,
    row,
    scatter,
    sequence,
    state_of,
)
from meshtrain.train.optim import adamw
from meshtrain.train.step import train_step
from tests.cases.models import (
    LM,
    LM_PLAN,
    LM_STYLES,
    MLP,
    MLP_PLAN,
    Collectives,
    assert_same,
    gather,
    of_plain,
    on_meta,
    plain,
    sharded,
    share,
    tokens,
    value_of,
    vectors,
    whole,
)
from tests.ranks import RankError, mesh

MESHES = [(4, 1), (2, 2), (1, 4)]
MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
Step = tuple[Tensor, Tensor]


def one_process_step(ids: Tensor, labels: Tensor, model: nn.Module | None = None) -> tuple[float, nn.Module]:
    """Loss and gradients of plain torch: the mean over all labels that count, in one batch."""
    model = model or plain(LM)
    total = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    loss = total / max(1, int((labels != IGNORED).sum()))
    loss.backward()
    return float(loss), model


def micro_batches(ids: Tensor, labels: Tensor, dp: int, tp: int, accumulate: int) -> list[Step]:
    return list(zip(share(ids, dp, tp).chunk(accumulate), share(labels, dp, tp).chunk(accumulate), strict=True))


class Keep(torch.optim.Optimizer):
    """Leaves the weights and keeps the gradients, so that a test can look at what a step made."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.model, self.grads = model, {}

    def step(self, closure=None):
        self.grads = whole(self.model)


# B1, B6


def mlp_gradients(dp: int, tp: int) -> None:
    x, reference = vectors(8, 3, 8), plain(MLP)
    (reference(x).square().sum() / 8).backward()
    model = sharded(MLP, MLP_PLAN, dp, tp)
    (model(share(x, dp, tp)).square().sum() / (8 / dp)).backward()
    assert_same(whole(model), of_plain(reference))


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_case_b1_gradients_are_averaged_over_dp(ranks, dp, tp):
    ranks(4).run(mlp_gradients, dp, tp)


def sgd_step(dp: int, tp: int) -> tuple[float, float, int]:
    ids, labels = tokens()
    loss, reference = one_process_step(ids, labels)
    norm = float(nn.utils.clip_grad_norm_(reference.parameters(), math.inf))
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    model = sharded(LM, LM_PLAN, dp, tp)
    result = train_step(model, torch.optim.SGD(model.parameters(), lr=0.5), micro_batches(ids, labels, dp, tp, 1))
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert result.grad_norm == pytest.approx(norm, rel=1e-11)
    assert_same(whole(model, value_of), of_plain(reference, value_of))
    return result.loss, result.grad_norm, result.tokens


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_case_b6_loss_and_step_do_not_depend_on_the_mesh(ranks, dp, tp):
    assert len(set(ranks(4).run(sgd_step, dp, tp))) == 1


# B2


class OneNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm = nn.Identity(), nn.RMSNorm(2, eps=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inside(x))


def sum_over_tp(reduce_dtype: torch.dtype) -> float:
    plan = ParallelPlan({"inside": scatter(), "norm": sequence(gather_output=True)})
    model = sharded(OneNorm, plan, 1, 4, torch.float32, param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    terms = torch.tensor([1.0, 2.0**-10, 0.0, 0.0])  # one position, and so one term, for each tp rank
    assert sum(terms.bfloat16()) == 1.0, "a sum in bfloat16 loses the second term"
    with Collectives() as seen:
        (model(torch.ones(1, 4, 2)).float() * terms[:, None]).sum().backward()
    assert [dtype for name, dtype in seen.seen if name.startswith("all_reduce")] == [torch.float32]
    (value,) = set(whole(model)["norm.weight"].tolist())
    return value


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_case_b2_the_tp_sum_of_gradients_is_in_fp32(ranks, reduce_dtype):
    assert set(ranks(4).run(sum_over_tp, reduce_dtype)) == {1.0009765625}


# B4


def three_steps(dp: int, tp: int, options: dict) -> None:
    reference = plain(LM)
    model = sharded(LM, LM_PLAN, dp, tp, **options)
    sgd, reference_sgd = torch.optim.SGD(model.parameters(), lr=0.3), torch.optim.SGD(reference.parameters(), lr=0.3)
    for step in range(3):
        ids, labels = tokens(seed=step)
        loss, _ = one_process_step(ids, labels, reference)
        reference_sgd.step()
        reference_sgd.zero_grad()
        assert train_step(model, sgd, micro_batches(ids, labels, dp, tp, 1)).loss == pytest.approx(loss, rel=1e-11)
        assert_same(whole(model, value_of), of_plain(reference, value_of))  # which also compares replicas bit by bit


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}, {"loss_parallel": False}])
@pytest.mark.parametrize(("dp", "tp"), [(1, 4), (2, 2)])
def test_case_b4_replicas_stay_equal_and_right(ranks, dp, tp, options):
    ranks(4).run(three_steps, dp, tp, options)


class HeadNorms(nn.Module):
    """A norm of the heads that a tp rank has: its weight is whole, its gradient one term of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head_norm, self.down = nn.Linear(8, 16), nn.RMSNorm(4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.head_norm(self.up(x).unflatten(-1, (-1, 4))).flatten(-2))


def head_norm_gradient() -> None:
    x, reference = vectors(4, 3, 8), plain(HeadNorms)
    reference(x).square().sum().backward()
    plan = ParallelPlan({"up": column(), "head_norm": replicate(gradient="partial"), "down": row()})
    model = sharded(HeadNorms, plan, 1, 4)
    model(x).square().sum().backward()
    assert_same(whole(model), of_plain(reference))


def test_case_b4_a_norm_inside_what_tp_cuts(ranks):
    ranks(4).run(head_norm_gradient)


def test_case_b4_a_parameter_outside_the_plan_is_refused():
    for left_out in ("norm", "layers.*.norm*", "layers.*.down"):
        plan = ParallelPlan({k: v for k, v in LM_STYLES.items() if k != left_out}, ("layers.*",))
        with pytest.raises(Refused, match="covers no parameters? '") as caught:
            resolve(plan, on_meta(LM), (1, 4))
        assert left_out.replace("*", "")[-4:] in str(caught.value)


# B7, B8


def labels_with(counts: list[int], seq: int = 8) -> Step:
    """One sequence for each count, with that many labels that are not ignored."""
    ids, labels = tokens(len(counts), seq)
    for row_, count in zip(labels, counts, strict=True):
        row_[count:] = IGNORED
    return ids, labels


def uneven_labels(dp: int, tp: int, accumulate: int, counts: list[int], options: dict) -> None:
    ids, labels = labels_with(counts)
    loss, reference = one_process_step(ids, labels)
    model = sharded(LM, LM_PLAN, dp, tp, **options)
    result = train_step(model, keep := Keep(model), micro_batches(ids, labels, dp, tp, accumulate))
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert result.tokens == sum(counts)
    assert_same(keep.grads, of_plain(reference))


@pytest.mark.parametrize(("dp", "tp", "accumulate"), [(2, 2, 2), (4, 1, 1), (1, 4, 4), (2, 2, 1), (1, 4, 2)])
def test_case_b7_no_mean_of_means(ranks, dp, tp, accumulate):
    ranks(4).run(uneven_labels, dp, tp, accumulate, [1, 7, 3, 5], {})


@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize("counts", [[0, 0, 3, 5], [4, 0, 0, 0], [0, 0, 0, 1]])
def test_case_b8_a_rank_or_micro_batch_without_labels(ranks, counts, loss_parallel):
    ranks(4).run(uneven_labels, 2, 2, 2, counts, {"loss_parallel": loss_parallel})


def no_labels(options: dict) -> None:
    ids, labels = labels_with([0, 0, 0, 0])
    model = sharded(LM, LM_PLAN, 2, 2, **options)
    before = whole(model, value_of)
    result = train_step(model, adamw(model, lr=0.1, weight_decay=0.0), micro_batches(ids, labels, 2, 2, 1))
    assert (result.loss, result.grad_norm, result.tokens) == (0.0, 0.0, 0)
    assert_same(whole(model, value_of), before, 0.0)
    keep = Keep(model)
    train_step(model, keep, micro_batches(ids, labels, 2, 2, 1), max_norm=1.0)
    assert all(not g.any() for g in keep.grads.values())


@pytest.mark.parametrize("options", [{}, {"loss_parallel": False}, {"sequence_parallel": False}])
def test_case_b8_no_labels_at_all(ranks, options):
    ranks(4).run(no_labels, options)


# B11


def accumulation(dp: int, tp: int, accumulate: int) -> None:
    ids, labels = tokens()
    _, reference = one_process_step(ids, labels)
    model = sharded(LM, LM_PLAN, dp, tp)
    batches, keep = micro_batches(ids, labels, dp, tp, accumulate), Keep(model)
    counts = []
    for run in ([(a[:1], b[:1]) for a, b in batches[:1]], batches):
        with mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=_fsdp_param_group.foreach_reduce) as reduce:
            train_step(model, keep, run)
        counts.append(reduce.call_count)
    assert counts == [3, 3], "one for each of the two blocks and the root, however many micro-batches"
    assert_same(keep.grads, of_plain(reference))


@pytest.mark.parametrize(("dp", "tp", "accumulate"), [(2, 2, 2), (2, 2, 4), (4, 1, 2)])
def test_case_b11_one_reduction_per_step_and_unit(ranks, dp, tp, accumulate):
    ranks(4).run(accumulation, dp, tp, accumulate)


def own_loop(sync_each: bool) -> None:
    ids, labels = tokens()
    _, reference = one_process_step(ids, labels)
    model = sharded(LM, LM_PLAN, 2, 2, loss_parallel=False)
    for index, (a, b) in enumerate(batches := micro_batches(ids, labels, 2, 2, 2)):
        model.set_requires_gradient_sync(sync_each or index == len(batches) - 1)
        (F.cross_entropy(model(a).flatten(0, 1), b.flatten()) / len(batches)).backward()
    assert_same(whole(model), of_plain(reference))


@pytest.mark.parametrize("sync_each", [True, False])
def test_case_b11_a_loop_of_ones_own_with_and_without_sync(ranks, sync_each):
    ranks(4).run(own_loop, sync_each)


# B12, B13 (in one unit), B17


class Branches(nn.Module):
    """Two branches in one unit, of which a batch may use one only: a negative first number says that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(8, 8), MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.a(h) if x[0, 0] < 0 else self.a(h) + self.b(h)


BRANCHES_PLAN = ParallelPlan({"stem": replicate(), **{f"*.{k}": v for k, v in MLP_PLAN.styles.items()}})


def branch_batch(both: list[bool]) -> Tensor:
    """Four rows for each entry."""
    x = vectors(4 * len(both), 8)
    x[::4, 0] = torch.where(torch.tensor(both), 1.0, -1.0)
    return x


def square_sum(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return model(x).double().square().sum()


def branches(dp: int, tp: int, accumulate: int, both: list[bool], options: dict, tol: float) -> dict[str, bool]:
    x = branch_batch(both)
    reference = plain(Branches)
    for part in x.chunk(len(both)):
        (square_sum(reference, part, x) / len(x)).backward()
    dtype = torch.float32 if "param_dtype" in options else torch.float64
    model = sharded(Branches, BRANCHES_PLAN, dp, tp, dtype, **options)
    keep = Keep(model)
    for _ in range(2):
        batches = [(part.to(dtype), torch.zeros(4)) for part in share(x, dp, tp).chunk(accumulate)]
        train_step(model, keep, batches, loss_sum=square_sum)
        assert all(g.dtype == dtype for g in keep.grads.values())
        wanted = of_plain(reference)
        zeros = {name: torch.zeros_like(p) for name, p in reference.named_parameters() if p.grad is None}
        assert_same(keep.grads, {**wanted, **zeros}, tol)


@pytest.mark.parametrize("both", [[False, True], [True, False], [False, False]])
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (1, 1)])
def test_case_b12_a_parameter_first_used_in_the_last_micro_batch(ranks, dp, tp, both):
    ranks(dp * tp).run(branches, dp, tp, 2, both, MIXED, 3e-2)
    ranks(dp * tp).run(branches, dp, tp, 2, both, {}, 1e-11)


@pytest.mark.parametrize("both", [[False, True, False, True], [False, False, False, True], [True, False, False, False]])
def test_case_b12_and_on_some_dp_ranks_only(ranks, both):
    ranks(4).run(branches, 2, 2, 2, both, MIXED, 3e-2)


@pytest.mark.parametrize("options", [{}, MIXED])
@pytest.mark.parametrize(("dp", "tp", "both"), [(4, 1, [True, True, False, False]), (2, 2, [False, True])])
def test_case_b13_a_parameter_of_a_unit_used_on_some_ranks_only(ranks, dp, tp, both, options):
    ranks(4).run(branches, dp, tp, 1, both, options, 3e-2 if options else 1e-11)


class Optional(nn.Module):
    """Branch b, a unit of its own, is used where the batch says so; branch c instead of it, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = MLP(), MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h if x[0, 0] == 0 else h + (self.b if x[0, 0] > 0 else self.c)(h)


OPTIONAL_PLAN = ParallelPlan({f"*.{k}": v for k, v in MLP_PLAN.styles.items()}, ("b", "c"))


def optional_unit(dp: int, tp: int, paths: list[float], patience: float) -> None:
    model = sharded(Optional, OPTIONAL_PLAN, dp, tp)
    state_of(model).watch.patience = timedelta(seconds=patience)
    x = vectors(2, 8)
    x[0, 0] = paths[mesh(dp, tp).get_local_rank("dp")]
    before = [(p, p.to_local().clone()) for p in model.parameters()]
    try:
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        train_step(model, sgd, [(x, torch.zeros(2))], loss_sum=square_sum)
    finally:
        for parameter, shard in before:
            assert torch.equal(parameter.to_local(), shard), "a weight was changed"


@pytest.mark.parametrize(("dp", "tp", "paths"), [(4, 1, [1, 1, 0, 0]), (2, 2, [1, 0]), (4, 1, [0, 0, 0, -1])])
def test_case_b13_a_unit_used_on_some_ranks_only_is_found_before_the_time_out(ranks, dp, tp, paths):
    start = time.monotonic()
    try:
        with pytest.raises(RankError) as caught:
            ranks(4).run(optional_unit, dp, tp, paths, 1.0, timeout=40)
    finally:
        ranks(4).close()  # collectives that never ended are left in the process groups
    assert set(caught.value.types.values()) == {"ContractError"}, caught.value
    assert len(caught.value.types) == 4
    used = "b" if 1 in paths else "c"
    ranks_of = [", ".join(str(d * tp + t) for d in range(dp) if paths[d]) for t in range(tp)]
    for rank, text in caught.value.failures.items():
        assert "dp ranks wait for each other in different places" in text
        assert f"rank {ranks_of[rank % tp]}: gathering the parameters of '{used}'" in text
        assert ": reducing the gradients of the root unit" in text
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(("dp", "tp", "paths"), [(4, 1, [1, 1, -1, -1]), (2, 2, [1, -1])])
def test_case_b13_units_of_one_size_used_in_each_other_s_place(ranks, dp, tp, paths):
    with pytest.raises(RankError) as caught:
        ranks(4).run(optional_unit, dp, tp, paths, 8.0)
    assert set(caught.value.types.values()) == {"ContractError"}
    assert all("ranks have run different units of the model" in text for text in caught.value.failures.values())


@pytest.mark.parametrize("path", [0.0, 1.0, -1.0])
def test_case_b13_the_same_path_everywhere_is_fine(ranks, path):
    with pytest.raises(RankError, match="a weight was changed"):
        ranks(4).run(optional_unit, 4, 1, [path] * 4, 8.0)


def a_slow_rank() -> float:
    model = sharded(Optional, OPTIONAL_PLAN, 2, 2)
    state_of(model).watch.patience = timedelta(seconds=0.2)
    if dist.get_rank() == 1:
        model.a.register_forward_hook(lambda *_: time.sleep(5))
    x = vectors(2, 8)
    x[0, 0] = 1.0
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_step(model, sgd, [(x, torch.zeros(2))], loss_sum=square_sum).loss


def test_case_b13_waiting_for_a_slow_rank_is_not_a_fault(ranks):
    assert len(set(ranks(4).run(a_slow_rank))) == 1


def unfrozen(dp: int, tp: int, options: dict) -> None:
    ids, labels = tokens()
    _, reference = one_process_step(ids, labels)
    model = sharded(LM, LM_PLAN, dp, tp, torch.float32, **options, **MIXED)
    model.requires_grad_(False)
    model(share(ids, dp, tp))
    model.requires_grad_(True)
    keep = Keep(model)
    train_step(model, keep, micro_batches(ids, labels, dp, tp, 1))
    assert {g.dtype for g in keep.grads.values()} == {torch.float32}
    wanted = torch.cat([right.float().flatten() for right in of_plain(reference).values()])
    got = torch.cat([keep.grads[name].flatten() for name in of_plain(reference)])
    assert (got - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}, {"reshard_after_forward": False}])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2), (1, 4)])
def test_case_b17_unfreezing_after_a_forward(ranks, dp, tp, options):
    ranks(dp * tp).run(unfrozen, dp, tp, options)


def frozen_after_evaluation(options: dict) -> None:
    """What is frozen between an evaluation and a step stays frozen, and keeps its weights."""
    ids, labels = tokens()
    model = sharded(LM, LM_PLAN, 2, 2, **options)
    with torch.no_grad():
        model(share(ids, 2, 2))
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    keep = Keep(model)
    for _ in range(2):
        train_step(model, keep, micro_batches(ids, labels, 2, 2, 1))
        frozen = {name for name, gradient in keep.grads.items() if gradient is None}
        assert frozen == {name for name in keep.grads if name.startswith(("embed", "layers.0"))}


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_case_b17_and_freezing_after_an_evaluation(ranks, options):
    ranks(4).run(frozen_after_evaluation, options)


def frozen_at_first(dp: int, tp: int) -> None:
    ids, labels = tokens()
    _, reference = one_process_step(ids, labels)
    model = plain(LM)
    model.requires_grad_(False)
    parallelize(model, mesh(dp, tp), LM_PLAN)
    model.requires_grad_(True)
    keep = Keep(model)
    train_step(model, keep, micro_batches(ids, labels, dp, tp, 1))
    assert_same(keep.grads, of_plain(reference))


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 4)])
def test_case_b17_frozen_when_parallelized_and_trained_later(ranks, dp, tp):
    ranks(4).run(frozen_at_first, dp, tp)


# B16


class Muon(torch.optim.SGD):
    """Whatever it does, its name says that it works on whole matrices."""


class DistributedShampoo(torch.optim.SGD):
    pass


def whole_matrix_optimizer(dp: int, tp: int, kind: type[torch.optim.Optimizer]) -> None:
    model = sharded(MLP, MLP_PLAN, dp, tp)
    model(share(vectors(8, 8), dp, tp)).sum().backward()
    before = whole(model, value_of)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    with pytest.raises(ContractError, match="whole matrices"):
        kind(matrices, lr=0.1).step()
    assert_same(whole(model, value_of), before, 0.0)


@pytest.mark.parametrize(
    "kind", [Muon, DistributedShampoo, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else [])]
)
@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 2), (1, 4)])
def test_case_b16_optimizers_of_whole_matrices_are_refused(ranks, dp, tp, kind):
    ranks(4).run(whole_matrix_optimizer, dp, tp, kind)


def whole_matrix_alone() -> None:
    model, reference = sharded(MLP, MLP_PLAN, 1, 1), plain(MLP)
    for each in (model, reference):
        each(vectors(8, 8)).sum().backward()
        torch.optim.Muon([p for p in each.parameters() if p.ndim == 2], lr=0.1).step()
    assert_same(whole(model, value_of), of_plain(reference, value_of))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_case_b16_but_not_where_a_rank_has_the_whole_matrix(ranks):
    ranks(1).run(whole_matrix_alone)


# B18


def scaled_step(dp: int, tp: int, enabled: bool, bad: int) -> None:
    model = sharded(MLP, MLP_PLAN, dp, tp, torch.float32)
    before = whole(model, value_of)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
    optimizers = torch.optim.SGD(model.parameters(), lr=0.1), adamw(model, lr=0.1)
    for optimizer in optimizers:
        scaler.scale(model(share(vectors(8, 8, dtype=torch.float32), dp, tp)).sum()).backward()
        if dist.get_rank() == bad:
            model.up.weight.grad.to_local()[0, 0] = math.inf
        if enabled and tp > 1:
            with pytest.raises(ContractError, match="GradScaler.*bfloat16"):
                scaler.step(optimizer)
            assert_same(whole(model, value_of), before, 0.0)
            optimizer.zero_grad()
            continue
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if tp == 1:
        assert len(set(gather(scaler.get_scale()))) == 1
        after = whole(model, value_of)
        assert torch.equal(after["up.weight"], before["up.weight"]) == (bad >= 0)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 4)])
def test_case_b18_torchs_loss_scaler_is_refused_over_tp(ranks, dp, tp):
    ranks(4).run(scaled_step, dp, tp, True, -1)


@pytest.mark.parametrize(("dp", "tp", "enabled", "bad"), [(4, 1, True, -1), (4, 1, True, 2), (2, 2, False, -1)])
def test_case_b18_but_not_where_it_is_right_or_off(ranks, dp, tp, enabled, bad):
    ranks(4).run(scaled_step, dp, tp, enabled, bad)
