"""Import and export by real ranks: agreement, faults on one rank, lone calls, file systems that are not
shared.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from meshtrain.errors import ContractError, MeshtrainError, Refused
from meshtrain.parallel.layout import MeshSizes
from meshtrain.state.held import Held
from meshtrain.state.pretrained import load_shards, write_parts
from meshtrain.state.specs import specs_of
from meshtrain.state.team import Team
from meshtrain.state.transfer import Staging
from meshtrain.state.writer import Part, plan_save
from tests.state import simulated

BUFFERS = {"steps": torch.tensor(7)}


def held(dp: int, tp: int, fill: float | None = None) -> Held:
    """This rank's part of the whole tensors, or of tensors filled with a number."""
    sizes = MeshSizes(dp, tp)
    coordinate = divmod(dist.get_rank(), tp)
    layouts, whole = simulated.layouts(dp, tp), simulated.whole_tensors()
    shards = {one.name: simulated.cut(whole[one.name], one, coordinate) for one in layouts}
    if fill is not None:
        shards = {name: torch.full_like(shard, fill) for name, shard in shards.items()}
    return Held(layouts, BUFFERS, {**shards, **BUFFERS}, coordinate, sizes, Team(dist.group.WORLD))


def save(dp: int, tp: int, path: Path, shared: bool | None = None, limit: int | str = 3000) -> None:
    mine = held(dp, tp)
    plan = plan_save(specs_of(mine.layouts, mine.buffers), None, limit)
    write_parts([Part(plan, mine.shards)], mine, path, {"config.json": b"{}\n"}, shared=shared, staging=Staging(2048))


def load(dp: int, tp: int, path: Path) -> int:
    mine, expected = held(dp, tp, fill=5.0), held(dp, tp)
    staging = load_shards(mine, path, staging=Staging(2048))
    for name, shard in expected.shards.items():
        assert torch.equal(mine.shards[name], shard), name
    return staging.traffic.read


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shared", [None, False], ids=["shared", "not-shared"])
def test_ranks_write_one_directory_and_another_mesh_reads_it(ranks: Any, tmp_path: Path, shared: bool | None) -> None:
    ranks(4).run(save, 2, 2, tmp_path / "out", shared)
    stored: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        stored |= load_file(file)
    expected = {**simulated.whole_tensors(), **BUFFERS}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    assert os.listdir(tmp_path) == ["out"]
    for dp, tp in [(1, 4), (4, 1), (2, 2)]:
        ranks(4).run(load, dp, tp, tmp_path / "out")


def seen_from_rank_0_only(path: Path) -> None:
    """Every rank but the first has another file system, as far as it can tell."""
    if dist.get_rank() == 0:
        save(2, 2, path)
        return
    with (
        mock.patch.object(Path, "is_dir", return_value=False),
        mock.patch("os.pwrite", side_effect=AssertionError),
    ):
        save(2, 2, path)


