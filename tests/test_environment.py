"""What a launcher's variables mean, and that nonsense in them is refused by name."""

from __future__ import annotations

import pytest

from meshtrain.environment import RankEnvironment, environment, threads_per_rank
from meshtrain.errors import Refused

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[003-004,7]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


def test_without_a_launcher_there_is_no_place():
    assert environment({}) is None
    assert environment({"MASTER_ADDR": "left over", "SLURM_JOB_ID": "1"}) is None
    assert environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None, "one task starts its own ranks"


def test_torchrun_is_recognised_also_within_slurm():
    expected = RankEnvironment("torchrun", 5, 8, 1, 4, "head", 29500)
    assert environment({**SLURM, **TORCHRUN, "LOCAL_WORLD_SIZE": "4"}) == expected


def test_slurm_is_recognised():
    found = environment(SLURM)
    assert found is not None
    assert (found.launcher, found.rank, found.world_size) == ("Slurm", 5, 8)
    assert (found.local_rank, found.local_world_size, found.master_addr) == (1, 4, "node003")
    assert 1024 < found.master_port < 32768
    again = environment({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert again is not None
    assert again.master_port == found.master_port, "every rank derives the same port"
    other = environment({**SLURM, "SLURM_STEP_ID": "1"})
    assert other is not None
    assert other.master_port != found.master_port, "steps of one job do not collide"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("node[003-010,012],gpu7", "node003"),
        ("node[9,11]", "node9"),
        ("rack[1-2]n[08-09]", "rack1n08"),
        ("a-1.example.org", "a-1.example.org"),
        ("node[1-4]-ib", "node1-ib"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, first):
    found = environment({**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert found is not None
    assert found.master_addr == first


def test_slurms_older_variable_and_the_users_own_address_are_used():
    older = {**SLURM, "SLURM_NODELIST": "old[1-2]"}
    del older["SLURM_STEP_NODELIST"]
    found = environment(older)
    assert found is not None
    assert found.master_addr == "old1"
    found = environment({**older, "MASTER_ADDR": "mine", "MASTER_PORT": "4000"})
    assert found is not None
    assert (found.master_addr, found.master_port) == ("mine", 4000)


def without(base: dict[str, str], *names: str, **changed: str) -> dict[str, str]:
    return {**{name: value for name, value in base.items() if name not in names}, **changed}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        *[(without(TORCHRUN, name), [f"{name} is not set"]) for name in TORCHRUN],
        (
            {"WORLD_SIZE": "8"},
            ["RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set", "though WORLD_SIZE is"],
        ),
        (without(TORCHRUN, RANK="five"), ["RANK is 'five'", "whole number"]),
        (without(TORCHRUN, RANK="8"), ["RANK is '8'", "from 0 to 7"]),
        (without(TORCHRUN, RANK="-1"), ["RANK is '-1'"]),
        (without(TORCHRUN, WORLD_SIZE="0"), ["WORLD_SIZE is '0'", "1 or more"]),
        (without(TORCHRUN, WORLD_SIZE="8.0"), ["WORLD_SIZE is '8.0'"]),
        (without(TORCHRUN, MASTER_PORT="99999"), ["MASTER_PORT is '99999'", "65535"]),
        (without(SLURM, "SLURM_LOCALID"), ["SLURM_LOCALID is not set"]),
        (without(SLURM, "SLURM_JOB_ID"), ["SLURM_JOB_ID is not set"]),
        (without(SLURM, "SLURM_STEP_NODELIST"), ["SLURM_STEP_NODELIST is not set", "MASTER_ADDR"]),
        (without(SLURM, SLURM_STEP_NODELIST="n[1"), ["SLURM_STEP_NODELIST is 'n[1'", "MASTER_ADDR"]),
        (without(SLURM, SLURM_NTASKS="many"), ["SLURM_NTASKS is 'many'"]),
        (without(SLURM, SLURM_PROCID="8"), ["SLURM_PROCID is '8'"]),
        (without(SLURM, "SLURM_STEP_ID", ENVIRONMENT="BATCH"), ["batch script", "srun", "SLURM_NTASKS is 8"]),
    ],
)
def test_an_incomplete_or_impossible_place_is_refused_by_name(variables, words):
    with pytest.raises(Refused) as caught:
        environment(variables)
    for word in words:
        assert word in str(caught.value)


def test_a_slurm_task_uses_the_cores_bound_to_it(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    here, slurm = environment(TORCHRUN), environment(SLURM)
    assert here is not None
    assert slurm is not None
    monkeypatch.setattr("meshtrain.environment.available_cores", lambda: 8)
    assert threads_per_rank(slurm) == 6
    assert threads_per_rank(here) == 4, "local_world_size 2 is the least that LOCAL_RANK 1 implies"
