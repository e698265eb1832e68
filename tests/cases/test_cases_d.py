"""Group D: plans, shapes and the order of wrapping."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from meshtrain.errors import ContractError, Refused
from meshtrain.mesh import init_mesh
from meshtrain.parallel import (
    ParallelPlan,
    column,
    cross_entropy,
    heads,
    initialise,
    packed_column,
    packed_row,
    parallelize,
    replicate,
    resolve,
    row,
)
from meshtrain.train.optim import adamw
from tests.cases.models import (
    LM,
    LM_PLAN,
    LM_STYLES,
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


def like_one_process(make, plan, dp: int, tp: int, x: Tensor, options: dict | None = None, tol: float = 1e-11) -> None:
    """Outputs and gradients of a model on a mesh against those of plain torch."""
    reference = plain(make)
    wanted = reference(x)
    wanted.square().sum().backward()
    model = sharded(make, plan, dp, tp, **(options or {}))
    got = model(share(x, dp, tp))
    (got.square().sum() * dp).backward()
    assert torch.allclose(got, share(wanted, dp, tp), rtol=0, atol=tol * float(wanted.abs().max()))
    assert_same(whole(model), of_plain(reference), tol)


def train_like_one_process(
    make, plan, dp: int, tp: int, seq: int = 10, options: dict | None = None, steps: int = 3
) -> None:
    """Losses and weights over some steps of AdamW against those of plain torch."""
    reference, model = plain(make), sharded(make, plan, dp, tp, **(options or {}))
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        ids, labels = tokens(8, seq, step, reference.embed.num_embeddings)
        wanted = F.cross_entropy(reference(ids).flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()
        wanted.backward()
        (cross_entropy(model(share(ids, dp, tp)), share(labels, dp, tp)) * dp / labels.numel()).backward()
        if step == 0:
            assert_same(whole(model), of_plain(reference), 1e-10)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    ids, labels = tokens(8, seq, steps, reference.embed.num_embeddings)
    mine = cross_entropy(model(ids), labels).item()
    assert mine == pytest.approx(
        F.cross_entropy(reference(ids).flatten(0, 1), labels.flatten(), reduction="sum").item(), rel=1e-8
    )


# D1


@pytest.mark.parametrize(
    ("queries", "keys", "tp", "message"),
    [
        (4, 2, 3, "'layers.0.q': tp 3 would cut a head of its 4 heads. tp can be 1, 2, 4"),
        (6, 2, 4, "'layers.0.q': tp 4 would cut a head of its 6 heads. tp can be 1, 2, 3, 6"),
        (6, 4, 2, "'layers.0.k': 6 query heads cannot share 4 key and value heads evenly"),
        (
            12,
            6,
            4,
            "'layers.0.k': tp 4 would cut a head of its 6 heads shared by 12 query heads. tp can be 1, 2, 3, 6, 12",
        ),
    ],
)
def test_case_d1_a_cut_through_a_head_is_refused_with_numbers(queries, keys, tp, message):
    plan = heads_plan(queries, keys)
    with pytest.raises(Refused, match=re.escape(message)):
        resolve(plan, on_meta(lambda: LM(width=24, queries=queries, keys=keys)), (1, tp))


def heads_plan(queries: int, keys: int) -> ParallelPlan:
    styles = {**LM_STYLES, "layers.*.q": heads(queries), "layers.*.[kv]": heads(keys, shared_by=queries)}
    return ParallelPlan(styles, ("layers.*",))


def shared_heads(dp: int, tp: int, queries: int, keys: int, options: dict) -> None:
    def make() -> LM:
        return LM(width=24, queries=queries, keys=keys)

    train_like_one_process(make, heads_plan(queries, keys), dp, tp, options=options)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}])
@pytest.mark.parametrize(
    ("dp", "tp", "queries", "keys"), [(1, 4, 4, 2), (1, 4, 4, 1), (2, 2, 4, 1), (1, 4, 12, 4), (1, 3, 6, 3)]
)
def test_case_d1_heads_shared_by_tp_ranks_are_right(ranks, dp, tp, queries, keys, options):
    ranks(dp * tp).run(shared_heads, dp, tp, queries, keys, options)


# D3


def uneven_hidden(dp: int, tp: int, hidden: int) -> None:
    like_one_process(lambda: MLP(6, hidden), MLP_PLAN, dp, tp, vectors(8, 3, 6))


@pytest.mark.parametrize("hidden", [5, 7, 13])
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_case_d3_a_hidden_size_that_tp_does_not_divide(ranks, dp, tp, hidden):
    if tp == 4 and hidden == 5:
        with pytest.raises(
            Refused, match=re.escape("'up': the output size is 5, and tp 4 would leave rank 3 of the tp axis an empty")
        ):
            resolve(MLP_PLAN, on_meta(lambda: MLP(6, 5)), (1, 4))
    else:
        ranks(4).run(uneven_hidden, dp, tp, hidden)


# D4


def odd_length(dp: int, tp: int, seq: int, options: dict) -> None:
    train_like_one_process(LM, LM_PLAN, dp, tp, seq, options, steps=2)


@pytest.mark.parametrize("seq", [6, 5, 3, 1])
@pytest.mark.parametrize(("dp", "tp"), [(1, 4), (2, 2)])
def test_case_d4_sequences_that_tp_does_not_divide(ranks, dp, tp, seq):
    ranks(4).run(odd_length, dp, tp, seq, {"sequence_parallel": True})


def lengths_change() -> None:
    reference, model = plain(LM), sharded(LM, LM_PLAN, 1, 4, loss_parallel=False)
    for seq in (8, 5, 2, 8):
        ids, _ = tokens(2, seq)
        assert torch.allclose(model(ids), reference(ids), rtol=0, atol=1e-11)


def test_case_d4_a_short_last_batch(ranks):
    ranks(4).run(lengths_change)


# D5


class Gated(nn.Module):
    def __init__(self, parts: int = 2) -> None:
        super().__init__()
        self.parts = parts
        self.gate_up, self.down = nn.Linear(8, parts * 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, *rest = self.gate_up(x).chunk(self.parts, -1)
        return self.down(F.silu(gate) * sum(rest))


def gated(dp: int, tp: int, parts: int) -> None:
    plan = ParallelPlan({"gate_up": packed_column(parts=parts), "down": row()})
    like_one_process(lambda: Gated(parts), plan, dp, tp, vectors(8, 3, 8))


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 4), (1, 3)])
def test_case_d5_a_fused_weight_is_cut_part_by_part(ranks, dp, tp, parts):
    ranks(dp * tp).run(gated, dp, tp, parts)


def naive() -> float:
    plan = ParallelPlan({"gate_up": column(fused=False), "down": row()})
    x, model = vectors(8, 3, 8), sharded(Gated, plan, 1, 2)
    return float((model(x) - plain(Gated)(x)).abs().max())


def test_case_d5_an_unpacked_cut_of_it_is_wrong_and_refused(ranks):
    assert min(ranks(2).run(naive)) > 1e-2, "the fault that the refusal is for"
    with pytest.raises(
        Refused, match=r"'gate_up' looks like several matrices fused into one.*packed_column\(parts=2\)"
    ):
        resolve(ParallelPlan({"gate_up": column(), "down": row()}), on_meta(Gated), (1, 2))


class FusedQKV(nn.Module):
    """Four query heads and two key and value heads of size 3."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(12, (4 + 2 + 2) * 3), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        out = self.qkv(x).unflatten(-1, (-1, 3)).transpose(-2, -3)
        many = out.shape[1] // 2
        q, k, v = out[:, :many], out[:, many : many + many // 2], out[:, many + many // 2 :]
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2))


