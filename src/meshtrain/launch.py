"""One command -> N ranks on this host, by fork; or join the ranks that torchrun or Slurm started.

Checks and prepares. Watching the ranks started here is `meshtrain.supervise`; what a rank does is
`meshtrain.ranks`; what an outside launcher said is `meshtrain.environment`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshtrain.environment import RankEnvironment, environment, threads_per_rank
from meshtrain.errors import Refused
from meshtrain.ranks import STATUS_INTERRUPTED, Work, describe, run_rank
from meshtrain.supervise import Job, count_interrupts, place_on_this_host

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
) -> int:
    """Call `fn(*args)` on every rank: on those that torchrun or Slurm started, else on ranks started here.

    Returns the exit status: see `launch`. Under an outside launcher it is this rank's own, and its traceback
    or message has been printed to stderr; SIGTERM then reaches `fn` as KeyboardInterrupt, as SIGINT does.

    Raises Refused when an outside launcher started another number of ranks, or told this one nonsense.
    """
    place = environment()
    if place is None:
        return launch(fn, args, world_size=world_size, device=device, timeout_s=timeout_s, grace_s=grace_s)
    if place.world_size != world_size:
        raise Refused(
            f"{place.launcher} started {place.world_size} ranks, but dp x tp needs {world_size}. Start "
            f"{world_size} ranks, or choose dp and tp whose product is {place.world_size}; run without "
            f"{place.launcher} (unset RANK, WORLD_SIZE and LOCAL_RANK, under Slurm SLURM_PROCID) to let "
            "this command start its own ranks."
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
) -> int:
    """Start `world_size` ranks on this host, call `fn(*args)` on each in one process group, and wait.

    device: "cpu" or "cuda" (one device per rank). timeout_s: seconds, of every collective and of meeting.
    grace_s: seconds that the ranks have to end by themselves after an interruption.

    Returns 0 when all ranks ended well, and otherwise, with the first failure shown once on stderr: 1 when a
    rank raised or was killed, 2 when it raised Refused, its code when it raised SystemExit. 130 after Ctrl-C,
    SIGTERM or SIGHUP, which the ranks get as one SIGINT (KeyboardInterrupt); a second one kills them at once.
    What `fn` returns is dropped. No process, port or file of the run is left when this returns.

    Call it before this process has used CUDA; ranks are forked. Raises Refused when `world_size` is below 1,
    the device is absent or too few, or OMP_NUM_THREADS is not a number.
    """
    try:
        preload()
    except KeyboardInterrupt:
        return STATUS_INTERRUPTED
    _check(world_size, device, timeout_s)
    _release_openmp_threads()
    job = Job(world_size, grace_s)
    with count_interrupts(job):
        return job.run(Work(fn, args, device, timeout_s))


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

    from meshtrain.mesh import cuda_device_count, pick_device

    if world_size < 1:
        raise Refused(f"{world_size} ranks were asked for: there must be 1 or more.")
    if not timeout_s > 0:
        raise Refused(f"the time-out is {timeout_s!r} seconds: it must be above 0.")
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
    in_main = threading.current_thread() is threading.main_thread()
    # torchrun and Slurm stop a rank with SIGTERM only; the function should see one kind of interruption.
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)) if in_main else None
    try:
        preload()
        outcome = run_rank(place, work)
    except KeyboardInterrupt:
        return STATUS_INTERRUPTED
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
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
