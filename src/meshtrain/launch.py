"""One command -> N ranks on this host, by fork; or join the ranks that torchrun or Slurm started.

Checks and prepares. Watching the ranks started here is `meshtrain.supervise`, starting them again after a failure
`meshtrain.restarts`; what a rank does is `meshtrain.ranks`; what an outside launcher said is `meshtrain.environment`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshtrain.environment import RankEnvironment, environment, threads_per_rank
from meshtrain.errors import Refused
from meshtrain.ranks import STATUS_INTERRUPTED, Work, describe, run_rank
from meshtrain.restarts import Restarts, run_generations
from meshtrain.signals import ASKING, Interruptions, as_sigint, handled
from meshtrain.supervise import place_on_this_host

DEFAULT_TIMEOUT_S = 300.0
INTERRUPT_GRACE_S = 10.0


def run(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    *,
    world_size: int,
    device: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    grace_s: float = INTERRUPT_GRACE_S,
    restarts: Restarts | None = None,
) -> int:
    """Call `fn(*args)` on every rank: on those that torchrun or Slurm started, else on ranks started here.

    Returns the exit status: see `launch`. Under an outside launcher it is this rank's own, and its traceback
    or message has been printed to stderr; SIGTERM and SIGUSR1 then reach `fn` as SIGINT does (KeyboardInterrupt, or
    its own handler), and MESHTRAIN_RESTART is what torchrun or Slurm counts.

    Raises Refused when an outside launcher started another number of ranks, told this one nonsense, or would have to
    do the restarts.
    """
    place = environment()
    if place is None:
        return launch(
            fn, args, world_size=world_size, device=device, timeout_s=timeout_s, grace_s=grace_s, restarts=restarts
        )
    if place.world_size != world_size:
        raise Refused(
            f"{place.launcher} started {place.world_size} ranks, but dp x tp needs {world_size}. Start "
            f"{world_size} ranks, or choose dp and tp whose product is {place.world_size}; run without "
            f"{place.launcher} (unset RANK, WORLD_SIZE and LOCAL_RANK, under Slurm SLURM_PROCID) to let "
            "this command start its own ranks."
        )
    if restarts is not None and restarts.limit:
        way = "torchrun --max-restarts" if place.launcher == "torchrun" else "sbatch --requeue"
        raise Refused(
            f"{restarts.limit} restarts were asked for, but {place.launcher} started the ranks and must start them "
            f"again: use {way}, and leave out --max-restarts and --elastic."
        )
    return _join(place, Work(fn, args, device, timeout_s))


def launch(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    *,
    world_size: int,
    device: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    grace_s: float = INTERRUPT_GRACE_S,
    restarts: Restarts | None = None,
) -> int:
    """Start `world_size` ranks on this host, call `fn(*args)` on each in one process group, and wait.

    device: "cpu" or "cuda" (one device per rank). timeout_s: seconds, of every collective and of meeting.
    grace_s: seconds that the ranks have to end by themselves after an interruption.

    restarts: what to do after a failure; None ends.

    Returns 0 when all ranks ended well, and otherwise, with the first failure shown once on stderr: 1 when a rank
    raised or was killed, 2 when it raised Refused, its code when it raised SystemExit; 3 when restarts bring the run no
    further. What `fn` returns is dropped. No process, port or file of the run is left when this returns; only a process
    that made a session of its own is left alone.

    130 after Ctrl-C, SIGTERM, SIGHUP or SIGUSR1, which the ranks get as one SIGINT (KeyboardInterrupt). A second SIGINT
    or SIGTERM kills them at once; a rank that has not ended 10 s after others have, or is stopped, is not waited for.

    Call it before this process has used CUDA; ranks are forked. Raises Refused when `world_size` is below 1, the
    device is absent or too few, the time-out is not from 1 to 10**9, or OMP_NUM_THREADS is not a number.
    """
    try:
        preload()
    except KeyboardInterrupt:
        return STATUS_INTERRUPTED
    _check(world_size, device, timeout_s)
    _release_openmp_threads()
    interruptions = Interruptions()
    with handled(ASKING, interruptions.note):
        work = Work(fn, args, device, timeout_s)
        return run_generations(work, world_size, grace_s, restarts, interruptions)


def preload(*modules: str) -> None:
    """Import what every rank needs, which takes seconds, once; forked ranks then start in milliseconds.

    modules: names of further modules. Called before torch is imported anywhere, it is a fifth faster.
    """
    first, collecting = "torch" not in sys.modules, gc.isenabled()
    gc.disable()  # the collector would walk the hundreds of thousands of imported objects again and again
    try:
        # torch says at import that numpy, which it does not require, is not there; nothing here uses it.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import torch

        # A fork keeps no OpenMP threads, and a rank that expects its parent's waits for ever: so start none here.
        torch.set_num_threads(1)
        import torch._dynamo
        import torch.distributed.fsdp
        import torch.distributed.tensor.parallel

        import meshtrain.mesh  # noqa: F401

        for name in modules:
            importlib.import_module(name)
        if first:
            # Modules stay for good. In a program that has run for a while, garbage would stay with them.
            gc.freeze()
    finally:
        if collecting:
            gc.enable()


def _check(world_size: int, device: str, timeout_s: float) -> None:
    import torch

    from meshtrain.mesh import check_timeout, cuda_device_count, pick_device

    if world_size < 1:
        raise Refused(f"{world_size} ranks were asked for: there must be 1 or more.")
    check_timeout(timeout_s)
    threads_per_rank(place_on_this_host(0, world_size, 0))
    if pick_device(device) == "cuda":
        if world_size > cuda_device_count():
            raise Refused(
                f"{world_size} ranks need a CUDA device each, but this host shows {cuda_device_count()}. "
                "Choose smaller dp and tp, make more devices visible (CUDA_VISIBLE_DEVICES), start ranks "
                "on several hosts with torchrun or srun, or use --device cpu."
            )
        if torch.cuda.is_initialized():
            raise Refused(
                "this process has already initialised CUDA, which a fork does not survive. Start the ranks "
                "before the first CUDA call, or start them with torchrun."
            )


def _join(place: RankEnvironment, work: Work) -> int:
    """Be one rank of a job that somebody else started and will end."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or "0"
    # torchrun and Slurm stop a rank with SIGTERM, after a warning with SIGUSR1: the function sees one kind of
    # interruption, and a rank that is already ending is not interrupted by what follows the warning.
    with handled((signal.SIGTERM, signal.SIGUSR1), as_sigint(Interruptions())):
        try:
            preload()
            outcome = run_rank(place, work, restart=restart)
        except KeyboardInterrupt:
            return STATUS_INTERRUPTED
    told = outcome.kind in ("error", "refused") or (outcome.kind == "exit" and outcome.text)
    if told:
        print(describe(outcome, place.world_size), file=sys.stderr, flush=True)
    return outcome.status


def _release_openmp_threads() -> None:
    """End OpenMP's threads in this process, if any: ranks forked from it would wait for them for ever."""
    with suppress(OSError, AttributeError):
        maps = Path("/proc/self/maps").read_text()
        for library in set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)[\w.-]*\.so\S*", maps)):
            omp_pause_hard = 2
            ctypes.CDLL(library).omp_pause_resource_all(omp_pause_hard)