@pytest.mark.timeout(120)
def test_a_file_system_that_only_rank_0_sees_is_noticed(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(seen_from_rank_0_only, tmp_path / "out", timeout=60)
    ranks(4).run(load, 2, 2, tmp_path / "out")


def fail_on(victim: int, call: str, path: Path, shared: bool | None) -> str:
    """Let a system call fail on one rank; return the message of the error that this rank got."""
    real, calls = getattr(os, call), 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(28, "No space left on device")
        return real(*args)

    patched = mock.patch.object(os, call, broken if dist.get_rank() == victim else real)
    with patched, pytest.raises(MeshtrainError) as caught:
        save(2, 2, path, shared)
    return str(caught.value)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("victim", "call", "shared"),
    [(2, "pwrite", None), (0, "pwrite", None), (3, "fsync", None), (0, "fsync", None), (0, "pwrite", False)],
)
def test_case_f12_an_error_on_one_rank_raises_on_all_and_leaves_the_old_directory(
    ranks: Any, tmp_path: Path, victim: int, call: str, shared: bool | None
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    save_file({"old": torch.ones(1)}, target / "model.safetensors")
    before = (target / "model.safetensors").read_bytes()
    messages = ranks(4).run(fail_on, victim, call, target, shared)
    assert len(set(messages)) == 1
    assert f"rank {victim}: OSError: [Errno 28] No space left on device" in messages[0]
    assert os.listdir(target) == ["model.safetensors"]
    assert (target / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["out"]


def save_alone(path: Path) -> tuple[str, float]:
    mine = held(2, 2)
    start, message = time.monotonic(), ""
    if dist.get_rank() == 1:
        with pytest.raises(ContractError) as caught:
            mine.team.join("save_pretrained", seconds=1.0)
        message = str(caught.value)
    took = time.monotonic() - start
    dist.barrier()
    mine.team.join("save_pretrained", seconds=10.0)
    save(2, 2, path)
    return message, took


@pytest.mark.timeout(120)
def test_case_e1_a_lone_call_ends_soon_says_why_and_does_no_harm(ranks: Any, tmp_path: Path) -> None:
    results = ranks(4).run(save_alone, tmp_path / "out")
    message, took = results[1]
    assert "on rank 1, but after 1 s not on rank(s) 0, 2, 3 of 4" in message
    assert message.startswith("save_pretrained was called")
    assert "if rank == 0" in message
    assert took < 5
    ranks(4).run(load, 2, 2, tmp_path / "out")


def disagree(path: Path) -> str:
    with pytest.raises(ContractError) as caught:
        save(2, 2, path, limit=3000 if dist.get_rank() != 3 else 4000)
    return str(caught.value)


@pytest.mark.timeout(120)
def test_case_e5_ranks_that_plan_other_files_are_stopped_before_any_is_written(ranks: Any, tmp_path: Path) -> None:
    messages = ranks(4).run(disagree, tmp_path / "out")
    assert all("rank(s) 3 is not what it is on rank 0" in message for message in messages)
    assert os.listdir(tmp_path) == []


def refuse_on_every_rank(path: Path, own: bool) -> str:
    if own:
        path = path / str(dist.get_rank())
    mine = held(2, 2, fill=5.0)
    with pytest.raises(MeshtrainError) as caught:
        load_shards(mine, path)
    assert all((shard == 5).all() for name, shard in mine.shards.items() if name not in BUFFERS)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.timeout(120)
def test_a_checkpoint_that_one_rank_cannot_read_is_refused_on_all(ranks: Any, tmp_path: Path) -> None:
    tensors = {**simulated.whole_tensors(), **BUFFERS}
    for rank in range(4):
        (tmp_path / str(rank)).mkdir()
        save_file(tensors, tmp_path / str(rank) / "model.safetensors")
    file = tmp_path / "2/model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    messages = ranks(4).run(refuse_on_every_rank, tmp_path, True)
    assert len(set(messages)) == 1
    assert messages[0].startswith("Refused: rank 2: ")
    assert "truncated" in messages[0]
    save_file({**tensors, "norm.weight": tensors["norm.weight"].bfloat16()}, file)
    messages = ranks(4).run(refuse_on_every_rank, tmp_path, True)
    assert all("rank(s) 2 is not what it is on rank 0" in message for message in messages)


def refuse_target(path: Path) -> str:
    with pytest.raises(Refused) as caught:
        save(2, 2, path)
    return str(caught.value)


@pytest.mark.timeout(120)
def test_a_target_that_must_not_be_replaced_is_refused_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    messages = ranks(4).run(refuse_target, tmp_path)
    assert all("notes.txt" in message for message in messages)
    assert os.listdir(tmp_path) == ["notes.txt"]


def peak_growth(path: Path, megabytes: int) -> tuple[int, int]:
    """Bytes by which a rank's peak of resident memory grew in an export, and in an import."""
    sizes = MeshSizes(2, 2)
    coordinate = divmod(dist.get_rank(), 2)
    rows = megabytes * 2**20 // 4 // 1024 // 4
    layouts = [
        simulated.layout("a", (rows, 1024), 0, (rows,), sizes),
        simulated.layout("b", (1024, rows), 1, (rows,), sizes),
        simulated.layout("c", (2 * rows, 1024), 0, (rows, rows), sizes),
    ]
    shards = {one.name: torch.ones(one.local_shape(*coordinate)) for one in layouts}
    mine = Held(layouts, {}, shards, coordinate, sizes, Team(dist.group.WORLD))
    plan = plan_save(specs_of(layouts), torch.bfloat16, "50MB")
    growth = []
    for work in (lambda: write_parts([Part(plan, mine.shards)], mine, path, {}), lambda: load_shards(mine, path)):
        # Writing 5 sets the peak back to the present.
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        work()
        growth.append(resident("VmHWM") - before)
    assert all((shard == 1).all() for shard in shards.values())
    return growth[0], growth[1]


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


@pytest.mark.timeout(180)
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux' /proc/self/clear_refs")
def test_case_e9_no_rank_needs_more_than_a_buffer_beyond_its_own_shard(ranks: Any, tmp_path: Path) -> None:
    for exported, imported in ranks(4).run(peak_growth, tmp_path / "out", 200, timeout=120):
        assert exported < 16 * 2**20
        assert imported < 16 * 2**20
