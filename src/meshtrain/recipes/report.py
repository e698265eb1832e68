"""What a run says and records around its loop: the introduction, the files in --out, the sample, and what to do next.

Also the one exchange before the loop, in which all ranks agree on the paths of the run.
"""

from __future__ import annotations

import importlib.util
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import nn

from meshtrain import MeshtrainError, Refused, load_pretrained
from meshtrain.data import TokenDataset
from meshtrain.environment import environment
from meshtrain.parallel.objects import gather_values
from meshtrain.recipes.prepare import Run, build, tokens_of
from meshtrain.recipes.resume import course
from meshtrain.recipes.saving import how_to_resume
from meshtrain.state.names import CHECKPOINTS
from meshtrain.train.console import RunConsole, count, duration
from meshtrain.train.generate import generate
from meshtrain.train.loop import Trained
from meshtrain.train.metrics import METRICS, SETTINGS, MetricsFile, StepMetrics, write_settings

LOCK = ".lock"
WINDOW = 64
"""Tokens that the model looks back on while it writes the sample."""
ALONE_BYTES = 2**30
"""A model up to this size writes its sample on the first rank alone."""
TOKENISE_TIMEOUT = timedelta(hours=24)
"""How long ranks wait for the one of their host that tokenises; a rank that dies ends the wait at once."""


def agree(run: Run) -> tuple[Path, Path, Path]:
    """The token file of this host, and the first rank's --out and --export. Collective.

    Ranks that torchrun or Slurm started come here without a token file: the first one of each host makes it.
    """
    place = environment()
    found: str | None = str(run.tokens) if run.tokens is not None else None
    problem: str | None = None
    if found is None and place is not None and place.local_rank == 0:
        try:
            found = str(tokens_of(run.settings.data, run.tokenizer, progress=place.rank == 0))
        except Refused as error:
            problem = str(error)
    # A group of its own, whose time-out is that of a long corpus; no other collective waits so long.
    group = dist.new_group(backend="gloo", timeout=TOKENISE_TIMEOUT)
    everyone = gather_values((socket.gethostname(), found, problem, str(run.out), str(run.export)), group)
    dist.destroy_process_group(group)
    for _, _, theirs, _, _ in everyone:
        if theirs is not None:
            raise Refused(theirs)
    if found is None:
        here = [path for host, path, *_ in everyone if host == socket.gethostname() and path is not None]
        # No rank of this host counts itself as its first: the cache has the file, or this rank makes it.
        found = here[0] if here else str(tokens_of(run.settings.data, run.tokenizer, progress=False))
    return Path(found), Path(everyone[0][3]), Path(everyone[0][4])


def introduce(console: RunConsole, run: Run, dataset: TokenDataset, out: Path) -> None:
    """Say what is about to run."""
    chosen, data, training = run.settings.mesh, run.settings.data, run.settings.training
    switches = [
        name
        for name, on in (
            ("sequence parallel", chosen.sequence_parallel and chosen.tp > 1),
            ("loss parallel", chosen.loss_parallel and chosen.tp > 1),
            ("activation checkpointing", chosen.activation_checkpoint == "full"),
        )
        if on
    ]
    weights = f"weights of {run.settings.model.init_from}" if run.settings.model.init_from else f"seed {training.seed}"
    ranks = chosen.dp * chosen.tp
    console.label("model", f"{run.name}, {count(run.parameters)} parameters, {run.settings.model.dtype}, {weights}")
    console.label(
        "mesh",
        ", ".join([f"dp {chosen.dp} x tp {chosen.tp} = {ranks} rank{'s' * (ranks > 1)} on {run.device}", *switches]),
    )
    console.label(
        "data",
        f"{data.data or 'embedded text'}, {count(len(dataset) * data.seq_len)} tokens; a step takes {data.global_batch} "
        f"sequences of {data.seq_len} = {count(data.global_batch * data.seq_len)}",
    )
    console.label("out", str(out))


@contextmanager
def recording(run: Run, console: RunConsole, out: Path, done: int) -> Iterator[Callable[[StepMetrics], None] | None]:
    """On the first rank: make the files of the run in `out`, and give the function that records and shows a step.

    done: steps made before. Their lines in metrics.jsonl stay.
    """
    if dist.get_rank() != 0:
        yield None
        return
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsFile(out / METRICS, done))
        _write_settings(run, out)
        view = stack.enter_context(console.steps(run.settings.training.steps))

        told = False

        def report(step: StepMetrics) -> None:
            nonlocal told
            try:
                metrics.write(step)
            except OSError as error:
                if run.settings.checkpoint.on_save_error == "stop":
                    raise MeshtrainError(
                        f"{out / METRICS}: step {step.step} could not be recorded ({error.strerror}). The checkpoints are "
                        "untouched: free some space and give the same command again, or go on all the same with "
                        "--on-save-error warn"
                    ) from error
                if not told:
                    console.say(
                        f"{out / METRICS} lacks steps from {step.step} on: {error.strerror}", style="bold yellow"
                    )
                told = True
            view.show(step)

        yield report


