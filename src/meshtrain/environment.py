"""What a launcher told this process: its rank, the number of ranks, and where they meet (torchrun, Slurm).

Reads environment variables only; imports no torch, starts nothing. Starting ranks is `meshtrain.launch`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshtrain.errors import Refused

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankEnvironment:
    """One rank's place in a job that a launcher has started."""

    launcher: str
    """Who started the ranks: "torchrun", "Slurm" or "meshtrain"."""
    rank: int
    """0 to world_size - 1, over all hosts."""
    world_size: int
    """Ranks in the job."""
    local_rank: int
    """0 to local_world_size - 1, on this host; names the device of the rank."""
    local_world_size: int
    """Ranks on this host."""
    master_addr: str
    """Host at which the ranks meet."""
    master_port: int
    """TCP port at which the ranks meet."""

    def export(self) -> None:
        """Set the variables under torchrun's names, which is what torch and other libraries read."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            MASTER_ADDR=self.master_addr,
            MASTER_PORT=str(self.master_port),
        )


def environment(variables: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Return the place that torchrun or Slurm gave to this process, or None where neither started it.

    variables: read instead of `os.environ`.

    Raises Refused, naming the variable, when the set is incomplete or a number is not one.
    """
    found = os.environ if variables is None else variables
    if any(found.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _from_torchrun(found)
    if found.get("SLURM_PROCID") and _integer(found, "SLURM_NTASKS", 1, 1) > 1:
        return _from_slurm(found)
    return None


def _from_torchrun(found: Mapping[str, str]) -> RankEnvironment:
    missing = [name for name in TORCHRUN_VARIABLES if not found.get(name)]
    if missing:
        there = [name for name in TORCHRUN_VARIABLES if name not in missing]
        raise Refused(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, though "
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'}: a rank needs all of "
            f"{', '.join(TORCHRUN_VARIABLES)}. Start the ranks with torchrun, or set the missing ones "
            "(LOCAL_RANK=0 where each host runs one rank), or unset RANK, WORLD_SIZE and LOCAL_RANK to let "
            "this command start its own ranks."
        )
    world_size = _integer(found, "WORLD_SIZE", 1)
    local_rank = _integer(found, "LOCAL_RANK", 0, below=world_size)
    return RankEnvironment(
        launcher="torchrun",
        rank=_integer(found, "RANK", 0, below=world_size),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=_integer(found, "LOCAL_WORLD_SIZE", 1, default=local_rank + 1),
        master_addr=found["MASTER_ADDR"],
        master_port=_integer(found, "MASTER_PORT", 1, below=65536),
    )


def _from_slurm(found: Mapping[str, str]) -> RankEnvironment:
    world_size = _integer(found, "SLURM_NTASKS", 1)
    if found.get("ENVIRONMENT") == "BATCH" and not found.get("SLURM_STEP_ID"):
        # sbatch gives the batch script itself a SLURM_PROCID of 0: joining would wait for ranks that nobody
        # starts.
        raise Refused(
            f"SLURM_NTASKS is {world_size}, but this process is the batch script, not one of its tasks. "
            "Start the ranks with srun, or ask sbatch for --ntasks=1 with --cpus-per-task to let this "
            "command start them."
        )
    local_rank = _integer(found, "SLURM_LOCALID", 0, below=world_size)
    tasks_here = found.get("SLURM_STEP_TASKS_PER_NODE") or found.get("SLURM_NTASKS_PER_NODE") or ""
    first_count = re.match(r"\d+", tasks_here)
    job = _integer(found, "SLURM_JOB_ID", 0)
    step = _integer(found, "SLURM_STEP_ID", 0, default=0)
    return RankEnvironment(
        launcher="Slurm",
        rank=_integer(found, "SLURM_PROCID", 0, below=world_size),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=max(int(first_count[0]) if first_count else 1, local_rank + 1),
        master_addr=found.get("MASTER_ADDR") or _first_host(found),
        # Every rank derives the same port; below 32768, where Linux hands out ports of its own accord.
        master_port=_integer(found, "MASTER_PORT", 1, below=65536, default=15000 + (job + 7919 * step) % 15000),
    )


def _first_host(found: Mapping[str, str]) -> str:
    """The first name of a host list such as "node[003-010,012],gpu7"."""
    variable = next((v for v in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST") if found.get(v)), None)
    if variable is None:
        raise Refused(
            "SLURM_STEP_NODELIST is not set, so the host at which the ranks meet is not known. Start the "
            "ranks with srun, or set MASTER_ADDR to the host of rank 0."
        )
    name = r"(?:[\w.-]|\[[\d,-]+\])+"
    listed = re.fullmatch(rf"({name})(?:,{name})*", found[variable].strip())
    if listed is None:
        raise Refused(
            f"{variable} is {found[variable]!r}, which is not a Slurm host list. Set MASTER_ADDR to the host of rank 0."
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", listed[1])


def _integer(
    found: Mapping[str, str], name: str, least: int, default: int | None = None, below: int | None = None
) -> int:
    text = found.get(name)
    if not text:
        if default is not None:
            return default
        raise Refused(f"{name} is not set: the launcher sets it. Start the ranks with srun or torchrun.")
    value = int(text) if re.fullmatch(r"\s*-?\d+\s*", text) else None
    if value is None or value < least or (below is not None and value >= below):
        limit = f"{least} or more" if below is None else f"from {least} to {below - 1}"
        raise Refused(
            f"{name} is {text!r}: it must be a whole number {limit}. The launcher sets it; unset RANK, "
            "WORLD_SIZE and LOCAL_RANK (under Slurm SLURM_PROCID) to let this command start its own ranks."
        )
    return value


def threads_per_rank(place: RankEnvironment) -> int:
    """Return a rank's compute threads: OMP_NUM_THREADS if set, else cores // ranks on the host, at least 1.

    Raises Refused when OMP_NUM_THREADS is not a number above 0.
    """
    chosen = os.environ.get("OMP_NUM_THREADS")
    if chosen:
        first = chosen.split(",")[0].strip()
        if not first.isdecimal() or int(first) < 1:
            raise Refused(f"OMP_NUM_THREADS is {chosen!r}: it must be a whole number above 0. Set it so, or unset it.")
        return int(first)
    bound = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if place.launcher == "Slurm" and bound.isdecimal() and int(bound) > 0:
        # Slurm may have bound this rank to its own cores already; dividing those again would idle most of
        # them.
        return int(bound)
    return max(1, available_cores() // place.local_world_size)


def available_cores() -> int:
    """Return how many cores this process may use: its affinity, or a container's smaller quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores
