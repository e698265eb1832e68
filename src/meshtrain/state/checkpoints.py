"""The folder of a run's checkpoints: names, the newest complete one, `latest`, and which old ones go. No tensors here."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from meshtrain.errors import Damaged, Refused
from meshtrain.state.checkpoint import Checkpoint, inspect_checkpoint
from meshtrain.state.folder import read_json
from meshtrain.state.manifest import MANIFEST
from meshtrain.state.names import LATEST, LEFT, REMOVED, STATE, checkpoints_in
from meshtrain.state.publish import fsync_directory, write_file


def move_latest(folder: Path, name: str) -> None:
    """Have `latest` name a checkpoint, durably. It is a help for people: readers look for the newest themselves."""
    temporary = folder / f".{LATEST}-{secrets.token_hex(8)}"
    try:
        write_file(temporary, f"{name}\n".encode())
        os.rename(temporary, folder / LATEST)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(folder)


def prune(folder: Path, keep: int | None, milestone: int = 0, protect: int | None = None) -> list[Path]:
    """Remove all but the newest `keep` checkpoints; return the paths of those that went.

    keep: None keeps all. milestone: those at its multiples stay (0: none do), and those that were saved as one. protect: the step of the newest complete
    one, which stays whatever else is there, and from which the newest are counted.
    A name disappears before its content, so that no half-removed checkpoint is ever found.
    """
    if keep is None:
        return []
    found = [(step, path) for step, path in checkpoints_in(folder) if protect is None or step <= protect]
    removed = []
    for step, path in found[max(1, keep) :]:
        if (milestone and step % milestone == 0) or _is_milestone(path):
            continue
        aside = folder / f".{path.name}.old-{secrets.token_hex(8)}"
        os.rename(path, aside)
        removed.append(path)
        shutil.rmtree(aside, ignore_errors=True)
    if removed:
        fsync_directory(folder)
    return removed


def _is_milestone(path: Path) -> bool:
    """Whether a checkpoint was to stay for good when it was written, whatever is asked for now."""
    try:
        return read_json(path / STATE).get("milestone") is True
    except (OSError, Refused):
        return False


def sweep(folder: Path, removals_only: bool = False) -> None:
    """Remove what removals that were killed or failed have left, and saves too, the latter only while nobody else saves to
    this folder. What cannot be removed now stays for the next time."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if (REMOVED if removals_only else LEFT).fullmatch(name):
                path = folder / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def check_folder(folder: Path) -> None:
    """Raise Refused for a place that cannot be a folder of checkpoints."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise Refused(f"{folder}: exists and is not a directory. Move it away, or choose another place with --out")


def newest_complete(folder: Path, before: int | None = None) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest checkpoint that is complete by its manifest, headers and JSON, and why newer ones were skipped.

    before: only those of fewer steps. Raises Refused for one that another version wrote, which is no reason to go back.
    """
    skipped: list[tuple[Path, str]] = []
    for step, path in checkpoints_in(folder):
        if before is not None and step >= before:
            continue
        try:
            found = inspect_checkpoint(path)
            if found.step != step:
                raise Damaged(f"{path}: was written after step {found.step}; somebody renamed it")
            return found, skipped
        except Damaged as error:
            skipped.append((path, str(error)))
        except Refused as error:
            if os.path.lexists(path / MANIFEST):
                raise
            skipped.append((path, str(error)))
    return None, skipped