@contextmanager
def sole_user(out: Path) -> Iterator[None]:
    """On the first rank: make the run's directory and hold it, until the block or the process ends.

    Raises Refused where another process holds it.
    """
    import fcntl  # absent on Windows

    if dist.is_initialized() and dist.get_rank() != 0:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with open(out / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(
                f"--out {out}: another run is at work there just now ({LOCK} is held). Choose another directory, or wait for it"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


def _write_settings(run: Run, out: Path) -> None:
    chosen = run.settings.mesh
    write_settings(
        out / SETTINGS,
        run.settings.as_json(),
        mesh={"dp": chosen.dp, "tp": chosen.tp, "device": run.device},
        model=run.config.to_hf(),
        plan=run.plan.as_json(),
        course=course(run.settings, run.config, None),
    )


def summarise(console: RunConsole, trained: Trained, steps: int, *, checkpoint: bool) -> None:
    """Say how the loop went. checkpoint: whether an interrupted run can go on from one."""
    if trained.stopped:
        what = "it can go on from its checkpoint" if checkpoint else "exporting the model as it is"
        console.say(f"interrupted after step {trained.steps} of {steps}; {what}", style="bold yellow")
    if trained.steps:
        console.say(
            f"first loss {trained.first_loss:.4f}, last loss {trained.last_loss:.4f}, {trained.steps} steps in "
            f"{duration(trained.seconds)}",
            style="bold",
        )


def continued(run: Run, model: nn.Module, export: Path, prompt: list[int]) -> list[int]:
    """How the trained model continues a prompt; on the first rank at least. Collective.

    A small model is read back from its export by the first rank alone, which is many times faster than all together.
    """
    settings = run.settings
    n, window, seed = settings.output.sample, min(settings.data.seq_len, WINDOW), settings.training.seed
    if run.parameters * run.master_dtype.itemsize > ALONE_BYTES:
        return generate(model, prompt, n, window=window, seed=seed)
    if dist.get_rank() != 0:
        return []
    alone = build(run.config, run.master_dtype, "meta")
    load_pretrained(alone, export)
    return generate(alone.to(run.device), prompt, n, window=window, seed=seed)


def show_sample(console: RunConsole, run: Run, prompt: list[int], text: list[int]) -> None:
    """Show what the model made of a beginning."""
    console.say()
    console.say("a sample (the data's words up to the bar, then the model's)", style="bold")
    console.say(f"{run.tokenizer.decode(prompt)}|{run.tokenizer.decode(text)}")


def what_next(console: RunConsole, run: Run, out: Path, export: Path | None) -> None:
    """Say what there is now, and what can be done with it. export: None for a run that was interrupted."""
    chosen = run.settings.mesh
    python = Path(sys.executable)
    program = f"{python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else 'python'} -m meshtrain.recipes.llama"
    console.say()
    if export is None:
        console.label(
            "model", f"{out / CHECKPOINTS}   (each opens in transformers and whatever else reads safetensors)"
        )
        console.say(
            "to go on, on this mesh or any other, give the same command and the directory of the run:", style="bold"
        )
        console.say(f"    {how_to_resume(program, run, out)}")
        return
    console.label("model", f"{export}   (opens in transformers and whatever else reads safetensors)")
    console.label("metrics", f"{out / METRICS}   (one JSON object a step; the settings are in {SETTINGS} beside it)")
    console.say("what to do next", style="bold")
    missing = "" if importlib.util.find_spec("transformers") else "   (needs: pip install transformers)"
    console.say(f"  use the model in Python:{missing}")
    console.say("    from transformers import AutoModelForCausalLM, AutoTokenizer")
    console.say(
        f"    model, tokenizer = (kind.from_pretrained({str(export)!r}) for kind in (AutoModelForCausalLM, AutoTokenizer))"
    )
    data = run.settings.data
    same = {
        "dp": chosen.dp,
        "tp": chosen.tp,
        "data": data.data,
        "seq-len": data.seq_len,
        "global-batch": data.global_batch,
    }
    flags = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in same.items() if value is not None)
    console.say("  train it further, on this mesh or any other (a new optimizer, so with a warm-up and a lower rate):")
    console.say(f"    {program} {flags} --lr {run.settings.training.lr / 10:g} --init-from {shlex.quote(str(export))}")