def fused_qkv(dp: int) -> None:
    plan = ParallelPlan({"qkv": packed_column(heads=(4, 2, 2)), "o": row()})
    like_one_process(FusedQKV, plan, dp, 2, vectors(8, 5, 12))


@pytest.mark.parametrize("dp", [1, 2])
def test_case_d5_fused_heads_of_different_numbers(ranks, dp):
    ranks(dp * 2).run(fused_qkv, dp)


class TwoPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fuse, self.join = nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(F.gelu(self.fuse(x)))


def two_packed() -> None:
    plan = ParallelPlan({"fuse": packed_column(parts=2), "join": packed_row(parts=2)})
    like_one_process(TwoPacked, plan, 2, 2, vectors(8, 3, 8))


def test_case_d5_a_packed_output_that_stays_packed(ranks):
    ranks(4).run(two_packed)


# D7


@pytest.mark.parametrize(
    ("styles", "units", "message"),
    [
        ({"upp": column()}, (), "the entry 'upp' matches no module of the MLP; did you mean 'up'?"),
        ({"layers.*.q": column()}, (), "the entry 'layers.*.q' matches no module of the MLP"),
        ({"up.weight": column()}, (), "it names a parameter, and a plan names modules: write 'up'"),
        ({"UP": column()}, (), "the entry 'UP' matches no module"),
        ({"*": row(), **MLP_PLAN.styles}, (), "is covered twice"),
        (MLP_PLAN.styles, ("blocks.*",), "the unit 'blocks.*' matches no module of the MLP"),
        (MLP_PLAN.styles, ("nrm",), "the unit 'nrm' matches no module of the MLP; did you mean 'norm'?"),
    ],
)
def test_case_d7_a_pattern_that_matches_nothing_is_refused(styles, units, message):
    with pytest.raises(Refused, match=re.escape(message)):
        resolve(ParallelPlan({**MLP_PLAN.styles, **styles}, units), on_meta(MLP), (2, 2))


