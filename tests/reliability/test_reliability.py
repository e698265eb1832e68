"""Short runs of the programs in benchmarks/reliability, and that those programs notice what they are there for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks.reliability import common, endurance, faults, flips, kill, powercut, stall
from benchmarks.reliability.disk import why_not

from meshtrain.state.checkpoint import save_checkpoint
from meshtrain.state.names import name_of

DISK = pytest.mark.skipif(why_not("ext4") is not None, reason=f"ext4 on a loop device {why_not('ext4')}")
QUICK = {
    "powercut": (powercut.main, "--cuts 12 --after 6 --group-cuts 0 --control 2"),
    "faults": (faults.main, "--rounds 6 --full 1 --kernel 0"),
    "flips": (flips.main, "--rounds 150 --group 4"),
    "kill": (kill.main, "--rounds 3 --ranks 2"),
    "endurance": (endurance.main, "--rounds 24"),
}
LONG = {
    "powercut": (powercut.main, "--cuts 200 --after 50 --group-cuts 20"),
    "faults": (faults.main, "--rounds 200 --full 8 --kernel 20"),
    "flips": (flips.main, "--rounds 2000 --group 50"),
    "kill": (kill.main, "--rounds 10 --ranks 8"),
    "endurance": (endurance.main, "--rounds 200"),
    "stall": (stall.main, "--rounds 2 --mebytes 8 --dim 64"),
}


def run(main: Callable[[list[str]], int], arguments: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A program in a process of its own, since it forks ranks and takes signals."""
    pid = common.fork(lambda: os._exit(main([*arguments.split(), "--dir", str(folder)])))
    status = common.ended(pid, 600)
    said = capfd.readouterr()
    assert status == 0, said.out + said.err


@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_lost(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if name == "powercut" and (reason := why_not("ext4")) is not None:
        pytest.skip(f"ext4 on a loop device {reason}")
    run(*QUICK[name], tmp_path, capfd)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LONG)
def test_nothing_is_lost_for_longer(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(*LONG[name], tmp_path, capfd)


@DISK
def test_power_cuts_lose_what_was_not_forced_to_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without fsync the same cuts must lose checkpoints; if they do not, they prove nothing."""
    run(powercut.main, "--cuts 0 --after 0 --group-cuts 0 --control 3", tmp_path, capfd)


def saved(folder: Path, tag: int) -> Path:
    model, optimizer = common.plain()
    common.fill(model, optimizer, tag)
    return save_checkpoint(model, optimizer, folder / name_of(tag), step=tag, run={"tag": tag})


def test_values_depend_on_the_tag_and_the_name() -> None:
    """Otherwise a checkpoint that mixes two saves would pass."""
    assert not torch.equal(common.value(1, "a", (3,)), common.value(2, "a", (3,)))
    assert not torch.equal(common.value(1, "a", (3,)), common.value(1, "b", (3,)))
    assert torch.equal(common.value(1, "a", (3,)), common.value(1, "a", (3,)))


def test_the_check_accepts_what_is_whole_and_refuses_a_mixture(tmp_path: Path) -> None:
    model, optimizer = common.plain()
    first, second = saved(tmp_path, 1), saved(tmp_path, 2)
    assert common.check_whole(second, model, optimizer) == 2
    shutil.copyfile(first / "model.safetensors", second / "model.safetensors")
    with pytest.raises(common.Lost, match="model.safetensors"):
        common.check_whole(second, model, optimizer)


def test_the_check_refuses_wrong_values_with_right_sums(tmp_path: Path) -> None:
    """Sums only show that the file is what was written, not that the right thing was written."""
    model, optimizer = common.plain()
    common.fill(model, optimizer, 3)
    with torch.no_grad():
        model.get_parameter("up.weight")[1, 2] += 1
    path = save_checkpoint(model, optimizer, tmp_path / "step-00000003", step=3, run={"tag": 3})
    with pytest.raises(common.Lost, match="up.weight"):
        common.check_whole(path, model, optimizer)


def test_a_stray_file_and_a_missing_one_are_told(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    (path / "stray").touch()
    (path / "training/exp_avg.safetensors").unlink()
    assert common.sums_differing(path) == ["training/exp_avg.safetensors", "stray"]


def test_growth_is_told() -> None:
    before = {"descriptors": 5, "memory": 0}
    assert endurance.grown(before, {"descriptors": 5, "memory": 2**20}, 2) == []
    assert endurance.grown(before, {"descriptors": 6, "memory": 3 * 2**20}, 2) == [
        "descriptors 5 -> 6",
        "memory 0 -> 3145728",
    ]
