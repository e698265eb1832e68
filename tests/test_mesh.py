"""The dp x tp mesh: its shape, its refusals, and a time-out on every one of its process groups."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshtrain.errors import Refused
from meshtrain.launch import launch
from meshtrain.mesh import check_timeout, check_world_size, group_timeout, init_mesh, pick_device, visible_devices
from tests.ranks import GROUP_TIMEOUT_S, RankError, RankPool, mesh

pytestmark = pytest.mark.timeout(120)


def shape_and_sums(dp: int, tp: int) -> tuple[tuple[int, ...], tuple[int, ...], list[float], str]:
    grid = mesh(dp, tp)
    sums = []
    for axis in ("dp", "tp"):
        value = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(value, group=grid.get_group(axis))
        sums.append(value.item())
    return grid.shape, tuple(grid.get_coordinate()), sums, grid.device_type


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 2), (1, 4)])
def test_tp_neighbours_are_adjacent_ranks_and_each_axis_sums_over_its_own_peers(ranks, dp, tp):
    for rank, found in enumerate(ranks(4).run(shape_and_sums, dp, tp)):
        row, column = divmod(rank, tp)
        along_dp = float(sum(range(column, 4, tp)))
        along_tp = float(sum(range(row * tp, row * tp + tp)))
        assert found == ((dp, tp), (row, column), [along_dp, along_tp], "cpu")


def timeouts(dp: int, tp: int, timeout_s: float | None) -> list[timedelta | None]:
    before = group_timeout(dist.group.WORLD)
    grid = init_mesh(dp, tp, "cpu", timeout_s)
    found = [group_timeout(group) for group in (dist.group.WORLD, *grid.get_all_groups())]
    init_mesh(dp, tp, "cpu", before.total_seconds())
    return found


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("timeout_s", [None, 7.5])
def test_every_group_of_the_mesh_has_the_time_out(ranks, dp, tp, timeout_s):
    # torch gives groups of a DeviceMesh 30 minutes, whatever the default group has.
    expected = timedelta(seconds=GROUP_TIMEOUT_S if timeout_s is None else timeout_s)
    assert ranks(4).run(timeouts, dp, tp, timeout_s) == [[expected] * 3] * 4


@pytest.mark.parametrize("seconds", [1, 300.0, 1e9])
def test_a_time_out_that_torch_can_hold_is_taken(seconds):
    assert check_timeout(seconds) == timedelta(seconds=seconds)


@pytest.mark.parametrize("seconds", [0, -1, 0.999, 1.1e9, 1e300, 10**400, float("inf"), float("nan"), True, "9", None])
def test_a_time_out_that_fails_by_itself_is_refused_with_the_limits(seconds):
    # Above the limit C++ overflows: at once, or never. Below it a busy host fails because it is busy.
    with pytest.raises(Refused, match=r"from 1 to 1000000000\. Use 300"):
        check_timeout(seconds)


def mesh_with_a_bad_time_out() -> str:
    before = group_timeout(dist.group.WORLD)
    with pytest.raises(Refused) as caught:
        init_mesh(2, 1, "cpu", timeout_s=1e300)
    assert group_timeout(dist.group.WORLD) == before
    return str(caught.value)


def test_a_mesh_refuses_such_a_time_out_before_it_makes_a_group(ranks):
    assert all("time-out is 1e+300 seconds" in message for message in ranks(2).run(mesh_with_a_bad_time_out))


def wait_for_a_late_peer() -> float:
    group = init_mesh(2, 2, "cpu", timeout_s=1.0).get_group("tp")
    start = time.monotonic()
    if dist.get_rank() == 3:
        time.sleep(4)
    dist.all_reduce(torch.ones(1), group=group)
    return time.monotonic() - start


def test_a_collective_of_an_axis_ends_at_its_time_out(ranks):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(4).run(wait_for_a_late_peer)
    assert "Timed out waiting 1000ms" in caught.value.failures[2]
    assert caught.value.types[2] == "RuntimeError"
    assert time.monotonic() - start < 15


def leave_as_soon_as_the_mesh_is_there() -> None:
    init_mesh(4, 2, "cpu")


def test_a_rank_may_leave_once_it_has_its_mesh():
    # It would cut the connections that slower ranks still make: a matter of luck, so more than once.
    for _ in range(8):
        assert launch(leave_as_soon_as_the_mesh_is_there, world_size=8, device="cpu", timeout_s=30) == 0


def refused(dp: int, tp: int) -> str:
    try:
        init_mesh(dp, tp, "cpu")
    except Refused as error:
        return str(error)
    return "accepted"


def test_a_mesh_of_another_size_than_the_world_is_refused_with_both_numbers_and_the_ways_out(ranks):
    for message in ranks(4).run(refused, 4, 2):
        for part in ("dp 4 x tp 2", "needs 8 ranks", "are 4", "--nproc-per-node 8", "1 x 4, 2 x 2, 4 x 1"):
            assert part in message


@pytest.mark.parametrize(("dp", "tp"), [(0, 1), (1, -2), (1.0, 1), (True, 1), ("2", 1)])
def test_sizes_that_are_no_counts_are_refused(dp, tp):
    with pytest.raises(Refused, match="whole number of ranks"):
        init_mesh(dp, tp, "cpu")


def test_check_world_size_accepts_what_fits():
    check_world_size(4, 2, 8)
    with pytest.raises(Refused, match="there is 1"):
        check_world_size(2, 1, 1)


def alone() -> tuple[timedelta | None, tuple[int, ...], str, bool]:
    """In a fork of its own, without any group: a mesh of one."""
    import os

    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    grid = init_mesh(1, 1, timeout_s=11)
    found = (
        group_timeout(grid.get_group("tp")),
        tuple(grid.get_coordinate()),
        dist.get_backend(),
        "GLOO_SOCKET_IFNAME" in os.environ,
    )
    dist.all_reduce(torch.ones(1), group=grid.get_group("dp"))
    return found


def test_without_a_launcher_a_mesh_of_one_makes_its_own_group():
    single = RankPool(1)
    try:
        assert single.run(alone) == [(timedelta(seconds=11), (0, 0), "gloo", False)]
    finally:
        single.close()


def test_pick_device_takes_only_what_is_there():
    assert pick_device("cpu") == "cpu"
    with pytest.raises(Refused, match="'tpu' is not known"):
        pick_device("tpu")
    if not torch.cuda.is_available():
        assert pick_device(None) == "cpu"
        with pytest.raises(Refused, match="--device cpu"):
            pick_device("cuda")


@pytest.mark.parametrize(
    ("named", "expected"),
    [(None, ("0", "1", "2")), ("4, 2,7", ("4", "2", "7")), ("GPU-a,GPU-b,GPU-c", ("GPU-a", "GPU-b", "GPU-c"))],
)
def test_visible_devices_have_the_names_that_the_environment_uses(monkeypatch, named, expected):
    monkeypatch.setattr("meshtrain.mesh.cuda_device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_devices() == expected


def test_d17_a_visible_accelerator_does_not_move_a_cpu_mesh(ranks):
    # The mesh says "cpu" because it was asked to, and its groups carry no other device's back end.
    assert ranks(2).run(device_of_mesh_beside_an_accelerator) == ["cpu", "cpu"]


def device_of_mesh_beside_an_accelerator() -> str:
    with (
        mock.patch("torch.cuda.device_count", return_value=8),
        mock.patch("torch.backends.cuda.is_built", return_value=True),
    ):
        return init_mesh(2, 1).device_type


def mesh_of_a_dry_run() -> tuple[tuple[int, ...], tuple[int, ...]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=11, world_size=64)
    grid = init_mesh(16, 4, "cpu", timeout_s=5)
    return grid.shape, tuple(grid.get_coordinate())


def test_a_fake_group_makes_the_mesh_of_a_dry_run():
    single = RankPool(1)
    try:
        assert single.run(mesh_of_a_dry_run) == [((16, 4), (2, 3))]
    finally:
        single.close()


def fail_on_one(rank: int) -> int:
    if dist.get_rank() == rank:
        raise KeyError("missing piece")
    dist.barrier()
    return dist.get_rank()


def test_a_failing_rank_is_named_and_the_pool_recovers(ranks):
    with pytest.raises(RankError) as caught:
        ranks(2).run(fail_on_one, 1)
    assert caught.value.types[1] == "KeyError"
    assert "missing piece" in caught.value.failures[1]
    assert ranks(2).run(fail_on_one, -1) == [0, 1]


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(100)


def test_a_hanging_rank_is_shown_with_its_stack_and_the_pool_recovers(ranks):
    with pytest.raises(RankError) as caught:
        ranks(2).run(hang_on_one, timeout=1)
    assert caught.value.types == {1: "Hung"}
    assert "hang_on_one" in caught.value.failures[1]
    assert ranks(2).run(fail_on_one, -1) == [0, 1]
