"""The dp x tp mesh: two sizes -> one DeviceMesh whose every process group has a time-out.

It decides the device, the back ends and the groups, once. How a model is cut over the mesh is not decided
here (`meshtrain.parallel`), nor is how ranks are started (`meshtrain.launch`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from meshtrain.environment import environment
from meshtrain.errors import Refused

AXES = ("dp", "tp")
DEFAULT_TIMEOUT_S = 300.0
LEAST_TIMEOUT_S, GREATEST_TIMEOUT_S = 1, 10**9
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def init_mesh(dp: int, tp: int, device: str | None = None, timeout_s: float | None = None) -> DeviceMesh:
    """Return the 2-D mesh of shape (dp, tp) with axes named "dp" and "tp"; tp neighbours are adjacent ranks.

    Every rank calls it, with the same sizes. Where no default process group exists yet, it is made first:
    from the environment when a launcher has set one (torchrun, Slurm), else as a world of one rank.

    device: "cpu", "cuda", or None for `pick_device`'s choice (the device of the group, when there is a group).
    timeout_s: seconds after which a collective on any group of the mesh fails. None keeps what the default group
        has, or is 300 for a group made here. A number applies to the default group as well.

    Raises Refused when a size is below 1, when dp x tp is not the number of ranks, when the device is absent, or when
    the time-out is not from 1 to 10**9.
    """
    for axis, size in zip(AXES, (dp, tp), strict=True):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise Refused(f"mesh axis {axis} has size {size!r}: it must be a whole number of ranks, 1 or more.")
    asked = None if timeout_s is None else check_timeout(timeout_s)
    if dist.is_initialized():
        check_world_size(dp, tp, dist.get_world_size())
        device = pick_device(device or _device_of_default_group())
    else:
        device = pick_device(device)
        found = environment()
        check_world_size(dp, tp, found.world_size if found else 1)
        if found:
            found.export()
        init_default_group(device, DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)

    timeout = group_timeout(dist.group.WORLD) if asked is None else asked
    if device == "cuda" and not torch.cuda.is_initialized():
        # DeviceMesh otherwise guesses a device from the global rank where LOCAL_RANK is not set.
        torch.cuda.set_device(_local_cuda_index())
    mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=AXES, backend_override=_subgroup_options(dp, tp, timeout))
    if timeout is not None:
        for group in (dist.group.WORLD, *(mesh.get_group(axis) for axis in AXES)):
            set_group_timeout(group, timeout)
    if "gloo" in str(dist.get_backend_config()):
        dist.all_reduce(torch.zeros(1))  # a rank that leaves now would cut connections that others still make
    return mesh


def check_world_size(dp: int, tp: int, world_size: int) -> None:
    """Raise Refused unless the mesh dp x tp uses exactly `world_size` ranks."""
    if dp * tp == world_size:
        return
    fits = ", ".join(f"{n} x {world_size // n}" for n in range(1, world_size + 1) if world_size % n == 0)
    raise Refused(
        f"a mesh of dp {dp} x tp {tp} needs {dp * tp} ranks, but there {'is' if world_size == 1 else 'are'} "
        f"{world_size}. Start {dp * tp} ranks (torchrun --nproc-per-node {dp * tp}, or srun --ntasks "
        f"{dp * tp}), or choose sizes whose product is {world_size} (dp x tp: {fits})."
    )


def init_default_group(
    device: str,
    timeout_s: float,
    *,
    store: dist.Store | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Make the default process group: gloo on "cpu"; nccl, plus gloo for CPU tensors, on "cuda".

    With a `store`, `rank` and `world_size` say who we are. Without one, the variables RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT do, and where they are absent the world is this process alone.

    On "cuda" the process takes one device, the one of LOCAL_RANK, and binds the group to it.
    """
    timeout = check_timeout(timeout_s)
    device_id = None
    if device == "cuda":
        device_id = torch.device("cuda", _local_cuda_index())
        torch.cuda.set_device(device_id)
    backend = BACKENDS[device]
    if store is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world_size = _store_of_launcher(timeout)
    if store is None:
        # Nobody is to be met: a store in memory opens no port, and gloo's own listener stays on the loopback.
        with loopback_interface():
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device_id
            )
    else:
        store.set_timeout(timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
        )


