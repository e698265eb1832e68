"""Group C: initial weights, random numbers, data and buffers."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.data.batches import TokenDataset, check_batching
from meshtrain.errors import ContractError, Refused
from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.parallel import (
    IGNORED,
    ParallelPlan,
    column,
    initialise,
    parallelize,
    replicate,
    resolve,
    row,
    state_of,
)
from meshtrain.train.optim import adamw
from meshtrain.train.step import train_step
from tests.cases.models import (
    LM,
    LM_PLAN,
    MLP,
    MLP_PLAN,
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
from tests.ranks import mesh

MESHES = [(4, 1), (2, 2), (1, 4)]

# C1


def seeded_per_rank(dp: int, tp: int, part: str) -> None:
    torch.manual_seed(0)
    model = MLP()
    torch.manual_seed(dist.get_rank())
    model.get_submodule(part).reset_parameters()
    if part == "norm":
        nn.init.normal_(model.norm.weight)
    with pytest.raises(
        ContractError, match=rf"'{part}.weight' has other values on rank 1 than on rank 0.*Seed every rank alike"
    ):
        parallelize(model, mesh(dp, tp), MLP_PLAN)


@pytest.mark.parametrize("part", ["up", "norm"])
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_case_c1_ranks_that_start_from_different_weights_are_refused(ranks, dp, tp, part):
    ranks(4).run(seeded_per_rank, dp, tp, part)


def buffer_per_rank() -> None:
    model = MLP()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.register_buffer("scale", torch.full((2,), float(dist.get_rank())))
    with pytest.raises(ContractError, match="'scale' has other values on rank 1"):
        parallelize(model, mesh(2, 2), MLP_PLAN)


def test_case_c1_buffers_count_too(ranks):
    ranks(4).run(buffer_per_rank)


def real_weights(dp: int, tp: int) -> None:
    torch.manual_seed(0)
    model, reference = MLP(), MLP()
    reference.load_state_dict(model.state_dict())
    parallelize(model, mesh(dp, tp), MLP_PLAN)
    assert_same(whole(model, value_of), of_plain(reference, value_of), 0.0)


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_case_c1_equal_weights_are_kept(ranks, dp, tp):
    ranks(4).run(real_weights, dp, tp)


def drifted(bad: int) -> None:
    model = sharded(MLP, MLP_PLAN, 2, 2)
    state_of(model).check_replicas()
    if dist.get_rank() == bad:
        state_of(model).local_shards()["norm.weight"][0] += 1e-12
    with pytest.raises(ContractError, match=rf"tp rank 1 of dp rank {bad // 2} .*'norm.weight'"):
        state_of(model).check_replicas()


@pytest.mark.parametrize("bad", [1, 3])
def test_case_c1_replicas_that_drift_apart_are_named(ranks, bad):
    ranks(4).run(drifted, bad)


def test_case_b4_a_built_in_check_compares_replicas(ranks):
    ranks(4).run(drifted, 3)


# C3


def initial_values(dp: int, tp: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dist.get_rank())
    for make, plan in ((MLP, MLP_PLAN), (LM, LM_PLAN)):
        assert_same(whole(sharded(make, plan, dp, tp, dtype), value_of), of_plain(plain(make, dtype), value_of), 0.0)
    rows = whole(sharded(MLP, MLP_PLAN, dp, tp, dtype), value_of)["up.weight"]
    assert len(torch.unique(rows, dim=0)) == len(rows)
    other = whole(sharded(MLP, MLP_PLAN, dp, tp, dtype, seed=4), value_of)["up.weight"]
    assert not torch.isclose(rows, other).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), *MESHES])
def test_case_c3_initial_weights_are_the_same_bits_on_any_mesh(ranks, dp, tp, dtype):
    ranks(dp * tp).run(initial_values, dp, tp, dtype)


# C5


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down, self.residual = (
            nn.Linear(8, 64),
            nn.Dropout(0.3),
            nn.Linear(64, 8),
            nn.Dropout(0.3),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.masks = [self.inner(torch.ones_like(self.up(x)))]
        self.masks.append(self.residual(torch.ones_like(x).repeat(1, 1, 2)))
        return self.residual(self.down(self.inner(self.up(x))))


DROPPING_PLAN = ParallelPlan(
    {"up": column(), "inner": replicate(gradient="partial"), "down": row(), "residual": replicate()}
)


def masks(calls_before: int, steps: int) -> list[list[Tensor]]:
    model = sharded(Dropping, DROPPING_PLAN, 2, 2)
    state_of(model).tp.calls = calls_before
    found = []
    for _ in range(steps):
        model(torch.ones(4, 4, 8, dtype=torch.float64))
        found.append(model.masks)
    return found


def test_case_c5_masks_agree_where_they_must_and_differ_elsewhere(ranks):
    per_rank = ranks(4).run(masks, 0, 2)
    (inner00, residual00), (inner01, residual01), (inner10, residual10), _ = [steps[0] for steps in per_rank]
    assert torch.equal(residual00, residual01), "replicated over tp"
    assert not torch.equal(residual00, residual10), "dp ranks have other samples"
    assert not torch.equal(inner00, inner01), "tp ranks have other features"
    assert not torch.equal(inner00, inner10)
    assert not torch.equal(per_rank[0][0][1], per_rank[0][1][1]), "steps must differ"
    for mask in (inner00, residual00):
        assert set(mask.unique().tolist()) == {0.0, 1 / 0.7}
        assert (mask > 0).double().mean() == pytest.approx(0.7, abs=0.1)


def test_case_c5_a_resumed_run_goes_on_with_the_sequence(ranks):
    whole_run, resumed = ranks(4).run(masks, 0, 2), ranks(4).run(masks, 4, 1)  # four dropout calls a step
    for first, second in zip(whole_run, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first[1], second[0], strict=True))


def stream_masks(sequence_parallel: bool) -> list[Tensor]:
    model = sharded(lambda: LM(dropout=0.5), LM_PLAN, 2, 2, sequence_parallel=sequence_parallel)
    kept: list[Tensor] = []
    model.layers[0].drop.register_forward_hook(lambda module, args, out: kept.append(out != 0))
    model(share(tokens()[0], 2, 2))
    model.eval()
    model(share(tokens()[0], 2, 2))
    return kept


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_case_c5_masks_of_sequence_shards_differ(ranks, sequence_parallel):
    (first, quiet), (second, _), (other_dp, _), _ = ranks(4).run(stream_masks, sequence_parallel)
    assert torch.equal(first, second) != sequence_parallel
    assert not torch.equal(first, other_dp)
    assert quiet.all()


def test_case_c5_dropout_that_cannot_be_keyed_is_refused():
    model = on_meta(Dropping)
    plan = ParallelPlan({k: v for k, v in DROPPING_PLAN.styles.items() if k != "inner"})
    with pytest.raises(Refused, match="does not cover 'inner', a dropout with p=0.3"):
        resolve(plan, model, (2, 2))
    model.residual = nn.AlphaDropout(0.1)
    with pytest.raises(Refused, match="'residual' is a AlphaDropout"):
        resolve(DROPPING_PLAN, model, (2, 2))
    resolve(DROPPING_PLAN, model, (1, 1))


# C7


def uneven_micro_batches(dp: int, tp: int, counts: list[int]) -> None:
    ids, labels = tokens(1, 6)
    model = sharded(LM, LM_PLAN, dp, tp)
    before = whole(model, value_of)
    own = [(ids, labels)] * counts[mesh(dp, tp).get_local_rank("dp")]
    with pytest.raises(ContractError, match="different numbers of micro-batches") as caught:
        train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), own)
    assert ", ".join(str(n) for n in counts for _ in range(tp)) in str(caught.value)
    assert_same(whole(model, value_of), before, 0.0)


@pytest.mark.parametrize(("dp", "tp", "counts"), [(2, 2, [3, 2]), (4, 1, [2, 1, 1, 0]), (4, 1, [1, 1, 1, 2])])
def test_case_c7_unequal_numbers_of_micro_batches_are_refused_together(ranks, dp, tp, counts):
    ranks(4).run(uneven_micro_batches, dp, tp, counts)


def padded_tail() -> None:
    """Five samples over two dp ranks: the sixth has no labels."""
    ids, labels = tokens(6, 6)
    labels[5] = IGNORED
    reference = plain(LM)
    loss = F.cross_entropy(reference(ids[:5]).flatten(0, 1), labels[:5].flatten())
    model = sharded(LM, LM_PLAN, 2, 2)
    own = [(a[None], b[None]) for a, b in zip(share(ids, 2, 2), share(labels, 2, 2), strict=True)]
    assert train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), own).loss == pytest.approx(
        float(loss), rel=1e-11
    )


def test_case_c7_a_tail_is_padded_with_zero_weight(ranks):
    ranks(4).run(padded_tail)


def test_case_c7_the_data_gives_every_rank_as_many():
    dataset = TokenDataset(torch.arange(5 * 4 + 1), seq_len=4, seed=0)  # five sequences
    seen: list[int] = []
    for step in range(5):
        shares = [dataset.batch(step, global_batch=4, dp=2, dp_rank=r, micro_batch=1) for r in range(2)]
        assert [len(share_) for share_ in shares] == [2, 2]
        seen += [int(batch.inputs[0, 0]) // 4 for share_ in shares for batch in share_]
    assert all(seen.count(index) == 4 for index in range(5))
    with pytest.raises(Refused, match="not a multiple of dp 2"):
        check_batching(5, 2, None)


# C8


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.formula(), persistent=False)

    def formula(self) -> Tensor:
        return 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float32) / 8)

    def reset_buffers(self) -> None:
        self.inv_freq = self.formula()


class Forgetful(Rope):
    def reset_buffers(self) -> None:
        self.inv_freq[:2] = 1.0


class NoReset(Rope):
    reset_buffers = None


class Rotating(MLP):
    kind: type[Rope] = Rope

    def __init__(self) -> None:
        super().__init__()
        self.rope = self.kind()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.cat((self.rope.inv_freq, self.rope.inv_freq)).to(x.dtype))


def buffers_from_meta(dtype: torch.dtype) -> None:
    model = sharded(Rotating, MLP_PLAN, 2, 2, dtype)
    assert model.rope.inv_freq.dtype == torch.float32
    assert torch.equal(model.rope.inv_freq, Rope().inv_freq)
    assert len({tuple(each.tolist()) for each in gather(model.rope.inv_freq)}) == 1
    assert model(torch.ones(2, 8, dtype=dtype)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_c8_buffers_are_computed_again(ranks, dtype):
    ranks(4).run(buffers_from_meta, dtype)


class RotatingNoReset(Rotating):
    kind = NoReset


class RotatingForgetful(Rotating):
    kind = Forgetful


def unset_buffer(make: type[nn.Module], message: str) -> None:
    model = parallelize(on_meta(make), mesh(2, 2), MLP_PLAN)
    with pytest.raises(Refused, match=message):
        initialise(model, seed=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (RotatingNoReset, r"'rope.inv_freq' is on the meta device.*reset_buffers\(\)"),
        (RotatingForgetful, r"Forgetful.reset_buffers\(\) did not compute all of the buffer 'rope.inv_freq'"),
    ],
)
def test_case_c8_a_buffer_that_nothing_sets_is_refused(ranks, make, message):
    ranks(4).run(unset_buffer, make, message)


def llama_after_a_cast(dtype: torch.dtype) -> None:
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=2)  # fmt: skip
    model = initialise(parallelize(on_meta(lambda: Llama(config), dtype), mesh(2, 2), parallel_plan()), seed=0)
    ids = torch.arange(8).view(2, 4)
    rotary = next(m for m in model.modules() if hasattr(m, "rotary")).rotary
    tables = rotary.tables(ids, torch.zeros(2, 4, 16, dtype=dtype))
    assert tables.cos.dtype == torch.float32
    angles = torch.outer(torch.arange(4.0), config.rope_theta ** -(torch.arange(0, 8, 2) / 8))
    assert torch.allclose(tables.cos[:, :4], angles.cos(), atol=1e-6)


def test_case_c8_the_llama_has_no_such_buffer(ranks):
    with torch.device("meta"):
        model = Llama(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=2))  # fmt: skip
    assert not list(model.buffers())
    ranks(4).run(llama_after_a_cast, torch.bfloat16)


# C11


def master_weights() -> None:
    model = sharded(LM, LM_PLAN, 2, 2, torch.float32, param_dtype=torch.bfloat16)
    optimizer = adamw(model, lr=1e-3)
    seen: list[torch.dtype] = []
    model.layers[0].down.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    ids, labels = tokens()
    train_step(model, optimizer, [(share(ids, 2, 2), share(labels, 2, 2))])
    assert seen == [torch.bfloat16]
    held = [t for s in optimizer.state.values() for t in s.values()]
    assert held
    assert {t.dtype for t in [*model.parameters(), *held]} == {torch.float32}


def test_case_c11_master_weights_and_moments_stay_fp32(ranks):
    ranks(4).run(master_weights)


def low_precision_masters() -> None:
    model = sharded(MLP, MLP_PLAN, 2, 2, torch.bfloat16)
    with pytest.raises(ContractError, match=r"'\w+.weight' is torch.bfloat16.*model.float\(\)"):
        adamw(model, lr=1e-3)


def test_case_c11_adamw_refuses_master_weights_in_bfloat16(ranks):
    ranks(4).run(low_precision_masters)


def mixed() -> MLP:
    model = on_meta(MLP, torch.bfloat16)
    model.norm.float()
    return model


def test_case_c11_mixed_dtypes_in_one_unit_are_refused_at_plan_time():
    with pytest.raises(
        Refused, match=re.escape("'norm.weight' is torch.float32 and 'up.weight' is torch.bfloat16, both in the root")
    ):
        resolve(MLP_PLAN, mixed(), (2, 2))


def mixed_dtypes(frozen: bool) -> None:
    model = mixed()
    if frozen:
        model.requires_grad_(False).norm.requires_grad_(True)  # fp32 trained on top of frozen bfloat16
        plan = MLP_PLAN
    else:
        plan = ParallelPlan(MLP_PLAN.styles, ("norm",))
    model = initialise(parallelize(model, mesh(2, 2), plan, param_dtype=torch.bfloat16), seed=0)
    model(vectors(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
    assert all(p.grad.dtype == p.dtype for p in model.parameters() if p.requires_grad)
    assert model.norm.weight.grad.dtype == torch.float32
    assert whole(model)["norm.weight"].abs().sum() > 0


@pytest.mark.parametrize("frozen", [True, False])
def test_case_c11_mixed_dtypes_elsewhere_are_fine(ranks, frozen):
    ranks(4).run(mixed_dtypes, frozen)