# D8


class LoRA(nn.Module):
    """A frozen linear layer with a trained low-rank addition."""

    def __init__(self, fan_in: int = 8, fan_out: int = 16, rank: int = 3) -> None:
        super().__init__()
        self.base, self.a, self.b = (
            nn.Linear(fan_in, fan_out),
            nn.Linear(fan_in, rank, bias=False),
            nn.Linear(rank, fan_out, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Adapted(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.up = LoRA()
        self.requires_grad_(False)
        for part in (self.up.a, self.up.b):
            part.requires_grad_(True)


ADAPTED_PLANS = {
    "whole": ParallelPlan(
        {"norm": replicate(), "up.base": column(), "up.a": replicate(), "up.b": column(), "down": row()}
    ),
}


def lora_steps(dp: int, tp: int, plan: ParallelPlan) -> None:
    reference, model = plain(Adapted), sharded(Adapted, plan, dp, tp)
    start = whole(model, value_of)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"up.a.weight", "up.b.weight"}
    ours = adamw(model, lr=0.1)
    theirs = torch.optim.AdamW(
        [p for p in reference.parameters() if p.requires_grad], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1
    )
    assert sum(len(group["params"]) for group in ours.param_groups) == 2
    for step in range(2):
        x = vectors(8, 8, seed=step)
        reference(x).square().sum().backward()
        (model(share(x, dp, tp)).square().sum() * dp).backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None} == trained
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    end = whole(model, value_of)
    assert tuple(end["up.a.weight"].shape) == (3, 8)
    assert_same({n: end[n] for n in end if n not in trained}, {n: start[n] for n in start if n not in trained}, 0.0)
    assert_same(end, of_plain(reference, value_of), 1e-10)
    merged = end["up.base.weight"] + end["up.b.weight"] @ end["up.a.weight"]
    right = reference.up.base.weight + reference.up.b.weight @ reference.up.a.weight
    assert torch.allclose(merged, right, atol=1e-10)


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_case_d8_lora_on_a_frozen_model(ranks, dp, tp):
    ranks(4).run(lora_steps, dp, tp, ADAPTED_PLANS["whole"])


# D9


def tied(vocab: int = 12) -> LM:
    return LM(vocab=vocab, tied=True)


def tied_steps(dp: int, tp: int, vocab: int, options: dict) -> None:
    def make() -> LM:
        return tied(vocab)

    model = sharded(make, LM_PLAN, dp, tp, **options)
    assert model.lm_head.weight is model.embed.weight
    train_like_one_process(make, LM_PLAN, dp, tp, options=options)


@pytest.mark.parametrize(
    ("vocab", "options"), [(12, {}), (17, {}), (12, {"sequence_parallel": False, "loss_parallel": False})]
)
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_case_d9_tied_weights_stay_tied_and_right(ranks, dp, tp, vocab, options):
    ranks(4).run(tied_steps, dp, tp, vocab, options)


def test_case_d9_a_tie_that_cannot_be_kept_is_refused():
    different = ParallelPlan({**LM_STYLES, "lm_head": replicate()}, ("layers.*",))
    with pytest.raises(
        Refused, match=r"'embed.weight' and 'lm_head.weight' are one \(tied\) parameter.*cut it differently"
    ):
        resolve(different, on_meta(tied), (2, 2))
    apart = ParallelPlan(LM_STYLES, ("layers.*", "lm_head"))
    with pytest.raises(Refused, match="but lie in the root and the unit 'lm_head': FSDP would give each its own copy"):
        resolve(apart, on_meta(tied), (2, 2))


# D11


def around_the_hooks(dp: int, tp: int) -> None:
    x = vectors(4, 8)
    model, reference = sharded(MLP, MLP_PLAN, dp, tp), plain(MLP)
    for call in (model.forward, model.encode, model.up):
        with pytest.raises(ContractError, match="register_fsdp_forward_method|Call model"):
            call(x)
    register_fsdp_forward_method(model, "encode")
    wanted = reference.encode(x)
    got = model.encode(x)
    assert torch.allclose(got, wanted.chunk(tp, -1)[mesh(dp, tp).get_local_rank("tp")], atol=1e-12)
    assert torch.allclose(model(x), reference(x), atol=1e-12)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2), (1, 2)])
