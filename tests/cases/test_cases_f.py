"""Group F: checkpoints and resume."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim.lr_scheduler import CosineAnnealingLR

from meshtrain import adamw, learning_rate, load_pretrained, save_pretrained
from meshtrain.data import TokenDataset
from meshtrain.errors import Damaged, Refused
from meshtrain.parallel import ParallelPlan, column, packed_column, replicate, row
from meshtrain.state.checkpoint import save_checkpoint
from meshtrain.state.checkpoints import newest_complete
from meshtrain.state.names import name_of
from meshtrain.state.restore import load_checkpoint
from meshtrain.state.saver import SaveFailed, Saver
from tests.cases.models import (
    MLP,
    MLP_PLAN,
    assert_same,
    gather,
    of_plain,
    plain,
    sharded,
    share,
    value_of,
    vectors,
    whole,
)
from tests.ranks import RankError, mesh
from tests.state.training import assert_equal, job, resumed, samples_noted

pytestmark = pytest.mark.timeout(120)


# F1


def resume_without_a_step_before(path: Path) -> None:
    run = job(2, 2)
    run.go(1)
    run.save(path)
    run.go(2)
    again = job(2, 2, empty=True)
    assert not again.optimizer.state, "a new optimizer is an empty template"
    again.load(path)
    assert len(again.optimizer.state) == len(list(again.model.parameters()))
    again.go(2)
    assert again.rows == run.rows[1:]
    assert_equal(again.values(), run.values())


def test_case_f1_moments_come_back_into_a_new_optimizer(ranks, tmp_path):
    ranks(4).run(resume_without_a_step_before, tmp_path / "out")


def resume_from(path: Path, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resumed(path, 2, 2)


def test_case_f1_a_load_that_would_restore_no_moments_is_refused(ranks, tmp_path):
    ranks(4).run(resume_without_a_step_before, tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "model", ignore=shutil.ignore_patterns("training"))
    ranks(4).run(resume_from, tmp_path / "model", Refused, "no checkpoint to resume from")
    for moments in (tmp_path / "out/training").glob("exp_avg*"):
        moments.unlink()
    ranks(4).run(resume_from, tmp_path / "out", Damaged, r"exp_avg.*is missing")


# F3


def save_before_the_first_step(path: Path) -> None:
    clean, run = job(2, 2), job(2, 2)
    clean.go(1)
    run.save(path)
    with Saver(path.with_name("background"), run.model, run.optimizer) as saver:
        saver.reserve()
        saver.save(0)
        saver.wait()
        assert saver.failure() is None
    assert not run.optimizer.state, "looking at an optimizer makes no state"
    run.go(1)
    again = resumed(path, 2, 2)
    assert not again.optimizer.state
    again.go(1)
    for other in (run, again):
        assert other.rows == clean.rows
        assert other.numbers() == clean.numbers()
        assert_equal(other.values(), clean.values())


def test_case_f3_a_save_before_the_first_step_does_not_advance_the_optimizer(ranks, tmp_path):
    ranks(4).run(save_before_the_first_step, tmp_path / "out")


# F4


def rates(path: Path) -> None:
    schedule = partial(learning_rate, peak=0.1, steps=10, warmup=3, schedule="cosine")
    run = job(2, 2, learning_rate=schedule)
    run.go(10)
    first = job(2, 2, learning_rate=schedule)
    first.go(4)
    first.save(path)
    again = resumed(path, 2, 2, learning_rate=schedule)
    again.go(10)
    assert [row.lr for row in first.rows + again.rows] == [row.lr for row in run.rows]
    assert len({row.lr for row in run.rows}) == 10
    assert again.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]


def test_case_f4_the_learning_rate_goes_on_where_it_was(ranks, tmp_path):
    ranks(4).run(rates, tmp_path / "out")


def with_torchs_scheduler(path: Path) -> None:
    """The scheduler of a loop of one's own: its state is JSON and rides along; the rate of the groups comes back by itself."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, CosineAnnealingLR]:
        model = sharded(MLP, MLP_PLAN, 2, 2)
        optimizer = adamw(model, lr=0.1)
        return model, optimizer, CosineAnnealingLR(optimizer, T_max=10)

    def steps(
        model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: CosineAnnealingLR, count: int
    ) -> list[float]:
        seen = []
        for _ in range(count):
            model(share(vectors(8, 8), 2, 2)).square().sum().backward()
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            model.zero_grad()
        return seen

    wanted = steps(*make(), 10)
    model, optimizer, scheduler = make()
    found = steps(model, optimizer, scheduler, 4)
    save_checkpoint(model, optimizer, path, step=4, run={"scheduler": scheduler.state_dict()})
    model, optimizer, scheduler = make()
    run = load_checkpoint(model, optimizer, path).run
    assert optimizer.param_groups[0]["lr"] == wanted[4]
    scheduler.load_state_dict(run["scheduler"])
    assert found + steps(model, optimizer, scheduler, 6) == wanted


