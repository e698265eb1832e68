"""Checkpoints of a training run: what is recorded in them, and beginning from one."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshtrain import initialise, load_pretrained
from meshtrain.data import open_tokens
from meshtrain.parallel.materialise import allocate
from meshtrain.recipes.prepare import Run
from meshtrain.recipes.resume import Start, check_course, course, resume
from meshtrain.recipes.settings import Settings
from meshtrain.state.names import CHECKPOINTS
from meshtrain.state.saver import Saved, Saver
from meshtrain.train.console import RunConsole
from meshtrain.train.saving import Saving


def begin(
    run: Run,
    model: nn.Module,
    out: Path,
    tokens: Path,
    console: RunConsole,
    make_optimizer: Callable[[], torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, Start]:
    """Give model and optimizer their values: of the newest checkpoint, else of --init-from, else from the seed. Collective."""
    settings = run.settings
    allocate(model)
    optimizer = make_optimizer()
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    start = resume(settings, model, optimizer, out)
    if start.checkpoint is None:
        if settings.model.init_from is not None:
            load_pretrained(model, settings.model.init_from)
        else:
            initialise(model, seed=settings.training.seed)
        return optimizer, start
    check_course(start.course, course(settings, run.config, _hashes(tokens)), settings, start.checkpoint)
    for group, given in zip(optimizer.param_groups, options):
        group.update(given)  # as before, but for what --allow-change admits
    for why in start.skipped:
        console.say(f"skipped a checkpoint: {why}", style="bold yellow")
    console.label("resume", f"after step {start.step} from {start.checkpoint}")
    return optimizer, start


@contextmanager
def saving_of(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    out: Path,
    tokens: Path,
    start: Start,
    console: RunConsole,
) -> Iterator[Saving | None]:
    """What saves while the loop runs; None where checkpoints are switched off. Waits for the last one at the end."""
    chosen, training = run.settings.checkpoint, run.settings.training
    if not chosen.save_every and not chosen.save_minutes:
        yield None
        return
    batch, now = run.settings.data.global_batch, course(run.settings, run.config, _hashes(tokens))

    def record(step: int, seen: int) -> Mapping[str, Any]:
        return {
            "tokens": seen,
            "samples": start.samples + (step - start.step) * batch,
            "seed": training.seed,
            "schedule": {
                "kind": training.schedule, "lr": training.lr, "warmup": training.warmup_steps, "steps": training.steps,
            },
            "course": now,
            "settings": run.settings.as_json(),
        }  # fmt: skip

    def saved(what: Saved) -> None:
        console.say(
            f"saved {what.path.name}: stood still for {1000 * what.stall_seconds:.0f} ms, safe after {what.seconds:.2f} s"
            + (f"; removed {', '.join(path.name for path in what.removed)}" if what.removed else "")
        )

    def warn(error: Exception) -> None:
        console.say(f"a checkpoint could not be written, and the run goes on without it: {error}", style="bold yellow")

    with Saver(
        out / CHECKPOINTS,
        model,
        optimizer,
        keep=chosen.keep or None,
        milestone=chosen.keep_every,
        tokenizer=run.tokenizer,
        generation_config=dict(run.generation),
        on_saved=saved if dist.get_rank() == 0 else None,
    ) as saver:
        saving = Saving(
            saver,
            record,
            every=chosen.save_every,
            minutes=chosen.save_minutes,
            on_failure=warn if chosen.on_save_error == "warn" else None,
        )
        yield saving
        saving.settle()


def how_to_resume(program: str, run: Run, out: Path) -> str:
    """The command that goes on with a run."""
    defaults = dict(Settings().items())
    given = {name: value for name, value in run.settings.items() if value != defaults[name] and name != "out"}
    flags = " ".join(
        f"--{'' if value is not False else 'no-'}{name}"
        + ("" if isinstance(value, bool) else f" {shlex.quote(str(value))}")
        for name, value in given.items()
        if value is not None
    )
    return f"{program} {flags} --out {shlex.quote(str(out))}"


def _hashes(tokens: Path) -> dict[str, str]:
    header = open_tokens(tokens).header
    return {"content": header.content_sha256, "tokenizer": header.tokenizer_fingerprint}