def test_case_d11_calls_around_the_hooks_are_refused_with_the_way_out(ranks, dp, tp):
    ranks(dp * tp).run(around_the_hooks, dp, tp)


# D12


def optimizer_built(when: str, kind: str, reshard: bool) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return (
            torch.optim.SGD(model.parameters(), lr=1.0)
            if kind == "sgd"
            else torch.optim.AdamW(model.parameters(), lr=1.0)
        )

    x, model = vectors(8, 8), plain(MLP)
    early = sgd(model) if when == "before parallelize" else None
    parallelize(model, mesh(2, 2), ParallelPlan(MLP_PLAN.styles, ("up",)), reshard_after_forward=reshard)
    if when == "after an evaluation":
        with torch.no_grad():
            model(share(x, 2, 2))
        early = sgd(model)
    before = whole(model, value_of)
    out = model(share(x, 2, 2))
    optimizer = early or sgd(model)
    out.square().sum().backward()
    if when == "after an evaluation":
        optimizer.step()
        after = whole(model, value_of)
        assert all(not torch.equal(before[name], after[name]) for name in before)
        return
    with pytest.raises(
        ContractError, match="the optimizer holds a parameter of shape .* that its step would not train"
    ):
        optimizer.step()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("when", ["before parallelize", "after an evaluation", "between forward and backward"])
def test_case_d12_an_optimizer_trains_what_it_holds_or_is_refused(ranks, when, reshard, kind):
    ranks(4).run(optimizer_built, when, kind, reshard)


def built_on_meta() -> None:
    model = parallelize(on_meta(MLP), mesh(2, 2), MLP_PLAN)
    with pytest.raises(ContractError, match="has no values yet: call initialise"):
        adamw(model, lr=1.0)
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    initialise(model, seed=3)
    model(share(vectors(8, 8), 2, 2)).square().sum().backward()
    with pytest.raises(ContractError, match="that its step would not train"):
        early.step()


def test_case_d12_neither_one_of_parameters_without_values(ranks):
    ranks(4).run(built_on_meta)


def after_evaluation() -> None:
    model = sharded(LM, LM_PLAN, 2, 2, reshard_after_forward=False)
    ids, labels = tokens()
    with torch.no_grad():
        model(share(ids, 2, 2))
    optimizer = adamw(model, lr=0.1)
    before = whole(model, value_of)
    cross_entropy(model(share(ids, 2, 2)), share(labels, 2, 2)).backward()
    optimizer.step()
    after = whole(model, value_of)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_case_d12_meshtrains_own_optimizer_is_right_at_any_time(ranks):
    ranks(4).run(after_evaluation)


# D13


def two_forwards(dp: int, tp: int, seqs: tuple[int, int], options: dict) -> None:
    reference = plain(LM)
    batches = [tokens(4, seq, seed) for seed, seq in enumerate(seqs)]
    losses = [F.cross_entropy(reference(a).flatten(0, 1), b.flatten(), reduction="sum") for a, b in batches]
    (losses[0] * 2 + losses[1]).backward()
    for checkpointing in (True, False):
        model = sharded(LM, LM_PLAN, dp, tp, activation_checkpointing=checkpointing, **options)
        first, second = (cross_entropy(model(share(a, dp, tp)), share(b, dp, tp)) for a, b in batches)
        ((first * 2 + second) * dp).backward()
        assert_same(whole(model), of_plain(reference), 1e-10)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}, {"reshard_after_forward": False}])
@pytest.mark.parametrize(("dp", "tp", "seqs"), [(2, 2, (6, 6)), (2, 2, (8, 5)), (1, 4, (5, 7)), (4, 1, (4, 6))])
def test_case_d13_two_forwards_before_one_backward(ranks, dp, tp, seqs, options):
    ranks(4).run(two_forwards, dp, tp, seqs, options)