def test_case_f4_so_does_a_scheduler_of_torch(ranks, tmp_path):
    ranks(4).run(with_torchs_scheduler, tmp_path / "out")


# F6


def ids(dp: int, tp: int, first: int, last: int) -> list[int]:
    """The ids that this rank trains on in some steps of 4, of a data set of the ids 0 to 63."""
    data = TokenDataset(torch.arange(65), seq_len=1, seed=7)
    rank = mesh(dp, tp).get_local_rank("dp")
    steps = [data.batch(step, global_batch=4, dp=dp, dp_rank=rank) for step in range(first, last)]
    return [int(i) for step in steps for batch in step for i in batch.inputs.flatten()]


@pytest.mark.parametrize("meshes", [[(2, 2)] * 3, [(2, 2), (4, 1), (1, 4)], [(4, 1), (2, 2), (4, 1)]])
def test_case_f6_every_id_once_however_often_a_run_stops(ranks, meshes):
    (whole_run,) = {tuple(found) for found in ranks(4).run(ids, 1, 4, 0, 16)}
    assert sorted(whole_run) == list(range(64))
    assert list(whole_run) != sorted(whole_run)
    seen: list[int] = []
    for (dp, tp), (first, last) in zip(meshes, [(0, 5), (5, 11), (11, 16)]):
        per_rank = ranks(4).run(ids, dp, tp, first, last)
        for step in range(last - first):
            size = 4 // dp
            for index in range(dp):
                replicas = {tuple(per_rank[index * tp + peer][step * size : (step + 1) * size]) for peer in range(tp)}
                assert len(replicas) == 1, "tp ranks take the same"
                seen += replicas.pop()
    assert seen == list(whole_run)


def samples_after(path: Path, dp: int, tp: int, last: int, again: Path) -> list[int]:
    run = resumed(path, dp, tp)
    with samples_noted() as seen:
        run.go(last)
    run.save(again)
    return seen if dist.get_rank() % tp == 0 else []


def begin(path: Path, steps: int) -> None:
    run = job(2, 2)
    run.go(steps)
    run.save(path)


def test_case_f6_the_position_is_in_the_checkpoint_and_a_second_resume_has_it_too(ranks, tmp_path):
    ranks(4).run(begin, tmp_path / "a", 5)
    for path, again, dp, tp, first, last in (("a", "b", 4, 1, 5, 7), ("b", "c", 2, 2, 7, 8)):
        seen = ranks(4).run(samples_after, tmp_path / path, dp, tp, last, tmp_path / again)
        assert sorted(i for part in seen for i in part) == list(range(first * 8, last * 8))


# F7


