"""Going on with a run: what is in its directory, where it goes on from, and which settings must be what they were.

What is found before the ranks start (`find_run`) is only a look: the ranks take the newest checkpoint that is intact
when they load it (`resume`), which also holds for ranks that are started again in the middle of a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from meshtrain.errors import Damaged, Refused
from meshtrain.flags import nearest
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.parallel.objects import gather_values
from meshtrain.recipes.settings import Settings
from meshtrain.state.checkpoint import Checkpoint, inspect_checkpoint
from meshtrain.state.checkpoints import check_folder, newest_complete
from meshtrain.state.folder import read_json
from meshtrain.state.names import CHECKPOINTS, OTHER, checkpoints_in
from meshtrain.state.restore import load_checkpoint
from meshtrain.train.metrics import METRICS, SETTINGS

KEPT = (
    "model", "init-from", "dtype", "data", "tokenizer", "seq-len", "global-batch", "steps", "lr", "warmup", "schedule",
    "weight-decay", "max-norm", "seed",
)  # fmt: skip
"""Settings that decide the course of a run. The others (mesh, micro-batch, recomputation ...) change it by rounding only."""

WORDS = ("auto", "never")
"""What --resume says besides a path."""


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    step: int = 0
    tokens: int = 0
    samples: int = 0
    """Sequences trained on so far, over all ranks."""
    checkpoint: Path | None = None
    course: Mapping[str, Any] = field(default_factory=dict)
    """What decided the course of the run that is gone on with."""
    skipped: tuple[str, ...] = ()
    """Why newer checkpoints were not taken."""


@dataclass(frozen=True)
class Found:
    """A look at --out and --resume before anything starts."""

    state: Literal["new", "begun", "resumable", "finished"]
    checkpoint: Checkpoint | None = None


def course(settings: Settings, config: LlamaConfig, data: Mapping[str, str] | None) -> dict[str, Any]:
    """The settings in KEPT as JSON, by what they mean rather than how they were written. data: hashes of it, once known."""
    flat = settings.as_json()
    known = data or {}
    return {
        **{name: flat[name] for name in KEPT},
        "model": {name: value for name, value in config.to_hf().items() if name not in ("torch_dtype", "dtype")},
        "init-from": os.path.realpath(flat["init-from"]) if flat["init-from"] is not None else None,
        "warmup": settings.training.warmup_steps,
        "data": known.get("content"),
        "tokenizer": known.get("tokenizer"),
    }


def check_course(before: Mapping[str, Any], now: Mapping[str, Any], settings: Settings, where: Path) -> None:
    """Raise Refused for settings that differ from those of the run that is gone on with, unless --allow-change names them."""
    allowed = allowed_changes(settings)
    changed: dict[str, str] = {}
    for name in KEPT:
        old, new = before.get(name), now.get(name)
        if name in ("data", "tokenizer") and (old is None or new is None):
            continue  # not known yet: the ranks look again
        if old == new or name in allowed:
            continue
        if name == "warmup" and "steps" in allowed and settings.training.warmup is None:
            continue  # it follows from --steps
        if name == "model":
            ours, theirs = dict(new or {}), dict(old or {})
            key = min(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
            changed[name] = f"its {key} was {theirs.get(key)!r} and is {ours.get(key)!r}"
        elif name in ("data", "tokenizer"):
            changed[name] = "it has other content than before"
        else:
            changed[name] = f"it was {old!r} and is {new!r}"
    if changed:
        raise Refused(
            f"{'; '.join(f'--{name}: {what}' for name, what in changed.items())}, which would alter the course of the run in {where}. "
            f"Give it as it was, name it in --allow-change {','.join(changed)} to go on all the same, or choose another --out"
        )


def allowed_changes(settings: Settings) -> set[str]:
    """The names in --allow-change. Raises Refused for one that is no setting that matters."""
    text = settings.checkpoint.allow_change
    names = [name.strip().removeprefix("--").replace("_", "-") for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in KEPT:
            raise Refused(
                f"--allow-change {name}: no setting of that name is held to what it was{nearest(name, KEPT) or '.'} They are "
                f"{', '.join(KEPT)}"
            )
    return set(names)


def find_run(settings: Settings, config: LlamaConfig, out: Path, export: Path) -> Found:
    """What --out and --resume hold. Raises Refused for a run that may not, or cannot, be gone on with."""
    allowed_changes(settings)
    named = settings.checkpoint.resume
    check_folder(out / CHECKPOINTS)
    holds = os.path.lexists(out / METRICS) or bool(checkpoints_in(out / CHECKPOINTS))
    if holds and named == "never":
        raise Refused(
            f"--out {out}: holds a run already, and --resume never forbids to go on with it. Choose another directory, or remove "
            "this one"
        )
    found, skipped = newest_complete(out / CHECKPOINTS)
    if found is None and skipped:
        raise Refused(
            f"--out {out}: none of its {len(skipped)} checkpoint(s) is intact. The newest: {skipped[0][1]}. Choose another --out"
        )
    if named not in WORDS:
        if holds and not _begun_from(named, out):
            _check_newest(named, found, out)
        found = found or _named(named)
    if found is not None:
        _check(found, settings, config)
        finished = found.step >= settings.training.steps and export.is_dir() and any(export.iterdir())
        return Found("finished" if finished else "resumable", found)
    if not holds:
        return Found("new")
    if export.is_dir() and any(export.iterdir()):
        raise Refused(
            f"--out {out}: holds a run already that left no checkpoint to go on from, and nothing is overwritten. Choose "
            "another directory, or remove this one"
        )
    _check_begun(settings, config, out)
    return Found("begun")


def resume(settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, out: Path) -> Start:
    """Load the newest intact checkpoint of the run in `out`, or of --resume, and return where it was. Collective.

    Raises Damaged when there are checkpoints and none is intact.
    """
    skipped: list[str] = []
    before: int | None = None
    while (choice := _newest_for_all(settings.checkpoint.resume, out, before, skipped)) is not None:
        path, before = choice
        try:
            found = load_checkpoint(model, optimizer, path)
        except Damaged as error:
            skipped.append(str(error))
            continue
        run, course_then = found.run, found.run.get("course")
        counts = [run.get(name) for name in ("tokens", "samples")]
        if not isinstance(course_then, Mapping) or not all(type(count) is int and count >= 0 for count in counts):
            raise Refused(
                f"{path}: does not say how far its run had come (run.tokens, run.samples, run.course); {OTHER}"
            )
        return Start(found.step, run["tokens"], run["samples"], path, dict(course_then), tuple(skipped))
    if skipped:
        raise Damaged(f"none of {len(skipped)} checkpoint(s) is intact. The newest: {skipped[0]}")
    return Start()


def _newest_for_all(named: str, out: Path, before: int | None, skipped: list[str]) -> tuple[Path, int] | None:
    """The path and step that rank 0 chooses, so that no two ranks go on from different ones."""
    choice: tuple[str, int] | None = None
    why: list[str] = []
    if torch.distributed.get_rank() == 0:
        # What this run has saved since goes before what it began with, also when its ranks are started again.
        if named not in WORDS and not checkpoints_in(out / CHECKPOINTS):
            found, passed = _newest_of(named, before)
        else:
            found, passed = newest_complete(out / CHECKPOINTS, before)
        choice = (str(found.path), found.step) if found is not None else None
        why = [text for _, text in passed]
    choice, why = gather_values((choice, why))[0]
    skipped.extend(why)
    return (Path(choice[0]), choice[1]) if choice is not None else None


def _named(given: str) -> Checkpoint:
    """The checkpoint that --resume names: itself, or the newest of a run. Raises Refused."""
    folder = Path(given)
    if not given or not folder.is_dir():
        raise Refused(f"--resume {given}: no such directory. Give auto, never, a checkpoint, or the directory of a run")
    found, skipped = _newest_of(given)
    if found is None:
        raise Refused(f"--resume {given}: holds no intact checkpoint. The newest: {skipped[0][1]}")
    return found


def _newest_of(given: str, before: int | None = None) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest intact checkpoint of fewer than `before` steps in a run, in its checkpoints/, or in a checkpoint itself."""
    folder = Path(given)
    for place in (folder / CHECKPOINTS, folder):
        if checkpoints_in(place):
            return newest_complete(place, before)
    try:
        found = inspect_checkpoint(folder)
    except Damaged as error:
        return None, [(folder, str(error))]
    return (found if before is None or found.step < before else None), []