def evaluation_in_between(options: dict) -> None:
    reference, model = plain(LM), sharded(LM, LM_PLAN, 2, 2, **options)
    ids, labels = tokens()
    wanted = F.cross_entropy(reference(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    wanted.backward()
    loss = cross_entropy(model(share(ids, 2, 2)), share(labels, 2, 2))
    with torch.no_grad():
        model(tokens(2, 5)[0])
    (loss * 2).backward()
    assert_same(whole(model), of_plain(reference), 1e-10)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}, {"reshard_after_forward": False}])
def test_case_d13_an_evaluation_between_forward_and_backward(ranks, options):
    ranks(4).run(evaluation_in_between, options)


def dropped() -> LM:
    return LM(dropout=0.3)


def checkpointed_dropout(dp: int, tp: int) -> None:
    found = []
    for checkpointing in (True, False):
        model = sharded(dropped, LM_PLAN, dp, tp, activation_checkpointing=checkpointing)
        total = sum(cross_entropy(model(share(a, dp, tp)), share(b, dp, tp)) for a, b in (tokens(4, 6), tokens(4, 5)))
        total.backward()
        found.append(whole(model))
    assert_same(*found, 1e-12)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 4)])
def test_case_d13_the_second_run_drops_the_same_elements(ranks, dp, tp):
    ranks(4).run(checkpointed_dropout, dp, tp)


# D16


def compiled(dp: int, tp: int, options: dict) -> dict[str, int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ids, labels = tokens()
    reference, model = plain(LM), sharded(LM, LM_PLAN, dp, tp, compile_backend="aot_eager", **options)
    wanted = F.cross_entropy(reference(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    wanted.backward()
    for _ in range(2):
        model.zero_grad()
        loss = cross_entropy(model(share(ids, dp, tp)), share(labels, dp, tp))
        (loss * dp).backward()
        assert_same(whole(model), of_plain(reference), 1e-10)
    assert sum(gather(loss.item())) == pytest.approx(wanted.item() * tp, rel=1e-12)
    counters = torch._dynamo.utils.counters
    found = {"breaks": sum(counters["graph_break"].values()), "graphs": counters["stats"]["unique_graphs"]}
    torch._dynamo.reset()
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("dp", "tp", "options"),
    [
        (1, 2, {}),
        pytest.param(2, 2, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"sequence_parallel": False}, marks=pytest.mark.slow),
        pytest.param(1, 2, {"activation_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_case_d16_compiled_units_give_the_same(ranks, dp, tp, options):
    for counts in ranks(dp * tp).run(compiled, dp, tp, options, timeout=360):
        assert counts == {"breaks": 0, "graphs": 1}, "the two blocks are alike, and share a graph"


def compiled_dropout() -> None:
    """The masks of compiled units are those of eager ones, new in each call."""
    found = []
    for backend in ("aot_eager", None):
        torch._dynamo.reset()
        model = sharded(dropped, LM_PLAN, 1, 2, compile_backend=backend)
        losses = [cross_entropy(model(a), b) for a, b in (tokens(2, 6), tokens(2, 6))]
        sum(losses).backward()
        assert losses[0] != losses[1]
        found.append(whole(model))
    torch._dynamo.reset()
    assert_same(*found, 1e-12)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_case_d16_compiled_units_drop_what_eager_ones_drop(ranks):
    ranks(2).run(compiled_dropout, timeout=360)


# D17


def device_of_everything() -> None:
    model = sharded(MLP, MLP_PLAN, 2, 2)
    model(share(vectors(8, 8), 2, 2)).sum().backward()
    assert init_mesh(2, 2, "cpu").device_type == "cpu"
    for parameter in model.parameters():
        assert parameter.device_mesh.device_type == "cpu"
        assert {parameter.device.type, parameter.to_local().device.type, parameter.grad.device.type} == {"cpu"}


def test_case_d17_the_device_is_the_mesh_s(ranks):
    ranks(4).run(device_of_everything)


def shown_a_gpu(monkeypatch_count: int) -> None:
    """A host that has GPUs, as far as torch can be asked, and a run that wants the CPU."""
    import meshtrain.mesh as under_test

    real = under_test.cuda_device_count
    under_test.cuda_device_count = lambda: monkeypatch_count
    try:
        assert init_mesh(2, 2, "cpu").device_type == "cpu"
        assert init_mesh(2, 2).device_type == "cpu", "a gloo group of CPU ranks"
        device_of_everything()
        assert not torch.cuda.is_initialized()
    finally:
        under_test.cuda_device_count = real


def test_case_d17_gloo_ranks_stay_on_the_cpu_where_there_are_gpus(ranks):
    ranks(4).run(shown_a_gpu, 4)