class Odd(nn.Module):
    """Weights that leave some ranks one row, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(i, o, bias=False) for o, i in ((1, 17), (17, 1), (5, 7)))


ODD_PLAN = ParallelPlan({"a": row(), "b": column(), "c": column()})


def from_a_full_dict(path: Path) -> None:
    full = {f"{name}.weight": vectors(*shape, seed=n) for n, (name, shape) in enumerate(ODD_SHAPES.items())}
    model = sharded(Odd, ODD_PLAN, 2, 2)
    # torch's own way, from rank 0 alone.
    given = {name: t.clone() for name, t in full.items()} if dist.get_rank() == 0 else {}
    set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert_same(whole(model, value_of), full, 0.0)
    # And from a file.
    if dist.get_rank() == 0:
        save_file(full, path)
    dist.barrier()
    again = sharded(Odd, ODD_PLAN, 2, 2)
    load_pretrained(again, path)
    assert_same(whole(again, value_of), full, 0.0)


ODD_SHAPES = {"a": (1, 17), "b": (17, 1), "c": (5, 7)}


def test_case_f7_full_weights_of_odd_shapes_into_a_2d_model(ranks, tmp_path):
    ranks(4).run(from_a_full_dict, tmp_path / "full.safetensors")


# F8


class Uneven(nn.Module):
    """Shapes that neither axis divides; each is cut along the dim that no tp leaves empty."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(7, 5)
        self.c, self.d = nn.Linear(4, 9), nn.Linear(8, 13)


UNEVEN_PLAN = ParallelPlan({"a": column(), "b": row(), "c": row(), "d": column()})


