"""Ranks that are lost, and the smaller generation that goes on without them and without their devices."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import meshtrain.mesh
from meshtrain.errors import ContractError
from meshtrain.launch import launch
from tests.launching import generation, restarts, started  # noqa: F401

pytestmark = pytest.mark.timeout(90)


def lose(folder: Path, note: str, how: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    (folder / f"gen-{generation()}-{rank}").write_text(f"{size} {note} {devices}")
    if generation() == 0 and rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(how)
    dist.barrier()


GONE = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("how", "smaller", "size", "said"),
    [
        ("kill", 2, 2, " (1 of 4 was lost)"),
        (GONE, 3, 3, " (1 of 4 was lost)"),
        ("kill", None, 4, " (1 of 4 was lost, but no smaller mesh fits)"),
        ("index out of range", 2, 4, ""),
    ],
)
def test_after_a_loss_the_next_generation_may_be_smaller(start, tmp_path, how, smaller, size, said):
    def shrink(left: int) -> tuple[int, tuple[Any, ...]] | None:
        (tmp_path / "asked").write_text(str(left))
        return smaller and (smaller, (tmp_path, "smaller", how))

    command = start(lose, "first", how, world_size=4, restarts=restarts(tmp_path, shrink=shrink))
    assert command.wait() == 0, command.err.read_text()
    assert command.err.read_text().splitlines()[-1] == f"restart 1 of 3: {size} ranks, from step 0{said}"
    ranks = sorted(tmp_path.glob("gen-1-*"))
    assert [path.read_text().split()[:2] for path in ranks] == [[str(size), "smaller" if size < 4 else "first"]] * size
    assert (tmp_path / "asked").exists() == bool(said)
    if said:
        assert (tmp_path / "asked").read_text() == "3"


def test_when_all_ranks_are_lost_nothing_is_asked_and_the_size_stays(tmp_path, capfd):
    def shrink(left: int) -> None:
        pytest.fail(f"asked for {left}")

    assert launch(fail_alone, (tmp_path,), world_size=1, device="cpu", timeout_s=20,
                  restarts=restarts(tmp_path, shrink=shrink)) == 0  # fmt: skip
    assert ": 1 rank, from step 0 (1 of 1 was lost, but no smaller mesh fits)" in capfd.readouterr().err


def fail_alone(folder: Path) -> None:
    if generation() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_generation_that_does_not_fit_what_is_left_is_an_error(tmp_path):
    with pytest.raises(ContractError, match=r"shrink\(1\) returned 2 ranks"):
        launch(lose, (tmp_path, "first", "kill"), world_size=2, device="cpu", timeout_s=20,
               restarts=restarts(tmp_path, shrink=lambda left: (2, ())))  # fmt: skip


@pytest.mark.parametrize(
    ("count", "shrink", "after"),
    [
        (4, lambda left: (2, ()), "4,6,7"),  # the ranks take the first two of those that work
        (4, None, "4,5,6,7"),  # there is no other device
        (5, None, "4,6,7,8"),  # there is a spare one
    ],
)
def test_a_lost_device_is_not_used_again_where_others_do(start, tmp_path, monkeypatch, count, shrink, after):
    # Without it the smaller generation would meet the same dead device, whose place in the order is unchanged.
    make_group = meshtrain.mesh.init_default_group
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(str(n) for n in range(4, 4 + count)))
    monkeypatch.setattr(meshtrain.mesh, "cuda_device_count", lambda: count)
    monkeypatch.setattr(meshtrain.mesh, "init_default_group", lambda _, *a, **k: make_group("cpu", *a, **k))
    smaller = shrink and (lambda left: (2, (tmp_path, "x", GONE)))
    command = start(
        lose, "x", GONE, world_size=4, device="cuda", restarts=restarts(tmp_path, shrink=smaller),
    )  # fmt: skip
    assert command.wait() == 0, command.err.read_text()
    assert (tmp_path / "gen-0-0").read_text().split()[2] == "4,5,6,7,8"[: 2 * count - 1]
    assert (tmp_path / "gen-1-0").read_text().split()[2] == after