def _store_of_launcher(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The store that the variables name, the rank in it, and the number of ranks."""
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # torchrun keeps one store for all restarts (but with --rdzv-backend c10d), in which ranks that are started again find
    # where the old ones listened. On one host all ranks have the same count; on several they need not (torch #135712).
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if restart and os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"restart-{restart}", store)
    return store, rank, world_size


def check_timeout(timeout_s: float) -> timedelta:
    """Return a time-out for `torch.distributed`. Raises Refused unless it is a number of seconds from 1 to 10**9.

    Below a second a busy host fails for no other reason than being busy: ranks need about that long to meet. Above
    10**9 (32 years) what torch counts in C++ would soon overflow: 9 * 10**9 s wait for ever, 10**10 s not at all.
    """
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not (number and LEAST_TIMEOUT_S <= timeout_s <= GREATEST_TIMEOUT_S):
        raise Refused(
            f"the time-out is {timeout_s!r} seconds: it must be a number from {LEAST_TIMEOUT_S} to {GREATEST_TIMEOUT_S}. "
            f"Use {DEFAULT_TIMEOUT_S:g} where no collective waits longer than that for a slow rank."
        )
    return timedelta(seconds=timeout_s)


@contextmanager
def loopback_interface() -> Iterator[None]:
    """Let gloo bind to the loopback only, for groups made inside; the user's own GLOO_SOCKET_IFNAME wins."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def pick_device(name: str | None = None) -> str:
    """Return "cpu" or "cuda": what `name` asks for, or for None "cuda" where there is one, else "cpu".

    It never initialises CUDA, so that ranks can still be forked afterwards.

    Raises Refused when the name is neither, or when "cuda" is asked for and absent.
    """
    if name is None:
        return "cuda" if cuda_device_count() > 0 else "cpu"
    if name not in BACKENDS:
        raise Refused(
            f"device {name!r} is not known: use 'cpu' or 'cuda' (which of a host's devices a rank takes "
            "follows from LOCAL_RANK; CUDA_VISIBLE_DEVICES limits them)."
        )
    if name == "cuda" and cuda_device_count() == 0:
        if torch.backends.cuda.is_built():
            why = "torch sees no CUDA device here (check nvidia-smi, the driver, and CUDA_VISIBLE_DEVICES)"
        else:
            why = f"this torch ({torch.__version__}) is built without CUDA"
        raise Refused(f"device 'cuda' was asked for, but {why}. Use --device cpu, or install a torch with CUDA.")
    return name


def cuda_device_count() -> int:
    """Return how many CUDA devices this process may use, without initialising CUDA."""
    if not torch.backends.cuda.is_built():
        return 0
    # device_count() asks NVML, where is_available() would start the driver, which a fork does not survive.
    return torch.cuda.device_count()


def visible_devices() -> tuple[str, ...]:
    """Return the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them; initialises nothing."""
    count, named = cuda_device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(map(str, range(count))) if named is None else tuple(map(str.strip, named.split(",")))[:count]


def group_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the time-out of a process group, or None for a back end without one (the fake one)."""
    for backend in _timed_backends(group):
        return backend.options._timeout
    return None


def set_group_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Give every back end of a process group the time-out."""
    for backend in _timed_backends(group):
        backend._set_default_timeout(timeout)


def _timed_backends(group: dist.ProcessGroup | None) -> list[Any]:
    """The back ends of a group that have a time-out, each once though gloo may serve two device types."""
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    found: list[Any] = []
    for device in group._device_types:
        backend = group._get_backend(device)
        if hasattr(getattr(backend, "options", None), "_timeout") and backend not in found:
            found.append(backend)
    return found


def _subgroup_options(dp: int, tp: int, timeout: timedelta | None) -> Any:
    """Options for the axes that get groups of their own, which without them have torch's 30 minutes.

    An axis over all ranks reuses the default group, which an override would prevent. With nccl the groups are
    split from the default one, whose options gloo's half would not understand; there the time-out is set
    afterwards.
    """
    if timeout is None or dist.get_backend() != "gloo":
        return None
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    return {axis: options for axis, size in zip(AXES, (dp, tp), strict=True) if size != dp * tp} or None


def _device_of_default_group() -> str | None:
    """The device that the existing default group serves; None for a fake group, which serves any."""
    if dist.get_backend() == "fake":
        return "cpu"
    types = {device.type for device in dist.distributed_c10d._get_default_group()._device_types}
    backend = str(dist.get_backend_config())
    return "cuda" if "cuda" in types and "nccl" in backend else "cpu"


def _local_cuda_index() -> int:
    """The CUDA device of this rank: LOCAL_RANK, or 0 where the launcher shows each rank one device only."""
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), cuda_device_count()
    if local_rank < count:
        return local_rank
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES") and "SLURM_PROCID" in os.environ:
        return 0
    raise Refused(
        f"local rank {local_rank} needs a CUDA device of its own, but this host shows {count}. Start at "
        f"most {count} ranks on this host, or make more devices visible (CUDA_VISIBLE_DEVICES, "
        "--gpus-per-node)."
    )