def _begun_from(named: str, out: Path) -> bool:
    """Whether the run in `out` was begun with this --resume, so that the same command goes on with it."""
    try:
        settings = read_json(out / SETTINGS).get("settings")
    except (OSError, Refused):
        return False
    return isinstance(settings, Mapping) and settings.get("resume") == named


def _check_newest(named: str, newest: Checkpoint | None, out: Path) -> None:
    """Raise Refused unless --resume names what the run in `out` goes on from anyway."""
    path = os.path.realpath(_named(named).path)
    if newest is not None and path == os.path.realpath(newest.path):
        return
    if newest is not None and os.path.dirname(path) == os.path.realpath(newest.path.parent):
        raise Refused(
            f"--resume {named}: --out {out} holds a newer one, {newest.path.name}. Leave --resume out to go on from that, or choose "
            "another --out for what follows the older one"
        )
    raise Refused(
        f"--resume {named}: is no checkpoint of the run that --out {out} holds. Choose another --out for what follows it"
    )


def _check(found: Checkpoint, settings: Settings, config: LlamaConfig) -> None:
    before = found.run.get("course")
    if not isinstance(before, Mapping):
        raise Refused(
            f"{found.path}: does not say which settings its run had, so it was not written by this program. Start from its "
            "weights with --init-from"
        )
    check_course(before, course(settings, config, None), settings, found.path)


def _check_begun(settings: Settings, config: LlamaConfig, out: Path) -> None:
    if (out / SETTINGS).is_file():
        before = read_json(out / SETTINGS).get("course")
        if isinstance(before, Mapping):
            check_course(before, course(settings, config, None), settings, out)