def uneven(dp: int, tp: int, path: Path | None, again: Path) -> dict[str, Tensor]:
    """Load if there is something to load, else make two steps; save; return what is held."""
    model = sharded(Uneven, UNEVEN_PLAN, dp, tp)
    optimizer = adamw(model, lr=0.1)
    if path is not None:
        load_checkpoint(model, optimizer, path)
    else:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * parameter
        optimizer.step()
    save_checkpoint(model, optimizer, again, step=1)
    held = {f"weight {name}": t for name, t in whole(model, value_of).items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        held |= {f"{kind} {name}": t for name, t in whole(model, lambda p, k=kind: optimizer.state[p][k]).items()}
    return held


def test_case_f8_uneven_shapes_are_bitwise_equal_on_every_mesh_and_back(ranks, tmp_path):
    first, *_ = ranks(4).run(uneven, 2, 2, None, tmp_path / "0")
    assert {tuple(t.shape) for t in first.values() if t.dim() == 2} == {(8, 8), (5, 7), (9, 4), (13, 8)}
    meshes = [(2, 2), (4, 1), (1, 4), (2, 2)]
    for number, (dp, tp) in enumerate(meshes):
        for found in ranks(4).run(uneven, dp, tp, tmp_path / str(number), tmp_path / str(number + 1)):
            assert_equal(found, first)


# F11


class Larger(MLP):
    """Has what a checkpoint of MLP lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)


LARGER_PLAN = ParallelPlan({**MLP_PLAN.styles, "extra": column()})


def strict(path: Path, model_path: Path) -> None:
    larger, model = sharded(Larger, LARGER_PLAN, 2, 2), sharded(MLP, MLP_PLAN, 2, 2)
    for load in (lambda m, p: load_pretrained(m, p), lambda m, p: load_checkpoint(m, adamw(m, lr=0.1), p)):
        with pytest.raises(Refused, match=r"2 missing, as the model has them: 'extra\.weight', 'extra\.bias'"):
            load(larger, path / "small")
        with pytest.raises(Refused, match=r"2 unexpected, as the file has them: 'extra\.bias', 'extra\.weight'"):
            load(model, path / "large")
    with pytest.raises(Refused, match=r"1 missing, as the model has them: 'up\.weight'"):
        load_pretrained(model, model_path)
    assert_same(whole(model, value_of), of_plain(plain(MLP), value_of), 0.0)


def save_both(path: Path) -> None:
    for name, make, plan in (("small", MLP, MLP_PLAN), ("large", Larger, LARGER_PLAN)):
        model = sharded(make, plan, 2, 2)
        save_checkpoint(model, adamw(model, lr=0.1), path / name, step=0)


def test_case_f11_missing_and_unexpected_keys_are_listed_and_nothing_is_filled(ranks, tmp_path):
    ranks(4).run(save_both, tmp_path)
    state = load_file(tmp_path / "small/model.safetensors")
    state.pop("up.weight")
    save_file(state, tmp_path / "partial.safetensors")
    ranks(4).run(strict, tmp_path, tmp_path / "partial.safetensors")


# F12


def die_in_a_save(folder: Path, victim: int) -> None:
    run = job(2, 2)
    with Saver(folder, run.model, run.optimizer) as saver:
        run.go(1)
        saver.save(1, run.run())
        saver.wait()
        real, calls = os.pwrite, [0]

        def killed(*arguments: Any) -> int:
            calls[0] += 1
            if calls[0] == 5 and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        run.go(2)
        with mock.patch.object(os, "pwrite", killed):
            saver.save(2, run.run())
            saver.wait()
        if (error := saver.failure()) is not None:
            raise error


def go_on(folder: Path, step: int) -> None:
    found, _ = newest_complete(folder)
    assert found is not None
    assert found.step == step
    run = resumed(found.path, 2, 2)
    with Saver(folder, run.model, run.optimizer) as saver:
        run.go(step + 1)
        saver.save(step + 1, run.run())
        saver.wait()
        assert saver.failure() is None


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_case_f12_a_rank_killed_in_a_save_costs_that_save(ranks, tmp_path, victim):
    folder = tmp_path / "checkpoints"
    with pytest.raises(RankError) as caught:
        ranks(4).run(die_in_a_save, folder, victim)
    assert caught.value.types[victim] == "Died"
    assert (folder / "latest").read_text() == "step-00000001\n"
    assert [name for name in sorted(os.listdir(folder)) if name.startswith("step")] == ["step-00000001"]
    ranks(4).run(go_on, folder, 1)
    assert sorted(os.listdir(folder)) == ["latest", "step-00000001", "step-00000002"], "the rest is swept"


def full_disk(folder: Path) -> str:
    run = job(2, 2)
    run.go(1)
    run.save(folder / name_of(1))
    real = os.pwrite

    def full(*arguments: Any) -> int:
        if dist.get_rank() == 2:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with mock.patch.object(os, "pwrite", full), pytest.raises(Exception) as caught:
        run.save(folder / name_of(2))
    return str(caught.value)


def test_case_f12_an_error_on_one_rank_raises_on_all(ranks, tmp_path):
    messages = ranks(4).run(full_disk, tmp_path)
    assert len(set(messages)) == 1
    assert "rank 2: OSError: [Errno 28] No space left on device" in messages[0]
    assert os.listdir(tmp_path) == [name_of(1)]
    ranks(4).run(go_on, tmp_path, 1)


def two_saves(folder: Path) -> None:
    run = job(2, 2)
    for step in (1, 2):
        run.go(step)
        run.save(folder / name_of(step))


@pytest.mark.parametrize(
    "damage", ["truncated", pytest.param("deleted", marks=pytest.mark.slow), "without-its-manifest"]
)
def test_case_f12_a_damaged_one_is_refused_by_name_and_the_one_before_is_taken(ranks, tmp_path, damage):
    ranks(4).run(two_saves, tmp_path)
    newest = tmp_path / name_of(2)
    file = newest / ("training/manifest.json" if damage == "without-its-manifest" else "model.safetensors")
    if damage == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    ranks(4).run(resume_from, newest, Damaged, file.name)
    _, ((path, why),) = newest_complete(tmp_path)
    assert path == newest
    assert file.name in why
    ranks(4).run(go_on, tmp_path, 1)
    found, skipped = newest_complete(tmp_path)
    assert found is not None
    assert (found.step, skipped) == (2, []), "the run came to that step again, and replaced it"


# F13


def keep_one(folder: Path) -> None:
    run = job(2, 2)
    with Saver(folder, run.model, run.optimizer, keep=1) as saver:
        run.go(1)
        saver.save(1, run.run())
        saver.wait()
        before = run.values()
        run.go(2)
        fails = mock.patch.object(os, "fsync", side_effect=OSError(5, "Input/output error"))
        with fails:
            saver.save(2, run.run())
            saver.wait()
        assert isinstance(saver.failure(), SaveFailed)
        dist.barrier()
        assert sorted(os.listdir(folder)) == ["latest", "step-00000001"]
        assert_equal(resumed(folder / "step-00000001", 2, 2).values(), before)
        saver.save(3, run.run())
        saver.wait()
        assert saver.failure() is None
        dist.barrier()
        assert sorted(os.listdir(folder)) == ["latest", "step-00000003"]


def test_case_f13_the_only_complete_one_goes_when_the_next_is_complete_and_not_before(ranks, tmp_path):
    ranks(4).run(keep_one, tmp_path / "checkpoints")


# F14


def overwrite_at_once(folder: Path) -> None:
    run, may_write = job(2, 2), threading.Event()
    run.go(1)
    real = os.pwrite

    def later(*arguments: Any) -> int:
        assert may_write.wait(30)
        return real(*arguments)

    with Saver(folder, run.model, run.optimizer) as saver:
        for step in (1, 2):
            before = run.values()
            with mock.patch.object(os, "pwrite", later):
                saver.save(step, run.run())
                with torch.no_grad():
                    for parameter in run.model.parameters():
                        parameter.to_local().fill_(step)
                        run.optimizer.state[parameter]["exp_avg"].to_local().fill_(10 * step)
                may_write.set()
                saver.wait()
            assert saver.failure() is None
            assert_equal(resumed(folder / name_of(step), 2, 2).values(), before)
            may_write.clear()


def test_case_f14_a_save_in_the_background_holds_the_values_of_the_call_and_the_second_its_own(ranks, tmp_path):
    ranks(4).run(overwrite_at_once, tmp_path / "checkpoints")


# F15


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(16))


def resources() -> tuple[int, int, int]:
    """Bytes of this process's own memory, open descriptors, threads."""
    status = Path("/proc/self/status").read_text().splitlines()
    own = int(next(line for line in status if line.startswith("RssAnon")).split()[1]) * 1024
    return own, len(os.listdir("/proc/self/fd")), threading.active_count()


def twenty_saves(folder: Path) -> tuple[int, int, int]:
    model = sharded(Wide, ParallelPlan({"layers.*": replicate()}), 2, 1)
    optimizer = adamw(model, lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Saver(folder, model, optimizer, keep=1) as saver:
        for step in range(1, 26):
            saver.save(step)
            saver.wait()
            assert saver.failure() is None
            if step == 5:
                before = resources()
        return tuple(after - first for first, after in zip(before, resources()))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_case_f15_twenty_saves_in_the_background_leave_nothing(ranks, tmp_path):
    """A rank holds 12 MiB of the state."""
    for memory, descriptors, threads in ranks(2).run(twenty_saves, tmp_path / "checkpoints", timeout=100.0):
        assert memory < 4 * 2**20
        assert (descriptors, threads) == (0, 0)


def unseen(folder: Path) -> list[str]:
    run = job(2, 2)
    run.go(1)
    real = os.pwrite

    def broken(*arguments: Any) -> int:
        if dist.get_rank() == 1:
            raise OSError(5, "Input/output error")
        return real(*arguments)

    with Saver(folder, run.model, run.optimizer) as saver:
        with mock.patch.object(os, "pwrite", broken):
            saver.save(1, run.run())
            saver.wait()
        assert gather(saver.failed) == [True] * 4
        return gather(str(saver.failure()))


def test_case_f15_a_writer_that_fails_on_one_rank_fails_on_all(ranks, tmp_path):
    for messages in ranks(4).run(unseen, tmp_path / "checkpoints"):
        assert len(set(messages)) == 1
        assert "rank 1: OSError: [Errno 5] Input/output error" in messages[0]


# F17


class Counting(MLP):
    """With a counter that is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counter", torch.tensor(7))

    def reset_buffers(self) -> None:
        self.counter = torch.tensor(0)


def buffers(path: Path) -> None:
    model = sharded(Counting, MLP_PLAN, 2, 2)
    full = {name: t for name, t in plain(Counting).state_dict().items()}
    full["counter"] = torch.tensor(7)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    assert gather(int(model.counter)) == [7] * 4
    model.counter += 1
    save_checkpoint(model, adamw(model, lr=0.1), path, step=0)
    again = sharded(Counting, MLP_PLAN, 2, 2)
    load_checkpoint(again, adamw(again, lr=0.1), path)
    assert gather(int(again.counter)) == [8] * 4
    assert_same(whole(again, value_of), whole(model, value_of), 0.0)


def test_case_f17_buffers_are_equal_on_all_ranks(ranks, tmp_path):
    ranks(4).run(buffers, tmp_path / "out")


# F20


class Fused(nn.Module):
    """Both kinds of fused weights: gate and up in one, and query, key and value of unequal numbers of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(8, 24), nn.Linear(12, 8)
        self.qkv, self.o = nn.Linear(8, (8 + 4 + 4) * 2), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        x = x + self.down(nn.functional.silu(gate) * up)
        heads = self.qkv(x).unflatten(-1, (-1, 2)).transpose(-2, -3)
        # On a tp rank there are a share of the heads of each part.
        count = heads.shape[-3] // 4
        q, k, v = heads[..., : 2 * count, :, :], heads[..., 2 * count : 3 * count, :, :], heads[..., 3 * count :, :, :]
        k, v = k.repeat_interleave(2, -3), v.repeat_interleave(2, -3)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.o(mixed.transpose(-2, -3).flatten(-2))


FUSED_PLAN = ParallelPlan(
    {"gate_up": packed_column(parts=2), "down": row(), "qkv": packed_column(heads=(8, 4, 4)), "o": row()}
)


def fused(dp: int, tp: int, path: Path | None, again: Path | None) -> tuple[Tensor, Tensor]:
    """Logits of the model, trained two steps or loaded; and of the one that a further step makes of it."""
    model = sharded(Fused, FUSED_PLAN, dp, tp)
    optimizer = adamw(model, lr=0.1)
    x = vectors(4, 5, 8)

    def step() -> None:
        model(share(x, dp, tp)).square().mean().backward()  # dp averages
        optimizer.step()
        model.zero_grad()

    if path is not None:
        load_checkpoint(model, optimizer, path)
    else:
        step()
        step()
    if again is not None:
        save_checkpoint(model, optimizer, again, step=2)
    before = model(x).detach()
    step()
    return before, model(x).detach()


def test_case_f20_fused_weights_at_another_tp_give_equal_logits(ranks, tmp_path):
    path = tmp_path / "out"
    logits, later = ranks(4).run(fused, 2, 2, None, path)[0]
    for dp, tp in [(1, 4), (4, 1), (2, 2)]:
        for found in ranks(4).run(fused, dp, tp, path, None):
            assert torch.allclose(found[0], logits, rtol=0, atol=1e-12)
            assert torch.allclose(found[1], later, rtol=0, atol=1e-10)
    for found in ranks(1).run(fused, 1, 1, path, None):
        assert torch.allclose(found[0], logits, rtol=0, atol=1e-12)
    assert (later - logits).abs().max() > 1e-3


def fused_logits(path: Path) -> None:
    model, ids = sharded(Fused, FUSED_PLAN, 2, 2), vectors(4, 5, 8)
    save_pretrained(model, path)
    alone = Fused().double()
    load_pretrained(alone, path)
    assert torch.allclose(alone(ids), model(ids), rtol=0, atol=1e-12)


def test_case_f20_and_one_process_reads_them_in_their_own_order(ranks, tmp_path):
    ranks(4).run(fused_logits, tmp_path / "out")
