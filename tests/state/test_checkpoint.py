"""One checkpoint: what it consists of, that damage of any kind is found, and what is refused. Resuming is in test_resume.py."""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from meshtrain import adamw, load_pretrained
from meshtrain.errors import ContractError, Damaged, MeshtrainError, Refused
from meshtrain.state.checkpoint import inspect_checkpoint, save_checkpoint
from meshtrain.state.restore import load_checkpoint
from tests.cases.models import MLP, MLP_PLAN, sharded
from tests.state.training import assert_equal, job, resumed

pytestmark = pytest.mark.timeout(120)


class Net(nn.Module):
    """Small, with buffers of many kinds, one of them empty."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 1)
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.ones(5), persistent=False)
        self.config = {"model_type": "net"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def trained(steps: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    more(net, optimizer, steps)
    return net, optimizer


def more(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        net(torch.full((2, 4), step + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def fresh(width: int = 3) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(width)
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.zero_()
    return net, torch.optim.AdamW(net.parameters(), lr=0.5)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(
        *trained(), tmp_path / "step-00000002", step=2, run={"tokens": 5, "nested": {"a": [1, None]}}
    )


# What it consists of.


def check_manifest(path: Path) -> None:
    """Every file and tensor has the checksum that the manifest says, computed here by zlib alone."""
    content = json.loads((path / "training/manifest.json").read_bytes())
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert set(content["files"]) == files - {"training/manifest.json"}
    for name, sums in content["files"].items():
        raw = (path / name).read_bytes()
        assert (len(raw), f"{zlib.crc32(raw):08x}") == (sums["bytes"], sums["crc32"]), name
        assert ("header" in sums) == (name.endswith(".safetensors") and "generators" not in name)
        if "header" in sums:
            begin = 8 + int.from_bytes(raw[:8], "little")
            assert f"{zlib.crc32(raw[:begin]):08x}" == sums["header"]
            header = json.loads(raw[8:begin])
            header.pop("__metadata__", None)
            for key, entry in header.items():
                first, last = entry["data_offsets"]
                assert f"{zlib.crc32(raw[begin + first : begin + last]):08x}" == sums["tensors"].pop(key), key
            assert not sums["tensors"]


def test_the_files_are_those_of_the_specification(saved: Path) -> None:
    assert sorted(str(file.relative_to(saved)) for file in saved.rglob("*") if file.is_file()) == [
        "config.json", "model.safetensors", "training/exp_avg.safetensors", "training/exp_avg_sq.safetensors",
        "training/generators.safetensors", "training/manifest.json", "training/state.json",
    ]  # fmt: skip
    check_manifest(saved)
    assert os.listdir(saved.parent) == [saved.name]
    state = json.loads((saved / "training/state.json").read_text())
    assert (state["format"], state["version"], state["step"]) == ("meshtrain training state", 1, 2)
    assert state["mesh"] == {"dp": 1, "tp": 1}
    assert state["run"] == {"tokens": 5, "nested": {"a": [1, None]}}
    names = [name for name, _ in Net().named_parameters()]
    assert state["optimizer"]["kind"] == "AdamW"
    assert state["optimizer"]["numbers"] == {"step": {"all": 2.0, "of": sorted(names)}}
    assert state["optimizer"]["moments"]["exp_avg"] == {"float32": sorted(names)}
    assert state["optimizer"]["groups"][0]["params"] == names
    with safe_open(saved / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {*names, "nothing", "count", "mask"}
        assert file.get_tensor("count") == 7
        assert file.get_tensor("nothing").shape == (0,)


def save_on_ranks(dp: int, tp: int, path: Path) -> None:
    run = job(dp, tp, "tied")
    run.go(2)
    run.save(path, max_shard_size=3000)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_the_sums_are_right_though_no_rank_held_the_whole(ranks: Any, tmp_path: Path, dp: int, tp: int) -> None:
    ranks(4).run(save_on_ranks, dp, tp, tmp_path / "out")
    check_manifest(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert len(list((tmp_path / "out/training").glob("exp_avg-*.safetensors"))) > 2
    assert os.listdir(tmp_path) == ["out"]


def test_everything_comes_back(saved: Path) -> None:
    net, optimizer = trained()
    again, other = fresh()
    found = load_checkpoint(again, other, saved)
    assert (found.step, found.run, found.path) == (2, {"tokens": 5, "nested": {"a": [1, None]}}, saved)
    assert_equal(again.state_dict(), net.state_dict())
    assert not again.scratch.any(), "what is not persistent is not in a checkpoint"
    assert other.param_groups[0]["lr"] == 0.1
    for net_, optimizer_ in ((net, optimizer), (again, other)):
        more(net_, optimizer_, 3)
    assert_equal(again.state_dict(), net.state_dict())


def test_a_state_without_moments_is_saved_as_such(tmp_path: Path) -> None:
    """Before the first step, and with an optimizer that keeps none."""
    net = Net()
    for number, optimizer in enumerate(
        (torch.optim.AdamW(net.parameters()), torch.optim.SGD(net.parameters(), lr=0.1))
    ):
        path = save_checkpoint(net, optimizer, tmp_path / str(number), step=0)
        assert not list((path / "training").glob("exp*"))
        again, _ = fresh()
        other = type(optimizer)(again.parameters(), lr=0.1)
        more(again, other, 1)
        assert load_checkpoint(again, other, path).step == 0
        assert not other.state
        assert_equal(again.state_dict(), net.state_dict())


def test_it_is_a_model_directory(saved: Path) -> None:
    again, _ = fresh()
    load_pretrained(again, saved)
    assert_equal(again.state_dict(), trained()[0].state_dict())


def test_a_double_precision_model_takes_weights_and_moments_of_single_precision(saved: Path) -> None:
    again, (net, optimizer) = fresh()[0].double(), trained()
    other = torch.optim.AdamW(again.parameters(), fused=True)
    load_checkpoint(again, other, saved)
    assert torch.equal(again.up.weight, net.up.weight.double())
    wanted = optimizer.state[net.up.weight]["exp_avg"].double()
    assert torch.equal(other.state[again.up.weight]["exp_avg"], wanted)
    again(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
    other.step()


def seeds_on(path: Path) -> tuple[float, float]:
    torch.manual_seed(99)
    resumed(path, 2, 1)
    return float(torch.rand(())), float(torch.rand(()))


def test_on_another_number_of_ranks_generators_are_seeded_from_the_old_ones(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(begin, 2, 2, tmp_path / "out")
    first, second = ranks(2).run(seeds_on, tmp_path / "out")
    assert first != second, "ranks draw different numbers"
    assert ranks(2).run(seeds_on, tmp_path / "out") == [first, second]


def begin(dp: int, tp: int, path: Path) -> None:
    run = job(dp, tp, dtype=torch.float32)
    run.go(1)
    run.save(path)


# Damage.


def test_a_flipped_bit_in_any_place_is_found(saved: Path) -> None:
    """All over every file: on inspection where it is looked at, else when the tensor is read."""
    for file in sorted(saved.rglob("*")):
        if not file.is_file():
            continue
        raw = bytearray(file.read_bytes())
        for position in range(0, len(raw), max(1, len(raw) // 40)):
            raw[position] ^= 1 << position % 8
            file.write_bytes(raw)
            with pytest.raises(Damaged, match=file.name):
                load_checkpoint(*fresh(), saved)
            raw[position] ^= 1 << position % 8
        file.write_bytes(raw)
    load_checkpoint(*fresh(), saved)


def data_of(path: Path, name: str, key: str) -> int:
    """The byte of a file at which a tensor begins."""
    raw = (path / name).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return 8 + length + int(json.loads(raw[8 : 8 + length])[key]["data_offsets"][0])


def refused(dp: int, tp: int, path: Path) -> str:
    """The message of the refusal, which every rank gets."""
    run = job(dp, tp, dtype=torch.float32)
    with pytest.raises(MeshtrainError) as caught:
        run.load(path)
    assert dist.get_world_size() == dp * tp
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("name", "key", "more"),
    [
        pytest.param("model.safetensors", "layers.1.gate_up.weight", 500, marks=pytest.mark.slow),
        ("training/exp_avg_sq.safetensors", "norm.weight", 1),
    ],
)
def test_damage_that_one_rank_reads_is_told_by_all(ranks: Any, tmp_path: Path, name: str, key: str, more: int) -> None:
    path = tmp_path / "out"
    ranks(4).run(begin, 2, 2, path)
    raw = bytearray((path / name).read_bytes())
    raw[data_of(path, name, key) + more] ^= 16
    (path / name).write_bytes(raw)
    for dp, tp in [(2, 2), (4, 1), (1, 4)]:
        messages = ranks(4).run(refused, dp, tp, path)
        assert len(set(messages)) == 1
        assert messages[0].startswith("Damaged: ")
        assert f"'{key}' in {Path(name).name}" in messages[0]
        assert "do not sum to what was written" in messages[0]
    (path / name).write_bytes(raw[:-1])
    messages = ranks(4).run(refused, 2, 2, path)
    assert "Damaged: " in messages[0]
    assert f"{Path(name).name}: has {len(raw) - 1} bytes where {len(raw)} were written" in messages[0]


def test_files_of_two_checkpoints_do_not_mix(saved: Path) -> None:
    """Each is intact by itself, and of the right size."""
    other = save_checkpoint(*trained(3), saved.parent / "other", step=3)
    for name in ("model.safetensors", "training/exp_avg.safetensors", "training/state.json", "training/manifest.json"):
        before = (saved / name).read_bytes()
        shutil.copyfile(other / name, saved / name)
        with pytest.raises(Damaged):
            load_checkpoint(*fresh(), saved)
        (saved / name).write_bytes(before)
    load_checkpoint(*fresh(), saved)


def swap_tensors(path: Path) -> None:
    """Exchange the bytes of the two moments that have one shape."""
    names = [path / f"training/{kind}.safetensors" for kind in ("exp_avg", "exp_avg_sq")]
    contents = [name.read_bytes() for name in names]
    for name, content in zip(names, reversed(contents)):
        name.write_bytes(content)


def test_moments_do_not_change_places(saved: Path) -> None:
    swap_tensors(saved)
    with pytest.raises(Damaged, match=r"exp_avg(_sq)?\.safetensors"):
        load_checkpoint(*fresh(), saved)


# What is refused.


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(Refused, match=r"no such checkpoint\. Give a directory such as"):
        inspect_checkpoint(tmp_path / "nowhere")
    shutil.rmtree(saved / "training")
    with pytest.raises(Refused, match=r"no checkpoint to resume from.*load_pretrained or --init-from") as error:
        load_checkpoint(*fresh(), saved)
    assert not isinstance(error.value, Damaged)


def test_a_model_or_an_optimizer_that_does_not_fit_is_refused_and_keeps_its_values(saved: Path) -> None:
    net, optimizer = fresh(width=2)
    with pytest.raises(Refused, match=r"'up\.weight' has shape \[3, 4\], the model \[2, 4\]"):
        load_checkpoint(net, optimizer, saved)
    smaller = Net()
    del smaller.down
    with pytest.raises(Refused, match=r"2 unexpected.*'down\.weight'"):
        load_checkpoint(smaller, torch.optim.AdamW(smaller.parameters()), saved)
    larger = Net()
    larger.extra = nn.Linear(2, 2)
    with pytest.raises(Refused, match=r"2 missing.*extra\.weight"):
        load_checkpoint(larger, torch.optim.AdamW(larger.parameters()), saved)
    net, _ = fresh()
    with pytest.raises(Refused, match="the state of 'AdamW', this optimizer is SGD"):
        load_checkpoint(net, torch.optim.SGD(net.parameters(), lr=0.1), saved)
    net, optimizer = fresh()
    net.up.requires_grad_(False)
    frozen = torch.optim.AdamW(net.down.parameters())
    with pytest.raises(Refused, match=r"'up\.bias' is not in the optimizer.*Freeze the same parameters"):
        load_checkpoint(net, frozen, saved)
    assert not any(parameter.any() for parameter in net.parameters())


@pytest.mark.parametrize("step", [-1, 1.0, True, None, "3"])
def test_a_step_is_a_number_of_steps(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ContractError, match="number of steps made"):
        save_checkpoint(*trained(), tmp_path / "out", step=step)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "run", [{"a": float("nan")}, {"a": float("inf")}, {"a": {1, 2}}, {"a": torch.ones(1)}, {"a": b"b"}, {"a": object()}]
)
def test_what_is_to_come_back_is_json(tmp_path: Path, run: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="is not JSON"):
        save_checkpoint(*trained(), tmp_path / "out", step=1, run=run)
    assert not os.listdir(tmp_path)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="that the model does not have"):
        save_checkpoint(Net(), torch.optim.AdamW(Net().parameters()), tmp_path / "out", step=0)
    assert not os.listdir(tmp_path)


def spoil(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(b"")


@pytest.mark.parametrize(
    "before",
    [
        lambda path: None,
        spoil("model.safetensors"),
        lambda path: (path / "training/state.json").unlink(),
        lambda path: (path / "training/manifest.json").unlink(),
        lambda path: shutil.rmtree(path / "training"),
        lambda path: (shutil.rmtree(path), path.mkdir()),
    ],
    ids=["intact", "damaged", "no-state", "no-manifest", "model-only", "empty"],
)
def test_a_checkpoint_in_any_state_is_replaced(saved: Path, before: Callable[[Path], object]) -> None:
    before(saved)
    save_checkpoint(*trained(4), saved, step=4)
    assert load_checkpoint(*fresh(), saved).step == 4
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.parametrize("name", ["notes.txt", "training/notes.txt"])
def test_somebody_s_files_are_not(tmp_path: Path, name: str) -> None:
    mine = tmp_path / "out" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    with pytest.raises(Refused, match="not replaced"):
        save_checkpoint(*trained(), tmp_path / "out", step=1)
    with pytest.raises(Refused, match="not a directory"):
        save_checkpoint(*trained(), mine, step=1)
    assert mine.read_text() == "precious"
    assert os.listdir(tmp_path) == ["out"]


# Ranks that do not act alike.


def alone(path: Path, caller: int) -> float:
    model = sharded(MLP, MLP_PLAN, 2, 2)
    optimizer = adamw(model, lr=0.1)
    start = time.monotonic()
    if dist.get_rank() == caller:
        absent = ", ".join(str(rank) for rank in range(4) if rank != caller)
        for call, arguments in ((save_checkpoint, {"step": 1}), (load_checkpoint, {})):
            with pytest.raises(
                ContractError, match=rf"{call.__name__} was called on rank {caller}.*not on rank\(s\) {absent} of 4"
            ):
                call(model, optimizer, path, join_seconds=0.5, **arguments)
    seconds = time.monotonic() - start
    dist.barrier()
    save_checkpoint(model, optimizer, path, step=1)
    assert load_checkpoint(model, optimizer, path).step == 1
    return seconds


def test_a_lone_call_ends_soon_and_does_no_harm(ranks: Any, tmp_path: Path) -> None:
    assert max(ranks(4).run(alone, tmp_path / "out", 2)) < 20
    assert os.listdir(tmp_path) == ["out"]


def disagree(path: Path, what: str) -> str:
    run = job(2, 2, dtype=torch.float32)
    rank = dist.get_rank()
    with pytest.raises(ContractError) as caught:
        if what == "step":
            save_checkpoint(run.model, run.optimizer, path, step=int(rank == 3))
        elif what == "run":
            save_checkpoint(run.model, run.optimizer, path, step=1, run={"tokens": int(rank == 3)})
        else:
            save_checkpoint(run.model, run.optimizer, path / str(rank // 3), step=1)
    return str(caught.value)


@pytest.mark.parametrize("what", ["step", "run", "path"])
def test_ranks_that_would_save_something_else_are_named(ranks: Any, tmp_path: Path, what: str) -> None:
    messages = ranks(4).run(disagree, tmp_path / "out", what)
    assert all("on rank(s) 3 is not what it is on rank 0" in message for message in messages)
    assert not os.listdir(tmp_path)
